"""Checks that the attention benchmarks make before they measure anything: outputs and gradients against float64.

Every function returns or yields a description of an error. Without a GPU the same checks run on the torch backend.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fresh_tensors import VARIATION, Call, Place, small_scores, trained_scores
from torch import Tensor

from depthgauge.fast_attention.attention import attention, attention_plan
from depthgauge.fast_attention.plan import AttentionPlan

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from naive_attention import softmax_attention

CHECKED_ROWS = 64
GRADIENT_GAP = 0.03
"""The largest relative error of a gradient in Frobenius norm; the unit roundoff of bf16 is 2⁻⁸."""


def not_fused(plan: AttentionPlan, place: Place, degree: int | None = None) -> bool:
    """Return whether a head is not a polynomial of the degree in Triton. On a CPU any polynomial is accepted."""
    if place.device.type != "cuda":
        return plan.path != "polynomial"
    is_other = [head.path != "polynomial" or head.backend != "triton" for head in plan.heads]
    return any(is_other) or any(degree is not None and head.degree != degree for head in plan.heads)


def exact_rows_of(call: Call, rows: Tensor, is_causal: bool) -> Tensor:
    """Return exact attention in float64 of some rows: [..., heads, rows, e]. Heads are computed one by one."""
    q, k, v = (x.detach().flatten(0, -3) for x in (call.q, call.k, call.v))
    hidden = torch.arange(k.shape[1], device=k.device) > rows[:, None]
    found = []
    for qh, kh, vh in zip(q, k, v, strict=True):
        scores = qh[rows].double() @ kh.double().T / math.sqrt(q.shape[-1])
        found.append(scores.masked_fill(hidden & is_causal, -math.inf).softmax(-1) @ vh.double())
    return torch.stack(found).view(*call.q.shape[:-2], len(rows), v.shape[-1])


def value_range(v: Tensor) -> Tensor:
    """Return max − min of every value column in float64: [..., 1, e]."""
    low, high = v.detach().double().aminmax(dim=-2, keepdim=True)
    return high - low


def check_small(place: Place, n: int, bound: float, is_causal: bool, force: str | None) -> str | None:
    """Compare the output for small scores with float64 and the guarantee on some rows of every head."""
    call = small_scores(place, n, bound, 1 + VARIATION)
    how: dict[str, Any] = {"is_causal": is_causal, "force": force}
    which = f"small scores, n = {n}, causal {is_causal}, force {force}"
    plan = attention_plan(call.q, call.k, call.v, **how)
    if force == "polynomial" and (not_fused(plan, place, 2) or any(h.exact_rows for h in plan.heads)):
        return f"not degree 2 for all rows ({which}):\n{plan}"
    for _ in range(3):  # the first call decides, the others may repeat its decision
        out = attention(call.q, call.k, call.v, **how)
        assert isinstance(out, Tensor)
        rows = torch.randint(0, n, (CHECKED_ROWS,), device=place.device)
        exact = exact_rows_of(call, rows, is_causal)
        # Exact heads have no rounding allowance in the plan: torch rounds P to the dtype of v.
        share = plan.tolerance + plan.rounding + (plan.output_unit if plan.path != "polynomial" else 0.0)
        allowed = share * value_range(call.v) + plan.output_unit * exact.abs() + plan.output_floor
        if not bool(((out[..., rows, :].double() - exact).abs() <= allowed).all()):
            return f"the output exceeds its guarantee ({which}):\n{plan}"
    return None


def check_trained(place: Place, n: int, is_causal: bool, m: int | None = None, batch: int = 1) -> str | None:
    """Compare output and gradients for the scores of a trained model with float64.

    The output may differ by the tolerance and by twice the largest error of torch's own attention, and each gradient by
    twice the error of torch's own gradient. Exact attention must be chosen.
    """
    which = f"scores of a trained model, n = {n}, causal {is_causal}"
    call = trained_scores(place, n, 1.0, with_backward=True, m=m, batch=batch)
    given, tolerance = (call.q, call.k, call.v), 1e-3
    plan = attention_plan(*given, is_causal=is_causal, tolerance=tolerance)
    if plan.path != "exact":
        return f"exact attention was not chosen ({which}):\n{plan}"
    peer = F.scaled_dot_product_attention(*given, is_causal=is_causal)
    wide = [x.detach().double().requires_grad_() for x in given]
    exact = softmax_attention(*wide, 1 / math.sqrt(place.width), is_causal)
    assert call.up is not None
    true = torch.autograd.grad(exact, wide, call.up.double())
    theirs = torch.autograd.grad(peer, given, call.up)
    lost = float((peer - exact).detach().abs().max())
    for at in range(4):  # calls after a refusal may be exact without a decision
        out = attention(*given, is_causal=is_causal, tolerance=tolerance)
        assert isinstance(out, Tensor)
        allowed = tolerance * value_range(call.v) + 2 * lost + plan.output_floor
        if not bool(((out.detach().double() - exact.detach()).abs() <= allowed).all()):
            return f"the output of call {at} exceeds its tolerance ({which})"
        for name, mine, other, one in zip("qkv", torch.autograd.grad(out, given, call.up), theirs, true, strict=True):
            gap, torch_gap = (float((x.double() - one).norm()) for x in (mine, other))
            if not gap <= 2 * torch_gap + 1e-3 * float(one.norm()):
                return f"the gradient of {name} in call {at} is off by {gap:.3g}, torch's by {torch_gap:.3g} ({which})"
    return None


def check_kinds(place: Place, is_short: bool, n: int = 1300, m: int = 1500) -> Iterator[str]:
    """Compare every entry with float64 and the guarantee, for several dtypes, widths and kinds of calls."""
    dtypes, widths = (torch.bfloat16, torch.float16, torch.float32), ((64, 64), (16, 32), (128, 64))
    dtypes, widths = (dtypes[:1], widths[:1]) if is_short else (dtypes, widths)
    for dtype, (d, e), is_causal, kind in itertools.product(dtypes, widths, (False, True), ("", "shifted", "shared")):
        groups = 2 if kind == "shared" else 1
        factor = (0.35 / 2 / d) ** 0.5
        # The range of weights is small in float16.
        shift = 0.0 if kind != "shifted" else 0.2 if dtype == torch.float16 else 0.5
        q = factor * place.normal(1, 2 * groups, n, d) + shift
        k, v = factor * place.normal(1, 2, m, d), place.normal(1, 2, m, e) + 3
        q, k, v = (x.to(dtype) for x in (q, k, v))
        padding = (torch.arange(m, device=place.device) % 7 == 5)[None] if kind == "shared" else None
        given: dict[str, Any] = {
            "is_causal": is_causal, "tolerance": 5e-3, "scale": 1.0, "key_padding": padding,
            "enable_gqa": groups > 1, "force": "polynomial",
        }  # fmt: skip
        plan = attention_plan(q, k, v, **given)
        out = attention(q, k, v, **given)
        assert isinstance(out, Tensor)
        wide = [x.double().repeat_interleave(groups, dim=1) for x in (k, v)]
        exact = softmax_attention(
            q.double(), *wide, 1.0, is_causal, None if padding is None else ~padding[:, None, :]
        )  # fmt: skip
        seen = wide[1] if padding is None else wide[1][:, :, ~padding[0]]
        allowed = (plan.guarantee + plan.rounding) * value_range(seen) + plan.output_unit * exact.abs()
        # The float32 kernels do not support every pair of widths; the torch backend computes the others.
        is_mixed = dtype == torch.float32 and d != e and min(d, e) == 16
        is_wrong = not_fused(plan, place) and not is_mixed
        if is_wrong or not bool(((out.double() - exact).abs() <= allowed).all()):
            yield f"{dtype}, {d} by {e}, causal {is_causal}, {kind or 'plain'}:\n{plan}"


def check_gradients(
    place: Place, n: int, m: int, bound: float, is_causal: bool, groups: int = 1,
    widths: tuple[int, int] | None = None, dtype: torch.dtype = torch.bfloat16,
) -> str | None:  # fmt: skip
    """Compare the gradients of the polynomial path with float64. Return a description of the error, or None."""
    d, e = (place.width, place.width) if widths is None else widths
    heads = place.heads
    q, k = (place.normal(1, h, t, d) for h, t in ((heads, n), (heads // groups, m)))
    longest = (0.97 * bound * math.sqrt(d)) ** 0.5
    q, k = (x * (longest / x.norm(dim=-1).amax(dim=-1)[..., None, None]) for x in (q, k))
    v = place.normal(1, heads // groups, m, e)
    given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    how: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": groups > 1, "force": "polynomial"}
    which = f"{dtype}, {d} by {e}, {n} by {m}, causal {is_causal}, {groups} query heads a key head"
    plan = attention_plan(*given, **how)
    if not_fused(plan, place, 2):
        return f"gradients not at degree 2 ({which}):\n{plan}"
    exact = [x.detach().double().requires_grad_() for x in given]
    shared = (x.repeat_interleave(groups, dim=1) for x in exact[1:])
    reference = softmax_attention(exact[0], *shared, 1 / math.sqrt(d), is_causal)
    up = torch.randn_like(reference, dtype=dtype)
    true = torch.autograd.grad(reference, exact, up.double())
    for _ in range(2):  # the second call may repeat the decision of the first
        out = attention(*given, **how)
        assert isinstance(out, Tensor)
        for name, one, other in zip("qkv", torch.autograd.grad(out, given, up), true, strict=True):
            gap = float((one.double() - other).norm() / other.norm())
            if not gap < GRADIENT_GAP:
                return f"the gradient of {name} has a relative error of {gap:.1%} ({which})"
    return None


def check_all_gradients(place: Place, bound: float, is_short: bool) -> Iterator[str]:
    """Compare the gradients with float64 for several shapes, widths and dtypes."""
    shapes = [(4000, 4000, False, 1), (4000, 4000, True, 1), (5000, 5000, True, 4), (3000, 2100, True, 1)]
    shapes += [(2100, 3000, True, 1), (700, 700, True, 1)]
    shapes_of_others = [(2100, 2100, True, 2), (2100, 2100, False, 2)]
    kinds: list[tuple[tuple[int, int], torch.dtype]] = [((place.width, place.width), torch.bfloat16)]
    if not is_short:
        others = itertools.product(((128, 64), (64, 128), (128, 128), (16, 32)), (torch.bfloat16, torch.float32))
        kinds += [(w, t) for w, t in others if t != torch.float32 or 16 not in w]
        kinds += [((64, 64), torch.float16), ((64, 64), torch.float32), ((16, 16), torch.float32)]
    for at, (widths, dtype) in enumerate(kinds):
        for n, m, is_causal, groups in shapes if at == 0 else shapes_of_others:
            if problem := check_gradients(place, n, m, bound, is_causal, groups, widths, dtype):
                yield problem
