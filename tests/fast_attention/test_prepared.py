"""Prepared calls give what `Decision` gives, and leave everything unusual to it."""

import gc
import math
import random
import weakref
from typing import Any

import pytest
import torch
from kernel_settings import DEVICE
from torch import Tensor

import depthgauge as dg
from depthgauge.fast_attention import attention as attention_module
from depthgauge.fast_attention import backends
from depthgauge.fast_attention.arguments import checked
from depthgauge.fast_attention.decide import chooser as chooser_module
from depthgauge.fast_attention.decide.chooser import chooser_for
from depthgauge.fast_attention.decide.decision import decided
from depthgauge.fast_attention.decide.prepared import PreparedCall, prepared_for
from depthgauge.fast_attention.polynomial_path import run
from depthgauge.fast_attention.problem import Options, Request
from depthgauge.fast_attention.theory.bounds import score_bound
from depthgauge.fast_attention.theory.minimax import grid_index
from depthgauge.fast_attention.triton.backend import TritonBackend
from depthgauge.fast_attention.triton.survey import survey, surveyed


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    """Kernels with small causal blocks that centre float32 after the sums: the interpreter cannot multiply bfloat16."""
    found = TritonBackend(causal_block=128, centred_after=(torch.float32,))
    monkeypatch.setattr(backends, "TRITON", found)
    for module in (backends, chooser_module):
        monkeypatch.setattr(module, "backend_for", lambda _, degree: found if degree in (1, 2) else backends.TORCH_GPU)
    prepared_for.cache_clear()
    return found


def draw(n: int = 300, m: int = 260, groups: int = 1, size: float = 0.06, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = size * torch.randn(1, 2 * groups, n, 16, generator=generator)
    k = size * torch.randn(1, 2, m, 16, generator=generator)
    v = torch.randn(1, 2, m, 16, generator=generator)
    return [x.to(DEVICE) for x in (q, k, v)]


def request_of(q: Tensor, k: Tensor, v: Tensor, force: str | None = "polynomial", causal: bool = False) -> Request:
    options = Options(is_causal=causal, scale=1.0, force=force, enable_gqa=q.shape[1] != k.shape[1])
    return checked(q, k, v, options)


def prepared(request: Request, is_trained: bool = False) -> Any:
    n, m = request.q.shape[-2], request.k.shape[-2]
    return prepared_for(request.rules, n, m, request.needs_gradients, is_trained)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("n", "m", "groups", "causal"),
    [(300, 260, 1, False), (140, 300, 3, False), (300, 300, 2, True), (300, 140, 1, True)],
)
def test_the_output_is_that_of_a_decision(n: int, m: int, groups: int, causal: bool) -> None:
    given = draw(n, m, groups)
    request = request_of(*given, causal=causal)
    problem = request.flat()
    decision = decided(problem, chooser_for(request.rules, n, m, False, False))
    assert decision is not None
    wanted = request.shaped(run(problem, decision, False)[0])
    found = prepared(request)(*given)
    assert isinstance(found, Tensor)
    assert torch.equal(found, wanted)
    assert found.shape == given[0].shape


@pytest.mark.kernels
@pytest.mark.parametrize("needed", [(True, True, True), (False, False, True)])
@pytest.mark.parametrize(("n", "m", "groups", "causal"), [(140, 260, 3, False), (300, 300, 2, True)])
def test_the_gradients_are_those_of_a_decision(
    n: int, m: int, groups: int, causal: bool, needed: tuple[bool, ...]
) -> None:
    given = [x.requires_grad_(need) for x, need in zip(draw(n, m, groups, 0.03), needed, strict=True)]
    leaves = [x for x in given if x.requires_grad]
    request = request_of(*given, causal=causal)
    problem = request.flat()
    decision = decided(problem, chooser_for(request.rules, n, m, request.needs_gradients, False))
    assert decision is not None
    wanted = request.shaped(run(problem, decision, False)[0])
    found = prepared(request, is_trained=True)(*given)
    assert torch.equal(found, wanted)
    up = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for one, other in zip(*(torch.autograd.grad(x, leaves, up) for x in (found, wanted)), strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)


