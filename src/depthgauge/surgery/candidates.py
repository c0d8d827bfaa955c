"""Search for sets of blocks to remove, compare them as finished models, repair the best, and make the shrunk model.

The shrunk model is the one with given blocks removed, or the smallest one whose loss stays within a limit.

All models are compared on the same selection windows, by the differences on each window. Their standard error says
which differences are large enough to count: a repair is kept only if its gain is larger than its standard error.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.base.format import counted
from depthgauge.base.io import write_tensors
from depthgauge.checkpoints.blocks.what_if import DenseStates
from depthgauge.checkpoints.blocks.window_observer import angular_distance, block_influence
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.weights.load import Checkpoint, blocks_of
from depthgauge.recovery.distillation import TrainingMemoryError
from depthgauge.recovery.recover_model import Recovery
from depthgauge.results.record import finite
from depthgauge.results.recover_record import RecoveryRecord
from depthgauge.results.shrink_record import CandidateRecord, CurvePoint, RepairStage, SearchStep, TestedSize
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.extract import cast
from depthgauge.surgery.gguf_layout import EncodedTensor, GgufLayout
from depthgauge.surgery.repair import is_linear, output_maps, refit_block, round_changed
from depthgauge.surgery.student import Removed, Student, is_mixed, why_not_removed

# --- Search for sets of blocks to remove -----------------------------------------------------------------------------
# The search is greedy and changes no weights: at each removal, the block whose loss costs least is removed. Beside its
# result, other sets are known: those of published methods, the best run of adjacent blocks, and the result of the
# search after exchanges of single blocks.

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
        reasons = {removed: reason for removed, reason in (self._refused or {}).items() if reason is not None}
        if not reasons:
            return ()
        smallest = min(reasons, key=len)
        count = counted(len(reasons), "set")
        return (f"the search left out {count} of blocks, such as {list(smallest)}: {reasons[smallest]}",)

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
        greedy = tuple(sorted(step.layer for step in self.steps[:count]))
        ours = {GREEDY: greedy, EXCHANGED: self.exchanged(greedy)} if len(greedy) == count else {}
        if known := {**ours, **self.peer_sets(count)}:
            return known
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
        for layer in [step.layer for step in reversed(self.steps) if step.layer in removed]:
            chosen = [other for other in others if other not in removed]
            chosen = chosen[: min(left, max(1, self.student.effort.swaps // max(1, len(removed))))]
            left -= len(chosen)
            trials = [tuple(sorted({*removed, other} - {layer})) for other in chosen]
            means = self.student.means_without(trials, self.student.effort.ranking, f"exchange block {layer}")
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
        published = self._published(count)
        means = self.student.means_without(published.values())
        points += [
            CurvePoint(method=method, removed=count, increase=means[gone] - self.student.dense)
            for method, gone in published.items()
        ]
        return tuple(points)


# --- Compare sets of blocks as finished models ------------------------------------------------------------------------

Losses = Float[Tensor, " select"]
"""One number per selection window."""


@dataclass(frozen=True, eq=False)
class Repaired:
    """A repaired model.

    - `stages`: what was tried, in order
    - `losses`: the objective on every selection window
    - `weights`: the values of the weights that a comparison may change, as long as the model is the best
    """

    stages: tuple[RepairStage, ...]
    losses: Losses
    weights: list[Tensor]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Sets of blocks as finished models.

    - `student`: the model, which is changed in place
    - `refits`: whether the `effort.finalists` sets that are best without repair are compared after least squares; this
      is for models that are not recovered: after 300 steps of recovery, those that began so were worse (SmolLM2-135M)
    - `trial`: a short training after which all sets are compared, or None
    - `training`: the last stage of the repair of the best set, or None
    - `observers`: called with the model of the best set while its weights are the original ones
    - `notes`: what was left out
    """

    student: Student
    refits: bool = True
    trial: Recovery | None = None
    training: Recovery | None = None
    observers: Sequence[Callable[[Checkpoint], None]] = ()
    notes: list[str] = field(default_factory=list)

    def choose(
        self, sets: Mapping[str, Removed], given: Removed | None = None
    ) -> tuple[Removed, tuple[CandidateRecord, ...], Repaired]:
        """Return the best set, or the `given` one; what was measured of each, the best first; and the repaired model.

        The student is the best set afterwards, with its repair. If there is a given set, it alone is repaired, and
        there is no trial.
        """
        student = self.student
        methods: dict[Removed, list[str]] = {}
        for method, removed in sets.items():
            methods.setdefault(removed, []).append(method)
        bare = student.losses_without(methods)
        order = sorted(bare, key=lambda removed: float(bare[removed].mean()))
        tried = order[: student.effort.finalists] if given is None else [given]
        if not self.refits:
            tried = order if given is None and len(order) > 1 and self.trial is not None else []
        tried = tried if student.repairs else []
        finished, best = {removed: Repaired((), losses, []) for removed, losses in bare.items()}, given or order[0]
        for removed in order:
            if removed in tried:
                finished[removed] = self.repair(removed)
            if given is None and _is_better(removed, best, finished):
                best = removed
            if tried and not finished[removed].stages and not self.refits:
                tried = []  # memory is too small for any
            for other in finished.keys() - {best}:
                finished[other].weights.clear()  # of a large model, they take all memory
        finished[best] = self._trained(best, finished[best])
        records = []
        for removed in sorted(order, key=lambda removed: float(finished[removed].losses.mean())):
            increase, error = difference(bare[removed], student.dense_losses)
            after = difference(finished[removed].losses, student.dense_losses) if finished[removed].stages else None
            records.append(
                CandidateRecord(
                    methods=tuple(methods[removed]),
                    removed=removed,
                    increase=increase,
                    error=finite(error),
                    repaired=None if after is None else after[0],
                    repaired_error=None if after is None else finite(after[1]),
                    chosen=removed == best,
                )
            )
        return best, tuple(records), finished[best]

    def repair(self, removed: Removed) -> Repaired:
        """Remove exactly these blocks from the original model, and refit or train the others in place for a comparison.

        Where no norm follows the maps that write into the residual stream, they are refitted by least squares, from the
        first gap on. A stage is undone unless its gain on the selection windows is larger than its standard error.
        """
        student, stages = self.student, list[RepairStage]()
        losses = student.losses_without([removed])[removed]
        student.keep_all_but(removed)
        weights, place = self.changed_weights, max(0, student.first_gap - 1)
        student.remember(weights)
        if self.trial is not None:
            try:
                losses, record = train(student, losses, weights, self.trial)
            except TrainingMemoryError as short:
                self.notes.append(f"the sets of blocks were compared without training: {short}")
                return Repaired((), losses, [])
            return Repaired((_stage("short training", record),), losses, in_memory(weights))
        path = student.journal.file("repair", removed)
        if path is not None and path.is_file():
            state = torch.load(path, map_location="cpu", weights_only=True)
            put_weights(weights, state["weights"])
            return Repaired(tuple(RepairStage(**one) for one in state["stages"]), state["losses"], state["weights"])
        if any(is_linear(student.checkpoint.families[layer]) for layer in student.kept[place:]):
            before = in_memory(weights)
            self._refit(place)
            after = student.losses()
            gain, error = difference(losses, after)
            means = {"before": float(losses.mean()), "after": float(after.mean()), "error": finite(error)}
            stages.append(RepairStage(name="least squares", **means, kept=gain > error))
            if gain > error:
                losses = after
            else:
                put_weights(weights, before)
        made = Repaired(tuple(stages), losses, in_memory(weights))
        if path is not None:
            stored = {"stages": [one.to_json() for one in stages], "losses": losses, "weights": made.weights}
            write_tensors(path, stored)
        return made

    def _trained(self, removed: Removed, made: Repaired) -> Repaired:
        """Put the weights of a repair back, and train them as its last stage."""
        student = self.student
        student.keep_all_but(removed)
        for observe in self.observers:
            observe(smaller_model(student))
        weights = self.changed_weights
        if made.stages:
            student.remember(weights)
            put_weights(weights, made.weights)
        if self.training is None:
            return made
        folder = student.journal.directory("training", removed)
        try:
            losses, record = train(student, made.losses, weights, self.training, folder)
        except TrainingMemoryError as error:
            self.notes.append(f"the repair did not train weights: {error}")
            return made
        return Repaired((*made.stages, _stage("distillation", record)), losses, [])

    @property
    def changed_weights(self) -> list[nn.Parameter]:
        """The weights of the present student that may change before a recovery.

        In a trial, these are the weights of all blocks. Otherwise, they are the output maps, gains and biases from the
        first gap on, of blocks with a family: it is fitted to few windows, and the rest of a file stays as it is.
        """
        student = self.student
        if self.trial is not None:
            return block_weights(student)
        found: dict[nn.Parameter, None] = {}
        for layer in student.kept[max(0, student.first_gap - 1) :]:
            block, family = student.runner.blocks[layer], student.checkpoint.families[layer]
            if family is not None:
                found |= dict.fromkeys(p for module in output_maps(block, family) for p in module.parameters())
                found |= dict.fromkeys(parameter for parameter in block.parameters() if parameter.dim() == 1)
        return [weight for weight in found if weight not in student.runner.shared]

    def _refit(self, place: int) -> None:
        """Refit the output maps of kept[place:] in order, where they are known, each on the outputs of those before."""
        student, states = self.student, self.student.fit.at(place)
        layers = student.kept[place:]
        for done, layer in enumerate(layers):
            student.progress(done, len(layers), f"least squares, block {layer}")
            inputs = student.fit.inputs
            if is_linear(student.checkpoint.families[layer]):
                refit_block(student.runner, layer, states, student.fit.at(student.following(layer)), inputs)
            states = student.runner.through([layer], states, inputs)


