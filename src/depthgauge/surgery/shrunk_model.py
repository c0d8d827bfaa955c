"""Make shrunk models: with given blocks removed, or the smallest one whose loss stays within a limit."""

from dataclasses import dataclass
from typing import Any

import torch

from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.results.shrink_record import HealRecord, RepairStep, TestedSize
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.extract import cast
from depthgauge.surgery.heal import heal
from depthgauge.surgery.shrinker import Shrinker

_BEYOND = 2.0
"""`--max-increase a` searches until the objective on the selection windows grows by more than this times a."""


@dataclass(frozen=True, eq=False)
class ShrunkModel:
    """A shrunk model and how it was made.

    - `model`: the transformers model
    - `removed`: the removed blocks
    - `repair`, `heal`: what changed the weights
    - `objective`: the objective on the selection windows after the repair
    """

    model: Any
    removed: tuple[int, ...]
    repair: tuple[RepairStep, ...]
    heal: HealRecord | None
    objective: float

    @property
    def repaired(self) -> bool:
        """Whether the repair has changed weights."""
        return any(step.step for step in self.repair)


def make_model(
    shrinker: Shrinker, removed: tuple[int, ...], settings: ShrinkOptions, stored: torch.dtype | None
) -> ShrunkModel:
    """Remove blocks, repair and heal the others, and return the model in the dtype in which it is written.

    `stored` is that dtype; None keeps the one of the dense model, which has its original weights afterwards.
    """
    repair, objective = shrinker.repair(removed)
    model = shrinker.model()
    shrinker.restore()
    healed = None if settings.heal is None else _heal(shrinker, model, removed, objective, settings.heal, settings.seed)
    return ShrunkModel(model if stored is None else cast(model, stored), removed, repair, healed, objective)


def _heal(shrinker: Shrinker, model: Any, removed: tuple[int, ...], before: float, steps: int, seed: int) -> HealRecord:
    """Train a model in place towards the dense one; undo it unless the objective on the selection windows falls."""
    folder = shrinker.journal.folder
    original = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    heal(
        model,
        shrinker.checkpoint.model,
        shrinker.fit.ids,
        steps=steps,
        loss=shrinker.checkpoint.objective == "loss",
        seed=seed,
        saved=None if folder is None else folder / f"heal-{'-'.join(map(str, removed))}.pt",
        progress=shrinker.progress,
    )
    after = shrinker.objective.of_model(model)
    if not after < before:
        model.load_state_dict(original)
    return HealRecord(steps=steps, before=before, after=after, kept=after < before)


def largest_within(
    shrinker: Shrinker, certifier: Certifier, limit: float, settings: ShrinkOptions, stored: torch.dtype | None
) -> tuple[ShrunkModel | None, tuple[TestedSize, ...]]:
    """Test sizes from gentle to harsh on the certify windows, and return the last model before one fails.

    A size passes if its bound is at most the limit. The test stops at the first size that fails. A wrong result
    requires that the first size whose increase exceeds the limit passes, and one bound fails with probability at most
    1 − confidence. No correction for the number of sizes is needed, because the selection windows alone decide their
    order. The result is the model, or None if no size passes, and the tested sizes.
    """
    shrinker.remove_until(len(shrinker.runner) - 1, _BEYOND * limit)
    order = [step.layer for step in shrinker.steps]
    best: ShrunkModel | None = None
    tested: tuple[TestedSize, ...] = ()
    for size in range(1, len(order) + 1):
        made = make_model(shrinker, tuple(sorted(order[:size])), settings, stored)
        bound = certifier.bound(certifier.measure(made.model, f"size {size}")).increase
        passed = bound is not None and bound <= limit
        tested += (TestedSize(removed=size, bound=bound, passed=passed),)
        if not passed:
            break
        best = made
    return best, tested
