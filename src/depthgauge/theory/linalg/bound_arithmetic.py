"""The arithmetics in which every bound of a certificate is computed (docs/math.md §3.10).

A bound is one function over a `BoundArithmetic`. `Outward` is float64 with outward rounding; what it computes is the
proof. `ArbArithmetic` is arb interval arithmetic at 200 bits; it computes the same function a second time, as a check.

Arrays have the shapes and axes of torch tensors. There are two kinds:

- `Enclosed`: numbers of either sign, each known up to an error;
- `Upper`: upper bounds on numbers. Products, quotients and roots apply to bounds on numbers that are not negative.

Whatever is found by a search, such as scalings, an order or a starting point, goes through `choose`. The outward
arithmetic records it, and the arb arithmetic uses the record. Every choice gives a sound bound.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

import flint
import torch
import torch.nn.functional as F
from flint import arb
from torch import Tensor

from depthgauge.theory.linalg.enclosures import (
    Enclosure,
    OutwardUpper,
    frobenius_norm_up,
    largest_eigenvalue_up,
    sign_norm_up,
    spectral_norm_up,
)
from depthgauge.theory.linalg.rounding import (
    TINY,
    UNIT,
    add_up,
    div_up,
    down,
    exp_up,
    gamma,
    mul_up,
    sqrt_up,
    sub_up,
    up,
)

Chosen = TypeVar("Chosen")
Factor = Any
"""What an array is multiplied by: another array of its kind, a float64 tensor or a number."""


@runtime_checkable
class Upper(Protocol):
    """Upper bounds on numbers. `other` is an array of this kind, or numbers without an error."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    def __getitem__(self, index: Any) -> "Upper": ...
    def __add__(self, other: Factor) -> "Upper": ...
    def __mul__(self, other: Factor) -> "Upper": ...
    def __rmul__(self, other: Factor) -> "Upper": ...
    def __truediv__(self, other: Factor) -> "Upper": ...
    def __matmul__(self, other: Any) -> "Upper": ...
    def sum(self, dim: int | tuple[int, ...]) -> "Upper": ...  # noqa: D102
    def amax(self, dim: int | tuple[int, ...]) -> "Upper": ...  # noqa: D102
    def expand(self, *shape: int) -> "Upper": ...  # noqa: D102
    def reshape(self, *shape: int) -> "Upper": ...  # noqa: D102

    def least(self, other: Factor) -> "Upper":
        """Return the smaller bound entry by entry; where one is NaN, the other."""

    def most(self, other: Factor) -> "Upper":
        """Return the larger bound entry by entry."""

    def sqrt(self) -> "Upper":
        """Bound the square roots."""

    def tanh(self) -> "Upper":
        """Bound tanh, for numbers of either sign by at least 0."""

    def over_rest(self, part: Any) -> "Upper":
        """Bound x/(1 − s) for s = `part`; infinite where s ≥ 1."""

    def chord(self) -> "Upper":
        """Bound 2 sin(arcsin(s)/2) = s√(2/(1 + √(1 − s²))) for s < 1, and by 2 elsewhere."""

    def floats(self) -> Tensor:
        """Return the bounds in float64: for a proof in the outward arithmetic, approximate in arb."""


