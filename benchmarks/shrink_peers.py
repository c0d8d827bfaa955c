"""Published methods of removing blocks and repairing the result, written from their descriptions.

X_ℓ is the input of block ℓ of the dense model and X_L the output of the last block; t runs over tokens, w over windows
and c over channels. A choice of blocks is a set of layers. Every maximal run s, …, e − 1 of removed blocks leaves one
interface, at which X_s takes the place of X_e. A repair changes the model at the interfaces.

Choices:

- ShortGPT (Men et al. 2024): the blocks with the smallest influence BI_ℓ = 1 − mean_t cos(X_ℓ,t, X_ℓ+1,t)
- UIDL (Gromov et al. 2024): the run of blocks s, …, s + k − 1 with the smallest mean_w arccos(cos(X_s, X_s+k)) / π at
  the last token; the last block stays
- SLEB (Song et al. 2024): one block at a time, the one whose removal gives the smallest loss, measured again after
  every removal; the first and the last block stay

Repairs, all from the states of the dense model:

- none
- ReplaceMe (Shopkhoev et al. 2025): M ↦ M T, merged into the last map of the MLP of block s − 1, where M is the output
  of that MLP and T minimizes Σ_t ‖M_t T + (X_s,t − M_t) − X_e,t‖² without regularization
- Prune&Comp (Chen et al. 2025): X ↦ α X, where α is the mean over w and c of mean_t |X_e,c| / mean_t |X_s,c|
- LinearPatch (Chen et al. 2025): X ↦ X H diag(r) Hᵀ, where H is an orthogonal Hadamard matrix and
  r_c = mean_w (mean_t |(X_e H)_c| / mean_t |(X_s H)_c|)
- diagonal: X_c ↦ a_c X_c, where a_c minimizes Σ_t (a_c X_s,tc − X_e,tc)²

The scalar of Prune&Comp and the matrix of LinearPatch are applied to the states. Merged into the weights they give the
same function, up to rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from scipy.linalg import hadamard
from torch import Tensor, nn

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks.block_runner import BlockRunner, hidden_out
from depthgauge.checkpoints.blocks.what_if import Objective
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.surgery.repair import is_linear

GREEDY_WINDOWS = 16
"""How many calibration windows SLEB measures the loss on."""


@dataclass(frozen=True, eq=False)
class Dense:
    """The dense model on some windows.

    - `runner`: its blocks
    - `ids`: token ids
    - `states`: X_0, …, X_L
    """

    runner: BlockRunner
    ids: Int[Tensor, "windows n"]
    states: tuple[Float[Tensor, "windows n d"], ...]

    def losses(self, states: Float[Tensor, "windows n d"]) -> Float[Tensor, " windows"]:
        """Return the loss of every window for states after the last block."""
        return Objective(self.runner, self.ids, states)(states)

    @cached_property
    def dense_losses(self) -> Float[Tensor, " windows"]:
        """The loss of every window."""
        return self.losses(self.states[-1])

    def some(self, count: int) -> "Dense":
        """Return `count` windows, evenly spaced, or all if there are fewer."""
        count = min(count, len(self.ids))
        index = torch.linspace(0, len(self.ids) - 1, count).round().long()
        return Dense(self.runner, self.ids[index], tuple(part[index.to(part.device)] for part in self.states))


def observe(runner: BlockRunner, ids: Int[Tensor, "windows n"]) -> Dense:
    """Run the dense model and keep all states, on the model's device."""
    states = [runner.embed(ids)]
    for layer in range(len(runner)):
        states.append(runner.through([layer], states[-1]))
    return Dense(runner, ids, tuple(states))


# --- which blocks to remove -------------------------------------------------------------------------------------------


def block_influence(dense: Dense) -> Float[Tensor, " layers"]:
    """Return BI_ℓ of every block."""
    return torch.stack([1 - _cosines(before, after).mean() for before, after in pairwise(dense.states)]).cpu()


