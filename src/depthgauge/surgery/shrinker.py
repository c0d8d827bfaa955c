"""Make a shrunk model from calibration windows: search, exchanges, repair."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._format import counted
from depthgauge._journal import Journal
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.progress import Step, silent
from depthgauge.results.shrink_record import CurvePoint, RepairStep, SearchStep
from depthgauge.surgery.block_runner import BlockRunner
from depthgauge.surgery.block_search import SEARCH_ITERATIONS, Search, exchange
from depthgauge.surgery.effort import Effort
from depthgauge.surgery.extract import extract, require_supported
from depthgauge.surgery.objective import Objective
from depthgauge.surgery.peer_choices import PEERS
from depthgauge.surgery.repair_block import repair_block
from depthgauge.surgery.repair_sweep import repair_all
from depthgauge.surgery.states import DenseStates
from depthgauge.surgery.student import Student, suffix_objective

OURS = "depthgauge"


class Shrinker:
    """Everything that is needed to remove blocks from one checkpoint.

    The weights of the checkpoint change while it works. Use it as a context manager: at the end the original weights
    are put back.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        fit: Int[Tensor, "fit n"],
        select: Int[Tensor, "select n"],
        *,
        objective: str,
        effort: Effort,
        repair: bool = True,
        journal: Journal | None = None,
        progress: Step = silent,
    ) -> None:
        """Run the dense model on the calibration windows.

        Args:
            checkpoint: the model.
            fit: token ids of the windows that repairs are fitted on.
            select: token ids of the windows that candidates and step lengths are compared on, in random order.
            objective: `loss`, `kl` or `states`.
            effort: how much work to do.
            repair: whether weights may change.
            journal: finished steps of an interrupted run.
            progress: called as the work advances.
        """
        require_supported(checkpoint)
        self.checkpoint, self.effort, self.repairs = checkpoint, effort, repair
        self.journal, self.progress = journal or Journal(), progress
        self.runner = BlockRunner(checkpoint, select[:1])
        self.fit = DenseStates(self.runner, fit, all_layers=repair, progress=progress)
        self.select = DenseStates(self.runner, select, progress=progress)
        self.objective = Objective(self.runner, select, self.select.final, objective)
        self.dense = float(self.objective(self.select.final).mean())
        self.student = Student(self.runner)
        self.swaps: tuple[tuple[int, int], ...] = ()
        self.search = Search(
            self.student,
            self.fit,
            self.select,
            self.objective,
            effort,
            repair=repair,
            journal=self.journal,
            progress=progress,
        )

    def __enter__(self) -> "Shrinker":
        return self

    def __exit__(self, *error: object) -> None:
        self.student.restore()

    @property
    def steps(self) -> tuple[SearchStep, ...]:
        """The removals of the search so far."""
        return tuple(self.search.steps)

    def repair_seconds(self) -> float:
        """Return about how long one repair of the search takes, measured on a few windows; 0 without repair."""
        if not self.repairs:
            return 0.0
        windows, every = self.effort.ranking, len(self.fit.ids)
        inputs, targets = self.fit.at(0)[:windows], self.fit.at(2)[:windows]  # as if the second block were removed
        started = time.perf_counter()
        repair_block(self.runner, 0, inputs, targets, joint=False, iterations=SEARCH_ITERATIONS)
        return (time.perf_counter() - started) * every / len(inputs)

    def token_seconds(self) -> float:
        """Return about how long a forward pass of one token takes."""
        ids = self.select.ids[:1, :1].to(self.runner.device)
        started = time.perf_counter()
        with torch.no_grad():
            self.checkpoint.model(input_ids=ids).logits.cpu()
        return time.perf_counter() - started

    def remove_until(self, count: int, limit: float | None = None) -> None:
        """Remove blocks one by one.

        Args:
            count: how many blocks to remove in total.
            limit: stop after the first removal that increases the objective by more than this.
        """
        while len(self.search.steps) < count:
            step = self.search.remove_one()
            if limit is not None and step.objective - self.dense > limit:
                return

    def exchange(self) -> None:
        """Take other blocks than those of the search where that helps; `swaps` are the accepted exchanges."""
        if not self.search.steps:
            return
        count = len(self.search.steps)
        others = [choose(self.select, count) for choose in PEERS.values()]
        _, accepted = exchange(self.search, others, journal=self.journal, progress=self.progress)
        self.swaps = tuple(accepted)

    def repair(self, removed: Sequence[int]) -> tuple[tuple[RepairStep, ...], float]:
        """Remove exactly these blocks from the original model and repair all kept blocks.

        Returns:
            The steps of the repair, and the objective on the selection windows after it.
        """
        self.student.keep_all_but(removed)
        if not self.repairs:
            return (), suffix_objective(self.runner, self.objective, self.student.kept, self.select.at(0))
        steps = repair_all(
            self.student,
            self.fit,
            self.select,
            self.objective,
            self.effort,
            journal=self.journal,
            progress=self.progress,
        )
        return steps, steps[-1].objective

    def model(self) -> Any:
        """Return the present state of the shrunk model as a new transformers model."""
        return extract(self.checkpoint, self.student.kept)

    def curve(self, removed: Sequence[int], final: float) -> tuple[CurvePoint, ...]:
        """Return the increase of the objective on the selection windows against the number of removed blocks.

        Our own points are those of the search, and the finished model; the peers' choices are measured without repair
        at three sizes.

        Args:
            removed: the blocks that were removed in the end.
            final: the objective of the finished model.
        """
        self.student.restore()
        points = [
            CurvePoint(method=OURS, removed=count, increase=step.objective - self.dense)
            for count, step in enumerate(self.search.steps, start=1)
            if count < len(removed)
        ]
        points.append(CurvePoint(method=OURS, removed=len(removed), increase=final - self.dense))
        sizes = sorted({-(-len(removed) // 3), -(-2 * len(removed) // 3), len(removed)})
        known: dict[str, float] = dict(self.journal.get("curve", {}))
        for method, choose in PEERS.items():
            for count in sizes:
                key = f"{method} {count}"
                if key not in known:
                    self.progress(len(known), len(PEERS) * len(sizes), f"{method}, {counted(count, 'block')}")
                    gone = choose(self.select, count)
                    kept = [layer for layer in range(len(self.runner)) if layer not in gone]
                    value = suffix_objective(self.runner, self.objective, kept, self.select.at(0))
                    known[key] = value - self.dense
                    self.journal.put("curve", known)
                points.append(CurvePoint(method=method, removed=count, increase=known[key]))
        return tuple(points)
