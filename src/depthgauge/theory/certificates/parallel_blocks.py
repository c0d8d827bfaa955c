"""Upper bounds on |S − S'| over all sequences of tokens, for LayerNorm and MLPs (docs/math.md §3.13).

S has layers y_ℓ = x_ℓ + a_ℓ(x_ℓ), x_{ℓ+1} = y_ℓ + m_ℓ(y_ℓ), and S' is one wide block y' = X + a'(X), S' = y' + m'(y'):

    S − S' = Σ_ℓ [a_ℓ(x_ℓ) − a_ℓ(X)] + Σ_ℓ [m_ℓ(y_ℓ) − m_ℓ(y')] + (what rounding changed in the weights of S').

All sublayers read n(x). Attention is close to the average over the visible tokens, ā_ℓ(u) = n(u)V_ℓ + o_ℓ with V_ℓ the
sum over the heads. To second order the two sums are averages over pairs of tokens t, u of

    ψ_A(t, u) = Σ_ℓ [ Σ_{k<ℓ} ā_k(u) + m_k(t)] Dn(t) V_ℓ,
    ψ_M(t, u) = Σ_ℓ [−Σ_{k>ℓ} ā_k(u) + Σ_{k<ℓ} m_k(t)] Dm_ℓ(t),

which are bounded over all pairs, all layers together, averaged over the tokens that a row sees. What is beyond them is
bounded layer by layer, for the row of each token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.method import Bound, Method
from depthgauge.theory.certificates.read_tokens import Moved, ReadTokens, column_lengths, diameter, lengths
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import CURVATURE, STEEPEST, BoundArithmetic, Enclosed, Upper, total
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import block_obstacle


class VisibleRows:
    """The tokens that the row of a token t sees, for t in 𝒫, in the order of `Tokens.points`, and averages over them.

    A row sees all tokens, or those up to its own. With positions, token k is in a set P_k, so the average of a function
    of tokens is at most the mean over the visible positions of its largest value on P_k. One of them is the position of
    the row's own token t, which contributes the value at t. Without positions a row of at most n tokens sees t with a
    weight of at least 1/n, so the average is at most p/n + (1 − 1/n)q for the value p at t and the largest value q ≥ p.

    Args:
        A: the arithmetic.
        tokens: the tokens at each position.
        causal: whether a row sees only the tokens up to its own.
        is_read: whether only the last row of sequences that fill all positions matters.
    """

    def __init__(self, A: BoundArithmetic, tokens: Tokens, *, causal: bool, is_read: bool) -> None:
        places, each, _ = tokens.at_positions().shape
        self.A, self.causal, self.is_read = A, causal, is_read
        self.places = places if tokens.positions is not None else None
        self.length = tokens.length
        self.place = torch.arange(places).repeat_interleave(each)
        own = torch.arange(places) == self.place[:, None]
        self.elsewhere = torch.where(own, 0.0, math.inf).to(torch.float64)  # [v, places]

    def average(self, pairs: Upper, rows: slice = slice(None)) -> Upper:
        """Bound the average over u of the row of each token t, from bounds for t and u: [b, v, …] to [b, …]."""
        chosen = torch.arange(len(self.place))[rows]
        some = torch.arange(len(chosen))
        count = 1 if self.places is None else self.places
        tops = pairs.reshape(pairs.shape[0], count, -1, *pairs.shape[2:]).amax(2)
        return self._average(tops, pairs[some, chosen], chosen)

    def of_tokens(self, x: Upper) -> Upper:
        """Bound the same average of a function of u alone: [v, …] to [v, …]."""
        count = 1 if self.places is None else self.places
        tops = x.reshape(count, -1, *x.shape[1:]).amax(1)
        return self._average(tops[None].expand(x.shape[0], *tops.shape), x, torch.arange(len(self.place)))

    def _average(self, tops: Upper, own: Upper, rows: Int64[Tensor, " b"]) -> Upper:
        """Bound the averages from the largest values at each place, [b, places, …], and those at u = t, [b, …]."""
        if self.places is None:
            top = tops[:, 0]
            return top if self.length is None else top.least((own + top * (self.length - 1.0)) / float(self.length))
        outside = self.elsewhere[rows].reshape(len(rows), self.places, *(1 for _ in own.shape[1:]))
        each = tops.least(own[:, None] + outside)
        sum_, means = each[:, 0], [each[:, 0]]
        for k in range(1, self.places):
            sum_ = sum_ + each[:, k]
            means.append(sum_ / (k + 1.0))
        if self.is_read and not self.causal:
            return means[-1]
        if not self.causal:  # any length from the own position on
            for k in range(self.places - 2, -1, -1):
                means[k] = means[k].most(means[k + 1])
        found: Upper = self.A.cat([mean[None] for mean in means])[self.place[rows], torch.arange(len(rows))]
        return found

    def largest(self, x: Upper) -> Upper:
        """Bound a function of the row's own token, [v, …], over all rows, or over the last one if `is_read`."""
        last = self.place == self.place[-1]
        return (x[last.nonzero()[:, 0]] if self.is_read else x).amax(0)


