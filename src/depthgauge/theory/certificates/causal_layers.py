"""Layer-by-layer bounds of a causal network with skip connections (docs/math.md §3.12).

With C the average over the visible tokens, the input of layer k is x_j + u_j D_k + ε_j in row j: u_j = (C X)_j is in
the convex hull of the points, D_k = e_1(0:k), and |ε_j| ≤ err_k bounds all higher orders and everything in which
attention differs from averaging. The scores of a row, and the values, are

    s_j = (x_i + u_i D)W x_jᵀ + terms whose range is `moved`,        x_j M + u_j D M + ε_j M.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.regions import Region
from depthgauge.theory.linalg.bound_arithmetic import Enclosed, Upper, total
from depthgauge.theory.surrogates.expansion import CausalExpansion


class CausalLayer(NamedTuple):
    """Bounds at the input of one layer.

    `drift` is D, with a leading dimension of 1; `err` is per coordinate. Per head, `theta` bounds the range of a row of
    scores, `turned` that of u_i D W x_j, and `moved` that of what is neither this nor x_i W x_j; `uneven` is
    min(tanh(θ/4), 1 − 1/n), which bounds how far a row of attention is from averaging.
    """

    drift: Enclosed
    err: Upper
    theta: Upper
    uneven: Upper
    turned: Upper
    moved: Upper


class CausalLayers:
    """Bounds of every layer of a causal network over all inputs whose tokens are points of a region."""

    def __init__(self, X: CausalExpansion, region: Region, progress: Step = silent) -> None:
        self.X, self.region, self.A = X, region, X.A
        self.layers: list[CausalLayer] = []
        for k in range(X.depth):
            progress(k, X.depth, "proving")
            self.layers.append(self._layer(k))

    def _layer(self, k: int) -> CausalLayer:
        X, region = self.X, self.region
        zero = self.A.exact(torch.zeros(1, X.dim, X.dim, dtype=torch.float64))
        D, *later = [*(order[None] for order in X.orders(0, k)), zero][: max(k, 1)]
        far = (region.largest(order)[0] for order in later)
        wrong = (self.gap(j, M).sum(0) for j in range(k) for M in self.values(j, k))
        err = total(self.A.zeros(X.dim), *far, *wrong)
        W = X.W[k]
        DW, WD = D @ W, W @ D.mT
        turned = region.widest_row(DW)
        query = total(region.largest(W), region.largest(DW), self._errors(err, W))
        key = region.ranges(W.mT) + region.ranges(D @ W.mT)
        moved = total(region.widest_row(WD), region.widest_row(D @ WD), ((key + query * 2.0) * err).sum(-1))
        theta = total(region.widest_row(W), turned, moved)
        return CausalLayer(D, err, theta, (theta / 4.0).tanh().least(region.unevenness), turned, moved)

    def _errors(self, err: Upper, M: Enclosed) -> Upper:
        """Bound |ε_j M_h|."""
        return (err.expand(M.shape[0], -1)[:, None, :] @ M.size())[:, 0, :]

    def values(self, k: int, end: int) -> Iterator[Enclosed]:
        """Yield V_kh e_m(k+1:ℓ) of all heads of layer k, for m = 0, 1, …: how E_k enters state ℓ (`end`)."""
        V = self.X.V[k]
        yield V
        for order in self.X.orders(k + 1, end):
            yield V @ order

    def gap(self, k: int, M: Enclosed) -> Upper:
        """Bound |(P_h − C) X_k M_h| for every head h of layer k."""
        return self.layers[k].uneven[:, None] * (self.region.ranges(M) + self._beyond_points(k, M))

    def rest(self, k: int, M: Enclosed, *, with_drift: bool) -> Upper:
        """Bound what is beyond the leading term Cov(x_i W x_j, x_j M), and with the drift Cov(u_i D W x_j, x_j M)."""
        layer = self.layers[k]
        other = layer.moved if with_drift else layer.moved + layer.turned
        curved = layer.theta * layer.theta * self.A.rho + other * 0.25
        return curved[:, None] * self.region.ranges(M) + layer.uneven[:, None] * self._beyond_points(k, M)

    def _beyond_points(self, k: int, M: Enclosed) -> Upper:
        """Bound the range over j of u_j D M + ε_j M."""
        layer = self.layers[k]
        return self.region.ranges(layer.drift @ M) + self._errors(layer.err, M) * 2.0

    def added(self, k: int) -> Upper:
        """Bound what every head of layer k adds to the output."""
        return total(*(self.gap(k, M) for M in self.values(k, self.X.depth)))

    def beyond(self, k: int) -> Upper:
        """Bound what every head of layer k adds beyond the leading terms, which have the orders 0 and 1."""
        values = enumerate(self.values(k, self.X.depth))
        return total(*(self.rest(k, M, with_drift=m == 0) if m <= 1 else self.gap(k, M) for m, M in values))

    def tensors(self) -> tuple[list[Rank1Sum], list[Rank1Sum], list[Rank1Sum]]:
        """Return the leading terms by layer: of order 0, by the drift of queries, and of order 1 in the output."""
        X, every = self.X, range(self.X.depth)
        first = [Rank1Sum(self.A, X.W[k], X.V[k]) for k in every]
        drift = [Rank1Sum(self.A, self.layers[k].drift @ X.W[k], X.V[k]) for k in every[1:]]
        late = [Rank1Sum(self.A, X.W[k], X.V[k] @ X.orders(k + 1, X.depth)[0]) for k in every[:-1]]
        return first, drift, late