@runtime_checkable
class Enclosed(Protocol):
    """Numbers that are known up to an error. `other` is an array of this kind, or numbers without an error."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def mT(self) -> "Enclosed": ...  # noqa: D102
    def __getitem__(self, index: Any) -> "Enclosed": ...
    def __neg__(self) -> "Enclosed": ...
    def __add__(self, other: Factor) -> "Enclosed": ...
    def __sub__(self, other: Factor) -> "Enclosed": ...
    def __mul__(self, other: Factor) -> "Enclosed": ...
    def __matmul__(self, other: Factor) -> "Enclosed": ...
    def sum(self, dim: int | tuple[int, ...]) -> "Enclosed": ...  # noqa: D102
    def expand(self, *shape: int) -> "Enclosed": ...  # noqa: D102
    def reshape(self, *shape: int) -> "Enclosed": ...  # noqa: D102
    def permute(self, *order: int) -> "Enclosed": ...  # noqa: D102

    def coarse(self, other: Factor) -> "Enclosed":
        """Return the product with the errors of a row at most as large as those of the largest row: less work."""

    def size(self) -> Upper:
        """Bound |x|."""

    def top(self) -> Upper:
        """Bound x from above."""

    def ends(self) -> tuple[Upper, Upper]:
        """Bound the largest entry of every column, and the negative of the smallest one."""

    def floats(self) -> Tensor:
        """Return approximate numbers."""


def total(*terms: Upper) -> Upper:
    """Bound the sum of the terms."""
    found = terms[0]
    for term in terms[1:]:
        found = found + term
    return found


def through(g: Upper, M: Upper) -> Upper:
    """Bound g_h|M_h| for every head h, from bounds on |M_h|; g may be the same for all."""
    heads, m, _ = M.shape
    return (g.expand(heads, m)[:, None, :] @ M)[:, 0, :]


class BoundArithmetic(ABC):
    """An arithmetic, with the functions whose error is bounded in a way of its own in each."""

    record: list[tuple[str, Any]]

    @abstractmethod
    def choose(self, what: str, search: Callable[[], Chosen]) -> Chosen:
        """Return what the search finds, or what it found in the first proof; `what` says what is searched."""

    @abstractmethod
    def exact(self, x: Tensor | float) -> Enclosed:
        """Return numbers without an error."""

    @abstractmethod
    def upper(self, x: Tensor | float) -> Upper:
        """Return numbers as upper bounds."""

    @abstractmethod
    def interval(self, bounds: Any) -> Enclosed:
        """Return upper bounds as numbers without an error."""

    @abstractmethod
    def between(self, top: Any, below: Any) -> Enclosed:
        """Return the numbers x with −below ≤ x ≤ top."""

    @abstractmethod
    def where(self, mask: Tensor, x: Enclosed, y: Enclosed) -> Enclosed:
        """Return x where the mask is true, y elsewhere."""

    @abstractmethod
    def root(self, x: float) -> Enclosed:
        """Return √x."""

    @abstractmethod
    def spectral_norm(self, M: Enclosed) -> Upper:
        """Bound ‖M‖₂ for every matrix."""

    def spectral_norms(self, parts: Sequence[Any]) -> list[Any]:
        """Bound ‖M‖₂ for the matrices of several arrays."""
        return [self.spectral_norm(part) for part in parts]

    @abstractmethod
    def frobenius_norm(self, M: Any) -> Upper:
        """Bound ‖M‖F for every matrix."""

    @abstractmethod
    def largest_eigenvalue(self, S: Enclosed) -> Upper:
        """Bound max(λ_max(S), 0) for a symmetric matrix."""

    @abstractmethod
    def sign_norm(self, M: Any) -> Upper:
        """Bound ‖M‖_{∞→1} for every matrix."""

    @abstractmethod
    def inverse_root(self, x: Enclosed) -> Enclosed:
        """Return 1/√x for positive x."""

    @abstractmethod
    def inverse(self, x: Enclosed) -> Enclosed:
        """Return 1/x for positive x."""

    @abstractmethod
    def exp(self, x: Enclosed) -> Enclosed:
        """Return e^x."""

    @abstractmethod
    def activation(self, z: Enclosed, name: str) -> tuple[Enclosed, Enclosed]:
        """Return act(z) and act'(z); the slope of ReLU is 1 where z > 0 is certain, else 0."""

    @abstractmethod
    def log_distance(self, b: Tensor, x: Enclosed) -> Upper:
        """Bound the largest |b − log x|."""

    @abstractmethod
    def cat(self, parts: Sequence[Any], dim: int = 0) -> Any:
        """Concatenate arrays of one kind."""

    @abstractmethod
    def pair_sizes(self, form: Any, places: int) -> Upper:
        """Bound ½|F_tt + F_uu − F_tu − F_ut| for a symmetric form, at most over the tokens t and u of two places.

        Args:
            form: F, [x, v, v], with the tokens of one place after the other.
            places: the number of places; the result is [x, places, places].
        """

    @cached_property
    def rho(self) -> Upper:
        """A bound on ρ = 1/(12√3) = 1/√432 (docs/math.md §2.7)."""
        return self.inverse_root(self.exact(432.0)).top()

    def zeros(self, *shape: int) -> Upper:
        """Return bounds of zero."""
        return self.upper(torch.zeros(*shape, dtype=torch.float64))

    def eye(self, d: int) -> Enclosed:
        """Return the identity matrix."""
        return self.exact(torch.eye(d, dtype=torch.float64))


