"""The page section of a network: effective depth, the sandwich per method, its heads."""

from collections.abc import Sequence

from depthgauge.base.format import DASH, counted, number, printable, ranges, short
from depthgauge.report.charts import MEASURED, PROVED, Chart, Figure, figure, hovering, label, log_axis, on_log, single
from depthgauge.report.markup import Cell, Table, percent, span
from depthgauge.report.page_parts import Measure, PagePart, head_part, present, residual_part
from depthgauge.results.gauge_options import GaugeSettings
from depthgauge.results.network_subject import DepthRow, NetworkSubject, PrintedTheorem, Sandwich
from depthgauge.results.verdicts import printed_bound_text, violates_printed_theorem


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


def network_parts(subject: NetworkSubject) -> tuple[PagePart, ...]:
    """Return all parts of the section, in order."""
    heads = head_part(subject, share_measures(subject.collapse))
    return present(depth_part(subject), residual_part(subject), sandwich_part(subject), heads)


def share_measures(collapse: Sequence[Sandwich]) -> tuple[Measure, ...]:
    """Return the share of each head in every proved bound, as views of the heat map."""
    note = "The share of each head in the proved bound on {}; all shares add up to 1."
    shown = [row for row in collapse if row.upper is not None and any(any(heads) for heads in row.share)]
    named = [(printable(row.method), row.share) for row in shown]
    return tuple(Measure(f"share of the bound, {m}", note.format(m), share, percent, "Proved") for m, share in named)


def sandwich_part(subject: NetworkSubject) -> PagePart | None:
    """Return one layer instead of all: the attained and the proved error of every method."""
    if not subject.collapse:
        return None
    columns = ("method", "attained", "proved", "ratio", "how it was proved", "seconds")
    rows = tuple(map(_bound_row, subject.collapse))
    table = Table("One layer instead of all: the attained and the proved error", columns, rows)
    caption = (
        f"For every input with entries up to {number(subject.radius)}, of any number of tokens. Attained: at least one "
        f"input is off by this. Proved: no input is off by more. {_printed_text(subject)}"
    )
    chart = sandwich_chart(subject.collapse, subject.printed)
    return PagePart("sandwich", "One layer instead of all", caption, chart, table, table_open=True)


def _bound_row(row: Sandwich) -> tuple[Cell, ...]:
    if row.refused:
        return (row.method, None, None, None, f"does not apply: {row.refused}", None)
    lost = [] if row.lost_at is None else [f"no finite bound, lost at layer {row.lost_at}"]
    how = "; ".join([", ".join(row.methods), *lost, *row.notes])
    spent = (row.seconds or 0.0) + (row.attack_seconds or 0.0)
    return (row.method, row.lower, row.upper, row.ratio, how or DASH, spent)


def _printed_text(subject: NetworkSubject) -> str:
    """Return what Theorem D.1 prints, whether its conditions hold, and whether it is violated."""
    printed = subject.printed
    text = printed_bound_text(printed)
    words = f"The bound that Theorem D.1 of paper A prints {'overflows' if text == 'overflows' else f'is {text}'}"
    if not printed.printed_applies:
        return f"{words}; its conditions do not hold here."
    if any(violates_printed_theorem(row, printed) for row in subject.collapse):
        return f"{words}; last-layer, the network it constructs, exceeds it."
    return f"{words}."


def sandwich_chart(collapse: Sequence[Sandwich], printed: PrintedTheorem) -> Chart | None:
    """Return one line per method, from the attained to the proved error, on a logarithmic axis."""
    bounded = [row for row in collapse if not row.refused]
    if not bounded:
        return None
    both = [row for row in bounded if on_log(row.lower) and on_log(row.upper)]
    link = {
        "type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False,
        "x": [x for row in both for x in (row.lower, row.upper, None)],
        "y": [y for row in both for y in (label(row.method), label(row.method), None)],
        "line": {"color": "@rule-strong", "width": 3},
    }  # fmt: skip
    lower = _markers(bounded, "lower", "attained by an input", {"symbol": "circle-open", "color": MEASURED, "size": 12})
    lower["marker"]["line"] = {"width": 2.5, "color": MEASURED}
    upper = _markers(bounded, "upper", "proved for every input", {"symbol": "diamond", "color": PROVED, "size": 10})
    remarks = [(row, "does not apply") for row in collapse if row.refused]
    remarks += [(row, "no finite bound") for row in bounded if row.upper is None]
    errors = [value for row in bounded for value in (row.lower, row.upper) if value is not None and value > 0]
    methods = [label(row.method) for row in collapse]
    bound = printed.printed_bound
    printed_shown = bound is not None and on_log(bound) and errors and bound < 1e3 * max(errors)
    drawn = figure(
        link, lower, upper,
        x={"title": "largest error in any entry", **log_axis(errors)},
        y={
            "type": "category", "categoryorder": "array", "automargin": True,
            "categoryarray": methods, "tickvals": methods,
            "ticktext": [label(short(row.method, 20)) for row in collapse],
            "range": [len(collapse) - 0.5, -0.5], "ticklabelstandoff": 6,
        },
        left=12, right=16, top=36,
        annotations=[{
            "xref": "paper", "x": 1, "xanchor": "right", "yref": "y", "y": label(row.method), "text": words,
            "showarrow": False, "font": {"color": "@faint", "size": 12}, "bgcolor": "@raised", "borderpad": 2,
        } for row, words in remarks],
        shapes=[_printed_line(bound or 0.0, printed.printed_applies)] if printed_shown else [],
    )  # fmt: skip
    best = min((row for row in bounded if row.upper is not None), key=lambda row: row.upper or 0.0, default=None)
    alt = "Sandwich per method on a logarithmic axis, from the attained to the proved error."
    if best is not None:
        alt += (
            f" The smallest bound is that of {printable(best.method)}: {number(best.upper)} proved, "
            f"{number(best.lower)} attained."
        )
    return single(alt, 104 + 42 * len(collapse), drawn)


