"""Exact attention by torch, for whole calls, for heads and for single rows.

Calls of torch's attention are made here, because some need other arguments:

- With a negative scale, torch's kernels multiply masked scores, −∞, by the scale. Every causal row becomes NaN.
- On a GPU, some kernels read 16 bytes at once and do not check that addresses and strides are multiples of 16 bytes.
  The result is an error or wrong numbers.
- On a GPU, cuDNN reads the masks of 16-bit tensors two keys at a time. With an odd number of keys, it reads beyond the
  end of a mask that is the same for all rows.
- On a GPU, cuDNN reads float32 masks of 16-bit tensors as if they had 16 bits (torch pull request 191612).
- On a GPU, query heads that share keys have no fast kernel with a mask. Torch would hold all scores at once.
- In a CUDA graph, cuDNN cannot be captured before its first call with new shapes, in which it allocates memory.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from depthgauge.base.errors import InputError
from depthgauge.fast_attention.call import Call, Tensors, is_dual, is_watched

MASK_ENTRIES = 2**27
"""The largest number of mask entries that are created at once."""
READ_BYTES = 16
"""What torch's GPU kernels read at once."""
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WATCHED = (
    "hooks see what is saved for gradients, as in torch.utils.checkpoint, where a recomputation must take the same "
    "path; give force or plan to use a polynomial"
)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, named: Mapping[str, Any]) -> Tensor:
    """Compute torch's attention of tensors with any addresses and strides, with any scale, and in a CUDA graph.

    `named` holds arguments of torch's attention; those that are not named have their default.
    """
    if named.get("scale", 1.0) < 0:
        q, named = -q, {**named, "scale": -named["scale"]}
    if not q.is_cuda:
        return torch_attention(q, k, v, mask, **named)
    is_captured = False
    if not torch.compiler.is_compiling():
        is_captured = torch.cuda.is_current_stream_capturing()
        q, k, v = readable_all(q, k, v)
        mask = mask if mask is None or not have_addresses(mask) else readable(mask)
    if mask is not None:
        mask = _cast(mask, q.dtype)
        mask = mask if is_paired(mask) else paired(mask, q.dtype)
    # Only then a fast kernel lets query heads share keys. Otherwise torch would compute all scores at once.
    if "enable_gqa" in named and not (mask is None and q.shape[-1] == v.shape[-1] <= 256):
        groups = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(groups, dim=-3), v.repeat_interleave(groups, dim=-3)
        named = {name: value for name, value in named.items() if name != "enable_gqa"}
    if is_captured:
        with sdpa_kernel(WITHOUT_CUDNN):
            return torch_attention(q, k, v, mask, **named)
    return torch_attention(q, k, v, mask, **named)


def have_addresses(*tensors: Tensor) -> bool:
    """Return whether the tensors have memory of their own. Those inside torch.vmap and torch.func.grad have none."""
    try:
        for x in tensors:
            x.data_ptr()
    except RuntimeError:
        return False
    return True


