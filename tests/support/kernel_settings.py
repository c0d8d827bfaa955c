"""Drawn problems for the Triton kernels, and the definition that the kernels are compared with.

With a GPU the kernels run on it. Without a GPU they run under Triton's interpreter on the CPU (see conftest.py), which
is exact for float32 and float16 but wrong for bfloat16 products. bfloat16 is therefore marked `gpu`.
"""

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from naive_attention import polynomial_attention
from torch import Tensor

from depthgauge.fast_attention.call import Call, Tensors, call_of
from depthgauge.fast_attention.plan import decide
from depthgauge.fast_attention.polynomial_path import Batch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.float16, BFLOAT16]
SLOW_WITHOUT_GPU = [] if DEVICE.type == "cuda" else [pytest.mark.soak]
"""Marks of a test that takes most of a minute under the interpreter."""


def with_dtypes(settings: Iterable[Any], in_half: Collection[Any]) -> list[Any]:
    """Return every setting with every dtype.

    The interpreter takes seconds for a setting. It computes float16 with the same code as float32, so that without a
    GPU only the settings `in_half` are computed in float16 by `make test`, and the others by `make soak`.
    """
    found: list[Any] = []
    for setting in settings:
        is_kept = DEVICE.type == "cuda" or setting in in_half
        half = pytest.param(setting, torch.float16, marks=[] if is_kept else SLOW_WITHOUT_GPU)
        found += [(setting, torch.float32), half, pytest.param(setting, torch.bfloat16, marks=pytest.mark.gpu)]
    return found


def _moved(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(DEVICE)


def on_device(spec: Batch) -> Batch:
    """Return a copy with all tensors on the device of the kernels."""

    survey = copy.copy(spec.survey)
    survey.query_centre, survey.key_centre = spec.survey.query_centre.to(DEVICE), spec.survey.key_centre.to(DEVICE)
    survey.values = None
    assert spec.tensors is not None
    tensors, call = Tensors(*map(_moved, spec.tensors)), spec.call._replace(device=DEVICE)  # type: ignore[arg-type]
    return replace(spec, call=call, exact_rows=_moved(spec.exact_rows), survey=survey, tensors=tensors)


def checked(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, key_padding: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, tolerance: float = 1e-3, scale: float | None = None,
    enable_gqa: bool = False, force: str | None = None,
) -> tuple[Call, Tensors]:  # fmt: skip
    """Return the call and the flat tensors of these arguments of `attention`."""
    flags = dropout_p, is_causal, tolerance, scale, enable_gqa, force
    given, call = call_of(Tensors(q, k, v, key_padding, attn_mask), flags)
    return call, given.flat(call)


@dataclass(frozen=True)
class Setting:
    """A drawn problem with two key heads, for a tolerance that allows polynomials of `degree`.

    The scores are `size` times the usual scores of the degree. With `long_rows`, some queries are too long for the
    polynomial. With `is_uneven`, the heads have different polynomials.
    """

    n: int
    m: int
    d: int
    e: int
    degree: int
    groups: int = 1
    causal: bool = False
    padded: bool = False
    shift: float = 0.0
    long_rows: bool = False
    is_uneven: bool = False
    size: float = 1.0

    def draw(self, dtype: torch.dtype) -> tuple[Batch, Tensors]:
        """Return the batch of all heads, decided on the CPU, and its tensors."""
        generator = torch.Generator().manual_seed(0)
        factor = ({1: 0.004, 2: 0.06}[self.degree] * self.size / self.d**0.5) ** 0.5
        q = (factor * torch.randn(1, 2 * self.groups, self.n, self.d, generator=generator) + self.shift).to(dtype)
        k = (factor * torch.randn(1, 2, self.m, self.d, generator=generator) - self.shift).to(dtype)
        v = (torch.randn(1, 2, self.m, self.e, generator=generator) + 3).to(dtype)
        if self.long_rows:
            q[:, :, 7::50] *= 30
        if self.is_uneven:
            k[:, 1] *= 0.75
        padding = (torch.arange(self.m) % 5 == 3)[None] if self.padded else None
        call, flat = checked(
            q, k, v, is_causal=self.causal, tolerance=1e-2, scale=1.0, key_padding=padding, enable_gqa=self.groups > 1,
            force="polynomial",
        )  # fmt: skip
        decision = decide(call, flat)
        degrees = {None if choice.polynomial is None else choice.polynomial.degree for choice in decision.choices}
        assert degrees == {self.degree}
        assert (decision.choices[0].centring == 2) == (self.shift > 0 or self.long_rows)
        spec = decision.batch(flat, range(call.heads))
        assert (spec.exact_rows is not None) == self.long_rows
        assert not self.is_uneven or len(set(spec.coefficients)) > 1
        spec = on_device(spec)
        assert spec.tensors is not None
        return spec, spec.tensors


def expected(spec: Batch, tensors: tuple[Tensor, Tensor, Tensor], block: int) -> Tensor:
    """Compute the definition in float64 for q, k and v, with exact causal blocks of the given size."""
    q, k, v = tensors
    keep = None if spec.padding is None else ~spec.padding[:, None]
    coefficients = torch.tensor(spec.coefficients, dtype=torch.float64, device=q.device)[:, None]
    centres = spec.query_centre.double()[:, None], spec.key_centre.double()[:, None]
    causal_block = block if spec.call.causal else None
    return polynomial_attention(q, k[:, None], v[:, None], coefficients, spec.call.scale, centres, keep, causal_block)


def double_leaves(problem: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in float64 as leaves that require gradients."""
    q, k, v = (x.double().requires_grad_() for x in (problem.q, problem.k, problem.v))
    return q, k, v
