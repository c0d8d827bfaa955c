"""What is shown of a checkpoint: the cost of removing each layer, layer scores, heads."""

from collections.abc import Callable, Mapping, Sequence

from depthgauge.base.format import capital, counted, number, percent
from depthgauge.results.checkpoint_subject import (
    CheckpointDescription,
    CheckpointHead,
    CheckpointLayer,
    CheckpointSubject,
    Interval,
    ScoreTrust,
)
from depthgauge.results.document import (
    MEASURED,
    SCREENS,
    Axis,
    Brief,
    Cell,
    Chart,
    Headings,
    Part,
    Place,
    Plot,
    Rows,
    Section,
    Series,
    Table,
    fixed,
    present,
    ranged,
)
from depthgauge.results.labels import EXPERT_MEASURES, SCORES, WHAT_IFS, of_stack, unit
from depthgauge.results.layer_parts import Measure, head_part, heat_maps, residual_part, spread
from depthgauge.results.verdicts import mean_caption, unobserved_sentence


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
        profile_part(subject, unseen), what_if_part(subject), *experts_parts(subject), trust_part(subject),
        residual_part(subject), head_part(subject, statements=unseen), notes_part(subject),
    )  # fmt: skip


def profile_part(subject: CheckpointSubject, unseen: tuple[str, ...]) -> Part:
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


def _ranged(found: Interval | None) -> Brief:
    return ranged(None, None, None) if found is None else ranged(found.loss, found.low, found.high, 2)


def _bars(layers: Sequence[CheckpointLayer], kind: str, measured: str) -> Plot:
    names = [str(layer.index) for layer in layers]
    title, found = WHAT_IFS[kind].label, [layer.what_if.get(kind) for layer in layers]
    values = [None if one is None else one.loss for one in found]
    ends = [(None, None) if one is None else (one.low, one.high) for one in found]
    known = {name: one.loss for name, one in zip(names, found, strict=True) if one is not None}
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
    rows = tuple((layer.index, one.index, _ranged(one.what_if), one.share) for layer in layers for one in layer.experts)
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
