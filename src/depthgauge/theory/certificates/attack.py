"""Lower bounds: a search for inputs on which a network and its surrogate differ most.

The search represents an input by a few distinct tokens with multiplicities: 1,024 tokens cost as much as five. Equal
tokens stay equal in every layer of a network that is not causal, so only the distinct tokens are computed. The search
runs in floating point and returns a candidate; `difference_below` of `suprema` proves the value there.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError, require_count
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.network.network import AttentionFunction, Layer, SelfAttentionNetwork

MANY = 1024
"""Number of tokens beside the probe when the number of tokens is free."""
SHARES = ((0.5, 0.5), (0.789, 0.211), (0.4, 0.3, 0.2, 0.1), (1.0,))
"""Multiplicities of the distinct tokens beside the probe, as fractions; 0.789 puts the mean at 1/√3 of the corner."""

BATCHED = (3, 8)
"""Patterns of up to 3 distinct tokens are searched in one batch, and those of 4 to 8 in another."""

Evaluate = Callable[[Float[Tensor, "starts r d"], Float[Tensor, "starts r"]], Float[Tensor, "starts r d"]]
"""Maps distinct tokens and the logarithms of their multiplicities to S(X) at these tokens."""


@dataclass(frozen=True)
class AttackOptions:
    """Options of the search, as in `certify`.

    `starts` counts the random starting points per pattern of multiplicities. None stays on the network's device.
    """

    starts: int | None = None
    steps: int = 40
    seed: int = 0
    device: torch.device | str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Hints(ArrayRecord):
    """Starting points suggested by the proof of the upper bound.

    The search starts where the tensors T_a of the leading term (docs/math.md §3.3) are large, and from the constant
    inputs that maximise `drift`, Z_{0:L} − Z'_{0:L'}, the linear part of S − S' in mean(X).
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


def climb(
    pair: tuple[Evaluate, Evaluate],
    inputs: InputSet,
    x: Float[Tensor, "starts r d"],
    counts: Int64[Tensor, "starts r"],
    steps: int,
) -> tuple[Float[Tensor, "starts r d"], Float[Tensor, " starts"]]:
    """Run projected gradient ascent on max|S − S'| from every start.

    A path ends when a step does not move it: the gradient at this point is the same in every later step, and a shorter
    step in the same direction does not leave a corner of the box either.

    Returns the best point of each path and its value.
    """
    bias, hidden = counts.to(x.dtype).log(), (counts == 0)[..., None]
    best, best_value = x.clone(), torch.full((len(x),), -1.0, dtype=x.dtype, device=x.device)
    moving = torch.arange(len(x), device=x.device)  # the paths that have not ended; x has a row for each of them
    for step in range(steps + 1):
        x = x.detach().requires_grad_(True)
        gap = pair[0](x, bias[moving]) - pair[1](x, bias[moving])
        size = gap.masked_fill(hidden[moving], 0.0).abs().flatten(1).amax(dim=1)
        value = torch.where(size.isfinite(), size, -1.0).detach()
        better = value > best_value[moving]
        best[moving[better]] = x.detach()[better]
        best_value[moving[better]] = value[better]
        if step == steps:
            break
        (gradient,) = torch.autograd.grad(size.sum(), x)
        rate = inputs.radius * 0.8 * (1 - step / steps) ** 2
        moved = inputs.project(x.detach() + rate * inputs.steepest(gradient.nan_to_num(nan=0.0)))
        changed = (moved != x).flatten(1).any(dim=1)
        x, moving = moved[changed], moving[changed]
        if not len(moving):
            break
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


def attack(comparison: Comparison, options: AttackOptions = DEFAULT_OPTIONS, hints: Hints = NO_HINTS) -> Candidate:
    """Return the input of the set with the largest max|S(X) − S'(X)| that was found.

    The search starts from random corners of the set and from the points that `hints` suggests.
    """
    paths = search(comparison, options, hints)
    best = (Candidate(points[values.argmax()], counts, float(values.amax())) for points, counts, values in paths)
    return max(best, key=lambda candidate: candidate.value)


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
    target = torch.device(options.device) if options.device is not None else network.device
    pair = prepare(network, target), prepare(surrogate, target)
    patterns = patterns_of(comparison.tokens, network.causal)
    drawn = [_starts(comparison, counts, starts, hints, generator).to(network.dtype) for counts in patterns]
    groups: dict[int, list[int]] = {}  # the patterns that are searched in one batch, by the largest number of tokens
    for index, counts in enumerate(patterns):
        groups.setdefault(next((most for most in BATCHED if len(counts) <= most), len(counts)), []).append(index)
    for group in groups.values():
        x, counts = _padded([drawn[index] for index in group], [patterns[index] for index in group])
        points, values = climb(pair, comparison.region, x.to(target), counts.to(target), options.steps)
        first = 0
        for index in group:
            these = slice(first, first + len(drawn[index]))
            yield points[these, : len(patterns[index])].cpu(), patterns[index], values[these].cpu()
            first = these.stop