def _markers(bounded: Sequence[Sandwich], key: str, name: str, marker: Figure) -> Figure:
    shown = [(row, getattr(row, key)) for row in bounded if on_log(getattr(row, key))]
    return {
        "type": "scatter", "mode": "markers", "name": name, "marker": marker,
        "x": [value for _, value in shown], "y": [label(row.method) for row, _ in shown],
        **hovering([f"{label(row.method)}<br>{name} <b>{number(value)}</b>" for row, value in shown]),
    }  # fmt: skip


def _printed_line(bound: float, applies: bool) -> Figure:
    """Return a dashed line at the bound that Theorem D.1 prints, in brackets where its conditions fail."""
    name = "Theorem D.1" if applies else "(Theorem D.1)"
    place = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": bound, "x1": bound}
    line = {"color": "@purple", "width": 1.5, "dash": "dash"}
    return {**place, "line": line, "showlegend": True, "name": f"{name}, as printed"}


def depth_part(subject: NetworkSubject) -> PagePart:
    """Return the effective depth per tolerance, proved and measured."""
    if not subject.depth:
        return PagePart(
            "depth", "Effective depth", "Effective depth is not defined for this kind of network.", half=True
        )
    layers = len(subject.layers)
    columns = ("tolerance", "", "layers", "error", "method", "kept", "folded into one each")
    rows = tuple(
        (
            row.tolerance,
            "proved" if row.certified else "measured",
            row.layers,
            row.error,
            row.method if row.layers < layers else f"fewer: {row.status}" if row.status else row.method,
            ranges(sorted(row.kept)),
            "; ".join(ranges(sorted(run)) for run in row.folded) or "none",
        )
        for row in subject.depth
    )
    caption = (
        f"The smallest number of {counted(layers, 'layer')} found to be enough: proved for every input with entries up "
        f"to {number(subject.radius)}, and measured on the inputs."
    )
    table = Table("Layers that are enough, by tolerance", columns, rows)
    return PagePart("depth", "Effective depth", caption, depth_chart(subject.depth, layers), table, half=True)


def depth_chart(depth: Sequence[DepthRow], layers: int) -> Chart:
    """Return the layers that are enough per tolerance, proved next to measured."""
    tolerances = sorted({row.tolerance for row in depth}, reverse=True)
    traces = []
    kinds = ((True, "proved for every input", PROVED), (False, "measured on the inputs", MEASURED))
    for certified, name, color in kinds:
        found = {row.tolerance: row for row in depth if row.certified == certified}
        there = [tolerance for tolerance in tolerances if tolerance in found]
        traces.append({
            "type": "bar", "name": name, "marker": {"color": color, "pattern": {"shape": "" if certified else "/"}},
            "x": [number(tolerance) for tolerance in there], "y": [found[tolerance].layers for tolerance in there],
            "text": [str(found[tolerance].layers) for tolerance in there], "textposition": "outside",
            "textfont": {"size": 11}, "cliponaxis": False, **hovering([
                f"within {number(tolerance)}<br>{name} <b>{found[tolerance].layers} of {layers}</b><br>"
                f"error {number(found[tolerance].error)}" for tolerance in there
            ]),
        })  # fmt: skip
    drawn = figure(
        *traces,
        x={"type": "category", "title": "tolerance in any entry", "showgrid": False},
        y={"title": "layers that are enough", "range": [0, layers * 1.14], "dtick": -(-layers // 6) or 1},
        left=52, top=36, barmode="group", bargap=0.25, bargroupgap=0.14,
    )  # fmt: skip
    words = "; ".join(
        f"{row.layers} within {number(row.tolerance)}, {'proved' if row.certified else 'measured'}" for row in depth
    )
    return single(f"Bar chart of the layers that are enough, out of {layers}: {words}.", 330, drawn)
