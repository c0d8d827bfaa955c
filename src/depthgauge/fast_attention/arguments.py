"""Validation of the arguments of `attention`, and what they fix.

Everything is validated that does not depend on the numbers in tensors or on the numbers of tokens. The result is kept
by arguments, so that validating a call takes a few microseconds, for decoding steps with a growing cache too.
"""

import math
import numbers
from collections.abc import Callable
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch import Size, Tensor

from depthgauge.base.errors import InputError, require_positive, require_type, unknown_name
from depthgauge.fast_attention.problem import Options, Request, Rules, Sizes
from depthgauge.fast_attention.theory.cost import CPU, GPU_TRITON, exact_cost

FORCES = ("exact", "polynomial")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
broadcast_shapes: Callable[..., Size] = torch.broadcast_shapes


def checked(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Request:
    """Validate the arguments of `attention` and return them as a Request, in which batches are equal."""
    rules = rules_for(q, k, v, options)
    if rules is None:
        q, k, v, is_grouped = broadcast(q, k, v, options.enable_gqa)
        return checked(q, k, v, options._replace(enable_gqa=is_grouped))
    check_tokens(k, v, options.key_padding)
    return Request(q, k, v, options, rules)


def rules_for(q: Tensor, k: Tensor, v: Tensor, options: Options, is_compiling: bool = False) -> Rules | None:
    """Return what the arguments fix, or None if tensors have to be broadcast.

    Raises:
        InputError: An argument is invalid.
    """
    mask, dropout, is_causal, tolerance, scale, padding, is_grouped, force = options
    try:
        rows, keys, values = q.shape, k.shape, v.shape
        key: tuple[Any, ...] = (
            rows[:-2], keys[:-2], values[:-2], rows[-1], keys[-1], values[-1], q.dtype, k.dtype, v.dtype, q.device,
            k.device, v.device, type(mask), type(padding), dropout, is_causal, tolerance, scale, is_grouped, force,
        )  # fmt: skip
        are_tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
        if are_tensors and len(rows) > 1 and len(keys) > 1 and len(values) > 1:
            return rules_of(*key) if is_compiling else kept_rules_of(*key)  # torch.compile may have symbols as sizes
    except (AttributeError, IndexError, TypeError):  # no tensors, or an option that is not hashable: see below
        pass
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim < 2:
            given = f"shape {list(x.shape)}" if isinstance(x, Tensor) else repr(type(x).__name__)
            raise InputError(f"{name} must be a tensor [..., heads, tokens, width], got {given}")
    return rules_of(*key)


def rules_of(
    q_batch: Size, k_batch: Size, v_batch: Size, q_width: int, k_width: int, v_width: int, q_dtype: torch.dtype,
    k_dtype: torch.dtype, v_dtype: torch.dtype, q_device: torch.device, k_device: torch.device, v_device: torch.device,
    mask: type, padding: type, dropout: float, is_causal: bool, tolerance: float, scale: float | None,
    is_grouped: bool, force: str | None,
) -> Rules | None:  # fmt: skip
    """Validate the arguments and return what they fix: see `rules_for`. Masks and padding are given by their types."""
    if common_batch(q_batch, k_batch, v_batch, is_grouped) is not None:
        return None
    for name, dtype, device in (("q", q_dtype, q_device), ("k", k_dtype, k_device), ("v", v_dtype, v_device)):
        if dtype not in DTYPES:
            raise InputError(f"{name} must be float64, float32, float16 or bfloat16, got {dtype}")
        if dtype != q_dtype or device != q_device:
            raise InputError(
                f"q, k and v must have the same dtype and device, got {q_dtype} on {q_device} for q and {dtype} on "
                f"{device} for {name}"
            )
    given = "got " + ", ".join(
        f"{name} [{', '.join(map(str, (*batch, tokens, width)))}]"
        for name, batch, tokens, width in (
            ("q", q_batch, "n", q_width), ("k", k_batch, "m", k_width), ("v", v_batch, "m", v_width),
        )
    )  # fmt: skip
    _check_shapes(q_batch, k_batch, v_batch, q_width, k_width, is_grouped, given)
    _check_options(mask, padding, dropout, is_causal, tolerance, scale, force)
    groups = q_batch[-1] // k_batch[-1] if is_grouped else 1
    named: dict[str, Any] = {}
    if dropout:
        named["dropout_p"] = float(dropout)
    if is_causal:
        named["is_causal"] = True
    if scale is not None:
        named["scale"] = float(scale)
    if is_grouped:
        named["enable_gqa"] = True
    heads, is_empty = math.prod(k_batch), 0 in (*q_batch, *k_batch, q_width, v_width)
    rates = GPU_TRITON if q_device.type == "cuda" else CPU
    factor = 1 / math.sqrt(max(1, q_width)) if scale is None else float(scale)
    pair = Sizes(heads, groups, 1, 1, q_width, v_width, q_dtype, q_device, factor, bool(is_causal), False)
    return Rules(
        heads=heads,
        groups=groups,
        d=q_width,
        e=v_width,
        dtype=q_dtype,
        device=q_device,
        scale=factor,
        causal=bool(is_causal),
        tolerance=float(tolerance),
        force=force,
        named=named,
        is_exact=force == "exact" or (force is None and (mask is not NoneType or dropout > 0 or is_empty)),
        most_pairs=-1.0 if force == "polynomial" else rates.call / (max(1, heads) * exact_cost(pair, rates)),
    )


kept_rules_of: Callable[..., Rules | None] = lru_cache(maxsize=4096, typed=True)(rules_of)


def _check_shapes(
    q_batch: Size, k_batch: Size, v_batch: Size, q_width: int, k_width: int, is_grouped: bool, given: str
) -> None:
    if q_width != k_width:
        raise InputError(f"q and k must have the same width, {given}")
    if k_batch != v_batch:
        raise InputError(f"k and v must have heads that are equal or 1, {given}")
    if not is_grouped and q_batch != k_batch:
        raise InputError(
            f"the batch and heads of q, k and v must be equal or 1 unless enable_gqa is set, which needs several query "
            f"heads for each key head, {given}"
        )
    if is_grouped:
        if not (q_batch and k_batch) or q_batch[:-1] != k_batch[:-1]:
            raise InputError(f"with enable_gqa, q and k must have the same batch and a head axis, {given}")
        if k_batch[-1] == 0 or q_batch[-1] % k_batch[-1]:
            raise InputError(f"with enable_gqa, the query heads must be a multiple of the key heads, {given}")


def _check_options(
    mask: type, padding: type, dropout: float, is_causal: bool, tolerance: float, scale: float | None, force: str | None
) -> None:
    require_positive(
        "tolerance", tolerance, "the largest error of an output entry, as a fraction of the range of its values"
    )
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale)
    ):
        raise InputError(f"scale must be a finite number, got {scale!r}; it multiplies q·k and is 1/√d by default")
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real) or not 0 <= dropout <= 1:
        raise InputError(f"dropout_p must be a probability between 0 and 1, got {dropout!r}")
    if force is not None and force not in FORCES:
        raise unknown_name("force", force, FORCES)
    for name, kind in (("attn_mask", mask), ("key_padding", padding)):
        if not issubclass(kind, (Tensor, NoneType)):
            raise InputError(f"{name} must be a tensor or None, got {kind.__name__}")
    if mask is not NoneType and is_causal:
        raise InputError(
            "attn_mask and is_causal cannot be combined; include the causal mask in attn_mask and leave is_causal False"
        )


