"""Proved bounds on the scores of a call, on the effect of rounding, and the moment certificate.

Softmax is invariant to a term that is constant in a row. For any centres c and μ

    s q·k = s (q−μ)·(k−c) + s μ·(k−c) + (constant in the row),

so P_ij ∝ w_j exp(t_ij) with t_ij = s (q_i−μ)·(k_j−c) and w_j = exp(s μ·(k_j−c)). By Cauchy–Schwarz,
|t_ij| ≤ B_i = |s| ‖q_i−μ‖ max_j ‖k_j−c‖. Norms are rounded outward: with unit roundoff u, the relative error of a
subtraction is at most u and that of a sum of d squares at most d u; squares below the normal range lose at most 2⁻¹²⁶
(float32) or 2⁻¹⁰²² (float64) each.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from operator import mul

import torch
from torch import Tensor

from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.theory.minimax import Minimax

LARGEST_LOG_RANGE = 40.0
"""The largest spread of log w on the causal path. A causal row may see only small weights: e^−40 stays above 1e-38."""


class Survey:
    """The result of one pass over q, k and v: proved bounds, one number per key head in every list.

    - `query`, `key`, `query_centred`, `key_centred`: upper bounds on the largest ‖q‖, ‖k‖, ‖q−μ‖ and ‖k−c‖
    - `query_mean`: upper bounds on ‖μ‖
    - `value_width`, `value_size`: at least the range of the values and the largest |v|
    - `is_finite`: whether all entries are finite
    - `query_least`, `query_centred_least`: about the smallest ‖q‖ and ‖q−μ‖; no proof depends on them
    - `query_centre`, `key_centre`: μ and c, [N, d]
    - `values`: the smallest and largest entries of the value columns, two [N, e], or None if they were not computed

    >>> q = torch.ones(1, 1, 2, 4)
    >>> survey(Problem(q, q[0], q[0], 0.5, False, None)).is_usable
    [True]
    """

    query: list[float]
    key: list[float]
    query_centred: list[float]
    key_centred: list[float]
    query_mean: list[float]
    value_width: list[float]
    value_size: list[float]
    is_finite: list[bool]
    query_least: list[float]
    query_centred_least: list[float]
    query_centre: Tensor
    key_centre: Tensor
    values: tuple[Tensor, Tensor] | None = None

    def __init__(self, problem: Problem) -> None:
        self.scale, self.value_range = problem.scale, value_range(problem)

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

    @property
    def least_product(self) -> float:
        """At most about the smallest of ‖q‖ max ‖k‖ over all rows, with or without centring."""
        queries = map(min, self.query_least, self.query_centred_least)
        return float(min(map(mul, queries, map(min, self.key, self.key_centred))))

    def middle(self, problem: Problem) -> Tensor:
        """Return the midpoint of the range of every value column: [N, e]."""
        low, high = value_extremes(problem) if self.values is None else self.values
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


def survey(problem: Problem) -> Survey:
    """Bound the norms of a problem in O(n d), with one transfer to the host."""
    work, keep = problem.working, problem.keep
    q, k = problem.q.to(work), problem.k.to(work)
    if keep is None:
        c, kept_k = k.mean(dim=1), k
    else:
        kept_k = torch.where(keep[..., None], k, 0)
        c = kept_k.sum(dim=1) / keep.sum(dim=1, keepdim=True)
    mu = q.mean(dim=(1, 2))
    centred_k = k - c[:, None]
    if keep is not None:
        centred_k = torch.where(keep[..., None], centred_k, 0)
    low, high = value_extremes(problem)
    width = (high - low).amax(dim=-1)
    finite = torch.isfinite(width)
    if keep is not None:  # the bounds above ignore padding, but a NaN at padding would reach the output
        finite = finite & torch.isfinite(k).all(dim=(1, 2)) & torch.isfinite(problem.v).all(dim=(1, 2))
    query, query_centred = norm_up(q), norm_up(q - mu[:, None, None])
    found = Survey(problem)
    found.query_centre, found.key_centre, found.values = mu, c, (low, high)
    (
        found.query, found.key, found.query_centred, found.key_centred, found.query_mean, found.value_width,
        found.value_size, is_finite, found.query_least, found.query_centred_least,
    ) = torch.stack([
        query.amax(dim=(1, 2)), norm_up(kept_k).amax(dim=1), query_centred.amax(dim=(1, 2)),
        norm_up(centred_k).amax(dim=1), norm_up(mu), width, torch.maximum(low.abs(), high.abs()).amax(dim=-1),
        finite.to(work), query.amin(dim=(1, 2)), query_centred.amin(dim=(1, 2)),
    ]).tolist()  # fmt: skip
    found.is_finite = [one == 1 for one in is_finite]
    return found


def is_outside(problem: Problem, bound: float) -> Tensor:
    """Return a bool tensor []: whether scores may exceed `bound`, or q, k or v is unusable. It stays on the device."""
    work = problem.working
    query = norm_up(problem.q.to(work)).amax(dim=(1, 2)).double()
    key = norm_up(problem.k.to(work)).amax(dim=1).double()
    low, high = value_extremes(problem)
    width = (high - low).amax(dim=-1)
    is_inside = query * key * (abs(problem.scale) * (1 + 2.0**-40)) <= bound
    return ~(is_inside & _is_summable(problem, width)).all()


def _is_summable(problem: Problem, width: Tensor) -> Tensor:
    """Return whether sums of values with this range neither overflow nor vanish, as in `Survey`."""
    smallest, largest = value_range(problem)
    return (width == 0) | ((width > smallest) & (width < largest))


def value_range(problem: Problem) -> tuple[float, float]:
    """Return the smallest and the largest range of values, other than 0, whose sums are computed."""
    finfo = torch.finfo(problem.working)
    return finfo.tiny * 2**40, finfo.max / (64 * max(1, problem.k.shape[1]))


def value_extremes(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest entry of every value column over the kept keys: two [N, e]."""
    v = problem.v.to(problem.working)
    if problem.keep is None:
        low, high = v.aminmax(dim=1)
        return low, high
    padded = ~problem.keep[..., None]
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
