"""Torch's GPU kernels get tensors that they can read 16 bytes at a time, and one module makes all calls."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import depthgauge
from depthgauge.fast_attention import exact_path
from depthgauge.fast_attention.exact_path import READ_BYTES, is_paired, paired, readable, readable_all, sdpa

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def _no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that pretend to have a GPU run with a torch that has no CUDA."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def is_readable(x: torch.Tensor) -> bool:
    """Return whether every row starts at a multiple of 16 bytes."""
    rows = torch.zeros((), dtype=torch.long)
    for axis in range(x.ndim - 1):
        steps = torch.arange(x.shape[axis]) * x.stride(axis)
        rows = rows[..., None] + steps
    return bool(((x.data_ptr() + rows * x.element_size()) % READ_BYTES == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_copies_start_at_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    width = 16
    for shift, extra in itertools.product((0, 1, 2, 3, 5, 8), (0, 1, 3, 8)):
        memory = torch.arange(shift + 2 * 3 * 5 * (width + extra) + width, dtype=torch.float64).to(dtype)
        assert memory.data_ptr() % READ_BYTES == 0
        wide = memory[shift : shift + 2 * 3 * 5 * (width + extra)].view(2, 3, 5, width + extra)
        x = wide[..., :width]
        found = readable(x)
        assert torch.equal(found, x), (shift, extra)
        assert is_readable(found), (shift, extra)
        assert (found is x) == is_readable(x), (shift, extra)


def test_an_axis_of_size_one_may_have_any_stride() -> None:
    x = torch.zeros(64).as_strided((1, 2, 3, 8), (7, 24, 8, 1))
    assert readable(x) is x


def test_rows_that_are_read_one_by_one_are_not_copied() -> None:
    x = torch.zeros(2, 3, 5, 7)
    assert readable(x) is x
    shifted = torch.zeros(2 * 3 * 5 * 7 + 1)[1:].view(2, 3, 5, 7)
    assert readable(shifted).data_ptr() % READ_BYTES == 0


def test_a_negative_scale_is_exact_and_has_gradients() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = sdpa(q, k, v, None, {"is_causal": True, "scale": -0.7})
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    wanted = (-0.7 * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(out, wanted)
    up = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), up), torch.autograd.grad(wanted, (q, k, v), up))


def test_torch_attention_is_called_in_one_module() -> None:
    root = Path(depthgauge.__file__).parent / "fast_attention"
    call = re.compile(r"\bscaled_dot_product_attention\(|torch_attention\(")
    callers = [p.name for p in root.rglob("*.py") if call.search(re.sub(r'""".*?"""', "", p.read_text(), flags=re.S))]
    assert sorted(callers) == ["exact_path.py"]


@pytest.mark.parametrize(("e", "is_masked", "is_shared"), [(4, False, True), (8, False, False), (4, True, False)])
def test_shared_keys_are_repeated_where_no_fast_kernel_shares_them(
    e: int, is_masked: bool, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = torch.randn(1, 6, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, e)
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if is_masked else None
    wanted = sdpa(q, k, v, mask, {"enable_gqa": True})
    asked: list[bool] = []
    original = exact_path.torch_attention

    def watched(*given: Any, **options: Any) -> torch.Tensor:
        asked.append(options.get("enable_gqa", False))
        return original(*given, **options)

    monkeypatch.setattr(exact_path, "torch_attention", watched)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    torch.testing.assert_close(sdpa(q, k, v, mask, {"enable_gqa": True}), wanted)
    assert asked == [is_shared]


def test_only_tensors_that_cannot_be_read_are_copied() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    shifted = torch.zeros(1 + q.numel())[1:].view(q.shape).copy_(q)
    apart = torch.cat([k, k[..., :1]], -1)[..., :8]  # rows are 9 entries apart
    turned = v.transpose(1, 2).contiguous().transpose(1, 2)
    for given, copied in (((q, k, v), ()), ((shifted, k, v), (0,)), ((q, apart, turned), (1,)), ((q, k, turned), ())):
        found = readable_all(*given)
        assert tuple(at for at in range(3) if found[at] is not given[at]) == copied
        assert all(torch.equal(one, other) for one, other in zip(found, given, strict=True))


def test_cudnn_is_not_used_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN allocates memory in its first call with new shapes, which a capture does not permit."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    contexts: list[object] = []
    original = exact_path.sdpa_kernel
    monkeypatch.setattr(exact_path, "sdpa_kernel", lambda kinds: contexts.append(kinds) or original(kinds))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for is_captured in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda is_captured=is_captured: is_captured)
        torch.testing.assert_close(sdpa(q, k, v, None, {}), F.scaled_dot_product_attention(q, k, v))
        assert len(contexts) == is_captured
    assert torch.nn.attention.SDPBackend.CUDNN_ATTENTION not in contexts[0]  # type: ignore[operator]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The masks that torch's attention gets."""
    found: list[torch.Tensor] = []
    original = exact_path.torch_attention

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found.append(mask)
        return original(q, k, v, mask)

    monkeypatch.setattr(exact_path, "torch_attention", watched)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", [7, 8])
