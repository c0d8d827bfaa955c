"""Causal gradients in Triton against autograd of the definition."""

from dataclasses import replace

import pytest
import torch
from kernel_settings import DEVICE, DTYPES, SLOW_WITHOUT_GPU, Setting, double_leaves, expected, with_dtypes
from torch import Tensor

from depthgauge.fast_attention import plan
from depthgauge.fast_attention.call import Tensors
from depthgauge.fast_attention.polynomial_path import Batch
from depthgauge.fast_attention.triton_backend import TritonBackend

SETTINGS = {
    "some blocks": Setting(n=300, m=300, d=16, e=16, degree=2, causal=True),
    "less than a block": Setting(n=77, m=77, d=32, e=64, degree=2, causal=True),
    "whole blocks": Setting(n=256, m=256, d=16, e=16, degree=2, is_uneven=True, causal=True),
    "fewer keys": Setting(n=260, m=140, d=16, e=16, degree=2, groups=2, padded=True, causal=True),
    "rows after all keys": Setting(n=260, m=100, d=16, e=16, degree=2, groups=3, causal=True),
    "more keys": Setting(n=200, m=300, d=32, e=64, degree=1, shift=0.5, causal=True),
    "weights": Setting(n=160, m=150, d=32, e=64, degree=2, groups=2, padded=True, shift=0.5, causal=True),
    "weights, degree 1": Setting(n=260, m=260, d=64, e=32, degree=1, groups=2, padded=True, shift=0.5, causal=True),
    "long rows": Setting(n=260, m=260, d=16, e=16, degree=2, long_rows=True, causal=True),
}
WIDE = Setting(n=66, m=66, d=128, e=16, degree=2, size=0.5, causal=True)
GAP = {torch.float32: 2e-6 if DEVICE.type == "cpu" else 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
BLOCK = 128
SMALL_BLOCKS = TritonBackend(causal_block=BLOCK)


@pytest.fixture(autouse=True)
def _least_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "NEARLY", 1.0)


def output_gradient(problem: Tensors) -> Tensor:
    """Draw a gradient of the output."""
    shape = *problem.q.shape[:-1], problem.v.shape[-1]
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(problem.q.device, problem.q.dtype)


def gradients(
    spec: Batch, problem: Tensors, up: Tensor, backend: TritonBackend = SMALL_BLOCKS
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the kernels."""
    given = problem.q, problem.k, problem.v
    _, _, saved = backend.forward(spec, *given)
    return backend.backward(spec, *given, saved, up)


def gaps(spec: Batch, problem: Tensors, up: Tensor, found: tuple[Tensor, ...], block: int = BLOCK) -> list[float]:
    """Return the relative distances to the gradients of the definition. Exact rows have no gradient here."""
    leaves = double_leaves(problem)
    up = up.double() if spec.exact_rows is None else up.double().masked_fill(spec.exact_rows[..., None], 0)
    true = torch.autograd.grad(expected(spec, leaves, block), leaves, up)
    largest = max(float(x.norm()) for x in true)  # the gradient of a single key is 0
    return [
        float((one.double() - other).norm()) / max(float(other.norm()), 0.1 * largest)
        for one, other in zip(found, true, strict=True)
    ]


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "dtype"), with_dtypes(SETTINGS, in_half=("some blocks", "more keys", "long rows")))
def test_causal_gradients_are_those_of_the_definition(name: str, dtype: torch.dtype) -> None:
    check_gradients(SETTINGS[name], dtype)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_wide_heads_have_the_gradients_of_the_definition(dtype: torch.dtype) -> None:
    check_gradients(WIDE, dtype)


def check_gradients(setting: Setting, dtype: torch.dtype) -> None:
    spec, problem = setting.draw(dtype)
    up = output_gradient(problem)
    found = gradients(spec, problem, up)
    assert [x.dtype for x in found] == [dtype] * 3
    assert [x.shape for x in found] == [x.shape for x in (problem.q, problem.k, problem.v)]
    assert max(gaps(spec, problem, up, found)) < GAP[dtype]
    if spec.exact_rows is not None:
        assert not bool(found[0][spec.exact_rows].any())
    if spec.padding is not None:
        assert not bool(found[1][spec.padding].any())
        assert not bool(found[2][spec.padding].any())


@pytest.mark.kernels
@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (129, 2)])
def test_few_tokens(n: int, m: int) -> None:
    # Centring removes the scores of so few tokens, so the description is that of a longer problem.
    spec, problem = Setting(n=200, m=200, d=16, e=16, degree=2, causal=True).draw(torch.float32)
    few = problem._replace(q=problem.q[:, :, :n], k=problem.k[:, :m], v=problem.v[:, :m])
    spec = replace(spec, call=spec.call._replace(n=n, m=m), tensors=few)
    up = output_gradient(few)
    assert max(gaps(spec, few, up, gradients(spec, few, up))) < GAP[torch.float32]


@pytest.mark.kernels
@pytest.mark.parametrize("n", [pytest.param(1100, marks=SLOW_WITHOUT_GPU)])
def test_blocks_of_the_default_size(n: int) -> None:
    backend = TritonBackend()
    block = backend.causal_block
    spec, problem = Setting(n=n, m=n, d=16, e=16, degree=2, causal=True).draw(torch.float32)
    assert 1 < n / block < 2
    up = output_gradient(problem)
    assert max(gaps(spec, problem, up, gradients(spec, problem, up, backend), block)) < GAP[torch.float32]


@pytest.mark.kernels
def test_turned_states_can_be_computed_one_at_a_time() -> None:
    spec, problem = Setting(n=260, m=260, d=16, e=16, degree=2, causal=True).draw(torch.float32)
    up = output_gradient(problem)
    at_once = gradients(spec, problem, up)
    little = TritonBackend(causal_block=BLOCK, turned_bytes=1)
    for one, other in zip(gradients(spec, problem, up, little), at_once, strict=True):
        assert torch.equal(one, other)


@pytest.mark.kernels
@pytest.mark.parametrize("power", [-12, 15])
def test_the_range_of_float16_does_not_limit_gradients(power: int) -> None:
    spec, problem = Setting(n=520, m=520, d=16, e=16, degree=2, causal=True).draw(torch.float16)
    up = output_gradient(problem)
    up = up / up.abs().max()
    scaled = (up.double() * 2.0**power).to(torch.float16)
    found = [x.double() * 2.0**-power for x in gradients(spec, problem, scaled)]
    worst = gaps(spec, problem, scaled.double() * 2.0**-power, tuple(found))
    assert max(worst) < 1e-2  # the resolution of the results themselves


@pytest.mark.kernels
def test_gradients_respect_causality() -> None:
    spec, problem = Setting(n=300, m=300, d=16, e=16, degree=2, causal=True, groups=2).draw(torch.float32)
    up = output_gradient(problem)
    up[:, :, :200], up[:, :, 250:] = 0, 0
    dq, dk, dv = gradients(spec, problem, up)
    assert not bool(dq[:, :, :200].any() or dq[:, :, 250:].any() or dk[:, 250:].any() or dv[:, 250:].any())
    assert bool((dv[:, :250].abs().sum(-1) > 0).all())
