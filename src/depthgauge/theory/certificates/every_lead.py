"""The leading term of the last row at every sequence with one token at each of n places (docs/math.md §3.11).

With D_x(y, z) = (y − z) G_x (y − z)ᵀ and G_x = Σ_b x_b T_a[b], likewise Dᵐ, and m = mean(X), it is

    (1/n²) Σ_{j<k} [ D_{x_n}(x_j, x_k) + (1/n) Σ_i Dᵐ_{x_i}(x_j, x_k) ],

a sum of tables over three tokens, or over two where places coincide. The tables are enclosed, and added in float64.
"""

from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.pair_lead import PairLead
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed, Upper, total
from depthgauge.theory.linalg.rounding import gamma

MOST = 2**21
"""The most sequences at which a leading term is evaluated (16 MB)."""


class EveryLead:
    """A bound on the leading term of the last row; `value` is over pairs, `sharper` over sequences if there are few."""

    can_sharpen, is_slow = True, False

    def __init__(self, A: BoundArithmetic, T: Rank1Sum, Tm: Rank1Sum, places: Float[Tensor, "n w d"]) -> None:
        self.A, self.T, self.Tm, self.places = A, T, Tm, places
        points, both = places.flatten(0, 1), ((T, places[-1]), (Tm, None))
        self.points = A.exact(points)
        self.parts = [PairLead(A, terms, points, x, len(places)) for terms, x in both if terms.terms]
        self.value: Upper = total(A.zeros(T.right.shape[-1]), *(part.value for part in self.parts))

    def sharper(self, a: int) -> Upper:
        """Return the largest |leading term| of coordinate a.

        The computed sum of N numbers is off by at most γ_N times the sum of their sizes.
        """
        n, w, _ = self.places.shape
        if w**n > MOST:
            return total(self.A.zeros(1), *(part.sharper(a) for part in self.parts))[0]
        triples, pairs = self._tables(torch.tensor([a]))
        near = [tables.floats() for tables in (triples, pairs)]
        sizes = torch.cat([tables.flatten(1).abs().amax(1) for tables in near])
        wrong = (triples - near[0]).size().amax((1, 2, 3)), (pairs - near[1]).size().amax((1, 2))
        lost = self.A.upper(sizes).sum(0) * gamma(len(sizes))
        return total(self.A.upper(largest_sum(near[0], near[1], n)), lost, *(one.sum(0) for one in wrong)) / float(n**3)

    def _tables(self, a: Tensor) -> tuple[Enclosed, Enclosed]:
        """Return the terms of three places i < j < k, [_, w, w, w], and of two places j < k, [_, w, w], times n³.

        They are in the order of k, then of j, then of i.
        """
        n, w, _ = self.places.shape
        last, each = self._forms(self.T, self.points[-w:], a) * float(n), self._forms(self.Tm, self.points, a)
        own, end = torch.arange(w), n - 1
        each, last = each.reshape(n, w, n, w, n, w), last.reshape(w, n, w, n, w)
        i, j, k = in_order(n, 3)
        mixed = each[i, :, j, :, k] + each[j, :, i, :, k].permute(0, 2, 1, 3) + each[k, :, i, :, j].permute(0, 2, 3, 1)
        at_end = k == end
        by_last = last[:, i[at_end], :, j[at_end]].permute(0, 2, 3, 1)
        triples = self.A.cat([mixed[~at_end], mixed[at_end] + by_last])
        j, k = in_order(n, 2)
        mixed = each[j, :, j, :, k][:, own, own] + each[k, :, j, :, k][:, own, :, own].permute(1, 2, 0)
        at_end = k == end
        by_last = last[:, j[at_end], :, k[at_end]][:, own, :, own].permute(1, 2, 0)
        return triples, self.A.cat([mixed[~at_end], mixed[at_end] + by_last])

    def _forms(self, terms: Rank1Sum, queries: Enclosed, a: Tensor) -> Enclosed:
        """Return D_x(y, z) for the queries x and all points y and z, [x, points, points]."""
        v, d = self.points.shape
        G = queries @ terms.at(a).reshape(d, d * d)
        form = self.points.coarse(G.reshape(-1, d, d)).coarse(self.points.mT)
        own = form[:, torch.arange(v), torch.arange(v)]
        return own[:, :, None] + own[:, None, :] - form - form.mT


def in_order(n: int, count: int) -> Tensor:
    """Return all choices of some of n places in increasing order, [count, choices], by the last place first."""
    found = sorted(combinations(range(n), count), key=lambda places: places[::-1])
    return torch.tensor(found, dtype=torch.int64).reshape(-1, count).mT


def largest_sum(triples: Float[Tensor, "_ w w w"], pairs: Float[Tensor, "_ w w"], n: int) -> Tensor:
    """Return the largest |sum| of tables over sequences of n tokens; the tables are in the order of `in_order`.

    The sums over the first places are kept, so that few steps have the size of all sequences.
    """
    w = pairs.shape[-1]
    whole, three, two = pairs.new_zeros(w), iter(triples), iter(pairs)
    for k in range(1, n):
        by_k = pairs.new_zeros(1, w)  # over the tokens at the places before j, and at k
        for j in range(k):
            by_both = next(two)[None].clone()  # over the tokens at the places before i, and at j and k
            for _ in range(j):
                by_both = (by_both[:, None] + next(three)).flatten(0, 1)
            by_k = by_both.add_(by_k[:, None]).flatten(0, 1)
        whole = by_k.add_(whole[:, None]).flatten()
    low, high = whole.aminmax()
    return torch.maximum(-low, high)
