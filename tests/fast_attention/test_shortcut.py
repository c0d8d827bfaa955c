"""Calls that are exact without a decision: what the shortcut accepts is valid, exact and never worth a polynomial."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import depthgauge as dg
from depthgauge.errors import InputError
from depthgauge.fast_attention import attention as attention_module
from depthgauge.fast_attention import shortcut
from depthgauge.fast_attention.call_kinds import LONGEST_WAIT, CallKinds
from depthgauge.fast_attention.decide.chooser import is_never_worth_it
from depthgauge.fast_attention.problem import Options, checked
from depthgauge.fast_attention.shortcut import is_always_exact


def draw(n: int, m: int, heads: int = 2, key_heads: int = 2, d: int = 16, e: int = 16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (1, heads, n, d), (1, key_heads, m, d), (1, key_heads, m, e)
    return [torch.randn(size, generator=generator) for size in sizes]


def forbid_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("validated in full")

    monkeypatch.setattr(attention_module, "checked", refuse)


@pytest.mark.parametrize(
    ("n", "m", "options"),
    [
        (1, 300, {}),
        (5, 5, {"is_causal": True}),
        (4, 9, {"scale": 0.3, "tolerance": 1e-5}),
        (4, 9, {"attn_mask": torch.ones(4, 9, dtype=torch.bool).tril(3)}),
        (3000, 3000, {"force": "exact"}),
    ],
)
def test_small_masked_and_exact_calls_go_straight_to_torch(
    n: int, m: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(n, m)
    given = {name: value for name, value in options.items() if name not in ("tolerance", "force")}
    wanted = F.scaled_dot_product_attention(q, k, v, **given)
    forbid_validation(monkeypatch)
    assert torch.equal(dg.attention(q, k, v, **options), wanted)
    shared = draw(n, m, heads=6)
    wanted = F.scaled_dot_product_attention(*shared, **given, enable_gqa=True)
    assert torch.equal(dg.attention(*shared, **options, enable_gqa=True), wanted)


SMALL = [
    *itertools.product((1, 2, 7, 300, 900), (1, 64, 700, 2500), (False, True), (16, 64)),
    *itertools.product((4000,), (40, 4000), (False, True), (16, 64)),
]


def test_what_the_shortcut_accepts_is_never_worth_a_polynomial() -> None:
    accepted = []
    for n, m, is_causal, width in SMALL:
        q, k, v = (torch.zeros(length, width).expand(1, 2, -1, -1) for length in (n, m, m))
        options = Options(is_causal=is_causal)
        if is_always_exact(q, k, v, tuple(options)):
            accepted.append((n, m, is_causal, width))
            problem = checked(q, k, v, options).flat()
            assert [is_never_worth_it(problem, gradients) for gradients in (False, True)] == [True, True], accepted[-1]
    assert {(1, 2500, False, 64), (300, 64, True, 16)} <= {*accepted}
    assert len(accepted) < len(SMALL)


def test_the_shortcut_accepts_decoding_and_refuses_long_sequences() -> None:
    assert is_always_exact(*draw(1, 4096, d=64, e=64), tuple(Options()))
    long = [x.expand(-1, -1, 20_000, -1) for x in draw(1, 1)]
    assert not is_always_exact(*long, tuple(Options()))


BAD: list[dict[str, Any]] = [
    {"tolerance": 0.0}, {"tolerance": -1.0}, {"tolerance": math.nan}, {"tolerance": math.inf},
    {"tolerance": True}, {"scale": math.inf}, {"scale": True}, {"dropout_p": 2.0}, {"dropout_p": -0.1},
    {"force": "fast"}, {"key_padding": torch.zeros(3, dtype=torch.bool)},
    {"attn_mask": torch.zeros(4, 6), "is_causal": True},
]  # fmt: skip


@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("options", BAD)
def test_invalid_options_are_not_accepted(options: dict[str, Any], calls: int) -> None:
    q, k, v = draw(4, 6)
    for _ in range(calls):
        dg.attention(q, k, v)
        dg.attention(q, k, v, attn_mask=torch.zeros(4, 6))
    assert not is_always_exact(q, k, v, tuple(Options(**options)))
    with pytest.raises(InputError):
        dg.attention(q, k, v, **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[..., :8], k, v),
        lambda q, k, v: (q, k, v[..., :3, :]),
        lambda q, k, v: (q.double(), k, v),
        lambda q, k, v: (q.long(), k.long(), v.long()),
        lambda q, k, v: (q[0, 0, 0], k, v),
    ],
)
def test_invalid_tensors_are_not_accepted(change: Any) -> None:
    given = change(*draw(4, 6))
    for grouped in (False, True):
        assert not is_always_exact(*given, tuple(Options(enable_gqa=grouped)))
        with pytest.raises(InputError):
            dg.attention(*given, enable_gqa=grouped)


def test_heads_that_cannot_be_grouped_are_not_accepted() -> None:
    given = draw(4, 6, heads=5, key_heads=2)
    assert not is_always_exact(*given, tuple(Options(enable_gqa=True)))
    with pytest.raises(InputError, match="multiple"):
        dg.attention(*given, enable_gqa=True)


# --- waiting between decisions ----------------------------------------------------------------------------------------


def large(seed: int, size: float = 30.0) -> list[Tensor]:
    q, k, v = draw(2000, 2000, seed=seed)
    return [size * q, k, v]


def test_after_refusals_a_kind_of_call_is_decided_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[int] = []
    true_decide = attention_module.decide

    made: list[None] = []

    def counted(*args: Any) -> Any:
        decided.append(len(made))
        return true_decide(*args)

    monkeypatch.setattr(attention_module, "decide", counted)
    monkeypatch.setattr(attention_module, "is_never_worth_it", lambda *_: False)
    monkeypatch.setattr(shortcut, "_is_small", lambda *_: False)
    given = [x[..., :40, :] for x in large(0)]
    exact = F.scaled_dot_product_attention(*given)
    for _ in range(40):
        assert torch.equal(dg.attention(*given), exact)
        made.append(None)
    assert decided == [0, 2, 5, 10, 19, 36]  # 1, 2, 4, 8, 16 calls in between
    decided.clear()
    dg.attention(*given, tolerance=2e-3)
    dg.attention(*given, force="exact")
    assert len(decided) == 1  # another option is another kind; a forced call is not decided
    with pytest.raises(InputError):
        dg.attention(*given, force="polynomial")
    assert len(decided) == 2


def test_waits_double_up_to_a_limit_and_end_with_a_polynomial(kinds: CallKinds) -> None:
    kind = ("a",)
    waits = [kinds.refused(kind).left for _ in range(14)]
    assert waits == [min(2**r, LONGEST_WAIT) for r in range(14)]
    kinds.accepted(kind)
    assert kinds.exact[kind].left == 0
    assert kinds.refused(kind).left == 1
    assert kinds.refused(kind, is_final=True).left == math.inf
    assert list(kinds.exact) == [kind]


def test_a_kind_that_is_never_worth_a_polynomial_is_decided_once(
    kinds: CallKinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortcut, "_is_small", lambda *_: False)
    given = draw(4, 6)
    wanted = F.scaled_dot_product_attention(*given)
    assert torch.equal(dg.attention(*given), wanted)
    forbid_validation(monkeypatch)
    for _ in range(5):
        assert torch.equal(dg.attention(*given), wanted)


def test_small_scores_are_found_after_the_wait() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 8000, 4, generator=generator) for _ in range(3))
    q, k = 0.01 * q, 0.01 * k
    exact = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(dg.attention(3e4 * q, k, v), F.scaled_dot_product_attention(3e4 * q, k, v))
    assert torch.equal(dg.attention(q, k, v), exact)  # within the wait
    found = dg.attention(q, k, v)
    assert not torch.equal(found, exact)
    assert float((found - exact).abs().max()) <= 1e-3 * float((v.amax(-2) - v.amin(-2)).max())


def test_calls_with_gradients_wait_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "is_never_worth_it", lambda *_: False)
    monkeypatch.setattr(shortcut, "_is_small", lambda *_: False)
    given = [x[..., :30, :].clone().requires_grad_() for x in large(2)]
    first = torch.autograd.grad(dg.attention(*given).square().sum(), given)
    forbid_validation(monkeypatch)
    second = torch.autograd.grad(dg.attention(*given).square().sum(), given)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad(), pytest.raises(AssertionError, match="validated in full"):
        dg.attention(*given)


# --- passing tensors on as they are -----------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two ways to torch's attention every call took."""
    found: list[str] = []
    direct, general = attention_module.torch_attention, attention_module.exact_attention

    def watched(name: str, function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            found.append(name)
            return function(*given, **options)

        return call

    monkeypatch.setattr(attention_module, "torch_attention", watched("direct", direct))
    monkeypatch.setattr(attention_module, "exact_attention", watched("general", general))
    return found


def moved(x: Tensor, shift: int) -> Tensor:
    """Return a copy of x that starts `shift` entries after the start of its memory."""
    memory = torch.empty(x.numel() + shift, dtype=x.dtype)
    return memory[shift:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"scale": 0.0},
        {"attn_mask": torch.ones(1, 6).bool()},
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
    ],
)
def test_calls_that_lie_like_an_earlier_one_are_passed_on(options: dict[str, Any], asked: list[str]) -> None:
    given = draw(6, 6)
    wanted = F.scaled_dot_product_attention(*given, **options)
    for _ in range(4):
        assert torch.equal(dg.attention(*given, **options), wanted)
    assert asked == ["general", "general", "direct", "direct"]
    asked.clear()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    apart = [torch.cat([x, x[..., :1]], -1)[..., :-1] for x in given]  # rows are 17 entries apart
    for tensors in (turned, turned, apart, apart, given):
        torch.testing.assert_close(dg.attention(*tensors, **options), wanted)
    is_masked = "attn_mask" in options
    first = "general" if is_masked else "direct"  # with a mask, only the strides of the call before are known
    assert asked == [first, "direct", "general", "direct", first]
    asked.clear()
    for at in range(3):
        tensors = [moved(x, at == place) for place, x in enumerate(given)]
        assert torch.equal(dg.attention(*tensors, **options), wanted)
    assert asked == ["general"] * 3


