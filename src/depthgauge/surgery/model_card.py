"""Texts that are written next to a shrunk model: the model card and the plan for mergekit."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from depthgauge._format import contiguous, counted, number, ranges
from depthgauge.checkpoints.source import Source
from depthgauge.results.shrink_record import ShrinkRecord
from depthgauge.results.shrink_verdicts import guarantee_sentences


def hub_name(config: Any, source: Source | None) -> str | None:
    """Return the name of a model on a model hub, such as `org/name`, as its configuration records it.

    Args:
        config: the configuration of the loaded model.
        source: where it was loaded from, or None for a model from memory.

    Returns:
        The name; None if none is recorded, or if what is recorded is a path on this machine.
    """
    if source is None:
        recorded = getattr(config, "_name_or_path", None)
    elif source.gguf is None:  # the loaded configuration holds the path that it was loaded from
        recorded = json.loads((source.folder / "config.json").read_text("utf-8")).get("_name_or_path")
    else:
        recorded = None
    name = str(recorded)
    return name if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not Path(name).exists() else None


def model_card(record: ShrinkRecord, base_model: str | None) -> str:
    """Return the model card in Markdown, with the metadata that model hubs read.

    The card is published with the model, so it contains no path of this machine.

    Args:
        record: the result.
        base_model: the name of the source model on a model hub, as `hub_name` finds it.
    """
    name = Path(record.plan.model).name
    base = [] if base_model is None else [f"base_model: {json.dumps(base_model, ensure_ascii=False)}"]
    lines = ["---", *base, "library_name: transformers", "tags:", "- depthgauge", "- pruned", "---", ""]
    lines += [*_summary(record, name), "", "## Measurements", "", *_measured(record), ""]
    lines += [
        "## How to reproduce",
        "",
        "`depthgauge.json` contains the plan, the seeds, the digests of the inputs and all measurements.",
        "",
        f"    depthgauge shrink {name} --from-plan depthgauge.json --out smaller",
    ]
    return "\n".join(lines) + "\n"


def _summary(record: ShrinkRecord, name: str) -> Iterator[str]:
    yield f"# {name} with {record.layers_after} of {counted(record.layers_before, 'layer')}"
    yield ""
    yield (
        f"depthgauge {record.version} removed {len(record.removed)} of the {record.layers_before} layers of `{name}`: "
        f"{ranges(record.removed)} (counted from 0)."
    )
    if record.repaired:
        yield (
            "The remaining weights were repaired: the maps that write into the residual stream were refitted to the "
            "states of the source model."
        )
    else:
        yield "The remaining weights are unchanged."
    if record.heal is not None and record.heal.kept:
        yield f"The model was then trained for {counted(record.heal.steps, 'step')} to imitate the source model."
    if record.plan.model.endswith(".gguf"):
        yield "The source is a quantized GGUF file; its weights were dequantized."
    yield f"It has {record.parameters.after or 0:,} parameters instead of {record.parameters.before or 0:,}."
    yield "It loads with transformers and needs no custom code."


def _measured(record: ShrinkRecord) -> Iterator[str]:
    is_loss, loss = record.objective == "loss", record.loss
    windows = "on windows that were used for nothing else"
    if is_loss:
        yield f"Loss in nats per token, {windows}: {number(loss.dense)} before, {number(loss.shrunk)} after."
    else:
        yield f"Relative change of the final states, {windows}: {number(loss.shrunk)}."
    if record.texts:
        yield ""
        yield f"| text | {'increase of the loss' if is_loss else 'relative change'} |"
        yield "| --- | --- |"
        for text in record.texts:
            yield f"| {text.name.replace('|', '&#124;')} | {number(text.increase)} |"
    if record.speed is not None:
        decode = record.speed.decode
        yield ""
        yield f"Speed on a prompt, relative to the source model: {number(record.speed.prefill)}." + (
            "" if decode is None else f" Speed of generation: {number(decode)}."
        )
    if sentences := guarantee_sentences(record):
        yield from ("", "## Guarantee", "", *(f"- {sentence}" for sentence in sentences))


def mergekit_plan(name: str, dtype: str, kept: Sequence[int]) -> str:
    """Return the configuration with which mergekit removes the same blocks, without repair.

    Args:
        name: name or path of the source model.
        dtype: dtype of the weights, such as `bfloat16`.
        kept: the layers to keep, from 0, in increasing order.
    """
    lines = ["slices:"]
    for start, stop in contiguous(kept):
        lines += [
            "- sources:",
            f"  - model: {json.dumps(name, ensure_ascii=False)}",
            f"    layer_range: [{start}, {stop}]",
        ]
    return "\n".join([*lines, "merge_method: passthrough", f"dtype: {dtype}"]) + "\n"
