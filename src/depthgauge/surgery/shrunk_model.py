"""Make shrunk models: with given blocks removed, or the smallest one whose loss stays within a limit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from depthgauge.recovery.distillation import TrainingMemoryError
from depthgauge.recovery.recover_model import Recovery
from depthgauge.results.record import finite
from depthgauge.results.recover_record import RecoveryRecord
from depthgauge.results.shrink_record import CandidateRecord, RepairStage, TestedSize
from depthgauge.surgery.block_search import Search
from depthgauge.surgery.candidates import Candidates, Losses, block_weights, difference, train
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.extract import cast
from depthgauge.surgery.gguf_layout import EncodedTensor, GgufLayout
from depthgauge.surgery.gguf_rounding import round_changed
from depthgauge.surgery.student import Removed, Student

_BEYOND = 2.0
"""`--max-increase a` searches until the objective on the selection windows grows by more than this times a."""


@dataclass(frozen=True, eq=False)
class ShrunkModel:
    """A shrunk model and how it was made.

    - `model`: the transformers model
    - `removed`: the removed blocks
    - `candidates`: the sets of blocks that it was compared with, the best first
    - `stages`, `recovery`: what changed the weights
    - `objective`: the objective on the selection windows
    - `encoded`: for a GGUF file, the bytes of the changed tensors, by the names in the source file
    """

    model: Any
    removed: Removed
    candidates: tuple[CandidateRecord, ...]
    stages: tuple[RepairStage, ...]
    recovery: RecoveryRecord | None
    objective: float
    encoded: Mapping[str, EncodedTensor] = field(default_factory=dict)

    @property
    def repaired(self) -> bool:
        """Whether the repair has changed weights."""
        return any(stage.kept for stage in self.stages)


def make_model(
    candidates: Candidates,
    sets: Mapping[str, Removed],
    stored: torch.dtype | GgufLayout | None,
    given: Removed | None = None,
    recovery: Recovery | None = None,
) -> ShrunkModel:
    """Choose one of several sets of blocks, repair and train the others, and return the model as it is written.

    `stored` is the dtype in which it is written, or the GGUF file whose types the weights are rounded to. None keeps
    the dtype of the dense model, which has its original weights afterwards. The set `given` is removed, if there is
    one, and the others are shown beside it.
    """
    student = candidates.student
    with student.durations("repair and comparison"):
        removed, compared, made = candidates.choose(sets, given)
    losses, trained = made.losses, None
    if recovery is not None:
        with student.durations("recovery"):
            folder = student.journal.directory("recovery", removed)
            try:
                losses, trained = train(student, losses, block_weights(student), recovery, folder)
            except TrainingMemoryError as error:
                if not recovery.amount.stops:  # this much was asked for
                    raise
                candidates.notes.append(f"the smaller model was not recovered: {error}")
    stages, encoded = made.stages, dict[str, EncodedTensor]()
    if isinstance(stored, GgufLayout):
        with student.durations("rounding"):
            encoded, losses, rounding = _round(student, removed, losses, stored)
        if rounding is not None and not rounding.kept:  # all changes are undone
            stages = tuple(msgspec.structs.replace(stage, kept=False) for stage in stages)
            trained = None if trained is None else msgspec.structs.replace(trained, kept=False)
        stages += () if rounding is None else (rounding,)
    model = student.model()
    student.restore()
    model = cast(model, stored) if isinstance(stored, torch.dtype) else model
    return ShrunkModel(model, removed, compared, stages, trained, float(losses.mean()), encoded)


def _round(
    student: Student, removed: Removed, before: Losses, layout: GgufLayout
) -> tuple[dict[str, EncodedTensor], Losses, RepairStage | None]:
    """Round the changed weights to the types of a file; put the original ones back if they are better than the result.

    Returns the bytes of the changed tensors, the objective on the selection windows, and what was done, if anything.
    """
    bare = student.losses_without([removed])[removed]  # known, so that no weight changes here
    encoded = round_changed(student, layout)
    if not encoded:
        return encoded, before, None
    after = student.losses()
    is_kept = float(after.mean()) < float(bare.mean())
    kinds = sorted({one.kind.name for one in encoded.values() if one.data.ndim > 1})
    stage = RepairStage(
        name=f"rounding to {', '.join(kinds)}", before=finite(before.mean()), after=finite(after.mean()),
        error=finite(difference(after, before)[1]), kept=is_kept,
    )  # fmt: skip
    if is_kept:
        return encoded, after, stage
    student.keep_all_but(removed)
    return {}, bare, stage


def largest_within(
    search: Search,
    candidates: Candidates,
    certifier: Certifier,
    limit: float,
    stored: torch.dtype | GgufLayout | None,
    recovery: Recovery | None = None,
) -> tuple[ShrunkModel | None, tuple[TestedSize, ...]]:
    """Test sizes from gentle to harsh on the certify windows, and return the last model before one fails.

    A size passes if its bound is at most the limit. The test stops at the first size that fails. A wrong result
    requires that the first size whose increase exceeds the limit passes, and one bound fails with probability at most
    1 − confidence. No correction for the number of sizes is needed, because the selection windows alone decide their
    order. The result is the model, or None if no size passes, and the tested sizes.
    """
    student = candidates.student
    with student.durations("search"):
        search.remove_until(len(student.runner) - 1, _BEYOND * limit)
    best: ShrunkModel | None = None
    tested: tuple[TestedSize, ...] = ()
    for size in range(1, len(search.steps) + 1):
        with student.durations("search"):
            sets = search.sets(size)
        made = make_model(candidates, sets, stored, recovery=recovery)
        bound = certifier.bound(certifier.measure(made.model, f"size {size}")).increase
        passed = bound is not None and bound <= limit
        tested += (TestedSize(removed=size, bound=bound, passed=passed),)
        if not passed:
            break
        best = made
    return best, tested
