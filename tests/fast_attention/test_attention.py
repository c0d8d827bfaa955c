"""`attention` and `attention_plan` from the outside: arguments, paths, reasons, and use in networks."""

import math
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from kernel_settings import checked
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.fast_attention import exact_path as exact_module
from depthgauge.fast_attention import plan as plan_module
from depthgauge.fast_attention.bounds import Survey
from depthgauge.fast_attention.call import Call, GuaranteeError, Tensors
from depthgauge.fast_attention.plan import Decision, PreparedCall
from depthgauge.fast_attention.polynomial_path import Backend, Batch


def draw(n: int = 300, d: int = 8, size: float = 0.02, heads: int = 2, seed: int = 0, **kind: object) -> list[Tensor]:
    """Draw q, k, v whose scores are about `size` times a normal number."""
    generator = torch.Generator().manual_seed(seed)
    factor = math.sqrt(size)
    q, k, v = (torch.randn(1, heads, n, d, generator=generator, **kind) for _ in range(3))  # type: ignore[arg-type]
    return [factor * q, factor * k, v]


# --- invalid arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tolerance": 0.0}, "tolerance must be a positive number, got 0.0"),
        ({"tolerance": -1e-3}, "got -0.001"),
        ({"tolerance": float("nan")}, "got nan"),
        ({"force": "polynomal"}, "did you mean 'polynomial'"),
        ({"scale": float("inf")}, "scale must be a finite number, got inf"),
        ({"dropout_p": 1.5}, "dropout_p must be a probability between 0 and 1, got 1.5"),
        ({"dropout_p": True}, "got True"),
        ({"q": torch.zeros(1, 2, 300, 7)}, "same width, got q [1, 2, n, 7]"),
        ({"q": torch.zeros(1, 4, 300, 8)}, "unless enable_gqa is set"),
        ({"q": torch.zeros(1, 3, 300, 8), "enable_gqa": True}, "multiple of the key heads"),
        (
            {"q": torch.zeros(4, 300, 8), "k": torch.zeros(300, 8), "v": torch.zeros(300, 8), "enable_gqa": True},
            "a head",
        ),
        (
            {"q": torch.zeros(3, 2, 300, 8), "k": torch.zeros(2, 2, 300, 8), "v": torch.zeros(2, 2, 300, 8)},
            "equal or 1",
        ),
        ({"v": torch.zeros(1, 2, 299, 8)}, "same tokens"),
        ({"q": torch.zeros(8)}, "got shape [8]"),
        ({"q": torch.zeros(1, 2, 300, 8, dtype=torch.int64)}, "got torch.int64"),
        ({"k": torch.zeros(1, 2, 300, 8, dtype=torch.float64)}, "same dtype and device"),
        ({"attn_mask": torch.ones(300, 300, dtype=torch.bool), "is_causal": True}, "cannot be combined"),
        ({"key_padding": torch.zeros(1, 2, 300)}, "key_padding must be a bool tensor of shape [1, 300]"),
        ({"attn_mask": torch.ones(300, 300, dtype=torch.bool), "force": "polynomial"}, "a general mask"),
        ({"dropout_p": 0.1, "force": "polynomial"}, "does not support dropout"),
    ],
)
def test_invalid_arguments_raise_an_error_that_names_them(change: dict[str, object], words: str) -> None:
    arguments = dict(zip("qkv", draw(), strict=True)) | change
    for call in (dg.attention, dg.attention_plan):
        with pytest.raises(InputError) as caught:
            call(**arguments)  # type: ignore[operator]
        assert words in str(caught.value)


def test_forcing_the_polynomial_for_large_scores_reports_the_bound_and_the_degree() -> None:
    q, k, v = draw(size=9.0)
    with pytest.raises(GuaranteeError, match=r"B = \d+.* about degree \d\d"):
        dg.attention(q, k, v, force="polynomial")
    assert dg.attention_plan(q, k, v).path == "exact"


# --- paths and reasons ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attn_mask": torch.zeros(300, 300)}, "a general mask"),
        ({"dropout_p": 0.5}, "dropout"),
        ({"force": "exact"}, 'force="exact" was given'),
        ({"key_padding": torch.ones(1, 300, dtype=torch.bool)}, "padding keys only"),
        ({"key_padding": torch.arange(300)[None] < 1, "is_causal": True}, "the first causal row has no key"),
    ],
)
def test_calls_without_a_polynomial_path_are_exact_with_a_reason(change: dict[str, object], why: str) -> None:
    q, k, v = draw()
    plan = dg.attention_plan(q, k, v, **change)  # type: ignore[arg-type]
    assert plan.path == "exact"
    assert why in plan.heads[0].why
    assert why in str(plan)


