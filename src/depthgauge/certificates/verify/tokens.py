"""The bounds over all sequences of tokens in arb interval arithmetic (docs/math.md §3.11)."""

from dataclasses import dataclass

from flint import arb, arb_mat
from torch import Tensor

from depthgauge.certificates.evaluate import to_arb
from depthgauge.certificates.verify.arb_vectors import Vector, absolute, add, largest, smaller, through, times
from depthgauge.certificates.verify.box import rho
from depthgauge.certificates.verify.expansion import ArbExpansion, negated, zeros
from depthgauge.certificates.verify.lead import Terms
from depthgauge.errors import VerificationError


@dataclass(frozen=True)
class ArbTokenLayer:
    """One layer: own and err per coordinate, and for every head θ and the range of the errors of its scores."""

    own: Vector
    err: Vector
    theta: list[arb]
    moved: list[arb]


class TokenLayers:
    """The layers of a network with skip connections, over all sequences of points."""

    def __init__(self, who: str, X: ArbExpansion, points: Tensor) -> None:
        if not X.skip:
            raise VerificationError(f"{who}: the bounds over tokens require skip connections")
        self.X, self.points = X, to_arb(points)
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
            theta.append((self._widest_row(W) + self._widest_row(drifting) + moved[-1]).upper())
        return ArbTokenLayer(own, err, theta, moved)

    def gap(self, k: int, h: int, M: arb_mat) -> Vector:
        """Bound |(P_h − U) X_k M|."""
        layer = self.layers[k]
        return times((layer.theta[h] / 4).tanh(), add(self.ranges(M), self._own_range(k, M)))

    def rest(self, k: int, h: int, M: arb_mat) -> Vector:
        """Bound what is beyond the leading term of |(P_h − U) X_k M|."""
        layer = self.layers[k]
        curved = rho() * layer.theta[h] ** 2 + layer.moved[h] / 4
        return add(times(curved, self.ranges(M)), times((layer.theta[h] / 4).tanh(), self._own_range(k, M)))

    def added(self, part: str) -> Vector:
        """Bound the sum over all heads of what `gap` or `rest` says about V and V Z_{k+1:L}."""
        X, found = self.X, [zeros(self.X.dim)]
        for k in range(X.depth):
            for h in X.heads(k):
                found += [getattr(self, part)(k, h, M) for M in (X.V[k][h], X.carried(k, X.depth)[h])]
        return add(*found)

    def ranges(self, M: arb_mat) -> Vector:
        """Bound max − min over the points of every coordinate of x M."""
        return [_range(column) for column in (self.points * M).transpose().tolist()]

    def largest(self, M: arb_mat) -> Vector:
        """Bound the largest |(x M)_c| over the points."""
        return [largest([abs(entry) for entry in column]) for column in (self.points * M).transpose().tolist()]

    def _own_range(self, k: int, M: arb_mat) -> Vector:
        return times(arb(2), through(self.layers[k].own, absolute(M)))

    def _widest_row(self, W: arb_mat) -> arb:
        return largest([_range(row) for row in (self.points * W * self.points.transpose()).tolist()])

    def terms(self) -> tuple[Terms, Terms]:
        """Return the terms of T and of Tᵐ."""
        X = self.X
        T = [term for k in range(X.depth) for term in X.plain_terms(k, X.heads(k))]
        Tm = [term for k in range(X.depth) for term in X.drift_terms(k, X.heads(k))]
        return T, Tm + [term for k in range(X.depth) for term in X.output_terms(k, X.depth, X.heads(k))]


def token_bound(X: ArbExpansion, Y: ArbExpansion, points: Tensor, upper: arb) -> Vector:
    """Bound |S − S'|, over pairs of points where the plain bound exceeds `upper`."""
    S, other = TokenLayers("network", X, points), TokenLayers("surrogate", Y, points)
    linear = S.largest(X.drift(0, X.depth) - Y.drift(0, Y.depth))
    values = add(linear, S.added("gap"), other.added("gap"))
    open_ones = [a for a, value in enumerate(values) if not value <= upper]
    if not open_ones:
        return values
    beyond = add(linear, S.added("rest"), other.added("rest"))
    (T, Tm), (T_other, Tm_other) = S.terms(), other.terms()
    leads = [PairLead(T + negated(T_other), S.points), PairLead(Tm + negated(Tm_other), S.points)]
    for a in open_ones:
        bound = beyond[a] + sum((lead.bound(a) for lead in leads), arb(0))
        values[a] = smaller(values[a], bound.upper())
    return values


class PairLead:
    """½ max |Σ_r (x L_r δ)(δ R_r)_a| over the points x and the differences δ of two points."""

    def __init__(self, terms: Terms, points: arb_mat) -> None:
        self.right = [right for _, right in terms]
        self.points, self.v = points, points.nrows()
        keys = points.transpose()
        rows = [(points * left * keys).tolist() for left, _ in terms]  # of each term: x L_r x_t
        self.scores = [arb_mat([[term[x][t] for term in rows] for t in range(self.v)]) for x in range(self.v)]

    def bound(self, a: int) -> arb:
        """Return the bound for coordinate a."""
        values = [(self.points * right).transpose().tolist()[a] for right in self.right]
        moved = arb_mat([list(column) for column in values])  # [r, t]: (x_t R_r)_a
        found = arb(0)
        for scores in self.scores:
            form = (scores * moved).tolist()
            for t in range(self.v):
                for u in range(t):
                    size = (form[t][t] + form[u][u] - form[t][u] - form[u][t]).abs_upper()
                    found = largest([found, size]) if not size <= found else found
        return (found / 2).upper()


def _range(values: list[arb]) -> arb:
    """Bound max − min of intervals."""
    return (largest(values) + largest([-value for value in values])).upper()
