"""What is shown of a shrunk checkpoint: what was removed, what it costs on each text, what is guaranteed.

Every number that was not guaranteed is called measured, and every guarantee comes with its assumption.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from statistics import mean

from depthgauge.base.format import DASH, capital, counted, duration, interval_text, number, ranges, size_text
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
from depthgauge.results.labels import ABOUT, BY_LOSS, GIVEN, SHORT_TEXTS, objective_label, of_stack
from depthgauge.results.recover_document import recovery_part
from depthgauge.results.shrink_record import (
    LLAMA,
    BeforeAfter,
    CalibrationRecord,
    GuaranteeRecord,
    PlanRecord,
    ReloadRecord,
    RepairStage,
    ShrinkRecord,
    TextRecord,
)

# --- Sentences: the verdict, the guarantee, warnings ------------------------------------------------------------------

DAMAGE, DAMAGE_BOUND, DAMAGE_RATIO, DAMAGE_LEAST = 0.5, 1.0, 3.0, 0.1
"""A model is called damaged if its loss grows by more than `DAMAGE` (nats per token), or if the guarantee is above
`DAMAGE_BOUND`. Its samples count only if there is no text of the user. There is another warning if the loss on samples
grows by more than `DAMAGE_LEAST`, and more than `DAMAGE_RATIO` times as much as on the user's texts."""
LARGEST_RATIO = 1e6
"""Ratios of costs beyond this come from damaged documents and are not shown."""


def shrink_verdict(record: ShrinkRecord) -> str:
    """State what was removed and what it costs: guaranteed, measured only, or nothing was written."""
    guarantee = record.guarantee
    if guarantee is not None and limit_failed(guarantee):
        return limit_sentence(guarantee, record.objective)
    verb = "is" if record.layers_after == 1 else "are"
    kept = f"{layers_text(record)} {verb} kept"
    measured = objective_label(record.objective).by(measured_increase(record))
    compared = comparison(record)
    measured += f"; {compared}" if compared else ""
    unit = f"{record.plan.calibration.noun}s"
    if guarantee is None or guarantee.quantile.increase is None:
        return f"{kept}; measured only: {measured}; {why_not_guaranteed(record)}"
    quantile = guarantee.quantile
    return (
        f"{kept}; guaranteed, if future {unit} are exchangeable with those of {about_text(record)}: "
        f"on {_share(quantile.share)} of {unit} {_at_most(quantile.increase, record.objective)} (confidence "
        f"{_share(quantile.confidence)}); measured: {measured}"
    )


def layers_text(record: ShrinkRecord) -> str:
    """Return how many layers are kept: `2 of 3 layers of the decoder`."""
    return f"{record.layers_after} of {counted(record.layers_before, 'layer')}{of_stack(record.plan.stack)}"


def comparison(record: ShrinkRecord) -> str:
    """Compare the result with all sets of blocks without repair, on the selection windows; empty if none is known."""
    candidates = record.plan.candidates
    chosen = next((tried for tried in candidates if tried.chosen and tried.removed == record.removed), None)
    bare = {tried.removed: tried.increase for tried in candidates if tried.increase is not None}
    if chosen is None or not bare:
        return ""
    best = min(bare, key=lambda removed: bare[removed])
    gain = bare[best] - chosen.best
    if gain == 0 and best == chosen.removed:  # it is this model
        return ""
    if gain > 0:
        what = "the best of " + counted(len(bare), "choice") if len(bare) > 1 else "the same blocks"
        return f"on the selection windows {number(gain)} below {what} without repair"
    return f"no better than removing {ranges(best)} without repair"


