"""Gradients of the polynomial path: within their bound of the exact gradients, and exact for exact rows."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_attention import softmax_attention
from torch import Tensor

from depthgauge.base.errors import DepthgaugeError
from depthgauge.fast_attention.attention import attention, attention_plan


@dataclass(frozen=True)
class Setting:
    """Drawn q, k and v of two key heads; the scores are about `size` times a normal number."""

    n: int
    m: int
    d: int = 8
    e: int = 4
    groups: int = 1
    size: float = 0.01
    shift: float = 0.0
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def leaves(self) -> list[Tensor]:
        """Return q, k and v as leaves that require gradients."""
        generator = torch.Generator().manual_seed(self.seed)
        factor = math.sqrt(self.size / math.sqrt(self.d))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        q = factor * normal(1, 2 * self.groups, self.n, self.d) + self.shift
        k = factor * normal(1, 2, self.m, self.d) - self.shift
        v = normal(1, 2, self.m, self.e)
        return [x.to(self.dtype).requires_grad_() for x in (q, k, v)]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    n=st.sampled_from([1, 3, 130, 301]),
    m=st.sampled_from([1, 2, 64, 301]),
    d=st.sampled_from([1, 3, 8]),
    groups=st.sampled_from([1, 2]),
    size=st.sampled_from([1e-4, 5e-3, 0.03, 0.1]),
    shift=st.sampled_from([0.0, 1.0]),
    causal=st.booleans(),
    padded=st.booleans(),
    tolerance=st.sampled_from([1e-1, 1e-2, 1e-3]),
)
def test_gradients_keep_their_bound(
    seed: int, n: int, m: int, d: int, groups: int, size: float, shift: float, causal: bool, padded: bool,
    tolerance: float,
) -> None:  # fmt: skip
    q, k, v = Setting(n, m, d, 3, groups, size, shift, seed=seed).leaves()
    padding = torch.arange(m)[None] % 3 == 1 if padded else None
    arguments = {"is_causal": causal, "tolerance": tolerance, "key_padding": padding, "enable_gqa": groups > 1}
    try:
        plan = attention_plan(q, k, v, **arguments, force="polynomial")
    except ValueError:
        return
    generator = torch.Generator().manual_seed(seed + 1)
    out = attention(q, k, v, **arguments, force="polynomial")
    up = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), up)
    scale = 1 / math.sqrt(d)
    keep = None if padding is None else ~padding[:, None, :]
    wide = [x.detach().repeat_interleave(groups, dim=1).requires_grad_() for x in (k, v)]
    exact = softmax_attention(q, wide[0], wide[1], scale, causal, keep)
    tq, tk, tv = torch.autograd.grad(exact, (q, *wide), up)
    tk, tv = (x.unflatten(1, (2, groups)).sum(2) for x in (tk, tv))

    with torch.no_grad():
        share = torch.tensor([head.gradient for head in plan.heads], dtype=torch.float64)
        assert bool((share <= tolerance).all())
        per_query = share.repeat_interleave(groups)[None, :, None]
        kept = k if padding is None else k[:, :, ~padding[0]]
        values = wide[1] if padding is None else wide[1][:, :, ~padding[0]]
        width = values.amax(-2, keepdim=True) - values.amin(-2, keepdim=True)
        reach = (up.abs() * width).sum(-1)  # range of dO·v: [1, heads, n]
        # Centring makes keys and queries at most twice as long as the longest, so this bound needs no centre.
        longest = 2 * kept.norm(dim=-1).amax(-1).repeat_interleave(groups, dim=1)[..., None]
        tiny = 1e-12
        assert bool(((dq - tq).norm(dim=-1) <= per_query * scale * longest * reach + tiny).all())
        seen = torch.ones(n, m, dtype=torch.bool).tril() if causal else torch.ones(n, m, dtype=torch.bool)
        seen = seen if keep is None else seen & keep.unsqueeze(1)
        p = torch.softmax((scale * q @ wide[0].transpose(-1, -2)).masked_fill(~seen, -math.inf), -1)
        queries = 3 * q.norm(dim=-1).amax(-1)[..., None, None]
        allowed_k = scale * (p * reach[..., None] * queries).sum(-2).unflatten(1, (2, groups)).sum(2)
        allowed_v = (p.transpose(-1, -2) @ up.abs()).unflatten(1, (2, groups)).sum(2)
        assert bool(((dk - tk).norm(dim=-1) <= share[None, :, None] * allowed_k + tiny).all())
        assert bool(((dv - tv).abs() <= share[None, :, None, None] * allowed_v + tiny).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_dtype_of_the_inputs(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = Setting(300, 300, size=0.02, dtype=dtype).leaves()
    out = attention(q, k, v, is_causal=causal, force="polynomial", tolerance=1e-2)
    out.float().square().sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    softmax_attention(*exact, 1 / math.sqrt(8), causal).square().sum().backward()
    for mine, true in zip((q, k, v), exact, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        assert true.grad is not None
        gap = (mine.grad.double() - true.grad).norm() / true.grad.norm()
        assert float(gap) < (0.02 if dtype == torch.float32 else 0.06)


def test_gradients_need_a_higher_degree() -> None:
    q, k, v = Setting(20000, 20000, size=0.02).leaves()  # so many tokens that no higher degree costs little more
    with_gradients = attention_plan(q, k, v, force="polynomial").heads[0]
    without = attention_plan(q.detach(), k.detach(), v, force="polynomial").heads[0]
    assert (with_gradients.degree or 0) == (without.degree or 0) + 1
    assert without.gradient is None
    with torch.no_grad():
        assert attention_plan(q, k, v, force="polynomial").heads[0].degree == without.degree


def test_exact_rows_have_exact_gradients() -> None:
    q, k, v = Setting(400, 400).leaves()
    with torch.no_grad():
        q[:, :, 7] *= 60
    plan = attention_plan(q, k, v, force="polynomial", tolerance=1e-2)
    assert all(head.exact_rows == 1 for head in plan.heads)
    up = torch.randn(1, 2, 400, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = torch.autograd.grad(attention(q, k, v, force="polynomial", tolerance=1e-2), (q, k, v), up)
    true = torch.autograd.grad(softmax_attention(q, k, v, 1 / math.sqrt(8)), (q, k, v), up)
    torch.testing.assert_close(mine[0][:, :, 7], true[0][:, :, 7], rtol=1e-9, atol=1e-12)
    for one, other in zip(mine, true, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-2


@pytest.mark.parametrize("causal", [False, True])
def test_differentiating_twice_raises_an_error(causal: bool) -> None:
    q, k, v = Setting(30, 30, 4, 2).leaves()
    out = attention(q, k, v, is_causal=causal, force="polynomial")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(DepthgaugeError, match="cannot be differentiated: second derivatives"):
        torch.autograd.grad(dq.sum(), q)


def test_a_single_gradient_can_be_requested() -> None:
    q, k, v = Setting(30, 30, 4, 2).leaves()
    v = v.detach()
    (dk,) = torch.autograd.grad(attention(q, k, v, force="polynomial").square().sum(), k)
    (true,) = torch.autograd.grad(softmax_attention(q, k, v, 0.5).square().sum(), k)
    assert float((dk - true).norm() / true.norm()) < 1e-2
