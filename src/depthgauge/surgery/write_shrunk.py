"""Write a shrunk model, after a fresh process has verified it, with its record, model card and plan for mergekit.

A GGUF file is read by transformers and llama.cpp before it gets its name; its record lies next to it.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from depthgauge.base.format import DASH, capital, contiguous, counted, ranges
from depthgauge.base.io import atomic_file
from depthgauge.base.journal import RECORD, Journal
from depthgauge.base.progress import Durations
from depthgauge.checkpoints.inputs.found_data import TEXT
from depthgauge.checkpoints.inputs.windows import as_samples
from depthgauge.checkpoints.source.model_files import Source, weight_bytes
from depthgauge.checkpoints.weights.load import HEADROOM, Checkpoint, parameter_count
from depthgauge.checkpoints.weights.stored_weights import free_memory
from depthgauge.results.document import Part, Place, fixed
from depthgauge.results.gauge_record import BOTH
from depthgauge.results.labels import GIVEN, of_stack
from depthgauge.results.shrink_document import layers_text, shrink_parts
from depthgauge.results.shrink_record import LLAMA, ReloadRecord, ShrinkRecord, SpeedRecord
from depthgauge.surgery.candidates import ShrunkModel
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.extract import has_layer_lists
from depthgauge.surgery.gguf_layout import (
    EncodedTensor,
    GgufLayout,
    check_written,
    provenance,
    shrunk_fields,
    write_gguf,
)
from depthgauge.surgery.open_model import OpenedModel
from depthgauge.surgery.verify import (
    FreshProcess,
    LlamaComparison,
    compare_with_llama,
    llama_speed,
    not_checked,
    require_same,
    verify_reload,
)
from depthgauge.surgery.write_model import record_file, written_model

# --- The model card of a shrunk model: its document in Markdown, with the metadata that model hubs read --------------

_DIGITS = 16
"""How many digits of a SHA-256 the model card shows."""


def model_card(record: ShrinkRecord, base_model: str | None) -> str:
    """Return the model card in Markdown, with the metadata that model hubs read.

    The card is published with the model, so the source model, texts, images, pairs and recordings are named without
    their directories. `base_model` is the `hub_name` of the source model.
    """
    record = _without_directories(record)
    plan = record.plan
    name = Path(plan.model).name if plan.hub is None else plan.hub.name
    model = name if plan.hub is None else plan.hub.target
    base = [] if base_model is None else [f"base_model: {json.dumps(base_model, ensure_ascii=False)}"]
    lines = ["---", *base, "library_name: transformers", "tags:", "- depthgauge", "- pruned", "---", ""]
    lines += [*_summary(record, name), ""]
    for part in shrink_parts(record):
        if Place.CARD in part.place:
            lines += markdown(_with_digests(part, record))
    lines += [
        "## How to reproduce",
        "",
        "`depthgauge.json` contains the plan, the seeds, the digests of the inputs and all measurements.",
        "",
        f"    depthgauge shrink {model} --remove depthgauge.json --out smaller",
    ]
    return "\n".join(lines) + "\n"


def markdown(part: Part) -> Iterator[str]:
    """Yield the lines of one part of a document: its title, sentences, table and caption."""
    yield from (f"## {part.title}", "")
    if part.statements:
        yield from (*(f"- {capital(statement).rstrip('.')}." for statement in part.statements), "")
    table = part.table_at(Place.CARD)
    if table is not None:
        columns = table.brief()
        yield from (f"{table.title}:", "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}")
        for row in zip(*columns.values(), strict=True):
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"
        yield ""
    yield from (part.caption, "") if part.caption else ()


def _with_digests(part: Part, record: ShrinkRecord) -> Part:
    """Return the part of the texts with the digest of each, and other parts as they are."""
    if part.name != "texts" or part.table is None:
        return part
    digests = {(one.kind, one.name): f"{one.sha256[:_DIGITS]}…" for one in record.plan.calibration.sources}
    cells = [fixed(digests.get((one.kind, one.name), DASH)) for one in record.texts]
    rows = tuple((*row, cell) for row, cell in zip(part.table.rows, cells, strict=True))
    return replace(part, table=replace(part.table, columns=(*part.table.columns, "SHA-256"), rows=rows))


def _without_directories(record: ShrinkRecord) -> ShrinkRecord:
    """Return a record that names files and directories of the user by the last part of their paths."""

    def bare(one: Any) -> Any:
        last = os.path.basename(os.path.abspath(one.name))  # of `.`, the name of the directory
        return msgspec.structs.replace(one, name=last) if one.kind in GIVEN else one

    calibration = record.plan.calibration
    calibration = msgspec.structs.replace(calibration, sources=tuple(map(bare, calibration.sources)))
    plan = msgspec.structs.replace(record.plan, calibration=calibration)
    return msgspec.structs.replace(record, texts=tuple(map(bare, record.texts)), plan=plan)


def _summary(record: ShrinkRecord, name: str) -> Iterator[str]:
    order = ", those of the encoder first" if record.plan.stack == BOTH else ""
    yield f"# {name} with {layers_text(record)}"
    yield ""
    yield (
        f"depthgauge {record.version} removed {len(record.removed)} of the {record.layers_before} layers"
        f"{of_stack(record.plan.stack)} of `{name}`: {ranges(record.removed)} (counted from 0{order})."
    )
    if record.plan.hub is not None:
        yield f"The source is the commit {record.plan.hub.commit}."
    if record.repaired:
        yield (
            "The remaining weights were repaired: the maps that write into the residual stream, gains and biases were "
            "fitted to what the source model computes."
        )
    else:
        yield "The remaining weights are unchanged."
    if record.recovery is not None and record.recovery.kept:
        tokens = record.recovery.tokens
        yield f"The model was then trained on {tokens:,} tokens to predict what the source model predicts."
    if name.endswith(".gguf"):
        yield "The source is a quantized GGUF file; its weights were dequantized."
    yield f"It has {record.parameters.after or 0:,} parameters instead of {record.parameters.before or 0:,}."
    yield "It loads with transformers and needs no custom code."


# --- A directory ------------------------------------------------------------------------------------------------------


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
    is_spread: bool = False,
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
    device = str(checkpoint.device) if fits and not is_spread else "auto"
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


# --- A GGUF file ------------------------------------------------------------------------------------------------------


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
            comparison = compare_with_llama(path, model, window)
        require_same(out, comparison, source)
        reload = ReloadRecord(
            difference=comparison.difference, layers=len(kept), generation=comparison.sentence, program=LLAMA,
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
        f"gguf-py reads {before} and cannot write it; --dtype chooses another type"
        for (before, after), count in sorted(moved.items())
    ]
