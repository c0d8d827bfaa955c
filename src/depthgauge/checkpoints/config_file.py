"""Refuse checkpoints by their config.json, or by the header of their GGUF file, before any library is imported.

Importing transformers takes seconds; a wrong path or a damaged file should be reported at once.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from depthgauge.base.errors import missing_extra
from depthgauge.checkpoints.gguf_header import MOST_BLOCKS
from depthgauge.checkpoints.library import CheckpointError, short

_LISTS = ("auto_mappings.py", "configuration_auto.py")
"""Files of transformers.models.auto that name all model types."""

_MOST = ((r"layers?$", MOST_BLOCKS), (r"^(num|n)_", 100_000_000))
"""The most that a number in config.json can be, by its key; transformers would make a list of so many entries."""

DEQUANTIZED = ("fp8", "mxfp4")
"""Methods of quantization that transformers undoes when it loads the weights, without a GPU or another package."""


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of the checkpoint called `name`."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError too
        raise CheckpointError(f"cannot read {path.name} of {name}: {short(error)}; download it again") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise CheckpointError(f"{path.name} of {name} must be a JSON object, got a {kind}; download it again")
    return found


def quantization_method(raw: Mapping[str, Any]) -> str | None:
    """Return the name of the method with which the weights of a configuration are quantized; None if they are not."""
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    return str(found.get("quant_method", "an unnamed method")) if isinstance(found, dict) else "an unnamed method"


def check_config(path: Path, name: str, trust_remote_code: bool) -> None:
    """Check that the config.json at `path`, of the checkpoint called `name`, is one of a model that can be loaded.

    Raises:
        CheckpointError: it is not JSON, has no model type, or one that transformers does not know; or the model is
            defined by code in its directory, and that code may not run.
    """
    raw = read_json(path, name)
    named = raw.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        raise CheckpointError(
            f"architectures in config.json of {name} must be a list with the name of a class, got {named!r}; correct it"
        )
    if (method := quantization_method(raw)) is not None and method not in DEQUANTIZED:
        raise CheckpointError(
            f"{name} is quantized with {method}, and only {' and '.join(DEQUANTIZED)} can be dequantized without "
            "further packages; give the checkpoint that it was made from, or a GGUF file of it"
        )
    for key, value in _numbers(raw):
        most = next((most for pattern, most in _MOST if re.search(pattern, key)), value)
        if value > most:
            raise CheckpointError(
                f"{key} in config.json of {name} is {value:,}, and no model has more than {most:,}; correct it"
            )
    kind, brings_code = raw.get("model_type"), bool(raw.get("auto_map"))
    if is_known(kind) or (brings_code and trust_remote_code):
        return
    if brings_code:
        raise CheckpointError(
            f"{name} needs to run the Python code in its directory; if you have read and trust that code, use "
            "--allow code"
        )
    if not kind or not isinstance(kind, str):
        raise CheckpointError(
            f"config.json of {name} has no model_type, so it is not a checkpoint of transformers; add the model_type, "
            "or give another checkpoint"
        )
    raise CheckpointError(
        f"{name} is a {kind!r} model, which transformers {metadata.version('transformers')} does not know; correct the "
        "model_type in its config.json, or install a version of transformers that knows it"
    )


def _numbers(raw: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the keys and values of all whole numbers in a configuration and in those that it contains."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield key, value


def is_known(kind: object) -> bool:
    """Return whether transformers may know a model type.

    Until transformers is imported, nobody can have registered further types, and all types are in its source.
    """
    if not isinstance(kind, str) or not kind:
        return False
    if (library := sys.modules.get("transformers")) is not None:
        return kind in library.CONFIG_MAPPING
    return any(f'"{kind}"' in text for text in _type_lists())


def _type_lists() -> list[str]:
    """Return the files of transformers that name the model types, without importing it."""
    spec = util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise missing_extra("a checkpoint", "models")
    folder = Path(spec.origin).parent / "models" / "auto"
    return [(folder / name).read_text("utf-8") for name in _LISTS if (folder / name).is_file()]
