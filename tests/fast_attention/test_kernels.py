"""The Triton kernels under Triton's interpreter, in float32 and float16; bfloat16 is checked on the GPU.

Run by `TRITON_INTERPRET=1 pytest tests/fast_attention/test_kernels.py`: the variable must be set before Triton is
imported, so these tests are a step of their own.
"""

import pytest
import torch
from kernel_settings import DTYPES, expected, needs_interpreter, setting

from depthgauge.fast_attention import attention as room
from depthgauge.fast_attention import backends
from depthgauge.fast_attention.attention import decide, make_spec
from depthgauge.fast_attention.decide import decision as decisions
from depthgauge.fast_attention.decide.bounds import survey
from depthgauge.fast_attention.decide.minimax import minimax, output_error
from depthgauge.fast_attention.naive import softmax_attention
from depthgauge.fast_attention.problem import checked
from depthgauge.fast_attention.triton import backend as triton_backend
from depthgauge.fast_attention.triton import gradient as triton_gradient
from depthgauge.fast_attention.triton import survey as triton_survey
from depthgauge.fast_attention.triton.kernels import programs, slots

SETTINGS = [
    {"n": 70, "m": 70, "d": 16, "e": 16, "degree": 2},
    {"n": 70, "m": 200, "d": 32, "e": 16, "degree": 1},
    {"n": 33, "m": 150, "d": 64, "e": 32, "degree": 2},
    {"n": 65, "m": 131, "d": 32, "e": 32, "degree": 2, "groups": 2, "padded": True},
    {"n": 65, "m": 131, "d": 32, "e": 64, "degree": 2, "shift": 0.5},
    {"n": 65, "m": 131, "d": 16, "e": 16, "degree": 1, "groups": 2, "padded": True, "shift": 0.5},
    {"n": 20, "m": 130, "d": 128, "e": 16, "degree": 1},
]
CAUSAL = [
    {"n": 300, "m": 300, "d": 16, "e": 16, "degree": 2},
    {"n": 300, "m": 170, "d": 32, "e": 16, "degree": 2, "groups": 2, "padded": True},
    {"n": 200, "m": 300, "d": 16, "e": 32, "degree": 1, "shift": 0.5},
]


@pytest.fixture(autouse=True)
def _least_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "NEARLY", 1.0)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "CAUSAL_BLOCK", 128)


@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", SETTINGS)
def test_forward_and_gradients_are_the_definition(dtype: torch.dtype, given: dict[str, object]) -> None:
    spec, problem = setting(dtype, **given)  # type: ignore[arg-type]
    out, z, saved = triton_backend.forward(spec, problem.q, problem.k, problem.v)
    assert out.dtype == dtype
    leaves = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    exact = expected(spec, problem, *leaves)
    close = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), exact.detach(), rtol=close, atol=close)
    assert bool((z > 0).all())
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    true = torch.autograd.grad(exact, leaves, up.double())
    mine = triton_gradient.backward(spec, problem.q, problem.k, problem.v, saved, up)
    for one, other in zip(mine, true, strict=True):
        assert one.dtype == dtype
        assert float((one.double() - other).norm() / other.norm()) < (1e-5 if dtype == torch.float32 else 1e-2)


@needs_interpreter
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", CAUSAL)
def test_causal_is_the_definition(dtype: torch.dtype, given: dict[str, object]) -> None:
    spec, problem = setting(dtype, causal=True, **given)  # type: ignore[arg-type]
    out, _, _ = triton_backend.forward(spec, problem.q, problem.k, problem.v)
    exact = expected(spec, problem, *(x.double() for x in (problem.q, problem.k, problem.v)))
    close = 1e-5 if dtype == torch.float32 else 6e-3
    torch.testing.assert_close(out.double(), exact, rtol=close, atol=close)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the spoilt inputs, in the interpreter's numpy
@pytest.mark.parametrize(("n", "m", "d", "e"), [(300, 500, 16, 32), (1000, 130, 64, 16), (1, 1, 32, 16)])
def test_the_survey_proves_what_torch_proves(n: int, m: int, d: int, e: int) -> None:
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(1, 2, n, d, generator=generator) + 1
    k, v = torch.randn(1, 2, m, d, generator=generator) - 2, torch.randn(1, 2, m, e, generator=generator)
    problem = checked(q, k, v, None, 0.0, False, 1e-2, None, None, False, None).flat()
    mine, theirs = triton_survey.survey(problem), survey(problem)
    for head in range(2):
        exact_q, exact_k = problem.q[head, 0].double(), problem.k[head].double()
        for found, true in (
            (mine.query[head], exact_q.norm(dim=-1).max()),
            (mine.key[head], exact_k.norm(dim=-1).max()),
            (mine.query_centred[head], (exact_q - mine.query_centre[head].double()).norm(dim=-1).max()),
            (mine.key_centred[head], (exact_k - mine.key_centre[head].double()).norm(dim=-1).max()),
        ):
            assert float(true) <= found <= float(true) * (1 + 1e-4) + 1e-15
    assert mine.query == pytest.approx(theirs.query, rel=1e-5)
    assert mine.key == pytest.approx(theirs.key, rel=1e-5)
    for tensor in (q, k, v):
        for bad in (float("nan"), float("inf")):
            spoilt = tensor.clone()
            spoilt[0, 1, -1, 3] = bad
            given = [spoilt if x is tensor else x for x in (q, k, v)]
            flat = checked(*given, None, 0.0, False, 1e-2, None, None, False, None).flat()
            assert triton_survey.survey(flat).is_usable == [True, False]


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_every_pair_of_tiles_is_summed_once(dim: int) -> None:
    tiles = dim // 16
    pairs = [tuple(sorted(pair)) for _, *pair in slots(dim)]
    assert sorted(pairs) == [(a, b) for a in range(tiles) for b in range(a, tiles)]
    assert len({slot for slot, _, _ in slots(dim)}) == len(pairs)
    assert len(programs(dim)) == (len(pairs) + 1) // 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_allowance_of_the_kernels_grows_with_what_is_rounded(dtype: torch.dtype) -> None:
    tensor = torch.zeros(1, 2, 1024, 64, dtype=dtype)
    problem = checked(tensor, tensor, tensor, None, 0.0, False, 1e-3, None, None, False, None).flat()
    small, large = (
        [triton_backend.rounding(problem, minimax(2, bound), bound, centring, 0.0) for centring in range(3)]
        for bound in (0.05, 0.3)
    )
    assert small == sorted(small)
    assert all(one < other for one, other in zip(small, large, strict=True))
    assert large[0] < {torch.bfloat16: 6e-3, torch.float16: 3e-3, torch.float32: 1e-3}[dtype]