@pytest.mark.parametrize("is_bool", [True, False])
def test_masks_have_room_after_an_odd_number_of_keys(
    dtype: torch.dtype, keys: int, is_bool: bool, seen: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(2, 3, n, 4, generator=generator).to(dtype) for n in (5, keys, keys))
    keep = torch.rand(2, 1, 1, keys, generator=generator) < 0.7
    keep[..., 0] = True
    mask = keep if is_bool else torch.randn(2, 1, 1, keys, generator=generator).to(dtype).requires_grad_()
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = sdpa(q, k, v, mask, {})
    torch.testing.assert_close(found, wanted)
    (given,) = seen
    is_copied = keys == 7
    assert (given is mask) == (not is_copied)
    if is_copied:
        assert given.dtype == dtype
        after = given.storage_offset() + given.numel() + (given.shape[0] - 1) * (8 - keys)
        assert after < given.untyped_storage().nbytes() // given.element_size()
    if not is_bool:
        torch.testing.assert_close(
            *(torch.autograd.grad(x.float().sum(), mask, retain_graph=True)[0] for x in (found, wanted)),
            rtol=1e-2, atol=1e-2,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", [7, 8])
def test_wide_masks_of_16_bit_tensors_are_cast(
    dtype: torch.dtype, keys: int, seen: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(1, 2, n, 8).to(dtype) for n in (5, keys, keys))
    mask = torch.randn(1, 1, 5, keys)
    mask[..., 1], mask[..., 2], mask[0, 0, 0] = -torch.inf, torch.finfo(torch.float32).min, -1e38
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = sdpa(q, k, v, mask, {})
    (given,) = seen
    assert given.dtype == dtype
    exact = (q.double() @ k.double().mT / 8**0.5 + given.double()).softmax(-1) @ v.double()
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize(("shape", "is_copied"), [((7,), True), ((1, 7), True), ((5, 7), False), ((), False)])
def test_masks_whose_rows_differ_are_not_copied(shape: tuple[int, ...], is_copied: bool) -> None:
    mask = torch.ones(shape, dtype=torch.bool)
    assert is_paired(mask) == (not is_copied)
    if is_copied:
        expanded = mask.expand(2, 3, 5, 7)
        assert not is_paired(expanded)
        found = paired(expanded, torch.float16)
        assert found.shape == expanded.shape
        assert found.untyped_storage().nbytes() == 16  # one row, as before


@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("calls", [1, 4])
def test_masks_have_room_under_autocast_too(
    calls: int, is_bool: bool, seen: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled = torch.is_autocast_enabled
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 7, 7))
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool) if is_bool else torch.zeros(1, 1, 1, 7)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: enabled("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(calls):
            assert depthgauge.attention(q, k, v, mask).dtype == torch.bfloat16
    assert len(seen) == calls
    for given in seen:
        assert given.dtype == torch.bfloat16
        assert given.untyped_storage().nbytes() == 16


@pytest.mark.parametrize(("width", "is_direct"), [(16, True), (9, False)])
def test_slices_of_caches_of_any_length_are_passed_to_torch_as_they_are(
    width: int, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, passed = torch.randn(2, 3, 1, 8), list[torch.Tensor]()
    attend = exact_path.torch_attention

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None) -> torch.Tensor:
        passed.append(k)
        return attend(q, k, v, mask)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(exact_path, "torch_attention", watched)
    for m in range(5, 12):
        k = torch.randn(2, 3, m + 4, width)[:, :, :m, :8]
        passed.clear()
        found = depthgauge.attention(q, k, k)
        (given,) = passed
        assert (given is k) == is_direct
        torch.testing.assert_close(found, attend(q, k.contiguous(), k.contiguous()))


def test_attention_does_not_call_itself_in_place_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some users replace torch's function by ours."""
    q, k, v = (0.01 * torch.randn(1, 1, 4096, 16) for _ in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v)
    monkeypatch.setattr(F, "scaled_dot_product_attention", depthgauge.attention)
    for _ in range(4):
        assert torch.equal(depthgauge.attention(q, k, v, force="exact"), wanted)