def test_a_mask_of_another_dtype_is_not_passed_on(asked: list[str]) -> None:
    given, mask = draw(6, 6), torch.ones(6, 6, dtype=torch.bool).tril()
    wanted = dg.attention(*given, attn_mask=mask)
    dg.attention(*given, attn_mask=mask)
    added = torch.zeros(6, 6).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(dg.attention(*given, attn_mask=added), wanted)
    torch.testing.assert_close(dg.attention(*given, attn_mask=added), wanted)
    assert asked == ["general", "general", "general", "direct"]


def test_calls_with_gradients_shared_keys_and_dropout_are_passed_on(asked: list[str]) -> None:
    q, k, v = (x.requires_grad_() for x in draw(6, 6, heads=4))
    wanted = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    gradients = torch.autograd.grad(wanted.sum(), (q, k, v))
    for _ in range(3):
        found = dg.attention(q, k, v, enable_gqa=True)
        assert torch.equal(found, wanted)
        for one, other in zip(torch.autograd.grad(found.sum(), (q, k, v)), gradients, strict=True):
            assert torch.equal(one, other)
    assert asked == ["general", "general", "direct"]
    for _ in range(3):
        torch.manual_seed(0)
        dropped = dg.attention(q, k, v, dropout_p=0.5, enable_gqa=True)
        torch.manual_seed(0)
        assert torch.equal(dropped, F.scaled_dot_product_attention(q, k, v, None, 0.5, enable_gqa=True))


