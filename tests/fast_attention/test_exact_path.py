"""Torch's GPU kernels get tensors that they can read 16 bytes at a time, and one module makes all calls."""

import re
from pathlib import Path

import pytest
import torch

import depthgauge
from depthgauge.fast_attention.exact_path import READ_BYTES, exact_attention, readable

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_readable(x: torch.Tensor) -> bool:
    """Return whether every row starts at a multiple of 16 bytes."""
    rows = torch.zeros((), dtype=torch.long)
    for axis in range(x.ndim - 1):
        steps = torch.arange(x.shape[axis]) * x.stride(axis)
        rows = rows[..., None] + steps
    return bool(((x.data_ptr() + rows * x.element_size()) % READ_BYTES == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("extra", [0, 1, 3, 8])
def test_rows_of_copies_start_at_multiples_of_16_bytes(dtype: torch.dtype, shift: int, extra: int) -> None:
    width = 16
    memory = torch.arange(shift + 2 * 3 * 5 * (width + extra) + width, dtype=torch.float64).to(dtype)
    assert memory.data_ptr() % READ_BYTES == 0
    wide = memory[shift : shift + 2 * 3 * 5 * (width + extra)].view(2, 3, 5, width + extra)
    x = wide[..., :width]
    found = readable(x)
    assert torch.equal(found, x)
    assert is_readable(found)
    assert (found is x) == is_readable(x)


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
    out = exact_attention(q, k, v, None, 0.0, True, -0.7)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    wanted = (-0.7 * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(out, wanted)
    up = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), up), torch.autograd.grad(wanted, (q, k, v), up))


def test_torch_attention_is_called_in_one_module() -> None:
    root = Path(depthgauge.__file__).parent / "fast_attention"
    call = re.compile(r"F\.scaled_dot_product_attention\(")
    callers = [p.name for p in root.rglob("*.py") if call.search(re.sub(r'""".*?"""', "", p.read_text(), flags=re.S))]
    assert callers == ["exact_path.py"]
