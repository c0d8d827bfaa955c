"""What is shown of an evaluation: the accuracy on each task, what changed from the first model, the perplexities."""

from collections.abc import Iterator

from depthgauge.base.format import DASH, counted, duration, number
from depthgauge.results.document import (
    MEASURED,
    PROVED,
    Axis,
    Brief,
    Chart,
    Document,
    Headings,
    Part,
    Place,
    Plot,
    Rows,
    Section,
    Series,
    Table,
    command_line,
    present,
    ranged,
    settings_table,
)
from depthgauge.results.evaluate_record import AccuracyRecord, EvaluatedTask, EvaluateRecord

# --- Sentences: accuracies and differences in percent, guarantees, and how perplexity was measured --------------------

ITEM_ASSUMPTION = (
    "This holds for items like those of the task: it assumes that the items used and future items are independent "
    "draws from one population. Each statement holds with this confidence on its own."
)
"""Shown wherever a guarantee about a task appears."""
PROTOCOL = (
    "Perplexity: the text is cut into windows from its start that do not overlap, and the rest is left out; every "
    "window is read alone, and its first token is not predicted; exp of the mean loss per predicted token."
)
MEAN_ROW = "mean"


def percent_text(share: float | None, signed: bool = False) -> str:
    """Return a share of 1 in percent with one decimal, without the unit.

    >>> percent_text(0.8125), percent_text(-0.05, signed=True), percent_text(-1e-9, signed=True)
    ('81.2', '−5.0', '0.0')
    """
    if share is None:
        return DASH
    text = f"{100 * share:{'+' if signed else ''}.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def difference_text(result: AccuracyRecord) -> str:
    """Return the difference with its interval in percentage points: `−5.0 [−9.1, −1.2]`."""
    if result.difference is None:
        return DASH
    difference, low, high = (percent_text(share, True) for share in (result.difference, result.low, result.high))
    return f"{difference} [{low}, {high}]"


def task_label(task: EvaluatedTask) -> str:
    """Return the task and its metric; the main metric of a task that has several is marked."""
    return f"{task.task}, {task.metric}"


def accuracy_rows(record: EvaluateRecord, index: int) -> Iterator[tuple[str, int | None, AccuracyRecord]]:
    """Yield the name, the number of items and the result of the model `index` for each task, then for the mean."""
    for task in record.tasks:
        yield task_label(task), task.items, task.results[index]
    if record.mean:
        yield f"{MEAN_ROW} of {counted(sum(task.is_main for task in record.tasks), 'task')}", None, record.mean[index]


def task_guarantees(record: EvaluateRecord) -> tuple[str, ...]:
    """Return one sentence per compared model and task, then the assumption; nothing if one model was evaluated."""
    sentences = []
    for index, model in enumerate(record.models[1:], start=1):
        for task in record.tasks:
            if task.is_main:
                what = f"items like those of {task.task}"
                how = f"exact paired bound, {counted(task.items, 'item')}, {task.metric}"
                sentences.append(_at_most(record, model.name, task.results[index], what, how))
        if record.mean:
            how = "sum of the exact bounds, corrected for their number"
            sentences.append(_at_most(record, model.name, record.mean[index], "these tasks on average", how))
    return (*sentences, ITEM_ASSUMPTION) if sentences else ()


def _at_most(record: EvaluateRecord, name: str, result: AccuracyRecord, what: str, how: str) -> str:
    most, confidence = result.falls_at_most, f"{100 * record.settings.confidence:g} %"
    assert most is not None
    change = f"falls by at most {percent_text(most)}" if most >= 0 else f"grows by at least {percent_text(-most)}"
    return (
        f"With confidence {confidence}, the accuracy of {name} on {what} {change} percentage points compared with "
        f"{record.models[0].name} ({how})."
    )


MANY = 4
"""Of more models than this, a sentence names some."""
AS_FIRST = "as for the first model"
"""Why a model is given a BOS token or not, if the first one decides."""


def evaluate_verdict(record: EvaluateRecord) -> str:
    """State the accuracy of the first model, and what the others lose; of more than `MANY`, the best and the worst."""
    parts, shown = [], list(range(len(record.models)))
    if len(shown) > MANY:
        shown = [0, *sorted(sorted(shown[1:], key=lambda index: _quality(record, index))[:: len(shown) - 2])]
    for index in shown:
        model = record.models[index]
        rows = [record.mean[index]] if record.mean else [t.results[index] for t in record.tasks if t.is_main]
        for result in rows:
            sentence = f"{model.name} answers {percent_text(result.accuracy)} % right"
            if result.difference is not None:
                sentence += f", a difference of {difference_text(result)} percentage points (p = {number(result.p, 2)})"
            parts.append(sentence)
        if not rows:
            known = (f"{text.name} {number(text.results[index].perplexity, 4)}" for text in record.texts)
            parts.append(f"perplexity of {model.name}: {', '.join(known)}")
    others = len(record.models) - len(shown)
    return "; ".join([*parts, *([f"{others} more models are between the last two"] if others else [])])


