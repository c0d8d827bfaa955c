"""The leading term Σ_r Cov_j(x L_r x_j, x_j R_r) over a finite set of points (docs/math.md §3.11).

For a fixed x and a it is tr(G C) with G = Σ_b x_b T_a[b] and C = cov(x_j). All terms are summed first. Two bounds hold
for every sequence of points x_j:

- pairs: C = (1/2n²) Σ_jk δᵀδ with δ = x_j − x_k, so |tr(G C)| is at most ½ max |δ G δᵀ|, times 1 − 1/n as δ = 0 for
  j = k;
- centred: a variance is at most the largest squared distance from any centre.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed, Upper

BLOCK = 2**22
"""Entries of an array that are computed at a time (32 MB)."""
PAIRED = 3e8
"""The most numbers v³d that the leading term over pairs of v points may take; beyond it, heads are bounded alone."""
TOGETHER = 8
"""Matrices that are bounded around a centre at a time."""


def can_pair(points: Float[Tensor, "v d"]) -> bool:
    """Return whether the leading term is computed over all pairs of points."""
    v, d = points.shape
    return v**3 * d <= PAIRED


class PairLead:
    """A bound on the leading term over all points x and all sequences of points x_j.

    `value` uses pairs. `sharper` uses the smaller bound for each x, which takes longer. `queries` are the points x, by
    default all. With `places`, the points are those of n places in this order, and a sequence has one point of each
    place: then the mean of ½ |δ G δᵀ| over all pairs of places, with the largest value for each pair, replaces the
    maximum. `share` is at least 1 − 1/n.
    """

    can_sharpen, is_slow = True, False

    def __init__(
        self,
        A: BoundArithmetic,
        terms: Rank1Sum,
        points: Float[Tensor, "v d"],
        queries: Float[Tensor, "x d"] | None = None,
        places: int = 1,
        share: float = 1.0,
    ) -> None:
        self.A, self.terms, self.places, self.share = A, terms, places, share
        self.points, self.queries = A.exact(points), A.exact(points if queries is None else queries)
        x, v, outputs = self.queries.shape[0], len(points), terms.right.shape[-1]
        self.width = max(1, BLOCK // (x * v**2))
        each = []
        for start in range(0, outputs, self.width):
            G = self._matrices(torch.arange(start, min(start + self.width, outputs)))
            many = max(1, BLOCK // v**2)
            parts = [self._pairs(G[first : first + many]) for first in range(0, G.shape[0], many)]
            each.append(A.cat(parts).reshape(-1, x))
        self.each: Upper = A.cat(each)
        self.value = self.each.amax(-1)

    def _matrices(self, coordinates: Tensor) -> Enclosed:
        """Return G for some coordinates and all x, [a·x, d, d]."""
        d = self.points.shape[1]
        return (self.queries @ self.terms.at(coordinates).reshape(len(coordinates), d, d * d)).reshape(-1, d, d)

    def _pairs(self, G: Enclosed) -> Upper:
        """Bound ½ max |δ G δᵀ| over the differences δ of two points, times the share."""
        places = self.places
        sizes = self.A.pair_sizes(self.points.coarse(G).coarse(self.points.mT), places)
        if places == 1:
            return sizes[:, 0, 0] * self.share
        apart = 1.0 - torch.eye(places, dtype=torch.float64)  # a place has one token, so δ = 0
        return (sizes * apart).sum((-2, -1)) / float(places**2) * self.share

    def sharper(self, a: int) -> Upper:
        """Return the bound for coordinate a, with the smaller one of both bounds for each x, the largest first."""
        G, pairs = self._matrices(torch.tensor([a])), self.each[a]
        order = pairs.floats().argsort(descending=True)
        worst, left = self.A.zeros(1), order
        while len(left) and not bool((pairs[left].amax(0) + 0.0).floats() <= worst[0].floats()):
            chosen, left = left[:TOGETHER], left[TOGETHER:]
            found = pairs[chosen].least(centred(self.A, G[chosen], self.points, self.places))
            worst = worst.most(found.amax(0))
        return (self.A.cat([worst, pairs[left]]) if len(left) else worst).amax(0)


def centred(A: BoundArithmetic, G: Enclosed, points: Enclosed, places: int = 1) -> Upper:
    """Bound |tr(G C)| over the covariances C of all sequences of points, for every matrix G.

    Let G = A Aᵀ − B Bᵀ + R, with A and B from the eigenvectors of G, so that R is of the size of rounding errors. Then
    tr(G C) ≤ tr(Aᵀ C A) + ‖R‖_F tr C, and a variance is at most the largest squared distance from any centre c:
    tr(Aᵀ C A) ≤ max_t ‖(x_t − c)A‖². The centre is the middle of the ranges. The lower side has B in place of A. With
    one point of each of several places, the mean over the places of the largest square replaces the largest one.
    """
    middle = G.floats().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    values, vectors = torch.linalg.eigh(middle / 2 + middle.mT / 2)
    sides = [A.exact(vectors * (sign * values).clamp(min=0.0).sqrt()[:, None, :]) for sign in (1.0, -1.0)]
    rest = A.frobenius_norm(G - sides[0] @ sides[0].mT + sides[1] @ sides[1].mT)
    one, two = (_largest_square(points @ side, places) for side in sides)
    return one.most(two) + rest * _largest_square(points[None], 1)


def _largest_square(rows: Enclosed, places: int) -> Upper:
    """Bound the largest ‖y − c‖² over the rows y, for the middle c of the ranges of their entries.

    The rows are those of several places; the mean over the places is bounded.
    """
    middle = rows.floats()
    apart = (rows - (middle.amax(-2, keepdim=True) / 2 + middle.amin(-2, keepdim=True) / 2)).size()
    squares = (apart * apart).sum(-1)
    return squares.reshape(squares.shape[0], places, -1).amax(-1).sum(-1) / float(places)
