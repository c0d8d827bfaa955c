"""One run of `shrink`: calibrate, search, compare, repair, measure and write, for one number of blocks or several."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from depthgauge._version import __version__
from depthgauge.base.errors import InputError
from depthgauge.base.format import size_text
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Durations, Step
from depthgauge.checkpoints.block_runner import tokens_of
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.input_kinds import TEXT
from depthgauge.checkpoints.library import CheckpointError, transformers
from depthgauge.checkpoints.load import Checkpoint, parameter_count, wrap
from depthgauge.checkpoints.memory import free_memory
from depthgauge.checkpoints.samples import as_samples
from depthgauge.checkpoints.source import Source, weight_bytes
from depthgauge.checkpoints.stored_weights import weights_digest
from depthgauge.recovery.distillation import TRAINING, step_windows
from depthgauge.recovery.recover_model import Recovery
from depthgauge.results.evaluate_options import EvaluateOptions
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.results.record import load_document
from depthgauge.results.recover_options import AUTO, AUTO_TOKENS, OFF, Amount, amount_of
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.results.shrink_record import (
    SHRINK_ADVICE,
    BeforeAfter,
    CandidateRecord,
    PlanRecord,
    ShrinkRecord,
    TestedSize,
    check_shrink,
)
from depthgauge.results.shrink_verdicts import shrink_warnings
from depthgauge.surgery.block_search import GIVEN, Search
from depthgauge.surgery.block_sizes import requested_counts
from depthgauge.surgery.calibration import Calibration, prepare_calibration
from depthgauge.surgery.candidates import Candidates
from depthgauge.surgery.certify import Certifier, as_dtype
from depthgauge.surgery.gguf_layout import GgufLayout, sliding_blocks
from depthgauge.surgery.given_calibration import given_calibration
from depthgauge.surgery.open_model import ReadModel, calibration_sizes, open_model, read_model
from depthgauge.surgery.output_names import has_written, record_file, sized_output
from depthgauge.surgery.shrunk_model import ShrunkModel, largest_within, make_model
from depthgauge.surgery.speed import compare_speed
from depthgauge.surgery.student import HEADLESS, Removed, Student, effort_of
from depthgauge.surgery.verify import FreshProcess
from depthgauge.surgery.verify_gguf import LlamaComparison, compare_source, has_llama
from depthgauge.surgery.write_model import require_room
from depthgauge.surgery.write_shrunk import write_shrunk
from depthgauge.surgery.write_shrunk_gguf import write_shrunk_gguf
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
from depthgauge.workflows.needed_room import shrink_room
from depthgauge.workflows.recovery_inputs import recovery_on_text, recovery_on_windows
from depthgauge.workflows.shrink_notes import shrink_notes

PLAN, MEMORY, DIRECTORY, GGUF = "plan", "memory", "directory", "gguf"
"""What a run ends with: a plan, a model in memory, or one that is written and checked."""
UNRECOVERED = "the smaller model before its recovery"
SHRUNK = "the smaller model"
"""The names of the shrunk model in the record of its tasks."""


@dataclass(frozen=True, eq=False)
class FinishedModel:
    """A record, and the model that it describes; None if there is no model in memory."""

    record: ShrinkRecord
    model: Any


class ShrinkRun:
    """A run that has loaded its model and run it on the calibration windows.

    - `opened`, `calibration`: the model, and the windows
    - `student`, `search`: the model while it is being made, and the search for blocks to remove
    - `certifier`: the dense model on the certify windows
    """

    def __init__(
        self,
        model: Any,
        source: Source | None,
        settings: ShrinkOptions,
        tokenizer: Any,
        followed: PlanRecord | None,
        journal: Journal,
        progress: Step,
        message: Callable[[str], None],
        makes: str,
    ) -> None:
        self.started, self.durations = time.perf_counter(), Durations()
        self.settings, self.followed, self.journal, self.message = settings, followed, journal, message
        self.progress = progress
        self._unrecovered: list[ModelAnswers] = []
        self.evaluation = self._prepared(settings.evaluate)
        with self.durations("loading"):
            found = read_model(model, source, settings, tokenizer, followed, makes == GGUF, message)
            self._check_room(found, makes)
            self.opened = open_model(found, settings, followed, message)
        self._describe_in_journal(model)
        checkpoint = self.opened.checkpoint
        is_gguf = isinstance(self.opened.stored, GgufLayout)
        sliding = sliding_blocks(checkpoint, self.given or ()) if is_gguf else []  # llama.cpp crashes without any
        self.protected = self.opened.fixed.union(settings.protected(checkpoint.layers, checkpoint.name), sliding[:1])
        with self.durations("calibration windows"):
            self.calibration = self._calibrated()
        self.llama = self._source_in_llama()
        with self.durations("dense model"):
            self.student = Student(
                checkpoint,
                self.calibration.fit.inputs,
                self.calibration.select.inputs,
                effort=effort_of(settings),
                repair=not settings.no_repair,
                journal=journal,
                durations=self.durations,
                progress=progress,
            )
        self.search = Search(self.student, self.protected)

    def _describe_in_journal(self, model: Any) -> None:
        opened, followed = self.opened, self.followed
        about = {
            "version": __version__,
            "model": str(model) if isinstance(model, str | Path) else opened.checkpoint.name,
            "files": opened.files,
            "settings": self.settings.to_json(),
            "removed": None if followed is None else list(followed.removed),
            "window": [list(opened.start.before), list(opened.start.after)],
        }
        if not opened.files:
            about["digest of the weights"] = weights_digest(opened.checkpoint.model)
        self.journal.begin(about)

    def _calibrated(self) -> Calibration:
        opened = self.opened
        if isinstance(opened.read, GivenWindows):
            tokens = tokens_of(opened.checkpoint, opened.read.inputs)
            made = given_calibration(opened.read, calibration_sizes(self.settings), tokens)
        else:
            made = prepare_calibration(
                opened.checkpoint, opened.tokenizer, opened.read, opened.start,
                progress=self.progress, message=self.message,
            )  # fmt: skip
        digest = made.record.sha256
        self.journal.describe("digest of the calibration windows", digest)
        if self.followed is not None and self.followed.calibration.sha256 != digest:
            self.message("the calibration windows differ from those of the plan (another text, device or version)")
        return made

    def _source_in_llama(self) -> LlamaComparison | None:
        """Compare the source in llama.cpp with transformers, if the result is a GGUF file and llama.cpp is installed.

        A file that llama.cpp does not know is refused before any long work.
        """
        checkpoint = self.opened.checkpoint
        if not isinstance(self.opened.stored, GgufLayout) or checkpoint.source is None or not has_llama():
            return None
        self.progress(0, 1, "the source in llama.cpp")
        with self.durations("check in llama.cpp"):
            return compare_source(
                checkpoint.source.path, checkpoint.model, as_samples(self.calibration.certify.inputs, TEXT).main[0]
            )

    def counts(self) -> tuple[int, ...]:
        """Return the numbers of blocks to remove, each of which makes a model."""
        checkpoint, given = self.opened.checkpoint, self.given
        if given is not None:
            return (len(given),)
        found, layers = requested_counts(self.settings, checkpoint, self.opened.stored), checkpoint.layers
        left = layers - len(self.protected)
        if found[-1] > left:
            raise InputError(f"{found[-1]} blocks cannot be removed from {checkpoint.name}: {left} of {layers} may go")
        return found

    @property
    def given(self) -> Removed | None:
        """The blocks that a plan or the user names."""
        if self.followed is not None:
            return self.followed.removed
        return self.settings.layers_to_remove(self.opened.checkpoint.layers, self.opened.checkpoint.name)

    def sets(self, count: int) -> dict[str, Removed]:
        """Search for sets of `count` blocks; with given blocks, return them and what other methods choose."""
        with self.durations("search"):
            if self.given is None:
                self.search.remove_until(count)
                return self.search.sets(count)
            if reason := self.search.why_not(self.given):
                raise CheckpointError(reason)
            others = {} if self.followed is not None else self.search.peer_sets(count)
            return {GIVEN: self.given} | others

    def only_plan(self) -> PlanRecord:
        """Search and compare, without making a model."""
        (count,) = self.counts()
        sets = self.sets(count)
        with self.durations("repair and comparison"):
            removed, compared, _ = self.candidates.choose(sets, self.given)
        return self.plan(removed, compared)

    def finish(self, out: str | Path | None, overwrite: bool) -> list[FinishedModel]:
        """Make, measure and write the model of every size."""
        opened = self.opened
        counts = () if self._limit is not None else self.counts()
        with self.durations("certification"):
            self.certifier = Certifier(
                opened.checkpoint, self.calibration, self.settings.confidence, progress=self.progress
            )
        if self._limit is not None:
            with self._fresh_process(out) as process:
                shrunk, tested = largest_within(
                    self.search, self.candidates, self.certifier, self._limit, opened.stored, self.recovery
                )
                return [self._written(shrunk, tested, out, overwrite, process)]
        made = []
        for count in counts:
            folder = out if out is None or self.settings.sizes is None else sized_output(out, count)
            record = self._known_record(folder)
            if record is not None:
                made.append(FinishedModel(record, None))
                continue
            with self._fresh_process(folder) as process:
                shrunk = make_model(self.candidates, self.sets(count), opened.stored, self.given, self.recovery)
                made.append(self._written(shrunk, (), folder, overwrite, process))
        return made

    def _known_record(self, out: str | Path | None) -> ShrinkRecord | None:
        """Return the record of a model that the same run has written before it was interrupted."""
        if out is None or not has_written(self.journal, out):
            return None
        return check_shrink(load_document(record_file(out), SHRINK_ADVICE), str(out))

    @contextmanager
    def _fresh_process(self, out: str | Path | None) -> Iterator[FreshProcess | None]:
        """Start the process that will check a model which is written, so that it is ready when the model is."""
        if out is None or isinstance(self.opened.stored, GgufLayout):
            yield None
            return
        with FreshProcess(self.opened.checkpoint.model) as process:
            yield process

    def _check_room(self, found: ReadModel, makes: str) -> None:
        """Say what the run needs; raise if the disk has no room for what it writes."""
        out, device = None, found.whole.device if found.source is None else found.placement.torch_device()
        if makes in (DIRECTORY, GGUF) and self.journal.folder is not None:
            out = str(self.journal.folder).removesuffix(".partial")
        room = shrink_room(found, self.settings, None if self.followed is None else self.followed.removed)
        if out is not None and not self.journal.entries:  # an interrupted run has written a part already
            require_room(out, room.disk)
        self.message(room.sentence(device, out))

    @cached_property
    def amount(self) -> Amount | None:
        """How long the smaller model is trained; None: not at all.

        By default it is trained on a GPU, but not to find the largest size within a limit, which makes many models.
        """
        settings, checkpoint = self.settings, self.opened.checkpoint
        by_default = AUTO if checkpoint.device.type == "cuda" and self._limit is None else OFF
        amount = amount_of(settings.recover or by_default)
        trains = not settings.no_repair and checkpoint.stream is None and settings.device_map is None
        return amount if trains or settings.recover not in (None, AUTO) else None

    @cached_property
    def recovery(self) -> Recovery | None:
        """What the smaller model is trained on."""
        opened, settings, read, amount = self.opened, self.settings, self.opened.read, self.amount
        if amount is None:
            return None
        if self.evaluation is None:
            checkpoint = opened.checkpoint
            self.evaluation = self._prepared(tasks_after(None, checkpoint.device, checkpoint.objective))
        with self.durations("training windows"):
            if isinstance(read, GivenWindows):
                return recovery_on_windows(self.calibration, amount, settings.seed)
            return recovery_on_text(
                opened.checkpoint, opened.tokenizer, read.request.texts, settings.general, self.calibration,
                opened.start, amount, settings.seed, self.journal, self.progress, self.message,
            )  # fmt: skip

    @cached_property
    def candidates(self) -> Candidates:
        """How sets of blocks are compared.

        If a recovery follows, on a GPU after a short one of each set. Otherwise after least squares, and the best one
        is then trained on the windows to fit.
        """
        student, checkpoint = self.student, self.opened.checkpoint
        if self.recovery is not None:
            trial = replace(self.recovery, amount=self.recovery.amount.short, apart=None)
            return Candidates(
                student, refits=False, trial=trial if checkpoint.device.type == "cuda" else None,
                observe=None if self.evaluation is None else self._observe,
            )  # fmt: skip
        if not student.repairs or checkpoint.stream is not None:
            return Candidates(student)
        needed, free = TRAINING * parameter_count(checkpoint.model), free_memory(checkpoint.device)
        if needed > free and checkpoint.device.type == "cpu":
            note = f"the repair did not train weights: this needs {size_text(needed)} of memory"
            return Candidates(student, notes=[f"{note}, and {size_text(free)} are free"])
        steps = student.effort.steps * (1 if checkpoint.objective == "loss" else HEADLESS)
        tokens = int(as_samples(self.calibration.fit.inputs, checkpoint.reads).main.shape[1])
        amount = Amount(tokens=steps * tokens * step_windows(len(student.fit.inputs), tokens))
        return Candidates(student, training=recovery_on_windows(self.calibration, amount, self.settings.seed))

    def _recovery_advice(self) -> tuple[str, ...]:
        """Say how to train, where a language model could have been trained and was not."""
        is_text = self.opened.checkpoint.objective == "loss"
        is_possible = is_text and self.student.repairs and self.settings.recover is None
        if self.amount is not None or not is_possible:
            return ()
        return (
            "the smaller model was not trained after the removal; --recover "
            f"{AUTO_TOKENS // 10**6}M trains it, and --recover 30min takes as long as it says",
        )

    @property
    def _limit(self) -> float | None:
        return self.settings.max_increase if self.followed is None else None  # a plan has its size

    def _written(
        self,
        shrunk: ShrunkModel | None,
        tested: tuple[TestedSize, ...],
        out: str | Path | None,
        overwrite: bool,
        process: FreshProcess | None,
    ) -> FinishedModel:
        """Describe a model, measure it, and write it if there is a directory for it."""
        record = self._described(shrunk, tested)
        if shrunk is None:
            return FinishedModel(record, None)
        certifier, opened = self.certifier, self.opened
        record = msgspec.structs.replace(record, evaluation=self._evaluated(shrunk.model))
        if out is None:
            with self.durations("certification"):
                record = certifier.certified(record, certifier.run(shrunk.model))
            return FinishedModel(self._finished(record), shrunk.model)
        overwrite = overwrite or has_written(self.journal, out)
        if isinstance(opened.stored, GgufLayout):
            record = write_shrunk_gguf(
                shrunk, record, certifier, opened, out,
                overwrite=overwrite, journal=self.journal, finish=self._finished, durations=self.durations,
                source=self.llama,
            )  # fmt: skip
        else:
            record = write_shrunk(
                shrunk.model, record, certifier, opened.checkpoint, opened.tokenizer, out,
                overwrite=overwrite, journal=self.journal, finish=self._finished, durations=self.durations,
                process=process,
            )  # fmt: skip
        self.message(f"model written to {out}")
        return FinishedModel(record, shrunk.model)

    def _prepared(self, tasks: str | None) -> PreparedEvaluation | None:
        asked = EvaluateOptions(tasks=tasks, confidence=self.settings.confidence)
        return None if tasks is None else prepare_evaluation(asked, self.message)

    def _evaluated(self, model: Any) -> EvaluateRecord | None:
        """Run the tasks on the dense model, on the shrunk one before its recovery, and on the one that is written."""
        started = time.perf_counter()
        if self.evaluation is None:
            return None
        smaller = wrap(as_dtype(model, self.opened.checkpoint.model.dtype), SHRUNK)
        with self.durations("tasks"):
            found = [self._dense_answers, *self._unrecovered, self._answers(smaller)]
        notes = calibration_notes(SHRUNK, self.calibration.record, self.evaluation)
        notes += fall_warnings(*found[1:]) if len(found) > 2 else []
        return evaluation_record(self.evaluation, found, notes, time.perf_counter() - started)

    def _observe(self, smaller: Checkpoint) -> None:
        """Run the tasks on the shrunk model before its recovery."""
        with self.durations("tasks"):
            self._unrecovered = [self._answers(replace(smaller, name=UNRECOVERED))]

    @cached_property
    def _dense_answers(self) -> ModelAnswers:
        return self._answers(self.opened.checkpoint)

    def _answers(self, checkpoint: Checkpoint) -> ModelAnswers:
        work, opened = self.evaluation, self.opened
        assert work is not None
        name = checkpoint.name
        return measure_model(work, checkpoint, opened.tokenizer, name, opened.start, self.progress, self.message)

    def _finished(self, record: ShrinkRecord) -> ShrinkRecord:
        """Return a record with the durations and with warnings about what was measured."""
        notes = (*shrink_warnings(record), *record.notes)
        seconds = time.perf_counter() - self.started
        return msgspec.structs.replace(record, notes=notes, durations=self.durations.seconds, seconds=seconds)

    def plan(self, removed: Removed, candidates: tuple[CandidateRecord, ...]) -> PlanRecord:
        """Return the plan of this run, or the one that it follows."""
        if self.followed is not None:
            return self.followed
        checkpoint = self.opened.checkpoint
        return PlanRecord(
            version=__version__,
            model=checkpoint.name if checkpoint.source is None else checkpoint.source.target,
            family=str(checkpoint.config.model_type),
            files=self.opened.files,
            layers=checkpoint.layers,
            removed=removed,
            search=self.search.steps,
            candidates=candidates,
            settings=self.settings,
            calibration=self.calibration.record,
            hub=None if checkpoint.source is None else checkpoint.source.hub,
        )

    def _described(self, shrunk: ShrunkModel | None, tested: tuple[TestedSize, ...]) -> ShrinkRecord:
        """Describe a run before its losses are known; measures the speed of both models.

        There is no shrunk model if no size stays within the limit.
        """
        checkpoint, certifier = self.opened.checkpoint, self.certifier
        made = shrunk or ShrunkModel(None, (), (), (), None, 0.0)
        after = None if shrunk is None else parameter_count(shrunk.model)
        source = checkpoint.source
        record = ShrinkRecord(
            version=__version__,
            name=checkpoint.name,
            objective=checkpoint.objective,
            layers_before=checkpoint.layers,
            layers_after=checkpoint.layers - len(made.removed),
            removed=made.removed,
            repaired=made.repaired,
            **certifier.uncertified(self._limit, tested),
            speed=None,
            parameters=BeforeAfter(before=parameter_count(checkpoint.model), after=after),
            bytes=BeforeAfter(before=None if source is None else weight_bytes(source), after=None),
            memory=None,
            curve=() if shrunk is None else self.search.curve(made.removed, made.objective),
            stages=made.stages,
            recovery=made.recovery,
            reload=None,
            plan=self.plan(made.removed, made.candidates),
            notes=(),
            versions={
                "depthgauge": __version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "transformers": str(transformers().__version__),
                "machine": platform.machine(),
            },
            seconds=time.perf_counter() - self.started,
            out=None,
        )
        if shrunk is None:
            return record
        notes = (*shrink_notes(record, self.opened, shrunk), *self.calibration.notes)
        notes += (*self.search.refusals, *self.candidates.notes)
        notes += self._recovery_advice() if checkpoint.stream is None else ()
        if checkpoint.stream is not None or isinstance(self.opened.stored, GgufLayout):
            return msgspec.structs.replace(record, notes=notes)  # llama.cpp times a GGUF file when it is written
        self.progress(0, 1, "speed of both models")
        dense, smaller = checkpoint.model, as_dtype(shrunk.model, checkpoint.model.dtype)
        with self.durations("speed"):
            speed, memory, kind = compare_speed(dense, smaller, certifier.inputs[:1])
        notes += (f"memory: {kind}",)
        return msgspec.structs.replace(record, speed=speed, memory=memory, notes=notes)
