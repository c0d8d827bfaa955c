"""Read a directory of images, with or without labels, as a model of images reads them."""

import csv
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgauge._format import counted, one_line
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.library import CheckpointError, attempt, quiet, transformers
from depthgauge.checkpoints.load import IMAGES, Placement, objective_of
from depthgauge.checkpoints.samples import Samples
from depthgauge.checkpoints.source import Source
from depthgauge.checkpoints.text_files import JSONL, parse_line
from depthgauge.errors import InputError, missing_extra, require_path

_PROCESSOR = "preprocessor_config.json"
_NAMES = ("file_name", "file")
"""The names of the field, or of the column, with the name of the file."""
_SHOWN = 8
"""The most labels that an error lists."""


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


def _pillow() -> Any:
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
    endings = set(_pillow().registered_extensions())
    if not path.is_dir():
        raise InputError(f"--images must be a directory of images, and {path} is none; give one that exists")
    files = tuple(sorted(one for one in path.rglob("*") if one.suffix.lower() in endings and one.is_file()))
    if not files:
        raise InputError(f"{path} contains no images; give a directory with files such as .jpg or .png")
    if labels is None:
        return ImageFolder(path, files)
    known = dict(_read_labels(Path(labels)))
    names = [one.relative_to(path).as_posix() for one in files]
    if missing := [name for name in names if name not in known]:
        raise InputError(
            f"{labels} has no label for {counted(len(missing), 'image')} of {path}, such as {missing[0]}; add a line "
            "with the file name and the label"
        )
    return ImageFolder(path, files, tuple(known[name] for name in names))


def _read_labels(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the file names and labels of a file."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the labels {path}: {one_line(error)}") from error
    if path.suffix.lower() in JSONL:
        for number, line in enumerate(raw.splitlines(), start=1):
            record = parse_line(line, f"line {number} of {path}")
            name = next((record[key] for key in _NAMES if key in record), None) if record is not None else ""
            if record is not None:
                if name is None or "label" not in record:
                    raise InputError(f"line {number} of {path} lacks file_name or label; give both")
                yield str(name), str(record["label"])
        return
    for number, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        if not row or (number == 1 and row[0].strip() in _NAMES):
            continue
        if len(row) != 2:
            raise InputError(
                f"line {number} of {path} has {counted(len(row), 'column')}; a file of labels has two, the file name "
                "and the label"
            )
        yield row[0].strip(), row[1].strip()


def require_labelled(found: ImageFolder, config: Any, name: str) -> None:
    """Raise if images have labels and the model called `name` has no classification head."""
    architecture = (getattr(config, "architectures", None) or ["model without a head"])[0]
    if found.labels is not None and objective_of(architecture) != "logits":
        raise InputError(
            f"--labels needs a model with a classification head, and {name} is a {architecture}; leave --labels out"
        )


def label_indices(found: ImageFolder, config: Any) -> dict[str, int]:
    """Return label → index of its logit; a label is a name of the configuration or a number."""
    names: Mapping[str, int] = {str(name): int(index) for name, index in (config.label2id or {}).items()}
    made = {}
    for label, file in zip(found.labels or (), found.files, strict=False):
        is_index = label.isdecimal() and int(label) < config.num_labels
        if label not in names and not is_index:
            listed = ", ".join(list(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            raise InputError(
                f"the label {label!r} of {file.name} is none of the {config.num_labels} labels of the model; give one "
                f"of its names ({listed}) or a number from 0 to {config.num_labels - 1}"
            )
        made[label] = names[label] if label in names else int(label)
    return made


def load_processor(source: Source, placement: Placement, given: Any = None) -> Any:
    """Load the image processor of a checkpoint; refuse one in memory that is `given`."""
    if given is not None:
        raise InputError(f"{source.target} is on disk and has its own image processor; leave tokenizer=… out")
    _pillow()
    if not (source.folder / _PROCESSOR).is_file():
        raise CheckpointError(
            f"{source.target} contains no image processor, expected {_PROCESSOR}; download it with the model"
        )

    def load() -> Any:
        return transformers().AutoImageProcessor.from_pretrained(
            source.folder, trust_remote_code=placement.trust_remote_code, local_files_only=True
        )

    return attempt(source.target, "image processor", load)


def read_images(
    found: ImageFolder, processor: Any, config: Any, *, wanted: int, seed: int, least: int = 1, advice: str = ""
) -> GivenWindows:
    """Read up to `wanted` different images, drawn by the seed, through the model's image processor.

    Args:
        found: the images.
        processor: the image processor of the model.
        config: the configuration of the model, which has the names of the labels.
        wanted: the most images to read.
        seed: chooses the images.
        least: the fewest that are enough.
        advice: what else to do where there are too few.

    Raises:
        InputError: an image cannot be read, or there are fewer than `least` different ones.
    """
    order = torch.randperm(len(found.files), generator=torch.Generator().manual_seed(seed)).tolist()
    indices = label_indices(found, config)
    pixels, targets, seen = list[Tensor](), list[int](), dict[str, None]()
    for index in order:
        if len(pixels) == wanted:
            break
        content, digest = _content(found.files[index])
        if digest not in seen:
            seen[digest] = None
            pixels.append(_pixels(content, found.files[index], processor))
            if found.labels is not None:
                targets.append(indices[found.labels[index]])
    if len(pixels) < least:
        raise InputError(
            f"{found.path} has {counted(len(pixels), 'different image')}, and {least} are needed; give more images"
            f"{advice}"
        )
    shapes = {tuple(one.shape) for one in pixels}
    if len(shapes) > 1:
        raise InputError(
            f"the image processor gives the images of {found.path} different sizes, such as "
            f"{' and '.join(map(str, sorted(shapes)[:2]))}; give images of one size"
        )
    inputs = Samples({IMAGES: torch.stack(pixels)}, torch.tensor(targets) if targets else None)
    total = hashlib.sha256("".join(seen).encode()).hexdigest()
    return GivenWindows("images", inputs, str(found.path), total)


def _content(path: Path) -> tuple[bytes, str]:
    """Return the bytes of a file and their SHA-256."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the image {path}: {error.strerror or error}") from error
    return raw, hashlib.sha256(raw).hexdigest()


def _pixels(raw: bytes, path: str | os.PathLike[str], processor: Any) -> Tensor:
    """Return an image as the image processor gives it to the model."""
    library = _pillow()
    try:
        image = library.open(io.BytesIO(raw)).convert("RGB")
        with quiet():
            made: Tensor = processor(images=image, return_tensors="pt")[IMAGES][0]
    except Exception as error:  # decoders and processors raise errors of many kinds
        raise InputError(f"cannot read the image {path}: {one_line(error)}; repair or remove it") from error
    return made
