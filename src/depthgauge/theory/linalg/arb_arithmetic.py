"""Arrays of arb intervals (python-flint): the second arithmetic of every bound (docs/math.md §3.10).

An array is a numpy array of objects. As an `Upper` its bounds are the upper ends of the intervals. Every comparison
with NaN is false, so NaN never proves a bound.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from flint import arb, arb_mat
from torch import Tensor

from depthgauge.base.errors import VerificationError
from depthgauge.theory.linalg.bound_arithmetic import CURVATURE, STEEPEST, BoundArithmetic
from depthgauge.theory.linalg.enclosures import ENUMERATED, sign_vectors

Chosen = TypeVar("Chosen")
THIN = 64
"""The relative accuracy in bits from which on an interval counts as a number, whose image in balls is as tight."""


def _least(x: arb, y: arb) -> arb:
    """Return the smaller number, or the other one if one is NaN."""
    return y if x.is_nan() else x if y.is_nan() else x.min(y)


_SMALLER, _LARGER = np.frompyfunc(_least, 2, 1), np.frompyfunc(arb.max, 2, 1)
_SIZE, _TOP = np.frompyfunc(arb.abs_upper, 1, 1), np.frompyfunc(arb.upper, 1, 1)
_FLOAT, _ARB = np.frompyfunc(lambda x: float(x.mid()), 1, 1), np.frompyfunc(arb, 1, 1)
_ROOT = np.frompyfunc(lambda x: x.upper().sqrt(), 1, 1)  # an interval around 0 has no root, but its upper end has
_TANH = np.frompyfunc(lambda x: x.upper().max(arb(0)).tanh(), 1, 1)


def _chord(s: arb) -> arb:
    return (s * (2 / (1 + (1 - s * s).sqrt())).sqrt()).min(arb(2)) if s < 1 else arb(2)


_BETWEEN = np.frompyfunc(lambda top, below: (-below).lower().union(top.upper()), 2, 1)
_CHORD = np.frompyfunc(lambda s: _chord(s.upper()), 1, 1)
_REST = np.frompyfunc(lambda x, s: (x / (1 - s)).upper() if s < 1 else arb("inf"), 2, 1)


class ArbArray:
    """An array of intervals; an `Enclosed` and an `Upper` at once."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = np.asarray(x, dtype=object)

    @staticmethod
    def of(x: Any) -> "ArbArray":
        """Convert a tensor or a number without rounding."""
        return x if isinstance(x, ArbArray) else ArbArray(_objects(x))

    @staticmethod
    def cat(parts: "Sequence[ArbArray]", dim: int = 0) -> "ArbArray":
        """Concatenate arrays."""
        return ArbArray(np.concatenate([part.x for part in parts], dim))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.x.shape

    @property
    def mT(self) -> "ArbArray":
        """The transposed matrices."""
        return ArbArray(np.swapaxes(self.x, -1, -2))

    def __getitem__(self, index: Any) -> "ArbArray":
        parts = index if isinstance(index, tuple) else (index,)
        return ArbArray(self.x[tuple(part.numpy() if isinstance(part, Tensor) else part for part in parts)])

    def __neg__(self) -> "ArbArray":
        return ArbArray(-self.x)

    def __add__(self, other: Any) -> "ArbArray":
        return ArbArray(self.x + _objects(other))

    def __sub__(self, other: Any) -> "ArbArray":
        return ArbArray(self.x - _objects(other))

    def __mul__(self, other: Any) -> "ArbArray":
        return ArbArray(self.x * _objects(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "ArbArray":
        return ArbArray(self.x / _objects(other))

    def __matmul__(self, other: Any) -> "ArbArray":
        return ArbArray(_product(self.x, _objects(other)))

    coarse = __matmul__

    def sum(self, dim: int | tuple[int, ...]) -> "ArbArray":
        """Return the sums over `dim`."""
        return ArbArray(np.add.reduce(self.x, axis=dim, initial=arb(0)))

    def amax(self, dim: int | tuple[int, ...]) -> "ArbArray":
        """Return the largest entries over `dim`, NaN where one is NaN."""
        found: Any = self.x
        for axis in sorted({d % found.ndim for d in ((dim,) if isinstance(dim, int) else dim)}, reverse=True):
            found = _LARGER.reduce(found, axis=axis)
        return ArbArray(found)

    def expand(self, *shape: int) -> "ArbArray":
        """As `torch.Tensor.expand`."""
        own = (1,) * (len(shape) - self.x.ndim) + self.x.shape
        return ArbArray(np.broadcast_to(self.x, [o if s == -1 else s for o, s in zip(own, shape, strict=True)]))

    def reshape(self, *shape: int) -> "ArbArray":
        """As `torch.Tensor.reshape`."""
        return ArbArray(self.x.reshape(shape))

    def permute(self, *order: int) -> "ArbArray":
        """As `torch.Tensor.permute`."""
        return ArbArray(self.x.transpose(order))

    def least(self, other: Any) -> "ArbArray":
        """As in `Upper`."""
        return ArbArray(_SMALLER(self.x, _objects(other)))

    def most(self, other: Any) -> "ArbArray":
        """As in `Upper`."""
        return ArbArray(_LARGER(self.x, _objects(other)))

    def size(self) -> "ArbArray":
        """As in `Enclosed`."""
        return ArbArray(_SIZE(self.x))

    def top(self) -> "ArbArray":
        """As in `Enclosed`."""
        return ArbArray(_TOP(self.x))

    def sqrt(self) -> "ArbArray":
        """As in `Upper`."""
        return ArbArray(_ROOT(self.x))

    def tanh(self) -> "ArbArray":
        """As in `Upper`."""
        return ArbArray(_TANH(self.x))

    def over_rest(self, part: "ArbArray") -> "ArbArray":
        """As in `Upper`."""
        return ArbArray(_REST(self.x, part.x))

    def chord(self) -> "ArbArray":
        """As in `Upper`."""
        return ArbArray(_CHORD(self.x))

    def ends(self) -> "tuple[ArbArray, ArbArray]":
        """As in `Enclosed`."""
        return self.top().amax(-2), (-self).top().amax(-2)

    def floats(self) -> Tensor:
        """Return the middles in float64."""
        return torch.from_numpy(np.asarray(_FLOAT(self.x), dtype=np.float64).copy())


def _objects(x: Any) -> Any:
    if isinstance(x, ArbArray):
        return x.x
    if isinstance(x, Tensor):
        return np.asarray(_ARB(x.detach().to(torch.float64).numpy()), dtype=object)
    return arb(x)


def _product(a: Any, b: Any) -> Any:
    """Return the products of matrices, by `arb_mat`; all rows that a matrix of b multiplies are one product."""
    outer, k, n = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), b.shape[-2], b.shape[-1]
    a, b = np.broadcast_to(a, (*outer, *a.shape[-2:])), b.reshape((1,) * (len(outer) + 2 - b.ndim) + b.shape)
    made = np.empty((*a.shape[:-1], n), dtype=object)
    for index in np.ndindex(b.shape[:-2]):
        where = tuple(i if size > 1 else slice(None) for i, size in zip(index, b.shape, strict=False))
        rows = a[where]
        flat = rows.reshape(math.prod(rows.shape[:-1]), k)
        made[where] = _one_product(flat, b[index]).reshape(*rows.shape[:-1], n)
    return made


def _one_product(a: Any, b: Any) -> Any:
    return _entries(_matrix(a) * _matrix(b))


def _matrix(x: Any) -> arb_mat:
    rows, columns = x.shape
    made: arb_mat = arb_mat(rows, columns, x.flatten().tolist())
    return made


def _entries(M: arb_mat) -> Any:
    made = np.empty(M.nrows() * M.ncols(), dtype=object)
    made[:] = M.entries()
    return made.reshape(M.nrows(), M.ncols())


def _each(function: Callable[[Any], arb], M: ArbArray) -> ArbArray:
    """Apply a function to every matrix."""
    made = np.empty(M.shape[:-2], dtype=object)
    for index in np.ndindex(made.shape):
        made[index] = function(M.x[index])
    return ArbArray(made)


class ArbArithmetic(BoundArithmetic):
    """Arb intervals at the precision in force; `record` has the choices of the first proof."""

    def __init__(self, record: Sequence[Any]) -> None:
        self.record, self._next = list(record), 0

    def choose(self, what: str, search: Callable[[], Chosen]) -> Chosen:
        """As in the base class."""
        chosen: Any
        known, chosen = self.record[self._next] if self._next < len(self.record) else ("nothing", None)
        if known != what:
            raise VerificationError(f"the bound needs {what}, and {known} was recorded in the first proof")
        self._next += 1
        found: Chosen = chosen
        return found

    def exact(self, x: Tensor | float) -> ArbArray:
        """As in the base class."""
        return ArbArray.of(x)

    upper = exact

    def interval(self, bounds: Any) -> ArbArray:
        """As in the base class."""
        found: ArbArray = bounds
        return found

    def between(self, top: Any, below: Any) -> ArbArray:
        """As in the base class."""
        return ArbArray(_BETWEEN(top.x, below.x))

    def where(self, mask: Tensor, x: Any, y: Any) -> ArbArray:
        """As in the base class."""
        return ArbArray(np.where(mask.numpy(), x.x, y.x))

    def root(self, x: float) -> ArbArray:
        """As in the base class."""
        return ArbArray(arb(x).sqrt())

    def spectral_norm(self, M: Any) -> ArbArray:
        """As in the base class: √λ_max of the Gram matrix of the shorter side."""
        return _each(_spectral_norm, M)

    def frobenius_norm(self, M: ArbArray) -> ArbArray:
        """As in the base class."""
        size = M.size()
        return (size * size).sum((-2, -1)).sqrt()

    def largest_eigenvalue(self, S: Any) -> ArbArray:
        """As in the base class."""
        return _each(lambda x: largest_eigenvalue(_matrix(x)), S)

    def sign_norm(self, M: ArbArray) -> ArbArray:
        """As in the base class, with the recorded scalings."""
        rows, columns = self.choose("scalings of a sign norm", lambda: (None, None))
        found = M.size().sum((-2, -1))
        m, n = M.shape[-2:]
        if min(m, n) <= ENUMERATED:
            short = M if m <= n else M.mT
            return found.least((self.exact(sign_vectors(min(m, n))) @ short).size().sum(-1).amax(-1))
        if rows is None or rows.shape != M.shape[:-1] or columns.shape != (*M.shape[:-2], n):
            raise VerificationError(f"the recorded scalings are not those of {m} rows and {n} columns")
        for u, v in ((torch.ones_like(rows), torch.ones_like(columns)), (rows, columns)):
            left, right = self.exact(u), self.exact(v)
            one = self.exact(1.0)
            mass = (one / (left * left)).sum(-1) * (one / (right * right)).sum(-1)
            found = found.least(self.spectral_norm(M * left[..., :, None] * right[..., None, :]) * mass.sqrt())
        return found

    def cat(self, parts: Sequence[Any], dim: int = 0) -> ArbArray:
        """As in the base class."""
        return ArbArray.cat(parts, dim)

    def inverse_root(self, x: Any) -> ArbArray:
        """As in the base class."""
        return self._by_ends(x, lambda s: 1 / s.sqrt())

    def inverse(self, x: Any) -> ArbArray:
        """As in the base class."""
        return self._by_ends(x, lambda s: 1 / s)

    def exp(self, x: Any) -> ArbArray:
        """As in the base class."""
        return self._by_ends(x, lambda s: s.exp())

    def _by_ends(self, x: ArbArray, function: Callable[[arb], arb]) -> ArbArray:
        """Apply a monotone function of numbers, at both ends of an interval that is not tiny: that is tighter."""

        def one(s: arb) -> arb:
            return function(s) if s.rel_accuracy_bits() > THIN else function(s.lower()).union(function(s.upper()))

        return ArbArray(np.frompyfunc(one, 1, 1)(x.x))

    def activation(self, z: Any, name: str) -> tuple[ArbArray, ArbArray]:
        """As in the base class."""
        value, slope = (_gelu, _gelu_slope) if name == "gelu" else (_relu, _relu_slope)
        return ArbArray(np.frompyfunc(value, 1, 1)(z.x)), ArbArray(np.frompyfunc(slope, 1, 1)(z.x))

    def log_distance(self, b: Tensor, x: Any) -> ArbArray:
        """As in the base class."""
        apart = np.frompyfunc(lambda b, x: (b - x.log()).abs_upper(), 2, 1)(_objects(b), x.x)
        return ArbArray(apart.flatten()).amax(0)

    def pair_sizes(self, form: ArbArray, places: int) -> ArbArray:
        """As in the base class."""
        own = ArbArray(np.diagonal(form.x, axis1=-2, axis2=-1))
        sizes = (own[:, :, None] + own[:, None, :] - form * 2.0).size() * 0.5
        x, v, _ = sizes.shape
        return sizes.reshape(x, places, v // places, places, v // places).amax((2, 4))


def _relu(z: arb) -> arb:
    return z.max(arb(0))


def _relu_slope(z: arb) -> arb:
    return arb(1) if z > 0 else arb(0)


def _gelu(z: arb) -> arb:
    """Enclose gelu by the mean-value theorem; a wide ball in the formula itself would contain e^(r²/2)."""
    m = z.mid()
    return m * (1 + (m / arb(2).sqrt()).erf()) / 2 + (z - m) * STEEPEST["gelu"]


def _gelu_slope(z: arb) -> arb:
    """Enclose gelu' in the same way."""
    m = z.mid()
    return (1 + (m / arb(2).sqrt()).erf()) / 2 + m * (-m * m / 2).exp() / (2 * arb.pi()).sqrt() + (z - m) * CURVATURE


def largest_eigenvalue(S: arb_mat) -> arb:
    """Bound max(λ_max(S), 0) for every symmetric matrix in the interval matrix S (docs/math.md §2.9).

    Let V be any square matrix, here approximate eigenvectors, B = VᵀSV and δ ≥ ‖VᵀV − I‖₂, the largest row sum. If
    δ < 1, then V is invertible, and x = Vy gives xᵀSx = yᵀBy ≤ g|y|² with g = max_i (B_ii + Σ_{j≠i} |B_ij|) and
    |x|² ≥ (1 − δ)|y|², hence λ_max(S) ≤ max(g, 0)/(1 − δ). Otherwise the largest row sum of |S| is returned.
    """
    n = S.nrows()
    sizes = ArbArray(_entries(S)).size()
    size: arb = sizes.amax((0, 1)).x.item()
    if size == 0 or not size.is_finite():
        return size
    middle = np.asarray(_FLOAT(_entries(S) / size), dtype=np.float64)
    V = _matrix(_ARB(np.linalg.eigh((middle + middle.T) / 2)[1]))
    eye = np.eye(n)
    delta = ArbArray(_entries(V.transpose() * V) - _ARB(eye)).size().sum(1).amax(0).x.item()
    if not delta < 1:
        size = sizes.sum(1).amax(0).x.item()
        return size
    B = _entries(V.transpose() * S * V)
    discs = ArbArray(np.diagonal(B)) + (ArbArray(B).size() * torch.from_numpy(1.0 - eye)).sum(1)
    largest: arb = discs.most(0.0).amax(0).x.item()
    bound: arb = (largest / (1 - delta)).upper()
    return bound


def _spectral_norm(x: Any) -> arb:
    M = _matrix(x if x.shape[0] <= x.shape[1] else x.T)
    return largest_eigenvalue(M * M.transpose()).sqrt().upper()
