"""Exact attention by torch, for whole calls, for heads and for single rows.

Calls of torch's attention are made here, because some need other arguments:

- With a negative scale, torch's kernels multiply masked scores, −∞, by the scale. Every causal row becomes NaN.
- On a GPU, some kernels read 16 bytes at once and do not check that addresses and strides are multiples of 16 bytes.
  The result is an error or wrong numbers.
- On a GPU, cuDNN reads the masks of 16-bit tensors two keys at a time. With an odd number of keys, it reads beyond the
  end of a mask that is the same for all rows.
- On a GPU, cuDNN reads float32 masks of 16-bit tensors as if they had 16 bits (torch pull request 191612).
- On a GPU, query heads that share keys have no fast kernel with a mask. Torch would hold all scores at once.

`attention` itself makes calls that need none of this because an earlier call of the same kind needed none of it; see
`direct`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from depthgauge.errors import InputError
from depthgauge.fast_attention.autograd import is_autocast, is_watched
from depthgauge.fast_attention.naive import visible
from depthgauge.fast_attention.problem import Problem, Request, is_dual

MASK_ENTRIES = 2**27
"""The largest number of mask entries that are created at once."""
READ_BYTES = 16
"""What torch's GPU kernels read at once."""
WATCHED = (
    "hooks see what is saved for gradients, as in torch.utils.checkpoint, where a recomputation must take the same "
    "path; give force or plan to use a polynomial"
)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    is_grouped: bool = False,
    is_traced: bool | None = None,
) -> Tensor:
    """Compute torch's attention of tensors with any addresses and strides, and with any scale.

    `is_traced` is whether torch.compile is tracing the call, so that tensors have no addresses; None looks it up.
    """
    if is_traced is None:
        is_traced = torch.compiler.is_compiling()
    if q.is_cuda:
        if not is_traced and have_addresses(q, k, v, *(() if mask is None else (mask,))):
            is_even = (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()) or have_even_strides(q, k, v)
            if not is_even or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % READ_BYTES:
                q, k, v = readable(q), readable(k), readable(v)
            mask = None if mask is None else readable(mask)
        if mask is not None:
            dtype = _used_dtype(q)
            mask = _cast(mask, dtype)
            mask = mask if is_paired(mask) else paired(mask, dtype)
        if is_grouped and not _shares_keys(q, v, mask):
            groups = q.shape[-3] // k.shape[-3]
            k, v, is_grouped = k.repeat_interleave(groups, dim=-3), v.repeat_interleave(groups, dim=-3), False
    if scale is not None and scale < 0:
        q, scale = -q, -scale
    named = arguments(dropout, is_causal, scale, is_grouped)
    if mask is None:
        return torch_attention(q, k, v, **named)
    return torch_attention(q, k, v, mask, **named)


def have_addresses(*tensors: Tensor) -> bool:
    """Return whether the tensors have memory of their own. Those inside torch.vmap and torch.func.grad have none."""
    try:
        for x in tensors:
            x.data_ptr()
    except RuntimeError:
        return False
    return True


def arguments(dropout: float, is_causal: bool, scale: float | None, is_grouped: bool) -> dict[str, Any]:
    """Return the arguments of torch's attention that are not its default: torch takes some time for every other one.

    >>> arguments(0.0, True, 0.0, False)
    {'is_causal': True, 'scale': 0.0}
    """
    named: dict[str, Any] = {}
    if dropout != 0.0:
        named["dropout_p"] = dropout
    if is_causal:
        named["is_causal"] = True
    if scale is not None:
        named["scale"] = scale
    if is_grouped:
        named["enable_gqa"] = True
    return named


class Direct(NamedTuple):
    """Calls whose tensors torch reads as they are: the strides, and the arguments besides tensors that are not default.

    `mask` is the dtype of the mask, if there is one. Without a mask, contiguous tensors and those that
    `have_even_strides` are read as they are too.
    """

    strides: tuple[tuple[int, ...], ...]
    is_contiguous: bool
    mask: torch.dtype | None
    arguments: dict[str, Any]


def direct(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float | None,
    is_grouped: bool,
) -> Direct | None:  # fmt: skip
    """Return how `exact_attention` passes such tensors to torch, or None if it has to change an argument first."""
    given = (q, k, v) if mask is None else (q, k, v, mask)
    if not have_addresses(*given):
        return None
    if scale is not None and scale < 0:
        return None
    if q.is_cuda:
        is_masked_well = mask is None or (mask.dtype in (torch.bool, q.dtype) and is_paired(mask))
        is_shared_well = not is_grouped or _shares_keys(q, v, mask)
        if not (is_masked_well and is_shared_well and all(map(_is_always_readable, given))):
            return None
    strides, is_contiguous = tuple(x.stride() for x in given), all(x.is_contiguous() for x in given)
    named = arguments(dropout, is_causal, scale, is_grouped)
    return Direct(strides, is_contiguous, None if mask is None else mask.dtype, named)


def is_known(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, known: Direct) -> bool:
    """Return whether tensors of the same shapes as in a masked call before can be passed to torch as they are too."""
    strides = q.stride(), k.stride(), v.stride(), mask.stride()
    together = q.data_ptr() | k.data_ptr() | v.data_ptr() | mask.data_ptr()
    return strides == known.strides and mask.dtype is known.mask and not together % READ_BYTES