def test_masks_dropout_and_padding_are_computed_by_torch() -> None:
    q, k, v = draw(n=20)
    mask = torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0] = True
    torch.testing.assert_close(dg.attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    added = torch.where(mask, 0.0, -3.0)
    torch.testing.assert_close(dg.attention(q, k, v, added), F.scaled_dot_product_attention(q, k, v, added))
    padding = torch.arange(20)[None] >= 15
    for given in (None, mask, added):
        short = None if given is None else given[:, :15]
        expected = F.scaled_dot_product_attention(q, k[..., :15, :], v[..., :15, :], short)
        torch.testing.assert_close(dg.attention(q, k, v, given, key_padding=padding, force="exact"), expected)
    torch.manual_seed(0)
    dropped = dg.attention(q, k, v, None, 0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(dropped, F.scaled_dot_product_attention(q, k, v, None, 0.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_inputs_that_are_not_finite_give_the_output_of_torch(bad: float, where: int) -> None:
    tensors = draw(n=64)
    tensors[where][0, 1, 5, 2] = bad
    plan = dg.attention_plan(*tensors)
    assert plan.heads[1].path == "exact"
    assert "not finite" in plan.heads[1].why
    out = dg.attention(*tensors)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*tensors), rtol=1e-3, atol=4e-3, equal_nan=True)
    forced = dg.attention_plan(*tensors, force="polynomial")  # the other head can be forced, this one cannot
    assert [head.path for head in forced.heads] == ["polynomial", "exact"]


def test_padding_that_is_not_finite_selects_the_exact_path() -> None:
    q, k, v = draw(n=64)
    padding = torch.arange(64)[None] >= 60
    k[..., 61, :] = math.nan
    plan = dg.attention_plan(q, k, v, key_padding=padding)
    assert plan.path == "exact"


def test_small_scores_are_fast_large_ones_exact_and_few_tokens_exact() -> None:
    assert dg.attention_plan(*draw(n=8192)).path == "polynomial"
    assert dg.attention_plan(*draw(n=8192, size=30.0)).path == "exact"
    few = dg.attention_plan(*draw(n=64))
    assert few.path == "exact"
    assert "cheaper" in few.heads[0].why
    assert few.heads[0].cost_exact < few.heads[0].cost_polynomial


def test_heads_are_decided_one_by_one() -> None:
    small, large = draw(n=600, heads=1), draw(n=600, heads=1, size=20.0, seed=1)
    tiny = draw(n=600, heads=1, size=0.15, seed=2)
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(large, small, tiny, large, strict=True))
    plan = dg.attention_plan(q, k, v)
    out = dg.attention(q, k, v)
    forced = dg.attention_plan(q[:, 1:3], k[:, 1:3], v[:, 1:3], force="polynomial")
    assert len({head.degree for head in forced.heads}) == 2
    both, bound = dg.attention(q[:, 1:3], k[:, 1:3], v[:, 1:3], force="polynomial", return_bound=True)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    width = v.amax(-2, keepdim=True) - v.amin(-2, keepdim=True)
    assert bool(((out - expected).abs() <= 1.1e-3 * width).all())
    assert bool(((both - expected[:, 1:3]).abs() <= bound[..., None] * width[:, 1:3] + 1e-6).all())
    assert [head.path for head in plan.heads][::3] == ["exact", "exact"]


def test_centring_removes_a_common_shift() -> None:
    q, k, v = draw(n=500)
    plain = dg.attention_plan(q, k, v, force="polynomial").heads[0]
    moved = dg.attention_plan(q + 3, k - 5, v, force="polynomial").heads[0]
    assert moved.bound_before > 100 * plain.bound_before
    assert moved.bound_after < 1.2 * plain.bound_after
    assert moved.centring == "keys, queries"
    assert plain.centring == "none"
    keys = dg.attention_plan(q, k + 5, v, force="polynomial").heads[0]
    assert keys.centring == "keys"


def test_few_rows_beyond_the_limit_are_computed_exactly() -> None:
    q, k, v = draw(n=4000, d=16)
    q[:, :, ::1000] *= 60
    plan = dg.attention_plan(q, k, v)
    assert [head.exact_rows for head in plan.heads] == [4, 4]
    assert "4 of 4000 rows" in str(plan)
    for causal in (False, True):
        out, bound = dg.attention(q, k, v, is_causal=causal, force="polynomial", return_bound=True)
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
        torch.testing.assert_close(out[:, :, ::1000].double(), exact[:, :, ::1000], rtol=1e-4, atol=1e-5)
        assert bool((bound[:, :, ::1000] == 0).all())
        width = v.amax(-2, keepdim=True) - v.amin(-2, keepdim=True)
        assert bool(((out - exact).abs() <= 1.2e-3 * width).all())


def test_weights_that_would_underflow_on_the_causal_path_are_not_used() -> None:
    q, k, v = draw(n=300)
    shifted = dg.attention_plan(q + 1e3, k, v, is_causal=True)
    assert shifted.path == "exact"
    assert dg.attention_plan(q + 1e3, k, v, force="polynomial").path == "polynomial"


def test_a_higher_degree_is_chosen_only_if_it_costs_little_more() -> None:
    few, many = (dg.attention_plan(*draw(n=n, d=4, size=1e-5), force="polynomial").heads[0] for n in (100, 40000))
    assert (few.degree or 0) > (many.degree or 0)
    assert few.guarantee < many.guarantee


def test_the_plan_prints_as_a_table() -> None:
    plan = dg.attention_plan(*draw(n=4096, d=16, size=0.02))
    text = str(plan)
    assert text.splitlines()[0] == "attention at tolerance 0.001: polynomial"
    assert len({len(line.split("  ")) > 5 for line in text.splitlines()[1:]}) == 1
    assert "153" in text
    assert plan.heads[0].features == 153
    assert 0 < plan.guarantee <= 1e-3
    assert 0 < plan.rounding < 1e-3


def test_the_allowance_counts_reduced_precision_products() -> None:
    arguments = draw(n=4096)
    fine = dg.attention_plan(*arguments, force="polynomial").rounding
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        coarse = dg.attention_plan(*arguments, force="polynomial").rounding
    finally:
        torch.set_float32_matmul_precision(before)
    assert coarse > fine + 2**-11


def test_the_plan_notes_a_missing_gpu_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(plan_module, "has_triton", lambda: False)
    assert "extra gpu" in plan_module.notes(gpu)[0]
    assert plan_module.notes(torch.device("cpu")) == ()
    monkeypatch.setattr(plan_module, "has_triton", lambda: True)
    assert plan_module.notes(gpu) == ()


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 5), (3, 40, 5), (2, 3, 40, 5), (2, 1, 3, 40, 5)])
def test_any_number_of_leading_axes(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.1 * torch.randn(*shape, generator=generator) for _ in range(3))
    out, bound = dg.attention(q, k, v, force="polynomial", return_bound=True)
    assert out.shape == shape
    assert bound.shape == shape[:-1]
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), rtol=1e-2, atol=1e-4)


