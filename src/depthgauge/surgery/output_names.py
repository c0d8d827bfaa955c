"""The outputs of `shrink`: a directory, or a GGUF file with its record next to it."""

from pathlib import Path

from depthgauge.base.errors import InputError, unknown_name
from depthgauge.base.journal import RECORD, Journal
from depthgauge.checkpoints.source import Source
from depthgauge.results.shrink_options import ShrinkOptions

WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
"""Types of tensors that gguf-py can write."""


def is_gguf_name(out: str | Path | None) -> bool:
    """Return whether an output is a GGUF file by its name; all other names are directories."""
    return out is not None and Path(out).suffix.lower() == ".gguf"


def check_gguf_output(source: Source | None, kind: str | None, name: str) -> None:
    """Raise unless the model called `name` can be written as a GGUF file, with weights of the type `kind` if given.

    `source` is None for a model in memory.
    """
    if kind is not None and kind not in WRITTEN:
        raise unknown_name("gguf-type", kind, WRITTEN)
    if source is None or source.gguf is None:
        raise InputError(
            f"a GGUF file can be written if the model is one, and {name} is not; convert it with llama.cpp's "
            "convert_hf_to_gguf.py and shrink the result, or give a directory as --out"
        )


def record_file(out: str | Path) -> Path:
    """Return where the record of an output is: in its directory, or next to a GGUF file, `NAME.depthgauge.json`."""
    return Path(out).with_suffix(f".{RECORD}") if is_gguf_name(out) else Path(out) / RECORD


def has_written(journal: Journal, out: str | Path) -> bool:
    """Return whether a run, before it was interrupted, has written an output completely."""
    if is_gguf_name(out):
        return journal.has_written(record_file(out)) and Path(out).is_file()
    return journal.has_written(out)


def output_folders(out: str | Path, settings: ShrinkOptions) -> list[Path]:
    """Return the directories or files that a run writes; of several sizes, one for each, `OUT-4` or `OUT-25%`."""
    names = settings.removals
    return [Path(out)] if len(names) == 1 else [sized_output(out, name) for name in names]


def sized_output(out: str | Path, size: str) -> Path:
    """Return the output of one of several sizes: `OUT-4`, or `NAME-4.gguf`."""
    path = Path(out)
    return path.with_stem(f"{path.stem}-{size}") if is_gguf_name(path) else Path(f"{out}-{size}")
