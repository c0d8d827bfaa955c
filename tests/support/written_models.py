"""Write a model with documents, as `shrink` does."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from depthgauge.checkpoints.source.model_files import Source
from depthgauge.surgery.write_model import written_model


def write_model(
    model: Any,
    source: Source | None,
    tokenizer: Any,
    out: str | Path,
    documents: Mapping[str, str],
    *,
    overwrite: bool,
    verify: Callable[[Path], Mapping[str, str]] = lambda folder: {},
    max_shard: str = "5GB",
) -> None:
    """Write a model; `verify` is called with the folder before it gets its name, and returns further documents."""
    with written_model(model, source, tokenizer, out, overwrite=overwrite, max_shard=max_shard) as folder:
        for name, text in {**documents, **verify(folder)}.items():
            (folder / name).write_text(text, encoding="utf-8")
