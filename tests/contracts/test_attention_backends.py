"""The contract of every backend of the polynomial path: the same function of q, k and v.

`naive` is the definition in float64, `torch` runs on every device, and `triton` runs on a GPU or under its interpreter.
"""

from collections.abc import Callable

import pytest
import torch
from kernel_settings import DEVICE, checked, on_device
from naive_attention import polynomial_attention, softmax_attention
from torch import Tensor

from depthgauge.fast_attention.call import CPU, Tensors
from depthgauge.fast_attention.plan import TORCH_CPU, TORCH_GPU, TRITON, Decision, decide
from depthgauge.fast_attention.polynomial_path import CAUSAL_STEP, Backend, Batch, TorchBackend
from depthgauge.fast_attention.triton_backend import TritonBackend

Run = Callable[[Batch, Tensors], Tensor]
BLOCK = 128
TORCH = TorchBackend(CPU, causal_chunk=BLOCK)
KERNELS = TritonBackend(causal_block=BLOCK)


def naive(spec: Batch, problem: Tensors) -> Tensor:
    q, k, v = (x.double() for x in (problem.q, problem.k[:, None], problem.v[:, None]))
    keep = None if spec.padding is None else ~spec.padding[:, None]
    coefficients = torch.tensor(spec.coefficients, dtype=torch.float64, device=q.device)[:, None]
    centres = spec.query_centre.double()[:, None], spec.key_centre.double()[:, None]
    causal_block = BLOCK if spec.call.causal else None
    return polynomial_attention(q, k, v, coefficients, spec.call.scale, centres, keep, causal_block)


def in_torch(spec: Batch, problem: Tensors) -> Tensor:
    return TORCH.forward(spec, problem.q, problem.k, problem.v)[0]


def in_triton(spec: Batch, problem: Tensors) -> Tensor:
    return KERNELS.forward(spec, problem.q, problem.k, problem.v)[0]


FUNCTIONS = [
    pytest.param(naive, id="naive"),
    pytest.param(in_torch, id="torch"),
    pytest.param(in_triton, id="triton"),
]
BACKENDS = [
    pytest.param(TORCH, id="torch"),
    pytest.param(KERNELS, id="triton"),
]
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def draw(n: int = 150, m: int = 150, groups: int = 1, shift: float = 0.0, heads: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n + m)
    q = 0.09 * torch.randn(1, heads * groups, n, 16, generator=generator) + shift
    k = 0.09 * torch.randn(1, heads, m, 16, generator=generator)
    return [q, k, torch.randn(1, heads, m, 16, generator=generator) + 2]


def decided(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, padding: Tensor | None = None
) -> tuple[Batch, Tensors, Decision]:
    """Return the description of the polynomial path at degree 2, decided on the CPU, on the device of the kernels."""
    is_grouped = q.shape[1] != k.shape[1]
    call, flat = checked(
        q, k, v, is_causal=causal, scale=1.0, key_padding=padding, enable_gqa=is_grouped, force="polynomial"
    )
    decision = decide(call, flat)
    degrees = {choice.polynomial.degree for choice in decision.choices if choice.polynomial is not None}
    assert degrees == {2}
    spec = on_device(decision.batch(flat, range(call.heads)))
    assert spec.tensors is not None
    return spec, spec.tensors, decision


