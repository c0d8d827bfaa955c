"""What is shown of a recovered checkpoint: the curve of the training, and the losses on texts that were kept apart."""

from dataclasses import replace

from depthgauge.base.format import capital, duration, interval_text, number, size_text
from depthgauge.results.document import (
    MEASURED,
    SCREENS,
    Axis,
    Chart,
    Document,
    Part,
    Place,
    Plot,
    Section,
    Series,
    Table,
    command_line,
    present,
    ranged,
    settings_table,
)
from depthgauge.results.evaluate_document import evaluate_parts
from depthgauge.results.labels import objective_label
from depthgauge.results.recover_record import RecoverRecord, RecoveryRecord

_LINES = (
    ("selection windows", "select", MEASURED), ("a text kept apart", "apart", "@blue"),
    ("divergence from the source, training", "train", "@faint"),
)  # fmt: skip
"""Name, field and colour of each line of the curve; the last one has an axis of its own."""


def recover_document(record: RecoverRecord) -> Document:
    """Return what is shown of a result of `recover`."""
    layers = f"{record.layers} of {record.teacher_layers} layers of {record.teacher}"
    facts = (
        ("smaller model", f"{record.name}, {layers}"),
        ("windows", f"{record.window} tokens"),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        ("duration", duration(record.seconds)),
    )
    tasks = () if record.evaluation is None else evaluate_parts(record.evaluation)
    remarks = (record.check or "nothing was written", *(f"note: {remark}" for remark in record.notes))
    parts = (
        *present(recovery_part(record.recovery, record.objective), _texts_part(record)), *tasks,
        Part("notes", "Checks and notes", statements=remarks),
    )  # fmt: skip
    return Document(
        version=record.version,
        heading="How much came back?",
        lead=f"A smaller model trained towards its source with depthgauge {record.version}.",
        sections=(Section(record.name, f"{record.name}: {layers}", recover_verdict(record), facts, parts),),
        command=command_line("recover", record.settings.given(), record.name),
        settings=settings_table({"model": record.name, **record.settings.given()}),
    )


def recovery_part(recovery: RecoveryRecord | None, objective: str) -> Part | None:
    """Return what a training did, with its curve."""
    if recovery is None:
        return None
    memory = "" if recovery.memory is None else f" GPU memory: {size_text(recovery.memory)}."
    sentences, caption = recovery_sentences(recovery), f"Largest learning rate: {number(recovery.rate)}.{memory}"
    part = Part("recovery", "How the training went", caption, statements=sentences, place=SCREENS)
    if not recovery.curve:
        return part
    lines = []
    for name, field, color in _LINES:
        known = [(point.tokens, getattr(point, field)) for point in recovery.curve if getattr(point, field) is not None]
        at, values = [tokens for tokens, _ in known], [value for _, value in known]
        lines.append(
            Series(
                "line", name, at, values, color, places=[f"{tokens:,} tokens" for tokens in at],
                texts=[number(value, 4) for value in values], is_second=field == "train",
            )
        )  # fmt: skip
    title = objective_label(objective).title
    plot = Plot(
        f"Line chart of {title} against training tokens. {sentences[0]}.", Axis("training tokens", "zero"),
        Axis(title), lines, second=Axis("divergence, nats per token"),
    )  # fmt: skip
    table = Table(
        "The losses on the way",
        ("tokens", "training divergence", "selection windows", "a text kept apart"),
        tuple((point.tokens, point.train, point.select, point.apart) for point in recovery.curve),
        place=Place.PAGE,
    )
    return replace(part, chart=Chart((plot,), 380), table=table)


def _texts_part(record: RecoverRecord) -> Part:
    rows = tuple(
        (
            one.label,
            one.windows,
            one.teacher,
            one.before,
            one.after,
            ranged(one.change, one.low, one.high),
        )
        for one in record.texts
    )
    columns = ("text", "windows", "source", "before", "after", ("change", "change", "low", "high"))
    caption = "On windows that nothing was trained on or chosen by, with the 95 % interval of the change."
    table = Table(capital(objective_label(record.objective).title), columns, rows, is_open=True)
    return Part("texts", "What it gained on each text", caption, None, table)


def recover_verdict(record: RecoverRecord) -> str:
    """State what a recovery changed on windows that were kept apart, and that it was undone if it was."""
    if not record.recovery.kept:
        return f"{record.name} was not improved: the training gained less than its standard error and was undone"
    changes = (f"{text.label}: {interval_text(text.change, text.low, text.high)}" for text in record.texts)
    return f"{record.name} changed by, {objective_label(record.objective).title}: {'; '.join(changes)}"


def recovery_sentences(recovery: RecoveryRecord) -> tuple[str, ...]:
    """Return what the recovery did, what it was trained on, and what was done to fit it in."""
    parts = ", ".join(f"{about} ({tokens:,} tokens)" for about, tokens in recovery.data.items())
    return (
        f"recovery: {recovery.tokens:,} tokens in {duration(recovery.seconds)} ({recovery.ended}) changed the "
        f"objective on the selection windows from {number(recovery.before, 4)} to {number(recovery.after, 4)} "
        f"(standard error of the difference {number(recovery.error, 2)}); it was "
        f"{'kept' if recovery.kept else 'undone'}",
        f"recovery, trained on: {parts}",
        *(f"recovery: {what}" for what in recovery.how),
    )
