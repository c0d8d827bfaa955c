"""Find and read texts: plain text, one field of a JSONL file, the built-in text, or a data set on the hub.

A file whose markup would be measured as text (JSON, CSV, HTML) is refused, unless its name ends with `.txt`.
"""

import hashlib
import json
import logging
import os
import re
import socket
import urllib.request
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from depthgauge.base.errors import InputError, optional
from depthgauge.checkpoints.source.library import short
from depthgauge.results.gauge_record import NONE

WHOLE_BYTES = 4 * 2**20
"""Texts up to this size are read completely; of a larger text only pieces are read."""
_PIECE_BYTES = 64
"""Bytes read per token of a window when only pieces are read; tokens are much shorter."""
_ENOUGH = 16
"""Characters per token of a window that the documents of a piece of a JSONL file have at least."""
JSONL = (".jsonl", ".ndjson")
"""Endings of files with one JSON object per line."""
PLAIN = ".txt"
"""The ending of files that are plain text, even if they look like JSON or HTML."""
_TABLES = {".csv": "comma-separated values", ".tsv": "tab-separated values"}
_HEAD_BYTES = 2**16
TEXT, MESSAGES = "text", "messages"
"""The fields that are looked for if none is named: a plain document, or a chat."""
_SHOWN = 8
"""The most fields that an error lists."""
_OBJECT = re.compile(r'(?:\[\s*)*\{\s*"(?:[^"\\\n]|\\.)*"\s*:')
_HTML = re.compile(r"(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class TextFile:
    """A text that can be read.

    - `path`: the file; None means the built-in text
    - `field`: the field of a JSONL file that holds the text; None for plain text
    """

    path: Path | None = None
    field: str | None = None

    @property
    def name(self) -> str:
        """The name in results: the path, with the field of a JSONL file."""
        if self.path is None:
            return "the built-in text"
        return str(self.path) if self.field is None else f"{self.path}:{self.field}"


@dataclass(frozen=True)
class TextContent:
    """What was read of a text.

    - `pieces`: the text, or pieces of a large text
    - `digest`: SHA-256 of the bytes that were read
    - `complete`: whether the whole text was read
    """

    pieces: tuple[str, ...]
    digest: str
    complete: bool


def find_text(text: str | Path | TextFile | None) -> TextFile:
    """Return the text that a path, or `path:field` for a JSONL file, stands for.

    Without a field, a file named `*.jsonl` is read by its field `text`, or `messages` if it has no `text`, and a file
    named `*.txt` is plain text, whatever is in it. None means the built-in text.

    Raises:
        InputError: the file cannot be read, or it is not plain text and no field is given.
    """
    if text is None or isinstance(text, TextFile):
        return text or TextFile()
    path, field = split_field(text)
    if field is not None or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)):
        return TextFile(path, field)  # a pipe can be read only once
    try:
        with open(path, "rb") as handle:
            if path.suffix.lower() in JSONL:
                return TextFile(path, default_field(handle, path))
            if path.suffix.lower() != PLAIN:
                _refuse_markup(handle, path)
    except OSError as error:
        raise InputError(f"cannot read text {path}: {error.strerror or error}") from error
    return TextFile(path)


def find_texts(texts: Sequence[str | Path]) -> tuple[TextFile, ...]:
    """Return the texts that paths stand for; see `find_text`. Raise if two are the same."""
    found = tuple(find_text(text) for text in texts)
    places = [(text.path and text.path.resolve(), text.field) for text in found]
    for text, place in zip(found, places, strict=True):
        if places.count(place) > 1:
            raise InputError(f"the text {text.name} is given twice; give every file once")
    return found


def input_paths(options: Any) -> dict[str, str | Path | None]:
    """Return option → path of everything that the options of a command read, which no output may replace."""
    paths = {f"--{name}": getattr(options, name, None) for name in ("input", "tokenizer")}
    return paths | {f"--data {path}": split_field(path)[0] for path in given_paths(options)}


def given_paths(options: Any) -> tuple[str, ...]:
    """Return what `--data` names, which some commands take once."""
    if getattr(options, "weights_only", False):
        return ()
    return (options.text,) if isinstance(options.text, str) else tuple(options.text or ())


def split_field(text: str | Path) -> tuple[Path, str | None]:
    """Return the path and the field of `path:field`; a file that exists under the whole name has no field.

    The path may contain colons, as in `C:/data.jsonl:text`.
    """
    name = str(text)
    if not os.path.exists(name):
        for colon in re.finditer(":", name):
            path, field = Path(name[: colon.start()]), name[colon.end() :]
            if field and (os.path.isfile(path) or path.suffix.lower() in JSONL):
                return path, field
    return Path(name), None