def smaller_model(student: Student) -> Checkpoint:
    """Return the present student as a checkpoint."""
    model = student.model()
    return replace(student.checkpoint, model=model, config=model.config)


def block_weights(student: Student) -> list[nn.Parameter]:
    """Return the weights of the kept blocks, without those that removed blocks or other modules use as well."""
    weights = (weight for layer in student.kept for weight in student.runner.blocks[layer].parameters())
    return [weight for weight in dict.fromkeys(weights) if weight not in student.runner.shared]


def train(
    student: Student,
    before: Losses,
    weights: Sequence[nn.Parameter],
    recovery: Recovery,
    folder: Path | None = None,
) -> tuple[Losses, RecoveryRecord]:
    """Distil these weights of the student towards the dense model, in place; no others differ from the original ones.

    `before` are the student's losses. The dense model has its original weights meanwhile.
    """
    smaller = smaller_model(student)
    pairs = paired_weights([student.runner.blocks[layer] for layer in student.kept], blocks_of(smaller), set(weights))
    student.restore()
    try:
        record = recovery.run(smaller, student.checkpoint, list(pairs.values()), folder, student.progress)
    finally:
        student.remember(pairs)
        put_weights(list(pairs), [value.detach() for value in pairs.values()])
    return (student.losses() if record.kept else before), record


