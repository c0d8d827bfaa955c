"""Attention by a plan, and attention inside compiled code: guarantees, violations, refusals."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_settings import DEVICE
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.fast_attention import attention
from depthgauge.fast_attention import plan as plan_module
from depthgauge.fast_attention.bounds import Minimax
from depthgauge.fast_attention.call import GuaranteeError
from depthgauge.fast_attention.plan import AttentionPlan
from depthgauge.fast_attention.triton_backend import TritonBackend

TOLERANCE = 1e-2
FORCED: dict[str, Any] = {"tolerance": TOLERANCE, "scale": 1.0, "force": "polynomial"}


def draw(n: int = 70, m: int = 90, groups: int = 1, size: float = 0.06, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    factor = (size / 4) ** 0.5
    q = factor * torch.randn(1, 2 * groups, n, 16, generator=generator)
    k = factor * torch.randn(1, 2, m, 16, generator=generator)
    return [x.to(DEVICE) for x in (q, k, torch.randn(1, 2, m, 16, generator=generator) + 3)]


def plan_of(*given: Tensor, **options: Any) -> AttentionPlan:
    """Make a plan that every head follows with a polynomial."""
    return dg.attention_plan(*given, **{**FORCED, **options})


def follow(plan: AttentionPlan, *given: Tensor, **options: Any) -> Tensor:
    out = dg.attention(*given, tolerance=TOLERANCE, scale=1.0, plan=plan, **options)
    assert isinstance(out, Tensor)
    return out


def allowed(v: Tensor) -> float:
    return (TOLERANCE + 1e-4) * float((v.amax(-2) - v.amin(-2)).max())


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.kernels)], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both backends. The kernels run in float32 and treat it as they treat bfloat16."""
    if request.param == "triton":
        triton = TritonBackend(causal_block=128, centred_after=(torch.float32,))
        for module in (attention, plan_module):
            monkeypatch.setattr(module, "backend_for", lambda call, degree: triton)
        monkeypatch.setattr(plan_module, "HIGHEST_DEGREE", 2)
    return str(request.param)


@pytest.mark.parametrize(
    ("n", "m", "groups", "is_causal"), [(70, 90, 1, False), (150, 150, 1, True), (40, 64, 3, True)]
)
def test_other_tensors_follow_a_plan_within_the_tolerance(n: int, m: int, groups: int, is_causal: bool) -> None:
    how: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": groups > 1}
    plan = plan_of(*draw(n, m, groups), **how)
    assert isinstance(plan.fixed, Minimax)
    largest = plan.fixed.bound
    for seed, size in ((1, 0.06), (2, 0.03), (3, 1e-4)):
        q, k, v = draw(n, m, groups, size, seed)
        own = float(q.norm(dim=-1).max() * k.norm(dim=-1).max())
        q = q * min(1.0, 0.99 * largest / own) if seed < 3 else q
        out = follow(plan, q, k, v, **how)
        wide = [x.repeat_interleave(groups, dim=1) for x in (k, v)]
        exact = F.scaled_dot_product_attention(q, *wide, is_causal=is_causal, scale=1.0)
        assert float((out - exact).abs().max()) <= allowed(v)
    plan.check()


def test_scores_at_the_bound_are_inside_and_scores_beyond_it_are_reported() -> None:
    plan = plan_of(*draw())
    assert isinstance(plan.fixed, Minimax)
    q, k, v = draw(seed=4)
    q, k = (x / x.norm(dim=-1).amax() for x in (q, k))
    follow(plan, q * (plan.fixed.bound * (1 - 1e-4)), k, v)
    plan.check()
    follow(plan, q * (plan.fixed.bound * (1 + 1e-4)), k, v)
    follow(plan, q * 1e3, k, v)
    with pytest.raises(GuaranteeError, match=r"^2 calls that followed this plan"):
        plan.check()
    plan.check()  # reported once


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered", "ignore:overflow encountered"
)  # the interpreter's numpy
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_numbers_that_cannot_be_summed_are_reported(bad: float, which: int, backend: str) -> None:
    plan = plan_of(*draw())
    given = draw(seed=5)
    given[which][0, 1, 3, 2] = bad
    follow(plan, *given)
    if bad == 1e30 and which == 2 and backend == "torch" and not given[0].is_cuda:
        plan.check()  # sums of 1e30 stay in range without kernels
        return
    with pytest.raises(GuaranteeError):
        plan.check()


def test_a_followed_plan_has_gradients_if_it_was_made_for_them() -> None:
    trained = [x.requires_grad_() for x in draw(size=0.004)]
    plan = plan_of(*trained)
    given = [x.requires_grad_() for x in draw(size=0.004, seed=6)]
    out = follow(plan, *given)
    plan.check()
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mine = torch.autograd.grad(out, given, up)
    exact = [x.detach().double().requires_grad_() for x in given]
    true = torch.autograd.grad(F.scaled_dot_product_attention(*exact, scale=1.0), exact, up.double())
    for one, other in zip(mine, true, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 0.02
    plain = plan_of(*draw())
    with pytest.raises(InputError, match="require no gradients"):
        follow(plain, *given)
    with torch.no_grad():
        follow(plain, *given)


def test_other_arguments_than_those_of_the_plan_are_refused() -> None:
    plan = plan_of(*draw())
    with pytest.raises(InputError, match=r"made for q, k, v of shapes \[1, 2, 70, 16\]"):
        follow(plan, *draw(n=71))
    with pytest.raises(InputError, match="float64"):
        follow(plan, *(x.double() for x in draw()))
    with pytest.raises(InputError, match="is_causal, tolerance, scale"):
        follow(plan, *draw(), is_causal=True)
    for options in ({"force": "exact"}, {"return_bound": True}):
        with pytest.raises(InputError, match="force or return_bound"):
            follow(plan, *draw(), **options)
    for others in ({"attn_mask": torch.ones(70, 90, dtype=torch.bool)}, {"dropout_p": 0.5}):
        with pytest.raises(InputError, match="mask, dropout or padding"):
            follow(plan, *draw(), **others)


def test_plans_without_one_polynomial_for_all_heads_are_refused_in_words() -> None:
    q, k, v = draw()
    padded = plan_of(q, k, v, key_padding=(torch.arange(90) > 80)[None].to(DEVICE))
    with pytest.raises(InputError, match="cannot be followed: it has padding keys"):
        follow(padded, q, k, v)
    shifted = plan_of(q, k + 2.0, v)
    with pytest.raises(InputError, match="no polynomial covers its scores"):
        follow(shifted, q, k + 2.0, v)
    shifted.check()


def test_an_exact_plan_is_followed_exactly(backend: str) -> None:
    q, k, v = draw(size=50.0)
    plan = dg.attention_plan(q, k, v, tolerance=TOLERANCE, scale=1.0)
    assert plan.path == "exact"
    assert torch.equal(follow(plan, q, k, v), F.scaled_dot_product_attention(q, k, v, scale=1.0))
    plan.check()
