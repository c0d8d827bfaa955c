"""Prepared calls give what `Decision` gives, and leave everything unusual to it."""

import gc
import math
import random
import weakref
from typing import Any

import pytest
import torch
from kernel_settings import DEVICE, checked
from torch import Tensor

import depthgauge as dg
from depthgauge.fast_attention import plan as plan_module
from depthgauge.fast_attention.bounds import Survey, grid_index, score_bound
from depthgauge.fast_attention.call import Call, Tensors
from depthgauge.fast_attention.launches import Launch
from depthgauge.fast_attention.plan import PreparedCall, decided, prepared_for
from depthgauge.fast_attention.triton_backend import TritonBackend, kernel_survey, outward, surveyed


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    """Kernels with small causal blocks that centre float32 after the sums: the interpreter cannot multiply bfloat16."""
    found = TritonBackend(causal_block=128, centred_after=(torch.float32,))
    others = plan_module.TORCH_GPU
    monkeypatch.setattr(plan_module, "backend_for", lambda _, degree: found if degree in (1, 2) else others)
    prepared_for.cache_clear()
    return found


def draw(n: int = 300, m: int = 260, groups: int = 1, size: float = 0.06, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = size * torch.randn(1, 2 * groups, n, 16, generator=generator)
    k = size * torch.randn(1, 2, m, 16, generator=generator)
    v = torch.randn(1, 2, m, 16, generator=generator)
    return [x.to(DEVICE) for x in (q, k, v)]


def call_for(
    q: Tensor, k: Tensor, v: Tensor, force: str | None = "polynomial", causal: bool = False
) -> tuple[Call, Tensors]:
    return checked(q, k, v, is_causal=causal, scale=1.0, force=force, enable_gqa=q.shape[1] != k.shape[1])


def computed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Return what a prepared call computes: an output or a survey."""
    return PreparedCall(call_for(q, k, v, **options)[0]).usual(q, k, v)


def by_decision(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    call, flat = call_for(q, k, v, **options)
    prepared = PreparedCall(call)
    decision = decided(prepared, flat, kernel_survey(call, flat.detach()))
    assert decision is not None
    return decision.run(flat, False)[0].reshape(*q.shape[:-1], v.shape[-1])


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("n", "m", "groups", "causal"),
    [(300, 260, 1, False), (140, 300, 3, False), (300, 300, 2, True), (300, 140, 1, True)],
)
def test_the_output_is_that_of_a_decision(n: int, m: int, groups: int, causal: bool) -> None:
    given = draw(n, m, groups)
    found = computed(*given, causal=causal)
    assert isinstance(found, Tensor)
    assert torch.equal(found, by_decision(*given, causal=causal))
    assert found.shape == given[0].shape


@pytest.mark.kernels
@pytest.mark.parametrize("needed", [(True, True, True), (False, False, True)])
@pytest.mark.parametrize(("n", "m", "groups", "causal"), [(140, 260, 3, False), (300, 300, 2, True)])
def test_the_gradients_are_those_of_a_decision(
    n: int, m: int, groups: int, causal: bool, needed: tuple[bool, ...]
) -> None:
    given = [x.requires_grad_(need) for x, need in zip(draw(n, m, groups, 0.03), needed, strict=True)]
    leaves = [x for x in given if x.requires_grad]
    wanted, found = by_decision(*given, causal=causal), computed(*given, causal=causal)
    assert torch.equal(found, wanted)
    up = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for one, other in zip(*(torch.autograd.grad(x, leaves, up) for x in (found, wanted)), strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)


@pytest.mark.kernels
def test_an_output_with_gradients_is_freed_with_its_last_reference() -> None:
    given = [x.requires_grad_() for x in draw(70, 60, size=0.03)]
    call = PreparedCall(call_for(*given)[0]).usual
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
    assert isinstance(computed(q, k, v), Tensor)
    bad = v.clone()
    bad[0, 1, 3, 2] = torch.nan
    for given in (
        (q, k, bad), (q, k * math.inf, v), (q, k, 0 * v), (q, 0 * k, v), (1e8 * q, 1e-8 * k, v), (q + 1, k, v),
        (100 * q, k, v),
    ):  # fmt: skip
        tensors = [x.contiguous() for x in given]
        found, (call, flat) = computed(*tensors), call_for(*tensors)
        assert isinstance(found, Survey)
        wanted = kernel_survey(call, flat)
        assert (found.query, found.key, found.is_usable) == (wanted.query, wanted.key, wanted.is_usable)
    halves = [x.half() for x in (q, k, v)]
    assert PreparedCall(call_for(*halves)[0]).kernels is None  # values of float16 are centred before the sums


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(4))
def test_a_look_refuses_only_what_a_survey_refuses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreparedCall, "pays", lambda *_: True)
    generator = random.Random(seed)
    refused, both = 0, []
    for _ in range(6):
        q, k, v = draw(140, 260, groups=2, size=10 ** generator.uniform(-0.5, 0.5), seed=generator.randrange(999))
        q[:, :, :: generator.choice([1, 2, 8, 9])] *= generator.choice([0.0, 0.05, 1.0])
        given = q + generator.choice([0.0, 3.0]), k + generator.choice([0.0, 3.0]), v
        for change in (1.0, 0.01):  # large scores, then small ones
            call, flat = call_for(change * given[0], *given[1:], force=None)
            prepared = PreparedCall(call)
            look = prepared.look(flat)
            assert look is not None
            is_refused = look()
            refused += is_refused
            both.append(decided(prepared, flat, kernel_survey(call, flat)) is not None)
            assert not (is_refused and both[-1])
            assert PreparedCall(call._replace(force="polynomial")).look(flat) is None
            prepared.record(is_refused=False)
            assert prepared.look(flat) is None  # the last survey found a polynomial: it is not looked twice
    assert refused > 0
    assert any(both)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_never_below_that_of_the_survey(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads have norms that differ by many orders of magnitude."""
    heads, generator = 2, random.Random(seed)
    call, _ = call_for(*draw(4, 4))
    prepared, (up, lost) = PreparedCall(call), outward(16)
    for _ in range(50):
        squares = [[10 ** generator.uniform(-9, 9) for _ in range(heads)] for _ in range(4)]
        sizes = [generator.uniform(0.1, 9) for _ in range(heads)]
        rows = [*squares, sizes, [0.1] * heads]
        found = prepared.indices([x for row in rows for x in row])
        assert found
        index, lowest = found
        query, key, query_centred, key_centred = ([math.sqrt(x) * up + lost for x in row] for row in squares)
        bounds = [score_bound(call.scale, a, b) for a, b in zip(query, key, strict=True)]
        assert index >= grid_index(max(bounds))
        assert index <= grid_index(max(bounds)) + 1
        both = zip(query, query_centred, key, key_centred, strict=True)
        assert lowest <= grid_index(min(min(a, b) * min(c, d) for a, b, c, d in both))


@pytest.mark.kernels
def test_the_numbers_are_in_the_order_of_the_survey() -> None:
    call, flat = call_for(*draw(70, 60))
    numbers, found, (up, lost) = surveyed(call, flat)[:12].tolist(), kernel_survey(call, flat), outward(16)
    for at, norms in ((0, found.query), (2, found.key), (4, found.query_centred), (6, found.key_centred)):
        assert norms == [math.sqrt(x) * up + lost for x in numbers[at : at + 2]]
    assert found.value_size == numbers[8:10]


# --- what a call costs that ends in exact attention -------------------------------------------------------------------


def on_gpu(n: int, width: int = 64, causal: bool = False) -> Call:
    """A call in bfloat16 with 16 heads on a GPU, which need not exist."""
    device = torch.device("cuda")
    return Call(16, 1, n, n, width, width, torch.bfloat16, device, width**-0.5, causal, 1e-3, None)


@pytest.mark.parametrize(
    ("width", "causal", "below", "above"),
    [(64, False, 6200, 6400), (64, True, 11300, 11500), (128, False, 10300, 10600)],
)
def test_numbers_are_examined_on_a_gpu_where_degree_2_pays(
    width: int, causal: bool, below: int, above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "backend_for", lambda *_: plan_module.TRITON)
    short, long = PreparedCall(on_gpu(below, width, causal)), PreparedCall(on_gpu(above, width, causal))
    assert short.pays(1)
    assert not short.pays(2)
    assert not short.is_examined
    assert long.pays(2)
    assert long.is_examined


@pytest.mark.kernels
def test_a_call_is_surveyed_once_also_if_it_ends_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scores that need a degree that does not pay, no polynomial is computed either: it would take some 15 ms."""
    monkeypatch.setattr(PreparedCall, "pays", lambda _, degree, *__: degree < 2)
    monkeypatch.setattr(plan_module, "suited", lambda *_: pytest.fail("a polynomial was computed"))
    launched: list[int] = []
    launch = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda own, *given: launched.append(1) or launch(own, *given))
    given = draw(70, 60, size=0.2)
    given[0][0, 1, 5] = 0.0  # a row with small scores, so that every head has to be decided
    call, flat = call_for(*given, force=None)
    prepared = PreparedCall(call)
    for _ in range(3):
        launched.clear()
        found = prepared.usual(*given)
        assert isinstance(found, Survey)
        assert decided(prepared, flat, found) is None
        assert len(launched) == 1


@pytest.mark.gpu
def test_usual_calls_are_prepared_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    original = PreparedCall.usual
    monkeypatch.setattr(PreparedCall, "usual", lambda *given: made.append(None) or original(*given))
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
