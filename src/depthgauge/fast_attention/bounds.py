"""Polynomials with proved errors, and proved bounds on scores and on the effect of rounding.

A polynomial p of degree g replaces exp. It has the smallest relative error:

    e(t) = p(t) exp(−t) − 1,   ε = max |e| over [−B, B]

Because e′ = (p′ − p) exp(−t), the extrema of e are ±B and the roots of one polynomial of degree g. A Remez exchange
therefore needs no grid, and the proof needs g + 2 evaluations. Both use decimal arithmetic with 80 digits and a
correctly rounded exp. The error is proved for the float64 coefficients that are used.

Softmax is invariant to a term that is constant in a row. For any centres c and μ

    s q·k = s (q−μ)·(k−c) + s μ·(k−c) + (constant in the row),

so P_ij ∝ w_j exp(t_ij) with t_ij = s (q_i−μ)·(k_j−c) and w_j = exp(s μ·(k_j−c)). By Cauchy–Schwarz,
|t_ij| ≤ B_i = |s| ‖q_i−μ‖ max_j ‖k_j−c‖. Norms are rounded outward: with unit roundoff u, the relative error of a
subtraction is at most u and that of a sum of d squares at most d u; squares below the normal range lose at most 2⁻¹²⁶
(float32) or 2⁻¹⁰²² (float64) each.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from depthgauge.fast_attention.call import Call, Tensors

HIGHEST_DEGREE = 4
GRID = 32
"""Polynomials are computed for B = 2^(k/GRID) with integer k only, so that few of them have to be cached."""
SMALLEST_INDEX = -20 * GRID
"""For B below 2⁻²⁰ the polynomial of 2⁻²⁰ is used; its error is at most that of its float64 coefficients."""
_DIGITS = Context(prec=80)
_SLACK = Decimal("1e-60")
_CLOSE = Decimal("1e-60")
_WIDTH = Decimal("1e-40")
"""Half the width, as a fraction of B, of the interval that is proved to contain a root."""


@dataclass(frozen=True)
class Minimax:
    """p(t) = Σ_k coefficients[k] t^k on [−bound, bound].

    `error` ≥ max |p e^−t − 1| and `slope_error` ≥ max |p′ e^−t − 1| are proved for these coefficients.
    """

    degree: int
    bound: float
    coefficients: tuple[float, ...]
    error: float
    slope_error: float


def horner(coefficients: Sequence[Decimal], t: Decimal) -> Decimal:
    """Return Σ_k coefficients[k] t^k."""
    value = Decimal(0)
    for c in reversed(coefficients):
        value = value * t + c
    return value


def derivative(coefficients: Sequence[Decimal]) -> list[Decimal]:
    """Return the coefficients of p′; the derivative of a constant is the zero polynomial."""
    return [k * c for k, c in enumerate(coefficients)][1:] or [Decimal(0)]


def _slope_of_error(p: Sequence[Decimal]) -> list[Decimal]:
    """Return the coefficients of p′ − p = e′ exp(t)."""
    d = derivative(p)
    return [(d[k] if k < len(d) else Decimal(0)) - c for k, c in enumerate(p)]


def real_roots(p: Sequence[Decimal], low: Decimal, high: Decimal) -> list[Decimal]:
    """Return the roots of p in (low, high) at which p changes sign, in order.

    Between two neighbouring roots of p′ there is at most one root of p.
    """
    while len(p) > 1 and p[-1] == 0:
        p = p[:-1]
    if len(p) <= 1:
        return []
    ends = [low, *real_roots(derivative(p), low, high), high]
    return [_bisect(p, a, b) for a, b in pairwise(ends) if horner(p, a) * horner(p, b) < 0]


def _bisect(p: Sequence[Decimal], low: Decimal, high: Decimal) -> Decimal:
    """Return the root between points of opposite sign, by Newton steps that fall back to bisection."""
    slope, sign = derivative(p), horner(p, low) > 0
    t, close = (low + high) / 2, _CLOSE * (high - low)
    for _ in range(400):
        value = horner(p, t)
        if (value > 0) == sign:
            low = t
        else:
            high = t
        steep = horner(slope, t)
        step = t - value / steep if steep != 0 else low
        nearer = step if low < step < high else (low + high) / 2
        if abs(nearer - t) <= close:
            return nearer
        t = nearer
    return t


def _solve(matrix: list[list[Decimal]], right: list[Decimal]) -> list[Decimal]:
    """Solve a small linear system by Gaussian elimination with row exchanges."""
    rows = [[*row, r] for row, r in zip(matrix, right, strict=True)]
    n = len(rows)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    solution = [Decimal(0)] * n
    for i in reversed(range(n)):
        solution[i] = (rows[i][n] - sum(rows[i][j] * solution[j] for j in range(i + 1, n))) / rows[i][i]
    return solution


def _remez(degree: int, bound: Decimal) -> list[Decimal]:
    """Return the coefficients of p: solve p(x_i) e^−x_i − 1 = ±E on g + 2 points, move them to the extrema, repeat."""
    points = [
        bound * Decimal(-math.cos(math.pi * i / (degree + 1))) if 0 < i <= degree else bound * (1 if i else -1)
        for i in range(degree + 2)
    ]
    for _ in range(60):
        rows, right = [], []
        for i, x in enumerate(points):
            weight = (-x).exp()
            # The unknowns are c_k B^k, which keeps the system well scaled for small B.
            rows.append([weight * (x / bound) ** k for k in range(degree + 1)] + [Decimal(-1) ** i])
            right.append(Decimal(1))
        *scaled, level = _solve(rows, right)
        p = [c / bound**k for k, c in enumerate(scaled)]
        inner = real_roots(_slope_of_error(p), -bound, bound)
        if len(inner) != degree:
            raise ArithmeticError(f"found no alternation of {degree + 2} points at B = {bound}")
        points = [-bound, *inner, bound]
        largest = max(abs(horner(p, x) * (-x).exp() - 1) for x in points)
        if largest - abs(level) <= abs(largest) * Decimal("1e-20"):
            return p
    raise ArithmeticError(f"the Remez exchange did not converge at B = {bound}")  # pragma: no cover


def relative_error(coefficients: Sequence[float], bound: float) -> float:
    """Return a proved upper bound on max |p(t) e^−t − 1| over [−bound, bound] for these float64 coefficients.

    e is monotone between the roots of p′ − p. Every root z is enclosed in an interval at whose ends p′ − p has opposite
    signs. If the number of enclosures equals the degree of p′ − p, there are no other roots. On an enclosure,
    |e| ≤ |e(z)| + width·max |e′|. If fewer roots are enclosed, the bound is computed on a grid of cells instead.

    >>> relative_error([1.0, 1.0], 0.1) < 0.0056
    True
    """
    with localcontext(_DIGITS):
        p, edge = [Decimal(c) for c in coefficients], Decimal(bound)
        slope = _slope_of_error(p)
        while len(slope) > 1 and slope[-1] == 0:
            slope = slope[:-1]
        worst = max(abs(horner(p, t) * (-t).exp() - 1) for t in (-edge, edge))
        width = edge * _WIDTH
        enclosed = 0
        for z in real_roots(slope, -edge, edge):
            low, high = z - width, z + width
            if horner(slope, low) * horner(slope, high) < 0:
                enclosed += 1
            steep = sum((abs(c) * edge**k for k, c in enumerate(slope)), Decimal(0)) * (2 * edge).exp()
            worst = max(worst, abs(horner(p, z) * (-z).exp() - 1) + 2 * width * steep)
        if enclosed < len(slope) - 1:
            return _error_by_cells(p, edge)
        return _round_up(worst + _SLACK)


def _error_by_cells(p: Sequence[Decimal], edge: Decimal, cells: int = 400) -> float:
    """Return the same bound without the roots: on a cell, |e| ≤ max |e| at its ends + width²/8 · max |e″|."""
    first = derivative(p)
    second = derivative(first)
    bend = [
        abs(c - 2 * (first[k] if k < len(first) else 0) + (second[k] if k < len(second) else 0))
        for k, c in enumerate(p)
    ]
    curvature = horner(bend, edge) * edge.exp()
    width = 2 * edge / cells
    ends = (abs(horner(p, t) * (-t).exp() - 1) for t in (-edge + i * width for i in range(cells + 1)))
    return _round_up(max(ends) + width * width / 8 * curvature + _SLACK)


def _round_up(x: Decimal) -> float:
    return math.nextafter(float(x), math.inf)


@lru_cache(maxsize=4096)
def minimax(degree: int, bound: float) -> Minimax:
    """Return the polynomial of a degree with the smallest relative error on [−bound, bound], and its proved error.

    >>> minimax(2, 0.288).error < 1e-3
    True
    """
    with localcontext(_DIGITS):
        exact = _remez(degree, Decimal(bound))
        coefficients = tuple(float(c) for c in exact)
    return widened(Minimax(degree, bound, coefficients, math.inf, math.inf), bound)


def grid_bound(index: int) -> float:
    """Return 2^(index/GRID) as a float64."""
    return float(2.0 ** (index / GRID))


LARGEST_INDEX = 4 * GRID
_GRID_BOUNDS = [grid_bound(index) for index in range(SMALLEST_INDEX, LARGEST_INDEX + 1)]


def grid_index(bound: float) -> int:
    """Return the smallest index on the grid with 2^(index/GRID) ≥ bound, or LARGEST_INDEX + 1 beyond the grid."""
    return SMALLEST_INDEX + bisect_left(_GRID_BOUNDS, bound)


def at_index(degree: int, index: int) -> Minimax:
    """Return the minimax polynomial of a degree for B = 2^(index/GRID)."""
    return minimax(degree, grid_bound(index))


def widened(p: Minimax, bound: float) -> Minimax:
    """Return the same polynomial with its errors proved on a wider interval."""
    slope = [k * c for k, c in enumerate(p.coefficients)][1:] or [0.0]
    # Every product k·c_k is rounded once, so p′ is off by at most 2⁻⁵³ Σ |k c_k| B^k ≤ 2⁻⁵² Σ |k c_k| B^k.
    slack = 2.0**-52 * sum(abs(c) * bound**k for k, c in enumerate(slope)) * math.exp(bound)
    slope_error = relative_error(slope, bound) + slack
    return Minimax(p.degree, bound, p.coefficients, relative_error(p.coefficients, bound), slope_error)


@lru_cache(maxsize=4096)
def suited(degree: int, index: int, dim: int, tolerance: float, gradients: bool) -> Minimax:
    """Return the polynomial to use for scores up to B = 2^(index/GRID) of vectors of width `dim`.

    Scores of vectors without a common direction are about B/√d, far below B. The polynomial is therefore the minimax
    polynomial of [−b, b], with b as close to 2B/√d as the tolerance on all of [−B, B] allows. b = B is always allowed.
    """
    bound = grid_bound(index)
    narrow = min(index, grid_index(2 * bound / math.sqrt(dim)))
    candidates = [*range(narrow, index, GRID // 4), index]
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        is_met = guarantee(widened(at_index(degree, candidates[middle]), bound), gradients) <= tolerance
        low, high = (low, middle) if is_met else (middle + 1, high)
    p = at_index(degree, candidates[low])
    return p if p.bound == bound else widened(p, bound)


def output_error(epsilon: float) -> float:
    """Return h(ε) = (1 − √(1−ε²))/ε, the largest error of the output as a fraction of range(v), rounded up.

    The weights are those of softmax times 1 + δ_j with |δ_j| ≤ ε. In the worst case, mass a has the factor 1+ε and the
    rest 1−ε, which moves a(1−a)·2ε/(1−ε+2aε) of the mass; the maximum over a is h(ε). It is computed as
    ε/(1 + √(1−ε²)), which avoids cancellation.
    """
    if epsilon >= 1:
        return 1.0
    return epsilon / (1 + math.sqrt((1 - epsilon) * (1 + epsilon))) * (1 + 2.0**-50)


def gradient_error(p: Minimax) -> float:
    """Return G = κ + (1+κ)·h(ε) with κ = (ε + ε′)/(1 − ε), the relative bound of the gradients.

    The derivation is in docs/concepts/fast-attention-derivation.md, section Gradients.
    """
    if p.error >= 1:
        return math.inf
    kappa = (p.error + p.slope_error) / (1 - p.error)
    return (kappa + (1 + kappa) * output_error(p.error)) * (1 + 2.0**-50)


def guarantee(p: Minimax, gradients: bool) -> float:
    """Return the error that is compared with the tolerance: of the output, and with `gradients` of both."""
    return max(output_error(p.error), gradient_error(p)) if gradients else output_error(p.error)


@lru_cache(maxsize=1024)
def limit_index(degree: int, tolerance: float, gradients: bool = False) -> int:
    """Return the largest grid index at which this degree meets the tolerance, or SMALLEST_INDEX − 1 if none does."""

    def is_met(index: int) -> bool:
        try:
            p = at_index(degree, index)
        except ArithmeticError:  # far beyond the tolerance: no alternation is found, and none is needed
            return False
        return p.error < 1 and guarantee(p, gradients) <= tolerance

    low, high = SMALLEST_INDEX, LARGEST_INDEX
    if not is_met(low):
        return low - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def degree_it_would_take(bound: float, tolerance: float) -> int:
    """Estimate the degree at which scores up to B meet the tolerance, from ε ≈ B^{g+1}/(2^g (g+1)!) for g > B."""
    epsilon = 2 * tolerance / (1 + tolerance * tolerance)
    g = 0
    while (g + 1) * math.log(bound) - g * math.log(2) - math.lgamma(g + 2) > math.log(epsilon) or g < bound / 2:
        g += 1
    return g


# --- scores and rounding ----------------------------------------------------------------------------------------------

LARGEST_LOG_RANGE = 40.0
"""The largest spread of log w on the causal path. A causal row may see only small weights: e^−40 stays above 1e-38."""


class Survey:
    """The result of one pass over q, k and v: proved bounds, one number per key head in every list.

    - `query`, `key`, `query_centred`, `key_centred`: upper bounds on the largest ‖q‖, ‖k‖, ‖q−μ‖ and ‖k−c‖
    - `query_mean`: upper bounds on ‖μ‖
    - `value_width`, `value_size`: at least the range of the values and the largest |v|
    - `is_finite`: whether all entries are finite
    - `query_centre`, `key_centre`: μ and c, [N, d]
    - `values`: the smallest and largest entries of the value columns, two [N, e], or None if they were not computed

    """

    query: list[float]
    key: list[float]
    query_centred: list[float]
    key_centred: list[float]
    query_mean: list[float]
    value_width: list[float]
    value_size: list[float]
    is_finite: list[bool]
    query_centre: Tensor
    key_centre: Tensor
    values: tuple[Tensor, Tensor] | None = None

    def __init__(self, call: Call) -> None:
        self.scale, self.value_range = call.scale, value_range(call)

    @cached_property
    def spread(self) -> list[float]:
        """Upper bounds on log w_i − log w_j."""
        return [2 * score_bound(self.scale, a, b) for a, b in zip(self.query_mean, self.key_centred, strict=True)]

    @cached_property
    def is_usable(self) -> list[bool]:
        """Whether all entries are finite and sums cannot overflow."""
        smallest, largest = self.value_range
        norms = self.query, self.key, self.query_centred, self.key_centred, self.query_mean
        return [
            is_finite and math.isfinite(sum(own)) and (width == 0 or smallest < width < largest)
            for is_finite, width, *own in zip(self.is_finite, self.value_width, *norms, strict=True)
        ]

    def select(self, heads: Sequence[int]) -> "Survey":
        """Return the survey of some heads."""
        own, at = copy(self), list(heads)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(own, name, [value[head] for head in at])
        own.query_centre, own.key_centre = self.query_centre[at], self.key_centre[at]
        own.values = None if self.values is None else (self.values[0][at], self.values[1][at])
        return own

    def middle(self, tensors: Tensors) -> Tensor:
        """Return the midpoint of the range of every value column: [N, e]."""
        low, high = value_extremes(tensors) if self.values is None else self.values
        return low + (high - low) / 2


def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff: the largest relative error of one rounding, 2⁻²⁴ for float32, 2⁻⁸ for bfloat16."""
    return float(torch.finfo(dtype).eps) / 2


