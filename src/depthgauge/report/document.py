"""The result document, read and checked before anything is drawn from it."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from depthgauge.errors import InputError

SCHEMA = "depthgauge.gauge/1"
_FAMILY = SCHEMA.rpartition("/")[0]


class ResultError(InputError):
    """A result document that is damaged, foreign, or of another schema; the message names the place."""


@dataclass(frozen=True)
class Kind:
    """What a value must be, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXT_OR_NULL = Kind("a text or null", lambda value: value is None or isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number from 0", _is_count)
COUNT_OR_NULL = Kind("a whole number or null", lambda value: value is None or _is_count(value))
NUMBER = Kind("a finite number", _is_number)
MEASURED = Kind("a finite number or null", lambda value: value is None or _is_number(value))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))

HEAD_MEASURES = (
    "tv_mean", "tv_max", "entropy", "score_range", "balance", "contraction", "contraction_bound", "eta", "value_col",
    "l1", "dong_beta",
)  # fmt: skip
CENTERS = ("midrange", "mean")
NORMS = ("max", "frobenius", "composite")


@dataclass(frozen=True)
class NullOr:
    """A shape, or null."""

    shape: Any


# Shapes: a Kind, {key: shape} for an object with at least these keys ("key?" may be missing), [shape] for a list,
# NullOr(shape) for what may be null.
_RESIDUAL = {center: {norm: {"ratio": MEASURED, "ratio_std": MEASURED} for norm in NORMS} for center in CENTERS}
_LAYER = {
    "index": COUNT,
    "residual": _RESIDUAL,
    "heads": [{"index": COUNT, **dict.fromkeys(HEAD_MEASURES, MEASURED)}],
}
_NETWORK = {
    "layers": COUNT, "heads": [COUNT], "dim": COUNT, "key_dim": [COUNT], "mlp": [COUNT_OR_NULL], "scale": NUMBER,
    "skip": FLAG, "causal": FLAG, "activation": TEXT, "norm": TEXT, "mlp_skip": FLAG, "eta": MEASURED, "dtype": TEXT,
}  # fmt: skip
_REFUSED = {"method": TEXT, "refused": TEXT}
_COLLAPSE = {
    "method": TEXT, "layers_after": COUNT, "upper": MEASURED, "lower": MEASURED, "ratio": MEASURED, "methods": [TEXT],
    "notes": [TEXT], "share": [[MEASURED]], "lost_at": COUNT_OR_NULL, "seconds": MEASURED, "attack_seconds": MEASURED,
}  # fmt: skip
_DEPTH = {
    "tolerance": NUMBER, "certified": FLAG, "layers": COUNT, "kept": [COUNT], "folded": [[COUNT]], "error": MEASURED,
}  # fmt: skip
_PRINTED = {"printed_bound": MEASURED, "printed_log10": MEASURED, "printed_applies": FLAG}
_INTERVAL = {"loss": NUMBER, "low": MEASURED, "high": MEASURED}
_MODEL = {
    "architecture": TEXT, "objective": TEXT, "layers": COUNT, "heads": COUNT, "kv_heads": COUNT, "dim": COUNT,
    "parameters": COUNT, "dtype": TEXT,
}  # fmt: skip
_WHAT_IFS = ("block", "attention", "mlp", "uniform", "parallel")
_SCORES = ("block_influence", "angular_distance", "attention_cosine", "mlp_cosine")
_MODEL_LAYER = {
    "index": COUNT,
    "residual?": _RESIDUAL,
    "heads?": [{"index": COUNT, "static?": OBJECT, "static_best?": TEXT}],
    "what_if?": {f"{kind}?": _INTERVAL for kind in _WHAT_IFS},
    "scores?": {f"{score}?": MEASURED for score in _SCORES},
    "fast?": NullOr({"line": TEXT}),
}
_ANY_SUBJECT = {"kind": TEXT, "name": TEXT, "verdict?": TEXT, "layers": [{"index": COUNT}]}
_SUBJECTS = {
    "network": {
        **_ANY_SUBJECT, "verdict": TEXT, "network": _NETWORK, "radius": NUMBER, "input": {"residual": _RESIDUAL},
        "layers": [_LAYER], "depth": [_DEPTH], "printed": _PRINTED,
    },
    "model": {
        **_ANY_SUBJECT, "input?": {"residual?": _RESIDUAL}, "layers": [_MODEL_LAYER], "model?": _MODEL,
        "text?": NullOr({"source": TEXT, "windows": COUNT, "window": COUNT}),
        "baseline?": NullOr({"loss": NUMBER}), "regime?": NullOr({"eta": NUMBER, "corrected_orders": NUMBER}),
        "scores?": [{"score": TEXT, "what_if": TEXT, "spearman": MEASURED, "layers": COUNT}], "notes?": [TEXT],
        "depth?": [{
            "increase": NUMBER, "layers": COUNT, "removed": [COUNT], "steps": [{"removed": COUNT, **_INTERVAL}],
        }],
    },
}  # fmt: skip
_SETTINGS = {
    "target?": TEXT_OR_NULL, "input?": TEXT_OR_NULL, "samples?": COUNT_OR_NULL, "tokens?": COUNT_OR_NULL,
    "radius?": MEASURED, "seed?": COUNT_OR_NULL, "in_memory?": FLAG,
}  # fmt: skip
_DOCUMENT = {"schema": TEXT, "version": TEXT, "settings": _SETTINGS, "subjects": [OBJECT]}


