"""Write a shrunk model, after a fresh process has verified it, with its record, model card and plan for mergekit."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from depthgauge.base.format import contiguous
from depthgauge.base.journal import RECORD, Journal
from depthgauge.base.progress import Durations
from depthgauge.checkpoints.inputs.kinds import TEXT
from depthgauge.checkpoints.load import HEADROOM, Checkpoint, parameter_count
from depthgauge.checkpoints.memory import free_memory
from depthgauge.checkpoints.source import Source, weight_bytes
from depthgauge.results.shrink_record import ReloadRecord, ShrinkRecord, SpeedRecord
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.extract import has_layer_lists
from depthgauge.surgery.model_card import model_card
from depthgauge.surgery.output_names import record_file
from depthgauge.surgery.verify import FreshProcess, verify_reload
from depthgauge.surgery.write_model import written_model


@dataclass(frozen=True, eq=False)
class CheckedModel:
    """A model that is written under a temporary name and was loaded by a new process.

    - `path`: its directory or file
    - `out`: the name that it will have
    - `size`, `dtype`: the bytes of its weights, and their type in a directory
    - `reload`: what the new process has found; None if there was none
    - `found`: what `Certifier.losses_of` needs, where it is not that of the model in memory
    - `speed`: how fast the file and its source are
    - `notes`: what a reader should know about it
    """

    path: Path
    out: str | Path
    size: int
    dtype: torch.dtype | None
    reload: ReloadRecord | None
    found: Tensor | None = None
    speed: SpeedRecord | None = None
    notes: tuple[str, ...] = ()


@contextmanager
def checked_directory(
    model: Any,
    certifier: Certifier,
    checkpoint: Checkpoint,
    tokenizer: Any,
    out: str | Path,
    *,
    overwrite: bool,
    device_map: str | None = None,
    durations: Durations | None = None,
    process: FreshProcess | None = None,
) -> Iterator[CheckedModel]:
    """Write a model, load it in a fresh process, and compare; the directory gets its name at the end of the block.

    `checkpoint` is the model that it was made from. `process` is a fresh process that was started before, so that it is
    ready.

    Raises:
        VerificationError: the written model is not the model in memory; nothing is left at `out`.
    """
    source, durations = checkpoint.source, durations or Durations()
    is_streamed = checkpoint.stream is not None
    torch.cuda.empty_cache()  # for the other process
    room = free_memory(checkpoint.device)
    fits = not is_streamed and HEADROOM * parameter_count(model) * model.dtype.itemsize <= room
    device = str(checkpoint.device) if fits and not device_map else "auto"
    # Half precision is slow on a CPU; float32 holds the same weights.
    compute = torch.float32 if device == "cpu" and model.dtype.itemsize < 4 else None
    shards = {"max_shard": "2GB"} if is_streamed else {}  # a file is in memory while it is written
    with ExitStack() as files:
        with durations("writing"):
            folder = files.enter_context(written_model(model, source, tokenizer, out, overwrite=overwrite, **shards))
        certifier.progress(0, 1, "loading the result in a fresh process")
        with durations("check in a new process"):
            reload, found = verify_reload(
                folder, certifier.inputs if fits else certifier.inputs[:1], model,
                device=device, like=checkpoint, new_tokens=16 if fits else 2, compute=compute, process=process,
            )  # fmt: skip
        # A model without room is measured in batches, so that every block is read a few times and not for each window.
        yield CheckedModel(folder, out, weight_bytes(Source(folder)), model.dtype, reload, found if fits else None)


def write_documents(
    checked: CheckedModel, record: ShrinkRecord, checkpoint: Checkpoint, journal: Journal, overwrite: bool
) -> None:
    """Write the record of a model, next to a GGUF file or into a directory, which also gets a model card.

    The journal notes what is written before it gets its final name.
    """
    text = msgspec.json.format(msgspec.json.encode(record)).decode() + "\n"
    if not checked.path.is_dir():
        journal.write(record_file(checked.out), text, overwrite)
        return
    journal.claim(checked.out, text)
    documents = {RECORD: text, "README.md": model_card(record, hub_name(checkpoint.config, checkpoint.source))}
    unchanged = not record.repaired and not (record.recovery is not None and record.recovery.kept)
    # mergekit reads directories, and leaves lists with one entry per layer as they are.
    if (
        unchanged
        and checkpoint.reads == TEXT.main
        and checkpoint.stack is None
        and (checkpoint.source is None or checkpoint.source.gguf is None)
        and not has_layer_lists(checkpoint.config)
    ):
        kept = [layer for layer in range(record.layers_before) if layer not in record.removed]
        dtype = str(checked.dtype).removeprefix("torch.")
        documents["plan.mergekit.yaml"] = mergekit_plan(record.plan.model, dtype, kept)
    for name, content in documents.items():
        (checked.path / name).write_text(content, encoding="utf-8")


def hub_name(config: Any, source: Source | None) -> str | None:
    """Return the name of a model on a model hub, such as `org/name`: its origin, or what its configuration records.

    The result is None if none is recorded, or if what is recorded is a path on this machine.
    """
    if source is not None and source.hub is not None:
        return source.hub.repo
    if source is None:
        recorded = getattr(config, "_name_or_path", None)
    elif source.gguf is None:  # the loaded configuration holds the path that it was loaded from
        recorded = json.loads((source.folder / "config.json").read_text("utf-8")).get("_name_or_path")
    else:
        recorded = None
    name = str(recorded)
    return name if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not Path(name).exists() else None


def mergekit_plan(name: str, dtype: str, kept: Sequence[int]) -> str:
    """Return the configuration with which mergekit keeps the same layers of a model, without repair."""
    lines = ["slices:"]
    for start, stop in contiguous(kept):
        lines += [
            "- sources:",
            f"  - model: {json.dumps(name, ensure_ascii=False)}",
            f"    layer_range: [{start}, {stop}]",
        ]
    return "\n".join([*lines, "merge_method: passthrough", f"dtype: {dtype}"]) + "\n"
