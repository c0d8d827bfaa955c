"""The bounds over all sequences of tokens in arb interval arithmetic (docs/math.md §3.11)."""

from dataclasses import dataclass

import numpy as np
from flint import arb, arb_mat

from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates.arb_values import to_arb
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.certificates.verify.arb_vectors import (
    Vector,
    absolute,
    add,
    largest,
    length,
    smaller,
    through,
    times,
)
from depthgauge.theory.certificates.verify.box import rho
from depthgauge.theory.certificates.verify.expansion import ArbExpansion, negated, zeros
from depthgauge.theory.certificates.verify.lead import Terms


@dataclass(frozen=True)
class ArbTokenLayer:
    """One layer: own and err per coordinate, and for every head θ and the range of the errors of its scores."""

    own: Vector
    err: Vector
    theta: list[arb]
    moved: list[arb]


class PointRanges:
    """The points x of all tokens; `unevenness` is 1 − 1/n for at most n tokens."""

    def __init__(self, inputs: Tokens) -> None:
        self.points, n = to_arb(inputs.points()), inputs.length
        self.unevenness = arb(1) if n is None else (arb(n - 1) / n).upper()

    def ranges(self, M: arb_mat) -> Vector:
        """Bound max − min over the points of every coordinate of x M."""
        return [_range(column) for column in (self.points * M).transpose().tolist()]

    def largest(self, M: arb_mat) -> Vector:
        """Bound the largest |(x M)_c| over the points."""
        return [largest([abs(entry) for entry in column]) for column in (self.points * M).transpose().tolist()]

    def widest(self, W: arb_mat) -> arb:
        """Bound the largest range over y of x W yᵀ."""
        return largest([_range(row) for row in (self.points * W * self.points.transpose()).tolist()])


class TokenLayers(PointRanges):
    """The layers of a network with skip connections, over all sequences of points."""

    def __init__(self, who: str, X: ArbExpansion, inputs: Tokens) -> None:
        if not X.skip:
            raise VerificationError(f"{who}: the bounds over tokens require skip connections")
        super().__init__(inputs)
        self.X = X
        self.layers: list[ArbTokenLayer] = []
        for index in range(X.depth):
            self.layers.append(self._layer(index))

    def _layer(self, k: int) -> ArbTokenLayer:
        X = self.X
        own = add(zeros(X.dim), *(self.gap(j, h, X.V[j][h]) for j in range(k) for h in X.heads(j)))
        err = add(own, *(self.gap(j, h, X.carried(j, k)[h]) for j in range(k) for h in X.heads(j)))
        theta, moved = [], []
        for W in X.W[k]:
            drifting = X.drift(0, k) * W
            query = add(self.largest(W), self.largest(drifting), through(err, absolute(W)))
            keys = self.ranges(W.transpose())
            caused = sum((e * r for e, r in zip(err, keys, strict=True)), arb(0))
            caused += 2 * sum((q * o for q, o in zip(query, own, strict=True)), arb(0))
            moved.append(caused.upper())
            theta.append((self.widest(W) + self.widest(drifting) + moved[-1]).upper())
        return ArbTokenLayer(own, err, theta, moved)

    def _uneven(self, k: int, h: int) -> arb:
        return smaller((self.layers[k].theta[h] / 4).tanh().upper(), self.unevenness)

    def gap(self, k: int, h: int, M: arb_mat) -> Vector:
        """Bound |(P_h − U) X_k M|."""
        return times(self._uneven(k, h), add(self.ranges(M), self._own_range(k, M)))

    def rest(self, k: int, h: int, M: arb_mat) -> Vector:
        """Bound what is beyond the leading term of |(P_h − U) X_k M|."""
        layer = self.layers[k]
        curved = rho() * layer.theta[h] ** 2 + layer.moved[h] / 4
        return add(times(curved, self.ranges(M)), times(self._uneven(k, h), self._own_range(k, M)))

    def added(self, part: str) -> Vector:
        """Bound the sum over all heads of what `gap` or `rest` says about V and V Z_{k+1:L}."""
        X, found = self.X, [zeros(self.X.dim)]
        for k in range(X.depth):
            for h in X.heads(k):
                found += [getattr(self, part)(k, h, M) for M in (X.V[k][h], X.carried(k, X.depth)[h])]
        return add(*found)

    def _own_range(self, k: int, M: arb_mat) -> Vector:
        return times(arb(2), through(self.layers[k].own, absolute(M)))

    def terms(self) -> tuple[Terms, Terms]:
        """Return the terms of T and of Tᵐ."""
        X = self.X
        T = [term for k in range(X.depth) for term in X.plain_terms(k, X.heads(k))]
        Tm = [term for k in range(X.depth) for term in X.drift_terms(k, X.heads(k))]
        return T, Tm + [term for k in range(X.depth) for term in X.output_terms(k, X.depth, X.heads(k))]


