"""Texts that are written next to a shrunk model: the model card and the plan for mergekit."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from depthgauge._format import counted, number
from depthgauge._version import __version__
from depthgauge.checkpoints.source import Source


@dataclass(frozen=True)
class CardFacts:
    """What a model card says.

    - `name`: name of the source model, without its folder
    - `base_model`: its name on a model hub, as `hub_name` finds it; None if it has none
    - `layers`: number of layers of the source model
    - `removed`: the removed layers, from 0
    - `repaired`: how the remaining weights were repaired, as a phrase; None if they are unchanged
    - `healed`: training steps after the removal
    - `objective`: `loss` or `states`
    - `before`, `after`: mean loss in nats per token before and after; for `states`, 0 and the relative change
    - `texts`: (text, increase in nats per token or relative change) for each kind of text
    - `guarantees`: the bounds and their assumption, each as a sentence
    - `parameters`: number of parameters before and after
    - `speed`: speed of prefill and decode, after ÷ before; decode is None for encoders
    - `dequantized`: whether the source was a quantized GGUF file
    - `command`: the command that reproduces the model, or None
    """

    name: str
    layers: int
    removed: Sequence[int]
    repaired: str | None
    objective: str
    before: float
    after: float
    healed: int = 0
    texts: Sequence[tuple[str, float]] = ()
    guarantees: Sequence[str] = ()
    parameters: tuple[int, int] | None = None
    speed: tuple[float, float | None] | None = None
    dequantized: bool = False
    command: str | None = None
    base_model: str | None = None


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


def model_card(facts: CardFacts) -> str:
    """Return the model card in Markdown, with the metadata that model hubs read.

    Args:
        facts: what it says.
    """
    return "\n".join([*_front_matter(facts), *_summary(facts), *_measured(facts), *_reproduction(facts)]) + "\n"


def _front_matter(facts: CardFacts) -> Iterator[str]:
    yield "---"
    if facts.base_model is not None:
        yield f"base_model: {json.dumps(facts.base_model, ensure_ascii=False)}"
    yield "library_name: transformers"
    yield "tags:"
    yield "- depthgauge"
    yield "- pruned"
    yield "---"
    yield ""


def _summary(facts: CardFacts) -> Iterator[str]:
    kept = facts.layers - len(facts.removed)
    yield f"# {facts.name} with {kept} of {counted(facts.layers, 'layer')}"
    yield ""
    yield (
        f"depthgauge {__version__} removed {len(facts.removed)} of the {facts.layers} layers of `{facts.name}`: "
        f"{ranges(facts.removed)} (counted from 0)."
    )
    yield (
        f"The remaining weights were repaired: {facts.repaired}."
        if facts.repaired
        else ("The remaining weights are unchanged.")
    )
    if facts.healed:
        yield f"The model was then trained for {counted(facts.healed, 'step')} to imitate the source model."
    if facts.dequantized:
        yield "The source is a quantized GGUF file; its weights were dequantized."
    if facts.parameters is not None:
        before, after = facts.parameters
        yield f"It has {after:,} parameters instead of {before:,}."
    yield "It loads with transformers and needs no custom code."
    yield ""


def _measured(facts: CardFacts) -> Iterator[str]:
    yield "## Measurements"
    yield ""
    is_loss = facts.objective == "loss"
    if is_loss:
        yield (
            f"Loss in nats per token, on windows that were used for nothing else: {number(facts.before)} before, "
            f"{number(facts.after)} after."
        )
    else:
        yield f"Relative change of the final states, on windows that were used for nothing else: {number(facts.after)}."
    if facts.texts:
        yield ""
        yield f"| text | {'increase of the loss' if is_loss else 'relative change'} |"
        yield "| --- | --- |"
        for text, increase in facts.texts:
            yield f"| {text.replace('|', '&#124;')} | {number(increase)} |"
    if facts.speed is not None:
        prefill, decode = facts.speed
        yield ""
        yield f"Speed on a prompt, relative to the source model: {number(prefill)}." + (
            "" if decode is None else f" Speed of generation: {number(decode)}."
        )
    if facts.guarantees:
        yield ""
        yield "## Guarantee"
        yield ""
        for sentence in facts.guarantees:
            yield f"- {sentence}"
    yield ""


def _reproduction(facts: CardFacts) -> Iterator[str]:
    yield "## How to reproduce"
    yield ""
    yield "`depthgauge.json` contains the plan, the seeds, the digests of the inputs and all measurements."
    if facts.command is not None:
        yield ""
        yield f"    {facts.command}"


def ranges(layers: Sequence[int]) -> str:
    """Return layers as text with runs joined, such as `3, 7–9`; `none` if there are none."""
    runs = [(start, stop - 1) for start, stop in contiguous(layers)]
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs) or "none"


def contiguous(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Return increasing layers as half-open ranges (start, stop)."""
    if not layers:
        return []
    breaks = [0, *(k for k, (a, b) in enumerate(pairwise(layers), start=1) if b != a + 1), len(layers)]
    return [(layers[start], layers[stop - 1] + 1) for start, stop in pairwise(breaks)]


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
