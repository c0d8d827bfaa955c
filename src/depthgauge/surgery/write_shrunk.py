"""Write a shrunk model with its documents, after a fresh process has verified it."""

import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from depthgauge._journal import RECORD, Journal
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.source import Source
from depthgauge.results.shrink_record import BeforeAfter, ShrinkRecord
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.model_card import hub_name, mergekit_plan, model_card
from depthgauge.surgery.speed import weight_bytes
from depthgauge.surgery.verify import verify_reload
from depthgauge.surgery.write_model import written_model


def write_shrunk(
    model: Any,
    record: ShrinkRecord,
    certifier: Certifier,
    checkpoint: Checkpoint,
    tokenizer: Any,
    out: str | Path,
    *,
    overwrite: bool,
    journal: Journal | None = None,
) -> ShrinkRecord:
    """Write a model, load it in a fresh process, compare, and describe it with the reloaded model's losses.

    Args:
        model: the shrunk model.
        record: the result, without the losses of the shrunk model.
        certifier: the certify windows.
        checkpoint: the model that it was made from.
        tokenizer: its tokenizer.
        out: the directory to create.
        overwrite: replace a checkpoint that exists.
        journal: notes the directory before it gets its final name.

    Raises:
        VerificationError: the written model is not the model in memory; nothing is left at `out`.
    """
    started, source = time.perf_counter(), checkpoint.source
    device = "auto" if record.plan.settings.device_map else str(checkpoint.device)
    # Half precision is slow on a CPU; float32 holds the same weights.
    compute = torch.float32 if device == "cpu" and model.dtype.itemsize < 4 else None
    with written_model(model, source, tokenizer, out, overwrite=overwrite) as folder:
        certifier.progress(0, 1, "loading the result in a fresh process")
        reload, losses = verify_reload(
            folder, certifier.ids, model, device=device, dense=certifier.states, compute=compute
        )
        record = msgspec.structs.replace(
            certifier.certified(record, losses),
            bytes=BeforeAfter(before=record.bytes.before, after=weight_bytes(Source(folder))),
            reload=reload,
            out=str(out),
            seconds=record.seconds + time.perf_counter() - started,
        )
        text = msgspec.json.format(msgspec.json.encode(record)).decode() + "\n"
        if journal is not None:
            journal.claim(out, text)
        documents = {RECORD: text, "README.md": model_card(record, hub_name(checkpoint.config, source))}
        if not record.repaired and not (record.heal is not None and record.heal.kept):
            kept = [layer for layer in range(record.layers_before) if layer not in record.removed]
            dtype = str(model.dtype).removeprefix("torch.")
            documents["plan.mergekit.yaml"] = mergekit_plan(record.plan.model, dtype, kept)
        for name, content in documents.items():
            (folder / name).write_text(content, encoding="utf-8")
    return record
