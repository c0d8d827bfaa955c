"""Tables of a recovered checkpoint for the terminal."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape

from depthgauge.base.format import number, printable
from depthgauge.cli.evaluate_tables import evaluate_tables
from depthgauge.cli.stacking import Column, stacked
from depthgauge.results.recover_record import RecoverRecord
from depthgauge.results.shrink_verdicts import increase_text, objective_label, recovery_sentences, text_label


def recover_tables(record: RecoverRecord, width: int) -> Iterator[RenderableType]:
    """Yield the tables and lines of one result."""
    layers = f"{record.layers} of {record.teacher_layers} layers of {record.teacher}"
    yield f"[bold]{escape(printable(record.name))}: {escape(printable(layers))}[/bold]"
    key = Column("text", [escape(printable(text_label(text))) for text in record.texts], text=True)
    columns = [
        Column("windows", [str(text.windows) for text in record.texts]),
        Column("source", [number(text.teacher) for text in record.texts]),
        Column("before", [number(text.before) for text in record.texts]),
        Column("after", [number(text.after) for text in record.texts]),
        Column("change", [escape(increase_text(text.change, text.low, text.high)) for text in record.texts]),
    ]
    title = objective_label(record.objective).title
    caption = "On windows that nothing was trained on or chosen by, with the 95 % interval of the change."
    yield from stacked(title[:1].upper() + title[1:], key, columns, width, caption=caption)
    if record.evaluation is not None:
        yield from evaluate_tables(record.evaluation, width)
    notes = (f"note: {remark}" for remark in record.notes)
    for line in (*recovery_sentences(record.recovery), record.check, *notes):
        if line:
            yield escape(printable(line))
