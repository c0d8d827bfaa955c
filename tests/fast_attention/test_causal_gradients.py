"""Causal gradients in Triton against autograd of the definition, under Triton's interpreter (see test_kernels)."""

import math

import pytest
import torch
from kernel_settings import DTYPES, expected, needs_interpreter, setting
from torch import Tensor

from depthgauge.fast_attention.decide import decision as decisions
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton import backend as triton_backend
from depthgauge.fast_attention.triton import causal_gradient as triton_causal_gradient
from depthgauge.fast_attention.triton import gradient as triton_gradient

SETTINGS = {
    "some blocks": {"n": 300, "m": 300, "d": 16, "e": 16, "degree": 2},
    "less than a block": {"n": 77, "m": 77, "d": 16, "e": 32, "degree": 2},
    "whole blocks": {"n": 256, "m": 256, "d": 16, "e": 16, "degree": 2, "is_uneven": True},
    "fewer keys": {"n": 300, "m": 170, "d": 32, "e": 16, "degree": 2, "groups": 2, "padded": True},
    "rows after all keys": {"n": 520, "m": 100, "d": 16, "e": 16, "degree": 2, "groups": 3},
    "more keys": {"n": 200, "m": 300, "d": 16, "e": 32, "degree": 1, "shift": 0.5},
    "weights": {"n": 260, "m": 150, "d": 32, "e": 64, "degree": 2, "groups": 2, "padded": True, "shift": 0.5},
    "weights, degree 1": {"n": 260, "m": 260, "d": 32, "e": 16, "degree": 1, "groups": 2, "padded": True, "shift": 0.5},
    "long rows": {"n": 260, "m": 260, "d": 32, "e": 32, "degree": 2, "long_rows": True},
}
WIDE = {"n": 130, "m": 130, "d": 128, "e": 16, "degree": 2, "size": 0.5}


@pytest.fixture(autouse=True)
def _least_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "NEARLY", 1.0)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "CAUSAL_BLOCK", 128)


def arriving(spec: Spec, problem: Problem) -> Tensor:
    """A drawn gradient of the output."""
    shape = *problem.q.shape[:-1], problem.v.shape[-1]
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(problem.q.dtype)


def gradients(spec: Spec, problem: Problem, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of the kernels."""
    given = problem.q, problem.k, problem.v
    _, _, saved = triton_backend.forward(spec, *given)
    return triton_gradient.backward(spec, *given, saved, up)


def gaps(spec: Spec, problem: Problem, up: Tensor, found: tuple[Tensor, ...]) -> list[float]:
    """How far the gradients are from the definition's, relative; rows computed elsewhere hand nothing back."""
    leaves = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    up = up.double() if spec.exact_rows is None else up.double().masked_fill(spec.exact_rows[..., None], 0)
    true = torch.autograd.grad(expected(spec, problem, *leaves), leaves, up)
    largest = max(float(x.norm()) for x in true)  # of one key alone the gradient is 0
    return [
        float((one.double() - other).norm()) / max(float(other.norm()), 0.1 * largest)
        for one, other in zip(found, true, strict=True)
    ]


@needs_interpreter
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("dtype", "given"),
    [pytest.param(dtype, given, id=f"{name}-{dtype}") for dtype in DTYPES for name, given in SETTINGS.items()]
    + [pytest.param(torch.float16, WIDE, id="wide-torch.float16")],
)
def test_causal_gradients_are_those_of_the_definition(dtype: torch.dtype, given: dict[str, object]) -> None:
    spec, problem = setting(dtype, causal=True, **given)  # type: ignore[arg-type]
    up = arriving(spec, problem)
    found = gradients(spec, problem, up)
    assert [x.dtype for x in found] == [dtype] * 3
    assert [x.shape for x in found] == [x.shape for x in (problem.q, problem.k, problem.v)]
    assert max(gaps(spec, problem, up, found)) < (2e-6 if dtype == torch.float32 else 3e-3)
    if spec.exact_rows is not None:
        assert not bool(found[0][spec.exact_rows].any())
    if spec.keep is not None:
        assert not bool(found[1][~spec.keep].any())
        assert not bool(found[2][~spec.keep].any())


@needs_interpreter
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (129, 2)])
def test_few_tokens(n: int, m: int) -> None:  # of so few the scores are centred away; the spec is that of more
    spec, problem = setting(torch.float32, 200, 200, 16, 16, 2, causal=True)
    few = Problem(problem.q[:, :, :n], problem.k[:, :m], problem.v[:, :m], problem.scale, True, None)
    up = arriving(spec, few)
    assert max(gaps(spec, few, up, gradients(spec, few, up))) < 2e-6


@needs_interpreter
def test_blocks_of_their_real_size() -> None:
    spec, problem = setting(torch.float32, 1100, 1100, 16, 16, 2, causal=True)
    assert triton_backend.CAUSAL_BLOCK < 1100
    up = arriving(spec, problem)
    assert max(gaps(spec, problem, up, gradients(spec, problem, up))) < 2e-6


@needs_interpreter
@pytest.mark.usefixtures("small_blocks")
def test_turned_states_can_be_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, problem = setting(torch.float32, 400, 200, 16, 32, 2, causal=True, groups=2)
    up = arriving(spec, problem)
    at_once = gradients(spec, problem, up)
    monkeypatch.setattr(triton_causal_gradient, "TURNED_BYTES", 1)
    for one, other in zip(gradients(spec, problem, up), at_once, strict=True):
        assert torch.equal(one, other)


@needs_interpreter
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("power", [-12, 15])
def test_short_exponents_do_not_limit_the_gradients(power: int) -> None:
    spec, problem = setting(torch.float16, 520, 520, 16, 16, 2, causal=True)
    up = arriving(spec, problem)
    up = up / up.abs().max()
    scaled = torch.ldexp(up, torch.tensor(power)).to(torch.float16)
    found = [torch.ldexp(x.double(), torch.tensor(-power)) for x in gradients(spec, problem, scaled)]
    worst = gaps(spec, problem, torch.ldexp(scaled.double(), torch.tensor(-power)), tuple(found))
    assert max(worst) < 1e-2  # the results themselves are that coarse


@needs_interpreter
@pytest.mark.usefixtures("small_blocks")
def test_no_gradient_comes_from_earlier_rows_or_goes_to_later_keys() -> None:
    spec, problem = setting(torch.float32, 300, 300, 16, 16, 2, causal=True, groups=2)
    up = arriving(spec, problem)
    up[:, :, :200], up[:, :, 250:] = 0, 0
    dq, dk, dv = gradients(spec, problem, up)
    assert not bool(dq[:, :, :200].any() or dq[:, :, 250:].any() or dk[:, 250:].any() or dv[:, 250:].any())
    assert bool((dv[:, :250].abs().sum(-1) > 0).all())


def test_weights_of_later_rows() -> None:
    z = torch.tensor([[[1.0, 2, 4, 4, 2], [0.5, 4, 2, 8, 4]]])
    floor = triton_causal_gradient.floors(z, 2)
    assert floor.tolist() == [[0.5, 2.0, 2.0]]
    q, k = torch.zeros(2, 5, 16), torch.zeros(1, 5, 16)
    given = triton_causal_gradient.Given(q, q, z[0], z[0], k, k, None, floor, 1.0, 2)
    after = triton_causal_gradient.weights_after(given, 3)
    assert after.tolist() == [[4 / 2 + 2 / 2, 2 / 2, 1.0]]
    assert math.prod(triton_causal_gradient.weights_after(given, 2).shape) == 2
