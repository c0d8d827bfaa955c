"""Layer-by-layer bounds of a causal network with skip connections, and proofs with them (docs/math.md §3.12).

With C the average over the visible tokens, the input of layer k is x_j + u_j D_k + ε_j in row j: u_j = (C X)_j is in
the convex hull of the points, D_k = e_1(0:k), and |ε_j| ≤ err_k bounds all higher orders and everything in which
attention differs from averaging. The scores of a row, and the values, are

    s_j = (x_i + u_i D)W x_jᵀ + terms whose range is `moved`,        x_j M + u_j D M + ε_j M.

Subtracting the expansions of both networks gives Σ_m C^m X (e_m − e'_m), and the terms of the heads of both. The plain
bound bounds every head alone. The joint bound bounds the leading terms of all heads of both networks together; equal
heads cancel there.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from depthgauge.base.errors import InputError
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.difference import free_heads
from depthgauge.theory.certificates.lead import Rank1Sum, sharpened
from depthgauge.theory.certificates.method import Bound, Method
from depthgauge.theory.certificates.regions import Region, region_of
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed, Upper, through, total
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork
from depthgauge.theory.surrogates.expansion import CausalExpansion, match_heads


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
        return through(err, M.size())

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


NEAR = 1e-3
"""The largest difference of a position bias from log C^m at which the head is taken for the pattern C^m."""


class CausalProof(Method):
    """A proof for two causal networks with skip connections, without MLP and LayerNorm."""

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class."""
        network, surrogate = comparison.network, comparison.surrogate
        if network.length is not None:
            raise InputError("certificates cover position biases in the surrogate alone, and the network has some")
        region = region_of(A, comparison.inputs, network.dim)
        S = CausalLayers(CausalExpansion(network, A), region, self.progress)
        other = CausalLayers(CausalExpansion(surrogate, A), region)
        orders, slipped = surrogate_orders(surrogate, other)
        mine, none = S.X.orders(0, S.X.depth), A.exact(torch.zeros(network.dim, network.dim, dtype=torch.float64))
        most = max(len(mine), len(orders))
        both = zip(*([*found, *[none] * (most - len(found))] for found in (mine, orders)), strict=True)
        linear = total(slipped, *(region.largest((one - two)[None])[0] for one, two in both))
        parts = [S.added(k) for k in range(S.X.depth)]
        plain = total(linear, *(part.sum(0) for part in (*parts, *(other.added(k) for k in range(other.X.depth)))))
        leads, names = [], ("plain",)
        value, notes = plain, () if region.alone is None else (region.alone,)
        if region.alone is None:
            matches = match_heads(network, surrogate)
            mine_led, theirs_led = S.tensors(), other.tensors()
            free = [T.heads(free_heads(network, k, matches, 0)) for k, T in enumerate(mine_led[0])]
            free += [T.heads(free_heads(surrogate, k, matches, 1)).negated() for k, T in enumerate(theirs_led[0])]
            later = ([*one, *(T.negated() for T in two)] for one, two in zip(mine_led[1:], theirs_led[1:], strict=True))
            tensors = [Rank1Sum.join(A, network.dim, terms) for terms in (free, *later)]
            leads = [lead for terms in tensors for lead in region.lead(terms)]
            beyond = (part.sum(0) for one in (S, other) for part in map(one.beyond, range(one.X.depth)))
            joint, _ = sharpened(A, plain, total(linear, *beyond), leads)
            value = plain.least(joint)
            a = int(value.floats().argmax())
            names = (region.joint,) if bool(joint.floats()[a] < plain.floats()[a]) else names
            if A is self.arithmetic:
                self.T = tensors[0]
        return Bound(value, parts, names, notes)


def surrogate_orders(surrogate: SelfAttentionNetwork, layers: CausalLayers) -> tuple[list[Enclosed], Upper]:
    """Return e'_1, e'_2, … of S', and a bound on how far its heads with position biases are from the patterns C^m.

    A head with the pattern P' has P' X V = C^m X V + (P' − C^m) X V, and |(P' − C^m) X V| ≤ tanh(ε/2)·range(xV) if its
    bias differs from log C^m by at most ε.
    """
    X, A = layers.X, layers.A
    if surrogate.length is None:
        return X.orders(0, X.depth), A.zeros(X.dim)
    layer = surrogate[0]
    if len(surrogate) > 1 or not surrogate.skip:
        raise InputError("certificates cover position biases only in surrogates of one layer with skip connections")
    orders: dict[int, list[int]] = {}
    slips = []
    for h, (m, slip) in enumerate(pattern_powers(layer, A)):
        orders.setdefault(m, []).append(h)
        slips.append(slip.reshape(1))
    V = X.V[0]
    none = A.exact(torch.zeros(X.dim, X.dim, dtype=torch.float64))
    sums = [V[orders[m]].sum(0) if m in orders else none for m in range(1, max(orders) + 1)]
    return sums, ((A.cat(slips) / 2.0).tanh()[:, None] * layers.region.ranges(V)).sum(0)


def pattern_powers(layer: Layer, A: BoundArithmetic) -> list[tuple[int, Upper]]:
    """Return for every head m and ε such that its position bias differs from log C^m by at most ε.

    Heads without a position bias have m = 1 and ε = 0.
    """
    assert layer.position_bias is not None
    bias, found = layer.position_bias.detach().to(torch.float64), []
    n = bias.shape[-1]
    visible = torch.ones(n, n, dtype=torch.float64).tril()
    rows = torch.arange(1.0, n + 1, dtype=torch.float64)[:, None]
    C = A.inverse_root(A.exact(rows * rows)) * visible  # row i is the average over the tokens 0 to i
    powers, seen = [C], visible.bool().flatten().nonzero()[:, 0]
    for h in range(layer.heads):
        if not bool(bias[h].any()):
            found.append((1, A.upper(0.0)))
            continue
        if bool((layer.query[h].detach() @ layer.key[h].detach().mT).any()):
            raise InputError(f"head {h} has scores and a position bias; certificates cover only one of them in a head")
        for m in range(1, layer.heads + 2):
            if len(powers) < m:
                powers.append(powers[-1] @ C)
            slip = A.log_distance(bias[h].flatten()[seen], powers[m - 1].reshape(n * n)[seen])
            if float(slip.floats()) <= NEAR:
                found.append((m, slip))
                break
        else:
            raise InputError(
                f"the position bias of head {h} is not that of repeated averages, log (C^m); certificates cover only "
                "surrogates that collapse makes"
            )
    return found
