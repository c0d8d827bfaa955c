"""Search for sets of blocks to remove.

The search is greedy and changes no weights: at each removal, the block whose loss costs least is removed. Beside its
result, other sets are known: those of published methods, the best run of adjacent blocks, and the result of the search
after exchanges of single blocks. `candidates.py` compares them as finished models.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.checkpoints.model_output import model_output
from depthgauge.checkpoints.scores import angular_distance, block_influence
from depthgauge.results.shrink_record import CurvePoint, SearchStep
from depthgauge.surgery.student import DenseStates, Student

OURS, GREEDY, EXCHANGED, RUN = (
    "depthgauge",
    "greedy search",
    "greedy search with exchanges",
    "best run of adjacent blocks",
)
GIVEN = "given blocks"

Removed = tuple[int, ...]
"""Blocks to remove, in increasing order."""


def by_influence(dense: DenseStates, count: int, allowed: Sequence[int]) -> Removed:
    """Return the `count` allowed blocks with the smallest block influence (ShortGPT)."""
    influence = {k: block_influence(dense.at(k), dense.at(k + 1)) for k in allowed}
    return tuple(sorted(sorted(allowed, key=influence.__getitem__)[:count]))


def by_angle(dense: DenseStates, count: int, allowed: Sequence[int]) -> Removed | None:
    """Return the `count` adjacent blocks with the smallest angular distance between X_ℓ and X_{ℓ+count} (UIDL)."""
    return next(iter(runs_by_angle(dense, count, allowed)), None)


def runs_by_angle(dense: DenseStates, count: int, allowed: Sequence[int]) -> list[Removed]:
    """Return all runs of `count` adjacent allowed blocks, in the order of the angular distances across them."""
    starts = [k for k in range(dense.layers - count + 1) if {*range(k, k + count)} <= {*allowed}]
    starts.sort(key=lambda k: angular_distance(dense.at(k), dense.at(k + count)))
    return [tuple(range(k, k + count)) for k in starts]


PEERS: Mapping[str, Callable[[DenseStates, int, Sequence[int]], Removed | None]] = {
    "block influence (ShortGPT)": by_influence,
    "angular distance (UIDL)": by_angle,
}
"""Published methods that choose blocks to remove from the dense model's states alone. None: no run is allowed."""


