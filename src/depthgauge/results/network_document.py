"""What is shown of a network: effective depth, the sandwich per method, its heads."""

from collections.abc import Sequence

from depthgauge.base.format import DASH, counted, number, percent, printable, ranges, short, span
from depthgauge.results.document import (
    MEASURED,
    PROVED,
    SCREENS,
    Axis,
    Brief,
    Cell,
    Chart,
    Headings,
    Line,
    Part,
    Place,
    Plot,
    Rows,
    Section,
    Series,
    Table,
    fixed,
    present,
)
from depthgauge.results.gauge_options import GaugeSettings
from depthgauge.results.layer_parts import Measure, head_part, residual_part, spread
from depthgauge.results.network_subject import DepthRow, NetworkHead, NetworkSubject, PrintedTheorem, Sandwich
from depthgauge.results.verdicts import printed_bound_text, violates_printed_theorem


def network_section(subject: NetworkSubject, settings: GaugeSettings) -> Section:
    """Return what is shown of one network."""
    network = subject.network
    heads = f"{span(network.heads)} {'head' if set(network.heads) == {1} else 'heads'}"
    headline = (
        f"{subject.name}: {counted(network.layers, 'layer')} × {heads}, dim {network.dim}, η = "
        f"{number(network.eta, 4)}, {'skip' if network.skip else 'no skip'}{', causal' if network.causal else ''}"
    )
    return Section(
        subject.name, headline, subject.verdict, network_facts(subject, settings), network_parts(subject)
    )  # fmt: skip


def network_facts(subject: NetworkSubject, settings: GaugeSettings) -> tuple[tuple[str, str], ...]:
    """Return what the network is and what it was gauged on."""
    network = subject.network
    widths = [width for width in network.mlp if width is not None]
    place, _, kind = network.norm.partition("-")
    where = {"pre": "before each sublayer", "post": "after each sublayer"}.get(place, network.norm)
    mlp = f"width {span(widths)}, {network.activation}" + (", with its own skip" if network.mlp_skip else "")
    return (
        ("layers", str(network.layers)),
        ("heads per layer", span(network.heads)),
        ("token width", str(network.dim)),
        ("key width", span(network.key_dim)),
        ("largest weight η", number(network.eta)),
        ("score factor β", number(network.scale)),
        ("skip connections", "yes" if network.skip else "no"),
        ("attention", "causal" if network.causal else "to every token"),
        ("MLP", mlp if widths else "none"),
        ("RMSNorm" if kind else "LayerNorm", where),
        ("precision", network.dtype),
        ("inputs", _inputs(settings)),
    )


def _inputs(settings: GaugeSettings) -> str:
    if settings.input is not None:
        return f"from {settings.input}"
    if settings.samples is None or settings.tokens is None:
        return "see the settings below"
    size = f"{settings.samples} × {counted(settings.tokens, 'token')}"
    return size if settings.radius is None else f"{size}, uniform up to {number(settings.radius)}, seed {settings.seed}"


def network_parts(subject: NetworkSubject) -> tuple[Part, ...]:
    """Return all parts of the section, in order."""
    layers = {row.layers_after for row in subject.collapse if not row.refused}
    after = "one layer" if layers <= {1} else "the network with attention removed"
    every = "its one layer" if len(subject.layers) == 1 else f"all {len(subject.layers)} layers"
    title = f"How far {after} can be from {every}, for every input with |entries| ≤ {number(subject.radius, 6)}"
    sandwich = sandwich_part(subject.collapse, subject.printed, title) if subject.collapse else None
    heads = head_part(subject, share_measures(subject.collapse))
    return present(profile_part(subject), sandwich, depth_part(subject), residual_part(subject), heads)


def profile_part(subject: NetworkSubject) -> Part:
    """Return one row per layer: the residual, and the range of each head measure over the heads."""
    rows: list[tuple[Cell, ...]] = [(fixed("input"), subject.input.residual.midrange.max.ratio, "", "", "", "")]
    for layer in subject.layers:
        found = (
            layer.residual.midrange.max.ratio, spread(layer.heads, lambda head: head.score_range),
            spread(layer.heads, lambda head: head.tv_mean), _largest(layer.heads, "contraction"),
            _largest(layer.heads, "contraction_bound"),
        )  # fmt: skip
        rows.append((fixed(str(layer.index)), *found))
    columns = ("layer", "residual", "score range θ", "TV to uniform", "contraction", "bound")
    return Part("layers", "Layers", _CAPTION, None, Table("", columns, tuple(rows), dim=(0,)), place=Place.TERMINAL)