def read_result(path: str | Path) -> dict[str, Any]:
    """Read and check a result document, or say in a sentence why it is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ResultError(f"{path} is not a result document: it is not text; {_ADVICE}") from error
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or error}; {_ADVICE}") from error
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} is not a result document: not JSON ({error}); {_ADVICE}") from error
    return check_result(document, str(path))


_ADVICE = "give the file that `depthgauge gauge --out FILE` wrote"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def check_result(document: Any, name: str = "the result") -> dict[str, Any]:
    """Return the document if it is complete and of our schema; keys it has beyond that are left alone."""
    if not isinstance(document, dict):
        raise ResultError(f"{name} is not a result document: expected an object, got {_named(document)}; {_ADVICE}")
    schema = document.get("schema")
    if schema != SCHEMA:
        family, _, number = schema.rpartition("/") if isinstance(schema, str) else ("", "", "")
        if family == _FAMILY and number.isdecimal():
            raise ResultError(
                f"{name} has the schema {schema!r} of another version of depthgauge; this one reads {SCHEMA!r}: "
                "gauge again, or use the version that wrote it"
            )
        given = "no schema" if schema is None else f"the schema {_named(schema)}"
        raise ResultError(f"{name} is not a result document: it has {given}, expected {SCHEMA!r}; {_ADVICE}")
    _require(document, _DOCUMENT, name, "")
    if not document["subjects"]:
        raise ResultError(f"{name} has no subjects, so there is nothing to show; {_ADVICE}")
    for index, subject in enumerate(document["subjects"]):
        place = f"subjects[{index}]"
        kind = subject.get("kind")
        if not isinstance(kind, str) or kind not in _SUBJECTS:
            raise ResultError(f"{name}: {place}.kind must be {' or '.join(_SUBJECTS)}, got {_named(kind)}; {_ADVICE}")
        _require(subject, _SUBJECTS[kind], name, place)
        if kind == "network":
            _require_sandwiches(subject, name, place)
    return document


def _require_sandwiches(subject: dict[str, Any], name: str, place: str) -> None:
    """Each way of collapsing is either refused or has its bounds."""
    _require(subject, {"collapse": [OBJECT]}, name, place)
    for index, entry in enumerate(subject["collapse"]):
        _require(entry, _REFUSED if "refused" in entry else _COLLAPSE, name, f"{place}.collapse[{index}]")


def _require(value: Any, shape: Any, name: str, place: str) -> None:
    """Compare a value with a shape, key by key; the first difference is the error."""
    if isinstance(shape, Kind):
        if not shape.fits(value):
            raise ResultError(f"{name}: {place} must be {shape.words}, got {_named(value)}; {_ADVICE}")
    elif isinstance(shape, NullOr):
        if value is not None:
            _require(value, shape.shape, name, place)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ResultError(f"{name}: {place} must be a list, got {_named(value)}; {_ADVICE}")
        for index, entry in enumerate(value):
            _require(entry, shape[0], name, f"{place}[{index}]")
    else:
        _require_keys(value, shape, name, place)


def _require_keys(value: Any, shape: Mapping[str, Any], name: str, place: str) -> None:
    if not isinstance(value, dict):
        raise ResultError(f"{name}: {place} must be an object, got {_named(value)}; {_ADVICE}")
    for key, inner in shape.items():
        plain = key.removesuffix("?")
        there = f"{place}.{plain}" if place else plain
        if plain in value:
            _require(value[plain], inner, name, there)
        elif plain == key:
            raise ResultError(f"{name}: {there} is missing; {_ADVICE}")


def _named(value: Any) -> str:
    """A value in an error, short whatever it is."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
