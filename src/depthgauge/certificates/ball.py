"""What a network can do to inputs whose tokens lie in a ball, ‖x_i‖₂ ≤ r (docs/math.md §3.8).

The recursions of `box.py` in the Euclidean norm: every bound is one number instead of one per coordinate, θ is
2 · state · ‖W‖₂ · spread, and a coordinate a of a product is read off through the length of a column. This is where
tokens live after a LayerNorm.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.certificates.box import RHO, PerHead, Vector, drift_in_query, drift_of_output, head_tensor, total
from depthgauge.certificates.lead import Rank1Sum
from depthgauge.linalg.enclosures import Enclosure
from depthgauge.linalg.rounding import add_up, mul_up, nonnegative_sum_up, sqrt_up, tanh_up
from depthgauge.linalg.spectral import spectral_norm_up
from depthgauge.surrogates.expansion import Expansion

Number = Float[Tensor, ""]


def column_lengths(M: Enclosure) -> Float[Tensor, "*batch d"]:
    """‖M e_a‖₂ for every column a, rounded up."""
    size = M.abs_up()
    return sqrt_up(nonnegative_sum_up(mul_up(size, size), -2))


def weighted_columns(g: PerHead, M: Enclosure) -> Vector:
    """Σ_h g_h ‖M_h e_a‖₂ for every column a, rounded up."""
    return nonnegative_sum_up(mul_up(g[:, None], column_lengths(M)), 0)


def weighted_norms(g: PerHead, M: Enclosure) -> Number:
    """Σ_h g_h ‖M_h‖₂, rounded up."""
    return nonnegative_sum_up(mul_up(g, spectral_norm_up(M)), 0)


@dataclass(frozen=True)
class BallLayer:
    """One layer: Euclidean bounds on what enters it, and θ, G and the rest for each of its heads."""

    own: Number
    err: Number
    state: Number
    spread: Number
    theta: PerHead
    gap: PerHead
    rest: PerHead


class BallBounds:
    """The bounds of every layer of a network with skips on tokens of length at most r (`radius`)."""

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
        """What every head can add to each coordinate of the output, G(‖V e_a‖ + ‖V Z e_a‖), heads of all layers."""
        X, L = self.expansion, self.expansion.depth
        parts = []
        for k, layer in enumerate(self.layers):
            lengths = add_up(column_lengths(X.V[k]), column_lengths(X.carried(k, L)))
            parts.append(mul_up(layer.gap[:, None], lengths))
        return torch.cat(parts)

    def rest(self) -> Vector:
        """Σ_kh rest (‖V e_a‖ + ‖V Z e_a‖): what is left of every head beyond the leading term."""
        X, L = self.expansion, self.expansion.depth
        terms = [torch.zeros(X.dim, dtype=torch.float64)]
        for k, layer in enumerate(self.layers):
            terms += [weighted_columns(layer.rest, X.V[k]), weighted_columns(layer.rest, X.carried(k, L))]
        return total(*terms)

    def tensors(self) -> tuple[Rank1Sum, Rank1Sum]:
        """T and Tᵐ of the whole network."""
        X, everyone = self.expansion, range(self.expansion.depth)
        drifts = [drift_in_query(X, k) for k in everyone] + [drift_of_output(X, k, X.depth) for k in everyone]
        return head_tensor(X, everyone), Rank1Sum.join(*drifts)

    def second_order(self) -> Vector:
        """Σ_h 2ρθ² r ‖V e_a‖ for a network of one layer: its whole rest, since its input has not drifted."""
        (layer,) = self.layers
        curvature = mul_up(mul_up(mul_up(2.0 * RHO, layer.theta), layer.theta), layer.spread)
        return weighted_columns(curvature, self.expansion.V[0])
