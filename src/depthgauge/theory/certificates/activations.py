"""Enclosures of the activations of an MLP and of their slopes, and the constants that bound them (docs/math.md §3.13).

GELU is gelu(z) = zΦ(z), with slopes gelu' = Φ + zφ, gelu'' = φ(2 − z²) and gelu''' = φ(z³ − 4z).
"""

import torch
from flint import arb
from jaxtyping import Float
from torch import Tensor

from depthgauge.theory.certificates.arb_values import float_below, precision
from depthgauge.theory.certificates.deletion import STEEPEST
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.rounding import add_up, mul_up, sub_up

CURVATURE = 0.798
"""Upper bound on |gelu''| ≤ 2φ(0) = 0.79788…"""
THIRD = 0.78
"""Upper bound on |gelu'''|, whose largest value is 0.7789…, at z² = (7 − √33)/2."""
STEP, FAR, TAIL = 2.0**-10, 8.0, 2.0**-44
"""The distance of the nodes at which GELU is evaluated, up to |z| = 8; beyond, it differs from ReLU by at most `TAIL`,
and so does its slope, because |z|Φ(−|z|) ≤ φ(8) and |z|φ(z) ≤ 8φ(8) < 2⁻⁴⁴."""


def activation_and_slope(z: Enclosure, activation: str) -> tuple[Enclosure, Enclosure]:
    """Enclose act(z) and act'(z). The slope of ReLU is 1 where z > 0 is certain; the caller allows for other signs."""
    if activation == "relu":
        return Enclosure(z.mid.clamp(min=0.0), z.rad), Enclosure.exact((z.lower() > 0).to(torch.float64))
    nodes, index = torch.unique((z.mid.clamp(-FAR, FAR) / STEP).round(), return_inverse=True)
    value, slope, bent = (Enclosure(e.mid[index], e.rad[index]) for e in _gelu_at(nodes * STEP))
    # Taylor around the node, |δ| ≤ STEP/2, with remainders |gelu'''|δ²/2 and |gelu'''||δ|³/6.
    moved = Enclosure.exact(z.mid) - (nodes * STEP)[index]
    near = value + moved * (slope + moved * bent * 0.5), slope + moved * bent
    beyond = z.mid.abs() > FAR
    rests = THIRD * STEP**3 / 48, THIRD * STEP**2 / 8
    far = z.mid.clamp(min=0.0), (z.mid > 0).to(torch.float64)
    made = []
    for one, rest, limit, steepness in zip(near, rests, far, (STEEPEST[activation], CURVATURE), strict=True):
        rad = torch.where(beyond, TAIL, add_up(one.rad, 1.01 * rest))  # 1.01 covers the rounding of `rest`
        made.append(Enclosure(torch.where(beyond, limit, one.mid), add_up(rad, mul_up(steepness, z.rad))))
    return made[0], made[1]


def _gelu_at(nodes: Float[Tensor, " k"]) -> tuple[Enclosure, Enclosure, Enclosure]:
    """Enclose gelu, gelu' and gelu'' at some numbers, in interval arithmetic."""
    rows = []
    with precision(128):
        root, whole = arb(2).sqrt(), (2 * arb.pi()).sqrt()
        for z in map(arb, nodes.tolist()):
            Phi, phi = (1 + (z / root).erf()) / 2, (-z * z / 2).exp() / whole
            rows.append([(float_below(x), -float_below(-x)) for x in (z * Phi, Phi + z * phi, phi * (2 - z * z))])
    low, high = torch.tensor(rows, dtype=torch.float64).permute(2, 1, 0)
    mid = low / 2 + high / 2
    rad = torch.maximum(sub_up(high, mid), sub_up(mid, low))
    return Enclosure(mid[0], rad[0]), Enclosure(mid[1], rad[1]), Enclosure(mid[2], rad[2])
