"""Tables of a gauged checkpoint for the terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.markup import escape

from depthgauge._format import DASH, counted, number
from depthgauge.cli.network_tables import printable, spread
from depthgauge.cli.stacking import Column, stacked
from depthgauge.results.checkpoint_subject import (
    CheckpointHead,
    CheckpointLayer,
    CheckpointSubject,
    Interval,
    RegimeDistance,
    ScoreTrust,
)
from depthgauge.results.labels import SCORES, WHAT_IFS, unit
from depthgauge.results.network_subject import Residual
from depthgauge.results.verdicts import mean_caption

_Value = Callable[[CheckpointHead], float | None]


def checkpoint_tables(subject: CheckpointSubject, width: int) -> Iterator[RenderableType]:
    """Yield the tables and lines of one checkpoint.

    Args:
        subject: the checkpoint.
        width: characters per line.
    """
    yield from heads_tables(subject, width)
    if any(layer.what_if for layer in subject.layers):
        yield from what_if_tables(subject, width)
    if subject.scores:
        yield from trust_tables(subject.scores, width)
    yield from map(escape, fast_lines(subject.layers))
    if subject.regime is not None:
        yield escape(regime_line(subject.regime))
    if subject.text is not None and subject.text.bos is not None:
        begin = "start" if subject.text.bos else "do not start"
        yield escape(f"windows {begin} with the BOS token: {subject.text.bos_reason}")
    for remark in subject.notes:
        yield escape(f"note: {remark}")


def heads_tables(subject: CheckpointSubject, width: int) -> Iterator[RenderableType]:
    """Yield one row per layer: the residual and what the heads do on text, or else the sizes of the weights."""
    model = subject.model
    groups = "" if model.kv_heads == model.heads else f" ({model.kv_heads} key–value)"
    title = (
        f"{escape(printable(subject.name))}: {counted(model.layers, 'layer')} × {counted(model.heads, 'head')}"
        f"{groups}, dim {model.dim}, {parameters(model.parameters)}"
    )
    on_text = subject.text is not None
    first = ["input"] if on_text else []
    key = Column("layer", [*first, *(str(layer.index) for layer in subject.layers)])
    columns = []
    if on_text:
        states = [subject.input.residual, *(layer.residual for layer in subject.layers)]
        columns.append(Column("residual", [_residual(state) for state in states]))
    for name, value in (_TEXT_COLUMNS if on_text else _WEIGHT_COLUMNS).items():
        columns.append(Column(name, ["" for _ in first] + [spread(layer.heads, value) for layer in subject.layers]))
    yield from stacked(title, key, columns, width, caption=_HEADS if on_text else _WEIGHTS, dim=[0] if on_text else [])


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
_HEADS = (
    "residual: ‖X − 1x̄ᵀ‖/‖X‖ of the state after the layer, in the norm of Dong et al. (0: all tokens are equal). The "
    "other columns are minimum – maximum over the heads. TV to uniform: distance of attention from plain averaging. % "
    "on first: attention on the first token. static error: relative error of the head's output if its attention is "
    "replaced by the best fixed pattern."
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


def regime_line(regime: RegimeDistance) -> str:
    """Return how far the weights are from the small-weight regime."""
    printed = "" if regime.printed_orders is None else f" (10^{regime.printed_orders:.1f} by Theorem D.1 as printed)"
    return (
        f"weights: η = {number(regime.eta)}; estimate: all weights would have to be 10^{regime.corrected_orders:.1f} "
        f"times smaller{printed} until the attention layers alone are one averaging layer within "
        f"{number(regime.tolerance, 6)}"
    )


def _residual(residual: Residual | None) -> str:
    return DASH if residual is None else number(residual.mean.composite.ratio)


def _interval(found: Interval | None) -> str:
    if found is None:
        return DASH
    between = "" if found.low is None else f" [{number(found.low, 2)}, {number(found.high, 2)}]"
    return number(found.loss, 2) + between
