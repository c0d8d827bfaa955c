"""Upper bounds on |S − S'| over all sequences of tokens, for LayerNorm and MLPs (docs/math.md §3.13).

S has layers y_ℓ = x_ℓ + a_ℓ(x_ℓ), x_{ℓ+1} = y_ℓ + m_ℓ(y_ℓ), and S' is one wide block y' = X + a'(X), S' = y' + m'(y'):

    S − S' = Σ_ℓ [a_ℓ(x_ℓ) − a_ℓ(X)] + Σ_ℓ [m_ℓ(y_ℓ) − m_ℓ(y')] + (what rounding changed in the weights of S').

All sublayers read n(x). Attention is close to the average over the visible tokens, ā_ℓ(u) = n(u)V_ℓ + o_ℓ with V_ℓ the
sum over the heads. To second order the two sums are averages over pairs of tokens t, u of

    ψ_A(t, u) = Σ_ℓ [ Σ_{k<ℓ} ā_k(u) + m_k(t)] Dn(t) V_ℓ,
    ψ_M(t, u) = Σ_ℓ [−Σ_{k>ℓ} ā_k(u) + Σ_{k<ℓ} m_k(t)] Dm_ℓ(t),

which are bounded over all pairs, all layers together. Only what is beyond them is bounded by norms, layer by layer.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.activations import CURVATURE, activation_and_slope
from depthgauge.theory.certificates.ball import column_lengths
from depthgauge.theory.certificates.box import PartsByLayer, PerHead, Vector, first_lost, total
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.deletion import STEEPEST
from depthgauge.theory.certificates.read_tokens import PerToken, ReadTokens, diameter, lengths
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.enclosures import Enclosure, frobenius_norm_up, spectral_norm_up
from depthgauge.theory.linalg.rounding import (
    TINY,
    add_up,
    gamma,
    mul_up,
    no_bound,
    nonnegative_matmul_up,
    nonnegative_sum_up,
    sqrt_up,
    sub_up,
    tanh_up,
)
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import block_obstacle

ENTRIES = 2**22
"""Entries of an array that are computed at a time (32 MB)."""

TokenVectors = Float[Tensor, "v d"]


@dataclass(frozen=True, eq=False, repr=False)
class ParallelProof:
    """An upper bound on |S − S'| per output coordinate; `head_parts` has a bound for each attention head alone."""

    value: Vector
    head_parts: PartsByLayer
    notes: tuple[str, ...]
    methods = ("parallel",)

    @property
    def lost_at(self) -> int:
        """The first layer whose parts are not finite, or the last layer."""
        return first_lost(self.head_parts)


@dataclass(frozen=True, eq=False, repr=False)
class FoldedLayer(ArrayRecord):
    """A layer that reads n(x): gain and bias of LayerNorm are in its weights. Without MLP, that of weight 0.

    Scores are (n(x_i)W_h + q_h)·n(x_j), outputs n(x)V_h and o; W and V are [H, d, d], q is [H, 1, d], o is [1, d].
    """

    W: Enclosure
    q: Enclosure
    V: Enclosure
    o: Enclosure
    w_in: Enclosure
    b_in: Enclosure
    w_out: Enclosure
    b_out: Enclosure

    @staticmethod
    def of(network: SelfAttentionNetwork, layer: Layer) -> "FoldedLayer":
        """Fold the norms of a layer into its weights."""
        one = torch.ones(2, network.dim, 1, dtype=torch.float64)
        gain = one if layer.norm_weight is None else layer.norm_weight.detach()[..., None]
        bias = torch.zeros_like(one).mT if layer.norm_bias is None else layer.norm_bias.detach()[:, None, :]
        query, key, value = (Enclosure.exact(w.detach()) for w in (layer.query, layer.key, layer.value))
        row, o = Enclosure.exact(bias[0]) @ query, Enclosure.exact(bias[0]) @ value.sum(0)
        row = row if layer.query_bias is None else row + layer.query_bias.detach()[:, None, :]
        o = o if layer.output_bias is None else o + layer.output_bias.detach()
        keys = (key * gain[0]).mT * network.scale
        attention = (query * gain[0]) @ keys, row @ keys, value * gain[0], o
        if layer.mlp is None:
            column = Enclosure.exact(torch.zeros_like(one[0]))
            return FoldedLayer(*attention, column, Enclosure.exact(torch.zeros(1, 1).double()), column.mT, column.mT)
        mlp = layer.mlp
        w_in, b_in, w_out = (Enclosure.exact(w.detach()) for w in (mlp.w_in, mlp.b_in, mlp.w_out))
        last = Enclosure.exact(mlp.b_out.detach()[None])
        return FoldedLayer(*attention, w_in * gain[1], Enclosure.exact(bias[1]) @ w_in + b_in, w_out, last)


