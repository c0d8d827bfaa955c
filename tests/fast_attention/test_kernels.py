"""The Triton kernels against the definition: on a GPU, or under Triton's interpreter without one."""

import pytest
import torch
from kernel_settings import DEVICE, Setting, checked, double_leaves, expected, with_dtypes
from naive_attention import softmax_attention

from depthgauge.fast_attention import plan as plan_module
from depthgauge.fast_attention.attention import attention_plan
from depthgauge.fast_attention.bounds import minimax, output_error, share_beyond, survey
from depthgauge.fast_attention.call import GuaranteeError
from depthgauge.fast_attention.launches import WIDTHS, is_supported, programs, slots
from depthgauge.fast_attention.plan import decide
from depthgauge.fast_attention.triton_backend import TritonBackend

SETTINGS = [
    Setting(n=70, m=70, d=16, e=16, degree=2),
    Setting(n=70, m=200, d=32, e=64, degree=1),
    Setting(n=33, m=150, d=64, e=32, degree=2),
    Setting(n=65, m=131, d=32, e=32, degree=2, groups=2, padded=True),
    Setting(n=65, m=131, d=32, e=64, degree=2, shift=0.5),
    Setting(n=65, m=131, d=16, e=16, degree=1, groups=2, padded=True, shift=0.5),
    Setting(n=20, m=130, d=128, e=32, degree=1),
]
CAUSAL = [
    Setting(n=300, m=300, d=16, e=16, degree=2, causal=True),
    Setting(n=300, m=170, d=32, e=64, degree=2, groups=2, padded=True, causal=True),
    Setting(n=200, m=300, d=64, e=32, degree=1, shift=0.5, causal=True),
]
OUTPUT = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GRADIENT = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
BLOCK = 128


@pytest.fixture(autouse=True)
def _least_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "NEARLY", 1.0)


@pytest.fixture
def backend() -> TritonBackend:
    """A backend with small causal blocks, so that short sequences have several."""
    return TritonBackend(causal_block=BLOCK)


@pytest.mark.kernels
@pytest.mark.parametrize(("setting", "dtype"), with_dtypes(SETTINGS, in_half=(SETTINGS[0], SETTINGS[3], SETTINGS[5])))
def test_forward_and_gradients_are_the_definition(setting: Setting, dtype: torch.dtype, backend: TritonBackend) -> None:
    check_definition(setting, dtype, backend)


def check_definition(setting: Setting, dtype: torch.dtype, backend: TritonBackend) -> None:
    """Compare the output and the gradients of the kernels with the definition."""
    spec, problem = setting.draw(dtype)
    out, z, saved = backend.forward(spec, problem.q, problem.k, problem.v)
    assert out.dtype == dtype
    leaves = double_leaves(problem)
    exact = expected(spec, leaves, BLOCK)
    torch.testing.assert_close(out.double(), exact.detach(), rtol=OUTPUT[dtype], atol=OUTPUT[dtype])
    assert z is not None
    assert bool((z > 0).all())
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    true = torch.autograd.grad(exact, leaves, up.double())
    ours = backend.backward(spec, problem.q, problem.k, problem.v, saved, up)
    for one, other in zip(ours, true, strict=True):
        assert one.dtype == dtype
        assert float((one.double() - other).norm() / other.norm()) < GRADIENT[dtype]


@pytest.mark.kernels
@pytest.mark.parametrize(("setting", "dtype"), with_dtypes(CAUSAL, in_half=CAUSAL[:2]))
def test_causal_is_the_definition(setting: Setting, dtype: torch.dtype, backend: TritonBackend) -> None:
    spec, problem = setting.draw(dtype)
    out, _, _ = backend.forward(spec, problem.q, problem.k, problem.v)
    exact = expected(spec, double_leaves(problem), BLOCK).detach()
    close = 1.5 * OUTPUT[dtype] if dtype != torch.float32 else OUTPUT[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=close, atol=close)


PAIRS = [(d, e) for d in WIDTHS for e in WIDTHS if is_supported(torch.float32, d, e, 2)]


