"""What is shown of a gauge: one section per network or checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge.base.format import DASH, capital, counted, number, percent, printable, ranges, short, span
from depthgauge.results.document import (
    MEASURED,
    PROVED,
    SCREENS,
    Axis,
    Brief,
    Cell,
    Chart,
    Document,
    Headings,
    Heat,
    Line,
    Part,
    Place,
    Plot,
    Rows,
    Section,
    Series,
    Table,
    command_line,
    fixed,
    present,
    ranged,
    settings_table,
)
from depthgauge.results.gauge_record import (
    CheckpointDescription,
    CheckpointHead,
    CheckpointLayer,
    CheckpointSubject,
    DepthRow,
    GaugeRecord,
    GaugeSettings,
    Interval,
    NetworkHead,
    NetworkLayer,
    NetworkSubject,
    PrintedTheorem,
    Residual,
    Sandwich,
    ScoreTrust,
    Subject,
    mean_caption,
    printed_bound_text,
    unobserved_sentence,
    violates_printed_theorem,
)
from depthgauge.results.labels import CENTERS, EXPERT_MEASURES, HEAD_MEASURES, NORMS, SCORES, WHAT_IFS, of_stack, unit

# --- Parts of both: maps of the heads, the residual, ranges over heads ------------------------------------------------

Layers = Sequence[NetworkLayer | CheckpointLayer]


@dataclass(frozen=True)
class Measure:
    """The values of a heat map, per layer and head, with their name, explanation and format.

    `top` is the natural maximum of the values, if there is one. The menu lists the measure under `group`.
    """

    name: str
    note: str
    rows: Sequence[Sequence[float | None]]
    show: Callable[[float | None], str] = number
    group: str = "Measured"
    top: float = 0.0


def spread(heads: Sequence[Any], value: Callable[[Any], float | None]) -> Brief:
    """Return the minimum and the maximum of a measure over the heads."""
    values = [found for head in heads if (found := value(head)) is not None]
    least, largest = number(min(values, default=None), 2), number(max(values, default=None), 2)
    return fixed(least if least == largest else f"{least}–{largest}")


def head_measures(layers: Layers) -> list[str]:
    """Return the names of the head measures that at least one head has, in the order of the labels."""
    return [
        name
        for name in HEAD_MEASURES
        if any(getattr(head, name, None) is not None for layer in layers for head in layer.heads)
    ]


def head_map(layers: Layers, more: Sequence[Measure] = ()) -> Chart | None:
    """Return layer × head heat maps: one view per head measure, and the given ones after them."""
    heads = max((len(layer.heads) for layer in layers), default=0)
    if heads == 0:
        return None
    measures = [
        Measure(
            name=HEAD_MEASURES[name].label,
            note=HEAD_MEASURES[name].sentence,
            rows=[[getattr(head, name, None) for head in layer.heads] for layer in layers],
            show=percent if name == "first_mass" else number,
            top=HEAD_MEASURES[name].top,
        )
        for name in head_measures(layers)
    ]
    return heat_maps(layers, heads, [*measures, *more])


def heat_maps(layers: Layers, count: int, measures: Sequence[Measure], noun: str = "head") -> Chart | None:
    """Return one view per measure; `noun` is what a layer has `count` of."""
    views = tuple(_heat_map(layers, count, measure, noun) for measure in measures)
    return Chart(views, 116 + count * max(16, min(44, 320 // count)), "Measure") if views else None


def _heat_map(layers: Layers, count: int, measure: Measure, noun: str) -> Plot:
    """Return one measure of every head, layers from left to right, with a gap where a layer has fewer heads."""
    rows = [*measure.rows, *[[]] * len(layers)][: len(layers)]
    z = [[row[h] if h < len(row) else None for row in rows] for h in range(count)]
    names = [str(layer.index) for layer in layers]

    def place(h: int, ell: int, between: str) -> str:
        return f"layer {names[ell]}{between}{noun} {h}"

    heat = Heat(measure.name, z, names, place, measure.top, measure.show)
    extremes = heat.extremes(f"No {noun} has a value.")
    alt = f"Heat map of {measure.name} by layer and {noun}. {extremes}"
    down = Axis(noun, "down", [str(h) for h in range(count)])
    note = f"{measure.note} {extremes}"
    return Plot(alt, Axis("layer", "names", names), down, (), measure.name, note, measure.group, heat)


def head_part(subject: Subject, more: tuple[Measure, ...] = (), statements: tuple[str, ...] = ()) -> Part | None:
    """Return the layer × head heat map with a menu of measures, and the table of all of them."""
    chart, keys = head_map(subject.layers, more), head_measures(subject.layers)
    if chart is None:
        return Part("heads", "Layer by head", statements=statements, place=Place.PAGE) if statements else None
    rows = tuple(
        (layer.index, head.index, *(getattr(head, key, None) for key in keys))
        for layer in subject.layers
        for head in layer.heads
    )
    columns = ("layer", "head", *(HEAD_MEASURES[key].label for key in keys))
    caption = "Point at a cell, or move through the cells with the arrow keys, to read its value."
    table = Table("Every measure of every head", columns, rows)
    return Part("heads", "Layer by head", caption, chart, table, statements, place=Place.PAGE)


def residual_states(subject: Subject) -> list[tuple[str, Residual]]:
    """Return the states that have a residual: the input, named `in`, and the state after each layer."""
    states = [("in", subject.input.residual), *((str(layer.index), layer.residual) for layer in subject.layers)]
    return [(name, residual) for name, residual in states if residual is not None]


def residual_curve(subject: Subject) -> Chart | None:
    """Return ‖Res X‖/‖X‖ from the input to the output, in every norm, with one view per centre."""
    states = residual_states(subject)
    # For checkpoints the mean comes first: about the mid-range, one token with a huge entry dominates every state.
    centers = CENTERS if isinstance(subject, NetworkSubject) else reversed(list(CENTERS))
    return Chart(tuple(_residual_view(states, center) for center in centers), 330, "Centre") if states else None


_STYLES = (("@blue", "circle", "solid"), ("@vermilion", "square", "dash"), ("@green", "diamond", "dot"))


def _residual_view(states: Sequence[tuple[str, Residual]], center: str) -> Plot:
    names, series, ratios = [name for name, _ in states], [], list[float]()
    for norm, (color, symbol, dash) in zip(NORMS, _STYLES, strict=True):
        sizes = [residual[center][norm] for _, residual in states]
        values, spreads = [size.ratio for size in sizes], [size.ratio_std or 0.0 for size in sizes]
        ratios += [value for value in values if value is not None and value > 0]
        series.append(
            Series(
                "line", NORMS[norm], names, values, color, symbol=symbol, dash=dash, size=7,
                ends=[(None, None) if v is None else (v - s, v + s) for v, s in zip(values, spreads, strict=True)],
                places=["input" if name == "in" else f"after layer {name}" for name in names],
                texts=[f"{number(size.ratio)} ± {number(size.ratio_std, 2)}" for size in sizes],
            )
        )  # fmt: skip
    falls = bool(ratios) and min(ratios) < 0.1 * max(ratios)
    flat = bool(ratios) and max(ratios) - min(ratios) < 0.25 * max(ratios)
    first, last = (number(residual[center].max.ratio) for _, residual in (states[0], states[-1]))
    alt = f"Line chart of the differences between tokens, by layer, in the largest entry: from {first} to {last}."
    note = (
        "The part of a state that differs between tokens: 0 if all tokens are equal. It exceeds 1 where the centre is "
        "further from the tokens than the origin is, in that norm."
    )
    down = Axis("‖Res X‖ / ‖X‖", "log" if falls else "" if flat else "zero")
    return Plot(alt, Axis("after layer", "names", names), down, series, CENTERS[center], note)


def residual_part(subject: Subject) -> Part | None:
    """Return the residual curve: how much the tokens still differ after each layer."""
    if (chart := residual_curve(subject)) is None:
        return None
    pairs = [(center, norm) for center in CENTERS for norm in NORMS]
    columns = ("after layer", *(f"{center}, {NORMS[norm]}" for center, norm in pairs))
    rows = tuple(
        (name, *(residual[center][norm].ratio for center, norm in pairs)) for name, residual in residual_states(subject)
    )
    caption = "Mean over the inputs, with one standard deviation; “in” is the input."
    table = Table("‖Res X‖ / ‖X‖ by layer, centre and norm", columns, rows)
    title = "What still differs between tokens"
    return Part("residual", title, caption, chart, table, half=True, place=Place.PAGE)


# --- A network: effective depth, the sandwich per method, its heads ---------------------------------------------------


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
    return present(network_profile(subject), sandwich, depth_part(subject), residual_part(subject), heads)


def network_profile(subject: NetworkSubject) -> Part:
    """Return one row per layer: the residual, and the range of each head measure over the heads."""
    rows: list[tuple[Cell, ...]] = [(fixed("input"), subject.input.residual.midrange.max.ratio, "", "", "", "")]
    for layer in subject.layers:
        cells = (
            layer.residual.midrange.max.ratio, spread(layer.heads, lambda head: head.score_range),
            spread(layer.heads, lambda head: head.tv_mean), _largest(layer.heads, "contraction"),
            _largest(layer.heads, "contraction_bound"),
        )  # fmt: skip
        rows.append((fixed(str(layer.index)), *cells))
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
    layers, by_tolerance = len(subject.layers), dict[float, dict[bool, DepthRow]]()
    for row in subject.depth:
        by_tolerance.setdefault(row.tolerance, {})[row.certified] = row
    columns: Headings = (
        "within", *((name, name, "error", "kept", "folded into one each") for name in _BOTH.values())
    )  # fmt: skip
    rows: Rows = tuple(
        (tolerance, *(_depth(kinds.get(kind), layers) for kind in _BOTH)) for tolerance, kinds in by_tolerance.items()
    )
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
    names, bars = [number(tolerance) for tolerance in sorted({row.tolerance for row in depth}, reverse=True)], []
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


# --- A checkpoint: the cost of removing each layer, layer scores, heads -----------------------------------------------


def checkpoint_section(subject: CheckpointSubject) -> Section:
    """Return what is shown of one checkpoint."""
    headline = f"{subject.name}{_shape(subject.model)}"
    return Section(subject.name, headline, subject.verdict, checkpoint_facts(subject), checkpoint_parts(subject))


def _shape(model: CheckpointDescription) -> str:
    heads = f" × {counted(model.heads, 'head')}" if model.heads else ""
    groups = "" if model.kv_heads == model.heads else f" ({model.kv_heads} key–value)"
    stack = "" if model.stack is None else f", {model.stack}"
    count = model.parameters
    parameters = f"{count / 1e6:.0f} million parameters" if count >= 10**6 else f"{count:,} parameters"
    return f"{stack}: {counted(model.layers, 'layer')}{heads}{groups}, dim {model.dim}, {parameters}"


def checkpoint_facts(subject: CheckpointSubject) -> tuple[tuple[str, str], ...]:
    """Return what the checkpoint is, what it was gauged on, and how far its weights are from small."""
    model = subject.model
    shared = "" if model.kv_heads == model.heads else f", {model.kv_heads} for keys and values"
    facts = [] if model.hub is None else [("source", model.hub.target)]
    facts += [
        ("architecture", model.architecture),
        ("layers", f"{model.layers}{of_stack(model.stack)}"),
        ("heads per layer", f"{model.heads}{shared}"),
        ("token width", str(model.dim)),
        ("parameters", f"{model.parameters:,}"),
        ("precision", model.dtype),
    ]
    if (text := subject.text) is not None:
        facts.append((text.kind, f"{text.phrase()} of {text.source}"))
        if text.bos is not None:
            facts.append(("BOS token", f"{'added' if text.bos else 'not added'}: {text.bos_reason}"))
    if subject.baseline is not None:
        per = " per token" if model.objective == "loss" else ""
        facts.append(("loss, intact", f"{number(subject.baseline.loss)} nats{per}"))
    if subject.accuracy is not None:
        facts.append(("accuracy, intact", f"{number(100 * subject.accuracy)} %"))
    if (regime := subject.regime) is not None:
        distance = f"about {regime.corrected_orders:.1f} orders of magnitude from the small-weight regime (estimate)"
        facts.append(("weights", f"η = {number(regime.eta)}, {distance}"))
    return tuple(facts)


def checkpoint_parts(subject: CheckpointSubject) -> tuple[Part, ...]:
    """Return all parts of the section, the what-ifs first."""
    unseen = () if subject.unobserved is None else (unobserved_sentence(subject.unobserved),)
    return present(
        checkpoint_profile(subject, unseen), what_if_part(subject), *experts_parts(subject), trust_part(subject),
        residual_part(subject), head_part(subject, statements=unseen), notes_part(subject),
    )  # fmt: skip


def checkpoint_profile(subject: CheckpointSubject, unseen: tuple[str, ...]) -> Part:
    """Return one row per layer: the residual and what the heads do on text, or else the sizes of the weights."""
    on_text = subject.text is not None
    by_head = _WEIGHT_COLUMNS if not on_text else {} if unseen else _TEXT_COLUMNS
    rows: list[tuple[Cell, ...]] = []
    for state in ((subject.input,) if on_text else ()) + subject.layers:
        layer = state if isinstance(state, CheckpointLayer) else None
        residual = None if state.residual is None else state.residual.mean.composite.ratio
        ranges = ("" if layer is None else spread(layer.heads, value) for value in by_head.values())
        rows.append((fixed("input" if layer is None else str(layer.index)), *([residual] if on_text else []), *ranges))
    columns = ("layer", *(["residual"] if on_text else []), *by_head)
    caption = _RESIDUAL + (_HEADS if by_head else "") if on_text else _WEIGHTS
    table = Table("", columns, tuple(rows), dim=(0,) if on_text else ())
    return Part("layers", "Layers", caption, None, table, unseen, place=Place.TERMINAL)


_Value = Callable[[CheckpointHead], float | None]
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


def what_if_part(subject: CheckpointSubject) -> Part | None:
    """Return the cost of each what-if by layer with its interval: bars, with one view per what-if."""
    layers = subject.layers
    kinds = [kind for kind in WHAT_IFS if any(kind in layer.what_if for layer in layers)]
    if not kinds:
        return None
    measured = unit(subject.model.objective)
    views = tuple(_bars(layers, kind, measured) for kind in kinds)
    labels = [WHAT_IFS[kind].label for kind in kinds]
    columns: Headings = ("layer", *((name, name, f"{name}, low", f"{name}, high") for name in labels))
    rows: Rows = tuple((layer.index, *(_ranged(layer.what_if.get(kind)) for kind in kinds)) for layer in layers)
    intact = "" if subject.baseline is None else f" (intact: {number(subject.baseline.loss)})"
    table = Table(f"What if: {measured}{intact}", columns, rows)
    caption = f"{mean_caption(subject)} Layers are counted from 0."
    return Part("what-if", "What each layer is worth", caption, Chart(views, 340, "What if"), table, place=SCREENS)


def _ranged(interval: Interval | None) -> Brief:
    return ranged(None, None, None) if interval is None else ranged(interval.loss, interval.low, interval.high, 2)


def _bars(layers: Sequence[CheckpointLayer], kind: str, measured: str) -> Plot:
    names = [str(layer.index) for layer in layers]
    title, intervals = WHAT_IFS[kind].label, [layer.what_if.get(kind) for layer in layers]
    values = [None if interval is None else interval.loss for interval in intervals]
    ends = [(None, None) if interval is None else (interval.low, interval.high) for interval in intervals]
    known = {name: interval.loss for name, interval in zip(names, intervals, strict=True) if interval is not None}
    least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    words = f"Smallest at layer {least} ({number(known[least])}), largest at layer {most} ({number(known[most])})."
    alt = f"Bar chart of {measured} by layer, {title}. {words}"
    bars = Series("bar", title, names, values, MEASURED, ends, legend=False)
    note = f"{WHAT_IFS[kind].sentence} {words}"
    return Plot(alt, Axis("layer", "names", names), Axis(measured, "zero"), (bars,), title, note)


def experts_parts(subject: CheckpointSubject) -> tuple[Part, ...]:
    """Return the what-if `expert`: for the terminal a row per layer, for the page heat maps and all experts."""
    layers = [layer for layer in subject.layers if layer.experts]
    if not layers:
        return ()
    most, measured, mean = max(len(layer.experts) for layer in layers), unit(subject.model.objective), mean_caption
    loss, share = EXPERT_MEASURES["loss"], EXPERT_MEASURES["share"]
    chart = heat_maps(layers, most, (
        Measure(
            loss.label, f"{loss.sentence} {capital(measured)}.",
            [[expert.what_if.loss for expert in layer.experts] for layer in layers],
        ),
        Measure(
            share.label, share.sentence, [[expert.share for expert in layer.experts] for layer in layers], percent,
            top=share.top,
        ),
    ), "expert")  # fmt: skip
    columns = ("layer", "expert", (loss.label, loss.label, f"{loss.label}, low", f"{loss.label}, high"), share.label)
    rows = tuple(
        (layer.index, expert.index, _ranged(expert.what_if), expert.share)
        for layer in layers
        for expert in layer.experts
    )
    table = Table(f"Without one expert: {measured}", columns, rows)
    ranked = [sorted(layer.experts, key=lambda expert: expert.what_if.loss) for layer in layers]
    summary = tuple(
        (
            layer.index, len(layer.experts), spread(layer.experts, lambda expert: 100 * expert.share),
            spread(layer.experts, lambda expert: expert.what_if.loss), experts[0].index, experts[-1].index,
        )
        for layer, experts in zip(layers, ranked, strict=True)
    )  # fmt: skip
    names = ("layer", "experts", "% of tokens", "skip expert", "costs least", "costs most")
    brief, title = Table(f"What if one expert adds nothing: {measured}", names, summary), "What each expert is worth"
    caption = "Minimum – maximum over the experts of a layer."
    return (
        Part("experts-by-layer", title, caption, None, brief, place=Place.TERMINAL),
        Part("experts", title, mean(subject), chart, table, place=Place.PAGE),
    )


def trust_part(subject: CheckpointSubject) -> Part | None:
    """Return each layer score against the measured cost, one point per layer."""
    rows = [row for row in subject.scores if row.score in SCORES and row.what_if in WHAT_IFS]
    if not rows:
        return None
    table = Table(
        "Which layer score predicts the measured cost?",
        ("score", "against", "rank correlation"),
        tuple(
            (SCORES[row.score].label, WHAT_IFS[row.what_if].label, Brief(number(row.spearman, 2), (row.spearman,)))
            for row in rows
        ),
        is_open=True,
    )
    caption = "A useful score ranks the layers in the order of the measured cost; rank correlation 1 is the same order."
    chart = Chart(tuple(_scatter(subject, row) for row in rows), 340, "Score")
    return Part("trust", "Which layer score predicts the cost", caption, chart, table, half=True, place=SCREENS)


def _scatter(subject: CheckpointSubject, row: ScoreTrust) -> Plot:
    score, title = SCORES[row.score], WHAT_IFS[row.what_if].label
    points = [
        (str(layer.index), value, layer.what_if[row.what_if].loss)
        for layer in subject.layers
        if row.what_if in layer.what_if and (value := layer.scores.get(row.score)) is not None
    ]
    x, y = [value for _, value, _ in points], [loss for *_, loss in points]
    places = [f"layer {name}\n{score.label} {number(value)}" for name, value, _ in points]
    marks = Series(
        "points", title, x, y, places=places, labels=[name for name, *_ in points], size=8, legend=False
    )  # fmt: skip
    across, up = Axis(score.label, _scale(x)), Axis(f"{title}: {unit(subject.model.objective)}", _scale(y))
    words = f"Rank correlation {number(row.spearman, 2)} over {counted(row.layers, 'layer')}."
    alt = f"Scatter plot of {score.label} against {title}, one point per layer. {words}"
    return Plot(alt, across, up, (marks,), score.label, f"{score.sentence} {words}")


def _scale(values: Sequence[float]) -> str:
    """Return a logarithmic axis if the values span more than a factor of 20."""
    return "log" if values and min(values) > 0 and max(values) > 20 * min(values) else ""


def notes_part(subject: CheckpointSubject) -> Part | None:
    """Return which heads can use fast attention, and what was not measured and why."""
    plans = [layer.fast for layer in subject.layers if layer.fast is not None]
    text, lines = subject.text, [plan.line for plan in plans if plan.heads]
    if plans and not lines:
        bounds = [bound for plan in plans for bound in plan.bounds if bound is not None]
        least = f"; the smallest proved bound on a head's scores is {number(min(bounds))}" if bounds else ""
        lines = [f"no head can use it at the default tolerance{least}"]
    statements = [f"fast attention: {line}" for line in lines]
    if text is not None and text.bos is not None:
        begin = "start" if text.bos else "do not start"
        statements.append(f"windows {begin} with the BOS token: {text.bos_reason}")
    statements += [f"note: {remark}" for remark in subject.notes]
    if not statements:
        return None
    every = tuple((plan.line,) for plan in plans)
    title = "Fast attention: which heads can use it"
    table = Table(title, ("layer by layer",), every, place=Place.PAGE) if plans else None
    caption = "Heads whose scores are proved to be small enough can run on a polynomial within the tolerance."
    return Part(
        "notes", "Fast attention and notes", caption if plans else "", None, table, tuple(statements), place=SCREENS
    )  # fmt: skip


# --- The document -----------------------------------------------------------------------------------------------------

SAVED = "network.safetensors"
"""The file name that a page suggests for a network that was gauged in memory."""


def gauge_document(result: GaugeRecord) -> Document:
    """Return what is shown of a result of `gauge`."""
    settings = result.settings
    kinds = {"network" if isinstance(subject, NetworkSubject) else "model" for subject in result.subjects}
    count = counted(len(result.subjects), kinds.pop() if len(kinds) == 1 else "subject")
    proved = ", and what is proved for every input" if any(map(_is_proved, result.subjects)) else ""
    saving = (
        "The network was gauged from Python and has no file. Save it first with "
        f'`depthgauge.save_network(network, "{SAVED}")`.'
    )
    return Document(
        version=result.version,
        heading="How deep is it, really?",
        lead=f"{count} gauged with depthgauge {result.version}: what was measured on inputs{proved}.",
        sections=tuple(gauge_section(subject, settings) for subject in result.subjects),
        command=gauge_command(settings),
        settings=settings_table(
            {"target": "the built-in pair" if settings.target is None else settings.target, **settings.given()}
        ),
        preparation=saving if settings.in_memory else "",
    )


def _is_proved(subject: Subject) -> bool:
    return isinstance(subject, NetworkSubject) and bool(subject.collapse)


def gauge_section(subject: Subject, settings: GaugeSettings) -> Section:
    """Return the section of one subject, by its kind."""
    if isinstance(subject, NetworkSubject):
        return network_section(subject, settings)
    return checkpoint_section(subject)


def gauge_command(settings: GaugeSettings) -> str:
    """Return the command that reproduces a result of `gauge`.

    A network that was gauged in memory has no file; the command names the file it must be saved to first.

    >>> gauge_command(GaugeSettings(target="some name", tokens=8, in_memory=True))
    'depthgauge gauge --tokens 8 network.safetensors'
    """
    return command_line("gauge", settings.given(), SAVED if settings.in_memory else settings.target)
