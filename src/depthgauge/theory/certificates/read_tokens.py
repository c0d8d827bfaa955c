"""What the sublayers of a network read: n(x), a norm without gain and bias, or x itself (docs/math.md §3.13).

With c = x − mean(x), σ² = ‖c‖²/d + ε and w = √d·σ, the length of the vector (c, √(dε)),

    n(x) = c/σ = √d·c/w,     Dn(x) = (I − J − n nᵀ/d)/σ,     J = 11ᵀ/d.

RMSNorm is the same with c = x and J = 0. Let x move from t by at most ρ, and s = ρ/w. Then n moves by at most
√d·2 sin(arcsin(s)/2), and never by more than 2√d.

The lifted vector gets shorter only by the part of x − t along −c. If that is at most `inward`, then ‖z‖ ≥ w − inward
on the whole segment from t to x. With the angle α between both lifted vectors, sin α ≤ s, tan α ≤ s/(1 − a) and

    n(x) − n(t) = −(1 − cos α) n(t) + (w/‖z(x)‖)(x − t)Dn(t).
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed, Upper
from depthgauge.theory.network.network import NORM_EPSILON, SelfAttentionNetwork


class Moved(NamedTuple):
    """How far a state x is from its token t: ‖x − t‖ ≤ far, and −inward ≤ ⟨x − t, n(t)/√d⟩ ≤ outward."""

    far: Upper
    inward: Upper
    outward: Upper


class ReadTokens:
    """u = n(t) for every token t, [v, d], and 1/σ, [v, 1]; both are t and 1 in a network without norms."""

    def __init__(self, A: BoundArithmetic, points: Float[Tensor, "v d"], network: SelfAttentionNetwork) -> None:
        """Compute n(t) of all points, for a network without norms or with norms before the sublayers."""
        self.A, self.d, self.is_normed, self.centers = A, points.shape[1], network.norm != "none", network.norm_centers
        self.u, self.inverse = A.exact(points), A.exact(points[:, :1] * 0.0 + 1.0)
        self.root, self.one_over = A.root(self.d), A.inverse_root(A.exact(float(self.d**2)))
        if self.is_normed:
            ones = points[:1].mT * 0.0 + 1.0
            c = self.u - (self.u @ ones) * self.one_over if self.centers else self.u
            self.inverse = A.inverse_root((c * c) @ ones * self.one_over + NORM_EPSILON)
            self.u = c * self.inverse
        self.shorter = A.inverse_root(A.exact(float(self.d)))  # 1/√d
        self.steep = self.inverse.top()[:, 0]  # 1/σ, a bound on ‖Dn(t)‖₂

    def derivative(self, rows: slice) -> Enclosed:
        """Return Dn(t) for some tokens, [b, d, d]."""
        u, eye = self.u[rows], self.A.eye(self.d)[None]
        if not self.is_normed:
            return eye.expand(u.shape[0], self.d, self.d)
        return (eye - (u[:, :, None] * u[:, None, :] + float(self.centers)) * self.one_over) * self.inverse[rows][
            :, None
        ]

    def relative(self, rho: Upper) -> Upper:
        """Bound s = ρ/w."""
        return rho * self.steep * self.shorter.top()

    def shift(self, state: Moved) -> Upper:
        """Bound ‖n(x) − n(t)‖: √d·2 sin(α/2) with α ≤ arcsin s, and α ≤ arctan(s/(1 − a))."""
        if not self.is_normed:
            return state.far
        return self.relative(state.far).chord().least((self._by_tangent(state) * 2.0).sqrt()) * self.root.top()

    def _by_tangent(self, state: Moved) -> Upper:
        """Bound 1 − cos α by 1 − 1/√(1 + q²) with q = s/(1 − a), and by +∞ where a ≥ 1."""
        a = self.relative(state.inward)
        q = self.A.interval(self.relative(state.far).over_rest(a))
        return (-self.A.inverse_root(q * q + 1.0) + 1.0).top() + (a * 0.0).over_rest(a)

    def shift_between(self, apart: Upper, one: Moved, two: Moved) -> Upper:
        """Bound ‖n(x) − n(x')‖ for ‖x − x'‖ ≤ `apart`: √d·s''/(1 − max(a, a')), a the inward part over w."""
        if not self.is_normed:
            return apart
        through = (apart * self.steep).over_rest(self.relative(one.inward.most(two.inward)))
        return through.least(self.shift(one) + self.shift(two))

    def bend(self, apart: Upper, one: Moved, two: Moved) -> Upper:
        """Bound ‖n(x) − n(x') − (x − x')Dn(t)‖: √d·s''(s + s')/(1 − max(a, a'))/√3."""
        if not self.is_normed:
            return apart * 0.0
        step, room = apart * self.steep, self.relative(one.inward.most(two.inward))
        curved = step * self.relative(one.far + two.far).over_rest(room) * self.A.inverse_root(self.A.exact(3.0)).top()
        return curved.least(self.shift_between(apart, one, two) + step)

    def lowered(self, state: Moved) -> Upper:
        """Bound 1 − cos α."""
        if not self.is_normed:
            return state.far * 0.0
        chord = self.relative(state.far).chord()
        return (chord * chord * 0.5).least(self._by_tangent(state))

    def stretched(self, state: Moved) -> Upper:
        """Bound |w/‖z(x)‖ − 1|: a/(1 − a) for a shorter vector, (‖z(x)‖²/w² − 1)/2 for a longer one."""
        a, b, s = (self.relative(one) for one in (state.inward, state.outward, state.far))
        return a.over_rest(a).most(b + s * s * 0.5) * (1.0 if self.is_normed else 0.0)


def lengths(rows: Enclosed) -> Upper:
    """Bound the Euclidean length of every row."""
    size = rows.size()
    return (size * size).sum(-1).sqrt()


def column_lengths(M: Enclosed) -> Upper:
    """Bound ‖M e_a‖₂ for every column a."""
    return lengths(M.mT)


def diameter(rows: Enclosed) -> Upper:
    """Bound the largest distance of two rows by twice the largest distance from any vector, here their mean."""
    return lengths(rows - rows.floats().mean(-2, keepdim=True)).amax(-1) * 2.0
