"""Calls that a campaign found: equal tokens, whose centred vectors are zero, and forced calls after a NaN."""

import math
import sys
from typing import Any

import pytest
import torch
from kernel_settings import DEVICE, checked
from naive_attention import softmax_attention

from depthgauge.fast_attention import plan
from depthgauge.fast_attention.attention import attention, attention_plan
from depthgauge.fast_attention.bounds import survey
from depthgauge.fast_attention.call import GuaranteeError
from depthgauge.fast_attention.polynomial_path import Batch
from depthgauge.fast_attention.triton_backend import TritonBackend


@pytest.mark.kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("equal", "nonzero"), [("k", "k"), ("q", "qk")])
def test_gradients_of_equal_tokens(equal: str, nonzero: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 has a short range: factors that make a zero vector as long as the others would leave it."""
    triton = TritonBackend(causal_block=128)
    for module in [m for name, m in sys.modules.items() if name.startswith("depthgauge.fast_attention.")]:
        if hasattr(module, "backend_for"):
            monkeypatch.setattr(module, "backend_for", lambda problem, degree: triton)
    monkeypatch.setattr(plan, "HIGHEST_DEGREE", 2)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 2, 30, 16, generator=generator) for name in "qkv"}
    for name in "qk":
        x = tensors[name] * (0.16 / tensors[name].norm(dim=-1).max())
        tensors[name] = x[..., :1, :].expand_as(x).clone() if name == equal else x
    given = [x.to(DEVICE, torch.float16).requires_grad_() for x in tensors.values()]
    how: dict[str, Any] = {"is_causal": causal, "scale": 1.0, "tolerance": 1e-2, "force": "polynomial"}
    assert {head.backend for head in attention_plan(*given, **how).heads} == {"triton"}
    out = attention(*given, **how)
    up = torch.randn(out.shape, generator=generator).to(DEVICE, torch.float16)
    found = dict(zip("qkv", torch.autograd.grad(out, given, up), strict=True))
    wide = [x.detach().double().requires_grad_() for x in given]
    true = torch.autograd.grad(softmax_attention(*wide, 1.0, causal), wide, up.double())
    for name, wanted in zip("qkv", true, strict=True):
        if name in nonzero + "v":
            assert float((found[name].double() - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.parametrize("equal", ["q", "k"])
def test_the_other_side_stays_in_the_range_of_float16_if_a_mean_is_rounded(equal: str) -> None:
    q, k, v = 0.04 * torch.randn(3, 1, 2, 30, 16, generator=torch.Generator().manual_seed(0)).sign()
    call, flat = checked(q.half(), k.half(), v.half())
    found = survey(call, flat)
    setattr(found, "query_centred" if equal == "q" else "key_centred", [1e-9, 0.0])
    factors = Batch(call, ((1.0, 1.0),) * 2, (2, 2), found, flat).factors
    for x, factor in zip((q, k), factors, strict=True):
        scaled = x[0].double() * factor[:, None, None]
        torch.testing.assert_close(scaled.half().double(), scaled, rtol=2.0**-11, atol=0)


def test_a_forced_call_is_decided_even_after_an_exact_one() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.1 * torch.randn(1, 2, 40, 16, generator=generator) for _ in range(3))
    poisoned = v.clone()
    poisoned[..., 3, 3] = math.nan
    assert bool(attention(q, k, poisoned, force="polynomial").isnan().any())
    with pytest.raises(GuaranteeError):
        attention(100 * q, 100 * k, v, force="polynomial")
