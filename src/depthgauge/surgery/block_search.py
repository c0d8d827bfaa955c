"""Choose the blocks to remove: greedily, with the best candidates compared after repair, then by exchanges."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from depthgauge._journal import Journal
from depthgauge.progress import Step, silent
from depthgauge.results.shrink_record import SearchStep
from depthgauge.surgery.effort import Effort
from depthgauge.surgery.objective import Objective
from depthgauge.surgery.repair import Change
from depthgauge.surgery.repair_block import repair_block
from depthgauge.surgery.states import DenseStates
from depthgauge.surgery.student import Student, suffix_objective

SEARCH_ITERATIONS = 4
"""Most steps of a repair during the search, in families where it is not a linear problem."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A removal: the block, the objective without and with repair, and the repair of the block before it."""

    layer: int
    unrepaired: float
    objective: float
    change: Change | None = None
    step: float = 0.0


class Search:
    """Greedy removal of blocks from a student.

    - `student`: the model; blocks are removed from it and the blocks before them are repaired
    - `steps`: the removals so far
    """

    def __init__(
        self,
        student: Student,
        fit: DenseStates,
        select: DenseStates,
        objective: Objective,
        effort: Effort,
        *,
        repair: bool,
        journal: Journal,
        progress: Step = silent,
    ) -> None:
        """Prepare the search.

        Args:
            student: a model with all its blocks.
            fit: the dense model on the windows that repairs are fitted on.
            select: the dense model on the windows that candidates are compared on.
            objective: the objective on the selection windows.
            effort: how many candidates are compared, and on how many windows.
            repair: compare candidates after repair; otherwise remove blocks only.
            journal: finished removals; they are repeated without comparing candidates.
            progress: called before every measurement.
        """
        self.student, self.runner = student, student.runner
        self.fit, self.select, self.objective = fit, select, objective
        self.effort, self.repair, self.journal, self.progress = effort, repair, journal, progress
        self.steps: list[SearchStep] = []
        self._scores: dict[int, float] = {}
        self._select_states: list[Tensor] = [select.at(layer) for layer in range(len(self.runner) + 1)]

    def remove_one(self) -> SearchStep:
        """Remove one more block and return what was found."""
        known: list[dict[str, Any]] = self.journal.get("search", [])
        done = len(self.steps)
        candidate = self._repeat(known[done]) if done < len(known) else self._best()
        step = SearchStep(
            layer=candidate.layer,
            step=candidate.step,
            unrepaired=candidate.unrepaired,
            objective=candidate.objective,
        )
        self._remove(candidate)
        self.steps.append(step)
        if len(self.steps) > len(known):
            # One write for both: a resumed run must rank the candidates as this one does.
            self.journal.entries["scores"] = {str(layer): score for layer, score in self._scores.items()}
            self.journal.put("search", [one.to_json() for one in self.steps])
        elif len(self.steps) == len(known):
            self._scores = {int(layer): score for layer, score in self.journal.get("scores", {}).items()}
        return step

    def candidates(self) -> list[int]:
        """Return the remaining blocks in the order of their last ranking, the least important first."""
        return sorted(self.student.kept, key=lambda layer: self._scores.get(layer, 0.0))

    def _best(self) -> _Candidate:
        """Rank the candidates without repair on a few windows, then compare the best ones after repair on all."""
        kept, effort = self.student.kept, self.effort
        ranked = self.candidates()[: effort.breadth if self.steps else None]
        for done, layer in enumerate(ranked):
            self.progress(done, len(ranked), f"removal {len(self.steps) + 1}, block {layer}")
            place = kept.index(layer)
            self._scores[layer] = suffix_objective(
                self.runner, self.objective, kept[place + 1 :], self._select_states[place], effort.ranking
            )
        finalists = sorted(ranked, key=lambda layer: self._scores[layer])[: effort.finalists]
        inputs = self._fit_inputs([kept.index(layer) - 1 for layer in finalists]) if self.repair else {}
        found = []
        for done, layer in enumerate(finalists):
            self.progress(done, len(finalists), f"removal {len(self.steps) + 1}, repair before block {layer}")
            found.append(self._repaired(layer, inputs))
        return min(found, key=lambda candidate: candidate.objective)

    def _repaired(self, layer: int, inputs: dict[int, Tensor]) -> _Candidate:
        """Measure the removal of a block on all selection windows, without and with repair of the block before it."""
        kept = self.student.kept
        place = kept.index(layer)
        later = kept[place + 1 :]
        unrepaired = suffix_objective(self.runner, self.objective, later, self._select_states[place])
        best = _Candidate(layer, unrepaired, unrepaired)
        if place == 0 or not self.repair:
            return best
        change = self._change(place, inputs[place - 1])
        for step in self.effort.steps:
            change.apply(step)
            value = suffix_objective(
                self.runner, self.objective, [kept[place - 1], *later], self._select_states[place - 1]
            )
            if value < best.objective:
                best = _Candidate(layer, unrepaired, value, change, step)
        change.apply(0.0)
        return best

    def _change(self, place: int, states: Float[Tensor, "windows n d"]) -> Change:
        """Fit the block before kept[place] to the dense states after it."""
        kept = self.student.kept
        target = kept[place + 1] if place + 1 < len(kept) else len(self.runner)
        return repair_block(
            self.runner, kept[place - 1], states, self.fit.at(target), joint=False, iterations=SEARCH_ITERATIONS
        )

    def _repeat(self, known: dict[str, Any]) -> _Candidate:
        """Return the candidate that an interrupted run chose."""
        place, change = self.student.kept.index(known["layer"]), None
        if known["step"]:
            change = self._change(place, self._fit_inputs([place - 1])[place - 1])
        return _Candidate(known["layer"], known["unrepaired"], known["objective"], change, known["step"])

    def _fit_inputs(self, places: Sequence[int]) -> dict[int, Tensor]:
        """Return the inputs of some kept blocks on the fit windows, in one pass over the student."""
        wanted = {place for place in places if place >= 0}
        found: dict[int, Tensor] = {}
        if not wanted:
            return found
        state = self.fit.at(0)
        for place, layer in enumerate(self.student.kept):
            if place in wanted:
                found[place] = state
            if place == max(wanted):
                break
            state = self.runner.run([layer], state)
        return found

    def _remove(self, candidate: _Candidate) -> None:
        """Remove a block for good and renew the states after it."""
        kept = self.student.kept
        place = kept.index(candidate.layer)
        if candidate.change is not None:
            self.student.apply(candidate.change, candidate.step)
        del kept[place], self._select_states[place]
        self._scores.pop(candidate.layer, None)
        for index in range(max(place - 1, 0), len(kept)):
            self._select_states[index + 1] = self.runner.run([kept[index]], self._select_states[index])


