"""The base class of result records, the number types they use, and the reader that checks JSON against them.

Records are `msgspec` structs: immutable, compared by value, picklable, and validated when they are read. msgspec was
chosen over pydantic because it has no dependencies of its own, imports in a few milliseconds (`depthgauge --help` must
stay fast) and reports the path of the first value that does not fit.
"""

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, SupportsFloat, TypeVar

import msgspec

from depthgauge._format import number, short
from depthgauge._frames import html_table
from depthgauge.errors import InputError, require_path

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
        shown = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str):
                shown[name] = repr(value)
            elif isinstance(value, int | float):
                shown[name] = str(value) if isinstance(value, bool) else number(value)
        return shown

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self.summary().items())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        return html_table(
            type(self).__name__, [{"field": name, "value": value} for name, value in self.summary().items()]
        )


def _as_lists(value: Any) -> Any:
    """Replace tuples by lists, which is what JSON has."""
    if isinstance(value, dict):
        return {key: _as_lists(inner) for key, inner in value.items()}
    return [_as_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


T = TypeVar("T")

_EXPECTED = {
    "array": "a list",
    "object": "an object",
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
}


def load_document(path: str | Path, advice: str) -> Any:
    """Return the JSON document in a file.

    Args:
        path: the file.
        advice: what to do about a file that is not JSON; ends the error message.

    Raises:
        ResultError: the file cannot be read, or is not JSON; NaN and infinities are not JSON numbers.
    """
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


def check_schema(document: Any, expected: str, name: str, advice: str) -> None:
    """Raise unless a parsed document is an object with the expected schema.

    Args:
        document: what `json.loads` returned.
        expected: the schema, such as `depthgauge.gauge/1`.
        name: what to call the document in an error, usually its path.
        advice: what to do about a document of another kind; ends the error message.

    Raises:
        ResultError: says which schema was found and which was expected.
    """
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
    """Check a parsed JSON document against a record type and return the record.

    Args:
        document: what `json.loads` returned.
        kind: the record type.
        name: what to call the document in an error, usually its path.
        advice: what to do about a document that does not fit; ends the error message.

    Raises:
        ResultError: names the first place that does not fit, such as `subjects[0].layers[3].heads: expected a list`.
    """
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
    what = re.sub(r"`([^`]*)`", lambda found: _words(found[1]), what)
    what = what[:1].lower() + what[1:]
    return f"{place}: {what}" if place else what


def _words(types: str) -> str:
    return " or ".join(_EXPECTED.get(part.strip(), part.strip()) for part in types.split("|"))
