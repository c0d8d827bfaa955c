"""Lower bounds: inputs on which a network and its surrogate really differ.

Tokens that are equal stay equal, so an input of many tokens is searched through its few distinct ones and how often
each occurs: a thousand tokens cost as much as five. What is found is a candidate; `evaluate.py` proves its value.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.errors import InputError, require_count
from depthgauge.network.network import AttentionFunction, SelfAttentionNetwork
from depthgauge.progress import Step, silent

MANY = 1024
"""Tokens beside the probe when their number is free."""
SHARES = ((0.5, 0.5), (0.789, 0.211), (0.4, 0.3, 0.2, 0.1), (1.0,))
"""How often the distinct tokens beside the probe occur, as parts of all; 0.789 puts the mean at 1/√3 of the corner."""


@dataclass(frozen=True)
class InputSet:
    """The inputs a statement is about: |entries| ≤ radius (a box), or tokens of Euclidean length ≤ radius (a ball)."""

    kind: str
    radius: float

    def project(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The nearest input of the set, never outside it by a rounding."""
        if self.kind == "box":
            return x.clamp(-self.radius, self.radius)
        # The largest entry is taken out first, so that no square underflows; the margin covers every rounding.
        largest = x.abs().amax(dim=-1, keepdim=True)
        unit = x / torch.where(largest > 0, largest, 1.0)
        length = unit.square().sum(dim=-1, keepdim=True).sqrt()
        margin = (x.shape[-1] + 8) * torch.finfo(x.dtype).eps
        inside = length * largest <= self.radius * (1 - margin)
        return torch.where(inside, x, unit * (self.radius * (1 - 2 * margin) / length))

    def steepest(self, gradient: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The direction of ascent that suits the set: signs for a box, unit vectors for a ball."""
        if self.kind == "box":
            return gradient.sign()
        return F.normalize(gradient, dim=-1, eps=1e-300)

    def extreme(self, direction: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The token of the set that goes furthest in a direction: a corner of the box, a point of the sphere."""
        if self.kind == "box":
            # In the dtype of the direction: a float32 radius may lie outside the box.
            corner = torch.full_like(direction, self.radius)
            return torch.where(direction >= 0, corner, -corner)
        return self.project(2 * self.radius * F.normalize(direction, dim=-1, eps=1e-300))


@dataclass(frozen=True)
class Candidate:
    """An input given by distinct tokens and how often each occurs, and the difference seen on it in floating point."""

    tokens: Float[Tensor, "r d"]
    counts: Int64[Tensor, " r"]
    value: float

    def expand(self) -> Float[Tensor, "n d"]:
        """The input with every token written out."""
        return self.tokens.repeat_interleave(self.counts, dim=0)


def multiset_attention(counts: Float[Tensor, " r"]) -> AttentionFunction:
    """Softmax attention over distinct tokens that occur `counts` times each: their weights are multiplied by it."""
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
    """S(X) − S'(X) on the distinct tokens."""
    attention = multiset_attention(counts.to(x.dtype))
    gap: Tensor = network(x, attention) - surrogate(x, attention)
    return gap


def climb(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    inputs: InputSet,
    x: Float[Tensor, "starts r d"],
    counts: Int64[Tensor, " r"],
    steps: int,
) -> tuple[Float[Tensor, "starts r d"], Float[Tensor, " starts"]]:
    """Projected sign-gradient ascent on max|S − S'| from every start; the best point of each path and its value."""
    best, best_value = x.clone(), torch.full((len(x),), -1.0, dtype=x.dtype, device=x.device)
    for step in range(steps + 1):
        x = x.detach().requires_grad_(True)
        size = difference(network, surrogate, x, counts).abs().flatten(1).amax(dim=1)
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
    """Sign vectors z that make Σ_b |zᵀ T_a[b] z| large, by annealed single flips from random starts."""
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
        flipped = form[..., None] - 4 * (Tz * z[:, :, None, :] - diagonal[:, None])  # after flipping c, [a, s, b, c]
        gain = flipped.abs().sum(-2) - value[..., None]
        heat = (1 - sweep / (0.8 * sweeps)) * 0.1 * value.mean()
        noise = -torch.rand(gain.shape, generator=generator, dtype=T.dtype).clamp(min=1e-12).log().neg().log()
        choice = (gain + max(float(heat), 0.0) * noise).argmax(-1, keepdim=True)
        move = gain.gather(-1, choice) + (max(float(heat), 0.0) > 0) * math.inf > 0
        z = z.scatter(-1, choice, torch.where(move, -z.gather(-1, choice), z.gather(-1, choice)))
    return best


def affordable_starts(network: SelfAttentionNetwork, steps: int, budget: float = 4e11) -> int:
    """As many starts, from 4 to 32, as keep an attack within about `budget` multiplications."""
    weights = sum(parameter.numel() for parameter in network.parameters())
    per_start = 20.0 * weights * 3 * steps  # some twenty distinct tokens in all patterns; backward costs two forwards
    return max(4, min(32, int(budget / per_start)))


def attack(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    inputs: InputSet,
    *,
    tokens: int | None = None,
    starts: int = 32,
    steps: int = 40,
    seed: int = 0,
    lead: Float[Tensor, "a d d d"] | None = None,
    drift: Float[Tensor, "d d"] | None = None,
    device: torch.device | str | None = None,
    progress: Step = silent,
) -> Candidate:
    """The largest max|S(X) − S'(X)| found over the set, deterministic by seed.

    Starts are random corners; where `lead` gives the tensors T_a of the leading term, the corners that maximise it;
    and where `drift` gives the linear part of S − S' in the mean, the constant inputs that maximise that. `tokens`
    fixes the number of tokens (free otherwise); `device` moves the search, for instance to a GPU.
    """
    best: Candidate | None = None
    paths = search(network, surrogate, inputs, tokens, starts, steps, seed, lead, drift, device)
    for index, (points, counts, values) in enumerate(paths):
        progress(index + 1, len(SHARES) + 1, "attacking")
        winner = int(values.argmax())
        if best is None or float(values[winner]) > best.value:
            best = Candidate(points[winner], counts, float(values[winner]))
    assert best is not None
    return best


def search(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    inputs: InputSet,
    tokens: int | None,
    starts: int,
    steps: int,
    seed: int,
    lead: Float[Tensor, "a d d d"] | None = None,
    drift: Float[Tensor, "d d"] | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[Float[Tensor, "starts r d"], Int64[Tensor, " r"], Float[Tensor, " starts"]]]:
    """The paths of an attack: per pattern of counts, the best point of every path and its value."""
    if network.dim != surrogate.dim:
        raise InputError(f"the networks have widths {network.dim} and {surrogate.dim}; they must be equal")
    require_count("starts", starts, "the number of starting points")
    require_count("steps", steps, "the number of steps taken from each", least=0)
    generator = torch.Generator().manual_seed(seed)
    home = network.device
    target = torch.device(device) if device is not None else home
    moved = [net if target == home else net.copy().to(target) for net in (network, surrogate)]
    for counts in _patterns(tokens, network.causal):
        x = _starts(inputs, counts, network.dim, starts, lead, drift, generator).to(network.dtype)
        points, values = climb(moved[0], moved[1], inputs, x.to(target), counts.to(target), steps)
        yield points.detach().cpu(), counts, values.cpu()


def _patterns(tokens: int | None, causal: bool) -> list[Int64[Tensor, " r"]]:
    """How often the distinct tokens occur; the first is the probe, which occurs once."""
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
    inputs: InputSet,
    counts: Int64[Tensor, " r"],
    d: int,
    starts: int,
    lead: Tensor | None,
    drift: Tensor | None,
    generator: torch.Generator,
) -> Float[Tensor, "starts r d"]:
    r = len(counts)
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