class Movements:
    """Bounds on how far the states of S and S' are from the tokens, and on what is beyond the leading terms.

    After construction: `flat` bounds the rests that are equal for all tokens, `attention` those of ψ_A at a token t and
    `mlp` those of ψ_M, up to `loose[ℓ]`, which is still to be multiplied by the columns of the MLP's derivative.
    """

    def __init__(self, network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, read: ReadTokens) -> None:
        self.read, self.activation = read, network.activation
        self.layers = [FoldedLayer.of(network, layer) for layer in network]
        self.V = [layer.V.sum(0) for layer in self.layers]
        self.hidden = [read.u @ layer.w_in + layer.b_in for layer in self.layers]
        values, self.slopes = zip(*(activation_and_slope(z, self.activation) for z in self.hidden), strict=True)
        m = [act @ layer.w_out + layer.b_out for act, layer in zip(values, self.layers, strict=True)]
        o = [layer.o for layer in self.layers]
        # Sums over the layers before ℓ and from ℓ on, for ℓ = 0, …, L
        self.V_before, self.o_before, self.m_before = sums(self.V), sums(o), sums(m)
        self.V_from, self.o_from = sums(self.V[::-1])[::-1], sums(o[::-1])[::-1]
        self.reach = self._reach(self.V_before, self.o_before)  # ≥ ‖Σ_k ā_k(u)‖ for all tokens u
        self.reach_from = self._reach(self.V_from, self.o_from)
        self.own = [lengths(m) for m in self.m_before]
        every = range(len(network))
        spreads = [read.u @ layer.V for layer in self.layers]  # [H, v, d]
        self.ranges = [sub_up(z.upper().amax(-2), z.lower().amin(-2)) for z in spreads]
        self.spread = [diameter(z) for z in spreads]
        # TV(row of P(X), average) ≤ tanh(θ/4) with θ = max_t ‖n(t)W + q‖ · diameter of n
        self.queries = [lengths(read.u @ layer.W + layer.q).amax(-1) for layer in self.layers]
        self.uneven = [tanh_up(mul_up(query, diameter(read.u)) / 4.0) for query in self.queries]
        # ‖a_ℓ(X) − (average of ā_ℓ)‖ ≤ E_ℓ, ‖a_ℓ(x_ℓ) − a_ℓ(X)‖ ≤ G_ℓ, ‖m_ℓ(y_ℓ) − m_ℓ(t)‖ ≤ F_ℓ(t)
        self.E = [_dot(self.uneven[k], self.spread[k]) for k in every]
        self.G: list[Tensor] = []
        self.F: list[PerToken] = []
        self.attention, self.mlp = torch.zeros_like(read.u.mid), torch.zeros_like(read.u.mid)
        self.loose: list[PerToken] = []
        self.head_parts: list[Float[Tensor, "heads d"]] = []
        mlps = [layer for layer, own in zip(self.layers, network, strict=True) if own.mlp is not None]
        mine = _join(self.layers, mlps or self.layers[:1])
        given = FoldedLayer.of(surrogate, surrogate[0])
        mixed, self.off = self._mismatch(mine, given)
        self.start = torch.zeros(len(read.u.mid), dtype=torch.float64)
        self.other = total(self.start, self.reach[-1], *self.E, self.off)
        self.flat = add_up(mixed, self._mlp_mismatch(mine, given))
        self.norms = self._norms()
        for k in every:
            self._attention(k)
            self._mlp(k)

    def _reach(self, V: list[Enclosure], o: list[Enclosure]) -> Tensor:
        """Bound ‖n(u)V + o‖ over the tokens u, for every V with its o."""
        return lengths(self.read.u @ _stacked(V) + _stacked(o)).amax(-1)

    def _norms(self) -> list[tuple[PerHead, PerHead, Tensor, Tensor]]:
        """Bound ‖W_h‖₂, ‖V_h‖₂, ‖V‖₂ and ‖W_in‖₂‖W_out‖₂ of every layer; rows of zeros make all shapes equal."""
        layers, heads = self.layers, [len(layer.V.mid) for layer in self.layers]
        mlps = [_stacked([layer.w_in.mT, layer.w_out]) for layer in layers]
        parts = [*(layer.W for layer in layers), *(layer.V for layer in layers), _stacked(self.V), *mlps]
        rows = max(part.shape[1] for part in parts)
        padded = [Enclosure(*(F.pad(x, (0, 0, 0, rows - x.shape[1])) for x in (p.mid, p.rad))) for p in parts]
        sizes = [*heads, *heads, len(heads), 2 * len(heads)]
        *both, whole, mlp = torch.split(spectral_norm_up(Enclosure.cat(padded)), sizes)
        return list(zip(both[: len(heads)], both[len(heads) :], whole, mul_up(mlp[::2], mlp[1::2]), strict=True))

    def _attention(self, k: int) -> None:
        """Bound a_k(x_k) − a_k(X) and what is beyond its leading term."""
        read, layer, (W_norm, V_norm, V_sum_norm, _) = self.read, self.layers[k], self.norms[k]
        late = total(self.start, *self.E[:k], *self.G, *self.F)
        rho = total(self.reach[k], self.own[k], late)
        shift = read.shift(rho).amax()
        queries = 2.0 * add_up(self.queries[k], mul_up(shift, W_norm))
        turned = tanh_up(mul_up(shift, add_up(diameter(read.u @ layer.W.mT), queries)) / 4.0)
        uneven = 2.0 * add_up(self.uneven[k], turned).clamp(max=1.0)
        self.G.append(add_up(_dot(turned, self.spread[k]), mul_up(shift, add_up(V_sum_norm, _dot(uneven, V_norm)))))
        columns, by_scores = column_lengths(layer.V), mul_up(turned[:, None], self.ranges[k])
        rests = add_up(by_scores, mul_up(mul_up(shift, uneven)[:, None], columns))
        self.flat = add_up(self.flat, nonnegative_sum_up(rests, 0))
        beyond = add_up(read.bend(rho, rho, self.start), mul_up(late, read.steep))
        self.attention = add_up(self.attention, mul_up(beyond[:, None], column_lengths(self.V[k])))
        self.head_parts.append(add_up(by_scores, mul_up(shift, columns)))

    def _mlp(self, k: int) -> None:
        """Bound m_k(y_k) − m_k(t), and what is beyond the leading term of m_k(y_k) − m_k(y')."""
        read = self.read
        rho = total(self.reach[k + 1], self.own[k], *self.E[: k + 1], *self.G, *self.F)
        late = total(self.start, *self.E[k + 1 :], *self.G, *self.F, self.off)
        apart = total(self.reach_from[k + 1], self.own[k], late)
        shift, other = read.shift(rho), read.shift(self.other)
        between = read.shift_between(apart, rho, self.other)
        self.loose.append(add_up(read.bend(apart, rho, self.other), mul_up(late, read.steep)))
        self.mlp = add_up(self.mlp, self._kink(k, shift, other, between))
        self.F.append(mul_up(mul_up(STEEPEST[self.activation], self.norms[k][3]), shift))

    def _kink(self, k: int, shift: PerToken, other: PerToken, between: PerToken) -> TokenVectors:
        """Bound |act(h) − act(h') − act'(h_t)(h − h')| |W_out|, where h and h' are within shift·‖W_in e‖ of h_t."""
        layer = self.layers[k]
        widths, size = column_lengths(layer.w_in), layer.w_out.abs_up()
        if self.activation == "gelu":
            scale = mul_up(CURVATURE / 2, mul_up(add_up(shift, other), between))
            return mul_up(scale[:, None], nonnegative_matmul_up(mul_up(widths, widths)[None], size))
        # Where the slope is 0, both terms are in [0, max(h, 0)]; where it is 1, both act(h) − h are in [0, max(−h, 0)].
        reached = mul_up(torch.maximum(shift, other)[:, None], widths)
        hidden, slope = self.hidden[k], self.slopes[k].mid
        beyond = add_up(reached, torch.where(slope > 0, -hidden.lower(), hidden.upper())).clamp(min=0.0)
        return nonnegative_matmul_up(torch.minimum(beyond, mul_up(between[:, None], widths)), size)

    def _mismatch(self, mine: FoldedLayer, given: FoldedLayer) -> tuple[Vector, Tensor]:
        """Bound |Σ_ℓ a_ℓ(X) − a'(X)|, whose weights differ by rounding, and its length."""
        size = lengths(self.read.u).amax()
        W, q, V, o = (getattr(mine, name) - getattr(given, name) for name in ("W", "q", "V", "o"))
        by_query = add_up(mul_up(size, frobenius_norm_up(W)), lengths(q)[:, 0])
        turned = tanh_up(mul_up(size, by_query) / 2.0)
        each = add_up(mul_up(size, column_lengths(V)), mul_up(turned[:, None], torch.cat(self.ranges)))
        found = add_up(nonnegative_sum_up(each, 0), o.abs_up()[0])
        return found, sqrt_up(nonnegative_sum_up(mul_up(found, found), 0))

    def _mlp_mismatch(self, mine: FoldedLayer, given: FoldedLayer) -> Vector:
        """Bound |Σ_ℓ m_ℓ(y') − m'(y')|: act(h)(W_out − W_out') + (act(h) − act(h'))W_out'."""
        size = add_up(lengths(self.read.u), self.read.shift(self.other)).amax()

        def hidden(w_in: Enclosure, b_in: Enclosure) -> Tensor:
            return add_up(mul_up(size, column_lengths(w_in)), b_in.abs_up())

        moved = mul_up(STEEPEST[self.activation], hidden(mine.w_in - given.w_in, mine.b_in - given.b_in))
        outer = nonnegative_matmul_up(hidden(mine.w_in, mine.b_in), (mine.w_out - given.w_out).abs_up())
        return total(outer, nonnegative_matmul_up(moved, given.w_out.abs_up()), (mine.b_out - given.b_out).abs_up())[0]

    def pairs(self, rows: slice) -> tuple[Float[Tensor, "2 b d"], Float[Tensor, "2 b d"]]:
        """Bound ±ψ_A(t, u) and ±ψ_M(t, u) over all u, with their rests, for some tokens t."""
        derivative = self.read.derivative(rows)
        nothing = _zero(derivative), _zero(_rows(self.read.u, rows))
        affine, rests = [nothing, nothing], self.mlp[rows]  # (G, f) of ψ = u G + f
        for k, layer in enumerate(self.layers):
            own = _rows(self.m_before[k], rows)
            slope = weighted_products(layer.w_in, self.slopes[k], layer.w_out, rows)
            to_attention, to_mlp = derivative @ self.V[k], derivative @ slope
            fixed = own + self.o_before[k], own - self.o_from[k + 1]
            linear = self.V_before[k], -self.V_from[k + 1]
            for part, to in enumerate((to_attention, to_mlp)):
                G, f = affine[part]
                affine[part] = G + linear[part] @ to, f + fixed[part] @ to
            rests = add_up(rests, mul_up(self.loose[k][rows, None], column_lengths(slope)))
        attention, mlp = (largest_affine(self.read.u, G, f) for G, f in affine)
        return add_up(attention, self.attention[rows]), add_up(mlp, rests)