def read_text(
    text: TextFile, render: Callable[[list[Any]], str], *, wanted: int, length: int, seed: int, whole: bool = False
) -> TextContent:
    """Read a text; of a text above `WHOLE_BYTES`, read `wanted` pieces of more than `length` tokens, chosen by `seed`.

    With `whole`, a text of any size is read completely.
    The documents of a JSONL file are separated by an empty line. Chats are not separated, because the chat template
    marks where they start and end. The pieces of a large JSONL file consist of whole lines.
    """
    if text.path is None:
        default = resources.files("depthgauge.checkpoints.inputs").joinpath("text.txt").read_bytes()
        return TextContent((default.decode("utf-8"),), hashlib.sha256(default).hexdigest(), True)
    try:
        size = text.path.stat().st_size
        whole = whole or size <= WHOLE_BYTES
        with open(text.path, "rb") as handle:
            if text.field is not None:
                documents = _Documents(handle, text, render)
                return documents.all() if whole else documents.drawn(size, wanted, length, seed)
            if whole:
                raw = handle.read()
                return TextContent((_decode(raw, text.path, True),), hashlib.sha256(raw).hexdigest(), True)
            return _plain_pieces(handle, text.path, size, wanted, length, seed)
    except OSError as error:
        raise InputError(f"cannot read text {text.path}: {error.strerror or error}") from error