def shortgpt(dense: Dense, counts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the blocks with the smallest influence, for every number of blocks."""
    order = block_influence(dense).argsort(stable=True).tolist()
    return {count: tuple(sorted(order[:count])) for count in counts}


def angular_distances(dense: Dense, count: int) -> Float[Tensor, " starts"]:
    """Return the angular distance at the last token across every run of `count` blocks without the last block."""
    last = [part[:, -1] for part in dense.states]
    starts = range(len(dense.runner) - count)
    return torch.stack([(_cosines(last[s], last[s + count]).acos() / torch.pi).mean() for s in starts]).cpu()


def uidl(dense: Dense, counts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the run of blocks with the smallest angular distance, for every number of blocks."""
    starts = {count: int(angular_distances(dense, count).argmin()) for count in counts}
    return {count: tuple(range(start, start + count)) for count, start in starts.items()}


def sleb(dense: Dense, counts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the first blocks of the greedy order, for every number of blocks."""
    order = sleb_order(dense.some(GREEDY_WINDOWS), max(counts))
    return {count: tuple(sorted(order[:count])) for count in counts}


def sleb_order(dense: Dense, count: int) -> list[int]:
    """Return `count` blocks in the order in which they are removed.

    The inputs of all kept blocks are stored, so that a candidate costs only the blocks after it.
    """
    runner, kept, removed = dense.runner, list(range(len(dense.runner))), list[int]()
    inputs = dict(enumerate(dense.states[:-1]))
    for _ in range(count):
        losses = {
            layer: float(dense.losses(runner.through(kept[place + 1 :], inputs[layer])).mean())
            for place, layer in list(enumerate(kept))[1:-1]
        }
        best = min(losses, key=losses.__getitem__)
        place = kept.index(best)
        states = inputs.pop(best)
        kept.remove(best)
        removed.append(best)
        for layer in kept[place:]:
            inputs[layer] = states
            states = runner.through([layer], states)
    return removed


CHOICES: Mapping[str, Callable[[Dense, Sequence[int]], dict[int, tuple[int, ...]]]] = {
    "ShortGPT": shortgpt,
    "UIDL": uidl,
    "SLEB": sleb,
}
"""Name → function of the dense model on the calibration windows and the numbers of blocks to remove."""


# --- how to repair ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Repair:
    """What changes at the interfaces.

    - `scales`: s → factors of the channels of X_s, or one factor
    - `matrices`: s → P, with X_s ↦ X_s P
    - `mlps`: ℓ → T, with W ↦ Tᵀ W for the last map of the MLP of block ℓ
    """

    scales: Mapping[int, Tensor] = field(default_factory=dict)
    matrices: Mapping[int, Float[Tensor, "d d"]] = field(default_factory=dict)
    mlps: Mapping[int, Float[Tensor, "d d"]] = field(default_factory=dict)

    def at(self, start: int, states: Float[Tensor, "windows n d"]) -> Float[Tensor, "windows n d"]:
        """Return the changed states at the interface after block `start` − 1."""
        if start in self.scales:
            return states * self.scales[start].to(states)
        if start in self.matrices:
            return states @ self.matrices[start].to(states)
        return states


def interfaces(removed: Sequence[int]) -> list[tuple[int, int]]:
    """Return the maximal runs s, …, e − 1 of removed blocks as pairs (s, e)."""
    found: list[tuple[int, int]] = []
    for layer in sorted(removed):
        if found and found[-1][1] == layer:
            found[-1] = (found[-1][0], layer + 1)
        else:
            found.append((layer, layer + 1))
    return found


def no_repair(dense: Dense, removed: Sequence[int]) -> Repair:
    """Change nothing."""
    return Repair()


def replaceme(dense: Dense, removed: Sequence[int]) -> Repair:
    """Fit a linear map of the MLP's output before every interface; an interface before the first block has none."""
    found = {}
    for start, stop in interfaces(removed):
        if start == 0:
            continue
        width = dense.states[0].shape[-1]
        gram = torch.zeros(width, width, dtype=torch.float64, device=dense.states[0].device)
        cross = torch.zeros_like(gram)
        for index, output in _mlp_outputs(dense, start - 1):
            rows = slice(index, index + len(output))
            mlp = output.double().flatten(0, 1)
            target = (dense.states[stop][rows].double() - dense.states[start][rows].double()).flatten(0, 1) + mlp
            gram += mlp.T @ mlp
            cross += mlp.T @ target
        found[start - 1] = torch.linalg.solve(gram, cross)
    return Repair(mlps=found)


def prune_and_comp(dense: Dense, removed: Sequence[int]) -> Repair:
    """Scale the states by the mean ratio of their magnitudes."""
    ends = interfaces(removed)
    return Repair(scales={s: _ratios(dense.states[s], dense.states[e]).mean() for s, e in ends})


def linear_patch(dense: Dense, removed: Sequence[int]) -> Repair:
    """Scale the channels of the states by the ratio of their magnitudes, after a Hadamard transform."""
    found = {}
    for start, stop in interfaces(removed):
        before, after = dense.states[start], dense.states[stop]
        turn = hadamard_matrix(before.shape[-1]).to(before)
        found[start] = (turn * _ratios(before @ turn, after @ turn)) @ turn.T
    return Repair(matrices=found)


def diagonal(dense: Dense, removed: Sequence[int]) -> Repair:
    """Scale the channels of the states by least squares."""
    found = {}
    for start, stop in interfaces(removed):
        before, after = (dense.states[layer].double().flatten(0, 1) for layer in (start, stop))
        found[start] = (before * after).sum(0) / before.square().sum(0)
    return Repair(scales=found)


REPAIRS: Mapping[str, Callable[[Dense, Sequence[int]], Repair]] = {
    "none": no_repair,
    "ReplaceMe": replaceme,
    "Prune&Comp": prune_and_comp,
    "LinearPatch": linear_patch,
    "diagonal": diagonal,
}
"""Name → function of the dense model on the calibration windows and the removed blocks."""


def repairs_of(checkpoint: Checkpoint) -> dict[str, Callable[[Dense, Sequence[int]], Repair]]:
    """Return the repairs that a model allows: behind a norm, the last map of an MLP cannot take ReplaceMe's map."""
    fits = checkpoint.family is not None and is_linear(checkpoint.family)
    return {name: fit for name, fit in REPAIRS.items() if fits or fit is not replaceme}


def hadamard_matrix(order: int) -> Float[Tensor, "order order"]:
    """Return an orthogonal matrix with entries ±1/√order.

    The matrix is a Kronecker product of Sylvester's matrix of order 2^j and, unless the order is a power of 2, Paley's
    matrix of order q + 1 for a prime q ≡ 3 (mod 4).
    """
    powers = [1 << k for k in range(order.bit_length()) if order % (1 << k) == 0]
    for power in reversed(powers):
        rest = order // power
        if rest == 1 or _fits_paley(rest - 1):
            core = torch.ones(1, 1) if rest == 1 else _paley(rest - 1)
            return torch.kron(torch.from_numpy(hadamard(power, dtype=float)).float(), core) / order**0.5
    raise InputError(f"LinearPatch needs a Hadamard matrix of the model's width, but none is known for {order}")


def _fits_paley(q: int) -> bool:
    return q % 4 == 3 and all(q % divisor for divisor in range(2, int(q**0.5) + 1))


def _paley(q: int) -> Float[Tensor, "q+1 q+1"]:
    """Return I + S, where S is skew with first row 1 and S_ij = χ(i − j) elsewhere, for squares modulo q."""
    squares = {i * i % q for i in range(1, q)}
    made = torch.eye(q + 1)
    made[0, 1:], made[1:, 0] = 1.0, -1.0
    for i in range(q):
        for j in range(q):
            if i != j:
                made[i + 1, j + 1] = 1.0 if (i - j) % q in squares else -1.0
    return made


# --- the shrunk model -------------------------------------------------------------------------------------------------


def shrunk_losses(dense: Dense, removed: Sequence[int], repair: Repair) -> Float[Tensor, " windows"]:
    """Return the loss of every window after the removal and the repair.

    Args:
        dense: the dense model on the windows to evaluate; its states before the first change are reused.
        removed: the removed blocks.
        repair: the changes at the interfaces, fitted on other windows.
    """
    runner, ends = dense.runner, interfaces(removed)
    place = min([start for start, _ in ends] + list(repair.mlps))
    states = dense.states[place]
    with _changed_mlps(runner, repair.mlps):
        for start, stop in ends:
            states = repair.at(start, runner.through(range(place, start), states))
            place = stop
        states = runner.through(range(place, len(runner)), states)
    return dense.losses(states)


def last_map(runner: BlockRunner, layer: int) -> nn.Linear:
    """Return the last map of a block's MLP, which must be linear and followed by the addition alone."""
    family = runner.checkpoint.family
    if family is None or family.order != "pre" or not family.down.startswith(f"{family.mlp}."):
        raise InputError(f"the peers need a model of the Llama type, got {runner.checkpoint.name}")
    found = runner.blocks[layer].get_submodule(family.down)
    if not isinstance(found, nn.Linear):
        raise InputError(f"the peers need MLPs that end with a linear map, got {type(found).__name__}")
    return found


@contextmanager
def _changed_mlps(runner: BlockRunner, maps: Mapping[int, Float[Tensor, "d d"]]) -> Iterator[None]:
    """Replace W by Tᵀ W, and a bias b by Tᵀ b, for as long as the context is open."""
    parameters = [(part, maps[layer]) for layer in maps for part in last_map(runner, layer).parameters()]
    before = [parameter.detach().clone() for parameter, _ in parameters]
    try:
        with torch.no_grad():
            for parameter, turn in parameters:
                parameter.copy_(turn.T @ parameter.to(turn))
        yield
    finally:
        with torch.no_grad():
            for (parameter, _), value in zip(parameters, before, strict=True):
                parameter.copy_(value)


@torch.no_grad()
def _mlp_outputs(dense: Dense, layer: int) -> Iterator[tuple[int, Float[Tensor, "batch n d"]]]:
    """Yield the output of a block's MLP in batches, each with the index of its first window."""
    found: list[Tensor] = []
    handle = last_map(dense.runner, layer).register_forward_hook(lambda _, args, out: found.append(hidden_out(out)))
    try:
        size = dense.runner.batches.size
        for index, part in enumerate(dense.states[layer].split(size)):
            found.clear()
            dense.runner.block(layer, part)
            yield index * size, found[0]
    finally:
        handle.remove()


def _cosines(before: Float[Tensor, "*rows d"], after: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows"]:
    found: Tensor = torch.cosine_similarity(before.double(), after.double(), dim=-1, eps=1e-30).clamp(-1, 1)
    return found


def _ratios(before: Float[Tensor, "windows n d"], after: Float[Tensor, "windows n d"]) -> Float[Tensor, " d"]:
    """Return mean_w (mean_t |after| / mean_t |before|) for every channel."""
    return (after.abs().mean(1) / before.abs().mean(1)).mean(0)