def token_bound(X: ArbExpansion, Y: ArbExpansion, inputs: Tokens, upper: arb) -> Vector:
    """Bound |S − S'|, over pairs of points where the plain bound exceeds `upper`."""
    S, other = TokenLayers("network", X, inputs), TokenLayers("surrogate", Y, inputs)
    linear = S.largest(X.drift(0, X.depth) - Y.drift(0, Y.depth))
    values = add(linear, S.added("gap"), other.added("gap"))
    open_ones = [a for a, value in enumerate(values) if not value <= upper]
    if not open_ones:
        return values
    beyond = add(linear, S.added("rest"), other.added("rest"))
    (T, Tm), (T_other, Tm_other) = S.terms(), other.terms()
    both = T + negated(T_other), Tm + negated(Tm_other)
    leads = [PairLead(terms, S.points, S.unevenness) for terms in both]
    for a in open_ones:
        bound = beyond[a] + sum((lead.bound(a) for lead in leads), arb(0))
        values[a] = smaller(values[a], bound.upper())
    return values


class PairLead:
    """A bound on |tr(G C)| over the points x, with G = Σ_r (L_rᵀ x)(R_r e_a)ᵀ, and all covariances C of points."""

    def __init__(self, terms: Terms, points: arb_mat, share: arb) -> None:
        self.terms, self.points, self.v, self.share = terms, points, points.nrows(), share
        self.queries = [points * left for left, _ in terms]
        self.spread = _largest_square(points)

    def bound(self, a: int) -> arb:
        """Return the bound for coordinate a: for each x the smaller one of two."""
        d = self.points.ncols()
        columns = arb_mat([[right[c, a] for c in range(d)] for _, right in self.terms])  # [r, c]
        sizes = []
        for x in range(self.v):
            G = arb_mat([[query[x, c] for query in self.queries] for c in range(d)]) * columns
            sizes.append(smaller((self.share * self._pairs(G)).upper(), self._centred(G)))
        return largest(sizes)

    def _pairs(self, G: arb_mat) -> arb:
        """Return ½ max |δ G δᵀ| over the differences δ of two points."""
        form = (self.points * G * self.points.transpose()).tolist()
        sizes = [
            (form[t][t] + form[u][u] - form[t][u] - form[u][t]).abs_upper() for t in range(self.v) for u in range(t)
        ]
        return (largest(sizes) / 2).upper() if sizes else arb(0)

    def _centred(self, G: arb_mat) -> arb:
        """Return max ‖(x_t − c)A‖² + ‖G − AAᵀ + BBᵀ‖_F max ‖x_t − c‖², for A and for B in place of A."""
        d = G.nrows()
        middle = np.array([float(entry.mid()) for entry in G.entries()]).reshape(d, d)
        if not np.isfinite(middle).all():
            return arb("inf")
        values, vectors = np.linalg.eigh((middle + middle.T) / 2)
        A, B = (
            arb_mat(d, d, [arb(float(entry)) for entry in (vectors * np.sqrt(np.maximum(side, 0.0))).flatten()])
            for side in (values, -values)
        )
        rest = (G + G.transpose()) * arb(0.5) - A * A.transpose() + B * B.transpose()
        wide = largest([_largest_square(self.points * side) for side in (A, B)])
        return (wide + length(rest.entries()) * self.spread).upper()


def _largest_square(rows: arb_mat) -> arb:
    """Bound the largest ‖y − c‖² over the rows y, for the middle c of the ranges of their entries."""
    columns = rows.transpose().tolist()
    ends = [[float(entry.mid()) for entry in column] for column in columns]
    centre = [arb(max(column) / 2 + min(column) / 2) for column in ends]
    sums = [sum(((y - c) ** 2 for y, c in zip(row, centre, strict=True)), arb(0)) for row in rows.tolist()]
    return largest(sums)


def _range(values: list[arb]) -> arb:
    """Bound max − min of intervals."""
    return (largest(values) + largest([-value for value in values])).upper()