def test_padded_calls_wait_between_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[None] = []
    true_decide = attention_module.decide

    def counted(*args: Any) -> Any:
        decided.append(None)
        return true_decide(*args)

    monkeypatch.setattr(attention_module, "decide", counted)
    monkeypatch.setattr(attention_module, "is_never_worth_it", lambda *_: False)
    given, padding = [x[..., :40, :] for x in large(0)], torch.arange(40)[None] > 30
    wanted = dg.attention(*given, key_padding=padding, force="exact")
    for _ in range(6):
        assert torch.equal(dg.attention(*given, key_padding=padding), wanted)
    assert len(decided) == 3
    with pytest.raises(InputError, match="key_padding"):
        dg.attention(*given, key_padding=padding.long())


def test_padding_is_not_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    given, padding = large(0), torch.arange(2000)[None] > 1500
    wanted = dg.attention(*given, key_padding=padding, force="exact")
    monkeypatch.setattr(attention_module, "_is_capturing", lambda _: True)
    monkeypatch.setattr(Tensor, "__bool__", lambda _: pytest.fail("a number was read"))
    for is_causal in (False, True):
        found = dg.attention(*given, key_padding=padding, is_causal=is_causal)
        assert is_causal or torch.equal(found, wanted) is True


def test_a_negative_scale_is_never_passed_on(asked: list[str]) -> None:
    given = draw(6, 6)
    for _ in range(3):
        out = dg.attention(*given, is_causal=True, scale=-0.4)
        assert bool(out.isfinite().all())
    assert asked == ["general"] * 3