def check_tokens(k: Tensor, v: Tensor, padding: Tensor | None) -> None:
    """Validate the number of keys and the padding."""
    if k.shape[-2] != v.shape[-2]:
        raise InputError(f"k and v must have the same tokens, got k {list(k.shape)}, v {list(v.shape)}")
    if padding is not None:
        wanted = [*k.shape[:-3], k.shape[-2]]
        expected = f"a bool tensor of shape {wanted}, True at padding keys"
        require_type("key_padding", padding, Tensor, expected)
        if padding.dtype != torch.bool or list(padding.shape) != wanted:
            raise InputError(f"key_padding must be {expected}, got {padding.dtype} of shape {list(padding.shape)}")


def common_batch(q: Size, k: Size, v: Size, is_grouped: bool) -> tuple[Size, list[int]] | None:
    """Return how torch's attention broadcasts these batches: the common one, and the heads of q, k and v.

    One key head for several query heads becomes a group, so that keys are not repeated.

    Returns:
        None if the batches are used as they are, or if they cannot be broadcast, which `rules_of` reports.
    """
    if k == v and (q == k or (is_grouped and len(q) == len(k) and q[:-1] == k[:-1])):
        return None
    heads = [batch[-1] if batch else 1 for batch in (q, k, v)]
    try:
        if is_grouped and (not (q and k and v) or heads[0] % heads[1] or heads[0] % heads[2]):
            return None
        batch = broadcast_shapes(q[:-1], k[:-1], v[:-1])
        if is_grouped:
            return batch, heads if heads[1] == heads[2] else [heads[0]] * 3
        if heads[0] > heads[1] == heads[2] == 1:
            return batch, heads
        return batch, [*broadcast_shapes(*((count,) for count in heads))] * 3
    except (RuntimeError, ZeroDivisionError):
        return None


def broadcast(q: Tensor, k: Tensor, v: Tensor, is_grouped: bool) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return q, k, v with equal batches, and whether query heads share key heads."""
    found = common_batch(q.shape[:-2], k.shape[:-2], v.shape[:-2], is_grouped)
    if found is None:
        return q, k, v, is_grouped
    batch, heads = found
    if is_grouped:
        k, v = (x.repeat_interleave(count // x.shape[-3], dim=-3) for x, count in zip((k, v), heads[1:], strict=True))
    q, k, v = (x.expand(*batch, count, *x.shape[-2:]) for x, count in zip((q, k, v), heads, strict=True))
    return q, k, v, heads[0] != heads[1]
