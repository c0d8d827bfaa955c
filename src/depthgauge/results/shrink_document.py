"""What is shown of a shrunk checkpoint: what was removed, what it costs on each text, what is guaranteed."""

from collections.abc import Sequence
from functools import partial

from depthgauge.base.format import DASH, capital, counted, duration, interval_text, number, ranges
from depthgauge.results.document import (
    EVERYWHERE,
    MEASURED,
    PROVED,
    SCREENS,
    Axis,
    Brief,
    Chart,
    Document,
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
from depthgauge.results.evaluate_document import evaluate_parts
from depthgauge.results.labels import of_stack
from depthgauge.results.recover_document import recovery_part
from depthgauge.results.shrink_record import PlanRecord, ShrinkRecord, TextRecord
from depthgauge.results.shrink_verdicts import (
    BY_LOSS,
    SHORT_TEXTS,
    accuracy_sentence,
    calibration_sentence,
    cost_rows,
    durations_sentence,
    guarantee_sentences,
    limit_failed,
    measured_increase,
    objective_label,
    reload_sentence,
    shrink_verdict,
    stack_picture,
    stage_sentence,
    text_label,
    texts_caption,
    times_sentence,
    why_not_guaranteed,
    with_error,
)

_OURS = "depthgauge"
"""The method of the curve that is this result."""
_COLORS = ("@blue", "@purple", "@green", "@faint")
"""Colours of the other methods, in the order of the record; ours has the colour of what is measured."""
_SAME, _REPAIRED, _REMOVED = 0, 1, 2
_STATES = (("kept, unchanged", "@shade-1"), ("kept, repaired", "@blue"), ("removed", "@vermilion"))
"""The name and the colour of each state of a block."""
SAVED = "model"
"""The directory that a page suggests for a model that was shrunk in memory."""
_OUT = "smaller"
"""The output directory that a page suggests where none was written."""


def shrink_document(*records: ShrinkRecord) -> Document:
    """Return what is shown of a result of `shrink`, or of the results of all sizes of a run."""
    saving = (
        "The model was shrunk from Python and has no file. Save it and its tokenizer first with "
        f'`model.save_pretrained("{SAVED}")` and `tokenizer.save_pretrained("{SAVED}")`.'
    )
    record, plan = records[-1], records[-1].plan
    sections = tuple(
        Section(
            one.name if len(records) == 1 else f"{one.name} without {counted(len(one.removed), 'layer')}",
            _headline(one.name, one.plan),
            capital(shrink_verdict(one)),
            shrink_facts(one),
            shrink_parts(one),
        )
        for one in records
    )
    if len(records) > 1:
        sizes = ", ".join(str(len(one.removed)) for one in records)
        lead = f"One search, {counted(len(records), 'model')}: {sizes} layers removed."
        sections = (Section(record.name, "", lead, (("source", plan.model),), (sizes_part(records),)), *sections)
    return Document(
        version=record.version,
        heading="How small can it be?",
        lead=f"A checkpoint shrunk with depthgauge {record.version}: what was removed, what it costs, what it saves.",
        sections=sections,
        command=shrink_command(record),
        settings=settings_table({"model": plan.model, **plan.settings.given()}),
        preparation="" if plan.files else saving,
    )


def plan_section(plan: PlanRecord) -> Section:
    """Return what is shown of a plan."""
    parts = present(stack_part(plan, plan.removed, 0), search_part(plan), candidate_part(plan), _windows_part(plan))
    return Section(plan.model, _headline(plan.model, plan), "", (), parts)


def _headline(name: str, plan: PlanRecord) -> str:
    kept = counted(plan.layers - len(plan.removed), "layer")
    return f"{name}: {plan.layers} → {kept}{of_stack(plan.stack)}"


def shrink_command(record: ShrinkRecord) -> str:
    """Return the command that reproduces a result of `shrink`."""
    options = {**record.plan.settings.given(), "out": record.out or _OUT}
    return command_line("shrink", options, record.plan.model if record.plan.files else SAVED)


def shrink_facts(record: ShrinkRecord) -> tuple[tuple[str, str], ...]:
    """Return what the model is, how it was shrunk and on what text."""
    plan, settings = record.plan, record.plan.settings
    facts = [
        ("source", plan.model),
        ("family", plan.family),
        ("layers", f"{record.layers_before} → {record.layers_after}{of_stack(plan.stack)}"),
        ("removed layers", ranges(sorted(record.removed))),
        ("weights", "repaired" if record.repaired else "unchanged"),
    ]
    if record.parameters.before is not None and record.parameters.after is not None:
        facts.append(("parameters", f"{record.parameters.before:,} → {record.parameters.after:,}"))
    calibration = plan.calibration
    for part, meaning in (("fit", "fit the repair"), ("select", "select the plan"), ("certify", "certify")):
        counts = {source.name: getattr(source, part) for source in calibration.sources if getattr(source, part)}
        facts.append((f"to {meaning}", f"{sum(counts.values())} {calibration.windows}"))
    if calibration.bos is not None:
        facts.append(("BOS token", f"{'added' if calibration.bos else 'not added'}: {calibration.bos_reason}"))
    effort = ("effort, seed", f"{settings.effort}, {settings.seed}")
    return (*facts, effort, ("duration", duration(record.seconds)), ("written to", record.out or "nothing was written"))


def shrink_parts(record: ShrinkRecord) -> tuple[Part, ...]:
    """Return all parts of the section, in order."""
    plan, is_trained = record.plan, record.recovery is not None and record.recovery.kept
    # The repair changes blocks from the one before the first gap on.
    first = 0 if is_trained else min(record.removed, default=0) - 1 if record.repaired else record.layers_before
    return present(
        stack_part(plan, record.removed, first) if record.removed else None,
        text_part(record), curve_part(record), guarantee_part(record),
        *(() if record.evaluation is None else evaluate_parts(record.evaluation)),
        cost_part(record), candidate_part(plan, record), recovery_part(record.recovery, record.objective),
        search_part(plan, Place.PAGE), _windows_part(plan, record.seconds), notes_part(record),
    )  # fmt: skip


def stack_part(plan: PlanRecord, removed: tuple[int, ...], first: int) -> Part:
    """Return the stack before and after, one cell per block; the kept blocks from `first` on have new weights."""
    layers, gone = range(plan.layers), set(removed)
    kept = [layer for layer in layers if layer not in gone]
    states = [_REMOVED if layer in gone else _REPAIRED if layer >= first else _SAME for layer in layers]

    def place(row: int, k: int, _: str) -> str:
        if row == 0:
            return f"layer {k}"
        return f"layer {k} of the smaller model\nlayer {kept[k]} of the source" if k < len(kept) else "no layer here"

    after: list[float | None] = [*(states[layer] for layer in kept), *[None] * len(gone)]
    names = list(map(str, layers))
    heat = Heat("", [states, after], names, place, show=_state, states=_STATES)
    sizes = f"{counted(plan.layers, 'layer')}{of_stack(plan.stack)} before, {len(kept)} after"
    words = f"{sizes}; removed: {ranges(sorted(gone))}."
    alt = f"The stack of layers before and after. {words}"
    plot = Plot(alt, Axis("layer", "names", names), Axis("", "down", ("before", "after")), heat=heat)
    rows = tuple(
        (layer, _STATES[state][0], kept.index(layer) if layer not in gone else None)
        for layer, state in enumerate(states)
    )
    table = Table("Every layer", ("layer", "what happened", "new number"), rows, place=Place.PAGE)
    chart = Chart((plot,), 200, sketch=partial(stack_picture, plan.layers, removed))
    caption = f"{words} Layers are counted from 0; the smaller model numbers its layers again."
    return Part("stack", "What was removed", caption, chart, table, place=SCREENS)


def _state(state: float | None) -> str:
    return DASH if state is None else _STATES[int(state)][0]


def guarantee_part(record: ShrinkRecord) -> Part:
    """Return the guarantee in sentences, and the sizes that were tested against a limit."""
    guarantee, title = record.guarantee, "What is guaranteed"
    sentences = guarantee_sentences(record)
    if guarantee is None or (not sentences and not limit_failed(guarantee)):
        measured = "The increases below were measured."
        return Part("guarantee", title, measured, statements=(why_not_guaranteed(record),))
    statements = sentences[:-1] or (shrink_verdict(record),)
    if not guarantee.tested:
        return Part("guarantee", title, guarantee.assumption, statements=statements)
    names, passes = [str(size.removed) for size in guarantee.tested], [size.passed for size in guarantee.tested]
    answers = ["yes" if passed else "no" for passed in passes]
    bars = Series(
        "bar", "bound", names, [size.bound for size in guarantee.tested],
        [PROVED if passed else "@rule-strong" for passed in passes], legend=False,
        texts=[f"{number(one.bound)}, within the limit: {answers[k]}" for k, one in enumerate(guarantee.tested)],
    )  # fmt: skip
    passed = [size.removed for size in guarantee.tested if size.passed]
    found = f"{counted(max(passed), 'layer')} removed is the largest size that passed" if passed else "no size passed"
    alt = f"Bar chart of the bound by number of removed layers. The limit is {number(guarantee.limit)}; {found}."
    lines = () if guarantee.limit is None else (Line(guarantee.limit, "limit"),)
    plot = Plot(alt, Axis("layers removed", "names", names), Axis("bound"), (bars,), lines=lines)
    table = Table(
        f"Sizes tested against the limit of {number(guarantee.limit, 6)}, until one fails",
        ("layers removed", "bound", "within the limit"),
        tuple((size.removed, size.bound, answers[k]) for k, size in enumerate(guarantee.tested)),
        is_open=True,
    )
    return Part("guarantee", title, guarantee.assumption, Chart((plot,), 300), table, statements)


def text_part(record: ShrinkRecord) -> Part | None:
    """Return the objective before and after on every kind of text, and its increase with the interval."""
    texts, label = record.texts, objective_label(record.objective)
    if not texts:
        return None
    noun = record.plan.calibration.noun
    what, count = ("text", "windows") if noun == "window" else (noun, f"{noun}s")
    known = [text for text in texts if text.increase is not None]
    bars = _increases(known, "increase", range(len(known)), MEASURED, [
        f"{text_label(text)}\n{counted(text.windows, noun)}" for text in known
    ])  # fmt: skip
    by_kind = f" by kind of {what}" if len(texts) > 1 else ""
    words = "; ".join(f"{text_label(text)}: {interval_text(text.increase, text.low, text.high)}" for text in known)
    rows = Axis(kind="rows", names=[_short_name(text, texts) for text in known])
    alt = f"Bar chart of {label.added}{by_kind}. {words}."
    plot = Plot(alt, rows, Axis(label.added, "zero"), (bars,))
    losses = ("before", "after") if record.objective in BY_LOSS else ()
    table = Table(
        capital(label.title),
        (what, count, *losses, ("increase" if losses else "value", "increase", "low", "high")),
        tuple(
            (text_label(t), t.windows, *((t.dense, t.shrunk) if losses else ()), ranged(t.increase, t.low, t.high))
            for t in texts
        ),
    )
    title = f"What it costs on {f'each {what}' if by_kind else f'your {what}s'}"
    statements = () if record.accuracy is None else (accuracy_sentence(record),)
    chart = Chart((plot,), 96 + 56 * len(known)) if known else None
    return Part("texts", title, texts_caption(record), chart, table, statements, half=True)


def _increases(
    texts: Sequence[TextRecord], name: str, at: Sequence[int], color: str, places: Sequence[str], kind: str = "bar"
) -> Series:
    increases, ends = [text.increase for text in texts], [(text.low, text.high) for text in texts]
    return Series(kind, name, at, increases, color, ends, places, legend=kind != "bar")


def _short_name(text: TextRecord, texts: Sequence[TextRecord]) -> str:
    """Return a name that fits next to a chart: that of the file if there are several, else the kind of text."""
    several = sum(1 for other in texts if other.kind == text.kind) > 1
    return text.name.rpartition("/")[2] if several else SHORT_TEXTS.get(text.kind, text.kind)


def curve_part(record: ShrinkRecord) -> Part | None:
    """Return the increase against the number of removed layers, for this and the other ways to choose them."""
    points = [point for point in record.curve if point.increase is not None]
    if not points:
        return None
    methods = sorted(dict.fromkeys(point.method for point in points), key=lambda method: method != _OURS)
    colors, lines = iter(_COLORS * len(methods)), []
    for method in methods:
        found = sorted((point for point in points if point.method == method), key=lambda point: point.removed)
        at, is_ours = [point.removed for point in found], method == _OURS
        lines.append(
            Series(
                "line", method, at, [point.increase for point in found], MEASURED if is_ours else next(colors),
                places=_sizes(at), width=3 if is_ours else 1.5, size=7 if is_ours else 5,
            )
        )  # fmt: skip
    most, added = max(point.removed for point in points), objective_label(record.objective).added
    last = [
        f"{point.method}: {number(point.increase)}"
        for point in sorted(points, key=lambda point: point.increase or 0.0)
        if point.removed == most
    ]
    words = f"After {counted(most, 'layer')}: {'; '.join(last)}."
    alt = f"Line chart of {added} by number of removed layers, one line per method. {words}"
    table = Table(
        "Increase by number of removed layers",
        ("method", "layers removed", "increase"),
        tuple((point.method, point.removed, point.increase) for point in record.curve),
    )
    noun, repaired = record.plan.calibration.noun, "only the result" if record.repaired else "nothing"
    caption = (
        f"Measured on the selection {noun}s; {repaired} was repaired. {words} The cost itself was measured on other "
        f"{noun}s."
    )
    plot = Plot(alt, Axis("layers removed", step=max(1, -(-most // 10))), Axis(added), lines)
    title = "Other ways to choose the layers"
    return Part("curve", title, caption, Chart((plot,), 380), table, half=True, place=Place.PAGE)


def _sizes(removed: Sequence[int]) -> list[str]:
    return [f"{counted(count, 'layer')} removed" for count in removed]


def candidate_part(plan: PlanRecord, record: ShrinkRecord | None = None) -> Part | None:
    """Return every set of blocks that was compared, without and with repair, and the stages of the repair."""
    found = plan.candidates
    stages = () if record is None else tuple(map(stage_sentence, record.stages))
    if not found:
        return Part("candidates", "The repair", statements=stages, place=SCREENS) if stages else None
    added = "increase of the objective" if record is None else objective_label(record.objective).added
    both = (("without repair", "@faint", "increase", "error"), ("repaired", MEASURED, "repaired", "repaired_error"))
    bars = []
    for name, color, key, key_error in both:
        pairs = [(getattr(one, key), getattr(one, key_error)) for one in found]
        ends = [(None, None) if None in pair else (pair[0] - pair[1], pair[0] + pair[1]) for pair in pairs]
        places, texts = [f"without {ranges(one.removed)}" for one in found], [with_error(*pair) for pair in pairs]
        values = [value for value, _ in pairs]
        bars.append(Series("bar", name, range(len(found)), values, color, ends, places, texts))
    names = [f"{ranges(one.removed)} ({', '.join(one.methods)})" for one in found]
    alt = f"Bar chart of {added} for {counted(len(found), 'set')} of layers, without and with repair."
    plot = Plot(alt, Axis(kind="rows", names=names), Axis(added, "zero"), bars)
    rows = tuple(
        (
            ", ".join(one.methods), ranges(one.removed), _with_error(one.increase, one.error),
            _with_error(one.repaired, one.repaired_error), "← this one" if one.chosen else "",
        )
        for one in found
    )  # fmt: skip
    columns = (
        "chosen by", "removed", ("without repair", "without repair", "standard error"),
        ("repaired", "repaired", "standard error"), "",
    )  # fmt: skip
    table = Table("Choices compared", columns, rows)
    caption = "Mean increase of the objective on the same selection windows, with its standard error."
    chart = Chart((plot,), 120 + 56 * len(found))
    return Part(
        "candidates", "Every choice, without and with repair", caption, chart, table, stages, place=SCREENS
    )  # fmt: skip


def _with_error(value: float | None, error: float | None) -> Brief:
    return Brief(with_error(value, error), (value, error))


def sizes_part(records: Sequence[ShrinkRecord]) -> Part:
    """Return the increase with its interval, the size and the speed against the number of removed layers."""
    added = objective_label(records[0].objective).added
    kinds = list(dict.fromkeys((text.kind, text.name) for one in records for text in one.texts))
    colors, lines, rows = iter((MEASURED, *_COLORS) * len(kinds)), [], []
    for kind, name in kinds:
        found = [(one, text) for one in records for text in one.texts if (text.kind, text.name) == (kind, name)]
        at, texts = [len(one.removed) for one, _ in found], [text for _, text in found]
        lines.append(_increases(texts, text_label(texts[0]), at, next(colors), _sizes(at), "line"))
    for one in records:
        costs = {name: ratio for name, *_, ratio in cost_rows(one)}
        bound = None if one.guarantee is None else one.guarantee.quantile.increase
        ratios = [costs.get(name) for name in ("parameters", "size on disk", "prefill", "decode, per token")]
        rows.append((len(one.removed), measured_increase(one), bound, *ratios, one.out or DASH))
    titles = (
        "layers removed", "increase", "guaranteed", "parameters", "size on disk", "prefill time", "decode time",
        "written to",
    )  # fmt: skip
    words = "; ".join(f"{len(one.removed)}: {measured_increase(one)}" for one in records)
    caption = (
        "On windows that nothing was fitted or selected on, with 95 % confidence intervals. Costs are relative to the "
        "source model; below 1 is smaller or faster."
    )
    alt = f"Line chart of {added} by number of removed layers, one line per kind of text. {words}."
    plot = Plot(alt, Axis("layers removed", step=1), Axis(added, "zero"), lines)
    table = Table("Every size", titles, tuple(rows), is_open=True)
    return Part("sizes", "Choose by looking", caption, Chart((plot,), 420), table, place=Place.PAGE)


def cost_part(record: ShrinkRecord) -> Part | None:
    """Return parameters, bytes, memory and times before and after."""
    rows: Rows = tuple((name, *map(fixed, cells)) for name, *cells in cost_rows(record))
    if not rows:
        return None
    table = Table("Cost", ("cost", "before", "after", "after ÷ before"), rows, is_open=True)
    caption = "Both models were measured in turns in one run; a ratio below 1 is smaller or faster."
    caption = f"{caption} {times_sentence(record)}".rstrip()
    return Part("costs", "Size, memory and speed", caption, None, table, half=True)


def search_part(plan: PlanRecord, place: Place = EVERYWHERE) -> Part | None:
    """Return the removals of the search in their order."""
    if not plan.search:
        return None
    rows = tuple((step.layer, Brief(number(step.objective, 4), (step.objective,))) for step in plan.search)
    caption = "The objective on the selection windows after each removal, without repair."
    table = Table("Search, in the order of removal", ("removed", "objective"), rows, is_open=True)
    return Part("search", "The search", caption, None, table, place=place)


def _windows_part(plan: PlanRecord, seconds: float | None = None) -> Part:
    return Part("windows", "", statements=(calibration_sentence(plan.calibration, seconds),), place=Place.TERMINAL)


def notes_part(record: ShrinkRecord) -> Part | None:
    """Return the check of the written model, where the time went, remarks and versions."""
    lines = [] if record.reload is None else [reload_sentence(record.reload)]
    lines += [words] if (words := durations_sentence(record)) else []
    lines += [f"note: {remark}" for remark in record.notes]
    if not lines and not record.versions:
        return None
    versions = tuple(record.versions.items())
    table = Table("Versions", ("package", "version"), versions, place=Place.PAGE) if versions else None
    return Part("notes", "Checks and notes", "", None, table, tuple(lines), place=SCREENS)
