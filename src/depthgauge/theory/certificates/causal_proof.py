"""Upper bounds on |S − S'| for causal networks with skip connections (docs/math.md §3.12).

Subtracting the expansions of both networks gives Σ_m C^m X (e_m − e'_m), and the terms of the heads of both. `plain`
bounds every head alone. `joint` bounds the leading terms of all heads of both networks together; equal heads cancel
there.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.attack import Hints
from depthgauge.theory.certificates.box import PartsByLayer, Vector, total
from depthgauge.theory.certificates.causal_bounds import CausalBounds
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.regions import ConvexLead, ConvexRegion, PointRegion, Region
from depthgauge.theory.certificates.token_bounds import PairLead
from depthgauge.theory.certificates.token_proof import PlainOrJoint, largest_first
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.rounding import down, exp_up, mul_up, no_bound, nonnegative_sum_up, tanh_up, up
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import prefix_average
from depthgauge.theory.surrogates.expansion import CausalExpansion, Expansion

NEAR = 1e-3
"""The largest difference of a position bias from log C^m at which the head is taken for the pattern C^m."""


@dataclass(frozen=True, eq=False, repr=False)
class CausalProof(PlainOrJoint):
    """An upper bound on |S − S'| per output coordinate, and what proves it.

    `joint` is None if it would take too long; `leads` are the bounds of the leading terms in it. `head_parts` has the
    plain bound of each head of S alone.
    """

    bounds: CausalBounds
    other: CausalBounds
    region: Region
    plain: Vector
    joint: Vector | None
    leads: tuple[PairLead | ConvexLead, ...]
    head_parts: PartsByLayer

    @property
    def methods(self) -> tuple[str, ...]:
        """The name of the method that gives the bound at the worst coordinate."""
        if not self.is_joint:
            return ("plain",)
        return ("pairs",) if isinstance(self.region, PointRegion) else ("joint",)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the bound."""
        return (
            () if self.joint is not None else ("there are too many points for pairs, so every head is bounded alone",)
        )

    def hints(self, most: int = 8) -> Hints:
        """Return starting points for the attack: the leading term of the `most` worst coordinates."""
        mine, theirs = self.bounds.tensors()[0], self.other.tensors()[0]
        T = Rank1Sum.join(mine, theirs.negated())
        return Hints(T.slices(self.value.argsort(descending=True)[:most]))


@dataclass(frozen=True, eq=False, repr=False)
class OneToken:
    """An upper bound on |S − S'| = |x (Z_{0:L} − Z'_{0:L'})| for a single token x, causal or not; `drift` is Z − Z'."""

    value: Vector
    head_parts: PartsByLayer
    drift: Float[Tensor, "d d"]
    methods = ("plain",)
    notes = ("one token: attention is the identity",)
    lost_at = 0

    def hints(self) -> Hints:
        """Return a starting point for the attack."""
        return Hints(drift=self.drift)


def one_token_proof(comparison: Comparison) -> OneToken:
    """Prove an upper bound for one token, whose attention is the identity, without MLP, LayerNorm and biases."""
    kind = CausalExpansion if comparison.network.causal else Expansion
    X, Y = kind(comparison.network), kind(comparison.surrogate)
    apart = X.drift(0, X.depth) - Y.drift(0, Y.depth)
    value = region_of(comparison).largest(Enclosure(apart.mid[None], apart.rad[None]))[0]
    return OneToken(no_bound(value), tuple(torch.zeros_like(V.mid[:, 0]) for V in X.V), apart.mid)


def region_of(comparison: Comparison) -> Region:
    """Return the set that the tokens of the inputs are taken from."""
    inputs = comparison.inputs
    return (
        PointRegion(inputs.points(), inputs.unevenness)
        if isinstance(inputs, Tokens)
        else ConvexRegion(inputs.kind, inputs.radius)
    )


