"""A network as a function of the shares of its tokens, enclosed on simplices of shares (docs/math.md §3.15).

Without mask and positions row i of S(X) depends on its own token and on the shares p of the tokens alone:

    attention_h(x_t) = Σ_u p_u e^{s_tu} x_u V_h / Σ_u p_u e^{s_tu},   s_tu = (β x_t W_h + q_h)·(x_u − m),

for any vector m, because a constant for all u changes no weight. At a point this is a verified evaluation of S.
"""

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.theory.linalg.arb_arithmetic import ArbArithmetic
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, float_below, precision
from depthgauge.theory.network.network import NORM_EPSILON, Layer, SelfAttentionNetwork
from depthgauge.theory.suprema.interpolation import Interpolated, Point, middle

PRECISION, MOST_PRECISION = 160, 5120
"""Bits of precision at the start and at most; deep networks with large weights magnify the intervals."""
ENOUGH = 1e-9
"""The relative width of the result at which the precision is no longer increased."""


def distinct_tokens(x: Float[Tensor, "n d"], is_ordered: bool) -> tuple[Tensor, Tensor]:
    """Return the distinct rows of x and their multiplicities; all rows if their order matters."""
    if is_ordered:
        return x, torch.ones(len(x), dtype=torch.int64)
    rows, counts = torch.unique(x, dim=0, return_counts=True)
    return rows, counts


def difference_below(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, x: Float[Tensor, "n d"]) -> float:
    """Return a number in [0, ‖S(X) − S'(X)‖max], close to the upper end: a proved lower bound at the input X = x.

    For an entry g of S(X) − S'(X) and its interval [a, b], |g| ≥ a if a > 0 and |g| ≥ −b if b < 0. The precision is
    doubled until the widest interval is at most `ENOUGH` times the result.
    """
    nets = network, surrogate
    is_ordered = any(net.causal or net.length is not None for net in nets)
    rows, counts = distinct_tokens(x.detach().cpu().to(torch.float64), is_ordered)
    masses = counts.to(torch.float64)[None]
    masses = masses.expand(len(rows), -1).tril() if network.causal else masses
    A, bits, best = ArbArithmetic(()), PRECISION, 0.0
    while True:
        with precision(bits):
            tokens, keys = (Point(A, A.exact(given[None, None])) for given in (rows, masses))
            one, two = (NetworkOnShares(net, A)(tokens, keys).at for net in nets)
            gap = (one - two).x.flatten()
            best = max([best, *(float_below(abs(entry)) for entry in gap if abs(entry) > 0)])
            widest = max(float(entry.rad()) for entry in gap)
        if widest <= ENOUGH * best or widest == 0.0 or bits >= MOST_PRECISION:
            return best
        bits *= 2


class NetworkOnShares:
    """A network in an arithmetic. Its weights are converted once."""

    def __init__(self, network: SelfAttentionNetwork, A: BoundArithmetic) -> None:
        self.network, self.A = network, A
        self.layers = [_Weights(layer, network, A) for layer in network]

    def __call__(self, x: Interpolated, p: Interpolated) -> Interpolated:
        """Return S.

        Args:
            x: the tokens, [B, K, R, d], or one vector per position.
            p: the weights of the tokens as keys, [B, K, 1 or R, R], not negative and not all zero; shares, or counts,
                or a mask.
        """
        before, after = self.network.norm_place == "before", self.network.norm_place == "after"
        for k, layer in enumerate(self.layers):
            x = x.renewed() if k and x.at.shape[1] > 1 else x
            y = layer.attention(layer.normalized(x, 0) if before else x, p)
            y = x + y if self.network.skip else y
            y = layer.normalized(y, 0) if after else y
            if layer.mlp is not None:
                z = layer.act(layer.normalized(y, 1) if before else y)
                y = y + z if self.network.mlp_skip else z
                y = layer.normalized(y, 1) if after else y
            x = y
        return x.settled()


