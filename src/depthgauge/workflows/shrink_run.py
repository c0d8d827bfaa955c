"""One run of `shrink`: begin, then make, measure and write a model of every size."""

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from depthgauge._version import __version__
from depthgauge.base.format import counted
from depthgauge.checkpoints.source.library import library_versions
from depthgauge.checkpoints.source.model_files import Source, weight_bytes
from depthgauge.checkpoints.weights.load import BY_TARGETS, Checkpoint, parameter_count, wrap
from depthgauge.results.evaluate_record import EvaluateOptions, EvaluateRecord
from depthgauge.results.labels import objective_label
from depthgauge.results.record import load_document
from depthgauge.results.shrink_document import shrink_warnings
from depthgauge.results.shrink_record import (
    SHRINK_ADVICE,
    BeforeAfter,
    ExampleRecord,
    PlanRecord,
    ShrinkRecord,
    SpeedRecord,
    TestedSize,
    check_shrink,
)
from depthgauge.surgery.candidates import Candidates, ShrunkModel, largest_within, make_model
from depthgauge.surgery.certify import Certified, Certifier, as_dtype
from depthgauge.surgery.gguf_layout import GgufLayout
from depthgauge.surgery.open_model import OpenedModel
from depthgauge.surgery.speed import compare_speed
from depthgauge.surgery.verify import FreshProcess
from depthgauge.surgery.write_model import has_written, record_file, sized_output
from depthgauge.surgery.write_shrunk import CheckedModel, checked_directory, checked_gguf, type_notes, write_documents
from depthgauge.workflows.evaluate_models import (
    ModelAnswers,
    PreparedEvaluation,
    calibration_notes,
    evaluation_record,
    fall_warnings,
    measure_model,
    prepare_evaluation,
    tasks_after,
)
from depthgauge.workflows.shrink_stages import (
    PLAN,
    Run,
    Workbench,
    begin,
    candidates_of,
    found_sets,
    plan_of,
    recovery_of,
    requested_sizes,
    training_advice,
    training_amount,
)
from depthgauge.workflows.text_examples import TextExamples

UNRECOVERED = "the smaller model before its recovery"
SHRUNK = "the smaller model"
"""The names of the shrunk model in the record of its tasks."""


@dataclass(frozen=True, eq=False)
class FinishedModel:
    """A record, and the model that it describes; None if there is no model in memory.

    `work` and `certifier` are what it was made with.
    """

    record: ShrinkRecord
    model: Any
    work: Workbench
    certifier: Certifier


def make_plan(run: Run, model: Any, source: Source | None, tokenizer: Any) -> PlanRecord:
    """Search and compare, without making a model."""
    work = begin(run, model, source, tokenizer, PLAN)
    checkpoint = work.opened.checkpoint
    with work.student:
        (count,) = requested_sizes(run, work)
        sets, amount = found_sets(run, work, count), training_amount(run, checkpoint)
        candidates = candidates_of(run, work, None if amount is None else recovery_of(run, work, amount))
        with run.durations("repair and comparison"):
            removed, compared, _ = candidates.choose(sets, run.named_blocks(checkpoint))
    return plan_of(run, work, removed, compared)


