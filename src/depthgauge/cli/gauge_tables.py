"""Tables of a gauged network and of a gauged checkpoint for the terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from depthgauge.base.format import DASH, counted, number, printable
from depthgauge.cli.stacking import Column, stacked
from depthgauge.results.checkpoint_subject import (
    CheckpointHead,
    CheckpointLayer,
    CheckpointSubject,
    Interval,
    ScoreTrust,
)
from depthgauge.results.labels import SCORES, WHAT_IFS, unit
from depthgauge.results.network_subject import DepthRow, NetworkSubject, PrintedTheorem, Residual, Sandwich
from depthgauge.results.verdicts import (
    mean_caption,
    printed_bound_text,
    unobserved_sentence,
    violates_printed_theorem,
)


def network_tables(subject: NetworkSubject, width: int) -> Iterator[RenderableType]:
    """Yield the tables of one network, `width` characters wide: layers, the sandwich per method, effective depth."""
    yield from profile_tables(subject, width)
    reach = number(subject.radius, 6)
    layers = {row.layers_after for row in subject.collapse if not row.refused}
    after = "one layer" if layers <= {1} else "the network with attention removed"
    every = "its one layer" if len(subject.layers) == 1 else f"all {len(subject.layers)} layers"
    title = f"How far {after} can be from {every}, for every input with |entries| ≤ {reach}"
    yield from sandwich_tables(subject.collapse, subject.printed, title, width)
    if subject.depth:
        yield from depth_tables(subject.depth, len(subject.layers), width)


def profile_tables(subject: NetworkSubject, width: int) -> Iterator[RenderableType]:
    """Yield one row per layer: the residual, and the range of each head measure over the heads."""
    network = subject.network
    heads = sorted(set(network.heads))
    title = (
        f"{escape(printable(subject.name))}: {counted(network.layers, 'layer')} × {'–'.join(map(str, heads))} "
        f"{'head' if heads == [1] else 'heads'}, dim {network.dim}, η = {number(network.eta, 4)}, "
        f"{'skip' if network.skip else 'no skip'}{', causal' if network.causal else ''}"
    )
    layers = subject.layers
    states = [subject.input.residual, *(layer.residual for layer in layers)]
    columns = [
        Column("residual", [number(state.midrange.max.ratio) for state in states]),
        Column("score range θ", ["", *(spread(layer.heads, lambda head: head.score_range) for layer in layers)]),
        Column("TV to uniform", ["", *(spread(layer.heads, lambda head: head.tv_mean) for layer in layers)]),
        Column("contraction", ["", *(_largest([head.contraction for head in layer.heads]) for layer in layers)]),
        Column("bound", ["", *(_largest([head.contraction_bound for head in layer.heads]) for layer in layers)]),
    ]
    key = Column("layer", ["input", *(str(layer.index) for layer in layers)])
    yield from stacked(title, key, columns, width, caption=_CAPTION, dim=[0])


_CAPTION = (
    "residual: ‖Res X‖/‖X‖ of the state after the layer, in the largest entry (1: the tokens share nothing, 0: all are "
    "equal). score range, TV to uniform: minimum – maximum over the heads; TV is the distance of attention from plain "
    "averaging (0: the head averages, 1: it selects one token). contraction: ‖Res(attention)‖/‖Res‖ of the worst head, "
    "and its proved bound."
)


def sandwich_tables(
    rows: Sequence[Sandwich],
    printed: PrintedTheorem,
    title: str,
    width: int,
    about: str = "",
    tokens: int | None = None,
) -> Iterator[RenderableType]:
    """Yield one row per method: the attained and the proved error, and the bound of Theorem D.1.

    `about` describes the tokens, if the inputs are sequences of them; `tokens` is their number, if it is fixed.
    """
    key = Column("method", [row.method for row in rows], text=True)
    columns = [
        Column("attained", [number(row.lower) for row in rows]),
        Column("proved", [_proved(row) for row in rows]),
        Column("ratio", [number(row.ratio) for row in rows]),
        Column("Theorem D.1", [DASH if row.refused else _theorem(row, printed) for row in rows]),
        Column("how", [_how(row) for row in rows], text=True),
    ]
    refused = [index for index, row in enumerate(rows) if row.refused]
    inputs = "no input, of any number of tokens," if tokens is None else f"no input of {counted(tokens, 'token')}"
    inputs = f"no sequence of these tokens ({about})" if about else inputs
    yield from stacked(title, key, columns, width, caption=_SANDWICH_CAPTION.replace("#", inputs), dim=refused)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.refused:
            reasons.setdefault(str(row.refused), []).append(row.method)
    for reason, methods in reasons.items():
        yield escape(f"{', '.join(methods)}: does not apply, because {reason}")


def _proved(row: Sandwich) -> str:
    if row.refused:
        return DASH
    return number(row.upper) if row.upper is not None else "no bound"


def _how(row: Sandwich) -> str:
    if row.refused:
        return "does not apply"
    return ", ".join(row.methods) + ("" if row.lost_at is None else f" (no finite bound after layer {row.lost_at})")


def _theorem(row: Sandwich, printed: PrintedTheorem) -> str:
    text = printed_bound_text(printed)
    if not printed.printed_applies:
        return f"({text})"
    return f"{text}: false" if violates_printed_theorem(row, printed) else text


_SANDWICH_CAPTION = (
    "attained: at least one input is off by this. proved: # is off by more. Theorem D.1: the bound that paper A "
    "prints, in brackets where its conditions fail, false where last-layer, the network it constructs, exceeds it. "
    "how: the method of proof; `depthgauge --glossary` explains it."
)


def depth_tables(depths: Sequence[DepthRow], layers: int, width: int) -> Iterator[RenderableType]:
    """Yield one row per tolerance: the layers that are enough, proved for every input and measured on the inputs."""
    rows: dict[float, dict[bool, str]] = {}
    for depth in depths:
        rows.setdefault(depth.tolerance, {})[depth.certified] = _depth(depth, layers)
    key = Column("within", [number(tolerance, 6) for tolerance in rows])
    columns = [
        Column("proved for every input", [found.get(True, DASH) for found in rows.values()]),
        Column("measured on the inputs", [found.get(False, DASH) for found in rows.values()]),
    ]
    yield from stacked("Effective depth: layers that are enough", key, columns, width)


def _depth(depth: DepthRow, layers: int) -> str:
    """Return `1 of 12 (corrected)`, or `12 of 12 (fewer: refuted)`."""
    if depth.layers < layers:
        return f"{depth.layers} of {layers} ({depth.method})"
    fewer = f" (fewer: {depth.status})" if depth.status in ("refuted", "undecided") else ""
    return f"{depth.layers} of {layers}{fewer}"


def spread(heads: Sequence[Any], value: Callable[[Any], float | None]) -> str:
    """Return the minimum and the maximum of a measure over the heads."""
    values = [found for head in heads if (found := value(head)) is not None]
    if not values:
        return DASH
    least, largest = number(min(values), 2), number(max(values), 2)
    return least if least == largest else f"{least}–{largest}"


def _largest(values: Sequence[float | None]) -> str:
    return number(max((value for value in values if value is not None), default=None))


_Value = Callable[[CheckpointHead], float | None]


def checkpoint_tables(subject: CheckpointSubject, width: int) -> Iterator[RenderableType]:
    """Yield the tables and lines of one checkpoint, `width` characters wide."""
    yield from heads_tables(subject, width)
    if any(layer.what_if for layer in subject.layers):
        yield from what_if_tables(subject, width)
    if any(layer.experts for layer in subject.layers):
        yield from expert_tables(subject, width)
    if subject.scores:
        yield from trust_tables(subject.scores, width)
    yield from map(escape, fast_lines(subject.layers))
    if subject.text is not None and subject.text.bos is not None:
        begin = "start" if subject.text.bos else "do not start"
        yield escape(f"windows {begin} with the BOS token: {subject.text.bos_reason}")
    for remark in subject.notes:
        yield escape(f"note: {remark}")


def heads_tables(subject: CheckpointSubject, width: int) -> Iterator[RenderableType]:
    """Yield one row per layer: the residual and what the heads do on text, or else the sizes of the weights."""
    model = subject.model
    heads = f" × {counted(model.heads, 'head')}" if model.heads else ""
    groups = "" if model.kv_heads == model.heads else f" ({model.kv_heads} key–value)"
    stack = "" if model.stack is None else f", {model.stack}"
    title = (
        f"{escape(printable(subject.name))}{stack}: {counted(model.layers, 'layer')}{heads}{groups}, "
        f"dim {model.dim}, {parameters(model.parameters)}"
    )
    on_text = subject.text is not None
    first = ["input"] if on_text else []
    key = Column("layer", [*first, *(str(layer.index) for layer in subject.layers)])
    columns = []
    if on_text:
        states = [subject.input.residual, *(layer.residual for layer in subject.layers)]
        columns.append(Column("residual", [_residual(state) for state in states]))
    by_head = _WEIGHT_COLUMNS if not on_text else _TEXT_COLUMNS if subject.unobserved is None else {}
    for name, value in by_head.items():
        columns.append(Column(name, ["" for _ in first] + [spread(layer.heads, value) for layer in subject.layers]))
    caption = _RESIDUAL + (_HEADS if by_head else "") if on_text else _WEIGHTS
    yield from stacked(title, key, columns, width, caption=caption, dim=[0] if on_text else [])
    if subject.unobserved is not None:
        yield escape(unobserved_sentence(subject.unobserved))


def parameters(count: int) -> str:
    """Return a number of parameters in words: `135 million parameters`, `7,152 parameters`."""
    return f"{count / 1e6:.0f} million parameters" if count >= 10**6 else f"{count:,} parameters"


_TEXT_COLUMNS: Mapping[str, _Value] = {
    "score range": lambda head: head.score_range,
    "TV to uniform": lambda head: head.tv_mean,
    "% on first": lambda head: None if head.first_mass is None else 100 * head.first_mass,
    "static error": lambda head: head.static_error,
}
_WEIGHT_COLUMNS: Mapping[str, _Value] = {
    "η": lambda head: head.eta,
    "‖V‖col": lambda head: head.value_col,
    "‖QKᵀ‖₂": lambda head: head.qk_norm,
    "‖V‖₂": lambda head: head.ov_norm,
    "Dong's β": lambda head: head.dong_beta,
}
_RESIDUAL = (
    "residual: ‖X − 1x̄ᵀ‖/‖X‖ of the state after the layer, in the norm of Dong et al. (0: all tokens are equal)."
)
_HEADS = (
    " The other columns are minimum – maximum over the heads. TV to uniform: distance of attention from plain "
    "averaging. % on first: attention on the first token. static error: relative error of the head's output if its "
    "attention is replaced by the best fixed pattern."
)
_WEIGHTS = "Minimum – maximum over the heads, from the weights alone."


def what_if_tables(subject: CheckpointSubject, width: int) -> Iterator[RenderableType]:
    """Yield one row per layer: the cost of each what-if with its interval."""
    kinds = [kind for kind in WHAT_IFS if any(kind in layer.what_if for layer in subject.layers)]
    title = f"What if: {unit(subject.model.objective)}"
    if subject.baseline is not None:
        title += f" (intact: {number(subject.baseline.loss)})"
    key = Column("layer", [str(layer.index) for layer in subject.layers])
    columns = [
        Column(WHAT_IFS[kind].label, [escape(_interval(layer.what_if.get(kind))) for layer in subject.layers])
        for kind in kinds
    ]
    yield from stacked(title, key, columns, width, caption=mean_caption(subject))


def expert_tables(subject: CheckpointSubject, width: int) -> Iterator[RenderableType]:
    """Yield one row per layer with experts: how many tokens they get, and what skipping one of them costs."""
    layers = [layer for layer in subject.layers if layer.experts]
    ranked = [sorted(layer.experts, key=lambda expert: expert.what_if.loss) for layer in layers]
    key = Column("layer", [str(layer.index) for layer in layers])
    columns = [
        Column("experts", [str(len(layer.experts)) for layer in layers]),
        Column("% of tokens", [spread(layer.experts, lambda expert: 100 * expert.share) for layer in layers]),
        Column("skip expert", [spread(layer.experts, lambda expert: expert.what_if.loss) for layer in layers]),
        Column("costs least", [str(experts[0].index) for experts in ranked]),
        Column("costs most", [str(experts[-1].index) for experts in ranked]),
    ]
    title = f"What if one expert adds nothing: {unit(subject.model.objective)}"
    yield from stacked(title, key, columns, width, caption="Minimum – maximum over the experts of a layer.")


def trust_tables(scores: Sequence[ScoreTrust], width: int) -> Iterator[RenderableType]:
    """Yield one row per layer score: its rank correlation with the measured cost."""
    key = Column("score", [SCORES[row.score].label for row in scores], text=True)
    columns = [
        Column("against", [WHAT_IFS[row.what_if].label for row in scores], text=True),
        Column("rank correlation", [number(row.spearman, 2) for row in scores]),
    ]
    yield from stacked("Which layer score predicts the measured cost?", key, columns, width)


def fast_lines(layers: Sequence[CheckpointLayer]) -> list[str]:
    """Return one line per layer with a head that can use fast attention, or one line if there is none."""
    plans = [layer.fast for layer in layers if layer.fast is not None]
    some = [plan.line for plan in plans if plan.heads]
    if some or not plans:
        return [f"fast attention: {line}" for line in some]
    bounds = [bound for plan in plans for bound in plan.bounds if bound is not None]
    least = f"; the smallest proved bound on a head's scores is {number(min(bounds))}" if bounds else ""
    return [f"fast attention: no head can use it at the default tolerance{least}"]


def _residual(residual: Residual | None) -> str:
    return DASH if residual is None else number(residual.mean.composite.ratio)


def _interval(found: Interval | None) -> str:
    if found is None:
        return DASH
    between = "" if found.low is None else f" [{number(found.low, 2)}, {number(found.high, 2)}]"
    return number(found.loss, 2) + between
