"""Layer-by-layer bounds of a network on the box ‖X‖max ≤ φ (docs/math.md §3.2–3.4).

Every vector is an upper bound per coordinate, valid for every token and for any number of tokens:

    own_ℓ     |Σ_{k<ℓ} E_k|, the token-dependent part of the error of the expansion
    err_ℓ     |Σ_{k<ℓ} E_k + 1·mean(E_k)·Z_{k+1:ℓ}|, the whole error
    state_ℓ   |x_i| for the tokens x_i of X_ℓ
    spread_ℓ  half the range of each coordinate over the tokens of X_ℓ
"""

from dataclasses import dataclass, field
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.theory.certificates.lead import LeadBound, Rank1Sum, lead_bound
from depthgauge.theory.linalg.enclosures import Enclosure, SignBound, sign_norm_up
from depthgauge.theory.linalg.norms import LINEAR_REMAINDER
from depthgauge.theory.linalg.rounding import add_up, mul_up, nonnegative_matmul_up, nonnegative_sum_up, tanh_up, up
from depthgauge.theory.surrogates.expansion import Expansion

Vector = Float[Tensor, " d"]
PerHead = Float[Tensor, " heads"]
HeadVectors = Float[Tensor, "heads d"]
PartsByLayer = tuple[Float[Tensor, "_ d"], ...]
"""One vector per head for each layer; the number of heads may differ between layers."""
RHO = float(up(up(LINEAR_REMAINDER)))
"""An upper bound on ρ = 1/(12√3) (docs/math.md §2.7)."""
JOINT_LIMIT = 64
"""The largest width d at which the leading term is bounded jointly; its tensor has d⁴ entries."""
PREFIX_STEPS = 10
"""Optimisation steps for the scalings of the joint bound of an intermediate state."""


@dataclass
class Norms:
    """Compute sign norms ‖diag(left) M diag(right)‖_{∞→1} and record the scalings that prove them, by name."""

    record: dict[str, SignBound] = field(default_factory=dict)

    def __call__(self, name: str, left: Float[Tensor, " m"], M: Enclosure, right: Float[Tensor, " n"]) -> PerHead:
        """Bound ‖diag(left) M_h diag(right)‖_{∞→1} for every head h."""
        bound = sign_norm_up(M * left[:, None] * right)
        self.record[name] = bound
        return bound.value


@dataclass(frozen=True, eq=False, repr=False)
class LayerBounds(ArrayRecord):
    """Bounds on the input X_k of one layer, as in the module docstring, and on its heads.

    `theta` is θ_h, the range of a row of scores of head h, and `gap` is G_h ≥ |(P_h − U) X_k|. `rest` bounds
    |(P_h − U) X_k − Y W_h C|, the part of head h beyond the leading term, (3.3); None if not needed.
    """

    own: Vector
    err: Vector
    state: Vector
    spread: Vector
    theta: PerHead
    gap: HeadVectors
    rest: HeadVectors | None


def weighted(g: HeadVectors, M: Enclosure) -> Vector:
    """Bound Σ_h g_h |M_h|."""
    return nonnegative_sum_up(weighted_per_head(g, M), 0)


def weighted_per_head(g: HeadVectors, M: Enclosure) -> HeadVectors:
    """Bound g_h |M_h| for every head h."""
    return nonnegative_matmul_up(g[:, None, :], M.abs_up())[:, 0, :]


def column_sums(M: Enclosure, radius: float) -> Vector:
    """Bound φ1|M|; `radius` is φ."""
    return mul_up(nonnegative_sum_up(M.abs_up(), 0), radius)


def first_lost(parts: PartsByLayer) -> int:
    """Return the first layer whose parts are not finite, or the last layer."""
    return next((k for k, part in enumerate(parts) if not bool(part.isfinite().all())), len(parts) - 1)


def total(*terms: Tensor) -> Tensor:
    """Bound the sum of the terms."""
    return reduce(add_up, terms)


def gap_of(theta: PerHead, spread: Vector) -> HeadVectors:
    """Compute G = 2 tanh(θ/4) · spread, which bounds |Σ_j (p_j − 1/n) x_j| ≤ TV(p, uniform) · range(x) (§2.2, §2.3)."""
    return mul_up(2.0 * tanh_up(theta / 4.0)[:, None], spread)


