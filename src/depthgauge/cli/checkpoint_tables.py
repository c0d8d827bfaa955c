"""The subject of a checkpoint as tables for a person."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from depthgauge._format import number
from depthgauge.cli.network_tables import printable, spread

_SCORES = {
    "block_influence": "block influence (ShortGPT)",
    "angular_distance": "angular distance (UIDL)",
    "attention_cosine": "attention cosine (LLM-Drop)",
    "mlp_cosine": "MLP cosine (LLM-Drop)",
}
_KINDS = {
    "block": "skip block",
    "attention": "skip attention",
    "mlp": "skip MLP",
    "uniform": "uniform attention",
    "parallel": "beside the next",
}


def model_tables(subject: dict[str, Any]) -> Iterator[RenderableType]:
    """Everything worth reading about a checkpoint, in order."""
    yield heads_table(subject)
    if any(layer["what_if"] for layer in subject["layers"]):
        yield what_if_table(subject)
    if subject["scores"]:
        yield trust_table(subject["scores"])
    yield from map(escape, fast_lines(subject["layers"]))
    for depth in subject["depth"]:
        yield escape(depth_line(depth, len(subject["layers"])))
    if subject["regime"] is not None:
        yield regime_line(subject["regime"])
    for note in subject["notes"]:
        yield escape(f"note: {note}")


def heads_table(subject: dict[str, Any]) -> Table:
    """Layer by layer: what is left of the differences between tokens, and what the heads do; or what they weigh."""
    model = subject["model"]
    groups = "" if model["kv_heads"] == model["heads"] else f" ({model['kv_heads']} key–value)"
    title = (
        f"{escape(printable(subject['name']))}: {model['layers']} layers × {model['heads']} heads{groups}, "
        f"dim {model['dim']}, {model['parameters'] / 1e6:.0f} million parameters"
    )
    on_text = subject["text"] is not None
    table = Table(title=title, title_justify="left", caption_justify="left", caption=_HEADS if on_text else _WEIGHTS)
    columns = _TEXT_COLUMNS if on_text else _WEIGHT_COLUMNS
    table.add_column("layer", justify="right")
    if on_text:
        table.add_column("residual", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    if on_text:
        table.add_row("input", _residual(subject["input"]), *[""] * len(columns), style="dim")
    for layer in subject["layers"]:
        residual = [_residual(layer)] if on_text else []
        heads = [head | {"static_least": _least(head), "first_percent": _percent(head)} for head in layer["heads"]]
        table.add_row(str(layer["index"]), *residual, *(spread(heads, key) for key in columns.values()))
    return table


_TEXT_COLUMNS = {
    "score range": "score_range",
    "TV to uniform": "tv_mean",
    "% on first": "first_percent",
    "static error": "static_least",
}
_WEIGHT_COLUMNS = {"η": "eta", "‖V‖col": "value_col", "‖QKᵀ‖₂": "qk_norm", "‖V‖₂": "ov_norm", "Dong's β": "dong_beta"}
_HEADS = (
    "residual: ‖X − 1x̄ᵀ‖/‖X‖ after the layer in Dong et al.'s norm (1: tokens differ fully, 0: all equal). Per head, "
    "least – largest: range of the scores; distance of attention from plain averaging; its mass on the first token, in "
    "percent; error of its output if it ran on the best static pattern."
)
_WEIGHTS = "Per head, least – largest, from the weights alone."


def what_if_table(subject: dict[str, Any]) -> Table:
    """Layer by layer: what is lost, with its interval."""
    loss = subject["model"]["objective"] == "loss"
    kinds = list(dict.fromkeys(kind for layer in subject["layers"] for kind in layer["what_if"]))
    unit = "Loss added, in nats a token" if loss else "Change of the final states, relative to their size"
    if subject["baseline"] is not None:
        unit += f" (intact: {number(subject['baseline']['loss'])})"
    text = subject["text"]
    table = Table(
        title=f"What if: {unit}",
        title_justify="left",
        caption_justify="left",
        caption=f"Mean over {text['windows']} windows of {text['window']} tokens, and its 95 % bootstrap interval.",
    )
    table.add_column("layer", justify="right")
    for kind in kinds:
        table.add_column(_KINDS[kind], justify="right")
    for layer in subject["layers"]:
        table.add_row(str(layer["index"]), *(escape(_interval(layer["what_if"].get(kind))) for kind in kinds))
    return table


def trust_table(scores: list[dict[str, Any]]) -> Table:
    """Each cheap score against the measured loss."""
    table = Table(title="Which cheap score can be trusted here?", title_justify="left")
    table.add_column("score")
    table.add_column("against")
    table.add_column("rank correlation", justify="right")
    for row in scores:
        table.add_row(_SCORES[row["score"]], _KINDS[row["what_if"]], number(row["spearman"], 2))
    return table


def fast_lines(layers: list[dict[str, Any]]) -> list[str]:
    """Which heads fast attention could serve: a line for every layer that has one, or one for all."""
    plans = [layer["fast"] for layer in layers if layer["fast"] is not None]
    some = [plan["line"] for plan in plans if plan["heads"]]
    if some or not plans:
        return [f"fast attention: {line}" for line in some]
    bounds = [bound for plan in plans for bound in plan["bounds"]]
    least = f"; the least proved bound on a head's scores is {number(min(bounds))}" if bounds else ""
    return [f"fast attention: no head could use it{least}"]


def depth_line(depth: dict[str, Any], layers: int) -> str:
    """The measured effective depth in a sentence."""
    why = {
        "increase": "one more would exceed it",
        "max_removed": "no more were asked for",
        "one layer left": "only one is left",
    }[depth["stopped"]]
    removed = f", without {', '.join(map(str, depth['removed']))}" if depth["removed"] else ""
    cost = f" at {_interval(depth)}" if depth["removed"] else ""
    enough = f"{depth['layers']} of {layers} layers keep it within {number(depth['increase'], 6)}"
    return f"effective depth: {enough}{removed}{cost}; {why}"


def regime_line(regime: dict[str, Any]) -> str:
    """How far the weights are from small."""
    return (
        f"weights: η = {number(regime['eta'])}; all would have to be 10^{regime['corrected_orders']:.1f} times smaller "
        f"for the attention layers to be provably one averaging layer within {number(regime['tolerance'], 6)}, "
        f"10^{regime['printed_orders']:.1f} times by Theorem D.1 as printed"
    )


def _residual(state: dict[str, Any]) -> str:
    return number(state["residual"]["mean"]["composite"]["ratio"]) if "residual" in state else "–"


def _least(head: dict[str, Any]) -> float | None:
    return head["static"][head["static_best"]] if "static" in head else None


def _percent(head: dict[str, Any]) -> float | None:
    return 100 * head["first_mass"] if "first_mass" in head else None


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    between = "" if found["low"] is None else f" [{number(found['low'], 2)}, {number(found['high'], 2)}]"
    return number(found["loss"], 2) + between
