"""Layer-by-layer bounds of a network on the ball ‖x_i‖₂ ≤ r of every token (docs/math.md §3.8).

These are the recursions of `box.py` in the Euclidean norm. Every bound is one number instead of one per coordinate,
θ = 2 · state · ‖W‖₂ · spread, and coordinate a of x M is at most ‖x‖₂ ‖M e_a‖₂. Tokens after a LayerNorm lie in a ball.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.theory.certificates.box import RHO, PerHead, Vector, drift_in_query, drift_of_output, head_tensor, total
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.linalg.enclosures import Enclosure, spectral_norm_up
from depthgauge.theory.linalg.rounding import add_up, mul_up, nonnegative_sum_up, sqrt_up, tanh_up
from depthgauge.theory.surrogates.expansion import Expansion

Number = Float[Tensor, ""]


def column_lengths(M: Enclosure) -> Float[Tensor, "*batch d"]:
    """Bound ‖M e_a‖₂ for every column a."""
    size = M.abs_up()
    return sqrt_up(nonnegative_sum_up(mul_up(size, size), -2))


def weighted_columns(g: PerHead, M: Enclosure) -> Vector:
    """Bound Σ_h g_h ‖M_h e_a‖₂ for every column a."""
    return nonnegative_sum_up(mul_up(g[:, None], column_lengths(M)), 0)


def weighted_norms(g: PerHead, M: Enclosure) -> Number:
    """Bound Σ_h g_h ‖M_h‖₂."""
    return nonnegative_sum_up(mul_up(g, spectral_norm_up(M)), 0)


@dataclass(frozen=True, eq=False, repr=False)
class BallLayer(ArrayRecord):
    """Euclidean bounds on the input of one layer, and θ, G and rest of each of its heads, as in `box.LayerBounds`."""

    own: Number
    err: Number
    state: Number
    spread: Number
    theta: PerHead
    gap: PerHead
    rest: PerHead


class BallBounds:
    """Bounds of every layer of a network with skip connections, on tokens of length at most r (`radius`)."""

    def __init__(self, expansion: Expansion, radius: float) -> None:
        self.expansion, self.radius = expansion, radius
        self.layers: list[BallLayer] = []
        for index in range(expansion.depth):
            self.layers.append(self._layer(index))

    def _layer(self, index: int) -> BallLayer:
        X, r = self.expansion, torch.tensor(self.radius, dtype=torch.float64)
        own = total(torch.zeros_like(r), *(weighted_norms(self.layers[k].gap, X.V[k]) for k in range(index)))
        err = total(own, *(weighted_norms(self.layers[k].gap, X.carried(k, index)) for k in range(index)))
        drift = spectral_norm_up(X.drift(0, index))
        state, spread = total(r, mul_up(r, drift), err), add_up(r, own)
        if index:
            before = self.layers[index - 1].state
            growth = nonnegative_sum_up(spectral_norm_up(X.V[index - 1]), 0)
            state = torch.minimum(state, mul_up(before, add_up(1.0, growth)))
        spread = torch.minimum(spread, state)
        W = X.W[index]
        size = spectral_norm_up(W)
        lin = mul_up(r, add_up(size, spectral_norm_up(X.drift(0, index) @ W)))
        e1 = mul_up(mul_up(err, size), spread)
        theta = torch.minimum(2.0 * mul_up(mul_up(state, size), spread), 2.0 * add_up(mul_up(lin, spread), e1))
        gap = 2.0 * mul_up(tanh_up(theta / 4.0), spread)
        rest = total(
            mul_up(mul_up(mul_up(2.0 * RHO, theta), theta), spread),
            mul_up(e1, spread),
            mul_up(mul_up(lin, r), own),
            mul_up(mul_up(lin, own), spread),
        )
        return BallLayer(own, err, state, spread, theta, gap, rest)

    def plain(self) -> Float[Tensor, "heads d"]:
        """Bound the contribution G(‖V e_a‖₂ + ‖V Z e_a‖₂) of every head of every layer to each output coordinate a."""
        X, L = self.expansion, self.expansion.depth
        parts = []
        for k, layer in enumerate(self.layers):
            lengths = add_up(column_lengths(X.V[k]), column_lengths(X.carried(k, L)))
            parts.append(mul_up(layer.gap[:, None], lengths))
        return torch.cat(parts)

    def rest(self) -> Vector:
        """Bound Σ_kh rest_kh (‖V e_a‖₂ + ‖V Z e_a‖₂), the contribution of all heads beyond the leading term."""
        X, L = self.expansion, self.expansion.depth
        terms = [torch.zeros(X.dim, dtype=torch.float64)]
        for k, layer in enumerate(self.layers):
            terms += [weighted_columns(layer.rest, X.V[k]), weighted_columns(layer.rest, X.carried(k, L))]
        return total(*terms)

    def tensors(self) -> tuple[Rank1Sum, Rank1Sum]:
        """Return T and Tᵐ of the whole network."""
        X, layers = self.expansion, range(self.expansion.depth)
        drifts = [drift_in_query(X, k) for k in layers] + [drift_of_output(X, k, X.depth) for k in layers]
        return head_tensor(X, layers), Rank1Sum.join(*drifts)

    def second_order(self) -> Vector:
        """Bound Σ_h 2ρθ² r ‖V e_a‖₂, all of `rest` for a network of one layer: there err = own = 0 and Z = 0."""
        (layer,) = self.layers
        curvature = mul_up(mul_up(mul_up(2.0 * RHO, layer.theta), layer.theta), layer.spread)
        return weighted_columns(curvature, self.expansion.V[0])