def _largest(heads: Sequence[NetworkHead], name: str) -> float | None:
    return max((value for head in heads if (value := getattr(head, name)) is not None), default=None)


_CAPTION = (
    "residual: ‖Res X‖/‖X‖ of the state after the layer, in the largest entry (1: the tokens share nothing, 0: all are "
    "equal). score range, TV to uniform: minimum – maximum over the heads; TV is the distance of attention from plain "
    "averaging (0: the head averages, 1: it selects one token). contraction: ‖Res(attention)‖/‖Res‖ of the worst head, "
    "and its proved bound."
)


def share_measures(collapse: Sequence[Sandwich]) -> tuple[Measure, ...]:
    """Return the share of each head in every proved bound, as views of the heat map."""
    note = "The share of each head in the proved bound on {}; all shares add up to 1."
    shown = [row for row in collapse if row.upper is not None and any(any(heads) for heads in row.share)]
    named = [(printable(row.method), row.share) for row in shown]
    return tuple(Measure(f"share of the bound, {m}", note.format(m), share, percent, "Proved") for m, share in named)


def sandwich_part(
    rows: Sequence[Sandwich], printed: PrintedTheorem, title: str, inputs: str = "input, of any number of tokens,"
) -> Part:
    """Return the attained and the proved error of every method, and the bound of Theorem D.1; `inputs` says of what."""
    columns = (
        "method", "attained", ("proved", "proved"), "ratio", "Theorem D.1", ("how", "how it was proved", "seconds"),
    )  # fmt: skip
    cells = tuple(
        (
            row.method, row.lower, Brief(_proved(row), (row.upper,)), row.ratio,
            fixed(DASH if row.refused else _theorem(row, printed)), _how(row),
        )
        for row in rows
    )  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.refused:
            reasons.setdefault(str(row.refused), []).append(row.method)
    refused = tuple(f"{', '.join(methods)}: does not apply, because {why}" for why, methods in reasons.items())
    table = Table(title, columns, cells, is_open=True, dim=tuple(k for k, row in enumerate(rows) if row.refused))
    caption = _SANDWICH_CAPTION.replace("#", inputs)
    chart = sandwich_chart(rows, printed)
    return Part("sandwich", "One layer instead of all", caption, chart, table, refused, place=SCREENS)


_SANDWICH_CAPTION = (
    "attained: at least one input is off by this. proved: no # is off by more. Theorem D.1: the bound that paper A "
    "prints, in brackets where its conditions fail, false where last-layer, the network it constructs, exceeds it. "
    "how: the method of proof; `depthgauge --glossary` explains it."
)


def _proved(row: Sandwich) -> str:
    return number(row.upper) if row.upper is not None or row.refused else "no bound"


def _how(row: Sandwich) -> Brief:
    if row.refused:
        return Brief("does not apply", ("does not apply", None), True)
    lost = "" if row.lost_at is None else f" (no finite bound after layer {row.lost_at})"
    brief = ", ".join(row.methods) + lost
    spent = (row.seconds or 0.0) + (row.attack_seconds or 0.0)
    return Brief(brief, ("; ".join([brief, *row.notes]) or DASH, spent), True)


def _theorem(row: Sandwich, printed: PrintedTheorem) -> str:
    text = printed_bound_text(printed)
    if not printed.printed_applies:
        return f"({text})"
    return f"{text}: false" if violates_printed_theorem(row, printed) else text


