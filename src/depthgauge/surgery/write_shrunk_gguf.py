"""Write a shrunk model as a GGUF file that transformers and llama.cpp have read, with its record next to it."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from depthgauge.base.format import counted
from depthgauge.base.io import atomic_file
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Durations
from depthgauge.checkpoints.input_kinds import TEXT
from depthgauge.checkpoints.samples import as_samples
from depthgauge.results.shrink_record import LLAMA, BeforeAfter, ReloadRecord, ShrinkRecord
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.gguf_layout import EncodedTensor, GgufLayout
from depthgauge.surgery.open_model import OpenedModel
from depthgauge.surgery.output_names import record_file
from depthgauge.surgery.shrunk_model import ShrunkModel
from depthgauge.surgery.verify_gguf import LlamaComparison, compare_with_llama, llama_speed, not_checked, require_same
from depthgauge.surgery.write_gguf import check_written, provenance, shrunk_fields, write_gguf


def write_shrunk_gguf(
    shrunk: ShrunkModel,
    record: ShrinkRecord,
    certifier: Certifier,
    opened: OpenedModel,
    out: str | Path,
    *,
    overwrite: bool,
    journal: Journal,
    finish: Callable[[ShrinkRecord], ShrinkRecord],
    durations: Durations,
    source: LlamaComparison | None,
) -> ShrinkRecord:
    """Write a model as a GGUF file, check it, and describe it with the losses of its weights as they are stored.

    transformers must read every weight as it is in memory. Then llama.cpp runs the file, and times it and its
    source in turns, unless it is not installed.
    The file gets its name after all checks, and the record is written just before.

    `record` is the result without the losses of the shrunk model, which `finish` completes once everything was
    measured. `source` is what llama.cpp makes of the source model; None without llama.cpp.

    Raises:
        VerificationError: the file is not the model in memory; nothing is written.
    """
    layout, checkpoint, model = opened.stored, opened.checkpoint, shrunk.model
    assert isinstance(layout, GgufLayout)
    assert checkpoint.source is not None
    kept = [layer for layer in range(layout.layers) if layer not in shrunk.removed]
    fields = shrunk_fields(layout, kept, getattr(model.config, "layer_types", None))
    name = checkpoint.source.path.name
    fields |= provenance(layout, name, opened.files.get(name, ""), shrunk.removed)
    with durations("certification"):
        record = certifier.certified(record, certifier.run(model))
    with atomic_file(out, overwrite, journal.result_file()) as path:
        write_gguf(path, layout, kept, fields, shrunk.encoded, certifier.progress)
        with durations("reading the file back"):
            certifier.progress(0, 1, "reading the file back")
            check_written(path, out, model, checkpoint.stream is not None)
        if source is None:
            record = msgspec.structs.replace(record, notes=(*record.notes, not_checked()))
        else:
            window = as_samples(certifier.inputs, TEXT).main[0]
            certifier.progress(0, 1, "the result in llama.cpp")
            with durations("check in llama.cpp"):
                found = compare_with_llama(path, model, window)
            require_same(out, found, source)
            reload = ReloadRecord(
                difference=found.difference, layers=len(kept), generation=found.sentence, program=LLAMA,
                source_difference=source.difference,
            )  # fmt: skip
            certifier.progress(0, 1, "speed of both files")
            with durations("speed"):
                speed = llama_speed(checkpoint.source.path, path, window)
            record = msgspec.structs.replace(record, reload=reload, speed=speed)
        size = BeforeAfter(before=record.bytes.before, after=path.stat().st_size)
        record = finish(msgspec.structs.replace(record, bytes=size, out=str(out)))
        text = msgspec.json.format(msgspec.json.encode(record)).decode() + "\n"
        journal.write(record_file(out), text, overwrite)
    return record


def type_notes(layout: GgufLayout, encoded: Mapping[str, EncodedTensor]) -> list[str]:
    """Return notes about the types of the tensors in the written file."""
    if not encoded:
        return ["all tensors are those of the source file, byte for byte"]
    moved = Counter(
        (layout.tensors[name].tensor_type.name, made.kind.name)
        for name, made in encoded.items()
        if made.kind != layout.tensors[name].tensor_type
    )
    return [
        f"{counted(count, 'changed tensor')} of the type {before} {'is' if count == 1 else 'are'} written as {after}: "
        f"gguf-py reads {before} and cannot write it; --gguf-type chooses another type"
        for (before, after), count in sorted(moved.items())
    ]