def capturable(is_capturing: bool) -> AbstractContextManager[object]:
    """Return a context in which torch's attention can be captured although it has not run on such tensors before.

    cuDNN allocates memory in its first call with new shapes, which a capture does not permit.
    """
    if not is_capturing:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _shares_keys(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Return whether a fast kernel can let query heads share keys. Otherwise torch would compute all scores at once."""
    return mask is None and q.shape[-1] == v.shape[-1] <= 256


def have_even_strides(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the entries of a row are neighbours and rows are a multiple of 8 entries apart, in four axes.

    Torch can read tensors with these strides if their addresses are multiples of READ_BYTES. No dtype has less than two
    bytes.

    >>> x = torch.zeros(1, 2, 3, 8)
    >>> have_even_strides(x[..., :2, :], x, x), have_even_strides(x[..., :4], x, x)
    (True, True)
    >>> have_even_strides(x.mT, x, x), have_even_strides(torch.zeros(1, 2, 3, 9)[..., :8], x, x)
    (False, False)
    """
    try:
        (a, b, c, x), (d, e, f, y), (g, h, i, z) = q.stride(), k.stride(), v.stride()
    except ValueError:  # not four axes
        return False
    return x == y == z == 1 and not (a | b | c | d | e | f | g | h | i) % (READ_BYTES // 2)


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


def _is_always_readable(x: Tensor) -> bool:
    """Return whether torch's kernels can read tensors with the address and the strides of x, longer ones included."""
    step = READ_BYTES // x.element_size()
    return is_readable(x) and not any(stride % step for stride in x.stride()[:-1] if x.shape[-1] % step == 0)


def _used_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype in which torch computes attention of q: that of autocast, if it is enabled."""
    is_cast = is_autocast(q) and q.dtype != torch.float64
    return torch.get_autocast_dtype(q.device.type) if is_cast else q.dtype


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


def exact_reason(request: Request) -> str | None:
    """Return why the request needs the exact path, or None if the polynomial path can compute it."""
    options, reason = request.options, None
    if options.attn_mask is not None:
        reason = "the polynomial path does not support a general mask"
    elif options.dropout_p > 0:
        reason = "the polynomial path does not support dropout"
    elif options.key_padding is not None and bool(options.key_padding.all(dim=-1).any()):
        reason = "a batch has padding keys only"
    elif request.q.numel() == 0 or request.k.numel() == 0 or request.v.numel() == 0:
        reason = "q, k or v is empty"
    elif is_dual(request.q, request.k, request.v):
        reason = "the polynomial path does not support forward-mode derivatives"
    elif not have_addresses(request.q, request.k, request.v):
        reason = "the polynomial path does not support torch.vmap and torch.func"
    elif options.is_causal and options.key_padding is not None and bool(options.key_padding[..., 0].any()):
        reason = "the first key is padding, so the first causal row has no key"
    elif options.force is None and is_watched(request.q, request.k, request.v):
        return WATCHED
    if reason is not None and options.force == "polynomial":
        raise InputError(f'force="polynomial" is not possible: {reason}; leave force unset')
    return 'force="exact" was given' if reason is None and options.force == "exact" else reason


def exact(request: Request) -> Tensor:
    """Compute the request by torch's attention, with padding as a mask."""
    options = request.options
    mask, is_causal = options.attn_mask, options.is_causal
    if options.key_padding is not None:
        keep = ~options.key_padding[..., None, None, :] if request.k.ndim > 2 else ~options.key_padding[None]
        if is_causal:
            keep = keep & visible(request.q.shape[-2], request.k.shape[-2], True, None, keep.device)
        if mask is not None:
            keep = keep & mask if mask.dtype == torch.bool else torch.where(keep, mask, -torch.inf)
        mask, is_causal = keep, False
    given = request.q, request.k, request.v
    return exact_attention(*given, mask, options.dropout_p, is_causal, request.scale, options.enable_gqa)


def exact_heads(problem: Problem) -> Tensor:
    """Compute exact attention of a Problem: [N, G, n, e]."""
    groups, n = problem.q.shape[1:3]
    k, v = (x.unsqueeze(1).expand(-1, groups, -1, -1) for x in (problem.k, problem.v))
    if problem.keep is None:
        return exact_attention(problem.q, k, v, None, 0.0, problem.causal, problem.scale)
    positions = torch.arange(n, device=k.device).repeat(problem.heads, groups)
    return exactly(problem, problem.q.flatten(1, 2), positions).view(problem.heads, groups, n, -1)


def exactly(problem: Problem, q: Tensor, positions: Tensor) -> Tensor:
    """Compute exact attention of rows q [N, R, d] at positions [N, R]: [N, R, e].

    Masks are created for a block of rows at a time.
    """
    k, v, m = problem.k[:, None], problem.v[:, None], problem.k.shape[1]
    is_masked = problem.causal or problem.keep is not None
    size = max(1, MASK_ENTRIES // (problem.heads * m)) if is_masked else q.shape[1]
    parts = []
    for start in range(0, q.shape[1], size):
        rows, at = q[:, None, start : start + size], positions[:, start : start + size, None]
        allowed = torch.arange(m, device=q.device) <= at if problem.causal else None
        if problem.keep is not None:
            allowed = problem.keep[:, None] if allowed is None else allowed & problem.keep[:, None]
        mask = None if allowed is None else allowed[:, None]
        parts.append(exact_attention(rows, k, v, mask, scale=problem.scale)[:, 0])
    return torch.cat(parts, dim=1)


def exact_rows(problem: Problem, out: Tensor, rows: Tensor) -> Tensor:
    """Return `out` with the rows marked in `rows` [N, G, n] replaced by exact attention, all heads in one call."""
    flat, n = rows.flatten(1), problem.q.shape[2]
    most = int(flat.sum(dim=1).max())
    chosen = flat.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]  # marked rows first
    heads = torch.arange(problem.heads, device=out.device)[:, None]
    found = exactly(problem, problem.q.flatten(1, 2)[heads, chosen], chosen % n)
    kept = flat[heads, chosen].nonzero(as_tuple=True)
    places = kept[0], chosen[kept]
    return out.flatten(1, 2).index_put(places, found[kept]).view_as(out)