@needs_interpreter
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shift", "is_weighed"), [(0.2, True), (0.3, True), (3.0, False)])
def test_weights_that_float16_would_lose_are_not_used(
    shift: float, is_weighed: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (backends, decisions):
        monkeypatch.setattr(module, "backend_for", lambda problem, degree: backends.TRITON)
    generator = torch.Generator().manual_seed(5)
    n, d = 300, 16
    # log w falls along the sequence by the whole range that is allowed: causal rows see the smallest weights alone.
    slope = torch.linspace(-0.3, 0.3, n)[:, None] * torch.ones(d) / 4 + 0.01 * torch.randn(n, d, generator=generator)
    q = (0.01 * torch.randn(1, 1, n, d, generator=generator) + shift).half()
    k, v = slope[None, None].half(), torch.randn(1, 1, n, d, generator=generator).half()
    request = checked(q, k, v, None, 0.0, causal, 1e-2, 4.0, None, False, None if not is_weighed else "polynomial")
    problem = request.flat()
    decision = decide(request, problem)
    (choice,) = decision.choices
    assert decision.survey.spread[0] > (2.0 if is_weighed else 10.0)
    assert (choice.polynomial is not None and choice.centring == 2) == is_weighed
    if is_weighed and choice.polynomial is not None:
        spec = make_spec(problem, decision, [0], choice.polynomial.degree)
        out, _, _ = triton_backend.forward(spec, problem.q, problem.k, problem.v)
        exact = softmax_attention(q.double(), k.double(), v.double(), 4.0, causal)
        width = (v.amax(-2) - v.amin(-2)).double()
        allowed = (output_error(choice.polynomial.error) + decision.rounding(0)) * width + 2.0**-9 * exact.abs()
        assert bool(((out.double() - exact).abs() <= allowed).all())
        assert decision.rounding(0) < 0.1


def test_a_guarantee_that_rounding_would_eat_up_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backends, decisions):
        monkeypatch.setattr(module, "backend_for", lambda _, g: backends.TRITON if g in (1, 2) else backends.TORCH_GPU)
    monkeypatch.setattr(room, "survey_of", survey)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 64, generator=generator).bfloat16() for _ in range(3))
    fine, coarse = (0.5 / float(q.norm(dim=-1).max()) ** 2, 2.2 / float(q.norm(dim=-1).max()) ** 2)
    kept = room.attention_plan(q, k, v, tolerance=0.3, is_causal=True, scale=fine, force="polynomial")
    assert kept.path == "polynomial"
    assert kept.rounding <= decisions.LARGEST_ROUNDING
    refused = room.attention_plan(q, k, v, tolerance=0.3, is_causal=True, scale=coarse)
    assert refused.path == "exact"
    assert "rounding in bfloat16" in refused.heads[0].why
    with pytest.raises(decisions.GuaranteeError, match="longer dtype"):
        room.attention_plan(q, k, v, tolerance=0.3, is_causal=True, scale=coarse, force="polynomial")


@needs_interpreter
@pytest.mark.usefixtures("small_blocks")
def test_causal_sums_of_large_values_fit_float16() -> None:
    # All keys of a block along one axis, values far beyond what 128 of them leave room for in float16.
    signs = 1 - 2 * (torch.arange(500) % 2).float()
    q = torch.zeros(1, 1, 500, 16).index_fill_(-1, torch.tensor([0]), 0.3) * signs[:, None]
    k = torch.zeros(1, 1, 500, 16).index_fill_(-1, torch.tensor([0]), 0.3) * signs.roll(1)[:, None]
    v = torch.where(torch.arange(500) % 10 == 3, -8000.0, 8000.0)[:, None].expand(1, 1, 500, 16)
    q, k, v = q.half(), k.half(), v.half().contiguous()
    request = checked(q, k, v, None, 0.0, True, 1e-2, 5.0, None, False, "polynomial")
    problem = request.flat()
    decision = decide(request, problem)
    polynomial = decision.choices[0].polynomial
    assert polynomial is not None
    assert polynomial.degree == 2
    out, _, _ = triton_backend.forward(make_spec(problem, decision, [0], 2), problem.q, problem.k, problem.v)
    exact = softmax_attention(q.double(), k.double(), v.double(), 5.0, True)
    allowed = (output_error(polynomial.error) + triton_backend.rounding(problem, polynomial, 0.46, 1, 0.0)) * 16000
    assert float((out.double() - exact).abs().max()) <= allowed + 2.0**-9 * 8000
