"""Arguments are validated whatever was called before, and the same arguments take the same path."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_settings import checked
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.fast_attention import attention as attention_module
from depthgauge.fast_attention.call import Tensors, kept_validated
from depthgauge.fast_attention.plan import PreparedCall


def draw(n: int, m: int, heads: int = 2, key_heads: int = 2, d: int = 16, e: int = 16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (1, heads, n, d), (1, key_heads, m, d), (1, key_heads, m, e)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of all problems whose numbers were examined."""
    found: list[int] = []
    original = PreparedCall.look

    def watched(prepared: PreparedCall, tensors: Tensors) -> Callable[[], bool] | None:
        found.append(prepared.call.n)
        return original(prepared, tensors)

    monkeypatch.setattr(PreparedCall, "look", watched)
    return found


@pytest.mark.parametrize(
    ("n", "m", "options"),
    [
        (1, 300, {}),
        (5, 5, {"is_causal": True}),
        (4, 9, {"scale": 0.3, "tolerance": 1e-5}),
        (4, 9, {"scale": 0.0}),
        (4, 9, {"attn_mask": torch.ones(4, 9, dtype=torch.bool).tril(3)}),
        (3000, 3000, {"force": "exact"}),
    ],
)
def test_small_masked_and_exact_calls_are_those_of_torch(
    n: int, m: int, options: dict[str, Any], surveyed: list[int]
) -> None:
    given = {name: value for name, value in options.items() if name not in ("tolerance", "force")}
    q, k, v = draw(n, m)
    assert torch.equal(dg.attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **given))
    shared = draw(n, m, heads=6)
    wanted = F.scaled_dot_product_attention(*shared, **given, enable_gqa=True)
    assert torch.equal(dg.attention(*shared, **options, enable_gqa=True), wanted)
    assert surveyed == []


SMALL = [
    *itertools.product((1, 2, 7, 300, 900), (1, 64, 700, 2500), (False, True), (16, 64)),
    *itertools.product((4000,), (40, 4000), (False, True), (16, 64)),
]


@pytest.mark.parametrize("gradients", [False, True])
def test_too_few_pairs_never_pay(gradients: bool) -> None:
    small = []
    for n, m, is_causal, width in SMALL:
        q, k, v = (torch.zeros(length, width).expand(1, 2, -1, -1) for length in (n, m, m))
        call, _ = checked(q, k, v, is_causal=is_causal)
        if n * m <= call.most_pairs:
            small.append((n, m, is_causal, width))
            assert PreparedCall(call._replace(gradients=gradients)).largest_bound == 0, small[-1]
    assert {(1, 2500, False, 64), (300, 64, True, 16)} <= {*small}
    assert len(small) < len(SMALL)


BAD: list[dict[str, Any]] = [
    {"tolerance": 0.0}, {"tolerance": -1.0}, {"tolerance": math.nan}, {"tolerance": math.inf},
    {"tolerance": True}, {"scale": math.inf}, {"scale": True}, {"scale": [1.0]}, {"dropout_p": 2.0},
    {"dropout_p": -0.1}, {"dropout_p": False}, {"force": "fast"}, {"key_padding": torch.zeros(3, dtype=torch.bool)},
    {"attn_mask": torch.zeros(4, 6), "is_causal": True}, {"attn_mask": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("options", BAD)
def test_invalid_options_are_not_accepted(options: dict[str, Any], calls: int) -> None:
    q, k, v = draw(4, 6)
    for _ in range(calls):
        dg.attention(q, k, v, tolerance=1, scale=1, dropout_p=0)
        dg.attention(q, k, v, attn_mask=torch.zeros(4, 6))
    with pytest.raises(InputError, match=f"^{next(iter(options))}|attn_mask and is_causal"):
        dg.attention(q, k, v, **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[..., :8], k, v), "q and k must have the same width"),
        (lambda q, k, v: (q, k, v[..., :3, :]), "k and v must have the same tokens"),
        (lambda q, k, v: (q.double(), k, v), "same dtype and device"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "q must be float64, float32"),
        (lambda q, k, v: (q[0, 0, 0], k, v), r"q must be a tensor \[\.\.\., heads, tokens, width\]"),
        (lambda q, k, v: (q, k[0, 0, 0], v[0, 0, 0]), r"k must be a tensor"),
        (lambda q, k, v: (q, k.numpy(), v), "k must be a tensor"),
        (lambda q, k, v: (q, k.repeat(1, 2, 1, 1), v.repeat(1, 3, 1, 1)), "k and v must have heads"),
    ],
)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("grouped", [False, True])
def test_invalid_tensors_are_named_after_valid_calls(change: Any, words: str, rows: int, grouped: bool) -> None:
    given = draw(rows, 6)
    for _ in range(3):
        dg.attention(*given, enable_gqa=grouped)
    with pytest.raises(InputError, match=words):
        dg.attention(*change(*given), enable_gqa=grouped)


