"""Lower bounds: a search for inputs on which a network and its surrogate differ most.

Equal tokens stay equal in every layer of a network that is not causal. The search therefore represents an input by a
few distinct tokens with multiplicities: 1,024 tokens cost as much as five. It runs in floating point and returns a
candidate; `evaluate.py` proves the value at that candidate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge._records import ArrayRecord
from depthgauge.certificates.compared_networks import Comparison, InputSet
from depthgauge.errors import InputError, require_count
from depthgauge.network.network import AttentionFunction, SelfAttentionNetwork
from depthgauge.progress import Step, silent

MANY = 1024
"""Number of tokens beside the probe when the number of tokens is free."""
SHARES = ((0.5, 0.5), (0.789, 0.211), (0.4, 0.3, 0.2, 0.1), (1.0,))
"""Multiplicities of the distinct tokens beside the probe, as fractions; 0.789 puts the mean at 1/√3 of the corner."""


@dataclass(frozen=True)
class AttackOptions:
    """Options of the search.

    Attributes:
        starts: number of random starting points per pattern of multiplicities; None chooses 4 to 32 by network size.
        steps: gradient steps from each starting point.
        seed: seed of the random numbers; the result is deterministic given the seed.
        device: where the search runs, for example "cuda"; None stays on the network's device.
    """

    starts: int | None = None
    steps: int = 40
    seed: int = 0
    device: torch.device | str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Hints(ArrayRecord):
    """Starting points suggested by the proof of the upper bound.

    Attributes:
        lead: tensors T_a of the leading term (docs/math.md §3.3); the search starts where they are large.
        drift: Z_{0:L} − Z'_{0:L'}, the linear part of S − S' in mean(X); the search starts from the constant inputs
            that maximise it.
    """

    lead: Float[Tensor, "a d d d"] | None = None
    drift: Float[Tensor, "d d"] | None = None


DEFAULT_OPTIONS, NO_HINTS = AttackOptions(), Hints()


@dataclass(frozen=True, eq=False, repr=False)
class Candidate(ArrayRecord):
    """An input given by its distinct tokens and their multiplicities, and max|S − S'| there in floating point."""

    tokens: Float[Tensor, "r d"]
    counts: Int64[Tensor, " r"]
    value: float

    def expand(self) -> Float[Tensor, "n d"]:
        """Return the input with every token repeated as often as it occurs."""
        return self.tokens.repeat_interleave(self.counts, dim=0)


def multiset_attention(counts: Float[Tensor, " r"]) -> AttentionFunction:
    """Return softmax attention over distinct tokens with multiplicities: p_j ∝ counts_j · exp(s_j)."""
    return partial(_attend, counts.log())


def _attend(bias: Tensor, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    scores = (query @ key.mT) * scale + bias
    if is_causal:
        n = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1), -math.inf)
    return torch.softmax(scores, dim=-1) @ value


def difference(
    network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, x: Float[Tensor, "*batch r d"], counts: Tensor
) -> Float[Tensor, "*batch r d"]:
    """Return S(X) − S'(X) at the distinct tokens x, where token j occurs counts_j times."""
    attention = multiset_attention(counts.to(x.dtype))
    gap: Tensor = network(x, attention) - surrogate(x, attention)
    return gap


def climb(
    comparison: Comparison, x: Float[Tensor, "starts r d"], counts: Int64[Tensor, " r"], steps: int
) -> tuple[Float[Tensor, "starts r d"], Float[Tensor, " starts"]]:
    """Run projected gradient ascent on max|S − S'| from every start.

    Returns the best point of each path and its value.
    """
    inputs = comparison.inputs
    best, best_value = x.clone(), torch.full((len(x),), -1.0, dtype=x.dtype, device=x.device)
    for step in range(steps + 1):
        x = x.detach().requires_grad_(True)
        size = difference(comparison.network, comparison.surrogate, x, counts).abs().flatten(1).amax(dim=1)
        value = torch.where(size.isfinite(), size, -1.0).detach()
        better = value > best_value
        best = torch.where(better[:, None, None], x.detach(), best)
        best_value = torch.where(better, value, best_value)
        if step == steps:
            break
        (gradient,) = torch.autograd.grad(size.sum(), x)
        rate = inputs.radius * 0.8 * (1 - step / steps) ** 2
        x = inputs.project(x.detach() + rate * inputs.steepest(gradient.nan_to_num(nan=0.0)))
    return best, best_value


def sign_search(
    T: Float[Tensor, "a d d d"], starts: int, generator: torch.Generator, sweeps: int = 60
) -> Float[Tensor, "a starts d"]:
    """Search sign vectors z that make Σ_b |zᵀ T_a[b] z| large, by annealed single flips from random starts."""
    A, d = T.shape[:2]
    z = 2.0 * torch.randint(0, 2, (A, starts, d), generator=generator).to(T.dtype) - 1
    flat = T.flatten(1, 2)  # [a, b·c, e]
    diagonal = T.diagonal(dim1=-2, dim2=-1)  # [a, b, c]
    best, best_value = z.clone(), torch.full((A, starts), -math.inf, dtype=T.dtype)
    for sweep in range(sweeps):
        Tz = (z @ flat.mT).reshape(A, starts, d, d)  # [a, s, b, c]
        form = (Tz * z[:, :, None, :]).sum(-1)  # zᵀ T_b z
        value = form.abs().sum(-1)
        better = value > best_value
        best, best_value = torch.where(better[..., None], z, best), torch.where(better, value, best_value)
        flipped = form[..., None] - 4 * (Tz * z[:, :, None, :] - diagonal[:, None])  # zᵀ T_b z after flipping z_c
        gain = flipped.abs().sum(-2) - value[..., None]
        heat = (1 - sweep / (0.8 * sweeps)) * 0.1 * value.mean()
        noise = -torch.rand(gain.shape, generator=generator, dtype=T.dtype).clamp(min=1e-12).log().neg().log()
        choice = (gain + max(float(heat), 0.0) * noise).argmax(-1, keepdim=True)
        move = gain.gather(-1, choice) + (max(float(heat), 0.0) > 0) * math.inf > 0
        z = z.scatter(-1, choice, torch.where(move, -z.gather(-1, choice), z.gather(-1, choice)))
    return best


