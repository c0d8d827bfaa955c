"""Tables of a gauged network for the terminal."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from depthgauge._format import DASH, counted, number
from depthgauge.cli.stacking import Column, stacked
from depthgauge.results.network_subject import DepthRow, NetworkSubject, PrintedTheorem, Sandwich
from depthgauge.results.verdicts import printed_bound_text, violates_printed_theorem


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


def printable(name: str) -> str:
    """Return a name from a file without control characters, which could change the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def sandwich_tables(
    rows: Sequence[Sandwich], printed: PrintedTheorem, title: str, width: int
) -> Iterator[RenderableType]:
    """Yield one row per method: the attained and the proved error, and the bound of Theorem D.1."""
    key = Column("method", [row.method for row in rows], text=True)
    columns = [
        Column("attained", [number(row.lower) for row in rows]),
        Column("proved", [_proved(row) for row in rows]),
        Column("ratio", [number(row.ratio) for row in rows]),
        Column("Theorem D.1", [DASH if row.refused else _theorem(row, printed) for row in rows]),
        Column("how", [_how(row) for row in rows], text=True),
    ]
    refused = [index for index, row in enumerate(rows) if row.refused]
    yield from stacked(title, key, columns, width, caption=_SANDWICH_CAPTION, dim=refused)
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
    "attained: at least one input is off by this. proved: no input, of any number of tokens, is off by more. Theorem "
    "D.1: the bound that paper A prints, in brackets where its conditions fail, false where last-layer, the network it "
    "constructs, exceeds it. how: the method of proof; `depthgauge --glossary` explains it."
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