def _quality(record: EvaluateRecord, index: int) -> float:
    """Return a number by which models are ordered: the accuracy, or without tasks the mean log-likelihood."""
    if record.mean:
        return record.mean[index].accuracy
    main = [task.results[index].accuracy for task in record.tasks if task.is_main]
    return sum(main) / len(main) if main else -sum(text.results[index].loss for text in record.texts)


# --- The document -----------------------------------------------------------------------------------------------------

_COLORS = ("@faint", MEASURED, "@blue", "@purple", "@green")
"""Colours of the models, in their order."""


def evaluate_document(record: EvaluateRecord) -> Document:
    """Return what is shown of a result of `evaluate`."""
    names = [model.name for model in record.models]
    title = ", ".join(names) if len(names) <= MANY else f"{names[0]} and {len(names) - 1} other models"
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    facts = (*model_facts(record), ("versions", versions), ("duration", duration(record.seconds)))
    return Document(
        version=record.version,
        heading="What can it still do?",
        lead=f"{counted(len(names), 'model')} evaluated with depthgauge {record.version} on the same items and texts.",
        sections=(Section(title, "", evaluate_verdict(record), facts, evaluate_parts(record)),),
        command=command_line("evaluate", record.settings.given(), *names),
        settings=settings_table({"models": names, **record.settings.given()}),
    )


def model_facts(record: EvaluateRecord) -> tuple[tuple[str, str], ...]:
    """Return what each model is and how it was read."""
    facts = []
    for index, model in enumerate(record.models, start=1):
        start = "no BOS token" if model.bos is None else f"BOS token {'added' if model.bos else 'not added'}"
        sizes = f"{model.family}, {counted(model.layers, 'layer')}, {model.parameters:,} parameters, {model.dtype}"
        facts.append((f"model {index}", f"{model.name}: {sizes}"))
        if (model.bos, model.bos_reason) != (record.models[0].bos, AS_FIRST):
            facts.append((f"start of model {index}", f"{start}: {model.bos_reason}"))
    return tuple(facts)


def evaluate_parts(record: EvaluateRecord) -> tuple[Part, ...]:
    """Return all parts of the section, in order."""
    models = tuple(f"{name}: {value}" for name, value in model_facts(record))
    spent = (f"evaluated in {duration(record.seconds)}",)
    return present(
        Part("models", "", statements=models, place=Place.TERMINAL),
        accuracy_part(record), difference_part(record), perplexity_part(record), remarks_part(record),
        Part("duration", "", statements=spent, place=Place.TERMINAL),
    )  # fmt: skip


def accuracy_part(record: EvaluateRecord) -> Part | None:
    """Return the accuracy of every model on every task, and how it differs from that of the first."""
    if not record.tasks:
        return None
    by_model = [list(accuracy_rows(record, index)) for index in range(len(record.models))]
    tasks, models = [name for name, _, _ in by_model[0]], [model.name for model in record.models]
    shares = [[100 * result.accuracy for _, _, result in rows] for rows in by_model]
    # One colour per model; where these do not suffice, the models are the groups.
    is_by_task = len(models) <= len(_COLORS)
    groups, names = (tasks, models) if is_by_task else (models, tasks)
    lengths = shares if is_by_task else list(map(list, zip(*shares, strict=True)))
    bars = [
        Series("bar", name, range(len(groups)), row, _COLORS[(index + (not is_by_task)) % len(_COLORS)],
               texts=[f"{number(share)} %" for share in row])
        for index, (name, row) in enumerate(zip(names, lengths, strict=True))
    ]  # fmt: skip
    words = "; ".join(
        f"{name}: {', '.join(percent_text(rows[k][2].accuracy) for rows in by_model)} %" for k, name in enumerate(tasks)
    )
    alt = f"Bar chart of the accuracy by task and model. {words}."
    plot = Plot(alt, Axis(kind="rows", names=groups), Axis("accuracy, %", range=(0, 100)), bars)
    several = (
        "The same items for all models. Differences from model 1 in percentage points, with paired 95 % confidence "
        "intervals; p is that of McNemar's exact test; lost: only model 1 is right. "
    )
    columns: Headings = (
        "task", "items", "model", ("accuracy %", "accuracy %"), ("difference", "difference", "low", "high"),
        ("lost, gained", "lost", "gained"), "p", ("falls by at most", "falls by at most"),
    )  # fmt: skip
    rows: Rows = tuple(
        (
            name, "" if items is None else items, Brief(str(index), (model,)), _percent(result.accuracy),
            Brief(difference_text(result), (*map(_points, (result.difference, result.low, result.high)),)),
            Brief(DASH if result.lost is None else f"{result.lost}, {result.gained}", (result.lost, result.gained)),
            Brief(number(result.p, 2), (result.p,)), _percent(result.falls_at_most),
        )
        for k in range(len(tasks))
        for index, (model, results) in enumerate(zip(models, by_model, strict=True), 1)
        for name, items, result in [results[k]]
    )  # fmt: skip
    table, caption = (
        Table("Tasks", columns, rows, is_open=True),
        "acc_norm divides the log-likelihood of an answer by its length. The items are the first ones of a task.",
    )
    if len(models) > 1:
        caption = several + caption
    else:
        table = table.upto(4)
    height = 110 + 28 * len(groups) * (1 + len(names))
    return Part("accuracy", "Accuracy on each task", caption, Chart((plot,), height), table)