def sandwich_chart(collapse: Sequence[Sandwich], printed: PrintedTheorem) -> Chart | None:
    """Return one line per method, from the attained to the proved error, on a logarithmic axis."""
    bounded = [(k, row) for k, row in enumerate(collapse) if not row.refused]
    if not bounded:
        return None
    both = [(k, row) for k, row in bounded if (row.lower or 0) > 0 and (row.upper or 0) > 0]
    at, values = [k for k, _ in both for _ in range(3)], [x for _, row in both for x in (row.lower, row.upper, None)]
    series = [Series("line", "", at, values, "@rule-strong", width=3, size=0)]
    for key, name, color, symbol, size in (
        ("lower", "attained by an input", MEASURED, "circle-open", 12),
        ("upper", "proved for every input", PROVED, "diamond", 10),
    ):
        known = [(k, value) for k, row in bounded if (value := getattr(row, key)) is not None and value > 0]
        series.append(
            Series("points", name, [k for k, _ in known], [v for _, v in known], color, symbol=symbol, size=size)
        )
    remarks = [(k, "does not apply") for k, row in enumerate(collapse) if row.refused]
    remarks += [(k, "no finite bound") for k, row in bounded if row.upper is None]
    errors = [error for _, row in bounded for error in (row.lower, row.upper) if error is not None and error > 0]
    bound, name = printed.printed_bound, "Theorem D.1" if printed.printed_applies else "(Theorem D.1)"
    is_near = bound is not None and bound > 0 and bool(errors) and bound < 1e3 * max(errors)
    lines = [Line(bound, f"{name}, as printed", "@purple")] if bound is not None and is_near else []
    best = min((row for _, row in bounded if row.upper is not None), key=lambda row: row.upper or 0.0, default=None)
    alt = "Sandwich per method on a logarithmic axis, from the attained to the proved error."
    if best is not None:
        alt += (
            f" The smallest bound is that of {printable(best.method)}: {number(best.upper)} proved, "
            f"{number(best.lower)} attained."
        )
    down = Axis(kind="rows", names=[short(row.method, 20) for row in collapse])
    across = Axis("largest error in any entry", "log")
    plot = Plot(alt, down, across, series, lines=lines, remarks=remarks)
    return Chart((plot,), 104 + 42 * len(collapse))


def depth_part(subject: NetworkSubject) -> Part:
    """Return the effective depth per tolerance, proved and measured."""
    title = "Effective depth"
    if not subject.depth:
        words = "Effective depth is not defined for this kind of network."
        return Part("depth", title, words, half=True, place=Place.PAGE)
    layers, found = len(subject.layers), dict[float, dict[bool, DepthRow]]()
    for row in subject.depth:
        found.setdefault(row.tolerance, {})[row.certified] = row
    columns: Headings = (
        "within", *((name, name, "error", "kept", "folded into one each") for name in _BOTH.values())
    )  # fmt: skip
    rows: Rows = tuple((one, *(_depth(kinds.get(kind), layers) for kind in _BOTH)) for one, kinds in found.items())
    table = Table("Effective depth: layers that are enough", columns, rows)
    caption = (
        f"The smallest number of {counted(layers, 'layer')} found to be enough: proved for every input with entries up "
        f"to {number(subject.radius)}, and measured on the inputs."
    )
    return Part("depth", title, caption, depth_chart(subject.depth, layers), table, half=True, place=SCREENS)


_BOTH = {True: "proved for every input", False: "measured on the inputs"}


def _depth(row: DepthRow | None, layers: int) -> Brief:
    """Return `1 of 12 (corrected)`, or `12 of 12 (fewer: refuted)`, with the error and the layers."""
    if row is None:
        return Brief(DASH, (None, None, None, None))
    how = row.method if row.layers < layers else ""
    how = f"fewer: {row.status}" if not how and row.status in ("refuted", "undecided") else how
    text = f"{row.layers} of {layers}" + (f" ({how})" if how else "")
    folded = "; ".join(ranges(sorted(run)) for run in row.folded) or "none"
    return Brief(text, (text, row.error, ranges(sorted(row.kept)), folded))


def depth_chart(depth: Sequence[DepthRow], layers: int) -> Chart:
    """Return the layers that are enough per tolerance, proved next to measured."""
    names, bars = [number(one) for one in sorted({row.tolerance for row in depth}, reverse=True)], []
    for certified, name in _BOTH.items():
        rows = sorted((row for row in depth if row.certified == certified), key=lambda row: -row.tolerance)
        at = [number(row.tolerance) for row in rows]
        bars.append(
            Series(
                "bar", name, at, [row.layers for row in rows], PROVED if certified else MEASURED,
                places=[f"within {tolerance}" for tolerance in at], labels=[str(row.layers) for row in rows],
                texts=[f"{row.layers} of {layers}, error {number(row.error)}" for row in rows],
                dash="solid" if certified else "dash",
            )
        )  # fmt: skip
    words = "; ".join(
        f"{row.layers} within {number(row.tolerance)}, {'proved' if row.certified else 'measured'}" for row in depth
    )
    alt = f"Bar chart of the layers that are enough, out of {layers}: {words}."
    up = Axis("layers that are enough", range=(0, layers * 1.14), step=-(-layers // 6) or 1)
    plot = Plot(alt, Axis("tolerance in any entry", "names", names), up, bars)
    return Chart((plot,), 330)
