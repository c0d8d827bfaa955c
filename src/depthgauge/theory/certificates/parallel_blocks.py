"""Upper bounds on |S − S'| over all sequences of tokens, for LayerNorm and MLPs (docs/math.md §3.13).

S has layers y_ℓ = x_ℓ + a_ℓ(x_ℓ), x_{ℓ+1} = y_ℓ + m_ℓ(y_ℓ), and S' is one wide block y' = X + a'(X), S' = y' + m'(y'):

    S − S' = Σ_ℓ [a_ℓ(x_ℓ) − a_ℓ(X)] + Σ_ℓ [m_ℓ(y_ℓ) − m_ℓ(y')] + (what rounding changed in the weights of S').

All sublayers read n(x). Attention is close to the average over the visible tokens, ā_ℓ(u) = n(u)V_ℓ + o_ℓ with V_ℓ the
sum over the heads. To second order the two sums are averages over pairs of tokens t, u of

    ψ_A(t, u) = Σ_ℓ [ Σ_{k<ℓ} ā_k(u) + m_k(t)] Dn(t) V_ℓ,
    ψ_M(t, u) = Σ_ℓ [−Σ_{k>ℓ} ā_k(u) + Σ_{k<ℓ} m_k(t)] Dm_ℓ(t),

which are bounded over all pairs, all layers together. Only what is beyond them is bounded by norms, layer by layer. The
average over u includes t itself with a weight of at least 1/n for at most n tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from depthgauge.base.errors import InputError
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.method import Bound, Method
from depthgauge.theory.certificates.read_tokens import ReadTokens, column_lengths, diameter, lengths
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import CURVATURE, STEEPEST, BoundArithmetic, Enclosed, Upper, total
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import block_obstacle

ENTRIES = 2**22
"""Entries of an array that are computed at a time (32 MB)."""


@dataclass(frozen=True, eq=False, repr=False)
class FoldedLayer:
    """A layer that reads n(x): gain and bias of LayerNorm are in its weights. Without MLP, that of weight 0.

    Scores are (n(x_i)W_h + q_h)·n(x_j), outputs n(x)V_h and o; W and V are [H, d, d], q is [H, 1, d], o is [1, d].
    """

    W: Enclosed
    q: Enclosed
    V: Enclosed
    o: Enclosed
    w_in: Enclosed
    b_in: Enclosed
    w_out: Enclosed
    b_out: Enclosed

    @staticmethod
    def of(A: BoundArithmetic, network: SelfAttentionNetwork, layer: Layer) -> "FoldedLayer":
        """Fold the norms of a layer into its weights."""
        one = torch.ones(2, network.dim, 1, dtype=torch.float64)
        gain = one if layer.norm_weight is None else layer.norm_weight.detach()[..., None]
        bias = torch.zeros_like(one).mT if layer.norm_bias is None else layer.norm_bias.detach()[:, None, :]
        query, key, value = (A.exact(w.detach()) for w in (layer.query, layer.key, layer.value))
        row, o = A.exact(bias[0]) @ query, A.exact(bias[0]) @ value.sum(0)
        row = row if layer.query_bias is None else row + layer.query_bias.detach()[:, None, :]
        o = o if layer.output_bias is None else o + layer.output_bias.detach()
        keys = (key * gain[0]).mT * network.scale
        attention = (query * gain[0]) @ keys, row @ keys, value * gain[0], o
        if layer.mlp is None:
            column = A.exact(torch.zeros_like(one[0]))
            return FoldedLayer(*attention, column, column[:1], column.mT, column.mT)
        mlp = layer.mlp
        w_in, b_in, w_out = (A.exact(w.detach()) for w in (mlp.w_in, mlp.b_in, mlp.w_out))
        last = A.exact(mlp.b_out.detach()[None])
        return FoldedLayer(*attention, w_in * gain[1], A.exact(bias[1]) @ w_in + b_in, w_out, last)


class Movements:
    """Bounds on how far the states of S and S' are from the tokens, and on what is beyond the leading terms.

    After construction: `flat` bounds the rests that are equal for all tokens, `attention` those of ψ_A at a token t and
    `mlp` those of ψ_M, up to `loose[ℓ]`, which is still to be multiplied by the columns of the MLP's derivative.
    """

    def __init__(self, comparison: Comparison, A: BoundArithmetic) -> None:
        network, surrogate, tokens = comparison.network, comparison.surrogate, comparison.inputs
        assert isinstance(tokens, Tokens)
        self.A, self.activation, self.unevenness = A, network.activation, tokens.unevenness
        self.is_single = tokens.length == 1
        self.read = read = ReadTokens(A, tokens.points(), network)
        self.layers = layers = [FoldedLayer.of(A, network, layer) for layer in network]
        self.V = [layer.V.sum(0) for layer in layers]
        self.hidden = [read.u @ layer.w_in + layer.b_in for layer in layers]
        values, self.slopes = zip(*(A.activation(z, self.activation) for z in self.hidden), strict=True)
        m = [act @ layer.w_out + layer.b_out for act, layer in zip(values, layers, strict=True)]
        o = [layer.o for layer in layers]
        # Sums over the layers before ℓ and from ℓ on, for ℓ = 0, …, L
        self.V_before, self.o_before, self.m_before = (sums(A, x) for x in (self.V, o, m))
        self.V_from, self.o_from = (sums(A, x[::-1])[::-1] for x in (self.V, o))
        self.reach = self._reach(self.V_before, self.o_before)  # ≥ ‖Σ_k ā_k(u)‖ for all tokens u
        self.reach_from = self._reach(self.V_from, self.o_from)
        self.own = [lengths(sum_) for sum_ in self.m_before]
        spreads = [read.u @ layer.V for layer in layers]  # [H, v, d]
        self.ranges = [high + low for high, low in (z.ends() for z in spreads)]
        self.spread = [diameter(z) for z in spreads]
        # TV(row of P(X), average) ≤ min(tanh(θ/4), 1 − 1/n) with θ = max_t ‖n(t)W + q‖ · diameter of n
        self.queries = [lengths(read.u @ layer.W + layer.q).amax(-1) for layer in layers]
        wide = diameter(read.u)
        self.uneven = [(query * wide / 4.0).tanh().least(self.unevenness) for query in self.queries]
        # ‖a_ℓ(X) − (average of ā_ℓ)‖ ≤ E_ℓ, ‖a_ℓ(x_ℓ) − a_ℓ(X)‖ ≤ G_ℓ, ‖m_ℓ(y_ℓ) − m_ℓ(t)‖ ≤ F_ℓ(t)
        self.E = [(a * b).sum(0) for a, b in zip(self.uneven, self.spread, strict=True)]
        self.G: list[Upper] = []
        self.F: list[Upper] = []
        v, d = tokens.points().shape
        self.attention, self.mlp, self.start = A.zeros(v, d), A.zeros(v, d), A.zeros(v)
        self.loose: list[Upper] = []
        self.head_parts: list[Upper] = []
        mlps = [layer for layer, own in zip(layers, network, strict=True) if own.mlp is not None]
        mine, given = self._join(layers, mlps or layers[:1]), FoldedLayer.of(A, surrogate, surrogate[0])
        mixed, self.off = self._mismatch(mine, given)
        self.other = total(self.start, self.reach[-1], *self.E, self.off)
        self.flat = mixed + self._mlp_mismatch(mine, given)
        weights = [(layer.W, layer.V, V, layer.w_in, layer.w_out) for layer, V in zip(layers, self.V, strict=True)]
        norms = A.spectral_norms([part for parts in weights for part in parts])
        self.norms = [norms[start : start + 5] for start in range(0, len(norms), 5)]
        for k in range(len(network)):
            self._attention(k)
            self._mlp(k)

    def _reach(self, V: list[Enclosed], o: list[Enclosed]) -> list[Upper]:
        """Bound ‖n(u)V + o‖ over the tokens u, for every V with its o."""
        return [lengths(self.read.u @ one + add).amax(-1) for one, add in zip(V, o, strict=True)]

    def _attention(self, k: int) -> None:
        """Bound a_k(x_k) − a_k(X) and what is beyond its leading term."""
        read, layer, (W_norm, V_norm, V_sum_norm, *_) = self.read, self.layers[k], self.norms[k]
        late = total(self.start, *self.E[:k], *self.G, *self.F)
        rho = total(self.reach[k], self.own[k], late)
        shift = read.shift(rho).amax(0)
        queries = (self.queries[k] + shift * W_norm) * 2.0
        turned = (shift * (diameter(read.u @ layer.W.mT) + queries) / 4.0).tanh()
        turned = turned * 0.0 if self.is_single else turned  # the attention of one token is the identity
        uneven = (self.uneven[k] + turned).least(self.unevenness) * 2.0
        values = V_sum_norm + (uneven * V_norm).sum(0)
        self.G.append((turned * self.spread[k]).sum(0) + shift * values)
        columns, by_scores = column_lengths(layer.V), turned[:, None] * self.ranges[k]
        self.flat = self.flat + (by_scores + (shift * uneven)[:, None] * columns).sum(0)
        beyond = read.bend(rho, rho, rho * 0.0) + late * read.steep
        self.attention = self.attention + beyond[:, None] * column_lengths(self.V[k])
        self.head_parts.append(by_scores + columns * shift)

    def _mlp(self, k: int) -> None:
        """Bound m_k(y_k) − m_k(t), and what is beyond the leading term of m_k(y_k) − m_k(y')."""
        read, (*_, w_in_norm, w_out_norm) = self.read, self.norms[k]
        rho = total(self.reach[k + 1], self.own[k], *self.E[: k + 1], *self.G, *self.F)
        late = total(self.start, *self.E[k + 1 :], *self.G, *self.F, self.off)
        apart = total(self.reach_from[k + 1], self.own[k], late)
        shift, other = read.shift(rho), read.shift(self.other)
        self.loose.append(read.bend(apart, rho, self.other) + late * read.steep)
        self.mlp = self.mlp + self._kink(k, shift, other, read.shift_between(apart, rho, self.other))
        self.F.append(w_in_norm * w_out_norm * STEEPEST[self.activation] * shift)

    def _kink(self, k: int, shift: Upper, other: Upper, between: Upper) -> Upper:
        """Bound |act(h) − act(h') − act'(h_t)(h − h')| |W_out|, where h and h' are within shift·‖W_in e‖ of h_t."""
        widths, size = column_lengths(self.layers[k].w_in), self.layers[k].w_out.size()
        if self.activation == "gelu":
            scale = (shift + other) * between * (CURVATURE / 2)
            return scale[:, None] * ((widths * widths)[None] @ size)
        # Where the slope is 0, both terms are in [0, max(h, 0)]; where it is 1, both act(h) − h are in [0, max(−h, 0)].
        sign = 1.0 - 2.0 * self.slopes[k].floats()
        beyond: Upper = shift.most(other)[:, None] * widths + (self.hidden[k] * sign).top()
        return beyond.most(0.0).least(between[:, None] * widths) @ size

    def _mismatch(self, mine: FoldedLayer, given: FoldedLayer) -> tuple[Upper, Upper]:
        """Bound |Σ_ℓ a_ℓ(X) − a'(X)|, whose weights differ by rounding, and its length."""
        size = lengths(self.read.u).amax(0)
        W, q, V, o = (getattr(mine, name) - getattr(given, name) for name in ("W", "q", "V", "o"))
        turned = (size * (size * self.A.frobenius_norm(W) + lengths(q)[:, 0]) / 2.0).tanh()
        found = (size * column_lengths(V) + turned[:, None] * self.A.cat(self.ranges)).sum(0) + o.size()[0]
        return found, (found * found).sum(0).sqrt()

    def _mlp_mismatch(self, mine: FoldedLayer, given: FoldedLayer) -> Upper:
        """Bound |Σ_ℓ m_ℓ(y') − m'(y')|: act(h)(W_out − W_out') + (act(h) − act(h'))W_out'."""
        size = (lengths(self.read.u) + self.read.shift(self.other)).amax(0)

        def hidden(w_in: Enclosed, b_in: Enclosed) -> Upper:
            return size * column_lengths(w_in) + b_in.size()

        moved = hidden(mine.w_in - given.w_in, mine.b_in - given.b_in) * STEEPEST[self.activation]
        outer = hidden(mine.w_in, mine.b_in) @ (mine.w_out - given.w_out).size()
        return total(outer, moved @ given.w_out.size(), (mine.b_out - given.b_out).size())[0]

    def _join(self, layers: list[FoldedLayer], mlps: list[FoldedLayer]) -> FoldedLayer:
        """Return all heads side by side and the MLPs of some layers side by side."""

        def beside(name: str, chosen: list[FoldedLayer], dim: int = 0) -> Any:
            return self.A.cat([getattr(layer, name) for layer in chosen], dim)

        return FoldedLayer(
            W=beside("W", layers),
            q=beside("q", layers),
            V=beside("V", layers),
            o=sums(self.A, [layer.o for layer in layers])[-1],
            w_in=beside("w_in", mlps, 1),
            b_in=beside("b_in", mlps, 1),
            w_out=beside("w_out", mlps),
            b_out=sums(self.A, [layer.b_out for layer in layers])[-1],
        )

    def pairs(self, rows: slice) -> list[tuple[Upper, Upper]]:
        """Bound ψ_A and −ψ_A, and ψ_M and −ψ_M, over all u, with their rests, for some tokens t, [b, d] each."""
        derivative, rests = self.read.derivative(rows), self.mlp[rows]
        affine: tuple[list[Enclosed], list[Enclosed]] = [], []
        for k, layer in enumerate(self.layers):
            own = self.m_before[k][rows][:, None]
            slope = (layer.w_in[:, None] * self.slopes[k][rows][None]).coarse(layer.w_out).permute(1, 0, 2)
            to_attention, to_mlp = derivative @ self.V[k], derivative @ slope
            fixed = own + self.o_before[k], own - self.o_from[k + 1]
            linear = self.V_before[k], -self.V_from[k + 1]
            for part, to in enumerate((to_attention, to_mlp)):  # ψ = u G + f, with f as the last row of G
                affine[part].append(self.A.cat([linear[part] @ to, fixed[part] @ to], -2))
            rests = rests + self.loose[k][rows][:, None] * column_lengths(slope)
        found = []
        for parts, rest in zip(affine, (self.attention[rows], rests), strict=True):
            high, low = self._largest(reduce(lambda a, b: a + b, parts), rows)
            found.append((high + rest, low + rest))
        return found

    def _largest(self, G: Enclosed, rows: slice) -> tuple[Upper, Upper]:
        """Bound the largest weighted average of (u, 1)G and that of −(u, 1)G for some t, u = t at weight 1/n or more.

        With p the value at t and q ≥ p the largest one, the average is at most p + (1 − 1/n)(q − p).
        """
        u = self.read.u
        whole = self.A.cat([u, self.A.exact(u.floats()[:, :1] * 0.0 + 1.0)], -1)
        high, low = whole.coarse(G).ends()
        if self.unevenness == 1.0:
            return high, low
        own = (whole[rows][:, None] @ G)[:, 0]
        top, bottom = own.top(), (-own).top()
        mixed = (top + (high + bottom) * self.unevenness), (bottom + (low + top) * self.unevenness)
        return high.least(mixed[0]), low.least(mixed[1])


class WideBlock(Method):
    """A proof over all sequences of tokens, where S' is the wide block of S."""

    def __init__(self, comparison: Comparison, progress: Step = silent) -> None:
        self._progress = progress
        super().__init__(comparison)
        self._progress = silent

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class."""
        require_block(comparison.network, comparison.surrogate)
        found = Movements(comparison, A)
        v, d = found.read.u.shape
        many = max(1, ENTRIES // (d * max(v, *(z.shape[1] for z in found.hidden))))
        worst: list[Upper] = []  # ψ_A, −ψ_A, ψ_M and −ψ_M
        for start in range(0, v, many):
            self._progress(start, v, "proving")
            sides = [side.amax(0) for part in found.pairs(slice(start, start + many)) for side in part]
            worst = [a.most(b) for a, b in zip(worst, sides, strict=True)] if worst else sides
        value = (worst[0] + worst[2]).most(worst[1] + worst[3]) + found.flat
        is_far = found.read.is_normed and bool((found.read.relative(found.other).floats() >= 1).any())
        note = (
            "a state may move further than the entries of its token differ from their mean; the bound is far too large"
        )
        return Bound(value, found.head_parts, ("parallel",), (note,) if is_far else ())


def require_block(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> None:
    """Raise InputError unless S has a wide block and S' has its shape."""
    obstacle = block_obstacle(network)
    if obstacle is not None:
        raise InputError(f"this network has no certificate over tokens: {obstacle}")
    units = sum(layer.mlp.w_in.shape[1] for layer in network if layer.mlp is not None)
    shape = (1, sum(layer.heads for layer in network), units, network.norm, network.has_mlp, network.activation)
    mlp = surrogate[0].mlp
    mine = len(surrogate), surrogate[0].heads, 0 if mlp is None else mlp.w_in.shape[1]
    if (*mine, surrogate.norm, surrogate.has_mlp, surrogate.activation) != shape or block_obstacle(surrogate):
        raise InputError(
            "a network with LayerNorm, MLPs or biases is certified over tokens only against its wide block; make the "
            "surrogate with collapse(network, 'parallel')"
        )


def sums(A: BoundArithmetic, parts: Sequence[Enclosed]) -> list[Enclosed]:
    """Return the sums of the first 0, 1, … parts."""
    found = [A.exact(torch.zeros(parts[0].shape, dtype=torch.float64))]
    for part in parts:
        found.append(found[-1] + part)
    return found
