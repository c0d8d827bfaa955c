"""The page of an evaluation: the accuracy on each task, what changed from the first model, and the perplexities."""

from depthgauge.base.format import counted, duration, number, short
from depthgauge.report.charts import MEASURED, PROVED, Figure, figure, hovering, label, single
from depthgauge.report.markup import Table, capital, command_line, settings_table
from depthgauge.report.page_parts import Page, PagePart, Section, present
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.results.evaluate_verdicts import (
    AS_FIRST,
    MANY,
    PROTOCOL,
    accuracy_rows,
    difference_text,
    evaluate_verdict,
    percent_text,
    task_guarantees,
)

_COLORS = ("@faint", MEASURED, "@blue", "@purple", "@green")
"""Colours of the models, in their order."""


def evaluate_page(record: EvaluateRecord) -> Page:
    """Return the page of a result of `evaluate`."""
    names = [model.name for model in record.models]
    title = ", ".join(names) if len(names) <= MANY else f"{names[0]} and {len(names) - 1} other models"
    section = Section(title, f"{evaluate_verdict(record)}.", evaluate_facts(record), evaluate_parts(record))
    return Page(
        version=record.version,
        heading="What can it still do?",
        lead=f"{counted(len(names), 'model')} evaluated with depthgauge {record.version} on the same items and texts.",
        sections=(section,),
        command=command_line("evaluate", record.settings.given(), *names),
        settings=settings_table({"models": names, **record.settings.given()}),
    )


def evaluate_facts(record: EvaluateRecord) -> tuple[tuple[str, str], ...]:
    """Return what each model is and how it was read."""
    facts = []
    for index, model in enumerate(record.models, start=1):
        start = "no BOS token" if model.bos is None else f"BOS token {'added' if model.bos else 'not added'}"
        sizes = f"{model.family}, {counted(model.layers, 'layer')}, {model.parameters:,} parameters, {model.dtype}"
        facts.append((f"model {index}", f"{model.name}: {sizes}"))
        if (model.bos, model.bos_reason) != (record.models[0].bos, AS_FIRST):
            facts.append((f"start of model {index}", f"{start}: {model.bos_reason}"))
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return (*facts, ("versions", versions), ("duration", duration(record.seconds)))


def evaluate_parts(record: EvaluateRecord) -> tuple[PagePart, ...]:
    """Return all parts of the section, in order."""
    return present(accuracy_part(record), difference_part(record), perplexity_part(record), remarks_part(record))


def accuracy_part(record: EvaluateRecord) -> PagePart | None:
    """Return the accuracy of every model on every task."""
    if not record.tasks:
        return None
    found = [list(accuracy_rows(record, index)) for index in range(len(record.models))]
    tasks, models = [name for name, _, _ in found[0]], [model.name for model in record.models]
    shares = [[100 * one.accuracy for _, _, one in rows] for rows in found]
    # One colour per model; where these do not suffice, the models are the groups.
    groups, series = (tasks, models) if len(models) <= len(_COLORS) else (models, tasks)
    lengths = shares if series is models else list(map(list, zip(*shares, strict=True)))
    names = [label(short(name, 36)) for name in groups]
    places = list(range(len(names)))
    traces = [
        {
            "type": "bar", "orientation": "h", "name": label(short(one, 32)), "y": places, "showlegend": True, "x": row,
            "marker": {"color": _COLORS[(index + (series is tasks)) % len(_COLORS)]},
            **hovering([
                f"{label(group)}<br>{label(one)}<br><b>{number(share, 3)} %</b>"
                for group, share in zip(groups, row, strict=True)
            ]),
        }
        for index, (one, row) in enumerate(zip(series, lengths, strict=True))
    ]  # fmt: skip
    x = {"title": "accuracy, %", "range": [0, 100]}
    y = {"tickvals": places, "ticktext": names, "autorange": "reversed", "showgrid": False, "automargin": True}
    drawn = figure(*traces, x=x, y=y, left=16, right=16, top=48, bargap=0.35, barmode="group")
    words = "; ".join(
        f"{name}: {', '.join(percent_text(rows[k][2].accuracy) for rows in found)} %"
        for k, (name, _, _) in enumerate(found[0])
    )
    table = Table(
        "Accuracy, and difference from the first model",
        (
            "task", "model", "items", "accuracy", "difference", "low", "high", "lost", "gained", "p",
            "falls by at most",
        ),
        tuple(
            (
                name, model.name, items, one.accuracy, one.difference, one.low, one.high, one.lost, one.gained, one.p,
                one.falls_at_most,
            )
            for k in range(len(tasks))
            for model, (name, items, one) in zip(record.models, (rows[k] for rows in found), strict=True)
        ),
    )  # fmt: skip
    caption = "All models answered the same items. acc_norm divides the log-likelihood of an answer by its length."
    alt = f"Bar chart of the accuracy by task and model. {words}."
    height = 110 + 28 * len(names) * (1 + len(series))
    return PagePart("accuracy", "Accuracy on each task", caption, single(alt, height, drawn), table, table_open=True)


