"""Write a shrunk model as a GGUF file that transformers and llama.cpp have read, with its record next to it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from depthgauge.base.format import counted
from depthgauge.base.io import atomic_file
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Durations
from depthgauge.checkpoints.samples import as_samples
from depthgauge.results.shrink_record import LLAMA, ReloadRecord
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.gguf_layout import EncodedTensor, GgufLayout
from depthgauge.surgery.open_model import OpenedModel
from depthgauge.surgery.shrunk_model import ShrunkModel
from depthgauge.surgery.verify_gguf import LlamaComparison, compare_with_llama, llama_speed, not_checked, require_same
from depthgauge.surgery.write_gguf import check_written, provenance, shrunk_fields, write_gguf
from depthgauge.surgery.write_shrunk import CheckedModel


@contextmanager
def checked_gguf(
    shrunk: ShrunkModel,
    certifier: Certifier,
    opened: OpenedModel,
    out: str | Path,
    *,
    overwrite: bool,
    journal: Journal,
    durations: Durations,
    source: LlamaComparison | None,
) -> Iterator[CheckedModel]:
    """Write a model as a GGUF file, and check it; the file gets its name at the end of the block.

    transformers must read every weight as it is in memory. Then llama.cpp runs the file, and times it and its
    source in turns, unless it is not installed. `source` is what llama.cpp makes of the source model; None without it.

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
    with atomic_file(out, overwrite, journal.result_file()) as path:
        write_gguf(path, layout, kept, fields, shrunk.encoded, certifier.progress)
        with durations("reading the file back"):
            certifier.progress(0, 1, "reading the file back")
            check_written(path, out, model, checkpoint.stream is not None)
        if source is None:
            yield CheckedModel(path, out, path.stat().st_size, None, None, notes=(not_checked(),))
            return
        window = as_samples(certifier.inputs).main[0]
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
        yield CheckedModel(path, out, path.stat().st_size, None, reload, speed=speed)


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
