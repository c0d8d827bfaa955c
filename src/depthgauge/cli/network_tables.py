"""Tables of a gauged network for the terminal."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from depthgauge._format import DASH, number
from depthgauge.results.network_subject import DepthRow, NetworkSubject, PrintedTheorem, Residual, Sandwich
from depthgauge.results.verdicts import printed_bound_text, violates_printed_theorem


def network_tables(subject: NetworkSubject) -> Iterator[RenderableType]:
    """Yield the tables of one network: its layers, the sandwich per method, its effective depth."""
    yield profile_table(subject)
    reach = number(subject.radius, 6)
    title = f"How far one layer can be from all of them, for every input with |entries| ≤ {reach}"
    yield sandwich_table(subject.collapse, subject.printed, title)
    if subject.depth:
        yield depth_table(subject.depth, len(subject.layers))


def profile_table(subject: NetworkSubject) -> Table:
    """Return one row per layer: the residual, and the range of each head measure over the heads."""
    network = subject.network
    heads = sorted(set(network.heads))
    title = (
        f"{escape(printable(subject.name))}: {network.layers} layers × {'–'.join(map(str, heads))} heads, "
        f"dim {network.dim}, η = {number(network.eta, 4)}, {'skip' if network.skip else 'no skip'}"
        f"{', causal' if network.causal else ''}"
    )
    table = Table(title=title, title_justify="left", caption_justify="left", caption=_CAPTION)
    for name in ("layer", "residual", "score range θ", "TV to uniform", "contraction", "bound"):
        table.add_column(name, justify="right")
    table.add_row("input", _ratio(subject.input.residual), "", "", "", "", style="dim")
    for layer in subject.layers:
        table.add_row(
            str(layer.index),
            _ratio(layer.residual),
            spread(layer.heads, lambda head: head.score_range),
            spread(layer.heads, lambda head: head.tv_mean),
            _largest([head.contraction for head in layer.heads]),
            _largest([head.contraction_bound for head in layer.heads]),
        )
    return table


_CAPTION = (
    "residual: ‖Res X‖/‖X‖ of the state after the layer, in the largest entry (1: the tokens share nothing, 0: all are "
    "equal). score range, TV to uniform: minimum – maximum over the heads; TV is the distance of attention from plain "
    "averaging (0: the head averages, 1: it selects one token). contraction: ‖Res(attention)‖/‖Res‖ of the worst head, "
    "and its proved bound."
)


def printable(name: str) -> str:
    """Return a name from a file without control characters, which could change the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def sandwich_table(rows: Sequence[Sandwich], printed: PrintedTheorem, title: str) -> Table:
    """Return one row per method: the attained and the proved error, and the bound of Theorem D.1."""
    table = Table(title=title, title_justify="left", caption_justify="left", caption=_SANDWICH_CAPTION)
    table.add_column("method")
    for name in ("attained", "proved", "ratio", "Theorem D.1"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for row in rows:
        if row.refused:
            table.add_row(row.method, DASH, DASH, DASH, DASH, "does not apply", style="dim")
            continue
        proved = number(row.upper) if row.upper is not None else "no finite bound"
        lost = "" if row.lost_at is None else f" (lost at layer {row.lost_at})"
        how = ", ".join(row.methods) + lost
        table.add_row(row.method, number(row.lower), proved, number(row.ratio), _theorem(row, printed), how)
    return table


def _theorem(row: Sandwich, printed: PrintedTheorem) -> str:
    text = printed_bound_text(printed)
    if not printed.printed_applies:
        return f"({text})"
    return f"{text}: false" if violates_printed_theorem(row, printed) else text


_SANDWICH_CAPTION = (
    "attained: at least one input is off by this. proved: no input, of any number of tokens, is off by more. Theorem "
    "D.1: the bound that paper A prints, in brackets where its conditions fail, false where last-layer, the network it "
    "constructs, exceeds it. how: the method of proof (see the glossary)."
)


def depth_table(depths: Sequence[DepthRow], layers: int) -> Table:
    """Return one row per tolerance: the layers that are enough, proved for every input and measured on the inputs."""
    table = Table(title="Effective depth", title_justify="left")
    for name in ("within", "proved for every input", "measured on the inputs"):
        table.add_column(name, justify="right")
    rows: dict[float, dict[bool, str]] = {}
    for depth in depths:
        rows.setdefault(depth.tolerance, {})[depth.certified] = f"{depth.layers} of {layers}"
    for tolerance, found in rows.items():
        table.add_row(number(tolerance, 6), found.get(True, DASH), found.get(False, DASH))
    return table


def _ratio(residual: Residual) -> str:
    return number(residual.midrange.max.ratio)


def spread(heads: Sequence[Any], value: Callable[[Any], float | None]) -> str:
    """Return the minimum and the maximum of a measure over the heads."""
    values = [found for head in heads if (found := value(head)) is not None]
    if not values:
        return DASH
    least, largest = number(min(values), 2), number(max(values), 2)
    return least if least == largest else f"{least}–{largest}"


def _largest(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(max(known)) if known else DASH