def product_unit(dtype: torch.dtype, device: torch.device) -> float:
    """Return the unit to which torch may round the operands of a product: 0 unless TF32 or bfloat16 is allowed."""
    if dtype != torch.float32:
        return 0.0
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the precision was set through another interface: assume the coarsest
        precision = "medium"
    if device.type == "cuda" and precision == "medium":
        return 2.0**-8
    return {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}[precision]


def norm_up(x: Tensor) -> Tensor:
    """Return an upper bound on ‖x_i‖ for every row, where x was rounded once by a subtraction: [..., d] → [...].

    With u the unit roundoff, ‖x_i‖ ≤ computed norm · (1 + 2(d+8)u) + 2√(d·tiny), tiny the smallest normal number.
    """
    d, u = x.shape[-1], unit(x.dtype)
    lost = math.sqrt(d * torch.finfo(x.dtype).tiny) * 2
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm * (1 + 2 * (d + 8) * u) + lost


def score_bound(scale: float, query_norm: float, key_norm: float) -> float:
    """Return |s| ‖q‖ ‖k‖ rounded up, or infinity if it is not a number."""
    bound = abs(scale) * query_norm * key_norm * (1 + 2.0**-50)
    return bound if bound == bound else math.inf


def survey(call: Call, tensors: Tensors) -> Survey:
    """Bound the norms of a problem in O(n d), with one transfer to the host."""
    work, padding = call.working, tensors.padding
    q, k = tensors.q.to(work), tensors.k.to(work)
    if padding is None:
        c, kept_k = k.mean(dim=1), k
    else:
        kept_k = k.masked_fill(padding[..., None], 0)
        c = kept_k.sum(dim=1) / (~padding).sum(dim=1, keepdim=True)
    mu = q.mean(dim=(1, 2))
    centred_k = k - c[:, None]
    if padding is not None:
        centred_k = centred_k.masked_fill(padding[..., None], 0)
    low, high = value_extremes(tensors)
    width = (high - low).amax(dim=-1)
    finite = torch.isfinite(width)
    if padding is not None:  # the bounds above ignore padding, but a NaN at padding would reach the output
        finite = finite & torch.isfinite(k).all(dim=(1, 2)) & torch.isfinite(tensors.v).all(dim=(1, 2))
    found = Survey(call)
    found.query_centre, found.key_centre, found.values = mu, c, (low, high)
    (
        found.query, found.key, found.query_centred, found.key_centred, found.query_mean, found.value_width,
        found.value_size, is_finite,
    ) = torch.stack([
        norm_up(q).amax(dim=(1, 2)), norm_up(kept_k).amax(dim=1), norm_up(q - mu[:, None, None]).amax(dim=(1, 2)),
        norm_up(centred_k).amax(dim=1), norm_up(mu), width, torch.maximum(low.abs(), high.abs()).amax(dim=-1),
        finite.to(work),
    ]).tolist()  # fmt: skip
    found.is_finite = [one == 1 for one in is_finite]
    return found


