"""The first stages of a run of `shrink`: load the model, cut its windows, and choose what the rest is trained on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from depthgauge._version import __version__
from depthgauge.base.errors import InputError
from depthgauge.base.format import duration, size_text
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Durations, Step
from depthgauge.checkpoints.blocks.block_runner import tokens_of
from depthgauge.checkpoints.inputs.found_data import TEXT
from depthgauge.checkpoints.inputs.windows import as_samples
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.source.model_files import Source
from depthgauge.checkpoints.weights.load import Checkpoint, parameter_count
from depthgauge.checkpoints.weights.stored_weights import free_memory, weights_digest
from depthgauge.recovery.distillation import TRAINING, step_windows
from depthgauge.recovery.recover_model import Recovery
from depthgauge.results.recover_record import AUTO, AUTO_TOKENS, OFF, Amount, amount_of
from depthgauge.results.shrink_record import CandidateRecord, PlanRecord, ShrinkOptions
from depthgauge.surgery.calibration import Calibration, CutTexts, given_calibration, prepare_calibration
from depthgauge.surgery.candidates import GIVEN, Candidates, Search
from depthgauge.surgery.gguf_layout import GgufLayout, sliding_blocks
from depthgauge.surgery.open_model import (
    OpenedModel,
    ReadModel,
    calibration_sizes,
    open_model,
    read_model,
    requested_counts,
)
from depthgauge.surgery.student import HEADLESS, Removed, Student, effort_of
from depthgauge.surgery.verify import LlamaComparison, compare_source, has_llama
from depthgauge.surgery.write_model import require_room
from depthgauge.workflows.needed_room import shrink_room
from depthgauge.workflows.recover_run import recovery_on_text, recovery_on_windows

PLAN, MEMORY, DIRECTORY, GGUF = "plan", "memory", "directory", "gguf"
"""What a run ends with: a plan, a model in memory, or one that is written and checked."""
TRAINING_PASSES = 4
"""What training on a window costs in forward passes: one of the teacher, and three of the student and its gradients."""


@dataclass(frozen=True, eq=False)
class Run:
    """What a command was asked to do, and where it reports.

    - `settings`, `followed`: the options, and the plan that it follows
    - `journal`: the finished steps of an interrupted run
    - `progress`, `message`: called as the work advances, and with sentences
    - `durations`, `started`: the seconds of each part, and when it began
    """

    settings: ShrinkOptions
    followed: PlanRecord | None
    journal: Journal
    progress: Step
    message: Callable[[str], None]
    durations: Durations = field(default_factory=Durations)
    started: float = field(default_factory=time.perf_counter)

    @property
    def limit(self) -> float | None:
        """How much the loss may grow, if this decides how many blocks are removed; a plan has its blocks."""
        return self.settings.max_increase if self.followed is None else None

    def named_blocks(self, checkpoint: Checkpoint) -> Removed | None:
        """Return the blocks that a plan or the user names."""
        if self.followed is not None:
            return self.followed.removed
        return self.settings.layers_to_remove(checkpoint.layers, checkpoint.name)


@dataclass(frozen=True, eq=False)
class Workbench:
    """A model that was loaded and has read its calibration windows.

    - `opened`, `windows`: the model, and the windows to fit, to select and to certify
    - `student`, `search`: the model while it is being made, and the search for blocks to remove
    - `llama`: what llama.cpp makes of the source of a GGUF file; None without llama.cpp
    """

    opened: OpenedModel
    windows: Calibration
    student: Student
    search: Search
    llama: LlamaComparison | None


def begin(run: Run, model: Any, source: Source | None, tokenizer: Any, makes: str) -> Workbench:
    """Load a model, and run it on its calibration windows; what it needs is checked first.

    Use the student of the result as a context manager.
    """
    settings = run.settings
    with run.durations("loading"):
        described = read_model(model, source, settings, tokenizer, run.followed, makes == GGUF, run.message)
        _check_room(run, described, makes)
        opened = open_model(described, settings, run.followed, run.message)
    _describe_in_journal(run, model, opened)
    checkpoint = opened.checkpoint
    is_gguf = isinstance(opened.stored, GgufLayout)
    named = run.named_blocks(checkpoint) or ()
    sliding = sliding_blocks(checkpoint, named) if is_gguf else []  # llama.cpp crashes without
    protected = opened.fixed.union(settings.protected(checkpoint.layers, checkpoint.name), sliding[:1])
    with run.durations("calibration windows"):
        windows = _calibrated(run, opened)
    llama = _source_in_llama(run, opened, windows)
    with run.durations("dense model"):
        student = Student(
            checkpoint, windows.fit.inputs, windows.select.inputs, effort=effort_of(settings),
            repair=settings.repairs, journal=run.journal, durations=run.durations, progress=run.progress,
        )  # fmt: skip
    return Workbench(opened, windows, student, Search(student, protected), llama)


def _check_room(run: Run, described: ReadModel, makes: str) -> None:
    """Say what the run needs; raise if the disk has no room for what it writes."""
    model = described.model
    device = model.whole.device if model.source is None else model.placement.torch_device()
    out = None
    if makes in (DIRECTORY, GGUF) and run.journal.folder is not None:
        out = str(run.journal.folder).removesuffix(".partial")
    room = shrink_room(described, run.settings, None if run.followed is None else run.followed.removed)
    if out is not None and not run.journal.entries:  # an interrupted run has written a part already
        require_room(out, room.disk)
    run.message(room.sentence(device, out))


def _describe_in_journal(run: Run, model: Any, opened: OpenedModel) -> None:
    about = {
        "version": __version__,
        "model": str(model) if isinstance(model, str | Path) else opened.checkpoint.name,
        "files": opened.files,
        "settings": run.settings.to_json(),
        "removed": None if run.followed is None else list(run.followed.removed),
        "window": [list(opened.start.before), list(opened.start.after)],
    }
    if not opened.files:
        about["digest of the weights"] = weights_digest(opened.checkpoint.model)
    run.journal.begin(about)


def _calibrated(run: Run, opened: OpenedModel) -> Calibration:
    """Divide the windows into those to fit, to select and to certify; some are sampled from the model."""
    if isinstance(opened.read, CutTexts):
        made = prepare_calibration(
            opened.checkpoint, opened.tokenizer, opened.read, opened.start,
            progress=run.progress, message=run.message,
        )  # fmt: skip
    else:
        tokens = tokens_of(opened.checkpoint, opened.read.inputs)
        made = given_calibration(opened.read, calibration_sizes(run.settings), tokens)
    digest = made.record.sha256
    run.journal.describe("digest of the calibration windows", digest)
    if run.followed is not None and run.followed.calibration.sha256 != digest:
        run.message("the calibration windows differ from those of the plan (another text, device or version)")
    return made


def _source_in_llama(run: Run, opened: OpenedModel, windows: Calibration) -> LlamaComparison | None:
    """Compare the source in llama.cpp with transformers, if the result is a GGUF file and llama.cpp is installed.

    A file that llama.cpp does not know is refused before any long work.
    """
    source = opened.checkpoint.source
    if not isinstance(opened.stored, GgufLayout) or source is None or not has_llama():
        return None
    run.progress(0, 1, "the source in llama.cpp")
    with run.durations("check in llama.cpp"):
        return compare_source(source.path, opened.checkpoint.model, as_samples(windows.certify.inputs).main[0])


def requested_sizes(run: Run, work: Workbench) -> tuple[int, ...]:
    """Return the numbers of blocks to remove, each of which makes a model."""
    checkpoint = work.opened.checkpoint
    named, layers = run.named_blocks(checkpoint), checkpoint.layers
    if named is not None:
        return (len(named),)
    counts, left = requested_counts(run.settings, checkpoint, work.opened.stored), len(work.search.allowed)
    if counts[-1] > left:
        raise InputError(f"{counts[-1]} blocks cannot be removed from {checkpoint.name}: {left} of {layers} may go")
    return counts


def found_sets(run: Run, work: Workbench, count: int) -> dict[str, Removed]:
    """Search for sets of `count` blocks; with given blocks, return them and what other methods choose."""
    named = run.named_blocks(work.opened.checkpoint)
    with run.durations("search"):
        if named is None:
            work.search.remove_until(count)
            return work.search.sets(count)
        if reason := work.search.why_not(named):
            raise CheckpointError(reason)
        others = {} if run.followed is not None else work.search.peer_sets(count)
        return {GIVEN: named} | others


def training_amount(run: Run, checkpoint: Checkpoint) -> Amount | None:
    """Return how long the smaller model is trained; None: not at all.

    By default it is trained on a GPU, but not to find the largest size within a limit, which makes many models.
    """
    settings = run.settings
    by_default = AUTO if checkpoint.device.type == "cuda" and run.limit is None else OFF
    amount = amount_of(settings.recover or by_default)
    trains = checkpoint.stream is None and not settings.is_spread
    return amount if trains or settings.recover not in (None, AUTO) else None


def training_advice(run: Run, work: Workbench) -> tuple[str, ...]:
    """Say what training would take, where a language model could have been trained and was not."""
    checkpoint, student = work.opened.checkpoint, work.student
    is_text = checkpoint.objective == "loss" and checkpoint.stream is None
    if not is_text or not student.repairs or run.settings.recover is not None or training_amount(run, checkpoint):
        return ()
    pace = run.durations.seconds["dense model"] / (len(student.fit.inputs) + len(student.select.inputs))
    passes = TRAINING_PASSES * AUTO_TOKENS / work.windows.record.window
    return (
        f"the smaller model was not trained after the removal: at the pace of this run, --recover "
        f"{AUTO_TOKENS // 10**6}M would take about {duration(passes * pace)}, and --recover 30min takes as long as it "
        "says",
    )


def recovery_of(run: Run, work: Workbench, amount: Amount) -> Recovery:
    """Return what the smaller model is trained on."""
    opened, settings = work.opened, run.settings
    with run.durations("training windows"):
        if opened.data.kind is not TEXT:
            return recovery_on_windows(work.windows, amount, settings.seed)
        return recovery_on_text(
            opened.checkpoint, opened.tokenizer, opened.data.texts, settings.general, work.windows,
            opened.start, amount, settings.seed, run.journal, run.progress, run.message,
        )  # fmt: skip


def candidates_of(
    run: Run, work: Workbench, recovery: Recovery | None, observers: Sequence[Callable[[Checkpoint], None]] = ()
) -> Candidates:
    """Return how sets of blocks are compared.

    If a recovery follows, on a GPU after a short one of each set; `observers` are called with the smaller model before
    the recovery. Otherwise after least squares, and the best one is then trained on the windows to fit.
    """
    student, checkpoint = work.student, work.opened.checkpoint
    if recovery is not None:
        trial = replace(recovery, amount=recovery.amount.short, apart=None)
        return Candidates(
            student, refits=False, trial=trial if checkpoint.device.type == "cuda" else None, observers=observers
        )
    if not student.repairs or checkpoint.stream is not None:
        return Candidates(student)
    needed, free = TRAINING * parameter_count(checkpoint.model), free_memory(checkpoint.device)
    if needed > free and checkpoint.device.type == "cpu":
        note = f"the repair did not train weights: this needs {size_text(needed)} of memory"
        return Candidates(student, notes=[f"{note}, and {size_text(free)} are free"])
    steps = student.effort.steps * (1 if checkpoint.objective == "loss" else HEADLESS)
    tokens = int(as_samples(work.windows.fit.inputs, checkpoint.reads).main.shape[1])
    amount = Amount(tokens=steps * tokens * step_windows(len(student.fit.inputs), tokens))
    return Candidates(student, training=recovery_on_windows(work.windows, amount, run.settings.seed))


def plan_of(run: Run, work: Workbench, removed: Removed, compared: tuple[CandidateRecord, ...]) -> PlanRecord:
    """Return the plan of a run, or the one that it follows."""
    if run.followed is not None:
        return run.followed
    checkpoint = work.opened.checkpoint
    return PlanRecord(
        version=__version__,
        model=checkpoint.name if checkpoint.source is None else checkpoint.source.target,
        family=str(checkpoint.config.model_type),
        files=work.opened.files,
        layers=checkpoint.layers,
        removed=removed,
        search=work.search.steps,
        candidates=compared,
        settings=run.settings,
        calibration=work.windows.record,
        hub=None if checkpoint.source is None else checkpoint.source.hub,
    )