def make_models(
    run: Run, model: Any, source: Source | None, tokenizer: Any, makes: str, out: str | Path | None, overwrite: bool
) -> list[FinishedModel]:
    """Make, measure and write the model of every size."""
    settings = run.settings
    evaluation = _prepared(run, settings.evaluate)
    work = begin(run, model, source, tokenizer, makes)
    opened = work.opened
    checkpoint = opened.checkpoint
    with work.student:
        counts = () if run.limit is not None else requested_sizes(run, work)
        with run.durations("certification"):
            certifier = Certifier(checkpoint, work.windows, settings.confidence, progress=run.progress)
        names = settings.counts(checkpoint.layers, checkpoint.name) if len(settings.removals) > 1 else {}
        places = {
            count: out if out is None or not names else sized_output(out, names.get(count, f"{count}"))
            for count in counts
        }
        made = {count: FinishedModel(record, None, work, certifier)
                for count, place in places.items() if (record := _known_record(run, place)) is not None}  # fmt: skip
        if made and made.keys() == {*counts}:
            return [made[count] for count in counts]
        amount, recovery = training_amount(run, checkpoint), None
        if amount is not None:
            evaluation = evaluation or _prepared(run, tasks_after(None, checkpoint.device, checkpoint.objective))
            recovery = recovery_of(run, work, amount)
        tasks = None if evaluation is None else TaskRuns(run, work, evaluation)
        examples = _examples(work, out)
        observers = [one.observe for one in (tasks, examples) if one is not None]
        candidates = candidates_of(run, work, recovery, observers)
        finish = Finish(run, work, certifier, candidates, tasks, examples)
        if run.limit is not None:
            with _fresh_process(opened.checkpoint, opened.stored, out) as process:
                shrunk, tested = largest_within(work.search, candidates, certifier, run.limit, opened.stored, recovery)
                return [finish.finished(shrunk, tested, out, overwrite, process)]
        for count, place in places.items():
            if count not in made:
                with _fresh_process(checkpoint, opened.stored, place) as process:
                    sets = found_sets(run, work, count)
                    shrunk = make_model(candidates, sets, opened.stored, run.named_blocks(checkpoint), recovery)
                    made[count] = finish.finished(shrunk, (), place, overwrite, process)
    return [made[count] for count in counts]


def _known_record(run: Run, out: str | Path | None) -> ShrinkRecord | None:
    """Return the record of a model that the same run has written before it was interrupted."""
    if out is None or not has_written(run.journal, out):
        return None
    return check_shrink(load_document(record_file(out), SHRINK_ADVICE), str(out))


@contextmanager
def _fresh_process(checkpoint: Checkpoint, stored: Any, out: str | Path | None) -> Iterator[FreshProcess | None]:
    """Start the process that will check a model which is written, so that it is ready when the model is."""
    if out is None or isinstance(stored, GgufLayout):
        yield None
        return
    with FreshProcess(checkpoint.model) as process:
        yield process


def _examples(work: Workbench, out: str | Path | None) -> TextExamples | None:
    """Return what shows how the models write, if the smaller one is written and both can write."""
    dense = work.opened.checkpoint
    writes = out is not None and dense.objective == "loss" and dense.stream is None
    return TextExamples(work.opened, work.windows) if writes else None


def _prepared(run: Run, tasks: str | None) -> PreparedEvaluation | None:
    asked = EvaluateOptions(tasks=tasks, confidence=run.settings.confidence)
    return None if tasks is None else prepare_evaluation(asked, run.message)


