"""The base class of result records, the number types they use, and the reader that checks JSON against them.

Records are `msgspec` structs: immutable, compared by value, picklable, and validated when they are read. msgspec was
chosen over pydantic because it has no dependencies of its own, imports in a few milliseconds (`depthgauge --help` must
stay fast) and reports the path of the first value that does not fit.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, SupportsFloat, TypeVar

import msgspec

from depthgauge.base.errors import InputError, require_options, require_path, unknown_name
from depthgauge.base.format import number, short
from depthgauge.base.frames import html_facts

Number = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A finite number."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A whole number from 0."""
Measured = Number | None
"""A finite number, or null where the quantity is undefined or not finite."""


def finite(value: SupportsFloat) -> Measured:
    """Return a number, or None for infinities and NaN, which JSON does not have."""
    plain = float(value)
    return plain if math.isfinite(plain) else None


RARE = msgspec.Meta(extra={"rare": True})
"""Marks an option that `--help` leaves out and `--help-all` shows."""


class ResultError(InputError):
    """A result document that is damaged, of another program, or of another schema. The message names the place."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable record whose fields are the keys of its JSON object."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain dictionaries, lists, strings and numbers."""
        document: dict[str, Any] = _as_lists(msgspec.to_builtins(self))
        return document

    def dump(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def json_line(self) -> str:
        """Return the record as one line of JSON text."""
        return json.dumps(msgspec.to_builtins(self), allow_nan=False, ensure_ascii=False) + "\n"

    def summary(self) -> Mapping[str, str]:
        """Return the few facts that `repr` and notebooks show, by name."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            name: repr(value) if isinstance(value, str | bool) else number(value)
            for name, value in values.items()
            if isinstance(value, str | int | float)
        }

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self.summary().items())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        return html_facts(type(self).__name__, self.summary(), ("field", "value"))


def annotation_of(record: type[Record], name: str) -> Any:
    """Return the annotation of a field, which may be one of a base class."""
    return next(base.__annotations__[name] for base in record.__mro__ if name in base.__annotations__)


Options = TypeVar("Options", bound=Record)


def combine_options(
    kind: type[Options], verb: str, options: Any, fields: Mapping[str, Any], normal: Mapping[str, Callable[[Any], Any]]
) -> Options:
    """Return the options record of a verb, with single options given by keyword.

    `normal` has the function that brings an option into its normal form, by name. An InputError names an option that
    does not exist or whose type does not fit.
    """
    require_options(options, kind, verb)
    for name in fields:
        if name not in kind.__struct_fields__:
            raise unknown_name(f"option of {verb}", name, kind.__struct_fields__)
    given = {**(options.given() if options else {}), **fields}
    plain = {name: normal.get(name, lambda same: same)(value) for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        raise InputError(f"{place.strip('`$.') or 'options'}: {what.replace('`', '')}; see {kind.__name__}") from error


def take_directory(tokenizer: Any, fields: dict[str, Any]) -> Any:
    """Move a tokenizer that is given as a directory to the options given by keyword; return one that is in memory."""
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    fields["tokenizer"] = tokenizer
    return None


def _as_lists(value: Any) -> Any:
    """Replace tuples by lists, which is what JSON has."""
    if isinstance(value, dict):
        return {key: _as_lists(inner) for key, inner in value.items()}
    return [_as_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


T = TypeVar("T", bound=Record)

_EXPECTED = {
    "array": "a list", "object": "an object", "str": "a string", "int": "a whole number", "float": "a number",
    "bool": "true or false",
}  # fmt: skip
"""The name of a type in messages of msgspec → the words of an error."""


def load_document(path: str | Path, advice: str) -> Any:
    """Return the JSON document in a file, or raise ResultError, which ends with `advice`; NaN is not a JSON number."""
    try:
        text = require_path("path", path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ResultError(f"{path} is not a result document: it is not UTF-8 text; {advice}") from error
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or error}; {advice}") from error
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} is not a result document: it is not JSON ({error}); {advice}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_schema(document: Any, expected: str, name: str, advice: str) -> None:
    if not isinstance(document, dict):
        raise ResultError(
            f"{name} is not a result document: expected an object, got {short(repr(document), 60)}; {advice}"
        )
    schema = document.get("schema")
    if schema == expected:
        return
    family, _, version = schema.rpartition("/") if isinstance(schema, str) else ("", "", "")
    if family == expected.rpartition("/")[0] and version.isdecimal():
        raise ResultError(
            f"{name} has the schema {schema!r} of another version of depthgauge; this version reads {expected!r}. "
            f"Run `depthgauge {family.rpartition('.')[2]}` again, or use the version that wrote the file"
        )
    given = "no schema" if schema is None else f"the schema {short(repr(schema), 60)}"
    raise ResultError(f"{name} is not a result document: it has {given}, expected {expected!r}; {advice}")


def read(document: Any, kind: type[T], name: str, advice: str) -> T:
    """Return a parsed JSON document as a record; keys that the record does not have are ignored.

    A ResultError calls the document `name`, usually its path, and ends with `advice`. It names the first place that
    does not fit, such as `subjects[0].layers[3].heads: expected a list`. A document of a record with a `schema`, such
    as `depthgauge.gauge/1`, must have the same one.
    """
    schema = next((field.default for field in msgspec.structs.fields(kind) if field.name == "schema"), None)
    if schema is not None:
        _check_schema(document, schema, name, advice)
    try:
        return msgspec.convert(document, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ResultError(f"{name}: {_sentence(str(error))}; {advice}") from error


def _sentence(message: str) -> str:
    """Turn a message of msgspec, ``Expected `array`, got `int` - at `$.a[0]` ``, into `a[0]: expected a list, got int`.

    >>> _sentence("Object missing required field `kind` - at `$.subjects[0]`")
    'subjects[0].kind: is missing'
    >>> _sentence("Expected `int | null`, got `str` - at `$.settings.tokens`")
    'settings.tokens: expected a whole number or null, got a string'
    """
    what, _, place = message.partition(" - at ")
    place = place.strip("`").removeprefix("$").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"{place}.{missing[1]}: is missing".removeprefix(".")
    what = re.sub(r"`([^`]*)`", lambda found: " or ".join(_EXPECTED.get(t, t) for t in found[1].split(" | ")), what)
    what = what[:1].lower() + what[1:]
    return f"{place}: {what}" if place else what