@pytest.mark.parametrize("run", FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m", "groups", "shift"), [(150, 150, 1, 0.0), (40, 150, 1, 0.0), (300, 131, 2, 0.5)])
def test_every_backend_computes_the_definition_within_the_guarantee(
    run: Run, causal: bool, n: int, m: int, groups: int, shift: float
) -> None:
    spec, problem, decision = decided(*draw(n, m, groups, shift, heads=2), causal=causal)
    assert spec.exact_rows is None
    out = run(spec, problem).double()
    torch.testing.assert_close(out, naive(spec, problem), **CLOSE)
    exact = softmax_attention(
        problem.q.double(), problem.k.double()[:, None], problem.v.double()[:, None], 1.0, causal
    )  # fmt: skip
    width = problem.v.amax(1) - problem.v.amin(1)
    allowed = max(decision.rounding(head) for head in range(spec.call.heads)) + 1e-3
    assert bool(((out - exact).abs() <= allowed * width[:, None, None] + 1e-6 * exact.abs()).all())


@pytest.mark.parametrize("run", FUNCTIONS)
def test_the_order_of_keys_does_not_matter(run: Run) -> None:
    q, k, v = draw()
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    spec, problem, _ = decided(q, k, v)
    mixed = problem._replace(k=problem.k[:, order], v=problem.v[:, order])
    torch.testing.assert_close(run(spec, mixed), run(spec, problem), **CLOSE)


@pytest.mark.parametrize("run", FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_output_is_linear_in_the_values_and_preserves_constants(run: Run, causal: bool) -> None:
    q, k, v = draw()
    spec, problem, _ = decided(q, k, v, causal=causal)
    constant, problem_c, _ = decided(q, k, torch.full_like(v, 7.0), causal=causal)
    torch.testing.assert_close(run(constant, problem_c).double(), torch.full_like(problem.v, 7.0).double()[:, None])
    double, problem_d, _ = decided(q, k, 2 * v + 1, causal=causal)
    torch.testing.assert_close(run(double, problem_d), 2 * run(spec, problem) + 1, **CLOSE)


@pytest.mark.parametrize("run", FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_keys_have_no_effect(run: Run, causal: bool) -> None:
    q, k, v = draw()
    padding = torch.arange(150)[None] >= 140
    k[:, :, 140:], v[:, :, 140:] = 50.0, -1e3
    spec, problem, _ = decided(q, k, v, causal=causal, padding=padding)
    short, problem_s, _ = decided(q, k[:, :, :140], v[:, :, :140], causal=causal)
    torch.testing.assert_close(run(spec, problem), run(short, problem_s), **CLOSE)


@pytest.mark.parametrize("run", FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_shared_keys_equal_repeated_keys(run: Run, causal: bool) -> None:
    q, k, v = draw(groups=2, heads=2)
    spec, problem, _ = decided(q, k, v, causal=causal)
    wide = decided(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), causal=causal)
    torch.testing.assert_close(run(spec, problem).flatten(0, 1), run(*wide[:2])[:, 0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("run", FUNCTIONS)
def test_causal_rows_ignore_later_keys(run: Run) -> None:
    q, k, v = draw()
    spec, problem, _ = decided(q, k, v, causal=True)
    out = run(spec, problem)
    torch.testing.assert_close(out[:, 0, 0].float(), problem.v[:, 0], **CLOSE)
    later = problem._replace(v=problem.v.clone())
    later.v[:, 140:] = 0.0
    torch.testing.assert_close(run(spec, later)[:, :, :140], out[:, :, :140], **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m", "groups", "shift", "heads"), [(140, 140, 1, 0.0, 2), (150, 131, 2, 0.5, 1)])
def test_every_backend_has_the_gradients_of_the_definition(
    backend: Backend, causal: bool, n: int, m: int, groups: int, shift: float, heads: int
) -> None:
    spec, problem, _ = decided(*draw(n, m, groups, shift, heads), causal=causal)
    given = problem.q, problem.k, problem.v
    out, _, saved = backend.forward(spec, *given, True)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    leaves = [x.double().requires_grad_() for x in given]
    exact = naive(spec, Tensors(*leaves, problem.padding))
    true = torch.autograd.grad(exact, leaves, up.double())
    for one, other in zip(backend.backward(spec, *given, saved, up), true, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("causal", "padded", "dtype"),
    [
        (False, False, torch.float16),
        (True, False, torch.float32),
        (False, True, torch.float32),
        (True, True, torch.float16),
    ],
)
def test_the_memory_layout_does_not_matter(backend: Backend, causal: bool, padded: bool, dtype: torch.dtype) -> None:
    n = 140 if causal else 100  # the blocks of the rows before, and one that is not full
    given = [x.to(dtype) for x in draw(n, n, heads=2)]
    padding = torch.arange(n)[None] % 5 == 3 if padded else None
    found = []
    for q, k, v in (given, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]):
        spec, problem, _ = decided(q, k, v, causal=causal, padding=padding)
        tensors = problem.q, problem.k, problem.v
        assert all(x.is_contiguous() == q.is_contiguous() for x in tensors)
        out, _, saved = backend.forward(spec, *tensors, True)
        up = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
        up = up if q.is_contiguous() else up.transpose(0, 2).contiguous().transpose(0, 2)
        found.append((out, *backend.backward(spec, *tensors, saved, up)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", [TORCH_CPU, TORCH_GPU, TRITON])
def test_every_instance_has_the_interface(backend: Backend) -> None:
    assert isinstance(backend, Backend)
    assert backend.rates.block % CAUSAL_STEP == 0  # the row bounds rely on it
    call, _ = checked(*draw())
    assert not backend.is_capturable(call)  # values of float32 are centred before the sums
