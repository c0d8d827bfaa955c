"""The bound of the wide block over all sequences of tokens, in arb interval arithmetic (docs/math.md §3.13)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from flint import arb, arb_mat
from torch import Tensor

from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates.arb_values import to_arb
from depthgauge.theory.certificates.verify.arb_vectors import (
    Vector,
    absolute,
    add,
    column_lengths,
    largest,
    length,
    smaller,
    spectral_norm,
    through,
    times,
    weighted,
)
from depthgauge.theory.network.network import NORM_EPSILON, Layer, SelfAttentionNetwork


@dataclass(frozen=True)
class ArbLayer:
    """A layer that reads n(x); scores are (n(x_i)W_h + q_h)·n(x_j)."""

    W: list[arb_mat]
    q: list[arb_mat]
    V: list[arb_mat]
    o: arb_mat
    w_in: arb_mat
    b_in: arb_mat
    w_out: arb_mat
    b_out: arb_mat


class ArbPoint:
    """A token t: what a sublayer reads of it, and how that changes when the state moves from t by at most ρ."""

    def __init__(self, x: list[arb], norm: str) -> None:
        self.d, self.root = len(x), arb(len(x)).sqrt()
        self.is_normed, self.centers = norm != "none", norm == "pre"
        mean = sum(x, arb(0)) / self.d if self.centers else arb(0)
        sigma = (sum(((e - mean) ** 2 for e in x), arb(0)) / self.d + arb(NORM_EPSILON)).sqrt()
        self.inverse = 1 / sigma if self.is_normed else arb(1)
        self.u = arb_mat([[(e - mean) * self.inverse for e in x]])

    def derivative(self) -> arb_mat:
        """Return Dn(t) = (I − J − n nᵀ/d)/σ, without J for RMSNorm."""
        u, share = self.u.entries(), arb(int(self.is_normed)) / self.d
        along = [[share * (int(self.centers) + a * b) for b in u] for a in u]
        return arb_mat([[self.inverse * (int(i == j) - along[i][j]) for j in range(self.d)] for i in range(self.d)])

    def _relative(self, rho: arb) -> arb:
        return (rho * self.inverse / self.root).upper()

    def shift(self, rho: arb) -> arb:
        """Bound ‖n(x) − n(t)‖ for ‖x − t‖ ≤ ρ: √d·√(2 − 2√(1 − s²)), at most 2√d."""
        if not self.is_normed:
            return rho
        s = self._relative(rho)
        chord = s * (2 / (1 + (1 - s * s).sqrt())).sqrt() if s < 1 else arb(2)
        return (self.root * chord).upper()

    def between(self, apart: arb, rho: arb, other: arb) -> arb:
        """Bound ‖n(x) − n(x')‖ for ‖x − x'‖ ≤ `apart`."""
        if not self.is_normed:
            return apart
        both = (self.shift(rho) + self.shift(other)).upper()
        s = largest([self._relative(rho), self._relative(other)])
        return smaller(both, (apart * self.inverse / (1 - s)).upper()) if s < 1 else both

    def bend(self, apart: arb, rho: arb, other: arb) -> arb:
        """Bound ‖n(x) − n(x') − (x − x')Dn(t)‖."""
        if not self.is_normed:
            return arb(0)
        step = apart * self.inverse
        plain = (self.between(apart, rho, other) + step).upper()
        s, z = self._relative(rho), self._relative(other)
        if not (s < 1 and z < 1):
            return plain
        return smaller(plain, (step * (s / (1 - s) + z / (1 - z)) / arb(3).sqrt()).upper())


class ArbParallel:
    """The bound on |S − S'|, where S' is the wide block of S."""

    def __init__(self, network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, points: Tensor) -> None:
        _check(network, surrogate)
        self.gelu, self.d, self.L = network.activation == "gelu", network.dim, len(network)
        self.steepest = arb("1.129").upper() if self.gelu else arb(1)
        self.points = [ArbPoint(row, network.norm) for row in to_arb(points).tolist()]
        self.u = arb_mat([point.u.entries() for point in self.points])
        self.layers = [folded(network, layer) for layer in network]
        self.V = [_added(layer.V, self.d, self.d) for layer in self.layers]
        self.hidden = [_plus_row(self.u * layer.w_in, layer.b_in) for layer in self.layers]
        self.m = [
            _plus_row(_mapped(self._activation, z) * layer.w_out, layer.b_out)
            for z, layer in zip(self.hidden, self.layers, strict=True)
        ]
        self.ranges = [[_ranges(self.u * V) for V in layer.V] for layer in self.layers]
        self.spread = [[_diameter(self.u * V) for V in layer.V] for layer in self.layers]
        self.query = [[_longest(_plus_row(self.u * W, q)) for W, q in _heads(layer)] for layer in self.layers]
        wide = _diameter(self.u)
        self.uneven = [[(size * wide / 4).tanh().upper() for size in sizes] for sizes in self.query]
        self.E = [_dot(self.uneven[k], self.spread[k]) for k in range(self.L)]
        mlps = [layer for layer, own in zip(self.layers, network, strict=True) if own.mlp is not None]
        self.given, self.mlps = folded(surrogate, surrogate[0]), mlps or self.layers[:1]

    def _activation(self, z: arb) -> arb:
        return z * (1 + (z / arb(2).sqrt()).erf()) / 2 if self.gelu else z.max(arb(0))

    def _slope(self, z: arb) -> arb:
        if not self.gelu:
            return arb(1) if z > 0 else arb(0)
        return (1 + (z / arb(2).sqrt()).erf()) / 2 + z * (-z * z / 2).exp() / (2 * arb.pi()).sqrt()

    def bound(self) -> Vector:
        """Bound |S − S'| per coordinate."""
        every = range(self.L)
        flat, off = self._mismatch()
        other = (self._reach(every) + sum(self.E, arb(0)) + off).upper()
        flat = add(flat, self._mlp_mismatch(other))
        G: list[arb] = []
        F = [[arb(0)] * self.L for _ in self.points]
        attention, mlp = ([[arb(0)] * self.d for _ in self.points] for _ in range(2))
        slopes = [[self._through_mlp(k, t) for k in every] for t in range(len(self.points))]
        for k, layer in enumerate(self.layers):
            own = [length(row) for row in _added([self.m[j] for j in range(k)], *self._shape()).tolist()]
            late = [sum([*self.E[:k], *G, *F[t][:k]], arb(0)) for t in range(len(self.points))]
            start = self._reach(range(k))
            rho = [(start + own[t] + late[t]).upper() for t in range(len(self.points))]
            shift = largest([point.shift(r) for point, r in zip(self.points, rho, strict=True)])
            turned = [self._turned(k, h, shift) for h in range(len(layer.V))]
            uneven = [smaller((a + b).upper(), arb(1)) for a, b in zip(self.uneven[k], turned, strict=True)]
            through_heads = spectral_norm(self.V[k]) + 2 * _dot(uneven, [spectral_norm(V) for V in layer.V])
            G.append((_dot(turned, self.spread[k]) + shift * through_heads).upper())
            slope = self.steepest * spectral_norm(layer.w_in) * spectral_norm(layer.w_out)
            for h, V in enumerate(layer.V):
                flat = add(flat, times(turned[h], self.ranges[k][h]), times(2 * shift * uneven[h], column_lengths(V)))
            columns, after = column_lengths(self.V[k]), self._reach(range(k + 1, self.L))
            start = self._reach(range(k + 1))
            for t, point in enumerate(self.points):
                beyond = point.bend(rho[t], rho[t], arb(0)) + late[t] * point.inverse
                attention[t] = add(attention[t], times(beyond, columns))
                far = (start + own[t] + sum([*self.E[: k + 1], *G, *F[t][:k]], arb(0))).upper()
                lag = sum([*self.E[k + 1 :], *G, *F[t][:k], off], arb(0))
                apart = (after + own[t] + lag).upper()
                loose = point.bend(apart, far, other) + lag * point.inverse
                kink = self._kink(k, t, far, other, point.between(apart, far, other))
                mlp[t] = add(mlp[t], times(loose, column_lengths(slopes[t][k])), kink)
                F[t][k] = (slope * point.shift(far)).upper()
        sides = [self._pairs(t, slopes[t], attention[t], mlp[t]) for t in range(len(self.points))]
        worst = [[[largest([side[p][s][c] for side in sides]) for c in range(self.d)] for s in (0, 1)] for p in (0, 1)]
        return add(flat, [largest([worst[0][s][c] + worst[1][s][c] for s in (0, 1)]) for c in range(self.d)])

    def _shape(self) -> tuple[int, int]:
        return len(self.points), self.d

    def _reach(self, which: range) -> arb:
        """Bound ‖Σ_k ā_k(u)‖ over the tokens u."""
        Z = _added([self.V[k] for k in which], self.d, self.d)
        return _longest(_plus_row(self.u * Z, _added([self.layers[k].o for k in which], 1, self.d)))

    def _turned(self, k: int, h: int, shift: arb) -> arb:
        """Bound TV(P(x_k), P(X))."""
        W = self.layers[k].W[h]
        theta = shift * (_diameter(self.u * W.transpose()) + 2 * self.query[k][h] + 2 * shift * spectral_norm(W))
        return (theta / 4).tanh().upper()

    def _through_mlp(self, k: int, t: int) -> arb_mat:
        """Return W_in diag(act'(h_t)) W_out."""
        layer = self.layers[k]
        slopes = [self._slope(z) for z in self.hidden[k].tolist()[t]]
        return layer.w_in * weighted(slopes, layer.w_out, [arb(1)] * self.d)

    def _kink(self, k: int, t: int, rho: arb, other: arb, between: arb) -> Vector:
        """Bound |act(h) − act(h') − act'(h_t)(h − h')| |W_out|."""
        layer, point = self.layers[k], self.points[t]
        a, b = point.shift(rho), point.shift(other)
        widths = column_lengths(layer.w_in)
        if self.gelu:
            scale = (a + b) * between / (2 * arb.pi()).sqrt()
            errors = [(scale * w * w).upper() for w in widths]
        else:
            far = largest([a, b])
            pairs = zip(widths, self.hidden[k].tolist()[t], strict=True)
            reached = [(w, (far * w + (-z if z > 0 else z)).upper()) for w, z in pairs]
            errors = [smaller((between * w).upper(), largest([arb(0), r])) for w, r in reached]
        return through(errors, absolute(layer.w_out))

    def _pairs(self, t: int, slopes: list[arb_mat], attention: Vector, mlp: Vector) -> list[list[Vector]]:
        """Bound ±ψ_A(t, u) and ±ψ_M(t, u) over all u, plus the rests."""
        D = self.points[t].derivative()
        G, f = ([arb_mat(rows, self.d) for _ in (0, 1)] for rows in (self.d, 1))
        for k in range(self.L):
            own = arb_mat([_added([self.m[j] for j in range(k)], *self._shape()).tolist()[t]])
            for part, (which, sign, M) in enumerate(((range(k), 1, self.V[k]), (range(k + 1, self.L), -1, slopes[k]))):
                to = D * M
                G[part] = G[part] + _added([self.V[j] for j in which], self.d, self.d) * sign * to
                f[part] = f[part] + (own + _added([self.layers[j].o for j in which], 1, self.d) * sign) * to
        found = []
        for part, rest in enumerate((attention, mlp)):
            columns = _plus_row(self.u * G[part], f[part]).transpose().tolist()
            sides = [[largest([sign * entry for entry in column]) for column in columns] for sign in (1, -1)]
            found.append([add(side, rest) for side in sides])
        return found

    def _mismatch(self) -> tuple[Vector, arb]:
        """Bound |Σ_ℓ a_ℓ(X) − a'(X)| and its length."""
        size, given = _longest(self.u), self.given
        names = [[head for layer in self.layers for head in getattr(layer, name)] for name in ("W", "q", "V")]
        o = _added([layer.o for layer in self.layers], 1, self.d) - given.o
        found = [entry.abs_upper() for entry in o.entries()]
        ranges = [head for heads in self.ranges for head in heads]
        for h, (W, q, V) in enumerate(zip(*names, strict=True)):
            score = size * length((W - given.W[h]).entries()) + length((q - given.q[h]).entries())
            turned = (size * score / 2).tanh().upper()
            found = add(found, times(size, column_lengths(V - given.V[h])), times(turned, ranges[h]))
        return found, length(found)

    def _mlp_mismatch(self, other: arb) -> Vector:
        """Bound |Σ_ℓ m_ℓ(y') − m'(y')|."""
        size = largest([length(point.u.entries()) + point.shift(other) for point in self.points])
        w_in, b_in = (_beside([getattr(layer, name) for layer in self.mlps]) for name in ("w_in", "b_in"))
        w_out = _beside([layer.w_out.transpose() for layer in self.mlps]).transpose()
        b_out = _added([layer.b_out for layer in self.layers], 1, self.d)

        def hidden(w: arb_mat, b: arb_mat) -> Vector:
            return add(times(size, column_lengths(w)), [entry.abs_upper() for entry in b.entries()])

        moved = times(self.steepest, hidden(w_in - self.given.w_in, b_in - self.given.b_in))
        last = [entry.abs_upper() for entry in (b_out - self.given.b_out).entries()]
        outer = through(hidden(w_in, b_in), absolute(w_out - self.given.w_out))
        return add(outer, through(moved, absolute(self.given.w_out)), last)


def folded(network: SelfAttentionNetwork, layer: Layer) -> ArbLayer:
    """Fold gain and bias of LayerNorm into the weights; a layer without MLP gets one of weight 0."""
    d, mlp = network.dim, layer.mlp
    ones, zeros = [[arb(1)] * d] * 2, [[arb(0)] * d] * 2
    gain = ones if layer.norm_weight is None else to_arb(layer.norm_weight).tolist()
    bias = [arb_mat([row]) for row in (zeros if layer.norm_bias is None else to_arb(layer.norm_bias).tolist())]
    W, q, V, o = [], [], [], arb_mat(1, d)
    for h in range(layer.heads):
        query, key, value = (to_arb(weight[h]) for weight in (layer.query, layer.key, layer.value))
        keys = _scaled(gain[0], key).transpose() * arb(network.scale)
        row = bias[0] * query if layer.query_bias is None else bias[0] * query + to_arb(layer.query_bias[h : h + 1])
        W.append(_scaled(gain[0], query) * keys)
        q.append(row * keys)
        V.append(_scaled(gain[0], value))
        o = o + bias[0] * value
    o = o if layer.output_bias is None else o + to_arb(layer.output_bias[None])
    if mlp is None:
        return ArbLayer(W, q, V, o, arb_mat(d, 1), arb_mat(1, 1), arb_mat(1, d), arb_mat(1, d))
    w_in, b_in = to_arb(mlp.w_in), to_arb(mlp.b_in[None])
    return ArbLayer(
        W, q, V, o, _scaled(gain[1], w_in), bias[1] * w_in + b_in, to_arb(mlp.w_out), to_arb(mlp.b_out[None])
    )


def _check(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> None:
    """Raise unless both are networks with skips of one kind, and the surrogate is one layer of the right shape."""
    same = all(getattr(network, n) == getattr(surrogate, n) for n in ("causal", "norm", "activation", "mlp_skip"))
    covered = network.skip and network.norm in ("none", "pre", "pre-rms") and (network.mlp_skip or not network.has_mlp)
    if not same or not covered or network.length is not None or surrogate.length is not None:
        raise VerificationError("the networks differ in kind, or the bound of a wide block does not cover them")
    mlps = [[layer.mlp.w_in.shape[1] for layer in net if layer.mlp is not None] for net in (network, surrogate)]
    heads = sum(layer.heads for layer in network)
    if len(surrogate) != 1 or surrogate[0].heads != heads or sum(mlps[0]) != sum(mlps[1]):
        raise VerificationError("the surrogate does not have the shape of the network's wide block")


def _heads(layer: ArbLayer) -> list[tuple[arb_mat, arb_mat]]:
    return list(zip(layer.W, layer.q, strict=True))


def _scaled(rows: Sequence[arb], M: arb_mat) -> arb_mat:
    return weighted(rows, M, [arb(1)] * M.ncols())


def _added(parts: Sequence[arb_mat], rows: int, columns: int) -> arb_mat:
    return sum(parts, arb_mat(rows, columns))


def _plus_row(M: arb_mat, row: arb_mat) -> arb_mat:
    added = row.entries()
    return arb_mat([[a + b for a, b in zip(entries, added, strict=True)] for entries in M.tolist()])


def _beside(parts: Sequence[arb_mat]) -> arb_mat:
    return arb_mat([list(chain(*rows)) for rows in zip(*(part.tolist() for part in parts), strict=True)])


def _mapped(function: Callable[[arb], arb], M: arb_mat) -> arb_mat:
    return arb_mat(M.nrows(), M.ncols(), [function(entry) for entry in M.entries()])


def _longest(rows: arb_mat) -> arb:
    return largest([length(row) for row in rows.tolist()])


def _diameter(rows: arb_mat) -> arb:
    """Bound the largest distance of two rows by twice the largest distance from their mean."""
    means = [sum(column, arb(0)) / len(column) for column in rows.transpose().tolist()]
    return (2 * largest([length([a - b for a, b in zip(row, means, strict=True)]) for row in rows.tolist()])).upper()


def _ranges(rows: arb_mat) -> Vector:
    return [(largest(column) + largest([-entry for entry in column])).upper() for column in rows.transpose().tolist()]


def _dot(x: Sequence[arb], y: Sequence[arb]) -> arb:
    return sum((a * b for a, b in zip(x, y, strict=True)), arb(0)).upper()