def readable_all(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors that torch's kernels can read: the given ones, or copies. Those without addresses are kept."""
    try:
        is_aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % READ_BYTES
    except RuntimeError:
        return q, k, v
    if is_aligned and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return q, k, v
    return readable(q), readable(k), readable(v)


def is_readable(x: Tensor) -> bool:
    """Return whether torch's kernels can read x: its address and its strides are multiples of READ_BYTES.

    Strides do not matter if the width is not a multiple of READ_BYTES either: torch does not read such rows at once.

    >>> x = torch.zeros(3, 8)
    >>> is_readable(x), is_readable(x[:, 4:]), is_readable(x[:, 1:5])
    (True, True, False)
    """
    step = READ_BYTES // x.element_size()
    is_wide = x.ndim > 0 and x.shape[-1] % step == 0
    return x.data_ptr() % READ_BYTES == 0 and not (is_wide and _has_odd_stride(x, step))


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy that torch's kernels can read."""
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def _cast(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask in a 16-bit dtype, if it has wider numbers. Those that it cannot hold become its largest ones.

    >>> _cast(torch.tensor([-torch.inf, torch.finfo(torch.float32).min]), torch.float16).tolist()
    [-inf, -65504.0]
    """
    if mask.dtype in (torch.bool, dtype) or dtype.itemsize != 2:
        return mask
    largest = torch.finfo(dtype).max
    return torch.where(mask.isinf(), mask, mask.clamp(-largest, largest)).to(dtype)


def is_paired(mask: Tensor) -> bool:
    """Return whether torch reads nothing beyond the mask: rows have their own memory, or the number of keys is even."""
    if mask.ndim == 0 or mask.shape[-1] % 2 == 0:
        return True
    return mask.ndim > 1 and mask.shape[-2] > 1 and mask.stride(-2) != 0


def paired(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is the same for all rows as numbers to be added to the scores, with room after the last key.

    >>> paired(torch.tensor([[True, False, True]]), torch.bfloat16).stride()
    (8, 1)
    >>> paired(torch.tensor([[True, False, True]]).expand(4, 3), torch.float32)[2]
    tensor([0., -inf, 0.])
    """
    row = mask[tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride()[:-1])]
    if mask.dtype == torch.bool:
        row = torch.zeros_like(row, dtype=dtype).masked_fill(~row, -torch.inf)
    keys = mask.shape[-1]
    return pad(row, (0, -keys % (READ_BYTES // 2)))[..., :keys].expand(mask.shape)


def _has_odd_stride(x: Tensor, step: int) -> bool:
    """Return whether a stride, except that of the last axis, is not a multiple of `step`."""
    together = 0
    *strides, _ = x.stride()
    for stride in strides:
        together |= stride
    return together % step != 0 and any(
        stride % step for size, stride in zip(x.shape[:-1], strides, strict=True) if size > 1
    )


def why_exact(call: Call, given: Tensors) -> str | None:
    """Return why a call needs the exact path, or None if the polynomial path can compute it."""
    q, k, v, padding, mask = given
    reason = None
    if mask is not None:
        reason = "the polynomial path does not support a general mask"
    elif "dropout_p" in dict(call.named):
        reason = "the polynomial path does not support dropout"
    elif padding is not None and bool(padding.all(dim=-1).any()):
        reason = "a batch has padding keys only"
    elif q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        reason = "q, k or v is empty"
    elif is_dual(q, k, v):
        reason = "the polynomial path does not support forward-mode derivatives"
    elif not have_addresses(q, k, v):
        reason = "the polynomial path does not support torch.vmap and torch.func"
    elif call.causal and padding is not None and bool(padding[..., 0].any()):
        reason = "the first key is padding, so the first causal row has no key"
    elif call.force is None and is_watched(q, k, v):
        return WATCHED
    if reason is not None and call.force == "polynomial":
        raise InputError(f'force="polynomial" is not possible: {reason}; leave force unset')
    return 'force="exact" was given' if reason is None and call.force == "exact" else reason


def call_torch(call: Call, given: Tensors) -> Tensor:
    """Compute a whole call, with padding as a mask."""
    q, k, v, padding, mask = given
    named = dict(call.named)
    if padding is not None:
        keep = ~padding[..., None, None, :] if k.ndim > 2 else ~padding[None]
        if named.pop("is_causal", False):
            keep = keep & torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=keep.device).tril()
        if mask is not None:
            keep = keep & mask if mask.dtype == torch.bool else torch.where(keep, mask, -torch.inf)
        mask = keep
    return sdpa(q, k, v, mask, named)


def heads(call: Call, tensors: Tensors) -> Tensor:
    """Compute all rows of flat tensors: [N, G, n, e]."""
    if tensors.padding is None:
        k, v = (x.unsqueeze(1).expand(-1, call.groups, -1, -1) for x in (tensors.k, tensors.v))
        return sdpa(tensors.q, k, v, None, {"scale": call.scale, "is_causal": call.causal})
    count = tensors.q.shape[0]
    positions = torch.arange(call.n, device=tensors.k.device).repeat(count, call.groups)
    return rows(call, tensors, tensors.q.flatten(1, 2), positions).view(count, call.groups, call.n, -1)


def rows(call: Call, tensors: Tensors, q: Tensor, positions: Tensor) -> Tensor:
    """Compute rows q [N, R, d] at positions [N, R]: [N, R, e]. Masks are created for a block of rows at a time."""
    k, v, padding = tensors.k[:, None], tensors.v[:, None], tensors.padding
    size = max(1, MASK_ENTRIES // (q.shape[0] * call.m)) if call.causal or padding is not None else q.shape[1]
    parts = []
    for start in range(0, q.shape[1], size):
        some, at = q[:, None, start : start + size], positions[:, start : start + size, None]
        allowed = torch.arange(call.m, device=q.device) <= at if call.causal else None
        if padding is not None:
            allowed = ~padding[:, None] if allowed is None else allowed & ~padding[:, None]
        mask = None if allowed is None else allowed[:, None]
        parts.append(sdpa(some, k, v, mask, {"scale": call.scale})[:, 0])
    return torch.cat(parts, dim=1)


def replaced(call: Call, tensors: Tensors, out: Tensor, marked: Tensor) -> Tensor:
    """Return `out` with the rows marked in `marked` [N, G, n] computed anew, all heads in one call."""
    flat = marked.flatten(1)
    most = int(flat.sum(dim=1).max())
    chosen = flat.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]  # marked rows first
    at = torch.arange(flat.shape[0], device=out.device)[:, None]
    found = rows(call, tensors, tensors.q.flatten(1, 2)[at, chosen], chosen % call.n)
    kept = flat[at, chosen].nonzero(as_tuple=True)
    places = kept[0], chosen[kept]
    return out.flatten(1, 2).index_put(places, found[kept]).view_as(out)