def shrink_warnings(record: ShrinkRecord) -> tuple[str, ...]:
    """Return what is alarming about a shrunk language model: damage on the text it is for, and a loss beyond it."""
    if record.objective != "loss":
        return ()
    increases = [(text.kind, text.increase) for text in record.texts if text.increase is not None]
    written, sampled = ([increase for kind, increase in increases if kind == about] for about in ("text", "sampled"))
    largest = max((increase for kind, increase in increases if kind != "sampled" or not written), default=0.0)
    bound = None if record.guarantee is None else record.guarantee.quantile.increase
    helps = [] if len(record.removed) < 2 else ["remove fewer blocks"]
    if not record.plan.settings.repairs:
        helps.append("leave --recover none out")
    elif record.recovery is None:
        helps.append("train it with --recover 2M")
    advice = f"; {', or '.join(helps)}" if helps else ""
    damage, warnings = [], []
    if largest > DAMAGE:
        damage.append(f"the loss grows by {number(largest)} nats per token")
    if bound is not None and bound > DAMAGE_BOUND:
        damage.append(f"only {number(bound)} nats per token are guaranteed")
    if damage:
        warnings.append(f"warning: this model is damaged: {', and '.join(damage)}{advice}")
    if written and sampled and mean(sampled) > max(DAMAGE_RATIO * mean(written), DAMAGE_LEAST):
        warnings.append(
            f"warning: on text that the model writes itself the loss grows by {number(mean(sampled))}, more than "
            f"{number(DAMAGE_RATIO)} times as much as on your text: expect it to be worse on text of other kinds; "
            "give text of all the kinds that it will read"
        )
    return tuple(warnings)


def about_text(record: ShrinkRecord) -> str:
    """Return the text that the guarantee is about: the names of the user's files, or what it is otherwise."""
    about = "" if record.guarantee is None else record.guarantee.about
    names = [source.name for source in record.plan.calibration.sources if source.kind == about and about in GIVEN]
    return ", ".join(names) or ABOUT.get(about, about)


def _at_most(increase: float | None, objective: str) -> str:
    return objective_label(objective).by(f"at most {number(increase)}")


def measured_increase(record: ShrinkRecord) -> str:
    """Return the mean increase on the text that the result is about, with its interval: `0.43 [0.38, 0.48]`."""
    kinds = {text.kind for text in record.texts}
    shown = next((kind for kind in GIVEN if kind in kinds), "sampled")
    about = [text for text in record.texts if text.kind == shown]
    if len(about) == 1:
        return interval_text(about[0].increase, about[0].low, about[0].high)
    dense, shrunk = record.loss.dense, record.loss.shrunk
    if record.objective not in BY_LOSS:
        dense = 0.0  # the change of a model from itself
    return DASH if dense is None or shrunk is None else number(shrunk - dense)


def with_error(value: float | None, error: float | None) -> str:
    """Return a mean with its standard error.

    >>> with_error(0.4312, 0.0123), with_error(0.4312, None), with_error(None, None)
    ('0.431 ± 0.012', '0.431', '–')
    """
    return number(value) + ("" if value is None or error is None else f" ± {number(error, 2)}")


def why_not_guaranteed(record: ShrinkRecord) -> str:
    """Return why there is no bound, and what to do about it."""
    if record.guarantee is None:
        return "nothing is guaranteed, because no bound was computed"
    quantile, noun = record.guarantee.quantile, record.plan.calibration.noun
    return (
        f"nothing is guaranteed, because {counted(quantile.windows, noun)} of "
        f"{about_text(record)} are too few for a share of {_share(quantile.share)} with confidence "
        f"{_share(quantile.confidence)}; --effort high has more, and a lower --confidence needs fewer"
    )


def limit_failed(guarantee: GuaranteeRecord) -> bool:
    """Return whether a limit was given and no tested size stays within it, so that nothing was written."""
    return guarantee.limit is not None and not any(size.passed for size in guarantee.tested)


def limit_sentence(guarantee: GuaranteeRecord, objective: str) -> str:
    """State that no size stays within the limit, and which one came closest."""
    asked = (
        f"no model was written: for no tested size is it guaranteed, with confidence "
        f"{_share(guarantee.quantile.confidence)}, that {_at_most(guarantee.limit, objective)}"
    )
    bounded = {size.bound: size for size in guarantee.tested if size.bound is not None}
    if not bounded:
        return f"{asked}; there are too few windows for any bound"
    closest = bounded[min(bounded)]
    return f"{asked}; closest was removing {counted(closest.removed, 'layer')}, with a bound of {number(closest.bound)}"