def _padded(
    drawn: list[Float[Tensor, "_ _ d"]], group: list[Int64[Tensor, " _"]]
) -> tuple[Float[Tensor, "starts r d"], Int64[Tensor, "starts r"]]:
    """Concatenate the starts of several patterns; shorter inputs repeat their first token with multiplicity 0."""
    r = max(map(len, group))
    x = [torch.cat([part, part[:, :1].expand(-1, r - part.shape[1], -1)], dim=1) for part in drawn]
    counts = [F.pad(one, (0, r - len(one))).expand(len(part), r) for one, part in zip(group, drawn, strict=True)]
    return torch.cat(x), torch.cat(counts)


def patterns_of(tokens: int | None, causal: bool) -> list[Int64[Tensor, " r"]]:
    """Return the multiplicities to try; the first token, the probe, occurs once."""
    if causal:
        return [torch.ones(n, dtype=torch.int64) for n in ([1, 2, 8, 16] if tokens is None else [tokens])]
    others = MANY if tokens is None else tokens - 1
    patterns = []
    for shares in SHARES:
        counts = [round(share * others) for share in shares]
        counts[0] += others - sum(counts)
        pattern = [1, *(count for count in counts if count > 0)]
        if pattern not in patterns:
            patterns.append(pattern)
    if tokens is None or tokens <= 16:
        patterns.append([1] * (tokens or 4))
    return [torch.tensor(counts) for counts in patterns]


def _starts(
    comparison: Comparison, counts: Int64[Tensor, " r"], starts: int, hints: Hints, generator: torch.Generator
) -> Float[Tensor, "starts r d"]:
    inputs = comparison.region
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
        ordered = [probe[:, None], inputs.extreme(z[:, None] * alternating)]
        # In a causal network only the last token sees all others.
        drawn.append(torch.cat(ordered[::-1] if comparison.network.causal else ordered, dim=1))
    return torch.cat(drawn)


def multiset_attention(counts: Float[Tensor, " r"]) -> AttentionFunction:
    """Return softmax attention over distinct tokens with multiplicities: p_j ∝ counts_j · exp(s_j)."""
    return partial(_attend, counts.log())


def _attend(bias: Tensor, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    scores = (query @ key.mT) * scale + bias
    if is_causal:
        scores = scores + _causal_mask(scores)
    return torch.softmax(scores, dim=-1) @ value


def _causal_mask(like: Tensor) -> Float[Tensor, "r r"]:
    """Return −∞ where column j is later than row i, and 0 elsewhere."""
    r = like.shape[-1]
    return torch.full((r, r), -math.inf, dtype=like.dtype, device=like.device).triu(1)


def difference(
    network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, x: Float[Tensor, "*batch r d"], counts: Tensor
) -> Float[Tensor, "*batch r d"]:
    """Return S(X) − S'(X) at the distinct tokens x, where token j occurs counts_j times."""
    attention = multiset_attention(counts.to(x.dtype))
    gap: Tensor = network(x, attention) - surrogate(x, attention)
    return gap


def prepare(network: SelfAttentionNetwork, device: torch.device) -> Evaluate:
    """Return a fast S(X) for batches of small inputs, each with its own multiplicities.

    Multiplicity 0, whose logarithm is −∞, hides a token from all others.

    The scores are x_i A_h x_jᵀ with A_h = scale · Q_h K_hᵀ, so X itself is the keys and the values of all heads: two
    batched products per layer serve all heads. The weights have no gradients.
    """
    frozen = network.copy().requires_grad_(False).to(device)
    if frozen.norm != "none" or frozen.has_attention_bias or any(2 * layer.key_dim < frozen.dim for layer in frozen):
        return lambda x, bias: frozen(x, partial(_attend, bias[:, None, None, :]))
    combined = [(frozen.scale * layer.query @ layer.key.mT).transpose(0, 1).flatten(1) for layer in frozen]
    return partial(_run, frozen, list(zip(frozen, combined, strict=True)))


def _run(network: SelfAttentionNetwork, layers: list[tuple[Layer, Tensor]], x: Tensor, bias: Tensor) -> Tensor:
    """Compute S(X); each layer comes with its A of shape [d, H·d]."""
    starts, r, d = x.shape
    shown = bias[:, None, None, :]  # [starts, query token, head, key token]
    if network.causal:
        shown = shown + _causal_mask(bias)[:, None, :]
    for layer, combined in layers:
        scores = ((x @ combined).reshape(starts, -1, d) @ x.mT).reshape(starts, r, layer.heads, r)
        weights = torch.softmax(scores + shown, dim=-1).reshape(starts, -1, r)
        y = (weights @ x).reshape(starts, r, -1) @ layer.value.flatten(0, 1)
        x = x + y if network.skip else y
        if layer.mlp is not None:
            z = layer.mlp(x, network.activation)
            x = x + z if network.mlp_skip else z
    return x