@pytest.mark.kernels
def test_an_output_with_gradients_is_freed_with_its_last_reference() -> None:
    given = [x.requires_grad_() for x in draw(70, 60, size=0.03)]
    call = prepared(request_of(*given), is_trained=True)
    gc.disable()
    try:
        out = call(*given)
        freed = weakref.ref(out)
        del out
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NaN inputs in the numpy of the interpreter
def test_unusual_numbers_are_left_to_a_decision() -> None:
    q, k, v = draw(70, 60)
    assert isinstance(prepared(request_of(q, k, v))(q, k, v), Tensor)
    bad = v.clone()
    bad[0, 1, 3, 2] = torch.nan
    for given in (
        (q, k, bad), (q, k * math.inf, v), (q, k, 0 * v), (q, 0 * k, v), (1e8 * q, 1e-8 * k, v), (q + 1, k, v),
        (100 * q, k, v),
    ):  # fmt: skip
        tensors = [x.contiguous() for x in given]
        assert prepared(request_of(*tensors))(*tensors) is False
    short = [x[..., :40, :].contiguous() for x in (q, k, v)]
    assert prepared(request_of(short[0], k, v, causal=True))(short[0], k, v) is False  # keys after the last row
    halves = [x.half() for x in (q, k, v)]
    assert prepared(request_of(*halves))(*halves) is False  # values of float16 are centred before the sums


@pytest.mark.kernels
def test_large_scores_are_refused_only_if_all_rows_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser_module.Chooser, "_pays", lambda *_: True)
    q, k, v = draw(70, 60, size=3.0)
    request = request_of(q, k, v, force=None)
    assert prepared(request)(q, k, v) is True
    q[0, 1, 5] = 0.0
    assert prepared(request)(q, k, v) is False
    forced = request_of(*draw(70, 60, size=3.0))
    assert prepared(forced)(q, k, v) is False


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_never_below_that_of_the_survey(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads have norms that differ by many orders of magnitude."""
    given, heads, generator = draw(4, 4), 2, random.Random(seed)
    request = request_of(*given)
    problem = request.flat()
    call = PreparedCall(chooser_for(request.rules, 4, 4, False, False), backends.TRITON, is_trained=False)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(call, "_prepared", lambda *index: asked.append(index))
    for _ in range(50):
        squares = [[10 ** generator.uniform(-9, 9) for _ in range(heads)] for _ in range(4)]
        rows = [
            *squares,
            [generator.uniform(0.1, 9) for _ in range(heads)],
            [0.1] * heads,
            [1.0] * heads,
            [1.0] * heads,
        ]
        asked.clear()
        assert call.decided([x for row in rows for x in row], *given) is False
        ((index, lowest),) = asked
        query, key, query_centred, key_centred = ([math.sqrt(x) * call.up + call.lost for x in row] for row in squares)
        bounds = [score_bound(problem.scale, a, b) for a, b in zip(query, key, strict=True)]
        assert index >= grid_index(max(bounds))
        assert index <= grid_index(max(bounds)) + 1
        both = zip(query, query_centred, key, key_centred, strict=True)
        assert lowest <= grid_index(min(min(a, b) * min(c, d) for a, b, c, d in both))


@pytest.mark.kernels
def test_the_numbers_are_in_the_order_of_the_survey() -> None:
    request = request_of(*draw(70, 60))
    problem, call = request.flat(), prepared(request)
    numbers, found = surveyed(problem)[:16].tolist(), survey(problem)
    for at, norms in ((0, found.query), (2, found.key), (4, found.query_centred), (6, found.key_centred)):
        assert norms == [math.sqrt(x) * call.up + call.lost for x in numbers[at : at + 2]]
    assert found.value_size == numbers[8:10]
    assert found.query_least == pytest.approx([x**-0.5 for x in numbers[12:14]])


@pytest.mark.gpu
def test_usual_calls_are_prepared_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    original = attention_module.prepared_for

    def watched(*kind: Any) -> Any:
        made.append(None)
        return original(*kind)

    monkeypatch.setattr(attention_module, "prepared_for", watched)
    q, k, v = draw(300, 300)
    out = dg.attention(q, k, v, scale=1.0, force="polynomial")
    assert len(made) == 1
    both, _ = dg.attention(q, k, v, scale=1.0, force="polynomial", return_bound=True)
    assert torch.equal(out, both)
    dg.attention(q.mT.contiguous().mT, k, v, scale=1.0, force="polynomial")
    assert len(made) == 1
    leaf = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(dg.attention(q, k, leaf, scale=1.0, force="polynomial").sum(), leaf)
    assert len(made) == 2
    assert gradient.shape == v.shape
    with pytest.raises(dg.InputError, match="a general mask"):
        dg.attention(q, k, v, torch.zeros(300, 300, device=DEVICE), scale=1.0, force="polynomial")