def test_heads_that_cannot_be_grouped_are_not_accepted() -> None:
    with pytest.raises(InputError, match=r"multiple of the key heads, got q \[1, 5, n, 16\], k \[1, 2, m, 16\]"):
        dg.attention(*draw(4, 6, heads=5), enable_gqa=True)


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
def test_broadcast_tensors_after_other_calls_are_right(change: Any, rows: int) -> None:
    q, k, v = draw(rows, 40)
    given = change(q, k, v)
    for grouped in (False, True):
        want = F.scaled_dot_product_attention(*given, enable_gqa=grouped)
        for _ in range(2):
            dg.attention(q, k, v, enable_gqa=grouped)
            assert torch.allclose(dg.attention(*given, enable_gqa=grouped), want, atol=1e-5)


def test_steps_of_decoding_are_validated_once() -> None:
    q, cache, other = draw(1, 40)
    for m in range(20, 40):
        for k, v in ((cache[..., :m, :], other[..., :m, :]), (cache[..., :m, :].clone(), other[..., :m, :].clone())):
            assert torch.equal(dg.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert kept_validated.cache_info().misses == 1  # type: ignore[attr-defined]


def test_calls_depend_on_types_of_equal_numbers() -> None:
    q, k, v = draw(4, 6)
    assert checked(q, k, v, scale=1)[0].named == (("scale", 1.0),)
    with pytest.raises(InputError, match="scale must be a finite number"):
        checked(q, k, v, scale=True)


def test_the_same_arguments_take_the_same_path_whatever_came_before(surveyed: list[int]) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 6000, 4, generator=generator) for _ in range(3))
    calls = {
        "small": (0.01 * q, 0.01 * k, v), "large": (3e2 * q, 0.01 * k, v),
        "few": (q[..., :9, :], k[..., :9, :], v[..., :9, :]),
    }  # fmt: skip
    first = {name: dg.attention(*given) for name, given in calls.items()}
    assert not torch.equal(first["small"], F.scaled_dot_product_attention(*calls["small"]))
    assert torch.equal(first["large"], F.scaled_dot_product_attention(*calls["large"]))
    assert surveyed == [6000, 6000]
    order = [*calls] * 5
    random.Random(0).shuffle(order)
    for name in order:
        assert torch.equal(dg.attention(*calls[name]), first[name])
    assert len(surveyed) == 2 + 10


def test_padding_is_not_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(2000, 2000)
    given, padding = (30.0 * q, k, v), torch.arange(2000)[None] > 1500
    wanted = dg.attention(*given, key_padding=padding, force="exact")
    monkeypatch.setattr(attention_module, "is_capturing", lambda _: True)
    monkeypatch.setattr(Tensor, "__bool__", lambda _: pytest.fail("a number was read"))
    for is_causal in (False, True):
        found = dg.attention(*given, key_padding=padding, is_causal=is_causal)
        assert is_causal or torch.equal(found, wanted) is True


@pytest.mark.parametrize(
    "options", [{}, {"return_bound": True}, {"key_padding": torch.zeros(0, 300, dtype=torch.bool)}]
)
def test_calls_without_heads_are_exact(options: dict[str, Any]) -> None:
    q = k = v = torch.zeros(0, 2, 300, 16)
    out = dg.attention(q, k, v, **options)
    assert (out[0] if isinstance(out, tuple) else out).shape == (0, 2, 300, 16)
    with pytest.raises(InputError, match="empty"):
        dg.attention(q, k, v, force="polynomial")


def test_a_tolerance_that_no_polynomial_meets_is_an_error_if_one_is_forced() -> None:
    q, k, v = draw(300, 300)
    assert torch.equal(dg.attention(q, k, v, tolerance=1e-300), F.scaled_dot_product_attention(q, k, v))
    with pytest.raises(InputError, match="cannot meet tolerance 1e-300"):
        dg.attention(q, k, v, tolerance=1e-300, force="polynomial")