def guarantee_sentences(record: ShrinkRecord) -> tuple[str, ...]:
    """Return the guarantee in sentences, the assumption last; empty if nothing is guaranteed."""
    guarantee = record.guarantee
    if guarantee is None or limit_failed(guarantee) or guarantee.quantile.increase is None:
        return ()
    quantile = guarantee.quantile
    tested = "" if guarantee.limit is None else "; this is the limit, tested from gentle to harsh sizes"
    bound = (
        f"With confidence {_share(quantile.confidence)}, on at least {_share(quantile.share)} of "
        f"{record.plan.calibration.windows} like those of {about_text(record)}, "
        f"{_at_most(quantile.increase, record.objective)} (order statistics of "
        f"{counted(quantile.windows, record.plan.calibration.noun)}{tested})."
    )
    return (bound, guarantee.assumption)


def stage_sentence(stage: RepairStage) -> str:
    """Return what a stage of the repair did."""
    what = stage.name if stage.name.startswith("rounding") else f"repair by {stage.name}"
    return (
        f"{what}: the objective on the selection windows went from {number(stage.before, 4)} to "
        f"{number(stage.after, 4)} (standard error of the difference {number(stage.error, 2)}); it was "
        f"{'kept' if stage.kept else 'undone'}"
    )


def durations_sentence(record: ShrinkRecord) -> str:
    """Return the share of each part of the run, the longest first; empty if it was not recorded."""
    total = sum(record.durations.values())
    parts = sorted(record.durations.items(), key=lambda part: -part[1])
    shares = [f"{name} {number(100 * seconds / total, 2)} %" for name, seconds in parts if seconds >= 0.005 * total > 0]
    return f"time: {', '.join(shares)}; {duration(total)}" if shares else ""


def reload_sentence(reload: ReloadRecord) -> str:
    """Return what the fresh process found."""
    generation = f"; generation: {reload.generation}" if reload.generation else ""
    if reload.program == LLAMA:
        return (
            f"checked: llama.cpp loaded {counted(reload.layers, 'layer')} in a new process; its log-probabilities of "
            f"the next tokens differ by {number(reload.difference, 2)} nats from those of transformers (for the source "
            f"model by {number(reload.source_difference, 2)}){generation}"
        )
    return (
        f"checked: a new process without depthgauge loaded {counted(reload.layers, 'layer')}; its outputs differ by at "
        f"most {number(reload.difference, 2)} of their size{generation}"
    )


def calibration_sentence(calibration: CalibrationRecord, seconds: float | None = None) -> str:
    """Return how many windows each part has: `windows of 512 tokens: 64 fit, 32 select, 120 certify`."""
    parts = [sum(getattr(source, part) for source in calibration.sources) for part in ("fit", "select", "certify")]
    took = "" if seconds is None else f"; took {duration(seconds)}"
    return f"{calibration.windows}: {parts[0]} to fit the repair, {parts[1]} to select, {parts[2]} to certify{took}"


def texts_caption(record: ShrinkRecord) -> str:
    """Return what the increases were measured on."""
    noun = record.plan.calibration.noun
    other = "Text" if noun == "window" else f"{noun.capitalize()}s"
    return (
        f"On {noun}s that nothing was fitted or selected on, with the 95 % confidence interval of the mean. {other} of "
        "another kind can lose more."
    )


def accuracy_sentence(record: ShrinkRecord) -> str:
    """Return the accuracy of both models; empty if there are no labels."""
    accuracy = record.accuracy
    if accuracy is None:
        return ""
    dense, shrunk = (number(100 * value) for value in (accuracy.dense, accuracy.shrunk))
    what = f"{accuracy.windows} certify {record.plan.calibration.noun}s"
    return f"accuracy on the {what}: {dense} % before, {shrunk} % after"