def _places(size: int, step: int, seed: int) -> list[int]:
    """Return the numbers of the blocks of `step` bytes in random order."""
    import torch  # here, because a file that is refused should be refused at once

    return torch.randperm(max(size // step, 1), generator=torch.Generator().manual_seed(seed)).tolist()


def _plain_pieces(handle: BinaryIO, path: Path, size: int, wanted: int, length: int, seed: int) -> TextContent:
    step = length * _PIECE_BYTES
    places = _places(size, step, seed)
    raw = []
    for place in sorted(places[:wanted]):
        handle.seek(place * step)
        raw.append(handle.read(step))
    digest = hashlib.sha256(b"".join(raw)).hexdigest()
    return TextContent(tuple(_decode(piece, path, False) for piece in raw), digest, wanted > len(places))


def _decode(piece: bytes, path: Path, whole: bool) -> str:
    """Decode UTF-8; from a piece, remove incomplete characters at both ends and the incomplete word at the start."""
    try:
        if whole:
            return piece.decode("utf-8")
        start = next((i for i in range(4) if piece[i : i + 1] and piece[i] & 0xC0 != 0x80), 0)
        stop = max((i for i in range(1, 5) if len(piece) >= i and piece[-i] & 0xC0 == 0xC0), default=0)
        text = piece[start : len(piece) - stop].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; convert it to UTF-8"
        ) from error
    return text.split(maxsplit=1)[-1] if text.split() else ""


@dataclass(frozen=True)
class _Documents:
    """The documents of an open JSONL file."""

    handle: BinaryIO
    text: TextFile
    render: Callable[[list[Any]], str]

    def all(self) -> TextContent:
        """Read all documents."""
        raw = self.handle.read()
        lines = raw.split(b"\n")
        found = [self._document(line, f"line {number}") for number, line in enumerate(lines, start=1)]
        return TextContent(("".join(found),), hashlib.sha256(raw).hexdigest(), True)

    def drawn(self, size: int, wanted: int, length: int, seed: int) -> TextContent:
        """Read the documents that start in blocks of the file, drawn at random, until there are enough pieces."""
        step, digest = length * _PIECE_BYTES, hashlib.sha256()
        pieces: list[str] = []
        current = ""
        for place in _places(size + step - 1, step, seed):
            for offset, line in lines_between(self.handle, place * step, (place + 1) * step):
                digest.update(line)
                current += self._document(line, f"the line at byte {offset}")
            if len(current) >= length * _ENOUGH:
                pieces.append(current)
                current = ""
                if len(pieces) == wanted:
                    return TextContent(tuple(pieces), digest.hexdigest(), False)
        return TextContent((*pieces, current), digest.hexdigest(), True)

    def _document(self, line: bytes, place: str) -> str:
        assert self.text.field is not None
        where = f"{place} of {self.text.path}"
        record = parse_line(line, where)
        return "" if record is None else document_of(record, self.text.field, where, self.render)


def _refuse_markup(handle: BinaryIO, path: Path) -> None:
    """Raise if a file is a table, an HTML page or JSON: its markup would be measured as if it were text."""
    kind = _TABLES.get(path.suffix.lower())
    advice = "write the column with the text to a text file or to a JSONL file"
    if kind is None:
        start = handle.read(_HEAD_BYTES)
        head = start.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
        if path.suffix.lower() in (".html", ".htm") or _HTML.match(head):
            kind, advice = "an HTML page", "convert it to plain text"
        elif head[:1] in ("{", "["):
            rest = handle.read(WHOLE_BYTES)
            whole = (start + rest).decode("utf-8-sig", errors="replace") if len(rest) < WHOLE_BYTES else ""
            kind = "JSON" if _OBJECT.match(head) or _is_json(whole) else None
            advice = "write one JSON object per line to a file, and name the field with the text: FILE.jsonl:FIELD"
            if _is_json(head.split("\n", 1)[0]):
                advice = f"name the field with the text, {path}:FIELD, if the file has one JSON object per line"
    if kind is not None:
        raise InputError(
            f"{path} is not plain text but {kind}, and its markup would be read as text; {advice}, or give the file a "
            f"name that ends with {PLAIN} to read it as it is"
        )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def default_field(handle: BinaryIO, path: Path) -> str:
    """Return the field that holds the documents of a file: `text`, or `messages` if the first line has no `text`."""
    for number, line in enumerate(handle, start=1):
        record = parse_line(line, f"line {number} of {path}")
        if record is not None:
            return usual_field(record)
    return TEXT


def usual_field(record: dict[str, Any]) -> str:
    """Return the field of an object that holds its document."""
    return MESSAGES if TEXT not in record and MESSAGES in record else TEXT


def lines_between(handle: BinaryIO, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the content of every line that starts at byte `first` or later and before byte `last`."""
    handle.seek(max(first - 1, 0))
    if first > 0:
        handle.readline()  # ends the line that starts before `first`
    while (offset := handle.tell()) < last and (line := handle.readline()):
        yield offset, line


def parse_line(line: bytes, where: str) -> dict[str, Any] | None:
    """Return the object on a line, or None if the line is empty; `where` names the line in errors."""
    try:
        text = line.decode("utf-8-sig").strip()
        if not text:
            return None
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError too
        raise InputError(
            f"{where} is not JSON: {error}; a JSONL file has one JSON object per line; a file whose name ends with "
            f"{PLAIN} is read as plain text"
        ) from error
    if not isinstance(record, dict):
        raise InputError(f"{where} is not a JSON object; a JSONL file has one object per line, such as {{'text': …}}")
    return record


def document_of(record: dict[str, Any], field: str, where: str, render: Callable[[list[Any]], str]) -> str:
    """Return the document in a field of an object: a text followed by an empty line, or a chat by its template.

    `render` converts the messages of a chat, objects with `role` and `content`, to text; `where` names the line in
    errors.
    """
    if field not in record:
        names = list(record)
        listed = ", ".join(map(repr, names[:_SHOWN])) + (", …" if len(names) > _SHOWN else "") or "none"
        raise InputError(
            f"{where} has no field {field!r}; its fields are: {listed}; name the field with the text: FILE:FIELD"
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


# --- Data sets on the Hugging Face hub: what their names look like, and how their documents are read -----------------

_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>[^:]+))?(?::(?P<field>.+))?", re.ASCII)
_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "httpx", "fsspec", "evaluate")


@dataclass(frozen=True)
class HubData:
    """A data set on the hub, `ORG/NAME@REVISION` or `ORG/NAME@REVISION:FIELD`.

    - `repo`: the repository
    - `revision`: a commit, or a tag
    - `field`: the field that holds the text; by default `text`, or `messages` if there is no `text`
    """

    repo: str
    revision: str
    field: str | None = None

    @property
    def name(self) -> str:
        """The name in results."""
        return f"{self.repo}@{self.revision}" + (f":{self.field}" if self.field else "")


def find_general(name: str | None) -> TextFile | HubData | None:
    """Return what `--general` names; None for the teacher's own continuations, and for `none`, the user's texts alone.

    What exists here is a file.

    Raises:
        InputError: the file cannot be read, or the data set is named without a revision.
    """
    if name is None or name == NONE:
        return None
    parts = _NAME.fullmatch(name)
    if parts is None or os.path.exists(split_field(name)[0]):
        return find_text(name)
    if parts["revision"] is None:
        raise InputError(
            f"{name} is no file here, and a data set on the hub needs a revision, because it may change and the "
            f"result must be reproducible: give {parts['name']}@COMMIT, with a commit of "
            f"https://huggingface.co/datasets/{parts['name']}/commits/main"
        )
    return HubData(parts["name"], parts["revision"], parts["field"])


def hub_documents(data: HubData, render: Callable[[list[Any]], str]) -> Generator[str, None, None]:
    """Yield the documents of the part `train` of a data set, one after the other, without downloading all of it.

    Each is followed by an empty line. `render` converts the messages of a chat to text; see `document_of`.

    Raises:
        InputError: the data set cannot be read, or has no such field.
    """
    for number, record in enumerate(_records(data), start=1):
        yield document_of(record, data.field or usual_field(record), f"document {number} of {data.name}", render)


def _records(data: HubData) -> Iterator[dict[str, Any]]:
    library = optional("datasets", "a data set on the hub", "train")
    try:
        with quiet_datasets(), offline_if_unreachable():
            yield from library.load_dataset(data.repo, revision=data.revision, split="train", streaming=True)
    except Exception as error:  # datasets, huggingface_hub and their HTTP library raise errors of many kinds
        raise InputError(
            f"cannot read the data set {data.name}: {short(error).rstrip('.')}; check its name and its revision, run "
            "the command again when the hub can be reached, or give a file"
        ) from error


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Suppress the log messages, progress bars and warnings of datasets and lm-eval; errors are still raised."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets: Any = import_module("datasets")
        shown = datasets.are_progress_bars_disabled()
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            if not shown:
                datasets.enable_progress_bars()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Use only data in the cache if the hub has no address here; the libraries would try for half a minute."""
    constants: Any = import_module("huggingface_hub.constants")
    settings: Any = import_module("datasets.config")
    before = constants.HF_HUB_OFFLINE, settings.HF_HUB_OFFLINE
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, settings.HF_HUB_OFFLINE = before
