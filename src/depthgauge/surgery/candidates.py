"""Compare sets of blocks as finished models, repair the best ones, and take the best model.

All models are compared on the same selection windows, by the differences on each window. Their standard error says
which differences are large enough to count: a repair is kept only if its gain is larger than its standard error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge._format import size_text
from depthgauge._io import write_tensors
from depthgauge.results.record import finite
from depthgauge.results.shrink_record import CandidateRecord, RepairStage
from depthgauge.surgery.distill import TRAINING, distill, has_room
from depthgauge.surgery.repair import is_linear, output_maps, refit_block
from depthgauge.surgery.shrinker import Removed, Shrinker

HEADLESS = 4
"""How many times as many steps a model without a head is trained: it costs a fraction per token. On MiniLM, more steps
lowered the distance on other windows."""
Losses = Float[Tensor, " select"]
"""One number per selection window."""


@dataclass(frozen=True, eq=False)
class Repaired:
    """A repaired model.

    - `stages`: what was tried, in order
    - `losses`: the objective on every selection window
    - `weights`: the values of the repairable weights
    """

    stages: tuple[RepairStage, ...]
    losses: Losses
    weights: list[Tensor]


class Candidates:
    """Sets of blocks as finished models.

    Use `choose` to find the best set, then `repair` to make its model.

    - `shrinker`: the model, which `repair` changes in place
    - `seed`: the order of the windows in the repair
    - `notes`: what was left out
    """

    def __init__(self, shrinker: Shrinker, seed: int) -> None:
        self.shrinker, self.seed = shrinker, seed
        self.notes: tuple[str, ...] = ()
        self._best: tuple[Removed, Repaired] | None = None

    def choose(
        self, sets: Mapping[str, Removed], given: Removed | None = None
    ) -> tuple[Removed, tuple[CandidateRecord, ...]]:
        """Return the best set, or the `given` one, and what was measured of each, the best first.

        The sets that are best without repair, `effort.finalists` of them, are compared after repair too. With a given
        set, it is the only one that is repaired.
        """
        shrinker = self.shrinker
        methods: dict[Removed, list[str]] = {}
        for method, removed in sets.items():
            methods.setdefault(removed, []).append(method)
        bare = shrinker.losses_without(methods)
        order = sorted(bare, key=lambda removed: float(bare[removed].mean()))
        finished = dict(bare)
        repaired: dict[Removed, Repaired] = {}
        finalists = order[: shrinker.effort.finalists] if given is None else [given]
        for removed in finalists if shrinker.repairs else []:
            repaired[removed] = self.repair(removed)
            finished[removed] = repaired[removed].losses
        shrinker.restore()
        order.sort(key=lambda removed: float(finished[removed].mean()))
        best, records = order[0] if given is None else given, []
        for removed in order:
            increase, error = difference(bare[removed], shrinker.dense_losses)
            after = None if removed not in repaired else difference(finished[removed], shrinker.dense_losses)
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
        return best, tuple(records)

    def repair(self, removed: Removed) -> Repaired:
        """Remove exactly these blocks from the original model and repair the others in place, from the first gap on.

        Where no norm follows the maps that write into the residual stream, they are refitted by least squares first.
        Then they and all gains and biases are trained towards the dense model's predictions. Each stage is undone
        unless its gain on the selection windows is larger than its standard error.
        """
        shrinker = self.shrinker
        bare = shrinker.losses_without([removed])[removed]
        shrinker.keep_all_but(removed)
        if not shrinker.repairs:
            return Repaired((), bare, [])
        place = max(0, shrinker.first_gap - 1)
        weights = self.repairable(place)
        shrinker.remember(weights)
        made = self._known(removed, weights)
        if made is None:
            made = self._repaired(place, weights, bare)
            self._save(removed, made)
        if self._best is None or float(made.losses.mean()) <= float(self._best[1].losses.mean()):
            self._best = removed, made
        return made

    def repairable(self, place: int) -> list[nn.Parameter]:
        """Return the weights that the repair may change: output maps, gains and biases of kept[place:].

        Blocks without a family have none.
        """
        found: dict[nn.Parameter, None] = {}
        for layer in self.shrinker.kept[place:]:
            block, family = self.shrinker.runner.blocks[layer], self.shrinker.checkpoint.families[layer]
            if family is None:
                continue
            found |= dict.fromkeys(p for module in output_maps(block, family) for p in module.parameters())
            found |= dict.fromkeys(parameter for parameter in block.parameters() if parameter.dim() == 1)
        return [weight for weight in found if weight not in self.shrinker.runner.shared]

    def _repaired(self, place: int, weights: list[nn.Parameter], losses: Losses) -> Repaired:
        """Try the stages of the repair, one after the other; `losses` are those before it."""
        shrinker, effort = self.shrinker, self.shrinker.effort
        refitted = [layer for layer in shrinker.kept[place:] if is_linear(shrinker.checkpoint.families[layer])]
        trials = {"least squares": partial(self._refit, place)} if refitted else {}
        steps = effort.steps * (1 if shrinker.checkpoint.objective == "loss" else HEADLESS)
        if self._has_room(weights):
            trials["distillation"] = partial(
                distill, shrinker, place, weights, steps=steps, tokens=effort.tokens, seed=self.seed, label="repair"
            )
        stages = []
        for name, run in trials.items():
            before = in_memory(weights)
            run()
            after = shrinker.losses()
            gain, error = difference(losses, after)
            is_kept = gain > error
            stages.append(
                RepairStage(
                    name=name, before=float(losses.mean()), after=float(after.mean()), error=finite(error), kept=is_kept
                )
            )
            if is_kept:
                losses = after
            else:
                put_weights(weights, before)
        return Repaired(tuple(stages), losses, in_memory(weights))

    def _has_room(self, weights: list[nn.Parameter]) -> bool:
        """Return whether weights can be trained: all of the model must be in memory, with `TRAINING` bytes for each."""
        if self.shrinker.checkpoint.stream is not None:
            return False
        fits = has_room(weights) or has_room(weights, torch.device("cpu"))
        if all(self.shrinker.runner.ranks.exchanged(fits)):
            return True
        needed = TRAINING * sum(weight.numel() for weight in weights)
        self.notes = (f"the repair did not train weights: this needs {size_text(needed)} of memory",)
        return False

    def _refit(self, place: int) -> None:
        """Refit the output maps of kept[place:] in order, where they are known, each on the outputs of those before."""
        shrinker, states = self.shrinker, self.shrinker.fit.at(place)
        layers = shrinker.kept[place:]
        for done, layer in enumerate(layers):
            shrinker.progress(done, len(layers), f"least squares, block {layer}")
            inputs = shrinker.fit.inputs
            if is_linear(shrinker.checkpoint.families[layer]):
                refit_block(shrinker.runner, layer, states, shrinker.fit.at(shrinker.following(layer)), inputs)
            states = shrinker.runner.through([layer], states, inputs)

    def _known(self, removed: Removed, weights: list[nn.Parameter]) -> Repaired | None:
        """Put the weights of a repair back that was done before, in this run or in an interrupted one."""
        made = self._best[1] if self._best is not None and self._best[0] == removed else None
        if made is None and (state := self.shrinker.journal.loaded(self.shrinker.journal.file("repair", removed))):
            made = Repaired(tuple(RepairStage(**one) for one in state["stages"]), state["losses"], state["weights"])
        if made is not None:
            put_weights(weights, made.weights)
        return made

    def _save(self, removed: Removed, made: Repaired) -> None:
        path = self.shrinker.journal.file("repair", removed)
        if path is not None:
            stages = [stage.to_json() for stage in made.stages]
            state = {"stages": stages, "losses": made.losses, "weights": made.weights}
            write_tensors(path, state)


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