BROADCAST = [
    ((2, 4), (2, 1), (2, 1), False),  # one key head
    ((2, 4), (2, 1), (2, 1), True),
    ((2, 4), (1, 4), (1, 4), False),  # one batch of keys
    ((2, 4), (1, 1), (1, 1), False),
    ((2, 4), (1, 2), (1, 2), True),
    ((2, 4), (4,), (1,), False),  # fewer axes
    ((2, 4), (), (), False),
    ((1, 4), (2, 4), (2, 4), False),  # one batch of queries
    ((2, 1), (2, 4), (2, 4), False),
    ((2, 4), (2, 1), (2, 4), False),  # one key head, several value heads
    ((2, 4), (2, 2), (2, 1), True),
    ((), (2, 4), (2, 4), False),
]


@pytest.mark.parametrize(("q", "k", "v", "grouped"), BROADCAST)
@pytest.mark.parametrize("force", ["exact", "polynomial"])
def test_axes_are_broadcast_as_in_torch(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], grouped: bool, force: str
) -> None:
    generator, factor = torch.Generator().manual_seed(0), math.sqrt(0.02)
    given = [
        (size * torch.randn(*lead, n, 8, generator=generator, dtype=torch.float64)).requires_grad_()
        for lead, n, size in ((q, 40, factor), (k, 50, factor), (v, 50, 1.0))
    ]
    for causal in (False, True):
        want = F.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=grouped)
        found = dg.attention(*given, is_causal=causal, enable_gqa=grouped, force=force, tolerance=1e-4)
        assert isinstance(found, Tensor)
        assert found.shape == want.shape
        assert torch.allclose(found, want, atol=1e-3)
        weights = torch.randn(want.shape, generator=generator, dtype=torch.float64)
        ours, theirs = (torch.autograd.grad((out * weights).sum(), given) for out in (found, want))
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape
            assert torch.allclose(one, other, atol=1e-3)
    plan = dg.attention_plan(*given, enable_gqa=grouped, force=force, tolerance=1e-4)
    followed = dg.attention(*given, enable_gqa=grouped, tolerance=1e-4, plan=plan)
    assert isinstance(followed, Tensor)
    assert torch.allclose(followed, F.scaled_dot_product_attention(*given, enable_gqa=grouped), atol=1e-3)


def test_repeated_calls_with_one_key_head_stay_right() -> None:
    """The decision of the first call is repeated for tensors of the same shapes."""
    for seed in range(4):
        q, k, v = draw(2000, heads=3, seed=seed)
        found = dg.attention(q, k[:, :1], v[:, :1])
        assert isinstance(found, Tensor)
        assert torch.allclose(found, F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]), atol=2e-3)