def affordable_starts(network: SelfAttentionNetwork, steps: int, budget: float = 4e11) -> int:
    """Return the number of starts, from 4 to 32, that keeps a search within about `budget` multiplications."""
    weights = sum(parameter.numel() for parameter in network.parameters())
    per_start = 20.0 * weights * 3 * steps  # about 20 distinct tokens in all patterns; backward costs two forwards
    return max(4, min(32, int(budget / per_start))) if per_start else 32


def attack(
    comparison: Comparison,
    options: AttackOptions = DEFAULT_OPTIONS,
    hints: Hints = NO_HINTS,
    progress: Step = silent,
) -> Candidate:
    """Return the input of the set with the largest max|S(X) − S'(X)| that was found.

    The search starts from random corners of the set and from the points that `hints` suggests.
    """
    best: Candidate | None = None
    for index, (points, counts, values) in enumerate(search(comparison, options, hints)):
        progress(index + 1, len(SHARES) + 1, "attacking")
        winner = int(values.argmax())
        if best is None or float(values[winner]) > best.value:
            best = Candidate(points[winner], counts, float(values[winner]))
    assert best is not None
    return best


def search(
    comparison: Comparison, options: AttackOptions, hints: Hints = NO_HINTS
) -> Iterator[tuple[Float[Tensor, "starts r d"], Int64[Tensor, " r"], Float[Tensor, " starts"]]]:
    """Yield the end points of all paths, the multiplicities and the values, for each pattern of multiplicities."""
    network, surrogate = comparison.network, comparison.surrogate
    if network.dim != surrogate.dim:
        raise InputError(f"the networks have widths {network.dim} and {surrogate.dim}; they must be equal")
    require_count("steps", options.steps, "the number of steps taken from each start", least=0)
    starts = affordable_starts(network, options.steps) if options.starts is None else options.starts
    require_count("starts", starts, "the number of starting points")
    generator = torch.Generator().manual_seed(options.seed)
    home = network.device
    target = torch.device(options.device) if options.device is not None else home
    moved = comparison
    if target != home:
        moved = replace(comparison, network=network.copy().to(target), surrogate=surrogate.copy().to(target))
    for counts in _patterns(comparison.tokens, network.causal):
        x = _starts(comparison, counts, starts, hints, generator).to(network.dtype)
        points, values = climb(moved, x.to(target), counts.to(target), options.steps)
        yield points.detach().cpu(), counts, values.cpu()


def _patterns(tokens: int | None, causal: bool) -> list[Int64[Tensor, " r"]]:
    """Return the multiplicities to try; the first token, the probe, occurs once."""
    if causal:
        return [torch.ones(n, dtype=torch.int64) for n in ([1, 2, 8, 16] if tokens is None else [tokens])]
    others = MANY if tokens is None else tokens - 1
    patterns = []
    for shares in SHARES:
        counts = [round(share * others) for share in shares]
        counts[0] += others - sum(counts)
        counts = [count for count in counts if count > 0]
        if [1, *counts] not in patterns:
            patterns.append([1, *counts])
    if tokens is None or tokens <= 16:
        patterns.append([1] * (tokens or 4))
    return [torch.tensor(counts) for counts in patterns]


def _starts(
    comparison: Comparison, counts: Int64[Tensor, " r"], starts: int, hints: Hints, generator: torch.Generator
) -> Float[Tensor, "starts r d"]:
    inputs: InputSet = comparison.inputs
    d, r, lead, drift = comparison.network.dim, len(counts), hints.lead, hints.drift
    drawn = [inputs.extreme(torch.randn(starts, r, d, generator=generator, dtype=torch.float64))]
    if drift is not None:
        constant = inputs.extreme(drift.mT)[:, None, :].expand(d, r, d)
        drawn.append(constant[drift.abs().sum(0).argsort(descending=True)[:8]])
    if lead is not None and r >= 3 and len(lead):
        z = sign_search(lead, max(8, starts // 2), generator)
        form = torch.einsum("abce,asc,ase->asb", lead, z, z)
        order = form.abs().sum(-1).flatten().argsort(descending=True)[:starts]
        z, form = z.flatten(0, 1)[order], form.flatten(0, 1)[order]
        probe = inputs.extreme(form)
        alternating = torch.where(torch.arange(r - 1) % 2 == 0, 1.0, -1.0)[:, None]
        drawn.append(torch.cat([probe[:, None], inputs.extreme(z[:, None] * alternating)], dim=1))
    return torch.cat(drawn)
