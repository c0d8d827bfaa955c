"""The contract of every backend of the fast path: one function of q, k and v, whoever computes it.

`naive` is the definition in float64, `torch` runs everywhere, `triton` under its interpreter (TRITON_INTERPRET=1).
"""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from depthgauge.fast_attention.attention import decide, make_spec
from depthgauge.fast_attention.backends import Backward, Forward
from depthgauge.fast_attention.decide.decision import Decision
from depthgauge.fast_attention.naive import polynomial_attention, softmax_attention
from depthgauge.fast_attention.problem import Problem, checked
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.torch import backend as torch_backend
from depthgauge.fast_attention.triton import backend as triton_backend
from depthgauge.fast_attention.triton import gradient as triton_gradient

Run = Callable[[Spec, Problem], Tensor]
BLOCK = 128


def naive(spec: Spec, problem: Problem) -> Tensor:
    q, k, v = (x.double() for x in (problem.q, problem.k[:, None], problem.v[:, None]))
    keep = None if spec.keep is None else spec.keep[:, None]
    coefficients = torch.tensor(spec.coefficients, dtype=torch.float64)[:, None]
    centres = spec.query_centre.double()[:, None], spec.key_centre.double()[:, None]
    return polynomial_attention(q, k, v, coefficients, spec.scale, *centres, problem.causal, keep, BLOCK)


def in_torch(spec: Spec, problem: Problem) -> Tensor:
    return torch_backend.forward(spec, problem.q, problem.k, problem.v)[0]


def in_triton(spec: Spec, problem: Problem) -> Tensor:
    return triton_backend.forward(spec, problem.q, problem.k, problem.v)[0]


needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run here only with TRITON_INTERPRET=1"
)
BACKENDS = [
    pytest.param(naive, id="naive"),
    pytest.param(in_torch, id="torch"),
    pytest.param(in_triton, id="triton", marks=needs_interpreter),
]
PASSES = [
    pytest.param(torch_backend.forward, torch_backend.backward, id="torch"),
    pytest.param(triton_backend.forward, triton_gradient.backward, id="triton", marks=needs_interpreter),
]
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def _same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "CAUSAL_CHUNK", BLOCK)
    monkeypatch.setattr(triton_backend, "CAUSAL_BLOCK", BLOCK)


def draw(n: int = 150, m: int = 150, groups: int = 1, shift: float = 0.0, size: float = 0.09) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n + m)
    q = size * torch.randn(1, 2 * groups, n, 16, generator=generator) + shift
    k = size * torch.randn(1, 2, m, 16, generator=generator)
    return [q, k, torch.randn(1, 2, m, 16, generator=generator) + 2]


def settled(q: Tensor, k: Tensor, v: Tensor, **how: object) -> tuple[Spec, Problem, Decision]:
    """The spec of the fast path at degree 2."""
    request = checked(
        q, k, v, None, 0.0, bool(how.get("causal", False)), 1e-3, 1.0, how.get("padding"),  # type: ignore[arg-type]
        q.shape[1] != k.shape[1], "polynomial",
    )  # fmt: skip
    problem = request.flat()
    decision = decide(request, problem)
    degrees = {choice.polynomial.degree for choice in decision.choices if choice.polynomial is not None}
    assert degrees == {2}
    return make_spec(problem, decision, list(range(problem.heads)), 2), problem, decision