def parallel_proof(comparison: Comparison, progress: Step = silent) -> ParallelProof:
    """Prove an upper bound over all sequences of the tokens, where S' is the wide block of S."""
    network, surrogate = comparison.network, comparison.surrogate
    assert isinstance(comparison.inputs, Tokens)
    require_block(network, surrogate)
    read = ReadTokens.of(comparison.inputs.points(), network)
    found = Movements(network, surrogate, read)
    sides = torch.full((2, 2, network.dim), -math.inf, dtype=torch.float64)  # ψ_A or ψ_M, sign, coordinate
    for rows in _blocks(found, progress):
        sides = torch.maximum(sides, torch.stack([no_bound(part).amax(1) for part in found.pairs(rows)]))
    value = add_up(add_up(sides[0], sides[1]).amax(0), found.flat)
    notes: tuple[str, ...] = ()
    if read.is_normed and bool((read.relative(found.other) >= 1).any()):
        notes = (
            "a state may move further than the entries of its token differ from their mean; the bound is far too large",
        )
    return ParallelProof(no_bound(value), tuple(found.head_parts), notes)


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


def _blocks(found: Movements, progress: Step) -> Iterator[slice]:
    """Yield some tokens at a time, so that arrays of `ENTRIES` entries are enough."""
    v, d = found.read.u.shape
    many = max(1, ENTRIES // (d * max(v, *(z.shape[1] for z in found.hidden))))
    for start in range(0, v, many):
        progress(start, v, "proving")
        yield slice(start, start + many)


def largest_affine(u: Enclosure, G: Enclosure, f: Enclosure) -> Float[Tensor, "2 b d"]:
    """Bound max_u and −min_u of (u G + f)_c over the rows of u, for every matrix G with its row f.

    A computed entry is off by at most |u|(γ|G| + rad G) + rad(u)|G| + γ|f| + rad f, at most as much as for the largest
    entries of |u| and rad(u).
    """
    d = u.shape[1]
    made = u.mid @ G.mid + f.mid
    g, size, off = gamma(d + 2), u.mid.abs().amax(0)[None], u.rad.amax(0)[None]
    by_matrix = add_up(
        nonnegative_matmul_up(size, add_up(mul_up(g, G.mid.abs()), G.rad)), nonnegative_matmul_up(off, G.abs_up())
    )
    slack = add_up(add_up(by_matrix, add_up(mul_up(g, f.mid.abs()), f.rad)), 2.0 * d * TINY)[:, 0]
    return add_up(torch.stack([made.amax(1), -made.amin(1)]), slack)


def weighted_products(left: Enclosure, weights: Enclosure, right: Enclosure, rows: slice) -> Enclosure:
    """Enclose left · diag(weights_t) · right for some tokens t, [b, d, d], with one radius for all tokens.

    Rounding takes at most m + 2 steps, and replacing the three factors one by one by other members of their enclosures
    changes the product by at most rad·|w||right| + |left|rad(w)|right| + |left||w|rad.
    """
    m = left.shape[1]
    made = (left.mid * weights.mid[rows, None]) @ right.mid
    a, b, most = left.abs_up(), right.abs_up(), weights.abs_up().amax(0)
    off = add_up(mul_up(gamma(m + 2), most), weights.rad.amax(0))
    rounding = nonnegative_matmul_up(mul_up(a, off), b)
    by_left, by_right = (
        nonnegative_matmul_up(mul_up(left.rad, most), b),
        nonnegative_matmul_up(mul_up(a, most), right.rad),
    )
    return Enclosure(made, add_up(total(rounding, by_left, by_right), 4.0 * m * TINY).expand_as(made))


def sums(parts: Sequence[Enclosure]) -> list[Enclosure]:
    """Return the sums of the first 0, 1, … parts."""
    found = [_zero(parts[0])]
    for part in parts:
        found.append(found[-1] + part)
    return found


def _join(layers: list[FoldedLayer], mlps: list[FoldedLayer]) -> FoldedLayer:
    """Return all heads side by side and the MLPs of some layers side by side."""

    def beside(name: str, chosen: list[FoldedLayer], dim: int = 0) -> Enclosure:
        return Enclosure.cat([getattr(layer, name) for layer in chosen], dim)

    return FoldedLayer(
        W=beside("W", layers),
        q=beside("q", layers),
        V=beside("V", layers),
        o=sums([layer.o for layer in layers])[-1],
        w_in=beside("w_in", mlps, 1),
        b_in=beside("b_in", mlps, 1),
        w_out=beside("w_out", mlps),
        b_out=sums([layer.b_out for layer in layers])[-1],
    )


def _stacked(parts: Sequence[Enclosure]) -> Enclosure:
    return Enclosure(torch.stack([part.mid for part in parts]), torch.stack([part.rad for part in parts]))


def _zero(like: Enclosure) -> Enclosure:
    return Enclosure.exact(torch.zeros_like(like.mid))


def _rows(x: Enclosure, rows: slice) -> Enclosure:
    return Enclosure(x.mid[rows, None], x.rad[rows, None])


def _dot(x: PerHead, y: PerHead) -> Tensor:
    return nonnegative_sum_up(mul_up(x, y), 0)
