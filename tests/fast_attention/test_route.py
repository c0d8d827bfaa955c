"""Repeated calls: a Route must return what a full decision returns, and give up where no decision was made before.

The kernels run in float32 and treat it as they treat bfloat16.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_settings import DEVICE
from torch import Tensor

from depthgauge.errors import DepthgaugeError
from depthgauge.fast_attention import attention as attention_module
from depthgauge.fast_attention import backends
from depthgauge.fast_attention.attention import attention
from depthgauge.fast_attention.decide import chooser
from depthgauge.fast_attention.decide.minimax import SMALLEST_INDEX, grid_bound, grid_index
from depthgauge.fast_attention.problem import GuaranteeError
from depthgauge.fast_attention.spec import SharedPolynomial
from depthgauge.fast_attention.triton.backend import TritonBackend
from depthgauge.fast_attention.triton.passes import Call
from depthgauge.fast_attention.triton.route import Route
from depthgauge.fast_attention.triton.survey import outward
from depthgauge.fast_attention.triton.workspace import Workspace

pytestmark = pytest.mark.kernels
OPTIONS: dict[str, Any] = {"scale": 1.0, "tolerance": 1e-2, "force": "polynomial"}


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    """A new Triton backend, used for every problem. Its kernels compute degrees up to 2."""
    triton = TritonBackend(Workspace(causal_block=128, centred_after=(torch.float32,)))
    for module in (backends, chooser):
        monkeypatch.setattr(module, "backend_for", lambda problem, degree: triton)
    monkeypatch.setattr(backends, "TRITON", triton)
    monkeypatch.setattr(chooser, "HIGHEST_DEGREE", 2)
    return triton


def only_route(backend: TritonBackend) -> Route:
    (route,) = backend.routes.values()
    return route


def draw(n: int, m: int, groups: int = 1, size: float = 0.06, seed: int = 0) -> list[Tensor]:
    """Draw q, k, v of two key heads with opposite signs, so that one polynomial fits both."""
    generator = torch.Generator().manual_seed(seed)
    factor = (size / 4) ** 0.5
    q = factor * torch.randn(1, groups, n, 16, generator=generator)
    k, v = factor * torch.randn(1, 1, m, 16, generator=generator), torch.randn(1, 1, m, 16, generator=generator) + 3
    return [torch.cat([x, -x], dim=1).to(DEVICE) for x in (q, k, v)]


def by_kind(rows: list[list[float]]) -> list[list[float]]:
    """Return the numbers of a survey, given by head, as the host reads them: by kind."""
    return [list(column) for column in zip(*rows, strict=True)]


def forbid_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("decided anew")

    monkeypatch.setattr(attention_module, "decide", refuse)


@pytest.mark.parametrize(
    ("n", "m", "groups", "is_causal", "size"),
    [(70, 140, 1, False, 0.06), (260, 260, 1, True, 0.06), (140, 130, 2, True, 0.06), (65, 40, 3, False, 0.004)],
)
def test_a_second_call_repeats_the_first(
    n: int, m: int, groups: int, is_causal: bool, size: float, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(n, m, groups, size)
    options = {**OPTIONS, "is_causal": is_causal, "enable_gqa": groups > 1}
    first = attention(q, k, v, **options)
    assert len(backend.routes) == 1
    forbid_decisions(monkeypatch)
    again = attention(q, k, v, **options)
    assert isinstance(again, Tensor)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    wide = [x.repeat_interleave(groups, dim=1) for x in (k, v)]
    exact = F.scaled_dot_product_attention(q, *wide, is_causal=is_causal, scale=1.0)
    assert float((again - exact).abs().max()) <= 1e-2 * float((v.amax(-2) - v.amin(-2)).max())
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(attention(*strided, **options), first, rtol=0, atol=0)
    # Other tensors with the same B: the keys in another order.
    order = torch.randperm(m, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    moved = attention(q, k[..., order, :].contiguous(), v[..., order, :].contiguous(), **options)
    if not is_causal:
        torch.testing.assert_close(moved, first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "m", "groups", "is_causal"), [(70, 60, 2, False), (140, 135, 1, True)])
def test_calls_with_gradients_follow_a_route(
    n: int, m: int, groups: int, is_causal: bool, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS, "is_causal": is_causal, "enable_gqa": groups > 1}
    leaves = [x.requires_grad_() for x in draw(n, m, groups, 0.01)]
    up = torch.randn(1, 2 * groups, n, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    first = attention(*leaves, **options)
    wanted = torch.autograd.grad(first, leaves, up)
    assert len(backend.routes) == 1
    forbid_decisions(monkeypatch)
    again = attention(*leaves, **options)
    torch.testing.assert_close(again, first, rtol=1e-5, atol=1e-6)
    for one, other in zip(torch.autograd.grad(again, leaves, up), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    for one, other in zip(torch.autograd.grad(attention(*strided, **options), strided, up), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    (dq,) = torch.autograd.grad(attention(*leaves, **options).sum(), leaves[0], create_graph=True)
    with pytest.raises(DepthgaugeError, match="cannot be differentiated: second derivatives"):
        torch.autograd.grad(dq.sum(), leaves[0])
    with pytest.raises(AssertionError, match="decided anew"):  # without gradients the tolerance is another one
        attention(*(x.detach() for x in leaves), **options)


def test_scores_of_another_size_follow_the_same_route(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(60, 60)
    attention(q, k, v, **OPTIONS)
    route = only_route(backend)
    forbid_decisions(monkeypatch)
    for factor in (0.7, 0.9, 0.94, 0.98, 1.3):
        out = attention(factor * q, k, v, **OPTIONS)
        exact = F.scaled_dot_product_attention(factor * q, k, v, scale=1.0)
        assert float((out - exact).abs().max()) <= 1e-2 * float((v.amax(-2) - v.amin(-2)).max())
    assert len(route.known) == 5
    assert (
        len({known[0] for known in route.known.values() if known is not None}) < 5
    )  # B is rounded up to a coarse grid


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NaN inputs in the numpy of the interpreter
def test_a_call_that_a_route_cannot_compute_is_decided_anew(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chooser, "NEARLY", 1.0)
    q, k, v = draw(60, 60)
    attention(q, k, v, **OPTIONS)
    route = only_route(backend)
    assert route(q * 0.01, k, v) is None  # a lower degree is enough
    with pytest.raises(GuaranteeError):
        attention(100 * q, k, v, **OPTIONS)
    for bad in (math.nan, math.inf):
        for tensor in (q, k, v):
            changed = tensor.clone()
            changed[0, 0, 3, 3] = bad
            given = [changed if x is tensor else x for x in (q, k, v)]
            assert route(*given) is None
            exact = F.scaled_dot_product_attention(*given, scale=1.0)
            torch.testing.assert_close(attention(*given, **OPTIONS), exact, rtol=0, atol=1e-2, equal_nan=True)
    for factors in ((1e9, 1e-9, 1.0), (1e-9, 1e9, 1.0), (1.0, 1.0, 1e-20), (1.0, 1.0, 1e20)):  # beyond `holds`
        assert route(*(x * factor for x, factor in zip((q, k, v), factors, strict=True))) is None
    forbid_decisions(monkeypatch)
    attention(q, k, v, **OPTIONS)
    for other in ({"tolerance": 2e-2}, {"scale": 0.5}, {"is_causal": True}, {"return_bound": True}):
        with pytest.raises(AssertionError, match="decided anew"):
            attention(q, k, v, **{**OPTIONS, **other})
    with pytest.raises(AssertionError, match="decided anew"):
        attention(q.requires_grad_(), k, v, **OPTIONS)


def test_a_route_never_assumes_a_smaller_bound_than_the_survey(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(60, 60)
    attention(q, k, v, **OPTIONS)
    route = only_route(backend)
    generator = torch.Generator().manual_seed(3)
    up, lost = outward(16)
    looked_up: list[int] = []

    def everything(index: int) -> SharedPolynomial:
        looked_up.append(index)
        return SharedPolynomial((1.0,), SMALLEST_INDEX)

    monkeypatch.setattr(route, "_at", everything)
    for step in range(300):
        sizes = (10.0 ** (14 * torch.rand(2, 6, generator=generator, dtype=torch.float64) - 8)).tolist()
        rows = [[*row[:4], 1.0, row[5]] for row in sizes]
        if step % 2:  # just below a point of the grid, where rounding up matters
            edge = grid_bound(grid_index(math.sqrt(rows[0][0] * rows[0][1]))) * (1 - 1e-7)
            rows[0][1] = edge**2 / rows[0][0]
            rows[1][:2] = [rows[0][0] / 4, rows[0][1] / 4]
        route.known.clear()
        assert route.decided(by_kind(rows)) is not None
        longest = [(math.sqrt(row[0]) * up + lost) * (math.sqrt(row[1]) * up + lost) for row in rows]
        assert looked_up[-1] >= grid_index(max(longest))
        assert looked_up[-1] <= grid_index(max(longest) * (1 + 1e-6))
    for column in range(6):
        for bad in (math.inf, math.nan):
            rows = [[1.0] * 6, [1.0] * 6]
            rows[1][column] = bad
            assert route.decided(by_kind(rows)) is None
    for column in (0, 1, 4):
        for bad in (1e13, 1e-13):
            rows = [[1.0] * 6, [1.0] * 6]
            rows[1][column] = bad
            assert route.decided(by_kind(rows)) is None
            rows[1][column] = 0.0
            assert route.decided(by_kind(rows)) is not None


def test_a_route_gives_up_if_centring_would_lower_the_degree(backend: TritonBackend) -> None:
    q, k, v = draw(60, 60)
    attention(q, k, v, **OPTIONS)
    route = only_route(backend)
    assert attention(q, k, v, **OPTIONS) is not None
    ((index, known),) = route.known.items()
    assert known is not None
    coefficients, least = known
    square = 0.999 * grid_bound(index)  # the squared norms of q and k, so that their product is just below B
    rows = [[square, square, square, square, 1.0, 0.0]] * 2
    assert route.decided(by_kind(rows)) == coefficients
    for column in (2, 3):
        centred = [list(row) for row in rows]
        centred[1][column] = (0.9 * grid_bound(least - 1)) ** 2 / square
        assert route.decided(by_kind(centred)) is None


def test_an_error_during_a_call_drops_its_readback_buffer(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(60, 60)
    attention(q, k, v, **OPTIONS)
    route, readbacks = only_route(backend), backend.workspace.readbacks
    before = readbacks.get(2, q.device)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Call, "run", fail)
    with pytest.raises(MemoryError):
        route(q, k, v)
    assert readbacks.get(2, q.device) is not before


def test_routes_belong_to_their_backend(backend: TritonBackend) -> None:
    q, k, v = draw(60, 60)
    attention(q, k, v, **OPTIONS)
    (kind,) = backend.routes
    assert backend.repeat(kind, q, k, v) is not None
    assert TritonBackend().repeat(kind, q, k, v) is None