def exchange(
    search: Search, others: Iterable[Sequence[int]], *, journal: Journal, progress: Step = silent
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Compare the result of a search with other sets of blocks, then exchange single blocks where that helps.

    Every set is measured by the objective on the selection windows after the blocks before its gaps are repaired. The
    greedy search cannot undo an early removal, so a run of blocks that a published method chooses can be better.

    Args:
        search: a finished search.
        others: sets of as many blocks as the search has removed.
        journal: objectives of sets that were measured before.
        progress: called before every measurement.

    Returns:
        The removed blocks, and the accepted exchanges as (block put back, block removed instead).
    """
    student, effort = search.student, search.effort
    found, order = student.removed, search.candidates()
    known: dict[str, float] = dict(journal.get("exchanges", {}))

    def measured(trial: Sequence[int]) -> float:
        key = ",".join(map(str, sorted(trial)))
        if key not in known:
            known[key] = _gaps_repaired(search, trial)
            journal.put("exchanges", known)
        return known[key]

    starts = [found, *(tuple(sorted(other)) for other in others)]
    for done, start in enumerate(starts):
        progress(done, len(starts), f"without blocks {', '.join(map(str, start))}")
        measured(start)
    removed = min(starts, key=measured)
    accepted = list(zip(sorted({*found} - {*removed}), sorted({*removed} - {*found}), strict=True))
    latest = [step.layer for step in reversed(search.steps)]
    back = sorted(removed, key=lambda layer: latest.index(layer) if layer in latest else -1)
    per_block = max(1, effort.swaps // max(1, len(removed)))
    tried = 0
    for one in back:
        trials: dict[int, float] = {}
        for other in order[:per_block]:
            if tried == effort.swaps or other in removed:
                continue
            progress(tried, effort.swaps, f"exchange block {one} for block {other}")
            tried += 1
            trials[other] = measured(sorted({*removed, other} - {one}))
        better = [layer for layer in trials if trials[layer] < measured(removed)]
        if better:
            chosen = min(better, key=lambda layer: trials[layer])
            removed = tuple(sorted({*removed, chosen} - {one}))
            accepted.append((one, chosen))
    student.keep_all_but(removed)
    return removed, accepted


def _gaps_repaired(search: Search, removed: Sequence[int]) -> float:
    """Return the objective without these blocks, after repair of the block before every gap."""
    student, runner = search.student, search.runner
    student.keep_all_but(removed)
    fit, select = search.fit.at(0), search.select.at(0)
    gaps = [layer for layer in student.kept if student.following(layer) != layer + 1]
    for layer in student.kept:
        if search.repair and layer in gaps:
            change = repair_block(
                runner, layer, fit, search.fit.at(student.following(layer)), joint=False, iterations=SEARCH_ITERATIONS
            )
            student.apply(change, 1.0)
        select = runner.run([layer], select)
        if gaps and layer < gaps[-1]:
            fit = runner.run([layer], fit)
    value = float(search.objective(select).mean())
    student.restore()
    return value
