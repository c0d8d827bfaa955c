"""Tables of an evaluation for the terminal."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape

from depthgauge.base.format import DASH, duration, number, printable
from depthgauge.cli.stacking import Column, stacked
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.results.evaluate_verdicts import (
    PROTOCOL,
    accuracy_rows,
    difference_text,
    percent_text,
    task_guarantees,
)


def evaluate_tables(record: EvaluateRecord, width: int) -> Iterator[RenderableType]:
    """Yield the tables and lines of one result."""
    for index, model in enumerate(record.models):
        bos = {True: "with BOS", False: "without BOS", None: "has no BOS"}[model.bos]
        yield _line(f"model {index + 1}: {model.name} ({model.layers} layers, {model.parameters:,} parameters, {bos})")
    yield from accuracy_tables(record, width)
    yield from map(_line, task_guarantees(record))
    yield from perplexity_tables(record, width)
    for remark in record.notes:
        yield _line(f"note: {remark}")
    yield _line(f"took {duration(record.seconds)}")


def accuracy_tables(record: EvaluateRecord, width: int) -> Iterator[RenderableType]:
    """Yield one row per task and model: accuracy, difference with its interval, McNemar's p, and the bound."""
    if not record.tasks:
        return
    rows = [
        (name, items, index, one)
        for task in zip(*(accuracy_rows(record, index) for index in range(len(record.models))), strict=True)
        for index, (name, items, one) in enumerate(task)
    ]
    key = Column("task", [escape(printable(name)) if not index else "" for name, _, index, _ in rows], text=True)
    columns = [
        Column("items", ["" if index or items is None else str(items) for _, items, index, _ in rows]),
        Column("model", [str(index + 1) for _, _, index, _ in rows]),
        Column("accuracy %", [percent_text(one.accuracy) for *_, one in rows]),
    ]
    caption = "The items are the first ones of each task."
    if len(record.models) > 1:
        columns += [
            Column("difference", [escape(difference_text(one)) for *_, one in rows]),
            Column("lost, gained", [DASH if one.lost is None else f"{one.lost}, {one.gained}" for *_, one in rows]),
            Column("p", [number(one.p, 2) for *_, one in rows]),
            Column("falls by at most", [percent_text(one.falls_at_most) for *_, one in rows]),
        ]
        caption = (
            "The same items for all models. Differences from model 1 in percentage points, with paired 95 % confidence "
            "intervals; p is that of McNemar's exact test; lost: only model 1 is right."
        )
    yield from stacked("Tasks", key, columns, width, caption=caption)


def perplexity_tables(record: EvaluateRecord, width: int) -> Iterator[RenderableType]:
    """Yield one row per text and model: perplexity and bits per byte."""
    rows = [(text, index, one) for text in record.texts for index, one in enumerate(text.results)]
    if not rows:
        return
    key = Column("text", [escape(printable(text.name)) if not index else "" for text, index, _ in rows], text=True)
    columns = [
        Column("windows", [f"{one.windows} × {text.window}" for text, _, one in rows]),
        Column("model", [str(index + 1) for _, index, _ in rows]),
        Column("perplexity", [number(one.perplexity, 4) for *_, one in rows]),
        Column("nats per token", [number(one.loss, 4) for *_, one in rows]),
        Column("bits per byte", [number(one.bits_per_byte, 4) for *_, one in rows]),
    ]
    if len(record.models) > 1:
        found = [(one.increase, one.increase_low, one.increase_high) for *_, one in rows]
        shown = [f"{number(a)} [{number(b)}, {number(c)}]" if a is not None else DASH for a, b, c in found]
        columns.append(Column("increase", [escape(cell) for cell in shown]))
    yield from stacked("Perplexity", key, columns, width, caption=PROTOCOL)


def _line(sentence: str) -> str:
    return escape(printable(sentence))
