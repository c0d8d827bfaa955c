"""The page of a recovered checkpoint: the curve of the training, and the losses on texts that were kept apart."""

from depthgauge.base.format import duration, number, size_text
from depthgauge.report.charts import MEASURED, Figure, figure, hovering, single
from depthgauge.report.evaluate_section import evaluate_parts
from depthgauge.report.markup import Table, capital, command_line, settings_table
from depthgauge.report.page_parts import Page, PagePart, Section, present
from depthgauge.results.recover_record import RecoverRecord, RecoveryRecord
from depthgauge.results.shrink_verdicts import (
    increase_text,
    objective_label,
    recover_verdict,
    recovery_sentences,
    text_label,
)

_LINES = (
    ("selection windows", "select", MEASURED, "y"), ("a text kept apart", "apart", "@blue", "y"),
    ("divergence from the source, training", "train", "@faint", "y2"),
)  # fmt: skip
"""Name, field, colour and axis of each line of the curve."""


def recover_page(record: RecoverRecord) -> Page:
    """Return the page of a result of `recover`."""
    texts = PagePart("texts", "What it gained on each text", "", None, _texts(record))
    facts = (
        ("smaller model", f"{record.name}, {record.layers} of {record.teacher_layers} layers of {record.teacher}"),
        ("windows", f"{record.window} tokens"),
        ("check", record.check or "nothing was written"),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        ("duration", duration(record.seconds)),
    )
    tasks = () if record.evaluation is None else evaluate_parts(record.evaluation)
    parts = (*present(recovery_part(record.recovery, record.objective), texts), *tasks)
    section = Section(record.name, f"{recover_verdict(record)}.", facts, parts)
    return Page(
        version=record.version,
        heading="How much came back?",
        lead=f"A smaller model trained towards its source with depthgauge {record.version}.",
        sections=(section,),
        command=command_line("recover", record.settings.given(), record.name),
        settings=settings_table({"model": record.name, **record.settings.given()}),
    )


def recovery_part(recovery: RecoveryRecord | None, objective: str) -> PagePart | None:
    """Return the curve of a training."""
    if recovery is None or not recovery.curve:
        return None
    traces: list[Figure] = []
    for name, field, color, axis in _LINES:
        known = [(point.tokens, getattr(point, field)) for point in recovery.curve if getattr(point, field) is not None]
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": name, "showlegend": True, "yaxis": axis,
                "x": [tokens for tokens, _ in known], "y": [value for _, value in known],
                "line": {"color": color, "width": 2}, "marker": {"color": color, "size": 6},
                **hovering([f"{name}<br>{tokens:,} tokens<br><b>{number(value, 4)}</b>" for tokens, value in known]),
            }
        )  # fmt: skip
    memory = "" if recovery.memory is None else f" GPU memory: {size_text(recovery.memory)}."
    caption = " ".join(f"{capital(sentence)}." for sentence in recovery_sentences(recovery))
    caption += f" Largest learning rate: {number(recovery.rate)}.{memory}"
    title = objective_label(objective).title
    alt = f"Line chart of {title} against training tokens. {caption}"
    table = Table(
        "The losses on the way",
        ("tokens", "training divergence", "selection windows", "a text kept apart"),
        tuple((point.tokens, point.train, point.select, point.apart) for point in recovery.curve),
    )
    right = {"title": "divergence, nats per token", "overlaying": "y", "side": "right", "showgrid": False}
    x = {"title": "training tokens", "rangemode": "tozero", "showgrid": False}
    chart = single(alt, 380, figure(*traces, x=x, y={"title": title}, right=60, top=76, yaxis2=right))
    return PagePart("recovery", "How the training went", caption, chart, table)


def _texts(record: RecoverRecord) -> Table:
    rows = tuple(
        (
            text_label(one), one.windows, one.teacher, one.before, one.after,
            increase_text(one.change, one.low, one.high),
        )
        for one in record.texts
    )  # fmt: skip
    columns = ("text", "windows", "source", "before", "after", "change")
    return Table(f"{capital(objective_label(record.objective).title)}, on windows kept apart", columns, rows)