def test_wrong_arguments_are_named_after_calls_that_were_passed_on() -> None:
    q, k, v = draw(6, 6)
    for _ in range(3):
        dg.attention(q, k, v)
    with pytest.raises(InputError, match="same dtype and device"):
        dg.attention(q, k.double(), v)
    with pytest.raises(InputError, match="same tokens"):
        dg.attention(q, k, v[..., :5, :])


@pytest.mark.parametrize("is_sliced", [False, True])
def test_steps_of_decoding_are_one_kind(
    is_sliced: bool, asked: list[str], kinds: CallKinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, cache, other = draw(1, 40)
    forbid_validation(monkeypatch)
    for m in range(20, 40):
        k, v = (x[..., :m, :] if is_sliced else x[..., :m, :].contiguous() for x in (cache, other))
        assert torch.equal(dg.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert asked == ["general", "general"] + ["direct"] * 18
    assert len(kinds.exact) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k, v[..., :5, :]),
        lambda q, k, v: (q, k[..., :8], v),
        lambda q, k, v: (q, k.double(), v),
        lambda q, k, v: (q[0, 0, 0], k, v),
    ],
)
def test_wrong_tensors_after_steps_of_decoding_are_named(change: Any) -> None:
    q, k, v = draw(1, 40)
    for _ in range(4):
        dg.attention(q, k, v)
    with pytest.raises(InputError, match="must"):
        dg.attention(*change(q, k, v))


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k[0], v[0]),
        lambda q, k, v: (q, k[:, :1], v[:, :1]),
        lambda q, k, v: (q, k[:, :1], v),
        lambda q, k, v: (q[0], k, v),
        lambda q, k, v: (q.expand(2, -1, -1, -1), k, v),
    ],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_broadcast_tensors_after_calls_that_were_passed_on_are_right(change: Any, rows: int) -> None:
    q, k, v = draw(rows, 40)
    given = change(q, k, v)
    assert not is_always_exact(*given, tuple(Options()))
    for grouped in (False, True):
        want = F.scaled_dot_product_attention(*given, enable_gqa=grouped)
        for _ in range(4):
            dg.attention(q, k, v, enable_gqa=grouped)
            assert torch.allclose(dg.attention(*given, enable_gqa=grouped), want, atol=1e-5)


def test_choosers_belong_to_one_number_of_keys(kinds: CallKinds) -> None:
    """Their rounding allowance depends on it."""
    for m in (30, 4000):
        dg.attention(*(0.01 * x for x in draw(1, m)), force="polynomial")
    assert len(kinds._choosers) == 2


def test_steps_with_another_number_of_keys_are_new_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN allocates memory in its first call with new shapes, which a capture does not permit."""
    q, k, v = draw(1, 40)
    is_capturing = [False]
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    for m in (20, 21, 22):
        dg.attention(q, k[..., :m, :], v[..., :m, :])
    asked: list[bool] = []
    original = attention_module.capturable

    def watched(is_new: bool) -> Any:
        asked.append(is_new)
        return original(is_new)

    monkeypatch.setattr(attention_module, "capturable", watched)
    dg.attention(q, k[..., :23, :], v[..., :23, :])
    assert asked == []
    is_capturing[0] = True
    wanted = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(dg.attention(q, k, v), wanted)
    assert asked == [True]
    # Tensors with other strides are new as well.
    several = draw(9, 9)
    is_capturing[0] = False
    for _ in range(3):
        dg.attention(*several)
    is_capturing[0] = True
    asked.clear()
    dg.attention(*several)
    assert asked == []
    dg.attention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in several))
    assert asked == [True]