@pytest.mark.parametrize("run", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m", "groups", "shift"), [(150, 150, 1, 0.0), (40, 150, 1, 0.0), (300, 131, 2, 0.5)])
def test_every_backend_is_the_definition_and_keeps_the_guarantee(
    run: Run, causal: bool, n: int, m: int, groups: int, shift: float
) -> None:
    spec, problem, decision = settled(*draw(n, m, groups, shift), causal=causal)
    assert spec.exact_rows is None
    out = run(spec, problem).double()
    torch.testing.assert_close(out, naive(spec, problem), **CLOSE)
    exact = softmax_attention(
        problem.q.double(), problem.k.double()[:, None], problem.v.double()[:, None], 1.0, causal
    )  # fmt: skip
    width = problem.v.amax(1) - problem.v.amin(1)
    allowed = max(decision.rounding(head) for head in range(problem.heads)) + 1e-3
    assert bool(((out - exact).abs() <= allowed * width[:, None, None] + 1e-6 * exact.abs()).all())


@pytest.mark.parametrize("run", BACKENDS)
def test_the_order_of_keys_does_not_matter(run: Run) -> None:
    q, k, v = draw()
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    spec, problem, _ = settled(q, k, v)
    mixed = Problem(problem.q, problem.k[:, order], problem.v[:, order], 1.0, False, None)
    torch.testing.assert_close(run(spec, mixed), run(spec, problem), **CLOSE)


@pytest.mark.parametrize("run", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_values_pass_through_linearly_and_constants_exactly(run: Run, causal: bool) -> None:
    q, k, v = draw()
    spec, problem, _ = settled(q, k, v, causal=causal)
    constant, problem_c, _ = settled(q, k, torch.full_like(v, 7.0), causal=causal)
    torch.testing.assert_close(run(constant, problem_c).double(), torch.full_like(problem.v, 7.0).double()[:, None])
    double, problem_d, _ = settled(q, k, 2 * v + 1, causal=causal)
    torch.testing.assert_close(run(double, problem_d), 2 * run(spec, problem) + 1, **CLOSE)


@pytest.mark.parametrize("run", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_leaving_out(run: Run, causal: bool) -> None:
    q, k, v = draw()
    padding = torch.arange(150)[None] >= 140
    k[:, :, 140:], v[:, :, 140:] = 50.0, -1e3
    spec, problem, _ = settled(q, k, v, causal=causal, padding=padding)
    short, problem_s, _ = settled(q, k[:, :, :140], v[:, :, :140], causal=causal)
    torch.testing.assert_close(run(spec, problem), run(short, problem_s), **CLOSE)


@pytest.mark.parametrize("run", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_shared_keys_are_repeated_keys(run: Run, causal: bool) -> None:
    q, k, v = draw(groups=3)
    spec, problem, _ = settled(q, k, v, causal=causal)
    wide = settled(q, k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), causal=causal)
    torch.testing.assert_close(run(spec, problem).flatten(0, 1), run(*wide[:2])[:, 0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("run", BACKENDS)
def test_causal_rows_see_nothing_later(run: Run) -> None:
    q, k, v = draw()
    spec, problem, _ = settled(q, k, v, causal=True)
    out = run(spec, problem)
    torch.testing.assert_close(out[:, 0, 0].float(), problem.v[:, 0], **CLOSE)
    later = Problem(problem.q, problem.k, problem.v.clone(), 1.0, True, None)
    later.v[:, 140:] = 0.0
    torch.testing.assert_close(run(spec, later)[:, :, :140], out[:, :, :140], **CLOSE)


@pytest.mark.parametrize(("forward", "backward"), PASSES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m", "groups", "shift"), [(150, 150, 1, 0.0), (300, 131, 2, 0.5)])
def test_every_backend_has_the_gradients_of_the_definition(
    forward: Forward, backward: Backward, causal: bool, n: int, m: int, groups: int, shift: float
) -> None:
    spec, problem, _ = settled(*draw(n, m, groups, shift), causal=causal)
    given = problem.q, problem.k, problem.v
    out, _, saved = forward(spec, *given, True)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    leaves = [x.double().requires_grad_() for x in given]
    exact = naive(spec, Problem(*leaves, problem.scale, causal, problem.keep))
    true = torch.autograd.grad(exact, leaves, up.double())
    for one, other in zip(backward(spec, *given, saved, up), true, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2e-5


@pytest.mark.parametrize(("forward", "backward"), PASSES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_where_heads_and_tokens_lie_in_memory_does_not_matter(
    forward: Forward, backward: Backward, causal: bool, padded: bool, dtype: torch.dtype
) -> None:
    given = [x.to(dtype) for x in draw(140, 140)]
    padding = torch.arange(140)[None] % 5 == 3 if padded else None
    found = []
    for q, k, v in (given, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]):
        spec, problem, _ = settled(q, k, v, causal=causal, padding=padding)
        tensors = problem.q, problem.k, problem.v
        out, _, saved = forward(spec, *tensors, True)
        up = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        up = up if q.is_contiguous() else up.transpose(0, 2).contiguous().transpose(0, 2)
        found.append((out, *backward(spec, *tensors, saved, up)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