class _Weights:
    """The weights of a layer, and its parts."""

    def __init__(self, layer: Layer, network: SelfAttentionNetwork, A: BoundArithmetic) -> None:
        self.A, self.network, self.mlp, self.layer = A, network, layer.mlp, layer

        def exact(weight: Tensor) -> Any:
            return A.exact(weight.detach())

        keys = exact(layer.key).mT
        self.query, self.keys = exact(layer.query), keys * network.scale
        self.q = None if layer.query_bias is None else (exact(layer.query_bias[:, None]) @ keys) * network.scale
        self.V, self.whole_V = exact(layer.value), exact(layer.value).sum(0)
        self.mlp_weights = None if layer.mlp is None else tuple(exact(w) for w in layer.mlp.parameters())

    @cached_property
    def W(self) -> Any:
        """β Q_h K_hᵀ, [H, d, d]."""
        return self.query @ self.keys

    def scored(self, e: Any) -> Any:
        """Return β x W_h for some vectors; few of them are multiplied by one factor after the other."""
        return (e @ self.query) @ self.keys if e.shape[0] * e.shape[1] == 1 else e @ self.W

    def attention(self, x: Interpolated, p: Interpolated) -> Interpolated:
        """Return Σ_h P_h X V_h plus the bias."""
        A, layer = self.A, self.layer
        shares = middle(p).mean(-2, keepdim=True)
        m = shares @ middle(x) / shares.sum(-1, keepdim=True)
        apart = x.plus(A.exact(-m)).each(lambda e: e[:, :, None])  # [B, K, 1, R, d]
        queries = x.each(lambda e: self.scored(e[:, :, None]))
        queries = queries if self.q is None else queries.plus(self.q)
        scores = queries.times(apart, lambda s, k: s @ k.mT)  # [B, K, H, R, R]
        if layer.position_bias is not None:
            rows = scores.at.shape[-1]
            scores = scores.plus(A.exact(layer.position_bias.detach()[:, :rows, :rows]))
        counted = middle(p)[:, :, None] > 0
        shift = torch.where(counted, middle(scores), -torch.inf).amax(-1, keepdim=True)
        sizes = scores.plus(A.exact(-shift)).each(lambda e: e * counted.to(torch.float64)).exp()
        weights = sizes.times(p.each(lambda e: e[:, :, None]))
        sums = weights.each(lambda e: e.sum(-1)[..., None])
        values = apart.each(lambda e: e @ self.V)

        def mass() -> tuple[Any, Any]:
            """Σ_u p_u e^{s_u} lies between the extreme e^{s_u} times Σ_u p_u."""
            whole = A.exact(p.at.floats()[:, :1, None].sum(-1, keepdim=True))
            most, least = (e[..., None] for e in A.between(*sizes.whole()).mT.ends())
            return (A.interval(most) * whole).top(), (A.interval(least) * whole).top()

        def extremes() -> tuple[Any, Any]:
            """An average lies between the extreme values."""
            top, below = (e.reshape(*e.shape[:-1], 1, e.shape[-1]) for e in A.between(*values.whole()).ends())
            return top, below

        found = weights.times(values, lambda a, y: a @ y).times(sums.inverse(mass)).within(extremes)
        found = found.each(lambda e: e.sum(2)).plus(A.exact(m) @ self.whole_V)
        return found if layer.output_bias is None else found.plus(A.exact(layer.output_bias.detach()))

    def act(self, x: Interpolated) -> Interpolated:
        """Return the MLP of every token."""
        assert self.mlp_weights is not None
        w_in, b_in, w_out, b_out = self.mlp_weights
        hidden = x.each(lambda e: e @ w_in).plus(b_in).activation(self.network.activation)
        return hidden.each(lambda e: e @ w_out).plus(b_out)

    def normalized(self, x: Interpolated, sublayer: int) -> Interpolated:
        """Return LayerNorm or RMSNorm of every token.

        With c = d(x − mean) the norm is √d c/√(|c|² + d³ε); RMSNorm has c = x, and d for d³.
        """
        A, layer, d = self.A, self.layer, self.network.dim
        assert layer.norm_weight is not None
        assert layer.norm_bias is not None
        epsilon = A.exact(NORM_EPSILON) * float(d)
        if self.network.norm_centers:
            x = x.each(lambda e: e @ (d * torch.eye(d, dtype=torch.float64) - 1.0))
            epsilon = epsilon * float(d**2)
        square = x.times(x, lambda y, z: (y * z).sum(-1)[..., None]).plus(epsilon)
        found = x.times(square.inverse_root(epsilon)).each(lambda e: e * A.root(float(d)))
        limit = A.root(float(d)).top()
        gain, bias = (w.detach()[sublayer] for w in (layer.norm_weight, layer.norm_bias))
        return found.within(lambda: (limit, limit)).each(lambda e: e * gain).plus(bias)