def causal_proof(comparison: Comparison, progress: Step = silent) -> CausalProof:
    """Prove an upper bound for two causal networks with skip connections, without MLP and LayerNorm."""
    if comparison.network.length is not None:
        raise InputError("certificates cover position biases in the surrogate alone, and the network has some")
    region = region_of(comparison)
    S = CausalBounds("network", CausalExpansion(comparison.network), region, progress)
    other = CausalBounds("surrogate", CausalExpansion(comparison.surrogate), region)
    orders, slipped = surrogate_orders(comparison.surrogate, other)
    mine = S.expansion.orders(0, S.expansion.depth)
    zero = Enclosure.exact(torch.zeros(S.expansion.dim, S.expansion.dim, dtype=torch.float64))
    most = max(len(mine), len(orders))
    apart = (_at(mine, m, zero) - _at(orders, m, zero) for m in range(most))
    linear = total(slipped, *(region.largest(Enclosure(M.mid[None], M.rad[None]))[0] for M in apart))
    parts = tuple(S.added("gap"))
    plain = total(linear, *(nonnegative_sum_up(part, 0) for part in (*parts, *other.added("gap"))))
    both = zip(S.tensors(), other.tensors(), strict=True)
    leads = [region.lead(Rank1Sum.join(T, T_other.negated())) for T, T_other in both]
    found = tuple(lead for lead in leads if lead is not None)
    joint = None
    if len(found) == len(leads):
        beyond = (nonnegative_sum_up(part, 0) for part in (*S.added("rest"), *other.added("rest")))
        joint = largest_first(found, total(linear, *beyond), plain)
    return CausalProof(S, other, region, plain, joint, found, parts)


def _at(orders: list[Enclosure], m: int, zero: Enclosure) -> Enclosure:
    return orders[m] if m < len(orders) else zero


def surrogate_orders(surrogate: SelfAttentionNetwork, bounds: CausalBounds) -> tuple[list[Enclosure], Vector]:
    """Return e'_1, e'_2, … of S', and a bound on how far its heads with position biases are from the patterns C^m.

    A head with the pattern P' has P' X V = C^m X V + (P' − C^m) X V, and |(P' − C^m) X V| ≤ tanh(ε/2)·range(xV) if its
    bias differs from log C^m by at most ε.
    """
    X = bounds.expansion
    none = torch.zeros(X.dim, dtype=torch.float64)
    if surrogate.length is None:
        return X.orders(0, X.depth), none
    layer = surrogate[0]
    if len(surrogate) > 1 or not surrogate.skip:
        raise InputError("certificates cover position biases only in surrogates of one layer with skip connections")
    orders: dict[int, list[int]] = {}
    slips = torch.zeros(layer.heads, dtype=torch.float64)
    for h, (m, slip) in enumerate(pattern_powers(layer)):
        orders.setdefault(m, []).append(h)
        slips[h] = tanh_up(slip / 2.0)
    V = X.V[0]
    sums = [V.at(orders[m]).sum(0) if m in orders else (V.at([0]) * 0.0).sum(0) for m in range(1, max(orders) + 1)]
    slipped = nonnegative_sum_up(mul_up(slips[:, None], bounds.region.ranges(V)), 0)
    return sums, slipped


def pattern_powers(layer: Layer) -> list[tuple[int, float]]:
    """Return for every head m and ε such that its position bias differs from log C^m by at most ε.

    Heads without a position bias have m = 1 and ε = 0.
    """
    assert layer.position_bias is not None
    bias, found = layer.position_bias.detach().to(torch.float64), []
    C = _exact_average(bias.shape[-1])
    powers = [C]
    for h in range(layer.heads):
        if not bool(bias[h].any()):
            found.append((1, 0.0))
            continue
        if bool((layer.query[h].detach() @ layer.key[h].detach().mT).any()):
            raise InputError(f"head {h} has scores and a position bias; certificates cover only one of them in a head")
        for m in range(1, layer.heads + 2):
            if len(powers) < m:
                powers.append(powers[-1] @ C)
            slip = bias_slip(bias[h], powers[m - 1])
            if slip <= NEAR:
                found.append((m, slip))
                break
        else:
            raise InputError(
                f"the position bias of head {h} is not that of repeated averages, log (C^m); certificates cover only "
                "surrogates that collapse makes"
            )
    return found


def _exact_average(n: int) -> Enclosure:
    """Enclose C."""
    C = prefix_average(n)
    return Enclosure(C, up(C) - C)


def bias_slip(bias: Float[Tensor, "n n"], pattern: Enclosure) -> float:
    """Bound |bias − log pattern| over j ≤ i; +∞ if the guess that rounding suggests is not confirmed."""
    visible = torch.ones_like(bias).tril().bool()
    B, low, high = bias[visible], pattern.lower()[visible], pattern.upper()[visible]
    guess = float((B - pattern.mid[visible].log()).abs().max()) * 1.0001 + 1e-12
    # e^(B−ε) ≤ pattern ≤ e^(B+ε)
    if not (guess <= NEAR and bool((exp_up(up(B - guess)) <= low).all())):
        return math.inf
    least = down(1.0 / exp_up(up(-down(B + guess))))
    return guess if bool((high <= least).all()) else math.inf
