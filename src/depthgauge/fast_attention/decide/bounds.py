"""What is proved about the scores of a call, what rounding may add, and the moment certificate.

Softmax does not see a term that is constant in a row, so with any centres c and μ

    s q·k = s (q−μ)·(k−c) + s μ·(k−c) + (constant in the row)

and P_ij ∝ w_j exp(t_ij) with t_ij = s (q_i−μ)·(k_j−c), w_j = exp(s μ·(k_j−c)). By Cauchy and Schwarz
|t_ij| ≤ B_i = |s| ‖q_i−μ‖ max_j ‖k_j−c‖. Norms are rounded outward: a subtraction is off by one unit of its result, a
sum of d squares by d units, and squares below the normal range are lost, at most 2⁻¹²⁶ (2⁻¹⁰²²) each.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgauge.fast_attention.decide.minimax import Minimax
from depthgauge.fast_attention.problem import Problem

LARGEST_LOG_RANGE = 40.0
"""Causal rows see few keys: log weights must not differ by more than this, or theirs would be lost below 1e-38."""
LARGEST_LOG_RANGE_FLOAT16 = 6.0
"""The kernels hold w k and w e^t in the tensors' dtype, and float16 loses what is below 6e-5."""


@dataclass(frozen=True)
class Survey:
    """What one pass over q, k and v proves, per key head.

    Norms are upper bounds: of the longest query and key as given, and after centring at `query_centre` (μ) and
    `key_centre` (c), both [N, d]. `spread` bounds log w_i − log w_j. `is_usable`: all finite, and sums cannot overflow.
    `value_size` is at least the largest |v|; `values` are the least and largest entries of the value columns, two
    [N, e], where they were looked at.
    """

    query: list[float]
    key: list[float]
    query_centred: list[float]
    key_centred: list[float]
    spread: list[float]
    is_usable: list[bool]
    value_size: list[float]
    query_centre: Tensor
    key_centre: Tensor
    values: tuple[Tensor, Tensor] | None

    def middle(self, problem: Problem) -> Tensor:
        """The middle of every value column's range: [N, e]."""
        low, high = value_extremes(problem) if self.values is None else self.values
        return low + (high - low) / 2


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding: 2⁻²⁴ for float32, 2⁻⁸ for bfloat16."""
    return float(torch.finfo(dtype).eps) / 2


def product_unit(dtype: torch.dtype, device: torch.device) -> float:
    """What torch may round the operands of a product to: nothing, unless TF32 or bfloat16 products are allowed."""
    if dtype != torch.float32:
        return 0.0
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # set through another interface: assume the coarsest
        precision = "medium"
    if device.type == "cuda" and precision == "medium":
        return 2.0**-8
    return {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}[precision]


def norm_up(x: Tensor) -> Tensor:
    """At least ‖x_i − c‖ of every row, given x_i − c as one subtraction rounded it: [..., d] → [...]."""
    d, u = x.shape[-1], unit(x.dtype)
    lost = math.sqrt(d * torch.finfo(x.dtype).tiny) * 2
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm * (1 + 2 * (d + 8) * u) + lost


def score_bound(scale: float, query_norm: float, key_norm: float) -> float:
    """|s| ‖q‖ ‖k‖ rounded up; infinite where it is not a number."""
    bound = abs(scale) * query_norm * key_norm * (1 + 2.0**-50)
    return bound if bound == bound else math.inf


def survey(problem: Problem) -> Survey:
    """Prove the norms of a problem in O(n d), with one transfer to the host."""
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
    if keep is not None:  # padding is not looked at above, and NaN there would still reach the output
        finite = finite & torch.isfinite(k).all(dim=(1, 2)) & torch.isfinite(problem.v).all(dim=(1, 2))
    columns = [
        norm_up(q).amax(dim=(1, 2)),
        norm_up(kept_k).amax(dim=1),
        norm_up(q - mu[:, None, None]).amax(dim=(1, 2)),
        norm_up(centred_k).amax(dim=1),
        norm_up(mu),
        width,
        finite.to(work),
        torch.maximum(low.abs(), high.abs()).amax(dim=-1),
    ]
    return summed_up(problem, torch.stack(columns).tolist(), mu, c, (low, high))


def summed_up(
    problem: Problem,
    columns: list[list[float]],
    mu: Tensor,
    c: Tensor,
    values: tuple[Tensor, Tensor] | None,
) -> Survey:
    """A Survey from what was found, a number per head.

    These are norms of q, k, q−μ, k−c and μ, the range of the values or more, 1 if all is finite, and `value_size`.

    >>> q = torch.ones(1, 1, 2, 4)
    >>> columns = [[2.0], [2.0], [0.0], [0.0], [2.0], [1.0], [1.0], [1.0]]
    >>> summed_up(Problem(q, q[0], q[0], 0.5, False, None), columns, q[0, 0, :1], q[0, 0, :1], None).is_usable
    [True]
    """
    largest = torch.finfo(problem.working).max / (64 * max(1, problem.k.shape[1]))
    smallest = torch.finfo(problem.working).tiny * 2**40
    query, key, query_centred, key_centred, middle, size, finite, value_size = columns
    is_usable = [
        one == 1 and math.isfinite(total) and (value == 0 or smallest < value < largest)
        for one, value, total in zip(finite, size, map(sum, zip(*columns, strict=True)), strict=True)
    ]
    spread = [2 * score_bound(problem.scale, a, b) for a, b in zip(middle, key_centred, strict=True)]
    return Survey(query, key, query_centred, key_centred, spread, is_usable, value_size, mu, c, values)


def value_extremes(problem: Problem) -> tuple[Tensor, Tensor]:
    """Least and largest entry of every value column, over the keys that are kept: two [N, e]."""
    v = problem.v.to(problem.working)
    if problem.keep is None:
        low, high = v.aminmax(dim=1)
        return low, high
    padded = ~problem.keep[..., None]
    return v.masked_fill(padded, torch.inf).amin(dim=1), v.masked_fill(padded, -torch.inf).amax(dim=1)


def rounding_share(p: Minimax, bound: float, roundings: float, coarse: float, log_error: float) -> float:
    """What rounding may add to an output entry, as a share of its values' range; infinite where nothing is proved.

    Numerator and denominator are sums of terms |a_k| |t|^k w_j |v_j − mid| whose relative errors are at most θ, so each
    is off by θ·W·A, A = Σ |a_k| B^k. The denominator is at least W e^−B (1−ε), and |v_j − mid| ≤ range/2, hence

        x/(1−x)   with   x = θ · A e^B / (1−ε).

    `roundings` is θ in roundings of the sums, `coarse` what products of shorter operands add, `log_error` the
    absolute error of log w.
    """
    size = sum(abs(a) * bound**g for g, a in enumerate(p.coefficients))
    theta = 1.01 * (roundings + coarse) + math.expm1(min(log_error, 1.0))
    x = theta * size * math.exp(bound) / (1 - p.error)
    return x / (1 - x) if x < 0.5 else math.inf


@dataclass(frozen=True)
class MomentTerms:
    """|p(t) − λ e^t| ≤ level + slope·|t| + bend(B)·t² on [−B, B]; `bend` is Σ_k bends[k] B^k + λ B^power/… e^B."""

    level: float
    slope: float
    bends: tuple[float, ...]
    tail: float
    tail_power: int


def moment_terms(p: Minimax, is_pure: bool) -> MomentTerms:
    """The terms of the moment certificate, by comparing p with the series of λ e^t.

    λ scales p, which changes no output: λ = p(0) removes the level. Where exact exponentials are mixed in (causal
    diagonal blocks, not `is_pure`) λ = 1.
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
    """Σ_j w_j |p(t_ij) − λ e^t_ij| / Z′_i, a bound of |out′ − out| / range(v) once the row has been computed.

    out′ − out = Σ_j w_j (p(t_ij) − λ e^t_ij)(v_j − out)/Z′ exactly. `total` is W = Σ_j w_j, `second` is Σ_j w_j t_ij²
    (Cauchy and Schwarz bounds Σ w |t| by √(W·second)), `normaliser` Z′; all per row.
    """
    bend = terms.tail * row_bound**terms.tail_power * torch.exp(row_bound)
    for k, gap in enumerate(terms.bends):
        bend = bend + gap * row_bound**k
    return (terms.level * total + terms.slope * torch.sqrt(total * second) + bend * second) / normaliser
