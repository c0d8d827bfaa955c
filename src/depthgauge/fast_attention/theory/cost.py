"""Predicted costs of exact and polynomial attention, in operations weighted by their speed.

Only the ratio of two costs matters, so the unit is one multiply or add of the exact kernel. The weights were fitted to
`benchmarks/attention_cpu.py` and `benchmarks/attention_dropin.py`.
"""

import math
from dataclasses import dataclass

from depthgauge.fast_attention.problem import Sizes


@dataclass(frozen=True)
class Rates:
    """The cost of operations, relative to a multiply-add of the exact kernel.

    `exponential` is the cost of an exp, `product` that of a multiply-add of the feature products, `build` that of
    computing one feature, and `token` that of bounding, centring and copying one coordinate. A call costs `call` more.
    `block` is the size of the exact blocks on a causal diagonal.
    """

    exponential: float
    product: float
    build: float
    token: float
    call: float
    block: int


CPU = Rates(exponential=12, product=2, build=37, token=300, call=6e7, block=256)
GPU_TORCH = Rates(exponential=8, product=150, build=500, token=2000, call=2e12, block=256)
GPU_TRITON = Rates(exponential=8, product=1.05, build=4, token=400, call=1e11, block=1024)


def feature_count(dim: int, degree: int) -> int:
    """Return C(d+g, g), the number of monomials of degree at most g in d variables.

    >>> feature_count(64, 2)
    2145
    """
    return math.comb(dim + degree, degree)


def exact_cost(sizes: Sizes, rates: Rates) -> float:
    """Return the cost of exact attention for one key head: scores, exponentials, and the sum over the values."""
    _, groups, n, m, d, e, *_ = sizes
    return 2.0 * groups * n * m * (d + e + rates.exponential) * (0.5 if sizes.causal else 1.0)


def polynomial_cost(sizes: Sizes, degree: int, exact_rows: int, rates: Rates) -> float:
    """Return the cost of the polynomial path for one key head: feature products, diagonal blocks and exact rows."""
    heads, groups, n, m, d, e, *_ = sizes
    f = feature_count(d, degree)
    tokens = groups * n + m
    cost = 2.0 * tokens * f * (rates.product * (e + 1) + rates.build)
    cost += 2.0 * tokens * d * rates.token
    if sizes.causal:
        cost += 2.0 * groups * n * min(n, rates.block) * (d + e + rates.exponential)
    cost += 2.0 * exact_rows * m * (d + e + rates.exponential)
    return cost + rates.call / heads
