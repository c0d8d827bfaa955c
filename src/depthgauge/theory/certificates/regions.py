"""What the tokens of an input can be: a box, a ball, or points of a finite set, and the bounds that need only that.

x and y stand for points of the convex hull of the set, M_h and W_h for matrices of the heads. A *length* of a vector is
what a region measures of it: on a box and on points |·| of every coordinate, [d]; on a ball the Euclidean length, [1].
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from depthgauge.theory.certificates.compared_networks import InputSet
from depthgauge.theory.certificates.every_lead import EveryLead
from depthgauge.theory.certificates.lead import STEPS, ConvexLead, Lead, Rank1Sum
from depthgauge.theory.certificates.pair_lead import BLOCK, PairLead, can_pair
from depthgauge.theory.certificates.read_tokens import column_lengths
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed, Upper, through, total

JOINT_LIMIT = 64
"""The largest width d at which the leading term is bounded jointly; its tensor has d⁴ entries."""


class States(NamedTuple):
    """Lengths at the input of a layer: own, err, state and spread of docs/math.md §3.2."""

    own: Upper
    err: Upper
    state: Upper
    spread: Upper


class Region(ABC):
    """A set of points that every token of an input is taken from.

    Attributes:
        unevenness: a bound on the total variation of a row of attention from the average over its tokens.
        start: the length of a point.
        by_coordinate: whether a length has one entry per coordinate.
        matches: whether equal heads of two networks are bounded together, by their difference.
        joint: what the bound on the leading term is called.
        squares: whether it is sharpened by sums of squares.
        alone: why leading terms are not bounded, or None if they are.
    """

    unevenness = 1.0
    start: Upper
    by_coordinate = True
    matches = False
    joint, squares = "joint", False
    alone: str | None = None

    def __init__(self, A: BoundArithmetic, width: int) -> None:
        self.A, self.d = A, width

    @abstractmethod
    def largest(self, M: Enclosed) -> Upper:
        """Bound the largest |(x M_h)_c|."""

    @abstractmethod
    def ranges(self, M: Enclosed) -> Upper:
        """Bound the largest (x M_h)_c − (y M_h)_c."""

    @abstractmethod
    def widest_row(self, W: Enclosed, *, centred: bool = False) -> Upper:
        """Bound the largest range over y of x W_h yᵀ; of (x − c) W_h yᵀ with the middle c of the set if `centred`."""

    @abstractmethod
    def spread_range(self, states: States, M: Enclosed) -> Upper:
        """Bound the range over the tokens of a state of the part of (x M_h)_c that depends on the token."""

    @abstractmethod
    def scores(self, states: States, W: Enclosed, drifting: Enclosed, *, joint: bool) -> tuple[Upper, Upper | None]:
        """Bound the range θ of a row of scores, and that of the part that errors cause, which a joint bound needs.

        The query is y + e for y = x + mean(X) Z, and `drifting` is Z W.
        """

    @abstractmethod
    def lead(
        self, T: Rank1Sum, Tm: Rank1Sum | None = None, *, is_sharp: bool = False, steps: int = STEPS
    ) -> list[Lead]:
        """Bound the leading term of all heads together, over X for T and over mean(X) for Tᵐ."""

    def length(self, M: Enclosed) -> Upper:
        """Bound the length of x M."""
        return self.largest(M[None])[0]

    def through(self, g: Upper, M: Enclosed) -> Upper:
        """Bound the length of y M_h for vectors y of length g or g_h."""
        return through(g, M.size())

    def read(self, g: Upper, M: Enclosed) -> Upper:
        """Bound |(y M_h)_c| for vectors y of length g or g_h."""
        return self.through(g, M)

    def spread_length(self, states: States, M: Enclosed) -> Upper:
        """Bound the length of the difference of two tokens of a state, times M_h, as `spread_range` does."""
        return self.spread_range(states, M)


class PointRegion(Region):
    """A finite set of points, of which an input has at most `length`."""

    joint = "pairs"

    def __init__(self, A: BoundArithmetic, inputs: InputSet | Tokens) -> None:
        assert isinstance(inputs, Tokens)
        super().__init__(A, inputs.width)
        self.inputs, self.floats, self.unevenness = inputs, inputs.points(), inputs.unevenness
        self.points, self.start = A.exact(self.floats), A.upper(self.floats.abs().amax(0))
        if not can_pair(self.floats):
            self.alone = f"{len(self.floats):,} vectors are too many for pairs, so every head is bounded alone"

    def _ends(self, M: Enclosed) -> tuple[Upper, Upper]:
        """Bound the largest (x M_h)_c and the largest −(x M_h)_c, some points at a time."""
        heads, _, columns = M.shape
        many, found = max(1, BLOCK // (heads * columns)), None
        for start in range(0, len(self.floats), many):
            high, low = (self.points[start : start + many] @ M).ends()
            found = (high, low) if found is None else (found[0].most(high), found[1].most(low))
        assert found is not None
        return found

    def largest(self, M: Enclosed) -> Upper:
        """As in the base class."""
        high, low = self._ends(M)
        return high.most(low)

    def ranges(self, M: Enclosed) -> Upper:
        """As in the base class."""
        return total(*self._ends(M))

    def widest_row(self, W: Enclosed, *, centred: bool = False) -> Upper:
        """As in the base class."""
        heads, v = W.shape[0], len(self.floats)
        many, found = max(1, BLOCK // (heads * v)), self.A.zeros(heads)
        rows = self.points - (self.floats.amax(0) / 2 + self.floats.amin(0) / 2) if centred else self.points
        for start in range(0, v, many):
            query = rows[start : start + many] @ W
            found = found.most(total(*self.points.coarse(query.mT).ends()).amax(-1))
        return found

    def spread_range(self, states: States, M: Enclosed) -> Upper:
        """As in the base class; the part is x M + o M with |o| ≤ own."""
        return self.ranges(M) + self.through(states.own, M) * 2.0

    def scores(self, states: States, W: Enclosed, drifting: Enclosed, *, joint: bool) -> tuple[Upper, Upper]:
        """As in the base class."""
        query = total(self.largest(W), self.largest(drifting), self.through(states.err, W))
        moved = (self.ranges(W.mT) * states.err).sum(-1) + (query * states.own).sum(-1) * 2.0
        return total(self.widest_row(W), self.widest_row(drifting), moved), moved

    def lead(
        self, T: Rank1Sum, Tm: Rank1Sum | None = None, *, is_sharp: bool = False, steps: int = STEPS
    ) -> list[Lead]:
        """As in the base class."""
        both = [terms for terms in (T, Tm) if terms is not None and terms.terms]
        return [PairLead(self.A, terms, self.floats, share=self.unevenness) for terms in both]


class LastRow(PointRegion):
    """The points of all positions, for the last row of sequences that fill all positions."""

    def lead(
        self, T: Rank1Sum, Tm: Rank1Sum | None = None, *, is_sharp: bool = False, steps: int = STEPS
    ) -> list[Lead]:
        """As in the base class."""
        assert Tm is not None
        return [EveryLead(self.A, T, Tm, self.inputs.at_positions())]


class ConvexRegion(Region):
    """The box of all x with |x_c| ≤ φ, or the ball of all x with ‖x‖₂ ≤ r; φ or r is `radius`."""

    kind: str
    squares = True

    def __init__(self, A: BoundArithmetic, width: int, radius: float) -> None:
        super().__init__(A, width)
        self.radius = radius
        if width > JOINT_LIMIT:
            self.alone = (
                f"width {width} is above {JOINT_LIMIT}: heads were bounded one by one, not jointly, "
                "which is often several times larger"
            )

    @abstractmethod
    def pairing(self, W: Enclosed) -> "Pairing":
        """Return the bounds on |u W_h v| for vectors u and v of given lengths."""

    @abstractmethod
    def query_pairing(self, W: Enclosed, drifting: Enclosed) -> "Pairing":
        """Return the same for u = x + mean(X) Z, whatever its length is said to be."""

    def ranges(self, M: Enclosed) -> Upper:
        """As in the base class: twice the largest value, as the sets are symmetric."""
        return self.largest(M) * 2.0

    def widest_row(self, W: Enclosed, *, centred: bool = False) -> Upper:
        """As in the base class; c = 0."""
        return self.pairing(W)(self.start, self.start) * 2.0

    def spread_range(self, states: States, M: Enclosed) -> Upper:
        """As in the base class."""
        return self.read(states.spread, M) * 2.0

    def scores(self, states: States, W: Enclosed, drifting: Enclosed, *, joint: bool) -> tuple[Upper, Upper | None]:
        """As in the base class."""
        own, err, state, spread = states
        pairing = self.pairing(W)
        theta = pairing(state, spread) * 2.0
        if not joint:
            return theta, None
        by_query, by_error = self.query_pairing(W, drifting), pairing(err, spread)
        theta = theta.least((by_query(self.start, spread) + by_error) * 2.0)
        return theta, (by_query(self.start, own) + by_error) * 2.0

    def lead(
        self, T: Rank1Sum, Tm: Rank1Sum | None = None, *, is_sharp: bool = False, steps: int = STEPS
    ) -> list[Lead]:
        """As in the base class."""
        Tm = Rank1Sum.join(self.A, self.d, []) if Tm is None else Tm
        if not T.terms + Tm.terms:
            return []
        found = ConvexLead(self.A, T, Tm, self.radius, self.kind, steps)
        found.can_sharpen &= is_sharp
        return [found]


class Pairing:
    """Bounds on |u W_h v| for vectors u and v of given lengths: sign norms, or products with the norms of W_h."""

    def __init__(self, A: BoundArithmetic, W: Enclosed, norms: Upper | None = None) -> None:
        self.A, self.W, self.norms = A, W, norms

    def __call__(self, left: Upper, right: Upper) -> Upper:
        """Bound |u W_h v| for every head h."""
        if self.norms is not None:
            return left * self.norms * right
        rows = self.W.shape[-2]
        whole = left if left.shape[0] == rows else self.A.cat([left] * (rows // left.shape[0]))
        return self.A.sign_norm(self.W * self.A.interval(whole)[:, None] * self.A.interval(right))


class BoxRegion(ConvexRegion):
    """The box of all x with |x_c| ≤ φ."""

    kind, matches = "box", True

    def __init__(self, A: BoundArithmetic, width: int, radius: float) -> None:
        super().__init__(A, width, radius)
        self.start = A.upper(torch.full((width,), radius, dtype=torch.float64))

    def largest(self, M: Enclosed) -> Upper:
        """As in the base class: φ Σ_b |M_bc|."""
        return M.size().sum(-2) * self.radius

    def pairing(self, W: Enclosed) -> Pairing:
        """As in the base class: ‖diag(u) W diag(v)‖_{∞→1}."""
        return Pairing(self.A, W)

    def query_pairing(self, W: Enclosed, drifting: Enclosed) -> Pairing:
        """As in the base class: y W = (x, m) [W; Z W], and |(x, m)| ≤ φ."""
        return Pairing(self.A, self.A.cat([W, drifting], -2))


class BallRegion(ConvexRegion):
    """The ball of all x with ‖x‖₂ ≤ r."""

    kind, by_coordinate = "ball", False

    def __init__(self, A: BoundArithmetic, width: int, radius: float) -> None:
        super().__init__(A, width, radius)
        self.start = A.upper(torch.tensor([radius], dtype=torch.float64))
        self._norms: list[tuple[Enclosed, Upper]] = []

    def norms(self, M: Enclosed) -> Upper:
        """Bound ‖M_h‖₂; the last ones are remembered."""
        for known, found in self._norms:
            if known is M:
                return found
        self._norms = [*self._norms[-3:], (M, self.A.spectral_norm(M))]
        return self._norms[-1][1]

    def largest(self, M: Enclosed) -> Upper:
        """As in the base class: r ‖M e_c‖₂."""
        return column_lengths(M) * self.radius

    def length(self, M: Enclosed) -> Upper:
        """As in the base class: r ‖M‖₂."""
        return self.norms(M[None]) * self.radius

    def through(self, g: Upper, M: Enclosed) -> Upper:
        """As in the base class: g ‖M_h‖₂."""
        return (self.norms(M)[:, None]) * g

    def read(self, g: Upper, M: Enclosed) -> Upper:
        """As in the base class: g ‖M_h e_c‖₂."""
        return column_lengths(M) * g

    def spread_length(self, states: States, M: Enclosed) -> Upper:
        """As in the base class."""
        return self.through(states.spread, M) * 2.0

    def pairing(self, W: Enclosed) -> Pairing:
        """As in the base class: ‖u‖₂ ‖W‖₂ ‖v‖₂."""
        return Pairing(self.A, W, self.norms(W))

    def query_pairing(self, W: Enclosed, drifting: Enclosed) -> Pairing:
        """As in the base class: r(‖W‖₂ + ‖Z W‖₂)‖v‖₂."""
        return Pairing(self.A, W, self.norms(W) + self.norms(drifting))


def region_of(A: BoundArithmetic, inputs: InputSet | Tokens, width: int) -> Region:
    """Return the set that the tokens of the inputs are taken from."""
    if isinstance(inputs, Tokens):
        return PointRegion(A, inputs)
    return (BoxRegion if inputs.kind == "box" else BallRegion)(A, width, inputs.radius)
