"""Tables of a shrunk checkpoint, and of a plan, for the terminal."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape

from depthgauge.base.format import counted, number, printable, ranges
from depthgauge.cli.evaluate_tables import evaluate_tables
from depthgauge.cli.stacking import Column, stacked
from depthgauge.results.labels import of_stack
from depthgauge.results.shrink_record import PlanRecord, ShrinkRecord
from depthgauge.results.shrink_verdicts import (
    accuracy_sentence,
    calibration_sentence,
    cost_columns,
    durations_sentence,
    guarantee_sentences,
    objective_label,
    recovery_sentences,
    reload_sentence,
    stack_picture,
    stage_sentence,
    text_columns,
    texts_caption,
    times_sentence,
    with_error,
)


def _title(name: str, plan: PlanRecord) -> str:
    kept = counted(plan.layers - len(plan.removed), "layer")
    return f"[bold]{escape(printable(name))}: {plan.layers} → {kept}{of_stack(plan.stack)}[/bold]"


def shrink_tables(record: ShrinkRecord, width: int) -> Iterator[RenderableType]:
    """Yield the tables and lines of one result."""
    yield _title(record.name, record.plan)
    yield from stack_lines(record.layers_before, record.removed, width)
    yield from text_tables(record, width)
    if record.guarantee is not None and record.guarantee.tested:
        yield from tested_tables(record, width)
    yield from map(_line, guarantee_sentences(record))
    if record.evaluation is not None:
        yield from evaluate_tables(record.evaluation, width)
    yield from cost_tables(record, width)
    yield from candidate_tables(record.plan, width)
    for stage in record.stages:
        yield _line(stage_sentence(stage))
    if record.recovery is not None:
        yield from map(_line, recovery_sentences(record.recovery))
    if record.reload is not None:
        yield _line(reload_sentence(record.reload))
    yield _line(calibration_sentence(record.plan.calibration, record.seconds))
    if record.durations:
        yield _line(durations_sentence(record))
    for remark in record.notes:
        yield _line(f"note: {remark}")


def plan_tables(plan: PlanRecord, width: int) -> Iterator[RenderableType]:
    """Yield the tables and lines of a plan."""
    yield _title(plan.model, plan)
    yield from stack_lines(plan.layers, plan.removed, width)
    if plan.search:
        yield from search_tables(plan, width)
    yield from candidate_tables(plan, width)
    yield _line(calibration_sentence(plan.calibration))


def stack_lines(layers: int, removed: tuple[int, ...], width: int) -> Iterator[str]:
    """Yield the picture of the stack, and the removed layers."""
    yield stack_picture(layers, removed, width)
    listed = ", ".join(map(str, sorted(removed))) or "none"
    yield f"▓ removed {'layers' if len(removed) != 1 else 'layer'}: {listed}"


def text_tables(record: ShrinkRecord, width: int) -> Iterator[RenderableType]:
    """Yield one row per kind of text: the objective before and after, and its increase with the interval."""
    if not record.texts:
        return
    title = objective_label(record.objective).title
    yield from _stacked(title[:1].upper() + title[1:], text_columns(record), width, texts_caption(record))
    if record.accuracy is not None:
        yield _line(accuracy_sentence(record))


def tested_tables(record: ShrinkRecord, width: int) -> Iterator[RenderableType]:
    """Yield one row per size that was tested against the limit."""
    guarantee = record.guarantee
    assert guarantee is not None
    key = Column("layers removed", [str(size.removed) for size in guarantee.tested])
    columns = [
        Column("bound", [number(size.bound) for size in guarantee.tested]),
        Column("within the limit", ["yes" if size.passed else "no" for size in guarantee.tested], text=True),
    ]
    title = f"Sizes tested against the limit of {number(guarantee.limit, 6)}, until one fails"
    yield from stacked(title, key, columns, width)


def cost_tables(record: ShrinkRecord, width: int) -> Iterator[RenderableType]:
    """Yield one row per cost: parameters, bytes, memory and times before and after."""
    if columns := cost_columns(record):
        yield from _stacked("Cost", columns, width, times_sentence(record))


def _stacked(title: str, columns: dict[str, list[str]], width: int, caption: str) -> Iterator[RenderableType]:
    key, *others = (
        Column(name, [_line(cell) for cell in cells], text=not k) for k, (name, cells) in enumerate(columns.items())
    )
    yield from stacked(title, key, others, width, caption=printable(caption))


def search_tables(plan: PlanRecord, width: int) -> Iterator[RenderableType]:
    """Yield one row per removal, in order."""
    key = Column("removed", [str(step.layer) for step in plan.search])
    columns = [Column("objective", [number(step.objective, 4) for step in plan.search])]
    caption = "The objective on the selection windows after each removal, without repair."
    yield from stacked("Search, in the order of removal", key, columns, width, caption=caption)


def candidate_tables(plan: PlanRecord, width: int) -> Iterator[RenderableType]:
    """Yield one row per set of blocks that was compared, the best first."""
    found = plan.candidates
    if not found:
        return
    key = Column("chosen by", [", ".join(one.methods) for one in found], text=True)
    columns = [
        Column("removed", [ranges(one.removed) for one in found], text=True),
        Column("without repair", [with_error(one.increase, one.error) for one in found]),
        Column("repaired", [with_error(one.repaired, one.repaired_error) for one in found]),
        Column("", ["← this one" if one.chosen else "" for one in found], text=True),
    ]
    caption = "Mean increase of the objective on the selection windows ± its standard error."
    yield from stacked("Choices compared", key, columns, width, caption=caption)


def _line(sentence: str) -> str:
    return escape(printable(sentence))