def _points(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _percent(share: float | None) -> Brief:
    return Brief(percent_text(share), (_points(share),))


def difference_part(record: EvaluateRecord) -> Part | None:
    """Return the differences from the first model with their intervals, the guaranteed bound, and the guarantees."""
    if not record.tasks or len(record.models) < 2:
        return None
    series, names, words = list[Series](), list[str](), list[str]()
    for index, model in enumerate(record.models[1:], start=1):
        rows = list(accuracy_rows(record, index))
        known, at = [result for _, _, result in rows], range(len(names), len(names) + len(rows))
        names += [f"{name}, {model.name}" if len(record.models) > 2 else name for name, _, _ in rows]
        words += [f"{name}: {difference_text(result)}" for name, _, result in rows]
        series += [
            Series(
                "points", "measured, with 95 % interval", at, [100 * (result.difference or 0.0) for result in known],
                ends=[(_points(result.low), _points(result.high)) for result in known], size=9, legend=index == 1,
                texts=[f"{difference_text(result)}, p = {number(result.p, 2)}" for result in known],
            ),
            Series(
                "points", "guaranteed: not below", at, [-100 * (result.falls_at_most or 0.0) for result in known],
                PROVED, texts=[f"falls by at most {percent_text(result.falls_at_most)}" for result in known],
                legend=index == 1, size=12, symbol="line-ns-open", width=3,
            ),
        ]  # fmt: skip
    *statements, assumption = task_guarantees(record)
    alt = f"Differences of accuracy from the first model with their intervals. {'; '.join(words)}."
    across = Axis("difference of accuracy, percentage points", "zero")
    plot = Plot(alt, Axis(kind="rows", names=names), across, series)
    caption = f"{assumption} Intervals of tasks are exact; that of the mean is approximate."
    chart = Chart((plot,), 130 + 48 * len(names))
    return Part("difference", "What changed", caption, chart, statements=tuple(statements))


def perplexity_part(record: EvaluateRecord) -> Part | None:
    """Return perplexity and bits per byte of every model on every text."""
    if not record.texts:
        return None
    columns: Headings = (
        "text", ("windows", "windows", "tokens per window"), "model", "perplexity", "nats per token", "bits per byte",
        ("increase", "increase", "low", "high"),
    )  # fmt: skip
    rows: Rows = tuple(
        (
            text.name, Brief(f"{result.windows} × {text.window}", (result.windows, text.window)),
            Brief(str(index), (model.name,)),
            *(Brief(number(value, 4), (value,)) for value in (result.perplexity, result.loss, result.bits_per_byte)),
            ranged(result.increase, result.increase_low, result.increase_high),
        )
        for text in record.texts
        for index, (model, result) in enumerate(zip(record.models, text.results, strict=True), start=1)
    )  # fmt: skip
    table = Table("Perplexity", columns, rows, is_open=True).upto(len(columns) - (len(record.models) < 2))
    return Part("perplexity", "Perplexity", PROTOCOL, None, table)


def remarks_part(record: EvaluateRecord) -> Part | None:
    """Return the remarks."""
    if not record.notes:
        return None
    return Part("remarks", "Remarks", statements=tuple(f"note: {note}" for note in record.notes))