class Outward(BoundArithmetic):
    """Float64 with outward rounding. `record` has what searches have found, in their order."""

    def __init__(self) -> None:
        self.record = []

    def choose(self, what: str, search: Callable[[], Chosen]) -> Chosen:
        """As in the base class."""
        found = search()
        self.record.append((what, found))
        return found

    def exact(self, x: Tensor | float) -> Enclosure:
        """As in the base class."""
        return Enclosure.exact(x)

    def upper(self, x: Tensor | float) -> OutwardUpper:
        """As in the base class."""
        return OutwardUpper(torch.as_tensor(x, dtype=torch.float64))

    def interval(self, bounds: Any) -> Enclosure:
        """As in the base class."""
        return Enclosure.exact(bounds.value)

    def between(self, top: Any, below: Any) -> Enclosure:
        """As in the base class."""
        return _between(-below.value, top.value)

    def where(self, mask: Tensor, x: Any, y: Any) -> Enclosure:
        """As in the base class."""
        return Enclosure(torch.where(mask, x.mid, y.mid), torch.where(mask, x.rad, y.rad))

    def root(self, x: float) -> Enclosure:
        """As in the base class."""
        mid = torch.tensor(x, dtype=torch.float64).sqrt()
        return Enclosure(mid, mul_up(mid, UNIT))

    def spectral_norm(self, M: Any) -> OutwardUpper:
        """As in the base class."""
        return OutwardUpper(spectral_norm_up(M))

    def spectral_norms(self, parts: Sequence[Any]) -> list[OutwardUpper]:
        """As in the base class; zeros make all shapes equal, so that all are computed together."""
        tall = [part if part.shape[-2] >= part.shape[-1] else part.mT for part in parts]
        m, n = (max(part.shape[k] for part in tall) for k in (-2, -1))
        flat = [part.reshape(-1, *part.shape[-2:]) for part in tall]
        padded = [[F.pad(x, (0, n - x.shape[-1], 0, m - x.shape[-2])) for x in (part.mid, part.rad)] for part in flat]
        found = spectral_norm_up(Enclosure(*(torch.cat(list(x)) for x in zip(*padded, strict=True))))
        each = torch.split(found, [len(mid) for mid, _ in padded])
        return [OutwardUpper(x.reshape(part.shape[:-2])) for x, part in zip(each, tall, strict=True)]

    def frobenius_norm(self, M: Any) -> OutwardUpper:
        """As in the base class."""
        return OutwardUpper(frobenius_norm_up(M))

    def largest_eigenvalue(self, S: Any) -> OutwardUpper:
        """As in the base class."""
        return OutwardUpper(largest_eigenvalue_up(S).clamp(min=0.0))

    def sign_norm(self, M: Any) -> OutwardUpper:
        """As in the base class; the scalings that prove it are recorded."""
        bound = sign_norm_up(M)
        self.choose("scalings of a sign norm", lambda: (bound.row_scale, bound.column_scale))
        return OutwardUpper(bound.value)

    def cat(self, parts: Sequence[Any], dim: int = 0) -> Any:
        """As in the base class."""
        return type(parts[0]).cat(parts, dim)

    def inverse_root(self, x: Any) -> Enclosure:
        """As in the base class."""
        low, high = down(x.lower().clamp(min=0.0).sqrt()), sqrt_up(x.upper())
        return _between(down(1.0 / high), div_up(1.0, low))

    def inverse(self, x: Any) -> Enclosure:
        """As in the base class."""
        return _between(down(1.0 / x.upper()), div_up(1.0, x.lower().clamp(min=0.0)))

    def exp(self, x: Any) -> Enclosure:
        """As in the base class."""
        under, high = exp_up(torch.stack([-x.lower(), x.upper()]))
        return _between(down(1.0 / under), high)

    def activation(self, z: Any, name: str) -> tuple[Enclosure, Enclosure]:
        """As in the base class."""
        if name == "relu":
            return Enclosure(z.mid.clamp(min=0.0), z.rad), Enclosure.exact((z.lower() > 0).to(torch.float64))
        return gelu_and_slope(z)

    def log_distance(self, b: Tensor, x: Any) -> OutwardUpper:
        """As in the base class; +∞ if the guess that rounding suggests is not confirmed."""
        apart = float((b - x.mid.log()).abs().max()) * 1.0001
        for guess in (apart + 1e-14, apart + 1e-12):
            # e^(b−ε) ≤ x ≤ e^(b+ε)
            least = down(1.0 / exp_up(up(-down(b + guess))))
            if bool((exp_up(up(b - guess)) <= x.lower()).all()) and bool((x.upper() <= least).all()):
                return self.upper(guess)
        return self.upper(math.inf)

    def pair_sizes(self, form: Any, places: int) -> OutwardUpper:
        """As in the base class.

        The sum of F_tt and F_uu is off by 2u max|F| and the difference by 4u(1 + u) max|F| at most, and the members of
        F by 4 max rad(F). The halving is exact, or off by `TINY`.
        """
        own = form.mid.diagonal(dim1=-2, dim2=-1)
        sizes = (own[:, :, None] + own[:, None, :] - 2.0 * form.mid).abs_().mul_(0.5)
        slack = add_up(mul_up(gamma(2), form.mid.abs().amax((-2, -1))), form.rad.amax((-2, -1)))
        by_place = sizes.reshape(len(sizes), places, sizes.shape[1] // places, places, -1).amax((2, 4))
        return OutwardUpper(add_up(add_up(by_place, 2.0 * slack[:, None, None]), TINY))


def _between(low: Tensor, high: Tensor) -> Enclosure:
    mid = low / 2 + high / 2
    return Enclosure(mid, torch.maximum(sub_up(high, mid), sub_up(mid, low)))


# --- activations --------------------------------------------------------------------------------------------------

STEEPEST = {"relu": 1.0, "gelu": 1.13}
"""Upper bounds λ on the slope of the activations; the largest slope of GELU is 1.1289…, at √2."""
CURVATURE = 0.798
"""Upper bound on |gelu''| ≤ 2φ(0) = 0.79788…"""
THIRD = 0.78
"""Upper bound on |gelu'''|, whose largest value is 0.7789…, at z² = (7 − √33)/2."""
STEP, FAR, TAIL = 2.0**-10, 8.0, 2.0**-44
"""The distance of the nodes at which GELU is evaluated, up to |z| = 8; beyond, it differs from ReLU by at most `TAIL`,
and so does its slope, because |z|Φ(−|z|) ≤ φ(8) and |z|φ(z) ≤ 8φ(8) < 2⁻⁴⁴."""


def gelu_and_slope(z: Enclosure) -> tuple[Enclosure, Enclosure]:
    """Enclose gelu(z) = zΦ(z) and its slope Φ + zφ; gelu'' = φ(2 − z²) and gelu''' = φ(z³ − 4z) (docs/math.md §3.13).

    Taylor around the node, |δ| ≤ STEP/2, with remainders |gelu'''|δ²/2 and |gelu'''||δ|³/6.
    """
    nodes, index = torch.unique((z.mid.clamp(-FAR, FAR) / STEP).round(), return_inverse=True)
    value, slope, bent = (e[index] for e in _gelu_at(nodes * STEP))
    moved = Enclosure.exact(z.mid) - (nodes * STEP)[index]
    near = value + moved * (slope + moved * bent * 0.5), slope + moved * bent
    beyond = z.mid.abs() > FAR
    rests = THIRD * STEP**3 / 48, THIRD * STEP**2 / 8
    far = z.mid.clamp(min=0.0), (z.mid > 0).to(torch.float64)
    made = []
    for one, rest, limit, steepness in zip(near, rests, far, (STEEPEST["gelu"], CURVATURE), strict=True):
        rad = torch.where(beyond, TAIL, add_up(one.rad, 1.01 * rest))  # 1.01 covers the rounding of `rest`
        made.append(Enclosure(torch.where(beyond, limit, one.mid), add_up(rad, mul_up(steepness, z.rad))))
    return made[0], made[1]


def _gelu_at(nodes: Tensor) -> list[Enclosure]:
    """Enclose gelu, gelu' and gelu'' at some numbers, in interval arithmetic."""
    rows = []
    with precision(128):
        root, whole = arb(2).sqrt(), (2 * arb.pi()).sqrt()
        for z in map(arb, nodes.tolist()):
            Phi, phi = (1 + (z / root).erf()) / 2, (-z * z / 2).exp() / whole
            rows.append([(float_below(x), -float_below(-x)) for x in (z * Phi, Phi + z * phi, phi * (2 - z * z))])
    low, high = torch.tensor(rows, dtype=torch.float64).permute(2, 1, 0)
    return [_between(a, b) for a, b in zip(low, high, strict=True)]


@contextmanager
def precision(bits: int) -> Iterator[None]:
    """Set the working precision of python-flint within a `with` block."""
    before = flint.ctx.prec
    flint.ctx.prec = bits
    try:
        yield
    finally:
        flint.ctx.prec = before


def float_below(x: arb) -> float:
    """Return a float64 that is at most every number in the interval x."""
    value = float(x.lower().mid())
    while arb(value) > x.lower():
        value = math.nextafter(value, -math.inf)
    return math.nextafter(value, -math.inf) if not arb(value) <= x.lower() else value