class Shrinker(Student):
    """The search for blocks to remove.

    - `steps`: the removals of the search so far
    - `protected`: blocks that are never removed
    - `window_seconds`: about how long a forward pass of one window takes
    """

    def __init__(self, *args: Any, protected: Iterable[int] = (), **keywords: Any) -> None:
        """Run the dense model on the calibration windows; the other arguments are those of `Student`."""
        started = time.perf_counter()
        super().__init__(*args, **keywords)
        self.window_seconds = (time.perf_counter() - started) / (len(self.fit.ids) + len(self.select.ids))
        self.protected = frozenset(protected)
        self.steps: tuple[SearchStep, ...] = ()
        self._scores: dict[int, float] = {}
        self._states = [self.select.at(layer) for layer in range(len(self.runner) + 1)]

    def token_seconds(self) -> float:
        """Return about how long a forward pass of one token takes; 0 for models that do not generate."""
        if self.checkpoint.objective != "loss":
            return 0.0
        ids = self.select.ids[:1, :1].to(self.runner.device)
        started = time.perf_counter()
        with torch.no_grad():
            model_output(self.checkpoint.model, ids, loss=True).cpu()
        return time.perf_counter() - started

    @property
    def allowed(self) -> list[int]:
        """The blocks of the dense model that may be removed."""
        return [layer for layer in range(len(self.runner)) if layer not in self.protected]

    def remove_until(self, count: int, limit: float | None = None) -> None:
        """Continue the search up to `count` removals, or until the objective has increased by more than `limit`."""
        known = [SearchStep(**step) for step in self.journal.get("search", [])]
        while len(self.steps) < min(count, len(self.allowed)):
            done = len(self.steps)
            if done < len(known):
                self._remove(known[done].layer)
                self.steps += (known[done],)
                if done + 1 == len(known):
                    self._scores = {int(layer): score for layer, score in self.journal.get("scores", {}).items()}
            else:
                layer = self._cheapest()
                self._remove(layer)
                self.steps += (SearchStep(layer=layer, objective=float(self.objective(self._states[-1]).mean())),)
                # One write for both: a resumed run must rank the blocks as this one does.
                self.journal.entries["scores"] = {str(layer): score for layer, score in self._scores.items()}
                self.journal.put("search", [step.to_json() for step in self.steps])
            if limit is not None and self.steps[-1].objective - self.dense > limit:
                return

    @property
    def path(self) -> list[int]:
        """The blocks that are left by the search, in order."""
        gone = {step.layer for step in self.steps}
        return [layer for layer in range(len(self.runner)) if layer not in gone]

    def ranked(self) -> list[int]:
        """Return the removable blocks that the search has left, in the order of their last ranking."""
        left = [layer for layer in self.path if layer not in self.protected]
        return sorted(left, key=lambda layer: self._scores.get(layer, 0.0))

    def _cheapest(self) -> int:
        """Return the block whose removal costs least on the ranking windows.

        Only the best blocks of the last ranking are ranked again. The first time, half of the windows rank all blocks.
        """
        if not self.steps:
            self._rank(self.ranked(), -(-self.effort.ranking // 2))
        best = self.ranked()[: self.effort.breadth]
        self._rank(best, self.effort.ranking)
        return min(best, key=self._scores.__getitem__)

    def _rank(self, blocks: Sequence[int], windows: int) -> None:
        """Measure the increase of the objective on the first selection windows without each of the blocks."""
        path, dense = self.path, float(self.dense_losses[:windows].mean())
        for done, layer in enumerate(blocks):
            self.progress(done, len(blocks), f"removal {len(self.steps) + 1}, block {layer}")
            place = path.index(layer)
            self._scores[layer] = self.objective_after(path[place + 1 :], self._states[place], windows) - dense

    def _remove(self, layer: int) -> None:
        """Leave a block out, and compute the states after it again."""
        path = self.path
        place = path.index(layer)
        path.remove(layer)
        self._scores.pop(layer, None)
        del self._states[place + 1]
        for index in range(place, len(path)):
            self._states[index + 1] = self.runner.through([path[index]], self._states[index])

    def sets(self, count: int) -> dict[str, Removed]:
        """Return the sets of `count` blocks that are known, by the method that chose them."""
        found = tuple(sorted(step.layer for step in self.steps[:count]))
        return {GREEDY: found, EXCHANGED: self.exchanged(found), **self.peer_sets(count)}

    def peer_sets(self, count: int) -> dict[str, Removed]:
        """Return the sets of published methods, and the best of the runs with the smallest angular distances."""
        made = {name: choose(self.select, count, self.allowed) for name, choose in PEERS.items()}
        runs = runs_by_angle(self.select, count, self.allowed)[: self.effort.breadth]
        made[RUN] = min(runs, key=lambda run: self.mean_without(run, self.effort.ranking), default=None)
        return {name: removed for name, removed in made.items() if removed is not None}

    def exchanged(self, removed: Removed) -> Removed:
        """Exchange single blocks of a set, those that the search removed last first, where that lowers the objective.

        The best exchange of a block on the ranking windows is measured on all selection windows, without repair.
        """
        others, swaps, tried = self.ranked(), self.effort.swaps, 0
        for one in [step.layer for step in reversed(self.steps) if step.layer in removed]:
            trials: dict[Removed, float] = {}
            for other in others[: max(1, swaps // max(1, len(removed)))]:
                if tried < swaps and other not in removed:
                    self.progress(tried, swaps, f"exchange block {one} for block {other}")
                    trial = tuple(sorted({*removed, other} - {one}))
                    trials[trial] = self.mean_without(trial, self.effort.ranking)
                    tried += 1
            best = min(trials, key=trials.__getitem__, default=removed)
            if self.mean_without(best) < self.mean_without(removed):
                removed = best
        return removed

    def losses_without(self, removed: Removed, windows: int | None = None) -> Float[Tensor, " windows"]:
        """Return the objective without these blocks, unrepaired, on each of the first `windows` selection windows.

        Each set is measured once, and remembered in the journal.
        """
        key = ",".join(map(str, removed)) + ("" if windows is None else f" on {windows}")
        known: dict[str, list[float]] = self.journal.get("sets", {})
        if key not in known:
            self.keep_all_but(removed)
            place, part = self.first_gap, slice(0, windows)
            found = self.objective(self.runner.through(self.kept[place:], self.select.at(place)[part]), part)
            known = known | {key: found.tolist()}
            self.journal.put("sets", known)
        return torch.tensor(known[key], dtype=torch.float64)

    def mean_without(self, removed: Removed, windows: int | None = None) -> float:
        """Return the mean of `losses_without`."""
        return float(self.losses_without(removed, windows).mean())

    def curve(self, removed: Removed, final: float) -> tuple[CurvePoint, ...]:
        """Return the increase of the objective on the selection windows against the number of removed blocks.

        The finished model without the blocks `removed` has the objective `final`. The search and the published methods
        are measured without repair, the latter at this size alone.
        """
        count = len(removed)
        points = [CurvePoint(method=OURS, removed=count, increase=final - self.dense)]
        points += [
            CurvePoint(method=GREEDY, removed=done, increase=step.objective - self.dense)
            for done, step in enumerate(self.steps[:count], 1)
        ]
        for method, choose in PEERS.items():
            gone = choose(self.select, count, self.allowed)
            if gone is not None:
                self.progress(0, 1, method)
                points.append(CurvePoint(method=method, removed=count, increase=self.mean_without(gone) - self.dense))
        return tuple(points)
