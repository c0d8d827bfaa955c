"""The model card of a shrunk model: its document in Markdown, with the metadata that model hubs read."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from depthgauge.base.format import DASH, capital, ranges
from depthgauge.results.document import Part, Place, fixed
from depthgauge.results.gauge_options import BOTH
from depthgauge.results.labels import of_stack
from depthgauge.results.shrink_document import shrink_parts
from depthgauge.results.shrink_record import GIVEN, ShrinkRecord
from depthgauge.results.shrink_verdicts import layers_text

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
        f"    depthgauge shrink {model} --from-plan depthgauge.json --out smaller",
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
