"""What the tokens of an input can be, points of a finite set, a box or a ball, and the bounds that need only that.

x and y stand for points of the convex hull of the set, M_h and W_h for matrices of the heads.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.theory.certificates.ball import column_lengths
from depthgauge.theory.certificates.box import JOINT_LIMIT, HeadVectors, Norms, PerHead, Vector
from depthgauge.theory.certificates.lead import LeadBound, Rank1Sum, lead_bound
from depthgauge.theory.certificates.token_bounds import PairLead, can_pair, largest, ranges, widest_row
from depthgauge.theory.linalg.enclosures import Enclosure, spectral_norm_up
from depthgauge.theory.linalg.rounding import mul_up, nonnegative_sum_up


class ConvexLead:
    """A bound on Σ_r Cov_j(x L_r x_j, x_j R_r) over all points of a box or a ball; see `PairLead` for finite sets."""

    def __init__(self, terms: Rank1Sum, radius: float, kind: str) -> None:
        d = terms.left.shape[-1]
        none = Rank1Sum(*(Enclosure.exact(torch.zeros(0, d, d, dtype=torch.float64)) for _ in range(2)))
        self.kept: LeadBound = lead_bound(terms, none, radius, kind)
        self.pairs: Vector = self.kept.value

    def sharper(self, a: int) -> Tensor:
        """Return the bound for coordinate a."""
        return self.pairs[a]


class Region(ABC):
    """A set of points that every token of an input is taken from.

    `unevenness` bounds the total variation of a row of attention from the average over its tokens.
    """

    def __init__(self, unevenness: float = 1.0) -> None:
        self.norms, self.unevenness = Norms(), unevenness

    @abstractmethod
    def largest(self, M: Enclosure) -> HeadVectors:
        """Bound the largest |(x M_h)_c|."""

    @abstractmethod
    def ranges(self, M: Enclosure) -> HeadVectors:
        """Bound the largest (x M_h)_c − (y M_h)_c."""

    @abstractmethod
    def widest_row(self, name: str, W: Enclosure) -> PerHead:
        """Bound the largest range over y of x W_h yᵀ; `name` says where the scalings of the proof are recorded."""

    @abstractmethod
    def lead(self, terms: Rank1Sum) -> PairLead | ConvexLead | None:
        """Bound the leading term of all heads together; None if it would take too long."""


class PointRegion(Region):
    """A finite set of points."""

    def __init__(self, points: Float[Tensor, "v d"], unevenness: float = 1.0) -> None:
        super().__init__(unevenness)
        self.points = points

    def largest(self, M: Enclosure) -> HeadVectors:
        """As in the base class."""
        return largest(self.points, M)

    def ranges(self, M: Enclosure) -> HeadVectors:
        """As in the base class."""
        return ranges(self.points, M)

    def widest_row(self, name: str, W: Enclosure) -> PerHead:
        """As in the base class; no scalings are needed."""
        return widest_row(self.points, W)

    def lead(self, terms: Rank1Sum) -> PairLead | None:
        """As in the base class."""
        return PairLead(terms, self.points, share=self.unevenness) if can_pair(self.points) else None


class ConvexRegion(Region):
    """The box of all x with |x_c| ≤ φ, or the ball of all x with ‖x‖₂ ≤ r; φ or r is `radius`."""

    def __init__(self, kind: str, radius: float) -> None:
        super().__init__()
        self.kind, self.radius = kind, radius

    def largest(self, M: Enclosure) -> HeadVectors:
        """As in the base class: φ Σ_b |M_bc|, or r ‖M e_c‖₂."""
        columns = nonnegative_sum_up(M.abs_up(), -2) if self.kind == "box" else column_lengths(M)
        return mul_up(columns, self.radius)

    def ranges(self, M: Enclosure) -> HeadVectors:
        """As in the base class: twice the largest value, as the sets are symmetric."""
        return 2.0 * self.largest(M)

    def widest_row(self, name: str, W: Enclosure) -> PerHead:
        """As in the base class: 2φ²‖W‖_{∞→1}, or 2r²‖W‖₂."""
        if self.kind == "box":
            phi = torch.full((W.shape[-1],), self.radius, dtype=torch.float64)
            return 2.0 * self.norms(name, phi, W, phi)
        return mul_up(mul_up(2.0 * spectral_norm_up(W), self.radius), self.radius)

    def lead(self, terms: Rank1Sum) -> ConvexLead | None:
        """As in the base class."""
        return ConvexLead(terms, self.radius, self.kind) if terms.left.shape[-1] <= JOINT_LIMIT else None
