"""Sentences about an evaluation: accuracies and differences in percent, guarantees, and how perplexity was measured."""

from collections.abc import Iterator

from depthgauge.base.format import DASH, counted, number
from depthgauge.results.evaluate_record import AccuracyRecord, EvaluatedTask, EvaluateRecord

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


def difference_text(one: AccuracyRecord) -> str:
    """Return the difference with its interval in percentage points: `−5.0 [−9.1, −1.2]`."""
    if one.difference is None:
        return DASH
    return f"{percent_text(one.difference, True)} [{percent_text(one.low, True)}, {percent_text(one.high, True)}]"


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


def _at_most(record: EvaluateRecord, name: str, one: AccuracyRecord, what: str, how: str) -> str:
    most, confidence = one.falls_at_most, f"{100 * record.settings.confidence:g} %"
    assert most is not None
    found = f"falls by at most {percent_text(most)}" if most >= 0 else f"grows by at least {percent_text(-most)}"
    return (
        f"With confidence {confidence}, the accuracy of {name} on {what} {found} percentage points compared with "
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
        for one in rows:
            found = f"{model.name} answers {percent_text(one.accuracy)} % right"
            if one.difference is not None:
                found += f", a difference of {difference_text(one)} percentage points (p = {number(one.p, 2)})"
            parts.append(found)
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