class BoxBounds:
    """Bounds of every layer of a network on the box of radius φ.

    `layers[k]` are the bounds at the input of layer k; `layers[L]` are those of the output and have no heads.
    """

    def __init__(self, expansion: Expansion, radius: float, *, joint: bool, prefixes: bool = False) -> None:
        """Compute the bounds of all layers.

        `joint` also computes `rest` of every head, which a joint bound of the output needs. `prefixes` bounds own_ℓ and
        err_ℓ jointly as well, and uses the smaller of both bounds at every ℓ. This costs two leading terms per layer
        and sharpens only `rest`, hence only the terms beyond the leading one.
        """
        self.expansion, self.radius, self.prefixes = expansion, radius, prefixes
        self.joint = joint and expansion.skip
        self.norms = Norms()
        self.leads: dict[str, LeadBound] = {}
        self.layers: list[LayerBounds] = []
        for index in range(expansion.depth + 1):
            self.layers.append(self._layer(index))

    @property
    def output(self) -> LayerBounds:
        """The bounds of the output X_L."""
        return self.layers[-1]

    def _layer(self, index: int) -> LayerBounds:
        own, err = self._own_and_err(index)
        drift = column_sums(self.expansion.drift(0, index), self.radius)
        phi = torch.full_like(drift, self.radius)
        if self.expansion.skip:
            state, spread = total(phi, drift, err), add_up(phi, own)
        else:
            state, spread = (add_up(drift, err), own) if index else (phi, phi)
        if index:
            state = torch.minimum(state, self._grown_state(index - 1))
        spread = torch.minimum(spread, state)
        if index == self.expansion.depth:
            none = torch.zeros(0, dtype=torch.float64)
            return LayerBounds(own, err, state, spread, none, none[:, None].expand(0, len(own)), None)
        return self._heads(index, own, err, state, spread)

    def _grown_state(self, k: int) -> Vector:
        """Bound |X_{k+1}| ≤ state_k + Σ_h state_k |V_h| for every attention (no first term without skips)."""
        before, V = self.layers[k].state, self.expansion.V[k]
        grown = weighted(before.expand(V.shape[0], -1), V)
        return add_up(before, grown) if self.expansion.skip else grown

    def _heads(self, k: int, own: Vector, err: Vector, state: Vector, spread: Vector) -> LayerBounds:
        W = self.expansion.W[k]
        theta = 2.0 * self.norms(f"{k}.theta", state, W, spread)
        if not self.joint:
            return LayerBounds(own, err, state, spread, theta, gap_of(theta, spread), None)
        # A query is y + e with y = x + m Z_{0:k} and |e| ≤ err, so y W = (x, m) lin with lin = [W; Z_{0:k} W].
        lin = Enclosure.cat([W, self.expansion.drift(0, k) @ W], dim=-2)
        phi, phi2 = torch.full_like(own, self.radius), torch.full((2 * len(own),), self.radius, dtype=torch.float64)
        e1 = self.norms(f"{k}.e1", err, W, spread)
        lin_spread = self.norms(f"{k}.lin_spread", phi2, lin, spread)
        theta = torch.minimum(theta, 2.0 * add_up(lin_spread, e1))
        lin_phi = self.norms(f"{k}.lin_phi", phi2, lin, phi)
        lin_own = self.norms(f"{k}.lin_own", phi2, lin, own)
        rest = total(
            mul_up(mul_up(mul_up(2.0 * RHO, theta), theta)[:, None], spread),
            mul_up(e1[:, None], spread),
            mul_up(lin_phi[:, None], own),
            mul_up(lin_own[:, None], spread),
        )
        return LayerBounds(own, err, state, spread, theta, gap_of(theta, spread), rest)

    def _own_and_err(self, end: int) -> tuple[Vector, Vector]:
        zero = torch.zeros(self.expansion.dim, dtype=torch.float64)
        if end == 0:
            return zero, zero
        V = self.expansion.V
        carried = [self.expansion.carried(k, end) for k in range(end)]
        if self.expansion.skip:
            own = total(zero, *(weighted(self.layers[k].gap, V[k]) for k in range(end)))
            err = total(own, *(weighted(self.layers[k].gap, carried[k]) for k in range(end)))
        else:
            # X_ℓ = 1·m·N_{0:ℓ} + E_{ℓ−1} + Σ_{k<ℓ−1} 1·mean(E_k)·N_{k+1:ℓ}: only E_{ℓ−1} depends on the token (§3.1).
            own = weighted(self.layers[end - 1].gap, V[end - 1])
            err = total(own, *(weighted(self.layers[k].gap, carried[k]) for k in range(end - 1)))
        if not (self.joint and self.prefixes):
            return own, err
        # Both bounds hold, so their minimum does: |Σ E_k| ≤ min(Σ G|V|, lead(T, Tᵐ) + Σ rest|V|), and likewise for err.
        rest_own = total(zero, *(weighted(self._rest(k), V[k]) for k in range(end)))
        rest_err = total(rest_own, *(weighted(self._rest(k), carried[k]) for k in range(end)))
        T = head_tensor(self.expansion, range(end))
        early = [drift_in_query(self.expansion, k) for k in range(end)]
        late = [drift_of_output(self.expansion, k, end) for k in range(end)]
        own_lead = lead_bound(T, Rank1Sum.join(*early), self.radius, steps=PREFIX_STEPS)
        err_lead = lead_bound(T, Rank1Sum.join(*early, *late), self.radius, steps=PREFIX_STEPS)
        self.leads[f"{end}.own"], self.leads[f"{end}.err"] = own_lead, err_lead
        own = torch.fmin(own, add_up(own_lead.value, rest_own))
        err = torch.fmin(err, add_up(err_lead.value, rest_err))
        return own, err

    def _rest(self, k: int) -> HeadVectors:
        rest = self.layers[k].rest
        assert rest is not None
        return rest


def head_tensor(expansion: Expansion, layers: range | list[int]) -> Rank1Sum:
    """Return T_a[b; c, e] = Σ_kh W_kh[b, c] V_kh[e, a] over the given layers k; W includes the factor β."""
    return Rank1Sum.join(*(Rank1Sum(expansion.W[k], expansion.V[k]) for k in layers))


def drift_in_query(expansion: Expansion, k: int) -> Rank1Sum:
    """Return Σ_h (Z_{0:k} W)[b, c] V[e, a], the part of Tᵐ from the drift m Z_{0:k} of the queries of layer k."""
    return Rank1Sum(expansion.drift(0, k) @ expansion.W[k], expansion.V[k])


def drift_of_output(expansion: Expansion, k: int, end: int) -> Rank1Sum:
    """Return Σ_h (N_{0:k} W)[b, c] (V Z_{k+1:ℓ})[e, a], the part of Tᵐ from mean(E_k), carried on by later layers."""
    W = expansion.W[k]
    return Rank1Sum(W + expansion.drift(0, k) @ W, expansion.carried(k, end))
