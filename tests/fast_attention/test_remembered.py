"""`Attention`: an object that remembers where a survey did not help, and forgets it again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.fast_attention import attention as attention_module
from depthgauge.fast_attention.call import Call, Tensors
from depthgauge.fast_attention.plan import LONGEST_WAIT, PreparedCall, prepared_for


def draw(size: float, n: int = 2000, seed: int = 0) -> list[Tensor]:
    """Draw tensors for which a polynomial pays if `size` is small."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, 4, generator=generator) for _ in range(3))
    return [size * q, 0.01 * k, v]


LARGE, SMALL = 3e4, 0.01
CALL = Call(2, 1, 2000, 2000, 4, 4, torch.float32, torch.device("cpu"), 0.5, False, 1e-3, None)


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls made so far, at every call that looks at numbers."""
    found: list[int] = []
    made.clear()
    original = PreparedCall.look

    def watched(prepared: PreparedCall, tensors: Tensors) -> Callable[[], bool] | None:
        found.append(len(made))
        return original(prepared, tensors)

    monkeypatch.setattr(PreparedCall, "look", watched)
    return found


made: list[None] = []


def counted(attend: dg.Attention, *given: Any, **options: Any) -> Any:
    out = attend(*given, **options)
    made.append(None)
    return out


def test_after_refusals_calls_are_surveyed_less_and_less_often(surveyed: list[int]) -> None:
    attend, given = dg.Attention(), draw(LARGE)
    exact = F.scaled_dot_product_attention(*given)
    for _ in range(40):
        assert torch.equal(counted(attend, *given), exact)
    assert surveyed == [0, 2, 5, 10, 19, 36]  # 1, 2, 4, 8, 16 calls in between
    surveyed.clear()
    counted(attend, *given, scale=0.3)
    counted(attend, *given, force="exact")
    assert len(surveyed) == 1  # another option is another kind of call; a forced call is not surveyed
    with pytest.raises(InputError):
        attend(*given, force="polynomial")
    assert len(surveyed) == 2
    attend.reset()
    counted(attend, *given)
    assert len(surveyed) == 3


def test_objects_remember_apart_and_the_function_remembers_nothing(surveyed: list[int]) -> None:
    one, other, given = dg.Attention(), dg.Attention(), draw(LARGE)
    for attend in (one, other):
        counted(attend, *given)
        counted(attend, *given)
    assert len(surveyed) == 2
    for _ in range(3):
        dg.attention(*given)
    assert len(surveyed) == 5


def test_small_scores_are_found_after_the_wait_and_end_it(surveyed: list[int]) -> None:
    attend, small = dg.Attention(), draw(SMALL)
    exact = F.scaled_dot_product_attention(*small)
    counted(attend, *draw(LARGE))
    assert torch.equal(counted(attend, *small), exact)  # within the wait
    for _ in range(3):
        found = counted(attend, *small)
        assert torch.equal(found, dg.attention(*small))
        assert not torch.equal(found, exact)
        assert float((found - exact).abs().max()) <= 1e-3 * float((small[2].amax(-2) - small[2].amin(-2)).max())
    surveyed.clear()
    counted(attend, *draw(LARGE))
    counted(attend, *small)
    counted(attend, *small)
    assert len(surveyed) == 2  # the wait is one call again


def test_calls_with_gradients_and_padding_have_their_own_waits(surveyed: list[int]) -> None:
    attend, given, padding = dg.Attention(), draw(LARGE), torch.arange(2000)[None] > 1500
    for _ in range(2):
        counted(attend, *given)
    trained = [x.clone().requires_grad_() for x in given]
    gradients = [torch.autograd.grad(counted(attend, *trained).square().sum(), trained) for _ in range(2)]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
    wanted = dg.attention(*given, key_padding=padding, force="exact")
    for _ in range(2):
        assert torch.equal(counted(attend, *given, key_padding=padding), wanted)
    assert surveyed == [0, 2, 4]
    with pytest.raises(InputError, match="key_padding"):
        attend(*given, key_padding=padding.long())


def test_captured_calls_are_not_remembered(monkeypatch: pytest.MonkeyPatch, surveyed: list[int]) -> None:
    attend, given = dg.Attention(), draw(SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(attention_module, "is_capturing", lambda _: True)
        assert torch.equal(counted(attend, *given), F.scaled_dot_product_attention(*given))
    assert surveyed == []
    counted(attend, *given)
    assert surveyed == [1]


def test_calls_that_are_too_short_are_not_remembered() -> None:
    attend = dg.Attention()
    for n in range(1, 30):
        attend(*draw(1.0, n))
    assert attend._calls == {}


def test_an_object_has_the_options_of_the_function() -> None:
    attend, given = dg.Attention(tolerance=1e-2), draw(SMALL)
    out, bound = attend(*given, is_causal=True, return_bound=True)
    wanted, wanted_bound = dg.attention(*given, is_causal=True, tolerance=1e-2, return_bound=True)
    assert torch.equal(out, wanted)
    assert torch.equal(bound, wanted_bound)
    plan = dg.attention_plan(*given, tolerance=1e-2)
    assert torch.equal(attend(*given, plan=plan), dg.attention(*given, tolerance=1e-2, plan=plan))
    assert repr(attend) == "Attention(tolerance=0.01)"
    with pytest.raises(InputError, match="tolerance must be a positive number, got 0"):
        dg.Attention(tolerance=0)


def test_waits_double_up_to_a_limit_and_end_with_a_polynomial() -> None:
    prepared = PreparedCall(CALL)
    waits = []
    for _ in range(14):
        prepared.record(is_refused=True)
        waits.append(0)
        while prepared.is_waiting():
            waits[-1] += 1
    assert waits == [min(2**r, LONGEST_WAIT) for r in range(14)]
    prepared.record(is_refused=False)
    assert not prepared.is_waiting()
    prepared.record(is_refused=True)
    assert [prepared.is_waiting() for _ in range(2)] == [True, False]


def test_the_number_of_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "MOST_CALLS", 3)
    attend = dg.Attention()
    for n in range(2000, 2010):
        attend(*draw(LARGE, n))
        assert len(attend._calls) <= 3


def test_what_an_object_remembers_is_not_seen_by_others() -> None:
    one, other = dg.Attention(), dg.Attention()
    one(*draw(LARGE))
    (prepared,) = one._calls.values()
    assert other._calls == {}
    assert prepared_for(prepared.call) is not prepared
