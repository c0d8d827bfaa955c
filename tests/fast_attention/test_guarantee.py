"""A search for violations of the guarantee: hypothesis looks for an entry whose error exceeds the reported bound.

With a GPU the search runs there, with sizes that the kernels support. Every call is then repeated, because a repeated
call may follow a Route.
"""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_attention import softmax_attention
from torch import Tensor

from depthgauge.fast_attention import plan as plan_module
from depthgauge.fast_attention.attention import attention, attention_plan
from depthgauge.fast_attention.bounds import at_index, grid_index, output_error
from depthgauge.fast_attention.call import GuaranteeError
from depthgauge.fast_attention.plan import AttentionPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TWISTS = [
    "none",
    "shifted queries",
    "shifted keys",
    "both shifted",
    "outlier key",
    "outlier query",
    "duplicates",
    "zero values",
    "far values",
    "lopsided",
    "one large value",
    "tiny",
    "small values",
    "large values",
    "far scale",
    "near scale",
]


@dataclass(frozen=True)
class Case:
    """A problem that hypothesis can shrink. The tensors are determined by these numbers."""

    seed: int
    n: int
    m: int
    d: int
    e: int
    groups: int
    size: float
    dtype: torch.dtype
    twist: str
    causal: bool
    padded: bool
    tolerance: float
    scale: float | None

    @property
    def stretch(self) -> float:
        """The factor of q and of k; the scale is divided by its square."""
        power = {"far scale": 40, "near scale": -40}.get(self.twist, 0)
        return 2.0**power if self.dtype != torch.float16 else 1.0

    @property
    def used_scale(self) -> float | None:
        """The scale that is passed to `attention`."""
        if self.stretch == 1:
            return self.scale
        return (self.scale if self.scale is not None else 1 / math.sqrt(self.d)) / self.stretch**2

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        factor = math.sqrt(self.size / math.sqrt(self.d))
        q, k = factor * normal(2, 2 * self.groups, self.n, self.d), factor * normal(2, 2, self.m, self.d)
        v = normal(2, 2, self.m, self.e)
        shift = 60.0 if self.dtype == torch.float16 else 1e3
        if self.twist in ("shifted queries", "both shifted"):
            q = q + shift
        if self.twist in ("shifted keys", "both shifted"):
            k = k + shift
        if self.twist == "outlier key":
            k[..., self.m // 2, :] *= 30
        if self.twist == "outlier query":
            q[..., self.n // 2, :] *= 30
        if self.twist == "duplicates":
            q, k = q[..., :1, :].expand_as(q), k[..., :1, :].expand_as(k)
        if self.twist == "zero values":
            v = torch.zeros_like(v)
        if self.twist == "far values":
            v = 100 + v
        if self.twist == "lopsided" and self.dtype != torch.float16:
            q, k = q * 2.0**45, k * 2.0**-45
        if self.twist == "one large value":
            v[..., 0, :] = 50
        if self.twist == "tiny" and self.dtype != torch.float16:
            v = v * 1e-30
        if self.twist in ("small values", "large values"):
            v = v * (1e-5 if self.twist == "small values" else 400)
        q, k = q * self.stretch, k * self.stretch
        padding = None
        if self.padded and self.m > 1:
            padding = torch.rand(2, self.m, generator=generator) < 0.4
            padding[:, 0] = False
        q, k, v = (x.to(DEVICE, self.dtype) for x in (q, k, v))
        return q, k, v, None if padding is None else padding.to(DEVICE)


SIZES = st.sampled_from([1e-6, 1e-3, 0.02, 0.06, 0.15, 0.3, 0.5])
CASES = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    n=st.sampled_from([1, 3, 130, 301, 1500, 2100] if ON_GPU else [1, 2, 3, 17, 130, 257, 301]),
    m=st.sampled_from([1, 5, 255, 301, 1025, 2100] if ON_GPU else [1, 2, 5, 64, 255, 301]),
    d=st.sampled_from([3, 16, 32, 64, 128] if ON_GPU else [1, 2, 3, 8, 16]),
    e=st.sampled_from([2, 16, 32, 64, 128]) if ON_GPU else st.integers(1, 4),
    groups=st.sampled_from([1, 1, 3]),
    size=SIZES,
    dtype=st.sampled_from(DTYPES),
    twist=st.sampled_from(TWISTS),
    causal=st.booleans(),
    padded=st.booleans(),
    tolerance=st.sampled_from([1e-1, 1e-2, 1e-3, 1e-4]),
    scale=st.sampled_from([None, 1.0, -0.7]),
)


def spread(v: Tensor, padding: Tensor | None) -> Tensor:
    """Return range(v) of every column over the keys that are not padding: [2, heads, 1, e]."""
    v = v.double()
    if padding is None:
        return v.amax(-2, keepdim=True) - v.amin(-2, keepdim=True)
    hidden = padding[:, None, :, None]
    high, low = v.masked_fill(hidden, -math.inf).amax(-2, keepdim=True), v.masked_fill(hidden, math.inf)
    return high - low.amin(-2, keepdim=True)


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return exact attention in float64, and the error of float64 as a fraction of range(v)."""
    q, k, v = q.double(), k.double(), v.double()
    scale = case.used_scale if case.used_scale is not None else 1 / math.sqrt(case.d)
    k, v = (x.repeat_interleave(case.groups, dim=1) for x in (k, v))
    keep = None if padding is None else ~padding[:, None, :]
    out = softmax_attention(q, k, v, scale, case.causal, keep)
    largest = abs(scale) * q.norm(dim=-1).amax() * k.norm(dim=-1).amax()
    return out, 2.0**-48 * (1 + largest * case.d)


def reported_bound(plan: AttentionPlan, case: Case) -> tuple[Tensor, Tensor]:
    """Return guarantee + rounding of every query head, and whether its path is polynomial: two [2, heads, 1, 1]."""
    shares = torch.tensor([h.guarantee + h.rounding for h in plan.heads], dtype=torch.float64, device=DEVICE)
    fast = torch.tensor([h.path == "polynomial" for h in plan.heads], device=DEVICE)
    return (x.view(2, 2, 1, 1).repeat_interleave(case.groups, dim=1) for x in (shares, fast))  # type: ignore[return-value]


def check(case: Case, force: str | None) -> AttentionPlan:
    q, k, v, padding = case.tensors()
    arguments = {
        "is_causal": case.causal, "tolerance": case.tolerance, "scale": case.used_scale, "key_padding": padding,
        "enable_gqa": case.groups > 1,
    }  # fmt: skip
    try:
        plan = attention_plan(q, k, v, **arguments, force=force)
    except GuaranteeError:
        assert force == "polynomial"
        force = None
        plan = attention_plan(q, k, v, **arguments)
    out, bound = attention(q, k, v, **arguments, force=force, return_bound=True)
    assert out.dtype == q.dtype
    assert out.shape == (*q.shape[:-1], case.e)
    expected, lost = reference(case, q, k, v, padding)
    share, fast = reported_bound(plan, case)
    width = spread(v, padding).repeat_interleave(case.groups, dim=1)
    stored = plan.output_unit * expected.abs() + plan.output_floor
    error = (out.double() - expected).abs()
    ours = fast & (bound[..., None] > 0)
    assert bool(((error <= (share + lost) * width + stored) | ~ours).all())
    assert bool(((error <= (bound[..., None].double() + lost) * width + stored) | ~ours).all())
    for _ in range(3 if ON_GPU else 0):  # the first call decides, the others may repeat its decision
        again = attention(q, k, v, **arguments, force=force)
        assert isinstance(again, Tensor)
        assert bool((((again.double() - expected).abs() <= (share + lost) * width + stored) | ~ours).all())
    for head in plan.heads:
        assert head.guarantee <= case.tolerance
        assert head.path != "polynomial" or head.exact_rows > 0 or bool((bound > 0).any())
    if plan.path == "exact":
        keep = None if padding is None else ~padding[:, None, None, :]
        if keep is not None and case.causal:
            keep, causal = keep & torch.ones(case.n, case.m, dtype=torch.bool, device=DEVICE).tril(), False
        else:
            causal = case.causal
        scale = case.used_scale
        if scale is not None and scale < 0:  # torch's GPU kernels multiply −∞ by the scale
            q, scale = -q, -scale
        same = F.scaled_dot_product_attention(q, k, v, keep, is_causal=causal, scale=scale, enable_gqa=case.groups > 1)
        # Sums of large values that cancel differ by the order of summation.
        largest = max(1.0, float(v.abs().nan_to_num(0.0, 0.0).max()))
        tolerances = {"rtol": 1e-5, "atol": 1e-5 * largest} if out.dtype == torch.float32 else {}
        torch.testing.assert_close(out, same, equal_nan=True, **tolerances)
    return plan


BASE = Case(
    seed=0, n=300, m=300, d=8, e=3, groups=1, size=0.02, dtype=torch.float32, twist="none", causal=False, padded=False,
    tolerance=1e-3, scale=None,
)  # fmt: skip


@given(CASES)
@example(BASE)
def test_no_entry_exceeds_its_bound(case: Case) -> None:
    check(case, "polynomial")


@given(CASES)
def test_no_entry_exceeds_its_bound_where_the_path_is_chosen(case: Case) -> None:
    check(case, None)


@pytest.mark.soak
@settings(max_examples=4000)
@given(CASES)
def test_no_entry_exceeds_its_bound_in_a_campaign(case: Case) -> None:
    check(case, "polynomial")


@pytest.mark.parametrize("twist", TWISTS)
def test_every_twist(twist: str) -> None:
    for dtype, causal in itertools.product(DTYPES, (False, True)):
        check(replace(BASE, seed=1, size=0.03, dtype=dtype, twist=twist, causal=causal, tolerance=1e-2), "polynomial")


@pytest.mark.parametrize(("size", "degree"), [(1e-6, 0), (0.01, 1), (0.08, 2), (0.2, 3), (0.35, 4)])
def test_every_degree_is_reached(size: float, degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "NEARLY", 1.0)  # choose the lowest degree
    plan = check(replace(BASE, seed=3, size=size), "polynomial")
    assert max(head.degree or 0 for head in plan.heads) == degree


def test_the_worst_case_is_nearly_attained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "NEARLY", 1.0)
    # One coordinate, scores at the extrema of the error, values at the two ends of their range: the bound is tight.
    bound = 0.35
    p = at_index(2, grid_index(bound))
    t = torch.linspace(-bound, bound, 4001, dtype=torch.float64)
    error = sum(c * t**g for g, c in enumerate(p.coefficients)) * torch.exp(-t) - 1
    up, down = float(t[error.argmax()]), float(t[error.argmin()])
    # Equal softmax mass on both: e^up · a = e^down · b.
    many = 2000
    share = math.exp(down) / (math.exp(up) + math.exp(down))
    first = round(many * share)
    k = torch.cat([torch.full((first,), up), torch.full((many - first,), down), torch.tensor([bound, -bound])])
    v = torch.cat([torch.ones(first), torch.zeros(many - first), torch.tensor([0.5, 0.5])])
    q = torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 1, 2, 1)  # two: a single one is centred to 0
    k, v = k.double().view(1, 1, -1, 1), v.double().view(1, 1, -1, 1)
    plan = attention_plan(q, k, v, scale=1.0, force="polynomial")
    assert plan.heads[0].degree == 2
    out = attention(q, k, v, scale=1.0, force="polynomial")
    off = float((out - softmax_attention(q, k, v, 1.0))[..., 0, :].abs().max())
    assert 0.8 * output_error(p.error) < off <= plan.guarantee
