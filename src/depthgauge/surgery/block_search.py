"""Search for sets of blocks to remove.

The search is greedy and changes no weights: at each removal, the block whose loss costs least is removed. Beside its
result, other sets are known: those of published methods, the best run of adjacent blocks, and the result of the search
after exchanges of single blocks. `candidates.py` compares them as finished models.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from depthgauge.base.format import counted
from depthgauge.checkpoints.blocks.what_if import DenseStates
from depthgauge.checkpoints.blocks.window_observer import angular_distance, block_influence
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.results.shrink_record import CurvePoint, SearchStep
from depthgauge.surgery.student import Removed, Student, is_mixed, why_not_removed

OURS, GREEDY, EXCHANGED, RUN = (
    "depthgauge",
    "greedy search",
    "greedy search with exchanges",
    "best run of adjacent blocks",
)
GIVEN = "given blocks"


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


class Search:
    """The search for blocks to remove from a model, without those that are `protected`.

    - `steps`: the removals so far
    """

    def __init__(self, student: Student, protected: Iterable[int] = ()) -> None:
        self.student, self.protected = student, frozenset(protected)
        self.steps: tuple[SearchStep, ...] = ()
        self._refused: dict[Removed, str | None] | None = {} if is_mixed(student.runner) else None
        self._scores: dict[int, float] = {}

    @property
    def allowed(self) -> list[int]:
        """The blocks of the dense model that may be removed."""
        return [layer for layer in range(len(self.student.runner)) if layer not in self.protected]

    def remove_until(self, count: int, limit: float | None = None) -> None:
        """Continue the search up to `count` removals, or until the objective has increased by more than `limit`.

        It ends early where no further block can be removed; see `why_not`.
        """
        while len(self.steps) < min(count, len(self.allowed)):
            layer = self._cheapest()
            if layer is None:
                return
            removed = self._with(layer)
            self.steps += (SearchStep(layer=layer, objective=self.student.means_without([removed])[removed]),)
            self._scores.pop(layer)
            if limit is not None and self.steps[-1].objective - self.student.dense > limit:
                return

    def ranked(self) -> list[int]:
        """Return the removable blocks that the search has left, in the order of their last ranking."""
        gone = {step.layer for step in self.steps}
        return sorted({*self.allowed} - gone, key=lambda layer: (self._scores.get(layer, 0.0), layer))

    def _with(self, layer: int) -> Removed:
        """Return the blocks that the search has removed, and one more."""
        return tuple(sorted([layer, *(step.layer for step in self.steps)]))

    def why_not(self, removed: Removed) -> str | None:
        """Return why these blocks cannot be removed together, or None; blocks of one kind are not checked again."""
        if self._refused is None:
            return None
        if removed not in self._refused:
            self._refused[removed] = why_not_removed(self.student.runner, removed, self.student.example)
        return self._refused[removed]

    @property
    def refusals(self) -> tuple[str, ...]:
        """A note on the sets of blocks that the search has left out, if there are any."""
        found = {removed: reason for removed, reason in (self._refused or {}).items() if reason is not None}
        if not found:
            return ()
        smallest = min(found, key=len)
        count = counted(len(found), "set")
        return (f"the search left out {count} of blocks, such as {list(smallest)}: {found[smallest]}",)

    def _cheapest(self) -> int | None:
        """Return the block whose removal costs least on the ranking windows; None if none of them can be removed.

        Only the best blocks of the last ranking are ranked again. The first time, half of the windows rank all blocks.
        """
        if not self.steps:
            self._rank(self.ranked(), -(-self.student.effort.ranking // 2))
        best = self.ranked()[: self.student.effort.breadth]
        self._rank(best, self.student.effort.ranking)
        order = dict.fromkeys([*sorted(best, key=self._scores.__getitem__), *self.ranked()])
        return next((layer for layer in order if self.why_not(self._with(layer)) is None), None)

    def _rank(self, blocks: Sequence[int], windows: int) -> None:
        """Measure the increase of the objective on the first selection windows without each of the blocks."""
        sets, dense = {layer: self._with(layer) for layer in blocks}, float(self.student.dense_losses[:windows].mean())
        means = self.student.means_without(sets.values(), windows, f"removal {len(self.steps) + 1}")
        self._scores |= {layer: means[removed] - dense for layer, removed in sets.items()}

    def sets(self, count: int) -> dict[str, Removed]:
        """Return the sets of `count` blocks that are known, by the method that chose them.

        Raises:
            CheckpointError: none is known that can be removed.
        """
        found = tuple(sorted(step.layer for step in self.steps[:count]))
        ours = {GREEDY: found, EXCHANGED: self.exchanged(found)} if len(found) == count else {}
        if made := {**ours, **self.peer_sets(count)}:
            return made
        name = self.student.checkpoint.name
        raise CheckpointError(
            f"no {counted(count, 'block')} that can be removed from {name} together were found: "
            f"{'; '.join(self.refusals)}; remove another number of blocks, or name them with --remove-layers"
        )

    def peer_sets(self, count: int) -> dict[str, Removed]:
        """Return the sets of published methods, and the best of the runs with the smallest angular distances."""
        runs = (run for run in runs_by_angle(self.student.select, count, self.allowed) if self.why_not(run) is None)
        means = self.student.means_without(islice(runs, self.student.effort.breadth), self.student.effort.ranking, RUN)
        return self._published(count) | ({RUN: min(means, key=means.__getitem__)} if means else {})

    def _published(self, count: int) -> dict[str, Removed]:
        """Return the sets of published methods that can be removed."""
        made = {name: choose(self.student.select, count, self.allowed) for name, choose in PEERS.items()}
        return {name: gone for name, gone in made.items() if gone is not None and self.why_not(gone) is None}

    def exchanged(self, removed: Removed) -> Removed:
        """Exchange single blocks of a set, those that the search removed last first, where that lowers the objective.

        The best exchange of a block on the ranking windows is measured on all selection windows, without repair.
        """
        others, left = self.ranked(), self.student.effort.swaps
        for one in [step.layer for step in reversed(self.steps) if step.layer in removed]:
            chosen = [other for other in others if other not in removed]
            chosen = chosen[: min(left, max(1, self.student.effort.swaps // max(1, len(removed))))]
            left -= len(chosen)
            trials = [tuple(sorted({*removed, other} - {one})) for other in chosen]
            means = self.student.means_without(trials, self.student.effort.ranking, f"exchange block {one}")
            order = sorted(means, key=means.__getitem__)
            best = next((trial for trial in order if self.why_not(trial) is None), removed)
            removed = min([removed, best], key=self.student.means_without([removed, best]).__getitem__)
        return removed

    def curve(self, removed: Removed, final: float) -> tuple[CurvePoint, ...]:
        """Return the increase of the objective on the selection windows against the number of removed blocks.

        The finished model without the blocks `removed` has the objective `final`. The search and the published methods
        are measured without repair, the latter at this size alone.
        """
        count = len(removed)
        points = [CurvePoint(method=OURS, removed=count, increase=final - self.student.dense)]
        points += [
            CurvePoint(method=GREEDY, removed=done, increase=step.objective - self.student.dense)
            for done, step in enumerate(self.steps[:count], 1)
        ]
        found = self._published(count)
        means = self.student.means_without(found.values())
        points += [
            CurvePoint(method=method, removed=count, increase=means[gone] - self.student.dense)
            for method, gone in found.items()
        ]
        return tuple(points)
