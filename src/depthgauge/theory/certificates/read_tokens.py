"""What the sublayers of a network read: n(x), a norm without gain and bias, or x itself (docs/math.md §3.13).

With c = x − mean(x), σ² = ‖c‖²/d + ε and w = √d·σ, the length of the vector (c, √(dε)),

    n(x) = c/σ = √d·c/w,     Dn(x) = (I − J − n nᵀ/d)/σ,     J = 11ᵀ/d.

RMSNorm is the same with c = x and J = 0. Let x move from t by at most ρ, and s = ρ/w. Then n moves by at most
√d·2 sin(arcsin(s)/2), and never by more than 2√d.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.theory.certificates.box import total
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.rounding import (
    UNIT,
    add_down,
    add_up,
    div_up,
    down,
    mul_up,
    nonnegative_sum_up,
    sqrt_up,
    sub_down,
    sub_up,
    up,
)
from depthgauge.theory.network.network import NORM_EPSILON, SelfAttentionNetwork

PerToken = Float[Tensor, " v"]


@dataclass(frozen=True, eq=False, repr=False)
class ReadTokens(ArrayRecord):
    """u = n(t) for every token t, and 1/σ; both are t and 1 in a network without norms."""

    u: Enclosure
    inverse: Enclosure
    is_normed: bool
    centers: bool

    @staticmethod
    def of(points: Float[Tensor, "v d"], network: SelfAttentionNetwork) -> "ReadTokens":
        """Compute n(t) of all points, for a network without norms or with norms before the sublayers."""
        x, centers = Enclosure.exact(points), network.norm_centers
        if network.norm == "none":
            return ReadTokens(x, Enclosure.exact(torch.ones_like(points[:, :1])), False, centers)
        ones = torch.ones_like(points[:1].mT)
        c = x - x @ ones * _one_over(len(ones)) if centers else x
        square = (c * c) @ ones * _one_over(len(ones)) + NORM_EPSILON
        low, high = down(square.lower().clamp(min=0.0).sqrt()), sqrt_up(square.upper())
        inverse = _between(down(1.0 / high), div_up(1.0, low))
        return ReadTokens(c * inverse, inverse, True, centers)

    @property
    def steep(self) -> PerToken:
        """1/σ, a bound on ‖Dn(t)‖₂."""
        return self.inverse.upper()[:, 0]

    def derivative(self, rows: slice) -> Enclosure:
        """Enclose Dn(t) for some tokens, [b, d, d]."""
        u, (_, d) = self.u, self.u.shape
        eye = torch.eye(d, dtype=torch.float64).expand(len(u.mid[rows]), d, d)
        if not self.is_normed:
            return Enclosure.exact(eye)
        column, row = (Enclosure(u.mid[rows].unsqueeze(k), u.rad[rows].unsqueeze(k)) for k in (2, 1))
        scale = Enclosure(self.inverse.mid[rows, :, None], self.inverse.rad[rows, :, None])
        return (Enclosure.exact(eye) - (column * row + float(self.centers)) * _one_over(d)) * scale

    def relative(self, rho: PerToken) -> PerToken:
        """Bound s = ρ/w."""
        return div_up(mul_up(rho, self.steep), _root_down(self.u.shape[1]))

    def shift(self, rho: PerToken) -> PerToken:
        """Bound ‖n(x) − n(t)‖ for ‖x − t‖ ≤ ρ: √d·s·√(2/(1 + √(1 − s²))), which is √d·2 sin(arcsin(s)/2)."""
        if not self.is_normed:
            return rho
        s = self.relative(rho)
        cosine = down(sub_down(1.0, mul_up(s, s)).clamp(min=0.0).sqrt())
        chord = mul_up(s, sqrt_up(div_up(2.0, add_down(1.0, cosine))))
        return mul_up(self._root(), torch.where(s < 1, chord.clamp(max=2.0), 2.0))

    def shift_between(self, apart: PerToken, rho: PerToken, other: PerToken) -> PerToken:
        """Bound ‖n(x) − n(x')‖ for ‖x − x'‖ ≤ `apart`, ‖x − t‖ ≤ ρ and ‖x' − t‖ ≤ ρ': √d·s''/(1 − max(s, s'))."""
        if not self.is_normed:
            return apart
        room = sub_down(1.0, self.relative(torch.maximum(rho, other))).clamp(min=0.0)
        through_ball = div_up(mul_up(self._root(), self.relative(apart)), room)
        return torch.fmin(through_ball, add_up(self.shift(rho), self.shift(other)))

    def bend(self, apart: PerToken, rho: PerToken, other: PerToken) -> PerToken:
        """Bound ‖n(x) − n(x') − (x − x')Dn(t)‖: √d·s''(s/(1 − s) + s'/(1 − s'))/√3."""
        if not self.is_normed:
            return torch.zeros_like(apart)
        step = mul_up(self._root(), self.relative(apart))
        ratios = [div_up(s, sub_down(1.0, s).clamp(min=0.0)) for s in (self.relative(rho), self.relative(other))]
        curved = div_up(mul_up(step, total(*ratios)), _root_down(3))
        return torch.fmin(curved, add_up(self.shift_between(apart, rho, other), step))

    def _root(self) -> Tensor:
        return sqrt_up(float(self.u.shape[1]))


def _root_down(number: int) -> Tensor:
    return down(torch.tensor(number, dtype=torch.float64).sqrt())


def lengths(rows: Enclosure) -> Float[Tensor, "*batch v"]:
    """Bound the Euclidean length of every row."""
    size = rows.abs_up()
    return sqrt_up(nonnegative_sum_up(mul_up(size, size), -1))


def diameter(rows: Enclosure) -> Float[Tensor, "*batch"]:
    """Bound the largest distance of two rows by twice the largest distance from any vector, here their mean."""
    return 2.0 * lengths(rows - rows.mid.mean(-2, keepdim=True)).amax(-1)


def _between(low: Tensor, high: Tensor) -> Enclosure:
    mid = low / 2 + high / 2
    return Enclosure(mid, torch.maximum(sub_up(high, mid), sub_up(mid, low)))


def _one_over(d: int) -> Enclosure:
    return Enclosure(torch.tensor(1.0 / d, dtype=torch.float64), up(UNIT / d))
