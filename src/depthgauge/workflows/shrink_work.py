"""The steps of `shrink` between the calibration windows and the finished model."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from depthgauge._format import duration
from depthgauge._journal import Journal
from depthgauge._version import __version__
from depthgauge.progress import Step
from depthgauge.results.shrink_record import CurvePoint, HealRecord, PlanRecord, RepairStep, TestedSize
from depthgauge.surgery.calibration import Calibration
from depthgauge.surgery.certify import Certifier, Measured, measure_windows
from depthgauge.surgery.extract import cast
from depthgauge.surgery.heal import heal, heal_batch
from depthgauge.surgery.shrinker import Shrinker
from depthgauge.workflows.shrink_estimate import PartCosts, ShrinkJob, seconds_left
from depthgauge.workflows.shrink_subject import CONFIDENCE, Subject, parse_remove

QUANTILE = "quantile"
"""What `--max-increase` limits by default."""
_BEYOND = 2.0
"""`--max-increase a` searches until the objective on the selection windows grows by more than this times a."""


@dataclass(frozen=True, eq=False)
class Made:
    """A shrunk model and how it was made."""

    model: Any
    plan: PlanRecord
    repair: tuple[RepairStep, ...]
    healed: HealRecord | None
    curve: tuple[CurvePoint, ...]
    dense: Measured
    tested: tuple[TestedSize, ...] = ()


@dataclass(frozen=True, eq=False)
class Work:
    """One run: the model, its calibration windows, and the steps of an interrupted run."""

    subject: Subject
    calibration: Calibration
    journal: Journal
    followed: PlanRecord | None
    progress: Step
    message: Callable[[str], None]

    @property
    def limit(self) -> float | None:
        """The largest increase, where the size is to be found; a plan has its size."""
        return None if self.followed is not None else self.subject.settings.max_increase

    def shrinker(self, *, stops: bool = False, writes: bool = False) -> Shrinker:
        """Run the dense model on the calibration windows, and tell how long the rest takes.

        Args:
            stops: the run stops after the search.
            writes: the model will be written.
        """
        settings, subject = self.subject.settings, self.subject
        started = time.perf_counter()
        made = Shrinker(
            subject.checkpoint,
            self.calibration.fit.ids,
            self.calibration.select.ids,
            objective=settings.objective or ("loss" if subject.decoder else "states"),
            effort=subject.effort,
            repair=not settings.no_repair,
            journal=self.journal,
            progress=self.progress,
        )
        seconds = time.perf_counter() - started
        windows = len(self.calibration.fit) + len(self.calibration.select)
        repair, token = made.repair_seconds(), made.token_seconds() if subject.decoder else 0.0
        left = seconds_left(self._job(stops, writes), PartCosts(seconds / windows, repair, token, subject.fresh))
        self.message(f"about {duration(left)} left: {_steps(stops, writes)}")
        return made

    def _job(self, stops: bool, writes: bool) -> ShrinkJob:
        """Return what is left to do."""
        settings, layers, window = self.subject.settings, self.subject.checkpoint.layers, self.calibration.window
        guessed = max(2, layers // 3)
        count = len(self.followed.removed) if self.followed else self.count() if settings.remove else guessed
        return ShrinkJob(
            self.subject.effort,
            layers,
            count,
            certify=len(self.calibration.certify),
            is_planned=self.followed is not None,
            sizes=1 if self.limit is None else count,
            healed=(settings.heal or 0) * heal_batch(window),
            stops=stops,
            writes=writes,
        )

    def count(self) -> int:
        """The number of blocks to remove."""
        checkpoint, remove = self.subject.checkpoint, self.subject.settings.remove
        assert remove is not None
        return parse_remove(remove, checkpoint.layers, checkpoint.name)

    def search(self, shrinker: Shrinker) -> tuple[int, ...]:
        """Return the blocks to remove: those of the plan, or those that the search finds."""
        if self.followed is not None:
            return self.followed.removed
        shrinker.remove_until(self.count())
        shrinker.exchange()
        return shrinker.student.removed

    def from_count(self, shrinker: Shrinker) -> Made:
        """Make the model with the requested number of blocks removed."""
        removed = self.search(shrinker)
        repair, final = shrinker.repair(removed)
        model = shrinker.model()
        curve = shrinker.curve(removed, final)
        plan = self.plan_record(shrinker, removed)
        return self._complete(shrinker, Made(model, plan, repair, None, curve, self._dense()), final)

    def from_limit(self, shrinker: Shrinker) -> Made:
        """Test sizes from gentle to harsh on the certify windows, and make the largest one that passes."""
        settings, limit = self.subject.settings, self.limit
        assert limit is not None
        dense = self._dense()  # first: the search changes the weights of the model
        certifier = certifier_of(self.subject, self.calibration, dense)
        kind = settings.guarantee or QUANTILE
        certifier.require_reachable(limit, kind)
        shrinker.remove_until(len(shrinker.runner) - 1, _BEYOND * limit)
        order = [step.layer for step in shrinker.steps]
        best: Made | None = None
        tested: list[TestedSize] = []
        last = 0.0
        for size in range(1, len(order) + 1):
            removed = tuple(sorted(order[:size]))
            repair, value = shrinker.repair(removed)
            model = shrinker.model()
            shrinker.student.restore()
            made = self._complete(
                shrinker, Made(model, self.plan_record(shrinker, removed), repair, None, (), dense), value
            )
            measured = measure_windows(
                computed_like(self.subject.checkpoint.model, made.model),
                self.calibration.certify.ids,
                decoder=True,
                progress=self.progress,
                label=f"size {size}",
            )
            passed = certifier.passes(measured, limit, kind)
            found = certifier.quantile(measured) if kind == "quantile" else certifier.mean(measured)
            tested.append(TestedSize(removed=size, bound=found.increase, passed=passed))
            if not passed:
                break
            best, last = made, value
        if best is None:
            return Made(None, self.plan_record(shrinker, ()), (), None, (), dense, tuple(tested))
        curve = shrinker.curve(best.plan.removed, last)
        return Made(best.model, best.plan, best.repair, best.healed, curve, dense, tuple(tested))

    def _complete(self, shrinker: Shrinker, made: Made, value: float) -> Made:
        """Heal the model if requested, and give it the dtype in which it is written."""
        settings, healed, model = self.subject.settings, None, made.model
        shrinker.student.restore()
        if settings.heal:
            model, healed = self._heal(shrinker, made.model, made.plan, value)
        if self.subject.stored is not None:
            model = cast(model, self.subject.stored)
        return Made(model, made.plan, made.repair, healed, made.curve, made.dense)

    def _heal(self, shrinker: Shrinker, model: Any, plan: PlanRecord, value: float) -> tuple[Any, HealRecord]:
        """Train the model towards the dense one; keep the result if the selection objective falls."""
        subject, steps = self.subject, self.subject.settings.heal
        assert steps is not None
        removed = "-".join(map(str, plan.removed))
        before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        heal(
            model,
            subject.checkpoint.model,
            self.calibration.fit.ids,
            steps=steps,
            loss=subject.decoder,
            seed=subject.settings.seed or 0,
            saved=None if self.journal.folder is None else self.journal.folder / f"heal-{removed}.pt",
            progress=self.progress,
        )
        after = shrinker.objective.of_model(model)
        kept = after < value
        if not kept:
            model.load_state_dict(before)
        return model, HealRecord(steps=steps, before=value, after=after, kept=kept)

    def _dense(self) -> Measured:
        """Measure the dense model on the certify windows."""
        return measure_windows(
            self.subject.checkpoint.model,
            self.calibration.certify.ids,
            decoder=self.subject.decoder,
            progress=self.progress,
            label="dense model, certify windows",
        )

    def plan_record(self, shrinker: Shrinker, removed: tuple[int, ...]) -> PlanRecord:
        """Describe the plan."""
        subject, settings = self.subject, self.subject.settings
        if self.followed is not None:
            return self.followed
        source = subject.checkpoint.source
        return PlanRecord(
            version=__version__,
            model=subject.checkpoint.name if source is None else str(source.path),
            family=str(subject.checkpoint.config.model_type),
            files=subject.files,
            layers=subject.checkpoint.layers,
            removed=removed,
            search=shrinker.steps,
            swaps=shrinker.swaps,
            settings=settings,
            calibration=subject.calibration_record(self.calibration),
        )


def _steps(stops: bool, writes: bool) -> str:
    if stops:
        return "the search"
    return "search, repair and measurement" + (", and a new process that loads the result" if writes else "")


def computed_like(dense: Any, shrunk: Any) -> Any:
    """Return the shrunk model, or a copy that computes in the dtype of the dense model if this is another one."""
    return shrunk if shrunk.dtype == dense.dtype else cast(copy.deepcopy(shrunk), dense.dtype)


def certifier_of(subject: Subject, calibration: Calibration, dense: Measured) -> Certifier:
    """Return what bounds the increase of a subject's loss."""
    return Certifier(calibration, dense, subject.settings.confidence or CONFIDENCE)