@dataclass(eq=False)
class TaskRuns:
    """The tasks, and what the models have answered so far: the dense one, and a smaller one before its recovery."""

    run: Run
    work: Workbench
    evaluation: PreparedEvaluation
    _dense: ModelAnswers | None = field(default=None, init=False)
    _unrecovered: list[ModelAnswers] = field(default_factory=list, init=False)

    def observe(self, smaller: Checkpoint) -> None:
        """Run the tasks on the shrunk model before its recovery."""
        with self.run.durations("tasks"):
            self._unrecovered = [self._answers(replace(smaller, name=UNRECOVERED))]

    def record(self, model: Any) -> EvaluateRecord:
        """Run the tasks on the model that is written, and compare the dense model and both smaller ones."""
        started, dense = time.perf_counter(), self.work.opened.checkpoint
        smaller = wrap(as_dtype(model, dense.model.dtype), SHRUNK)
        with self.run.durations("tasks"):
            self._dense = self._dense or self._answers(dense)
            compared = [self._dense, *self._unrecovered, self._answers(smaller)]
        notes = calibration_notes(SHRUNK, self.work.windows.record, self.evaluation)
        notes += fall_warnings(*compared[1:]) if len(compared) > 2 else []
        return evaluation_record(self.evaluation, compared, notes, time.perf_counter() - started)

    def _answers(self, checkpoint: Checkpoint) -> ModelAnswers:
        opened, run = self.work.opened, self.run
        return measure_model(self.evaluation, checkpoint, opened.tokenizer, checkpoint.name, opened.start, run.progress)


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured of a smaller model besides its losses; `held` says what the memory includes."""

    speed: SpeedRecord | None = None
    memory: BeforeAfter | None = None
    held: str | None = None
    evaluation: EvaluateRecord | None = None
    examples: tuple[ExampleRecord, ...] = ()


@dataclass(frozen=True, eq=False)
class Finish:
    """Measures a smaller model, writes it if there is a place for it, and describes it."""

    run: Run
    work: Workbench
    certifier: Certifier
    candidates: Candidates
    tasks: TaskRuns | None
    examples: TextExamples | None

    def finished(
        self,
        shrunk: ShrunkModel | None,
        tested: tuple[TestedSize, ...],
        out: str | Path | None,
        overwrite: bool,
        process: FreshProcess | None,
    ) -> FinishedModel:
        """Measure, write and describe a model; `tested` are the sizes that were tested against the limit.

        There is no model if no size stays within the limit.
        """
        run, certifier = self.run, self.certifier
        if shrunk is None:
            nothing = ShrunkModel(None, (), (), (), None, 0.0)
            record = self._record(nothing, certifier.certified(None, 1, run.limit, tested), Measured(), None, None)
            return FinishedModel(record, None, self.work, certifier)
        measured = self._measured(shrunk.model)
        looks = plan_of(run, self.work, shrunk.removed, shrunk.candidates).looks(tested)
        overwrite = overwrite or (out is not None and has_written(run.journal, out))
        with self._checked(shrunk, out, overwrite, process) as checked:
            losses = None if checked is None else checked.found
            if losses is None:
                with run.durations("certification"):
                    losses = certifier.run(shrunk.model)
            certified = certifier.certified(losses, looks, run.limit, tested)
            record = self._record(shrunk, certified, measured, checked, out)
            if checked is not None:
                write_documents(checked, record, self.work.opened.checkpoint, run.journal, overwrite)
        if out is not None:
            run.message(f"model written to {out}")
        return FinishedModel(record, shrunk.model, self.work, certifier)

    @contextmanager
    def _checked(
        self, shrunk: ShrunkModel, out: str | Path | None, overwrite: bool, process: FreshProcess | None
    ) -> Iterator[CheckedModel | None]:
        """Write a model, and check what was written; it gets its name at the end of the block."""
        run, opened = self.run, self.work.opened
        if out is None:
            yield None
        elif isinstance(opened.stored, GgufLayout):
            with checked_gguf(
                shrunk, self.certifier, opened, out,
                overwrite=overwrite, journal=run.journal, durations=run.durations, source=self.work.llama,
            ) as made:  # fmt: skip
                yield made
        else:
            with checked_directory(
                shrunk.model, self.certifier, opened.checkpoint, opened.tokenizer, out,
                overwrite=overwrite, is_spread=run.settings.is_spread, durations=run.durations, process=process,
            ) as made:  # fmt: skip
                yield made

    def _measured(self, model: Any) -> Measured:
        """Time both models, and let them answer the tasks; llama.cpp times a GGUF file when it is written."""
        checkpoint, speed, memory, held = self.work.opened.checkpoint, None, None, None
        if checkpoint.stream is None and not isinstance(self.work.opened.stored, GgufLayout):
            self.run.progress(0, 1, "speed of both models")
            smaller = as_dtype(model, checkpoint.model.dtype)
            with self.run.durations("speed"):
                speed, memory, held = compare_speed(checkpoint.model, smaller, self.certifier.inputs[:1])
        tasks = None if self.tasks is None else self.tasks.record(model)
        with self.run.durations("examples"):
            examples = () if self.examples is None else self.examples.record(as_dtype(model, checkpoint.model.dtype))
        return Measured(speed, memory, held, tasks, examples)

    def _record(
        self,
        shrunk: ShrunkModel,
        certified: Certified,
        measured: Measured,
        checked: CheckedModel | None,
        out: str | Path | None,
    ) -> ShrinkRecord:
        run, work = self.run, self.work
        checkpoint, source = work.opened.checkpoint, work.opened.checkpoint.source
        is_made = shrunk.model is not None
        record = ShrinkRecord(
            version=__version__,
            name=checkpoint.name,
            objective=checkpoint.objective,
            layers_before=checkpoint.layers,
            layers_after=checkpoint.layers - len(shrunk.removed),
            removed=shrunk.removed,
            repaired=shrunk.repaired,
            loss=certified.loss,
            texts=certified.texts,
            accuracy=certified.accuracy,
            guarantee=certified.guarantee,
            speed=measured.speed if checked is None or checked.speed is None else checked.speed,
            parameters=BeforeAfter(
                before=parameter_count(checkpoint.model), after=parameter_count(shrunk.model) if is_made else None
            ),
            bytes=BeforeAfter(
                before=None if source is None else weight_bytes(source), after=None if checked is None else checked.size
            ),
            memory=measured.memory,
            curve=work.search.curve(shrunk.removed, shrunk.objective) if is_made else (),
            stages=shrunk.stages,
            durations=run.durations.seconds,
            recovery=shrunk.recovery,
            reload=None if checked is None else checked.reload,
            evaluation=measured.evaluation,
            examples=measured.examples,
            plan=plan_of(run, work, shrunk.removed, shrunk.candidates),
            notes=(),
            versions=library_versions(machine=platform.machine()),
            seconds=time.perf_counter() - run.started,
            out=None if out is None else str(out),
        )
        if not is_made:
            return record
        notes = [
            *shrink_warnings(record), *shrink_notes(record, work.opened, shrunk), *work.windows.notes,
            *work.search.refusals, *self.candidates.notes, *training_advice(run, work),
        ]  # fmt: skip
        notes += [f"memory: {measured.held}"] if measured.held is not None else []
        notes += [] if checked is None else checked.notes
        return msgspec.structs.replace(record, notes=tuple(notes))


# --- What a result of shrink says besides its numbers -----------------------------------------------------------------


def shrink_notes(record: ShrinkRecord, opened: OpenedModel, shrunk: ShrunkModel) -> list[str]:
    """Return what a reader should know about how a model was made and what its numbers are."""
    checkpoint, notes = opened.checkpoint, [*opened.notes]
    if isinstance(opened.stored, GgufLayout):
        notes += type_notes(opened.stored, shrunk.encoded)
    elif checkpoint.source is not None and checkpoint.source.gguf is not None:
        notes.append("the source is a quantized GGUF file; its weights were dequantized and written as safetensors")
    if checkpoint.source is not None and checkpoint.source.tokenizer is not None:
        kept = "; the GGUF file keeps its own" if isinstance(opened.stored, GgufLayout) else ""
        notes.append(f"the tokenizer is that of {checkpoint.source.tokenizer}{kept}")
    if checkpoint.objective not in BY_TARGETS:
        notes.append(
            "the model is not a causal language model: the numbers say how far "
            f"{objective_label(checkpoint.objective).output} from the dense model's, and no perplexity is claimed"
        )
        if checkpoint.measured is not checkpoint.model:
            head = type(checkpoint.model).__name__
            notes.append(f"the head of the {head} was kept unchanged; its own loss was not measured")
    if checkpoint.stream is not None:
        notes.append(
            "the weights were streamed: no text was sampled from the model, no weights were trained, and the speed of "
            "transformers was not measured"
        )
    if shrunk.stages and not shrunk.repaired:
        notes.append("no repair lowered the objective on the selection windows, so no weight was changed")
    if (looks := record.plan.looks()) > 1 and record.guarantee is not None and not record.guarantee.tested:
        notes.append(
            f"{counted(looks, 'size')} may have been measured on these certify windows; the bounds allow for it"
        )
    return notes