@pytest.mark.gpu  # an interpreter cannot find errors of the compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "e"), PAIRS)
def test_all_widths_of_float32(d: int, e: int, causal: bool, backend: TritonBackend) -> None:
    size = {64: 0.75, 128: 0.5}.get(d, 1.0)
    setting = Setting(n=300, m=260, d=d, e=e, degree=2, groups=2, causal=causal, size=size)
    check_definition(setting, torch.float32, backend)


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NaN inputs in the numpy of the interpreter
@pytest.mark.parametrize(("n", "m", "d", "e"), [(300, 500, 16, 32), (1000, 130, 64, 16), (1, 1, 32, 16)])
def test_the_survey_kernel_proves_the_same_bounds(n: int, m: int, d: int, e: int, backend: TritonBackend) -> None:
    generator = torch.Generator().manual_seed(n)
    q = (torch.randn(1, 2, n, d, generator=generator) + 1).to(DEVICE)
    k = (torch.randn(1, 2, m, d, generator=generator) - 2).to(DEVICE)
    v = torch.randn(1, 2, m, e, generator=generator).to(DEVICE)
    call, problem = checked(q, k, v, tolerance=1e-2)
    found, reference = backend.survey(call, problem), survey(call, problem)
    for head in range(2):
        exact_q, exact_k = problem.q[head, 0].double(), problem.k[head].double()
        for bound, true in (
            (found.query[head], exact_q.norm(dim=-1).max()),
            (found.key[head], exact_k.norm(dim=-1).max()),
            (found.query_centred[head], (exact_q - found.query_centre[head].double()).norm(dim=-1).max()),
            (found.key_centred[head], (exact_k - found.key_centre[head].double()).norm(dim=-1).max()),
        ):
            assert float(true) <= bound <= float(true) * (1 + 1e-4) + 1e-15
    assert found.query == pytest.approx(reference.query, rel=1e-5)
    assert found.key == pytest.approx(reference.key, rel=1e-5)
    for tensor in (q, k, v):
        for bad in (float("nan"), float("inf")):
            changed = tensor.clone()
            changed[0, 1, -1, 3] = bad
            given = [changed if x is tensor else x for x in (q, k, v)]
            assert backend.survey(*checked(*given, tolerance=1e-2)).is_usable == [True, False]


@pytest.mark.kernels
@pytest.mark.parametrize(("groups", "n", "m"), [(1, 300, 700), (3, 240, 300), (2, 2600, 260), (1, 1, 900), (1, 300, 2)])
def test_a_glance_proves_the_same_share_in_torch_and_in_a_kernel(
    groups: int, n: int, m: int, backend: TritonBackend
) -> None:
    """No share is larger than that of the rows whose B_i is beyond the bound, with any centres."""
    generator = torch.Generator().manual_seed(n)
    q = (torch.randn(1, 2 * groups, n, 16, generator=generator) + 2).to(DEVICE)
    q[:, :, ::5] *= 0.01
    k = (torch.randn(1, 2, m, 16, generator=generator) - 1).to(DEVICE)
    call, problem = checked(q, k, k, enable_gqa=groups > 1)
    norms = problem.q.norm(dim=-1), (problem.q - problem.q.mean(dim=(1, 2), keepdim=True)).norm(dim=-1)
    keys = problem.k.norm(dim=-1), (problem.k - problem.k.mean(dim=1, keepdim=True)).norm(dim=-1)
    scores = torch.minimum(*norms) * torch.minimum(*(x.amax(dim=1) for x in keys))[:, None, None] / 4
    for bound in (0.01, 2.0, 3.0, 100.0):
        true = (scores > bound).float().mean(dim=(1, 2)).min()
        shares = backend.look(call, problem, bound)(), share_beyond(call, problem, bound)
        assert max(shares) <= float(true) + 1e-6
        if min(n, m) > 200:
            assert min(shares) > 0.3 or bound > 1
            assert (max(shares) > 0) == (bound < 10)
    problem.q[1] = torch.nan
    assert backend.look(call, problem, 0.01)() == share_beyond(call, problem, 0.01) == 0


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_every_pair_of_tiles_is_summed_once(dim: int) -> None:
    tiles = dim // 16
    pairs = [tuple(sorted(pair)) for _, *pair in slots(dim)]
    assert sorted(pairs) == [(a, b) for a in range(tiles) for b in range(a, tiles)]
    assert len({slot for slot, _, _ in slots(dim)}) == len(pairs)
    assert len(programs(dim)) == (len(pairs) + 1) // 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_rounding_allowance_grows_with_the_number_of_roundings(dtype: torch.dtype) -> None:
    tensor = torch.zeros(1, 2, 1024, 64, dtype=dtype)
    call, _ = checked(tensor, tensor, tensor)
    small, large = (
        [TritonBackend().rounding(call, minimax(2, bound), bound, centring, 0.0) for centring in range(3)]
        for bound in (0.05, 0.3)
    )
    assert small == sorted(small)
    assert all(one < other for one, other in zip(small, large, strict=True))
    assert large[0] < {torch.bfloat16: 6e-3, torch.float16: 3e-3, torch.float32: 1e-3}[dtype]


