"""Sentences about a shrunk model: its verdict, its guarantee, and the names of texts, methods and objectives.

Every number that was not guaranteed is called measured, and every guarantee comes with its assumption.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from statistics import mean

from depthgauge.base.format import DASH, counted, duration, interval_text, number, ranges, size_text
from depthgauge.results.labels import of_stack
from depthgauge.results.recover_record import RecoveredText, RecoverRecord, RecoveryRecord
from depthgauge.results.shrink_record import (
    GIVEN,
    LLAMA,
    BeforeAfter,
    CalibrationRecord,
    GuaranteeRecord,
    ReloadRecord,
    RepairStage,
    ShrinkRecord,
    TextRecord,
)


@dataclass(frozen=True)
class ObjectiveLabel:
    """The text shown for one objective.

    - `title`: the quantity with its unit, for tables
    - `added`: its increase with the unit, for axes
    - `change`: what happens to it; the amount replaces `#`
    - `output`: where the output is compared with the dense model's: what moves
    """

    title: str
    added: str
    change: str
    output: str = "its output moves"

    def by(self, amount: str) -> str:
        """Return what happens to the quantity: `the loss grows by 0.43 nats per token`."""
        change = self.change.replace("grows", "changes") if amount.startswith("-") else self.change
        return change.replace("#", amount, 1)


OBJECTIVE_LABELS: Mapping[str, ObjectiveLabel] = {
    "loss": ObjectiveLabel(
        "loss, nats per token", "loss added, nats per token", "the loss grows by # nats per token"
    ),
    "states": ObjectiveLabel(
        "relative change of the final states", "relative change of states",
        "the final states change by # of their size", "its final states move",
    ),
    "labels": ObjectiveLabel("loss of the labels, nats", "loss added, nats", "the loss of the labels grows by # nats"),
    "logits": ObjectiveLabel(
        "relative change of the logits", "relative change of logits",
        "the logits change by # of their size", "the logits of its head move",
    ),
    "embedding": ObjectiveLabel(
        "1 − cosine of the embeddings", "1 − cosine of embeddings",
        "the cosine of the embeddings falls by #", "its embeddings turn",
    ),
}  # fmt: skip
"""Objective → label."""

_YOURS = {kind: f"your {kind}" for kind in GIVEN}
TEXTS = _YOURS | {"sampled": "sampled from the model", "built-in": "built-in text"}
"""Kind of text → label."""
ABOUT = _YOURS | {"sampled": "text that the model writes itself", "built-in": "the built-in text"}
"""Kind of text → what a guarantee about it says."""
SHORT_TEXTS = _YOURS | {"sampled": "sampled", "built-in": "built-in"}
"""Kind of text → label next to a chart."""

BY_LOSS = ("loss", "labels")
"""Objectives that have a value before and after."""

DAMAGE, DAMAGE_BOUND, DAMAGE_RATIO, DAMAGE_LEAST = 0.5, 1.0, 3.0, 0.1
"""A model is called damaged if its loss grows by more than `DAMAGE` (nats per token), or if the guarantee is above
`DAMAGE_BOUND`. Its samples count only if there is no text of the user. There is another warning if the loss on samples
grows by more than `DAMAGE_LEAST`, and more than `DAMAGE_RATIO` times as much as on the user's texts."""
LARGEST_RATIO = 1e6
"""Ratios of costs beyond this come from damaged documents and are not shown."""


def objective_label(objective: str) -> ObjectiveLabel:
    """Return the label of an objective; one that is not known is shown by its name."""
    return OBJECTIVE_LABELS.get(objective) or ObjectiveLabel(objective, objective, "the objective grows by #")


def text_label(text: TextRecord | RecoveredText) -> str:
    """Return what a text is: `your text (corpus.txt)`."""
    kind = TEXTS.get(text.kind, text.kind)
    return f"{kind} ({text.name})" if text.kind in GIVEN and text.name else kind


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
    chosen = next((one for one in record.plan.candidates if one.chosen and one.removed == record.removed), None)
    bare = {one.removed: one.increase for one in record.plan.candidates if one.increase is not None}
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
    written, sampled = ([one for kind, one in increases if kind == about] for about in ("text", "sampled"))
    largest = max((one for kind, one in increases if kind != "sampled" or not written), default=0.0)
    bound = None if record.guarantee is None else record.guarantee.quantile.increase
    helps = [] if len(record.removed) < 2 else ["remove fewer blocks"]
    if not record.plan.settings.repairs:
        helps.append("leave --recover none out")
    elif record.recovery is None:
        helps.append("train it with --recover 2M")
    advice = f"; {', or '.join(helps)}" if helps else ""
    found, warnings = [], []
    if largest > DAMAGE:
        found.append(f"the loss grows by {number(largest)} nats per token")
    if bound is not None and bound > DAMAGE_BOUND:
        found.append(f"only {number(bound)} nats per token are guaranteed")
    if found:
        warnings.append(f"warning: this model is damaged: {', and '.join(found)}{advice}")
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


def recover_verdict(record: RecoverRecord) -> str:
    """State what a recovery changed on windows that were kept apart, and that it was undone if it was."""
    if not record.recovery.kept:
        return f"{record.name} was not improved: the training gained less than its standard error and was undone"
    changes = (f"{text_label(text)}: {interval_text(text.change, text.low, text.high)}" for text in record.texts)
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
    found = record.accuracy
    if found is None:
        return ""
    dense, shrunk = (number(100 * value) for value in (found.dense, found.shrunk))
    what = f"{found.windows} certify {record.plan.calibration.noun}s"
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
