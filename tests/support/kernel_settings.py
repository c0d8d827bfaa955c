"""Problems for the Triton kernels under Triton's interpreter, and the definition they are compared with."""

import os

import pytest
import torch
from torch import Tensor

from depthgauge.fast_attention.attention import decide, make_spec
from depthgauge.fast_attention.naive import polynomial_attention
from depthgauge.fast_attention.problem import Problem, checked
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton import backend as triton_backend

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run here only with TRITON_INTERPRET=1"
)
DTYPES = [torch.float32, torch.float16]


def setting(
    dtype: torch.dtype, n: int, m: int, d: int, e: int, degree: int, *, groups: int = 1, causal: bool = False,
    padded: bool = False, shift: float = 0.0, long_rows: bool = False, is_uneven: bool = False, size: float = 1.0,
    seed: int = 0,
) -> tuple[Spec, Problem]:  # fmt: skip
    """A drawn problem and the spec of its fast path at the degree wanted, for a tolerance that allows it.

    Scores are `size` times the usual ones of the degree; `long_rows`: some queries are too long for the polynomial;
    `is_uneven`: heads have polynomials of their own.
    """
    generator = torch.Generator().manual_seed(seed)
    factor = ({1: 0.004, 2: 0.06}[degree] * size / d**0.5) ** 0.5
    q = (factor * torch.randn(1, 2 * groups, n, d, generator=generator) + shift).to(dtype)
    k = (factor * torch.randn(1, 2, m, d, generator=generator) - shift).to(dtype)
    v = (torch.randn(1, 2, m, e, generator=generator) + 3).to(dtype)
    if long_rows:
        q[:, :, 7::50] *= 30
    if is_uneven:
        k[:, 1] *= 0.75
    padding = (torch.arange(m) % 5 == 3)[None] if padded else None
    request = checked(q, k, v, None, 0.0, causal, 1e-2, 1.0, padding, groups > 1, "polynomial")
    problem = request.flat()
    decision = decide(request, problem)
    degrees = {None if choice.polynomial is None else choice.polynomial.degree for choice in decision.choices}
    assert degrees == {degree}
    assert (decision.choices[0].centring == 2) == (shift > 0 or long_rows)
    spec = make_spec(problem, decision, list(range(problem.heads)), degree)
    assert (spec.exact_rows is not None) == long_rows
    assert not is_uneven or len(set(spec.coefficients)) > 1
    return spec, problem


def expected(spec: Spec, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition in float64, with exact blocks of the kernels' size on the diagonal."""
    keep = None if spec.keep is None else spec.keep[:, None]
    return polynomial_attention(
        q, k[:, None], v[:, None], torch.tensor(spec.coefficients, dtype=torch.float64)[:, None], spec.scale,
        spec.query_centre.double()[:, None], spec.key_centre.double()[:, None], problem.causal, keep,
        triton_backend.CAUSAL_BLOCK,
    )  # fmt: skip
