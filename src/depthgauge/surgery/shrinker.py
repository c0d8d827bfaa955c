"""Choose the blocks to remove and repair the others.

The search is greedy: the best candidates are compared after repair. Then single blocks are exchanged where that helps.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge._format import counted
from depthgauge.checkpoints.scores import angular_distance, block_influence
from depthgauge.results.shrink_record import CurvePoint, RepairStep, SearchStep
from depthgauge.surgery.repair import Change
from depthgauge.surgery.repair_block import repair_block
from depthgauge.surgery.student import DenseStates, Student

OURS = "depthgauge"
SEARCH_ITERATIONS = 4
"""Most steps of a repair during the search, in families where it is not a linear problem."""


def by_influence(dense: DenseStates, count: int) -> tuple[int, ...]:
    """Return the `count` blocks with the smallest block influence (ShortGPT)."""
    influence = [block_influence(dense.at(k), dense.at(k + 1)) for k in range(dense.layers)]
    return tuple(sorted(sorted(range(dense.layers), key=influence.__getitem__)[:count]))


def by_angle(dense: DenseStates, count: int) -> tuple[int, ...]:
    """Return the `count` adjacent blocks with the smallest angular distance between X_ℓ and X_{ℓ+count} (UIDL)."""
    starts = range(dense.layers - count + 1)
    first = min(starts, key=lambda k: angular_distance(dense.at(k), dense.at(k + count)))
    return tuple(range(first, first + count))


PEERS: Mapping[str, Callable[[DenseStates, int], tuple[int, ...]]] = {
    "block influence (ShortGPT)": by_influence,
    "angular distance (UIDL)": by_angle,
}
"""Published methods that choose blocks to remove from the dense model's states alone."""


Removal = tuple[SearchStep, Change | None]
"""One removal, and the repair of the block before it; None if that is not repaired."""


