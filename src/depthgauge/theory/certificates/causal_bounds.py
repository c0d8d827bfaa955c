"""Layer-by-layer bounds of a causal network with skip connections (docs/math.md §3.12).

With C the average over the visible tokens, the input of layer k is x_j + u_j D_k + ε_j in row j: u_j = (C X)_j is in
the convex hull of the points, D_k = e_1(0:k), and |ε_j| ≤ err_k bounds all higher orders and everything in which
attention differs from averaging. The scores of a row, and the values, are

    s_j = (x_i + u_i D)W x_jᵀ + terms whose range is `moved`,        x_j M + u_j D M + ε_j M.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.box import RHO, HeadVectors, PerHead, Vector, head_tensor, total, weighted_per_head
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.regions import Region
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.rounding import add_up, mul_up, nonnegative_sum_up, tanh_up
from depthgauge.theory.surrogates.expansion import CausalExpansion


@dataclass(frozen=True, eq=False, repr=False)
class CausalLayer(ArrayRecord):
    """Bounds at the input of one layer.

    `drift` encloses D, with a leading dimension of 1; `err` is per coordinate. Per head, `theta` bounds the range of a
    row of scores, `turned` that of u_i D W x_j, and `moved` that of what is neither this nor x_i W x_j; `uneven` is
    min(tanh(θ/4), 1 − 1/n), which bounds how far a row of attention is from averaging.
    """

    drift: Enclosure
    err: Vector
    theta: PerHead
    uneven: PerHead
    turned: PerHead
    moved: PerHead


class CausalBounds:
    """Bounds of every layer of a causal network over all inputs whose tokens are points of a region."""

    def __init__(self, name: str, expansion: CausalExpansion, region: Region, progress: Step = silent) -> None:
        self.name, self.expansion, self.region = name, expansion, region
        self.layers: list[CausalLayer] = []
        for index in range(expansion.depth):
            progress(index, expansion.depth, "proving")
            self.layers.append(self._layer(index))

    def _layer(self, k: int) -> CausalLayer:
        X, region, where = self.expansion, self.region, f"{self.name}.{k}"
        zero = Enclosure.exact(torch.zeros(1, X.dim, X.dim, dtype=torch.float64))
        D, *later = [*(_one(order) for order in X.orders(0, k)), zero][: max(k, 1)]
        far = (region.largest(order)[0] for order in later)
        wrong = (nonnegative_sum_up(self.gap(j, M), 0) for j in range(k) for M in self.values(j, k))
        err = total(torch.zeros(X.dim, dtype=torch.float64), *far, *wrong)
        W = X.W[k]
        DW, WD = D @ W, W @ D.mT
        turned = region.widest_row(f"{where}.turned", DW)
        drifting = add_up(region.widest_row(f"{where}.keys", WD), region.widest_row(f"{where}.both", D @ WD))
        query = total(region.largest(W), region.largest(DW), weighted_per_head(err.expand(W.shape[0], -1), W))
        key = add_up(region.ranges(W.mT), region.ranges(D @ W.mT))
        by_error = nonnegative_sum_up(mul_up(err, add_up(key, 2.0 * query)), -1)
        moved = add_up(drifting, by_error)
        theta = total(region.widest_row(f"{where}.theta", W), turned, moved)
        return CausalLayer(D, err, theta, tanh_up(theta / 4.0).clamp(max=region.unevenness), turned, moved)

    def values(self, k: int, end: int) -> Iterator[Enclosure]:
        """Yield V_kh e_m(k+1:ℓ) of all heads of layer k, for m = 0, 1, …: how E_k enters state ℓ (`end`)."""
        V = self.expansion.V[k]
        yield V
        for order in self.expansion.orders(k + 1, end):
            yield V @ order

    def gap(self, k: int, M: Enclosure) -> HeadVectors:
        """Bound |(P_h − C) X_k M_h| for every head h of layer k."""
        spread = add_up(self.region.ranges(M), self._beyond_points(k, M))
        return mul_up(self.layers[k].uneven[:, None], spread)

    def rest(self, k: int, M: Enclosure, *, with_drift: bool) -> HeadVectors:
        """Bound what is beyond the leading term Cov(x_i W x_j, x_j M), and with the drift Cov(u_i D W x_j, x_j M)."""
        layer = self.layers[k]
        other = layer.moved if with_drift else add_up(layer.moved, layer.turned)
        curved = add_up(mul_up(mul_up(RHO, layer.theta), layer.theta), 0.25 * other)
        beyond = mul_up(layer.uneven[:, None], self._beyond_points(k, M))
        return add_up(mul_up(curved[:, None], self.region.ranges(M)), beyond)

    def _beyond_points(self, k: int, M: Enclosure) -> HeadVectors:
        """Bound the range over j of u_j D M + ε_j M."""
        layer = self.layers[k]
        errors = 2.0 * weighted_per_head(layer.err.expand(M.shape[0], -1), M)
        return add_up(self.region.ranges(layer.drift @ M), errors)

    def added(self, part: str) -> Iterator[HeadVectors]:
        """Yield, layer by layer, what every head adds to the output at most; `part` is `gap` or `rest`.

        The leading term has orders 0 and 1, so `rest` contains the others as they are.
        """
        for k in range(self.expansion.depth):
            found = torch.zeros_like(self.expansion.V[k].mid[:, 0])
            for m, M in enumerate(self.values(k, self.expansion.depth)):
                is_led = part == "rest" and m <= 1
                found = add_up(found, self.rest(k, M, with_drift=m == 0) if is_led else self.gap(k, M))
            yield found

    def tensors(self) -> tuple[Rank1Sum, Rank1Sum, Rank1Sum]:
        """Return the leading terms: of order 0, by the drift of queries, and of order 1 in the output."""
        X = self.expansion
        every = range(X.depth)
        drift = [Rank1Sum(self.layers[k].drift @ X.W[k], X.V[k]) for k in every]
        carried = [Rank1Sum(X.W[k], X.V[k] @ X.orders(k + 1, X.depth)[0]) for k in every[:-1]]
        nothing = Rank1Sum(X.W[0] * 0.0, X.V[0])
        return head_tensor(X, every), Rank1Sum.join(*drift), Rank1Sum.join(nothing, *carried)


def _one(M: Enclosure) -> Enclosure:
    """Return the matrix with a leading dimension, as that of a single head."""
    return Enclosure(M.mid[None], M.rad[None])
