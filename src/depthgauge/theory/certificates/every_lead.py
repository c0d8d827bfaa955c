"""The leading term of the last row at every sequence with one token at each of n places (docs/math.md §3.11).

With D_x(y, z) = (y − z) G_x (y − z)ᵀ and G_x = Σ_b x_b T_a[b], likewise Dᵐ, and m = mean(X), it is

    (1/n²) Σ_{j<k} [ D_{x_n}(x_j, x_k) + (1/n) Σ_i Dᵐ_{x_i}(x_j, x_k) ],

a sum of tables over three tokens, or over two where places coincide. The tables are enclosed, and added in float64.
"""

from collections.abc import Iterator
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
        found, sizes, off = torch.zeros([w] * n).double(), [torch.zeros(()).double()], list[Upper]()
        for at, table in self._tables(torch.tensor([a])):
            near = table.floats()
            found += near.reshape([w if place in at else 1 for place in range(n)])
            sizes.append(near.abs().amax())
            off.append((table - near).size().reshape(-1).amax(0))
        lost = self.A.upper(torch.stack(sizes)).sum(0) * gamma(len(sizes))
        return total(self.A.upper(found.abs().amax()), lost, *off) / float(n**3)

    def _tables(self, a: Tensor) -> Iterator[tuple[tuple[int, ...], Enclosed]]:
        """Yield places in order and the terms in which their tokens occur, times n³."""
        n, w, _ = self.places.shape
        last, each = self._forms(self.T, self.points[-w:], a) * float(n), self._forms(self.Tm, self.points, a)
        own, end = torch.arange(w), n - 1
        each = each.reshape(n, w, n, w, n, w)
        last = last.reshape(w, n, w, n, w)
        for i, j, k in combinations(range(n), 3):
            mixed = each[i, :, j, :, k] + each[j, :, i, :, k].permute(1, 0, 2) + each[k, :, i, :, j].permute(1, 2, 0)
            yield (i, j, k), mixed + last[:, i, :, j].permute(1, 2, 0) if k == end else mixed
        for j, k in combinations(range(n), 2):
            mixed = each[j, :, j, :, k][own, own] + each[k, :, j, :, k][own, :, own].mT
            yield (j, k), mixed + last[:, j, :, k][own, :, own].mT if k == end else mixed

    def _forms(self, terms: Rank1Sum, queries: Enclosed, a: Tensor) -> Enclosed:
        """Return D_x(y, z) for the queries x and all points y and z, [x, points, points]."""
        v, d = self.points.shape
        G = queries @ terms.at(a).reshape(d, d * d)
        form = self.points.coarse(G.reshape(-1, d, d)).coarse(self.points.mT)
        own = form[:, torch.arange(v), torch.arange(v)]
        return own[:, :, None] + own[:, None, :] - form - form.mT