class Shrinker(Student):
    """The search for blocks to remove, and the repair of those that stay.

    - `steps`: the removals of the search so far
    - `swaps`: the accepted exchanges as (block put back, block removed instead)
    - `window_seconds`: about how long a forward pass of one window takes
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Run the dense model on the calibration windows; the arguments are those of `Student`."""
        started = time.perf_counter()
        super().__init__(*args, **keywords)
        self.window_seconds = (time.perf_counter() - started) / (len(self.fit.ids) + len(self.select.ids))
        self.steps: tuple[SearchStep, ...] = ()
        self.swaps: tuple[tuple[int, int], ...] = ()
        self._scores: dict[int, float] = {}
        self._states = [self.select.at(layer) for layer in range(len(self.runner) + 1)]

    def repair_seconds(self) -> float:
        """Return about how long one repair of the search takes, measured on a few windows; 0 without repair."""
        if not self.repairs:
            return 0.0
        windows, every = self.effort.ranking, len(self.fit.ids)
        inputs, targets = self.fit.at(0)[:windows], self.fit.at(2)[:windows]  # as if the second block were removed
        started = time.perf_counter()
        self._quick_repair(0, inputs, targets)
        return (time.perf_counter() - started) * every / len(inputs)

    def token_seconds(self) -> float:
        """Return about how long a forward pass of one token takes; 0 for models that do not generate."""
        if self.checkpoint.objective != "loss":
            return 0.0
        ids = self.select.ids[:1, :1].to(self.runner.device)
        started = time.perf_counter()
        with torch.no_grad():
            self.checkpoint.model(input_ids=ids).logits.cpu()
        return time.perf_counter() - started

    def remove_until(self, count: int, limit: float | None = None) -> None:
        """Remove blocks one by one, up to `count`, or until one increases the objective by more than `limit`."""
        while len(self.steps) < count:
            self._remove_one()
            if limit is not None and self.steps[-1].objective - self.dense > limit:
                return

    def candidates(self) -> list[int]:
        """Return the remaining blocks in the order of their last ranking, the least important first."""
        return sorted(self.kept, key=lambda layer: self._scores.get(layer, 0.0))

    def _remove_one(self) -> None:
        """Remove one more block; a removal of an interrupted run is repeated without comparing candidates."""
        known: list[dict[str, Any]] = self.journal.get("search", [])
        done = len(self.steps)
        step, change = self._repeated(SearchStep(**known[done])) if done < len(known) else self._best()
        place = self.kept.index(step.layer)
        if change is not None:
            self.apply(change, step.step)
        del self.kept[place], self._states[place]
        self._scores.pop(step.layer, None)
        for index in range(max(place - 1, 0), len(self.kept)):
            self._states[index + 1] = self.runner.through([self.kept[index]], self._states[index])
        self.steps += (step,)
        if len(self.steps) > len(known):
            # One write for both: a resumed run must rank the candidates as this one does.
            self.journal.entries["scores"] = {str(layer): score for layer, score in self._scores.items()}
            self.journal.put("search", [step.to_json() for step in self.steps])
        elif len(self.steps) == len(known):
            self._scores = {int(layer): score for layer, score in self.journal.get("scores", {}).items()}

    def _best(self) -> Removal:
        """Rank the candidates without repair on a few windows, then compare the best ones after repair on all."""
        ranked = self.candidates()[: self.effort.breadth if self.steps else None]
        turn = f"removal {len(self.steps) + 1}"
        for done, layer in enumerate(ranked):
            self.progress(done, len(ranked), f"{turn}, block {layer}")
            place = self.kept.index(layer)
            self._scores[layer] = self.objective_after(self.kept[place + 1 :], self._states[place], self.effort.ranking)
        finalists = sorted(ranked, key=lambda layer: self._scores[layer])[: self.effort.finalists]
        inputs = self._fit_inputs([self.kept.index(layer) - 1 for layer in finalists]) if self.repairs else {}
        found = []
        for done, layer in enumerate(finalists):
            self.progress(done, len(finalists), f"{turn}, repair before block {layer}")
            found.append(self._compared(layer, inputs))
        return min(found, key=lambda removal: removal[0].objective)

    def _compared(self, layer: int, inputs: dict[int, Tensor]) -> Removal:
        """Measure the removal of a block on all selection windows, without and with repair of the block before it."""
        place = self.kept.index(layer)
        later = self.kept[place + 1 :]
        unrepaired = self.objective_after(later, self._states[place])
        objective, length, change = unrepaired, 0.0, None
        if place > 0 and self.repairs:
            change = self._change(place, inputs[place - 1])
            layers, states = [self.kept[place - 1], *later], self._states[place - 1]
            objective, length = self._best_step(change, layers, states, unrepaired)
        step = SearchStep(layer=layer, step=length, unrepaired=unrepaired, objective=objective)
        return step, change if length else None

    def _best_step(self, change: Change, layers: Sequence[int], states: Tensor, without: float) -> tuple[float, float]:
        """Return the smallest objective after these layers, `without` the change or with it, and its step length."""
        best = (without, 0.0)
        for length in self.effort.steps:
            change.apply(length)
            best = min(best, (self.objective_after(layers, states), length))
        change.apply(0.0)
        return best

    def _repeated(self, step: SearchStep) -> Removal:
        """Return the removal that an interrupted run chose."""
        place = self.kept.index(step.layer)
        return step, self._change(place, self._fit_inputs([place - 1])[place - 1]) if step.step else None

    def _change(self, place: int, states: Float[Tensor, "windows n d"]) -> Change:
        """Fit the block before kept[place] to the dense states after kept[place]."""
        return self._quick_repair(self.kept[place - 1], states, self.fit.at(self.following(self.kept[place])))

    def _quick_repair(self, layer: int, states: Tensor, targets: Tensor) -> Change:
        return repair_block(self.runner, layer, states, targets, joint=False, iterations=SEARCH_ITERATIONS)

    def _fit_inputs(self, places: Sequence[int]) -> dict[int, Tensor]:
        """Return the inputs of some kept blocks on the fit windows, in one pass over the student."""
        found: dict[int, Tensor] = {}
        state = self.fit.at(0)
        for place in range(max(places, default=-1) + 1):
            if place in places:
                found[place] = state
            if place < max(places):
                state = self.runner.through([self.kept[place]], state)
        return found

    def exchange(self) -> None:
        """Compare the result of the search with other sets of blocks, then exchange single blocks where that helps.

        Every set is measured by the objective on the selection windows after the blocks before its gaps are repaired.
        The greedy search cannot undo an early removal, so the blocks that a published method chooses can be better.
        """
        found, order, effort = self.removed, self.candidates(), self.effort
        starts = [found, *(tuple(sorted(choose(self.select, len(found)))) for choose in PEERS.values())]
        for done, start in enumerate(starts):
            self.progress(done, len(starts), f"without blocks {', '.join(map(str, start))}")
            self._gaps_repaired(start)
        removed = min(starts, key=self._gaps_repaired)
        accepted = list(zip(sorted({*found} - {*removed}), sorted({*removed} - {*found}), strict=True))
        latest = [step.layer for step in reversed(self.steps)]
        per_block = max(1, effort.swaps // max(1, len(removed)))
        tried = 0
        for one in sorted(removed, key=lambda layer: latest.index(layer) if layer in latest else -1):
            trials: dict[int, float] = {}
            for other in order[:per_block]:
                if tried == effort.swaps or other in removed:
                    continue
                self.progress(tried, effort.swaps, f"exchange block {one} for block {other}")
                tried += 1
                trials[other] = self._gaps_repaired(sorted({*removed, other} - {one}))
            chosen = min(trials, key=lambda layer: trials[layer], default=None)
            if chosen is not None and trials[chosen] < self._gaps_repaired(removed):
                removed = tuple(sorted({*removed, chosen} - {one}))
                accepted.append((one, chosen))
        self.keep_all_but(removed)
        self.swaps = tuple(accepted)

    def _gaps_repaired(self, removed: Sequence[int]) -> float:
        """Return the objective without these blocks, after repair of the block before every gap.

        Each set is measured once, and remembered in the journal.
        """
        known: dict[str, float] = dict(self.journal.get("exchanges", {}))
        key = ",".join(map(str, removed))
        if key in known:
            return known[key]
        self.keep_all_but(removed)
        fit, select = self.fit.at(0), self.select.at(0)
        gaps = [layer for layer in self.kept if self.following(layer) != layer + 1]
        for layer in self.kept:
            if self.repairs and layer in gaps:
                self.apply(self._quick_repair(layer, fit, self.fit.at(self.following(layer))), 1.0)
            select = self.runner.through([layer], select)
            if gaps and layer < gaps[-1]:
                fit = self.runner.through([layer], fit)
        value = float(self.objective(select).mean())
        self.restore()
        self.journal.put("exchanges", known | {key: value})
        return value

    def repair(self, removed: Sequence[int]) -> tuple[tuple[RepairStep, ...], float]:
        """Remove exactly these blocks from the original model and repair all kept blocks, in order.

        Each block is fitted on the outputs of the repaired blocks before it. Its step length is the one of
        `effort.steps` with the smallest objective on the selection windows, or 0 if none is smaller than without the
        repair. The objective therefore never increases. Steps of an interrupted run keep their length.

        Returns:
            The steps of the repair, and the objective on the selection windows after it.
        """
        self.keep_all_but(removed)
        fit, select = self.fit.at(0), self.select.at(0)
        value = self.objective_after(self.kept, select)
        if not self.repairs:
            return (), value
        name = "repair " + ",".join(map(str, self.removed))
        known: list[dict[str, Any]] = self.journal.get(name, [])
        steps: list[RepairStep] = []
        for place, layer in enumerate(self.kept):
            self.progress(place, len(self.kept), f"repair of block {layer}")
            change = repair_block(self.runner, layer, fit, self.fit.at(self.following(layer)), joint=True)
            if place < len(known):
                value, length = known[place]["objective"], known[place]["step"]
            else:
                value, length = self._best_step(change, self.kept[place:], select, value)
            self.apply(change, length)
            steps.append(RepairStep(layer=layer, step=length, objective=value))
            if place >= len(known):
                self.journal.put(name, [step.to_json() for step in steps])
            fit, select = self.runner.through([layer], fit), self.runner.through([layer], select)
        return tuple(steps), value

    def curve(self, removed: Sequence[int], final: float) -> tuple[CurvePoint, ...]:
        """Return the increase of the objective on the selection windows against the number of removed blocks.

        Our own points are those of the search, and the finished model without the blocks `removed`, whose objective is
        `final`. The peers' choices are measured without repair at three sizes.
        """
        self.restore()
        ours = [step.objective for step in self.steps][: len(removed) - 1]
        places = [*range(1, len(ours) + 1), len(removed)]
        points = [
            CurvePoint(method=OURS, removed=count, increase=value - self.dense)
            for count, value in zip(places, [*ours, final], strict=True)
        ]
        sizes = sorted({-(-len(removed) // 3), -(-2 * len(removed) // 3), len(removed)})
        known: dict[str, float] = dict(self.journal.get("curve", {}))
        for method, choose in PEERS.items():
            for count in sizes:
                key = f"{method} {count}"
                if key not in known:
                    self.progress(len(known), len(PEERS) * len(sizes), f"{method}, {counted(count, 'block')}")
                    gone = choose(self.select, count)
                    kept = [layer for layer in range(len(self.runner)) if layer not in gone]
                    known[key] = self.objective_after(kept, self.select.at(0)) - self.dense
                    self.journal.put("curve", known)
                points.append(CurvePoint(method=method, removed=count, increase=known[key]))
        return tuple(points)
