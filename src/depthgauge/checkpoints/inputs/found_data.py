"""Find what `--data` names, and refuse models that do not read it.

A table has a row for each kind of input: text, texts with labels, pairs, images and recordings. What is wrong with the
files is reported before a model is downloaded or loaded, and before torch or transformers is imported.
"""

import csv
import io
import textwrap
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, optional
from depthgauge.base.format import counted, one_line
from depthgauge.checkpoints.inputs.text_files import JSONL, TextFile, find_texts, given_paths, parse_line
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.source.model_class import predicts_label
from depthgauge.checkpoints.source.model_files import Source, read_json
from depthgauge.results.gauge_record import ABOUT_TEXT


@dataclass(frozen=True)
class InputKind:
    """A row of the table.

    - `name`: the name in results
    - `shown`: what it is, in sentences
    - `main`: the main input of the models that read it
    - `advice`: how to give it
    - `fields`: the fields of a JSONL file, or the columns of a CSV file, that it is found by
    - `options`: the options about text that apply to it
    - `two_stacks`: whether it is for encoder–decoder models, whose output is compared with a text
    - `processor`: what reads it beside a tokenizer or in place of it, and the files of which one describes it
    """

    name: str
    shown: str
    main: str
    advice: str
    fields: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    two_stacks: bool = False
    processor: tuple[str, tuple[str, ...]] = ("", ())


TEXT = InputKind("text", "text", "input_ids", "give it text with --data FILE", options=ABOUT_TEXT)
LABELLED = InputKind(
    "texts", "texts with labels", "input_ids", "give it JSON lines or CSV with text and label, with --data FILE",
    ("text", "label"), ("window", "tokenizer"),
)  # fmt: skip
PAIRS = InputKind(
    "pairs", "pairs of a source and a target", "input_ids",
    "give it JSON lines with source and target, with --data FILE.jsonl",
    ("source", "target"), ("window", "tokenizer"), two_stacks=True,
)  # fmt: skip
IMAGES = InputKind(
    "images", "images", "pixel_values", "give it a folder of images with --data DIR", ("file_name", "label"),
    processor=("image processor", ("preprocessor_config.json",)),
)  # fmt: skip
RECORDINGS = InputKind(
    "recordings", "recordings with transcripts", "input_features",
    "give it a folder of WAV files with transcripts, with --data DIR",
    options=("window", "tokenizer"), two_stacks=True,
    processor=("feature extractor", ("preprocessor_config.json", "processor_config.json")),
)  # fmt: skip


# --- Find what `--data` names: text, texts with labels, pairs, images or recordings ----------------------------------

_TABLE = ".csv"
_SHOWN = 8
"""The most labels that an error lists."""