def test_the_plan_of_one_key_head_has_one_row() -> None:
    q, k, v = draw(2000, heads=3)
    assert len(dg.attention_plan(q, k[:, :1], v[:, :1]).heads) == 1


@pytest.mark.parametrize("empty", [(1, 2, 0, 4), (0, 2, 5, 4), (1, 2, 5, 0)])
def test_empty_tensors(empty: tuple[int, ...]) -> None:
    q = torch.zeros(*empty)
    assert dg.attention(q, q, q).shape == empty
    assert dg.attention_plan(q, q, q).path == "exact"


def test_attention_needs_torch_alone() -> None:
    code = (
        "import sys\n"
        "for name in ('jaxtyping', 'scipy', 'typer', 'safetensors', 'matplotlib', 'flint', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import torch, depthgauge\n"
        "q = torch.eye(4)\n"
        "print(depthgauge.attention(q, q, q, force='polynomial', tolerance=0.1).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "torch.Size([4, 4])", done.stderr


def test_no_survey_if_exact_attention_is_always_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    surveyed: list[int] = []
    original = Backend.survey

    def watched(backend: Backend, call: Call, tensors: Tensors) -> Survey:
        surveyed.append(call.n)
        return original(backend, call, tensors)

    monkeypatch.setattr(Backend, "survey", watched)
    few, many = draw(n=64, d=8), draw(n=20000, d=4, size=1e-4, heads=1)
    assert dg.attention_plan(*few).path == "exact"
    assert surveyed == [64]  # a plan always reports B
    torch.testing.assert_close(dg.attention(*few), F.scaled_dot_product_attention(*few), rtol=0, atol=0)
    _, bound = dg.attention(*few, return_bound=True)
    assert float(bound.abs().max()) == 0
    assert surveyed == [64]
    dg.attention(*few, force="polynomial")
    dg.attention(*many)
    assert surveyed == [64, 64, 20000]


@pytest.mark.parametrize("n", [64, 256, 1024, 4096])
@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_never_worth_it_is_never_chosen(n: int, gradients: bool) -> None:
    for d, size in ((2, 1e-9), (8, 1e-4), (16, 1e-2)):
        tensors = draw(n=n, d=d, size=size, heads=1)
        call, _ = checked(*tensors)
        tensors[0].requires_grad_(gradients)
        never = PreparedCall(call._replace(gradients=gradients)).largest_bound == 0
        assert never or n > 64
        assert not never or n < 4096
        assert not never or dg.attention_plan(*tensors).path == "exact"


# --- exact rows and scales --------------------------------------------------------------------------------------------


def test_centred_heads_are_computed_apart_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(n=300, d=8, size=0.02)
    q[:, 1] += 1.0
    done: list[list[int]] = []
    original = Decision.batch

    def watched(decision: Decision, tensors: Tensors, members: Sequence[int]) -> Batch:
        done.append([decision.choices[head].centring for head in members])
        return original(decision, tensors, members)

    monkeypatch.setattr(Decision, "batch", watched)
    out = dg.attention(q, k, v, scale=1.0, force="polynomial")
    assert len({tuple(centrings) for centrings in done}) > 1
    assert all(len(set(centrings)) == 1 for centrings in done)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=1.0)
    assert float((out - exact).abs().max()) < 1e-3 * float((v.amax(-2) - v.amin(-2)).max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_of_exact_rows_are_created_in_blocks(causal: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(n=400, d=8, size=0.05)
    q[:, :, 5::40] *= 40
    padding = (torch.arange(400) % 7 == 3)[None].expand(q.shape[0], -1) if padded else None
    how = {"is_causal": causal, "key_padding": padding, "scale": 1.0, "force": "polynomial"}
    whole = dg.attention(q, k, v, **how)
    assert dg.attention_plan(q, k, v, **how).heads[0].exact_rows > 0
    monkeypatch.setattr(exact_module, "MASK_ENTRIES", 3000)
    torch.testing.assert_close(dg.attention(q, k, v, **how), whole)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_negative_scale_is_a_positive_scale_of_the_opposite_queries(causal: bool, padded: bool) -> None:
    """torch multiplies masked scores by the scale: at a negative scale its causal rows are NaN on a CPU."""
    q, k, v = draw(n=60, d=8, size=3.0)
    q[:, 1, 5:] *= 1e-3  # one head can be a polynomial
    padding = (torch.arange(60) % 7 == 3)[None] if padded else None
    how = {"is_causal": causal, "key_padding": padding}
    wanted = dg.attention(-q, k, v, scale=0.7, **how)
    for force in (None, "exact"):
        found = dg.attention(q, k, v, scale=-0.7, force=force, **how)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
