"""Lines of JSONL files: one JSON object per line, with a document in one of its fields."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from depthgauge.errors import InputError

TEXT, MESSAGES = "text", "messages"
"""The fields that are looked for if none is named: a plain document, or a chat."""
_SHOWN = 8
"""The most fields that an error lists."""


def default_field(handle: BinaryIO, path: Path) -> str:
    """Return the field that holds the documents of a file: `text`, or `messages` if the first line has no `text`."""
    for number, line in enumerate(handle, start=1):
        record = parse_line(line, f"line {number} of {path}")
        if record is not None:
            return MESSAGES if TEXT not in record and MESSAGES in record else TEXT
    return TEXT


def lines_between(handle: BinaryIO, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the content of every line that starts at byte `first` or later and before byte `last`."""
    handle.seek(max(first - 1, 0))
    if first > 0:
        handle.readline()  # ends the line that starts before `first`
    while (offset := handle.tell()) < last and (line := handle.readline()):
        yield offset, line


def parse_line(line: bytes, where: str) -> dict[str, Any] | None:
    """Return the object on a line, or None if the line is empty.

    Args:
        line: the bytes of the line.
        where: the line and its file, for error messages.

    Raises:
        InputError: the line is not a JSON object.
    """
    try:
        text = line.decode("utf-8-sig").strip()
        if not text:
            return None
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError too
        raise InputError(
            f"{where} is not JSON: {error}; a JSONL file has one JSON object per line; use --as-is to read the file as "
            "plain text"
        ) from error
    if not isinstance(record, dict):
        raise InputError(f"{where} is not a JSON object; a JSONL file has one object per line, such as {{'text': …}}")
    return record


def document_of(record: dict[str, Any], field: str, where: str, render: Callable[[list[Any]], str]) -> str:
    """Return the document in a field of an object: a text followed by an empty line, or a chat by its template.

    Args:
        record: the object.
        field: the name of the field.
        where: the line and its file, for error messages.
        render: converts the messages of a chat, objects with `role` and `content`, to text.

    Raises:
        InputError: the object has no such field, or the field holds neither a text nor a chat.
    """
    if field not in record:
        names = list(record)
        listed = ", ".join(map(repr, names[:_SHOWN])) + (", …" if len(names) > _SHOWN else "") or "none"
        raise InputError(
            f"{where} has no field {field!r}; its fields are: {listed}; name the field with the text: --text FILE:FIELD"
        )
    value = record[field]
    if isinstance(value, str):
        return f"{value}\n\n" if value.strip() else ""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        try:
            return render(value)
        except InputError as error:
            raise InputError(f"cannot read the chat in {where}: {error}") from error
    raise InputError(
        f"the field {field!r} in {where} must hold a text, or a chat as a list of objects with role and content; got "
        f"{type(value).__name__}"
    )