@dataclass(frozen=True)
class FoundData:
    """Inputs that can be read.

    - `kind`: what they are
    - `paths`: what the user gave
    - `texts`: the files of text
    - `items`: the texts with labels, the sources of pairs, or the files of images or recordings, in order
    - `targets`: the label, the target or the transcript of each item; empty for images without labels
    """

    kind: InputKind = TEXT
    paths: tuple[str, ...] = ()
    texts: tuple[TextFile, ...] = ()
    items: tuple[Path | str, ...] = ()
    targets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the user gave, in sentences and in results; a file of labels is left out."""
        return (" and ".join(self.paths) or "the built-in text") if self.kind is TEXT else self.paths[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each item; empty if the targets are texts."""
        return () if self.kind.two_stacks else self.targets

    def describe(self, message: Callable[[str], None]) -> None:
        """Say what the files that the user gave are read as."""
        if self.paths:
            labels = " with labels" if self.kind is IMAGES and self.targets else ""
            message(f"reading {self.name} as {self.kind.shown}{labels}")

    def label_indices(self, known: Mapping[str, int] | None, count: int) -> dict[str, int]:
        """Return label → index of its logit; a label is one of the `known` names of the configuration, or a number.

        Raises:
            InputError: a label is neither, or is not below the number of labels, `count`.
        """
        names: Mapping[str, int] = {str(name): int(index) for name, index in (known or {}).items()}
        made = {}
        for label, item in zip(self.labels, self.items, strict=False):
            is_index = label.isdecimal() and int(label) < count
            if label not in names and not is_index:
                listed = ", ".join(list(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
                short = item.name if isinstance(item, Path) else textwrap.shorten(item, 40, placeholder="…")
                place = short if isinstance(item, Path) else f"the text {short!r}"
                raise InputError(
                    f"the label {label!r} of {place} is none of the {count} labels of the model; give one of its names "
                    f"({listed}) or a number from 0 to {count - 1}"
                )
            made[label] = names[label] if label in names else int(label)
        return made


def find_data(options: Any, architecture: str | None = None) -> FoundData:
    """Return the inputs that the options name, for a model of this class if it is known.

    A folder has images or recordings, and the fields of a file say whether it has pairs. A file of texts with labels is
    one for a class that predicts labels, and text for others. Until the class is known, it is not read.

    Raises:
        InputError: a file cannot be read, or is incomplete.
    """
    paths = given_paths(options)
    folders = [path for path in paths if Path(path).is_dir()]
    if folders:
        return _in_folder(folders, [path for path in paths if path not in folders])
    kind = _kind_of_file(Path(paths[0])) if len(paths) == 1 else TEXT
    if kind is LABELLED and architecture is None:
        return FoundData(LABELLED, paths)
    if kind is PAIRS or (kind is LABELLED and predicts_label(architecture or "")):
        return _in_file(paths[0], kind)
    return FoundData(TEXT, paths, find_texts(paths))


def checked_data(options: Any, architecture: str | None = None) -> FoundData:
    """Return the inputs as `find_data` does; raise if one of the options does not apply to what they are."""
    data, given = find_data(options, architecture), options.given()
    kind = data.kind
    if kind is LABELLED and not data.items:  # it may be text
        return data
    for name in given:
        if name in ABOUT_TEXT and name not in (*kind.options, "text"):
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} is about text, and {data.name} has {kind.shown}; leave it out")
    if "samples" in given and kind is TEXT:
        raise InputError(
            f"--samples is a number of images, labelled texts, pairs or recordings, and {data.name} is text; use "
            "--tokens"
        )
    if "stack" in given and not kind.two_stacks:
        raise InputError(f"--stack is for encoder–decoder models, which read {PAIRS.shown}, or {RECORDINGS.shown}")
    return data


def _kind_of_file(path: Path) -> InputKind:
    """Return the kind that the name of a file and its first line show."""
    if path.suffix.lower() == _TABLE and path.is_file():
        return LABELLED
    if path.suffix.lower() in JSONL and path.is_file():
        first = next(_records(path), (0, {}))[1]
        return next((kind for kind in (PAIRS, LABELLED) if {*kind.fields} <= first.keys()), TEXT)
    return TEXT


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSONL file and the numbers of their lines."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            record = parse_line(line, f"line {number} of {path}")
            if record is not None:
                yield number, record


def _in_file(path: str, kind: InputKind) -> FoundData:
    """Return the pairs of a file, each once, or its texts with labels, each text once."""
    known = dict[Any, tuple[str, str]]()
    for row in _rows(Path(path), kind.fields):
        known.setdefault(row if kind is PAIRS else row[0], row)
    if not known:
        raise InputError(f"{path} contains no texts; give JSON lines with the fields text and label, or CSV with both")
    items, targets = zip(*known.values(), strict=True)
    return FoundData(kind, (path,), items=items, targets=targets)


def _rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the values of two fields of a JSONL file, or the two columns of a CSV file, with a header or without."""
    first, second = fields
    try:
        if path.suffix.lower() in JSONL:
            for number, record in _records(path):
                values = [str(record.get(field) if record.get(field) is not None else "") for field in fields]
                if not all(value.strip() for value in values):
                    raise InputError(f"line {number} of {path} lacks {first} or {second}; give both")
                yield values[0], values[1]
            return
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {one_line(error)}") from error
    for number, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        if row and (number > 1 or row[0].strip() != first):
            if len(row) != len(fields):
                raise InputError(
                    f"line {number} of {path} has {counted(len(row), 'column')}; a file of labels has two, {first} and "
                    f"{second}"
                )
            yield row[0].strip(), row[1].strip()


def _in_folder(folders: Sequence[str], others: Sequence[str]) -> FoundData:
    """Return the recordings or the images of a folder, and the labels of the images in the `others`, at most one file.

    Files whose names end as those of images do are images. Names in a file of labels are relative to the folder.
    """
    folder = Path(folders[0])
    if len(folders) > 1 or len(others) > 1:
        raise InputError(f"--data {folder} is a folder, beside which one file of labels can be given; leave others out")
    inside = sorted(path for path in folder.rglob("*") if path.is_file())
    recordings = tuple(path for path in inside if path.suffix.lower() == ".wav")
    if recordings:
        if others:
            raise InputError(f"{folder} has recordings, whose transcripts are beside them; leave {others[0]} out")
        for file in recordings:
            read_wave(file, str(file), has_sound=False)
        return FoundData(RECORDINGS, (folders[0],), items=recordings, targets=tuple(map(_transcript, recordings)))
    endings = set(pillow().registered_extensions())
    images = tuple(path for path in inside if path.suffix.lower() in endings)
    if not images:
        raise InputError(
            f"{folder} contains no images and no WAV files; give a folder with files such as .jpg or .png, or with "
            "a.wav and its transcript a.txt"
        )
    data = FoundData(IMAGES, (folders[0], *others), items=images)
    if not others:
        return data
    known = dict(_rows(Path(others[0]), IMAGES.fields))
    names = [path.relative_to(folder).as_posix() for path in images]
    if missing := [name for name in names if name not in known]:
        raise InputError(
            f"{others[0]} has no label for {counted(len(missing), 'image')} of {folder}, such as {missing[0]}; add a "
            "line with the file name and the label"
        )
    return replace(data, targets=tuple(known[name] for name in names))


def pillow() -> Any:
    """Import and return the module of Pillow that reads images."""
    return optional("PIL.Image", "reading images", "images")


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


# --- Refuse models that do not read the inputs ------------------------------------------------------------------------


def require_fit(
    data: FoundData, name: str, architecture: str, main: str | None, has_two: bool, has_tower: bool = False
) -> None:
    """Raise unless a model reads the inputs that were found.

    Args:
        data: the inputs.
        name: what the user calls the model.
        architecture: its class.
        main: its main input; None if that is not known yet.
        has_two: whether it is an encoder–decoder model.
        has_tower: whether it has a part for images beside others.
    """
    kind = data.kind
    if kind is IMAGES and has_tower:
        raise CheckpointError(
            f"{name} is a {architecture} with a vision tower and other parts; save the tower alone, for example with "
            "CLIPVisionModel.from_pretrained(…).save_pretrained(…), and give its directory"
        )
    if main is None:
        unfit = {TEXT: has_two, LABELLED: has_two, PAIRS: not has_two}.get(kind, False)
        main = TEXT.main if unfit else kind.main
    readers = {TEXT.main: PAIRS if has_two else TEXT, IMAGES.main: IMAGES, RECORDINGS.main: RECORDINGS}
    needed = readers.get(main)
    if needed is None:
        raise CheckpointError(f"{name} is a {architecture}, which reads {main}; give a model of text, images or speech")
    if needed is not (TEXT if kind is LABELLED else kind):
        also = f"; {data.name} has {kind.shown}" if data.paths else ""
        raise CheckpointError(f"{name} is a {architecture}, which reads {needed.shown}; {needed.advice}{also}")
    if data.labels and not predicts_label(architecture):
        raise InputError(
            f"labels need a model with a classification head for whole inputs, and {name} is a {architecture}; leave "
            "the file of labels out"
        )


def class_in_config(source: Source | None, model: Any = None) -> str:
    """Return the class that a configuration names, or that of a model in memory; empty if none is named."""
    if source is None:
        return type(model).__name__
    if source.gguf is not None:
        return ""
    named = read_json(source.folder / "config.json", source.target).get("architectures")
    return str((named or [""])[0])


def check_files(source: Source, data: FoundData) -> None:
    """Raise if the files of a checkpoint show that the model does not read the inputs that were found.

    What they do not show is checked when transformers is imported: see `require_kind`.
    """
    if source.gguf is None:
        raw = read_json(source.folder / "config.json", source.target)
        named, labels = class_in_config(source), raw.get("label2id")
        main = _main_input(raw, named)
        if named and not raw.get("auto_map"):
            has_two, tower = bool(raw.get("is_encoder_decoder")), raw.get("vision_config") is not None
            require_fit(data, source.target, named, main, has_two, tower)
        if isinstance(labels, dict) and all(type(one) is int for one in labels.values()):
            data.label_indices(labels, len(labels))
        if main == data.kind.main:
            require_processor(source, data.kind)


def require_processor(source: Source, kind: InputKind) -> None:
    """Raise if a checkpoint lacks what reads inputs of this kind, beside a tokenizer."""
    noun, files = kind.processor
    if files and not any((source.folder / file).is_file() for file in files):
        raise CheckpointError(f"{source.target} contains no {noun}, expected {files[0]}; download it with the model")


def _main_input(raw: Mapping[str, Any], architecture: str) -> str | None:
    """Return the main input of a model where its configuration leaves no doubt."""
    if architecture.endswith("ForCausalLM"):
        return TEXT.main
    if "patch_size" in raw and not raw.keys() & {"vocab_size", "text_config"}:
        return IMAGES.main
    return RECORDINGS.main if "num_mel_bins" in raw else None