def difference_part(record: EvaluateRecord) -> PagePart | None:
    """Return the differences from the first model with their intervals, the guaranteed bound, and the guarantees."""
    if not record.tasks or len(record.models) < 2:
        return None
    traces, names, words = list[Figure](), list[str](), list[str]()
    for index, model in enumerate(record.models[1:], start=1):
        rows = list(accuracy_rows(record, index))
        several = len(record.models) > 2
        places = list(range(len(names), len(names) + len(rows)))
        names += [short(f"{name}, {model.name}" if several else name, 36) for name, _, _ in rows]
        words += [f"{name}: {difference_text(one)}" for name, _, one in rows]
        known = [one for _, _, one in rows]
        traces.append({
            "type": "scatter", "mode": "markers", "name": "measured, with 95 % interval", "y": places,
            "x": [100 * (one.difference or 0.0) for one in known], "showlegend": index == 1,
            "marker": {"color": MEASURED, "size": 9},
            "error_x": {
                "type": "data", "symmetric": False, "width": 4, "thickness": 1.5, "color": MEASURED,
                "array": [100 * ((one.high or 0.0) - (one.difference or 0.0)) for one in known],
                "arrayminus": [100 * ((one.difference or 0.0) - (one.low or 0.0)) for one in known],
            },
            **hovering([
                f"{label(name)}<br><b>{difference_text(one)}</b><br>p = {number(one.p, 2)}" for name, _, one in rows
            ]),
        })  # fmt: skip
        traces.append({
            "type": "scatter", "mode": "markers", "name": "guaranteed: not below", "y": places,
            "x": [-100 * (one.falls_at_most or 0.0) for one in known], "showlegend": index == 1,
            "marker": {"color": PROVED, "size": 12, "symbol": "line-ns-open", "line": {"width": 3}},
            **hovering([
                f"{label(name)}<br>falls by at most <b>{percent_text(one.falls_at_most)}</b>" for name, _, one in rows
            ]),
        })  # fmt: skip
    x = {"title": "difference of accuracy, percentage points", "zeroline": True, "rangemode": "tozero"}
    y = {
        "tickvals": list(range(len(names))), "ticktext": [label(name) for name in names], "automargin": True,
        "range": [len(names) - 0.5, -0.5], "showgrid": False,
    }  # fmt: skip
    drawn = figure(*traces, x=x, y=y, left=16, right=16, top=48)
    *statements, assumption = task_guarantees(record)
    caption = f"{assumption} Intervals of tasks are exact; that of the mean is approximate."
    alt = f"Differences of accuracy from the first model with their intervals. {'; '.join(words)}."
    chart = single(alt, 130 + 48 * len(names), drawn)
    return PagePart("difference", "What changed", caption, chart, statements=tuple(statements))


def perplexity_part(record: EvaluateRecord) -> PagePart | None:
    """Return perplexity and bits per byte of every model on every text."""
    if not record.texts:
        return None
    rows = tuple(
        (text.name, model.name, one.windows, text.window, one.perplexity, one.bits_per_byte, one.loss, one.increase)
        for text in record.texts
        for model, one in zip(record.models, text.results, strict=True)
    )
    columns = (
        "text",
        "model",
        "windows",
        "tokens per window",
        "perplexity",
        "bits per byte",
        "nats per token",
        "increase",
    )
    return PagePart(
        "perplexity", "Perplexity", PROTOCOL, None, Table("Perplexity by text", columns, rows), table_open=True
    )


def remarks_part(record: EvaluateRecord) -> PagePart | None:
    """Return the remarks."""
    if not record.notes:
        return None
    return PagePart("remarks", "Remarks", "", statements=tuple(f"{capital(note)}." for note in record.notes))