def glance_factor(scale: float, bound: float) -> float:
    """Return the factor of ‖q_i − q_j‖ ‖k_a − k_b‖ in `share_beyond`. It leaves 1 % for rounding."""
    return abs(scale) / (4.04 * bound)


def share_beyond(call: Call, tensors: Tensors, bound: float) -> float:
    """Return a share of the rows of every head that are proved to have B_i > `bound`, for all centres at once.

    Whatever the centre, one of two keys is at least half of their distance away from it, and one of two rows. So if
    |s| ‖q_i − q_j‖ ‖k_a − k_b‖ > 4 · bound, then B_i or B_j is beyond the bound. Rows are compared in pairs, each once.
    About 256 keys are read, and no values. NaN proves nothing.
    """
    q, k = tensors.q.flatten(1, 2), tensors.k[:, :: max(1, call.m // 256)].to(call.working)
    distances = torch.linalg.vector_norm(k - k.flip(1), dim=-1)
    if tensors.padding is not None:
        padding = tensors.padding[:, :: max(1, call.m // 256)]
        distances = distances.masked_fill(padding | padding.flip(1), 0)
    half = q.shape[1] // 2
    apart = torch.linalg.vector_norm(q[:, :half].to(k.dtype) - q[:, half : 2 * half].to(k.dtype), dim=-1)
    beyond = apart * (distances.amax(dim=1, keepdim=True) * glance_factor(call.scale, bound)) > 1
    return float(beyond.sum(dim=1).min()) / q.shape[1]


def is_outside(call: Call, tensors: Tensors, bound: float) -> Tensor:
    """Return a bool tensor []: whether scores may exceed `bound`, or q, k or v is unusable. It stays on the device."""
    work = call.working
    query = norm_up(tensors.q.to(work)).amax(dim=(1, 2)).double()
    key = norm_up(tensors.k.to(work)).amax(dim=1).double()
    low, high = value_extremes(tensors)
    width = (high - low).amax(dim=-1)
    is_inside = query * key * (abs(call.scale) * (1 + 2.0**-40)) <= bound
    smallest, largest = value_range(call)  # sums of the values neither overflow nor vanish, as in `Survey`
    return ~(is_inside & ((width == 0) | ((width > smallest) & (width < largest)))).all()


def value_range(call: Call) -> tuple[float, float]:
    """Return the smallest and the largest range of values, other than 0, whose sums are computed."""
    finfo = torch.finfo(call.working)
    return finfo.tiny * 2**40, finfo.max / (64 * max(1, call.m))


def value_extremes(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest entry of every value column over the keys that are no padding: two [N, e]."""
    v = tensors.v.double() if tensors.v.dtype == torch.float64 else tensors.v.float()
    if tensors.padding is None:
        low, high = v.aminmax(dim=1)
        return low, high
    padded = tensors.padding[..., None]
    return v.masked_fill(padded, torch.inf).amin(dim=1), v.masked_fill(padded, -torch.inf).amax(dim=1)


def rounding_share(p: Minimax, bound: float, roundings: float, coarse: float, log_error: float) -> float:
    """Return the most that rounding can add to an output entry, as a fraction of range(v), or infinity if unbounded.

    Numerator and denominator are sums of terms |a_k| |t|^k w_j |v_j − mid| with relative errors at most θ. The error of
    each sum is at most θ·W·A with A = Σ |a_k| B^k. The denominator is at least W e^−B (1−ε), and |v_j − mid| ≤ range/2.
    The error of the quotient is therefore at most

        x/(1−x) · range(v)   with   x = θ · A e^B / (1−ε).

    `roundings` is the part of θ from sums, `coarse` the part from products of shorter operands, and `log_error` the
    absolute error of log w.
    """
    size = sum(abs(a) * bound**g for g, a in enumerate(p.coefficients))
    theta = 1.01 * (roundings + coarse) + math.expm1(min(log_error, 1.0))
    x = theta * size * math.exp(bound) / (1 - p.error)
    return x / (1 - x) if x < 0.5 else math.inf


@dataclass(frozen=True)
class MomentTerms:
    """Constants with |p(t) − λ e^t| ≤ level + slope·|t| + bend(B)·t² on [−B, B].

    bend(B) = Σ_k bends[k] B^k + tail · B^tail_power · e^B.
    """

    level: float
    slope: float
    bends: tuple[float, ...]
    tail: float
    tail_power: int


def moment_terms(p: Minimax, is_pure: bool) -> MomentTerms:
    """Return the terms of the moment certificate, from the coefficients of p minus those of the series of λ e^t.

    Scaling p by a constant does not change the output, so λ is free. λ = p(0) makes the level 0. If exact exponentials
    are mixed in (causal diagonal blocks, not `is_pure`), λ must be 1.
    """
    up = 1 + 2.0**-45
    a = [*p.coefficients, 0.0, 0.0, 0.0][: max(3, p.degree + 1)]
    lam = a[0] if is_pure else 1.0
    gaps = [(abs(c - lam / math.factorial(k)) + 2.0**-50 * (abs(c) + lam)) * up for k, c in enumerate(a)]
    last = len(a)
    return MomentTerms(0.0 if is_pure else gaps[0], gaps[1], tuple(gaps[2:]), lam / math.factorial(last) * up, last - 2)


def moment_certificate(
    terms: MomentTerms, row_bound: Tensor, total: Tensor, second: Tensor, normaliser: Tensor
) -> Tensor:
    """Return Σ_j w_j |p(t_ij) − λ e^t_ij| / Z′_i, an upper bound on |out′ − out| / range(v) of a computed row.

    The bound follows from the identity out′ − out = Σ_j w_j (p(t_ij) − λ e^t_ij)(v_j − out)/Z′. All arguments are per
    row: `row_bound` is B_i, `total` is W = Σ_j w_j, `second` is Σ_j w_j t_ij², and `normaliser` is Z′. By
    Cauchy–Schwarz, Σ_j w_j |t_ij| ≤ √(W · second).
    """
    bend = terms.tail * row_bound**terms.tail_power * torch.exp(row_bound)
    for k, gap in enumerate(terms.bends):
        bend = bend + gap * row_bound**k
    return (terms.level * total + terms.slope * torch.sqrt(total * second) + bend * second) / normaliser
