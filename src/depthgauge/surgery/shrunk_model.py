"""Make shrunk models: with given blocks removed, or the smallest one whose loss stays within a limit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from depthgauge.results.record import finite
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.results.shrink_record import CandidateRecord, HealRecord, RepairStage, TestedSize
from depthgauge.surgery.candidates import Candidates, Losses, difference, in_memory, put_weights
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.distill import distill
from depthgauge.surgery.extract import cast
from depthgauge.surgery.gguf_layout import EncodedTensor, GgufLayout
from depthgauge.surgery.gguf_rounding import round_changed
from depthgauge.surgery.shrinker import Removed, Shrinker

_BEYOND = 2.0
"""`--max-increase a` searches until the objective on the selection windows grows by more than this times a."""
HEAL_TOKENS = 8192
"""Tokens per step of healing."""
ROUND = 50
"""Steps of `--heal auto` between two measurements."""
MOST_ROUNDS = 40


@dataclass(frozen=True, eq=False)
class ShrunkModel:
    """A shrunk model and how it was made.

    - `model`: the transformers model
    - `removed`: the removed blocks
    - `candidates`: the sets of blocks that it was compared with, the best first
    - `stages`, `heal`: what changed the weights
    - `objective`: the objective on the selection windows
    - `encoded`: for a GGUF file, the bytes of the changed tensors, by the names in the source file
    """

    model: Any
    removed: Removed
    candidates: tuple[CandidateRecord, ...]
    stages: tuple[RepairStage, ...]
    heal: HealRecord | None
    objective: float
    encoded: Mapping[str, EncodedTensor] = field(default_factory=dict)

    @property
    def repaired(self) -> bool:
        """Whether the repair has changed weights."""
        return any(stage.kept for stage in self.stages)


def make_model(
    candidates: Candidates,
    sets: Mapping[str, Removed],
    settings: ShrinkOptions,
    stored: torch.dtype | GgufLayout | None,
    given: Removed | None = None,
) -> ShrunkModel:
    """Choose one of several sets of blocks, repair and heal the others, and return the model as it is written.

    `stored` is the dtype in which it is written, or the GGUF file whose types the weights are rounded to. None keeps
    the dtype of the dense model, which has its original weights afterwards. The set `given` is removed, if there is
    one, and the others are shown beside it.
    """
    shrinker = candidates.shrinker
    with shrinker.durations("repair and comparison"):
        removed, compared = candidates.choose(sets, given)
        made = candidates.repair(removed)
    losses, healed = made.losses, None
    if settings.heal is not None:
        with shrinker.durations("healing"):
            losses, healed = _heal(shrinker, removed, losses, settings)
    stages, encoded = made.stages, dict[str, EncodedTensor]()
    if isinstance(stored, GgufLayout):
        with shrinker.durations("rounding"):
            encoded, losses, rounding = _round(shrinker, removed, losses, stored)
        if rounding is not None and not rounding.kept:  # all changes are undone
            stages = tuple(msgspec.structs.replace(stage, kept=False) for stage in stages)
            healed = None if healed is None else msgspec.structs.replace(healed, kept=False)
        stages += () if rounding is None else (rounding,)
    model = shrinker.model()
    shrinker.restore()
    model = cast(model, stored) if isinstance(stored, torch.dtype) else model
    return ShrunkModel(model, removed, compared, stages, healed, float(losses.mean()), encoded)


def _round(
    shrinker: Shrinker, removed: Removed, before: Losses, layout: GgufLayout
) -> tuple[dict[str, EncodedTensor], Losses, RepairStage | None]:
    """Round the changed weights to the types of a file; put the original ones back if they are better than the result.

    Returns the bytes of the changed tensors, the objective on the selection windows, and what was done, if anything.
    """
    bare = shrinker.losses_without([removed])[removed]  # known, so that no weight changes here
    encoded = round_changed(shrinker, layout)
    if not encoded:
        return encoded, before, None
    after = shrinker.losses()
    is_kept = float(after.mean()) < float(bare.mean())
    kinds = sorted({one.kind.name for one in encoded.values() if one.data.ndim > 1})
    stage = RepairStage(
        name=f"rounding to {', '.join(kinds)}", before=finite(before.mean()), after=finite(after.mean()),
        error=finite(difference(after, before)[1]), kept=is_kept,
    )  # fmt: skip
    if is_kept:
        return encoded, after, stage
    shrinker.keep_all_but(removed)
    return {}, bare, stage


def _heal(shrinker: Shrinker, removed: Removed, before: Losses, settings: ShrinkOptions) -> tuple[Losses, HealRecord]:
    """Train the weights of the kept blocks, but not `BlockRunner.shared`; undo it if it gains less than its error.

    With `auto`, it is done in rounds, and the last round is undone that does not gain more than its standard error.
    """
    runner = shrinker.runner
    kept = dict.fromkeys(weight for layer in shrinker.kept for weight in runner.blocks[layer].parameters())
    weights = [weight for weight in kept if weight not in runner.shared]
    shrinker.remember(weights)
    rounds = [ROUND] * MOST_ROUNDS if settings.heal == "auto" else [int(settings.heal or 0)]
    losses, done = before, 0
    for number, steps in enumerate(rounds):
        before_round = in_memory(weights)
        saved = shrinker.journal.file("heal", (*removed, number))
        distill(
            shrinker, 0, weights, steps=steps, tokens=HEAL_TOKENS, seed=settings.seed + number, saved=saved,
            label="healing" if len(rounds) == 1 else f"healing, round {number + 1}",
        )  # fmt: skip
        after = shrinker.losses()
        gain, error = difference(losses, after)
        if not gain > error:
            put_weights(weights, before_round)
            break
        losses, done = after, done + steps
    reached = after if done == 0 else losses
    record = HealRecord(
        steps=done or steps, before=finite(before.mean()), after=finite(reached.mean()), kept=done > 0
    )  # fmt: skip
    return losses, record


def largest_within(
    candidates: Candidates,
    certifier: Certifier,
    limit: float,
    settings: ShrinkOptions,
    stored: torch.dtype | GgufLayout | None,
) -> tuple[ShrunkModel | None, tuple[TestedSize, ...]]:
    """Test sizes from gentle to harsh on the certify windows, and return the last model before one fails.

    A size passes if its bound is at most the limit. The test stops at the first size that fails. A wrong result
    requires that the first size whose increase exceeds the limit passes, and one bound fails with probability at most
    1 − confidence. No correction for the number of sizes is needed, because the selection windows alone decide their
    order. The result is the model, or None if no size passes, and the tested sizes.
    """
    shrinker = candidates.shrinker
    with shrinker.durations("search"):
        shrinker.remove_until(len(shrinker.runner) - 1, _BEYOND * limit)
    best: ShrunkModel | None = None
    tested: tuple[TestedSize, ...] = ()
    for size in range(1, len(shrinker.steps) + 1):
        with shrinker.durations("search"):
            sets = shrinker.sets(size)
        made = make_model(candidates, sets, settings, stored)
        bound = certifier.bound(certifier.measure(made.model, f"size {size}")).increase
        passed = bound is not None and bound <= limit
        tested += (TestedSize(removed=size, bound=bound, passed=passed),)
        if not passed:
            break
        best = made
    return best, tested
