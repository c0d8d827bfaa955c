"""`attention` in torch's modes (autocast, transforms of functions, forward derivatives) and inside networks."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import depthgauge as dg
from depthgauge.base.errors import InputError


def draw(n: int, d: int, size: float = 0.02, heads: int = 2) -> list[Tensor]:
    """Draw q, k, v whose scores are about `size` times a normal number."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, d, generator=generator) for _ in range(3))
    return [math.sqrt(size) * q, math.sqrt(size) * k, v]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("force", "size"), [("polynomial", 1.0), (None, 1.0), (None, 300.0), ("exact", 1.0)])
def test_autocast_casts_the_tensors_first(force: str | None, size: float, causal: bool) -> None:
    """As in torch's attention. The guarantee is about the cast tensors, whatever the path is."""
    q, k, v = draw(n=500, d=8)
    given = [(size * q), k, v]
    how: dict[str, Any] = {"is_causal": causal, "force": force, "tolerance": 1e-2}
    short = [x.bfloat16().requires_grad_() for x in given]
    wanted = dg.attention(*short, **how)
    gradients = torch.autograd.grad(wanted.float().square().sum(), short)
    leaves = [x.clone().requires_grad_() for x in given]
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            found = dg.attention(*leaves, **how)
            assert dg.attention_plan(*leaves, **how).path == dg.attention_plan(*short, **how).path
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        for one, other in zip(torch.autograd.grad(found.float().square().sum(), leaves), gradients, strict=True):
            torch.testing.assert_close(one.bfloat16(), other, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert dg.attention(*(x.double() for x in given), **how).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no rule for its own attention
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_transforms_of_functions_use_the_exact_path(size: float) -> None:
    """Tensors inside torch.vmap and torch.func.grad have no memory that a kernel could read."""
    q, k, v = draw(n=1200, d=8)
    q = size * q
    exact = F.scaled_dot_product_attention(q, k, v)
    many = [torch.stack([x, 0.5 * x]) for x in (q, k, v)]
    gradient = torch.autograd.grad(F.scaled_dot_product_attention(p := q.clone().requires_grad_(), k, v).sum(), p)[0]
    for _ in range(4):
        found = torch.vmap(dg.attention)(*many)
        torch.testing.assert_close(found[0], exact)
        torch.testing.assert_close(torch.func.grad(lambda x: dg.attention(x, k, v).sum())(q), gradient)
        masked = torch.vmap(lambda m: dg.attention(q[..., :5, :], k, v, attn_mask=m))(torch.zeros(2, 5, k.shape[-2]))
        torch.testing.assert_close(masked[1], exact[..., :5, :])
        dg.attention(q, k, v, force="exact")
    with pytest.raises(InputError, match="vmap"):
        torch.vmap(lambda *x: dg.attention(*x, force="polynomial"))(*many)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no rule for its own attention
def test_a_mask_may_have_no_address_while_the_tensors_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(n=6, d=8)
    masks = torch.randn(3, 1, 1, 6, 6)
    wanted = torch.stack([F.scaled_dot_product_attention(q, k, v, mask) for mask in masks])
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        torch.testing.assert_close(torch.vmap(lambda mask: dg.attention(q, k, v, mask))(masks), wanted)


@pytest.mark.parametrize("force", [None, "polynomial"])
def test_a_recomputation_takes_the_same_path(force: str | None) -> None:
    """torch.utils.checkpoint compares what the two computations save for the gradient."""
    small = [x.requires_grad_() for x in draw(n=6000, d=8, heads=1)]
    large = [x.detach() * 100 for x in small]
    # Exact attention is chosen. Without hooks, the next call of this kind is exact undecided, and the one after is not.
    dg.attention(large[0].requires_grad_(), *large[1:], tolerance=0.01)
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(*small).square().sum(), small)
    for _ in range(4):
        out = checkpoint(lambda *x: dg.attention(*x, force=force, tolerance=0.01), *small, use_reentrant=False)
        found = torch.autograd.grad(out.square().sum(), small)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=1e-2 * float(other.abs().max()))
    assert dg.attention_plan(*small, tolerance=0.01, force=force).path == "polynomial"


def test_hooks_on_saved_tensors_select_the_exact_path() -> None:
    small = [x.requires_grad_() for x in draw(n=6000, d=8, heads=1)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        plan = dg.attention_plan(*small, tolerance=0.01)
        assert plan.path == "exact"
        assert "torch.utils.checkpoint" in str(plan)
        torch.testing.assert_close(dg.attention(*small, tolerance=0.01), F.scaled_dot_product_attention(*small))
        assert dg.attention_plan(*small, tolerance=0.01, force="polynomial").path == "polynomial"
        with torch.no_grad():
            assert dg.attention_plan(*small, tolerance=0.01).path == "polynomial"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # used by torch for tangents
def test_forward_mode_derivatives_use_the_exact_path() -> None:
    q, k, v = draw(n=100, d=8)
    tangent = torch.ones_like(q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        with sdpa_kernel(SDPBackend.MATH):
            found = forward_ad.unpack_dual(dg.attention(dual, k, v)).tangent
            true = forward_ad.unpack_dual(F.scaled_dot_product_attention(dual, k, v)).tangent
        torch.testing.assert_close(found, true)
        with pytest.raises(InputError, match="forward-mode"):
            dg.attention(dual, k, v, force="polynomial")


# --- inside networks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_swapped_into_a_self_attention_network(causal: bool) -> None:
    network = dg.random_network(layers=3, heads=2, dim=8, eta=0.05, seed=0, causal=causal)
    x = 2 * torch.rand(2, 200, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    seen: list[str] = []

    def fast(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        seen.append(dg.attention_plan(q, k, v, is_causal=is_causal, scale=scale, force="polynomial").path)
        out = dg.attention(q, k, v, is_causal=is_causal, scale=scale, force="polynomial")
        assert isinstance(out, Tensor)
        return out

    with torch.no_grad():
        gap = (network(x, attention=fast) - network(x)).abs().max()
    assert seen == ["polynomial"] * 3
    assert 0 < float(gap) < 1e-3


class Block(nn.Module):
    """A transformer block that calls the given attention function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inwards, self.outwards = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, attend: object) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inwards(self.norm1(x)).chunk(3, -1)
        )
        mixed = attend(q, k, v, is_causal=True)  # type: ignore[operator]
        x = x + self.outwards(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def test_swapped_into_a_transformer_block_with_small_and_with_trained_weights() -> None:
    torch.manual_seed(0)
    block = Block(32, 4).double()
    x = torch.randn(2, 100, 32, dtype=torch.float64)
    with torch.no_grad():
        block.inwards.weight[:64] *= 0.2
        small = block(x, F.scaled_dot_product_attention)
        fast = block(x, lambda *a, **b: dg.attention(*a, **b, force="polynomial"))
        assert 0 < float((small - fast).abs().max()) < 1e-2
        block.inwards.weight[:64] *= 25  # as large as trained weights
        torch.testing.assert_close(block(x, F.scaled_dot_product_attention), block(x, dg.attention))
    parameters = list(block.parameters())
    block.inwards.weight.data[:64] /= 25
    exact = torch.autograd.grad(block(x, F.scaled_dot_product_attention).square().mean(), parameters)
    ours = torch.autograd.grad(
        block(x, lambda *a, **b: dg.attention(*a, **b, force="polynomial")).square().mean(), parameters
    )
    for one, other in zip(exact, ours, strict=True):
        assert float((one - other).norm() / one.norm().clamp(min=1e-9)) < 1e-2