def stack_picture(layers: int, removed: tuple[int, ...], width: int) -> str:
    """Draw a stack in one line: the index of each kept block, `▓` for each removed one.

    A line that does not fit the width has ranges of kept blocks instead.

    >>> stack_picture(8, (2, 5, 6), 20)
    '0 1 ▓ 3 4 ▓ ▓ 7'
    >>> stack_picture(8, (2, 5, 6), 14)
    '0–1 ▓ 3–4 ▓▓ 7'
    """
    gone = set(removed)
    full = " ".join("▓" if layer in gone else str(layer) for layer in range(layers))
    if len(full) <= width:
        return full
    blocks = [(is_gone, list(run)) for is_gone, run in groupby(range(layers), key=gone.__contains__)]
    return " ".join("▓" * len(block) if is_gone else ranges(block) for is_gone, block in blocks)


def _share(value: float) -> str:
    """Return a share in percent.

    >>> _share(0.95), _share(0.999)
    ('95 %', '99.9 %')
    """
    return f"{number(100 * value, 6)} %"


def cost_rows(record: ShrinkRecord) -> list[tuple[str, ...]]:
    """Return the costs that are known: name, before, after, and after ÷ before; that of times has its interval."""
    rows = list[tuple[str, ...]]()
    counts: tuple[tuple[str, BeforeAfter | None, Callable[[float], str]], ...] = (
        ("parameters", record.parameters, lambda count: f"{count:,.0f}"),
        ("size on disk", record.bytes, size_text),
        ("memory", record.memory, size_text),
    )
    for name, pair, show in counts:
        if pair is not None and pair.after is not None:
            before = DASH if pair.before is None else show(pair.before)
            rows.append((name, before, show(pair.after), number(_ratio(pair.before, pair.after))))
    for part, name in (("prefill", "prefill"), ("decode", "decode, per token")):
        speed, low, high, *times = (
            getattr(record.speed, part + end, None) for end in ("", "_low", "_high", "_before", "_after")
        )
        if speed is not None:  # the record holds speeds, the table holds times
            ratio, least, most = (_ratio(one, 1.0) for one in (speed, high, low))
            rows.append(
                (name, *(DASH if one is None else time_text(one) for one in times), interval_text(ratio, least, most))
            )
    return rows


def times_sentence(record: ShrinkRecord) -> str:
    """Return what was timed, and which times did not settle; empty if nothing was timed."""
    speed = record.speed
    if speed is None or not speed.what:
        return ""
    known = speed.prefill_low is not None or speed.decode_low is not None
    return f"Times{', with the 95 % interval of their ratio' if known else ''}: {speed.what}."


def _ratio(before: float | None, after: float | None) -> float | None:
    return after / before if before and after is not None and abs(after) < LARGEST_RATIO * abs(before) else None


def time_text(seconds: float) -> str:
    """Return a short time with its unit.

    >>> time_text(0.0318), time_text(2.5)
    ('31.8 ms', '2.5 s')
    """
    return f"{number(float(seconds))} s" if seconds >= 1 else f"{number(1000 * seconds)} ms"


# --- The document -----------------------------------------------------------------------------------------------------

