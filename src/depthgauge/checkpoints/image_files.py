"""Read a directory of images, with or without labels, as a model of images reads them."""

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted, one_line
from depthgauge.checkpoints.found_inputs import ImageFolder, label_indices, pillow
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.input_kinds import IMAGES
from depthgauge.checkpoints.library import attempt, quiet, transformers
from depthgauge.checkpoints.load import Placement
from depthgauge.checkpoints.samples import Samples
from depthgauge.checkpoints.source import Source


def load_processor(source: Source, placement: Placement, given: Any = None) -> Any:
    """Load the image processor of a checkpoint; refuse one in memory that is `given`."""
    if given is not None:
        raise InputError(f"{source.target} is on disk and has its own image processor; leave tokenizer=… out")

    def load() -> Any:
        return transformers().AutoImageProcessor.from_pretrained(
            source.folder, trust_remote_code=placement.trust_remote_code, local_files_only=True
        )

    return attempt(source.target, "image processor", load)


def read_images(
    found: ImageFolder, processor: Any, config: Any, *, wanted: int, seed: int, least: int = 1, advice: str = ""
) -> GivenWindows:
    """Read up to `wanted` different images, drawn by the seed, through the model's image processor.

    `config` has the names of the labels, and `advice` says what else to do where there are too few images.

    Raises:
        InputError: an image cannot be read, or there are fewer than `least` different ones.
    """
    order = torch.randperm(len(found.files), generator=torch.Generator().manual_seed(seed)).tolist()
    indices = label_indices(found, config.label2id, config.num_labels)
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
    total = hashlib.sha256("".join([*seen, *map(str, targets)]).encode()).hexdigest()
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
    library = pillow()
    try:
        image = library.open(io.BytesIO(raw)).convert("RGB")
        with quiet():
            made: Tensor = processor(images=image, return_tensors="pt")[IMAGES][0]
    except Exception as error:  # decoders and processors raise errors of many kinds
        raise InputError(f"cannot read the image {path}: {one_line(error)}; repair or remove it") from error
    return made