@pytest.mark.kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shift", "is_weighted"), [(0.2, True), (0.3, True), (3.0, False)])
def test_weights_below_the_range_of_float16_are_not_used(
    shift: float, is_weighted: bool, causal: bool, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "backend_for", lambda call, degree: backend)
    generator = torch.Generator().manual_seed(5)
    n, d = 300, 16
    # log w falls along the sequence by the whole range that is allowed: late causal rows see the smallest weights too.
    slope = torch.linspace(-0.3, 0.3, n)[:, None] * torch.ones(d) / 4 + 0.01 * torch.randn(n, d, generator=generator)
    q = (0.01 * torch.randn(1, 1, n, d, generator=generator) + shift).half().to(DEVICE)
    k, v = slope[None, None].half().to(DEVICE), torch.randn(1, 1, n, d, generator=generator).half().to(DEVICE)
    force = "polynomial" if is_weighted else None
    call, problem = checked(q, k, v, is_causal=causal, tolerance=1e-2, scale=4.0, force=force)
    decision = decide(call, problem)
    (choice,) = decision.choices
    assert decision.survey.spread[0] > (2.0 if is_weighted else 10.0)
    assert (choice.polynomial is not None and choice.centring == 2) == is_weighted
    if is_weighted and choice.polynomial is not None:
        spec = decision.batch(problem, [0])
        out, _, _ = backend.forward(spec, problem.q, problem.k, problem.v)
        exact = softmax_attention(q.double(), k.double(), v.double(), 4.0, causal)
        width = (v.amax(-2) - v.amin(-2)).double()
        allowed = (output_error(choice.polynomial.error) + decision.rounding(0)) * width + 2.0**-9 * exact.abs()
        assert bool(((out.double() - exact).abs() <= allowed).all())
        assert decision.rounding(0) < 0.1


def test_heads_with_a_large_rounding_allowance_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    triton, torch_gpu = plan_module.TRITON, plan_module.TORCH_GPU
    monkeypatch.setattr(plan_module, "backend_for", lambda _, g: triton if g in (1, 2) else torch_gpu)
    monkeypatch.setattr(TritonBackend, "survey", lambda _, call, tensors: survey(call, tensors))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 64, generator=generator).bfloat16() for _ in range(3))
    fine, coarse = (0.5 / float(q.norm(dim=-1).max()) ** 2, 2.2 / float(q.norm(dim=-1).max()) ** 2)
    plan = attention_plan
    kept = plan(q, k, v, tolerance=0.3, is_causal=True, scale=fine, force="polynomial")
    assert kept.path == "polynomial"
    assert kept.rounding <= plan_module.LARGEST_ROUNDING
    refused = plan(q, k, v, tolerance=0.3, is_causal=True, scale=coarse)
    assert refused.path == "exact"
    assert "rounding in bfloat16" in refused.heads[0].why
    with pytest.raises(GuaranteeError, match="longer dtype"):
        plan(q, k, v, tolerance=0.3, is_causal=True, scale=coarse, force="polynomial")


@pytest.mark.kernels
def test_causal_sums_of_large_values_fit_into_float16(backend: TritonBackend) -> None:
    # All keys of a block are parallel, and the sum of 128 values of 8000 is beyond the range of float16.
    signs = 1 - 2 * (torch.arange(500) % 2).float()
    q = torch.zeros(1, 1, 500, 16).index_fill_(-1, torch.tensor([0]), 0.3) * signs[:, None]
    k = torch.zeros(1, 1, 500, 16).index_fill_(-1, torch.tensor([0]), 0.3) * signs.roll(1)[:, None]
    v = torch.where(torch.arange(500) % 10 == 3, -8000.0, 8000.0)[:, None].expand(1, 1, 500, 16)
    q, k, v = (x.half().contiguous().to(DEVICE) for x in (q, k, v))
    call, problem = checked(q, k, v, is_causal=True, tolerance=1e-2, scale=5.0, force="polynomial")
    decision = decide(call, problem)
    polynomial = decision.choices[0].polynomial
    assert polynomial is not None
    assert polynomial.degree == 2
    out, _, _ = backend.forward(decision.batch(problem, [0]), problem.q, problem.k, problem.v)
    exact = softmax_attention(q.double(), k.double(), v.double(), 5.0, True)
    allowed = (output_error(polynomial.error) + backend.rounding(call, polynomial, 0.46, 1, 0.0)) * 16000
    assert float((out.double() - exact).abs().max()) <= allowed + 2.0**-9 * 8000
