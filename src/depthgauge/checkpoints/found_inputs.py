"""Find what the user gave one by one: images, texts with labels, pairs or recordings.

What is wrong with the files is reported before a model is downloaded or loaded, and before torch or transformers is
imported.
"""

import csv
import io
import textwrap
import wave
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, missing_extra, require_path
from depthgauge.base.format import counted, one_line
from depthgauge.checkpoints.text_files import JSONL, parse_line

_FILE, _TEXT = ("file_name", "file"), ("text",)
"""The names of the field, or of the column, with the file or the text that has a label."""
_SHOWN = 8
"""The most labels that an error lists."""
_FIELDS = ("source", "target")
"""The fields of a pair."""


@dataclass(frozen=True)
class ImageFolder:
    """Images that can be read.

    - `path`: the directory
    - `files`: the images in it and in the directories below, in order
    - `labels`: the label of each image, as it is written; None if no labels are given
    """

    path: Path
    files: tuple[Path, ...]
    labels: tuple[str, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each image in an error."""
        return tuple(file.name for file in self.files)


@dataclass(frozen=True)
class LabelledTexts:
    """Texts and their labels, as they are written, in a file; each text once."""

    path: Path
    texts: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each text in an error: its first words."""
        return tuple(f"the text {textwrap.shorten(text, 40, placeholder='…')!r}" for text in self.texts)


@dataclass(frozen=True)
class PairFile:
    """The pairs of a JSON lines file, each once."""

    path: Path
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class AudioFolder:
    """The WAV files in a directory and in the directories below, in order, each with its transcript."""

    path: Path
    files: tuple[Path, ...]
    transcripts: tuple[str, ...]


def find_given(options: Any) -> ImageFolder | LabelledTexts | PairFile | AudioFolder | None:
    """Return the images, texts with labels, pairs or recordings that the options name; None if they name none."""
    if options.images is not None:
        return find_images(options.images, options.labels)
    if options.labels is not None:
        return find_labelled(options.labels)
    if options.pairs is not None:
        return find_pairs(options.pairs)
    return None if options.audio is None else find_audio(options.audio)


def pillow() -> Any:
    """Import and return the module of Pillow that reads images."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("reading images", "images") from error
    return Image


def find_images(folder: str | Path, labels: str | Path | None) -> ImageFolder:
    """Return the images of a directory, with their labels if a file of labels is given.

    Files whose names end as those of images do are images. A file of labels is JSON lines, with the fields `file_name`
    and `label`, or CSV with two columns. Names are relative to the directory.

    Raises:
        InputError: the directory has no images, or an image has no label.
    """
    path = require_path("images", folder)
    endings = set(pillow().registered_extensions())
    if not path.is_dir():
        raise InputError(f"--images must be a directory of images, and {path} is none; give one that exists")
    files = tuple(sorted(one for one in path.rglob("*") if one.suffix.lower() in endings and one.is_file()))
    if not files:
        raise InputError(f"{path} contains no images; give a directory with files such as .jpg or .png")
    if labels is None:
        return ImageFolder(path, files)
    known = dict(_read_labels(Path(labels), _FILE))
    names = [one.relative_to(path).as_posix() for one in files]
    if missing := [name for name in names if name not in known]:
        raise InputError(
            f"{labels} has no label for {counted(len(missing), 'image')} of {path}, such as {missing[0]}; add a line "
            "with the file name and the label"
        )
    return ImageFolder(path, files, tuple(known[name] for name in names))


def find_labelled(path: str | Path) -> LabelledTexts:
    """Return the texts and labels of a file: JSON lines with the fields `text` and `label`, or CSV with two columns.

    Raises:
        InputError: the file cannot be read, has no texts, or a line lacks the text or the label.
    """
    file, known = require_path("labels", path), dict[str, str]()
    for text, label in _read_labels(file, _TEXT):
        known.setdefault(text, label)
    if not known:
        raise InputError(f"{file} contains no texts; give JSON lines with the fields text and label, or CSV with both")
    return LabelledTexts(file, tuple(known), tuple(known.values()))


def _read_labels(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield what has a label, under one of the names in `fields`, and the label."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the labels {path}: {one_line(error)}") from error
    if path.suffix.lower() in JSONL:
        for number, line in enumerate(raw.splitlines(), start=1):
            record = parse_line(line, f"line {number} of {path}", "")
            if record is not None:
                name = next((record[key] for key in fields if key in record), None)
                if name in (None, "") or "label" not in record:
                    raise InputError(f"line {number} of {path} lacks {fields[0]} or label; give both")
                yield str(name), str(record["label"])
        return
    for number, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        if not row or (number == 1 and row[0].strip() in fields):
            continue
        if len(row) != 2:
            raise InputError(
                f"line {number} of {path} has {counted(len(row), 'column')}; a file of labels has two, "
                f"{fields[0]} and label"
            )
        yield row[0].strip(), row[1].strip()


def label_indices(found: ImageFolder | LabelledTexts, known: Mapping[str, int] | None, count: int) -> dict[str, int]:
    """Return label → index of its logit; a label is one of the `known` names of the configuration, or a number.

    Raises:
        InputError: a label is neither, or is not below the number of labels, `count`.
    """
    names: Mapping[str, int] = {str(name): int(index) for name, index in (known or {}).items()}
    made = {}
    for label, place in zip(found.labels or (), found.names, strict=False):
        is_index = label.isdecimal() and int(label) < count
        if label not in names and not is_index:
            listed = ", ".join(list(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            raise InputError(
                f"the label {label!r} of {place} is none of the {count} labels of the model; give one of its names "
                f"({listed}) or a number from 0 to {count - 1}"
            )
        made[label] = names[label] if label in names else int(label)
    return made


def find_pairs(path: str | Path) -> PairFile:
    """Return the pairs of a file of JSON lines with the fields `source` and `target`.

    Raises:
        InputError: the file cannot be read, has no pairs, or a line lacks a field.
    """
    file = require_path("pairs", path)
    pairs = tuple(dict.fromkeys(_read_pairs(file)))
    if not pairs:
        raise InputError(f"{file} contains no pairs; give JSON lines with the fields source and target")
    return PairFile(file, pairs)


def _read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read the pairs {path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, start=1):
        record = parse_line(line, f"line {number} of {path}", "")
        if record is None:
            continue
        for field in _FIELDS:
            if not isinstance(record.get(field), str) or not record[field].strip():
                raise InputError(
                    f"line {number} of {path} has no text in the field {field!r}; every line needs a source and a "
                    "target"
                )
        yield record["source"], record["target"]


def find_audio(folder: str | Path) -> AudioFolder:
    """Return the recordings of a directory: `a.wav`, with its transcript in `a.txt`.

    Raises:
        InputError: there are no WAV files, one of them is damaged, or one has no transcript.
    """
    path = require_path("audio", folder)
    if not path.is_dir():
        raise InputError(f"--audio must be a directory of WAV files, and {path} is none; give one that exists")
    files = tuple(sorted(one for one in path.rglob("*") if one.suffix.lower() == ".wav" and one.is_file()))
    if not files:
        raise InputError(f"{path} contains no WAV files; give a directory with a.wav and its transcript a.txt")
    transcripts = tuple(map(_transcript, files))
    for file in files:
        read_wave(file, str(file), has_sound=False)
    return AudioFolder(path, files, transcripts)


def _transcript(file: Path) -> str:
    path = file.with_suffix(".txt")
    try:
        text = path.read_text("utf-8-sig").strip()
    except FileNotFoundError as error:
        raise InputError(f"{file} has no transcript; write its text to {path.name} beside it, or remove it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the transcript {path}: {one_line(error)}") from error
    if not text:
        raise InputError(f"the transcript {path} is empty; write what is said in {file.name}, or remove both")
    return text


def read_wave(path: Path, given: str | io.BytesIO, has_sound: bool = True) -> tuple[int, int, int, bytes]:
    """Return the rate, the channels, the number of samples of each, and the sound of a WAV file, if it is wanted."""
    try:
        with wave.open(given, "rb") as file:
            channels, width, rate, frames = file.getparams()[:4]
            data = file.readframes(frames) if has_sound else b""
    except (wave.Error, EOFError, OSError) as error:
        reason = str(error) or "the file is too short"
        raise InputError(
            f"cannot read {path} as a WAV file of 16-bit PCM: {reason}; repair, convert or remove it"
        ) from error
    if width != 2:
        raise InputError(
            f"{path} has {8 * width} bits per sample, expected 16; convert it, for example with ffmpeg -i IN.wav -c:a "
            "pcm_s16le OUT.wav"
        )
    if not frames:
        raise InputError(f"{path} contains no sound; remove it and its transcript")
    return rate, channels, frames, data