ByRows = Callable[[slice], Enclosed]
"""A matrix for each of some tokens."""
ENTRIES = 2**22
"""Entries of an array that are computed at a time (32 MB)."""
PAIRED = 1e9
"""The most numbers L v² d² that the leads of all pairs of v tokens may take; beyond it, norms bound their products."""


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

    Bounds are per row of a token t, [v], and those on the output also per direction r, a column of the readout R. After
    construction `attention` bounds the rests of ψ_A, and `mlp` those of ψ_M and of the attention of the row itself, up
    to `loose[ℓ]`, which is still to be multiplied by the derivative of the MLP. `flat` bounds that of rounding S'.
    """

    def __init__(self, comparison: Comparison, A: BoundArithmetic, readout: Enclosed | None = None) -> None:
        network, surrogate, tokens = comparison.network, comparison.surrogate, comparison.vocabulary
        self.A, self.activation, self.unevenness = A, network.activation, tokens.unevenness
        self.is_single, self.R = tokens.length == 1, readout
        self.read = read = ReadTokens(A, tokens.points(), network)
        self.seen = VisibleRows(A, tokens, causal=network.causal, is_read=readout is not None)
        self.layers = layers = [FoldedLayer.of(A, network, layer) for layer in network]
        self.V = [layer.V.sum(0) for layer in layers]
        self.hidden = [read.u @ layer.w_in + layer.b_in for layer in layers]
        values, self.slopes = zip(*(A.activation(z, self.activation) for z in self.hidden), strict=True)
        m = [act @ layer.w_out + layer.b_out for act, layer in zip(values, layers, strict=True)]
        # Sums over the layers before ℓ and from ℓ on, for ℓ = 0, …, L; the lead of a state is u V + o + m(t)
        self.V_before, self.o_before, self.m_before = (sums(A, x) for x in (self.V, [layer.o for layer in layers], m))
        self.V_from, self.o_from = (sums(A, x[::-1])[::-1] for x in (self.V, [layer.o for layer in layers]))
        self.whole: Enclosed = A.cat([read.u, A.exact(read.u.floats()[:, :1] * 0.0 + 1.0)], -1)
        v, d = read.u.shape
        many = max(1, ENTRIES // (d * max(v, *(z.shape[1] for z in self.hidden))))
        self.blocks = [slice(start, min(start + many, v)) for start in range(0, v, many)]
        self.has_jacobians = len(layers) * v * v * d * d <= PAIRED
        spreads = [read.u @ layer.V for layer in layers]  # [H, v, d]
        self.spread = [diameter(z) for z in spreads]
        self.ranges = [total(*self._out(z).ends()) for z in spreads]
        # TV(row of P(X), average) ≤ min(tanh(θ/4), 1 − 1/n) with θ = ‖n(t)W + q‖ · diameter of n, [H, v]
        self.queries = [lengths(read.u @ layer.W + layer.q) for layer in layers]
        wide = diameter(read.u)
        self.uneven = [(query * wide / 4.0).tanh().least(self.unevenness) for query in self.queries]
        # ‖a_ℓ(X) − (average of ā_ℓ)‖ ≤ E_ℓ, ‖a_ℓ(x_ℓ) − a_ℓ(X)‖ ≤ G_ℓ, ‖m_ℓ(y_ℓ) − m_ℓ(t)‖ ≤ F_ℓ, [v] each
        self.E = [
            total(*(a[h] * b[h] for h in range(b.shape[0]))) for a, b in zip(self.uneven, self.spread, strict=True)
        ]
        self.G: list[Upper] = []
        self.F: list[Upper] = []
        self.start = A.zeros(v)
        self.still = Moved(self.start, self.start, self.start)
        self.states: list[Moved] = []  # of x_0, y_0, x_1, …
        self.loose: list[Upper] = []
        self.head_parts: list[Upper] = []
        mlps = [layer for layer, own in zip(layers, network, strict=True) if own.mlp is not None]
        mine, given = self._join(layers, mlps or layers[:1]), FoldedLayer.of(A, surrogate, surrogate[0])
        length = self._mismatch(mine, given, lambda M: M, spreads)
        self.off = (length * length).sum(0).sqrt()
        depth = len(layers)
        self.other_fixed, self.other_late = self.o_before[depth].expand(v, d), total(self.start, *self.E, self.off)
        self.other = self._moved(self.V_before[depth], self.other_fixed, self.other_late)
        self.flat = self._mismatch(mine, given, self._out, spreads) + self._mlp_mismatch(mine, given)
        self.mlp = A.zeros(v, self.flat.shape[0])
        self.attention = self.mlp, self.mlp  # of ψ_A and of −ψ_A
        weights = [(layer.W, layer.V, V, layer.w_in, layer.w_out) for layer, V in zip(layers, self.V, strict=True)]
        norms = A.spectral_norms([part for parts in weights for part in parts])
        self.norms = [norms[start : start + 5] for start in range(0, len(norms), 5)]
        for k in range(depth):
            self._attention(k)
            self._mlp(k)

    def _out(self, M: Enclosed) -> Enclosed:
        """Return M R."""
        found: Enclosed = M if self.R is None else M @ self.R
        return found

    def _led(self, V: Enclosed, fixed: Enclosed, to: Enclosed) -> Enclosed:
        """Return (u V + fixed) to for all u, [b, v, m], where `fixed` and `to` belong to some tokens t."""
        return self.whole.coarse(self.A.cat([V @ to, fixed[:, None] @ to], -2))

    def _by_rows(self, bound: Callable[[slice], Upper]) -> Upper:
        """Put the bounds for some tokens together."""
        found: Upper = self.A.cat([bound(rows) for rows in self.blocks])
        return found

    def _length(self, V: Enclosed, fixed: Enclosed) -> Upper:
        """Bound the average of ‖u V + fixed‖ over u for every token t, of which `fixed` depends."""
        moved = self.read.u @ V
        return self._by_rows(lambda rows: self.seen.average(lengths(moved[None] + fixed[rows][:, None]), rows))

    def _moved(self, V: Enclosed, fixed: Enclosed, late: Upper) -> Moved:
        """Bound how far a state is from its token, if its lead is an average of u V + fixed, up to `late`."""
        far = self._length(V, fixed) + late
        if not self.read.is_normed:
            return Moved(far, far, far)

        def along(rows: slice, sign: float) -> Upper:
            direction = (self.read.u[rows] * self.read.shorter * sign)[:, :, None]  # ±n(t)/√d
            return self.seen.average(self._led(V, fixed[rows], direction).top()[..., 0], rows).most(0.0)

        inward = self._by_rows(lambda rows: along(rows, -1.0)) + late
        return Moved(far, far.least(inward), far.least(self._by_rows(lambda rows: along(rows, 1.0)) + late))

    def _product(
        self, V: Enclosed, fixed: Enclosed, by: ByRows, measure: Callable[[Enclosed], Upper] = lengths
    ) -> Upper:
        """Bound the average of ‖(u V + fixed) Dn(t) M(t)‖ over u for every token t, for the matrices `by` of tokens."""

        def one(rows: slice) -> Upper:
            led = self._led(V, fixed[rows], self.read.derivative(rows) @ by(rows))
            return self.seen.average(measure(led), rows)

        return self._by_rows(one)

    def _changes(self, state: Moved, late: Upper, V: Enclosed, fixed: Enclosed, Y: Enclosed) -> Upper:
        """Bound |(n(x) − n(t)) y| for the columns y of Y, [v, m], for a state with the lead u V + fixed."""
        read, columns = self.read, column_lengths(Y)
        whole = read.shift(state)[:, None] * columns
        if not self.has_jacobians:
            return whole
        led = self._product(V, fixed, lambda rows: Y, lambda values: values.size())
        moved = (read.stretched(state) + 1.0)[:, None] * (led + (late * read.steep)[:, None] * columns)
        return whole.least(read.lowered(state)[:, None] * (read.u @ Y).size() + moved)

    def _read_apart(self, state: Moved, late: Upper, led: Upper, by: ByRows, norm: Upper) -> Upper:
        """Bound ‖(n(x) − n(t)) M(t)‖ with ‖M(t)‖₂ ≤ `norm`, from the bound `led` on its lead without the stretch."""
        read = self.read
        along = self._by_rows(lambda rows: lengths((read.u[rows][:, None] @ by(rows))[:, 0]))
        return read.lowered(state) * along + (read.stretched(state) + 1.0) * (led + late * read.steep * norm)

    def _attention(self, k: int) -> None:
        """Bound a_k(x_k) − a_k(X) and what is beyond its leading term."""
        read, layer, (W_norm, V_norm, V_sum_norm, *_) = self.read, self.layers[k], self.norms[k]
        late, fixed = total(self.start, *self.E[:k], *self.G, *self.F), self.o_before[k] + self.m_before[k]
        state = self._moved(self.V_before[k], fixed, late)
        self.states.append(state)
        shift = read.shift(state)
        widest = shift.amax(0)
        turns = (diameter(read.u @ layer.W.mT) + W_norm * widest * 2.0)[:, None] * shift
        turned = ((turns + self.queries[k] * (widest * 2.0)) / 4.0).tanh()
        turned = turned * 0.0 if self.is_single else turned  # the attention of one token is the identity
        uneven = (self.uneven[k] + turned).least(self.unevenness) * 2.0
        each = shift * V_sum_norm
        if self.has_jacobians:
            led = self._product(self.V_before[k], fixed, lambda rows: self.V[k])
            each = each.least(self._read_apart(state, late, led, lambda rows: self.V[k], V_sum_norm))
        heads = range(V_norm.shape[0])
        by_heads = (turned[h] * self.spread[k][h] + uneven[h] * (widest * V_norm[h]) for h in heads)
        self.G.append(total(self.seen.of_tokens(each), *by_heads))
        columns = self.A.cat(
            [self._changes(state, late, self.V_before[k], fixed, self._out(layer.V[h])).amax(0)[None] for h in heads]
        )
        for h in heads:
            self.mlp = self.mlp + turned[h][:, None] * self.ranges[k][h] + uneven[h][:, None] * columns[h]
        rests = self._rests(k, state, late, fixed)
        self.attention = self.attention[0] + rests[0], self.attention[1] + rests[1]
        self.head_parts.append(turned.amax(-1)[:, None] * self.ranges[k] + columns)

    def _rests(self, k: int, state: Moved, late: Upper, fixed: Enclosed) -> tuple[Upper, Upper]:
        """Bound (n(x_k) − n(t) − lead Dn(t))V_k r and its negative."""
        read, V = self.read, self._out(self.V[k])
        columns, apart = column_lengths(V), late * read.steep
        rest = (read.bend(state.far, state, self.still) + apart)[:, None] * columns
        if not self.has_jacobians:
            return rest, rest
        along, stretched = read.u @ V, read.stretched(state)
        led = self._product(self.V_before[k], fixed, lambda rows: V, lambda values: values.size())
        common = stretched[:, None] * led + ((stretched + 1.0) * apart)[:, None] * columns
        lowered = read.lowered(state)[:, None]
        sides = (common + lowered * side.top().most(0.0) for side in (-along, along))
        high, low = (rest.least(side) for side in sides)
        return high, low

    def _mlp(self, k: int) -> None:
        """Bound m_k(y_k) − m_k(t), and what is beyond the leading term of m_k(y_k) − m_k(y')."""
        read, layer, (*_, w_in_norm, w_out_norm) = self.read, self.layers[k], self.norms[k]
        fixed, moved = self.o_before[k + 1] + self.m_before[k], total(self.start, *self.E[: k + 1], *self.G, *self.F)
        late = total(self.start, *self.E[k + 1 :], *self.G, *self.F, self.off)
        state = self._moved(self.V_before[k + 1], fixed, moved)
        self.states.append(state)
        apart = self._length(-self.V_from[k + 1], self.m_before[k] - self.o_from[k + 1]) + late
        shift, widths = read.shift(state), column_lengths(layer.w_in)
        between = read.shift_between(apart, state, self.other)
        moves = self._changes(state, moved, self.V_before[k + 1], fixed, layer.w_in)
        others = self._changes(self.other, self.other_late, self.V_before[-1], self.other_fixed, layer.w_in)
        self.loose.append(read.bend(apart, state, self.other) + late * read.steep)
        size = self._out(layer.w_out).size()
        self.mlp = self.mlp + self._kink(k, moves, others, between[:, None] * widths) @ size
        found = w_in_norm * w_out_norm * STEEPEST[self.activation] * shift
        if self.has_jacobians:
            kinked = self._kink(k, moves, moves * 0.0, moves)
            led = self._product(self.V_before[k + 1], fixed, lambda rows: self._slope(k, rows))
            norm = self._by_rows(lambda rows: self.A.spectral_norm(self._slope(k, rows)))
            apart = self._read_apart(state, moved, led, lambda rows: self._slope(k, rows), norm)
            found = found.least(apart + (kinked * kinked).sum(-1).sqrt() * w_out_norm)
        self.F.append(found)

    def _slope(self, k: int, rows: slice) -> Enclosed:
        """Return M_k(t) for some tokens, [b, d, d]."""
        layer = self.layers[k]
        bent: Enclosed = layer.w_in[:, None] * self.slopes[k][rows][None]
        return bent.coarse(layer.w_out).permute(1, 0, 2)

    def _kink(self, k: int, one: Upper, other: Upper, between: Upper) -> Upper:
        """Bound |act(h) − act(h') − act'(h_t)(h − h')| for |h − h_t| ≤ e, |h' − h_t| ≤ e' and |h − h'| ≤ e''."""
        if self.activation == "gelu":
            curved: Upper = (one + other) * between * (CURVATURE / 2)
            return curved
        # Where the slope is 0, both terms are in [0, max(h, 0)]; where it is 1, both act(h) − h are in [0, max(−h, 0)].
        sign = 1.0 - 2.0 * self.slopes[k].floats()
        beyond: Upper = one.most(other) + (self.hidden[k] * sign).top()
        return beyond.most(0.0).least(between)

    def _mismatch(
        self, mine: FoldedLayer, given: FoldedLayer, out: Callable[[Enclosed], Enclosed], spreads: list[Enclosed]
    ) -> Upper:
        """Bound |Σ_ℓ a_ℓ(X) − a'(X)|, whose weights differ by rounding, in the directions of `out`."""
        size = lengths(self.read.u).amax(0)
        W, q = (getattr(mine, name) - getattr(given, name) for name in ("W", "q"))
        turned = (size * (size * self.A.frobenius_norm(W) + lengths(q)[:, 0]) / 2.0).tanh()
        ranges = self.A.cat([total(*out(z).ends()) for z in spreads])
        by_heads = size * column_lengths(out(mine.V - given.V)) + turned[:, None] * ranges
        found: Upper = by_heads.sum(0) + out(mine.o - given.o).size()[0]
        return found

    def _mlp_mismatch(self, mine: FoldedLayer, given: FoldedLayer) -> Upper:
        """Bound |Σ_ℓ m_ℓ(y') − m'(y')|: act(h)(W_out − W_out') + (act(h) − act(h'))W_out'."""
        size = (lengths(self.read.u) + self.read.shift(self.other)).amax(0)

        def hidden(w_in: Enclosed, b_in: Enclosed) -> Upper:
            return size * column_lengths(w_in) + b_in.size()

        moved = hidden(mine.w_in - given.w_in, mine.b_in - given.b_in) * STEEPEST[self.activation]
        outer = hidden(mine.w_in, mine.b_in) @ self._out(mine.w_out - given.w_out).size()
        last = self._out(mine.b_out - given.b_out).size()
        return total(outer, moved @ self._out(given.w_out).size(), last)[0]

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

    def pairs(self, rows: slice) -> list[Upper]:
        """Bound the averages over u of ψ_A and −ψ_A, and of ψ_M and −ψ_M, with their rests, for some t, [b, m] each."""
        derivative, rests = self.read.derivative(rows), self.mlp[rows]
        affine: tuple[list[Enclosed], list[Enclosed]] = [], []
        for k in range(len(self.layers)):
            own = self.m_before[k][rows][:, None]
            slope = self._out(self._slope(k, rows))
            to_attention, to_mlp = derivative @ self._out(self.V[k]), derivative @ slope
            fixed = own + self.o_before[k], own - self.o_from[k + 1]
            linear = self.V_before[k], -self.V_from[k + 1]
            for part, to in enumerate((to_attention, to_mlp)):  # ψ = u G + f, with f as the last row of G
                affine[part].append(self.A.cat([linear[part] @ to, fixed[part] @ to], -2))
            rests = rests + self.loose[k][rows][:, None] * column_lengths(slope)
        found = []
        for parts, both in zip(affine, ([rest[rows] for rest in self.attention], [rests, rests]), strict=True):
            psi = self.whole.coarse(reduce(lambda a, b: a + b, parts))
            found += [self.seen.average(side.top(), rows) + rest for side, rest in zip((psi, -psi), both, strict=True)]
        return found


class WideBlock(Method):
    """A proof over all sequences of tokens, where S' is the wide block of S.

    Args:
        comparison: what is compared.
        progress: called as `progress(done, total, label)`.
        readout: returns a matrix R, [d, m], in an arithmetic; then the bound is on |(S − S') R| in the last row alone,
            over all sequences of tokens that fill all positions.
    """

    def __init__(
        self,
        comparison: Comparison,
        progress: Step = silent,
        readout: Callable[[BoundArithmetic], Enclosed] | None = None,
    ) -> None:
        self.readout = readout
        super().__init__(comparison, progress)

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class."""
        require_block(comparison.network, comparison.surrogate)
        found = Movements(comparison, A, None if self.readout is None else self.readout(A))
        blocks: list[list[Upper]] = []
        for rows in found.blocks:
            self.progress(rows.start, found.read.u.shape[0], "proving")
            blocks.append(found.pairs(rows))
        A_high, A_low, M_high, M_low = (A.cat(list(side)) for side in zip(*blocks, strict=True))
        sides = [found.seen.of_tokens(a) + m for a, m in ((A_high, M_high), (A_low, M_low))]
        value = found.seen.largest(sides[0].most(sides[1])) + found.flat
        is_far = found.read.is_normed and bool((found.read.relative(found.other.far).floats() >= 1).any())
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