_OURS = "depthgauge"
"""The method of the curve that is this result."""
_COLORS = ("@blue", "@purple", "@green", "@faint")
"""Colours of the other methods, in the order of the record; ours has the colour of what is measured."""
_SAME, _REPAIRED, _REMOVED = 0, 1, 2
_STATES = (("kept, unchanged", "@shade-1"), ("kept, changed", "@blue"), ("removed", "@vermilion"))
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
            result.name if len(records) == 1 else f"{result.name} without {counted(len(result.removed), 'layer')}",
            _headline(result.name, result.plan),
            capital(shrink_verdict(result)),
            shrink_facts(result),
            shrink_parts(result),
        )
        for result in records
    )
    if len(records) > 1:
        sizes = ", ".join(str(len(result.removed)) for result in records)
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
    is_trained = record.recovery is not None and record.recovery.kept
    facts = [
        ("source", plan.model),
        ("family", plan.family),
        ("layers", f"{record.layers_before} → {record.layers_after}{of_stack(plan.stack)}"),
        ("removed layers", ranges(sorted(record.removed))),
        ("weights", "trained" if is_trained else "repaired" if record.repaired else "unchanged"),
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
        curve_part(record), stack_part(plan, record.removed, first) if record.removed else None,
        candidate_part(plan, record), recovery_part(record.recovery, record.objective), guarantee_part(record),
        text_part(record), cost_part(record), examples_part(record),
        *(() if record.evaluation is None else evaluate_parts(record.evaluation)),
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
        texts=[f"{number(size.bound)}, within the limit: {answers[k]}" for k, size in enumerate(guarantee.tested)],
    )  # fmt: skip
    passed = [size.removed for size in guarantee.tested if size.passed]
    outcome = f"{counted(max(passed), 'layer')} removed is the largest size that passed" if passed else "no size passed"
    alt = f"Bar chart of the bound by number of removed layers. The limit is {number(guarantee.limit)}; {outcome}."
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
        f"{text.label}\n{counted(text.windows, noun)}" for text in known
    ])  # fmt: skip
    by_kind = f" by kind of {what}" if len(texts) > 1 else ""
    words = "; ".join(f"{text.label}: {interval_text(text.increase, text.low, text.high)}" for text in known)
    rows = Axis(kind="rows", names=[_short_name(text, texts) for text in known])
    alt = f"Bar chart of {label.added}{by_kind}. {words}."
    plot = Plot(alt, rows, Axis(label.added, "zero"), (bars,))
    losses = ("before", "after") if record.objective in BY_LOSS else ()
    table = Table(
        capital(label.title),
        (what, count, *losses, ("increase" if losses else "value", "increase", "low", "high")),
        tuple(
            (
                t.label,
                t.windows,
                *((t.dense, t.shrunk) if losses else ()),
                ranged(t.increase, t.low, t.high),
            )
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
    """Return the increase and the size against the number of removed layers, and other ways to choose them."""
    points = [point for point in record.curve if point.increase is not None]
    if not points:
        return None
    methods = sorted(dict.fromkeys(point.method for point in points), key=lambda method: method != _OURS)
    colors, lines = iter(_COLORS * len(methods)), []
    for method in methods:
        own = sorted((point for point in points if point.method == method), key=lambda point: point.removed)
        at, is_ours = [point.removed for point in own], method == _OURS
        lines.append(
            Series(
                "line", method, at, [point.increase for point in own], MEASURED if is_ours else next(colors),
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
    is_trained, noun = record.recovery is not None and record.recovery.kept, record.plan.calibration.noun
    changed = "only the result was trained" if is_trained else "only the result was repaired"
    if not (is_trained or record.repaired):
        changed = "nothing was repaired"
    caption = f"Measured on the selection {noun}s; {changed}. {words} The cost itself was measured on other {noun}s."
    second, before, after = None, record.parameters.before, record.parameters.after
    if before and after is not None:
        shares, at = [100.0, 100 * after / before], [0, len(record.removed)]
        sizes = [f"{number(share, 4)} % of the parameters" for share in shares]
        lines.append(Series("line", "parameters", at, shares, "@faint", places=_sizes(at), texts=sizes, is_second=True))
        second = Axis("parameters, % of the source model", kind="zero")
    plot = Plot(alt, Axis("layers removed", step=max(1, -(-most // 10))), Axis(added), lines, second=second)
    return Part("curve", "Loss and size", caption, Chart((plot,), 380), table, place=Place.PAGE)


def _sizes(removed: Sequence[int]) -> list[str]:
    return [f"{counted(count, 'layer')} removed" for count in removed]


def candidate_part(plan: PlanRecord, record: ShrinkRecord | None = None) -> Part | None:
    """Return every set of blocks that was compared, without and with repair, and the stages of the repair."""
    candidates = plan.candidates
    stages = () if record is None else tuple(map(stage_sentence, record.stages))
    if not candidates:
        return Part("candidates", "The repair", statements=stages, place=SCREENS) if stages else None
    added = "increase of the objective" if record is None else objective_label(record.objective).added
    both = (("without repair", "@faint", "increase", "error"), ("repaired", MEASURED, "repaired", "repaired_error"))
    bars = []
    for name, color, key, key_error in both:
        pairs = [(getattr(candidate, key), getattr(candidate, key_error)) for candidate in candidates]
        ends = [(None, None) if None in pair else (pair[0] - pair[1], pair[0] + pair[1]) for pair in pairs]
        places = [f"without {ranges(candidate.removed)}" for candidate in candidates]
        texts = [with_error(*pair) for pair in pairs]
        values = [value for value, _ in pairs]
        bars.append(Series("bar", name, range(len(candidates)), values, color, ends, places, texts))
    names = [f"{ranges(candidate.removed)} ({', '.join(candidate.methods)})" for candidate in candidates]
    alt = f"Bar chart of {added} for {counted(len(candidates), 'set')} of layers, without and with repair."
    plot = Plot(alt, Axis(kind="rows", names=names), Axis(added, "zero"), bars)
    rows = tuple(
        (
            ", ".join(candidate.methods), ranges(candidate.removed), _with_error(candidate.increase, candidate.error),
            _with_error(candidate.repaired, candidate.repaired_error), "← this one" if candidate.chosen else "",
        )
        for candidate in candidates
    )  # fmt: skip
    columns = (
        "chosen by", "removed", ("without repair", "without repair", "standard error"),
        ("repaired", "repaired", "standard error"), "",
    )  # fmt: skip
    table = Table("Choices compared", columns, rows)
    caption = "Mean increase of the objective on the same selection windows, with its standard error."
    chart = Chart((plot,), 120 + 56 * len(candidates))
    return Part(
        "candidates", "Every choice, without and with repair", caption, chart, table, stages, place=SCREENS
    )  # fmt: skip


def _with_error(value: float | None, error: float | None) -> Brief:
    return Brief(with_error(value, error), (value, error))


def sizes_part(records: Sequence[ShrinkRecord]) -> Part:
    """Return the increase with its interval, the size and the speed against the number of removed layers."""
    added = objective_label(records[0].objective).added
    kinds = list(dict.fromkeys((text.kind, text.name) for result in records for text in result.texts))
    colors, lines, rows = iter((MEASURED, *_COLORS) * len(kinds)), [], []
    for kind, name in kinds:
        about = [(len(result.removed), text) for result in records for text in result.texts]
        measured = [(removed, text) for removed, text in about if (text.kind, text.name) == (kind, name)]
        at, texts = [removed for removed, _ in measured], [text for _, text in measured]
        lines.append(_increases(texts, texts[0].label, at, next(colors), _sizes(at), "line"))
    for result in records:
        costs = {name: ratio for name, *_, ratio in cost_rows(result)}
        bound = None if result.guarantee is None else result.guarantee.quantile.increase
        ratios = [costs.get(name) for name in ("parameters", "size on disk", "prefill", "decode, per token")]
        rows.append((len(result.removed), measured_increase(result), bound, *ratios, result.out or DASH))
    titles = (
        "layers removed", "increase", "guaranteed", "parameters", "size on disk", "prefill time", "decode time",
        "written to",
    )  # fmt: skip
    words = "; ".join(f"{len(result.removed)}: {measured_increase(result)}" for result in records)
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


def examples_part(record: ShrinkRecord) -> Part | None:
    """Return how the models continue the same prompts, side by side."""
    if not record.examples:
        return None
    is_trained = record.examples[0].unrecovered is not None
    names = ("", "prompt", "source model", *(("smaller model before training",) if is_trained else ()), "smaller model")
    rows = list[Sequence[str | int]]()
    for row, one in enumerate(record.examples, 1):
        texts = (one.prompt, one.dense, *(() if one.unrecovered is None else (one.unrecovered,)), one.shrunk)
        rows.append((row, *(" ".join(text.split()) for text in texts)))
    caption = "Each model continues the beginning of a window that nothing was fitted on, with the most likely token."
    table = Table("The same prompts", names, tuple(rows), is_open=True)
    return Part("examples", "What the models write", caption, None, table, place=Place.PAGE)


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