def paired_weights(
    blocks: Sequence[nn.Module], smaller: Sequence[nn.Module], chosen: Collection[nn.Parameter]
) -> dict[nn.Parameter, nn.Parameter]:
    """Return the weight of the smaller model for each chosen weight of the kept blocks that has an equal one there.

    With fewer blocks, a block can have fewer parts (Zamba 2), or other ones of the same name.
    """
    pairs = dict[nn.Parameter, nn.Parameter]()
    for block, other in zip(blocks, smaller, strict=True):
        made = dict(other.named_parameters())
        for name, weight in block.named_parameters():
            if weight in chosen and name in made and torch.equal(weight, made[name]):
                pairs[weight] = made[name]
    return pairs


def _stage(name: str, made: RecoveryRecord) -> RepairStage:
    return RepairStage(name=name, before=made.before, after=made.after, error=made.error, kept=made.kept)


def _is_better(one: Removed, other: Removed, finished: Mapping[Removed, Repaired]) -> bool:
    """Return whether a set is better than another, by more than the standard error of the difference.

    Sets that are as good as each other are told apart by whether their blocks are adjacent, and then by the mean.
    """
    gain, error = difference(finished[other].losses, finished[one].losses)
    if abs(gain) > error or _is_run(one) == _is_run(other):
        return gain > 0
    return _is_run(one)


def _is_run(removed: Removed) -> bool:
    return removed[-1] - removed[0] == len(removed) - 1


def in_memory(weights: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return copies of weights in main memory."""
    return [weight.detach().to("cpu", copy=True) for weight in weights]


@torch.no_grad()
def put_weights(weights: Sequence[nn.Parameter], values: list[Tensor]) -> None:
    """Set weights to values."""
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def difference(losses: Losses, others: Losses) -> tuple[float, float]:
    """Return the mean of the differences on each window, and its standard error; ∞ for a single window.

    >>> difference(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0]))
    (3.0, 1.0)
    """
    apart = losses.double() - others.double()
    error = float(apart.std()) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
    return float(apart.mean()), error


# --- Make shrunk models: with given blocks removed, or the smallest one whose loss stays within a limit --------------

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
