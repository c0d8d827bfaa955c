"""What exact and polynomial attention are predicted to cost, in operations weighted by how fast they run.

Only the ratio decides, so one unit is one multiply or add of the exact kernel. The weights were fitted to
`benchmarks/attention_cpu.py` and `benchmarks/attention_gpu.py`.
"""

from dataclasses import dataclass

from depthgauge.fast_attention.features import feature_count
from depthgauge.fast_attention.problem import Problem


@dataclass(frozen=True)
class Rates:
    """`exponential`: multiply-adds an exp is worth; `product`, `build`: a multiply-add of the feature products and the
    making of one feature, against one of the exact kernel; `token`: proving B, centring and laying out, for every
    coordinate; `call`: what one call costs beyond that, `repeated` where it can follow a Route, `trained` with a
    backward pass; `block`: the size of the exact blocks on a causal diagonal."""

    exponential: float
    product: float
    build: float
    token: float
    call: float
    repeated: float
    trained: float
    block: int


CPU = Rates(exponential=12, product=2, build=37, token=300, call=6e7, repeated=6e7, trained=6e7, block=256)
GPU_TORCH = Rates(exponential=8, product=150, build=500, token=2000, call=2e12, repeated=2e12, trained=2e12, block=256)
GPU_TRITON = Rates(
    exponential=8, product=1.05, build=4, token=400, call=2.2e11, repeated=5e10, trained=3.3e11, block=1024
)  # fmt: skip


def exact_cost(problem: Problem, rates: Rates) -> float:
    """Operations of exact attention for one key head: scores, exponentials, and the sum over the values."""
    groups, n, d = problem.q.shape[1:]
    m, e = problem.v.shape[1:]
    return 2.0 * groups * n * m * (d + e + rates.exponential) * (0.5 if problem.causal else 1.0)


def polynomial_cost(problem: Problem, degree: int, exact_rows: int, rates: Rates, call: float) -> float:
    """Operations of the fast path for one key head: both feature products, diagonal blocks, rows done exactly.

    `call` is what a call of this sort costs besides, one of the three in `rates`.
    """
    groups, n, d = problem.q.shape[1:]
    m, e = problem.v.shape[1:]
    f = feature_count(d, degree)
    tokens = groups * n + m
    cost = 2.0 * tokens * f * (rates.product * (e + 1) + rates.build)
    cost += 2.0 * tokens * d * rates.token
    if problem.causal:
        cost += 2.0 * groups * n * min(n, rates.block) * (d + e + rates.exponential)
    cost += 2.0 * exact_rows * m * (d + e + rates.exponential)
    return cost + call / problem.heads
