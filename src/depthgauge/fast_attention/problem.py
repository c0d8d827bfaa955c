"""Validated arguments of `attention`, and the same problem flattened to one row per key head."""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from depthgauge.errors import InputError, require_positive, require_type, unknown_name
from depthgauge.fast_attention.autograd import is_watched

FORCES = ("exact", "polynomial")
broadcast_shapes: Callable[..., tuple[int, ...]] = torch.broadcast_shapes
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class GuaranteeError(InputError):
    """The polynomial path cannot meet the tolerance, or a plan was followed where its proof does not hold."""


class Options(NamedTuple):
    """The arguments of `attention` other than q, k and v, with the same meaning and the same defaults."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    tolerance: float = 1e-3
    scale: float | None = None
    key_padding: Tensor | None = None
    enable_gqa: bool = False
    force: str | None = None


Outline = tuple[object, ...]
"""What two calls have in common if one is exact because the other was: shapes, dtype, kind of device and options."""


class Kind(NamedTuple):
    """What two calls have in common if one can repeat the decision of the other."""

    outline: Outline
    rest: tuple[object, ...]


@dataclass(frozen=True)
class Problem:
    """Softmax attention of N key heads, each shared by G query heads.

    q is [N, G, n, d], k is [N, m, d], v is [N, m, e]. `keep` [N, m] is False at padding keys.
    Row i attends to the kept keys, and to keys j ≤ i only if `causal`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    keep: Tensor | None

    @property
    def heads(self) -> int:
        """N, the number of key heads in all batches."""
        return self.q.shape[0]

    @property
    def working(self) -> torch.dtype:
        """The dtype of sums: float64 for float64 inputs, float32 for all others."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def select(self, heads: Tensor) -> "Problem":
        """Return the problem restricted to some key heads."""
        keep = None if self.keep is None else self.keep[heads]
        return Problem(self.q[heads], self.k[heads], self.v[heads], self.scale, self.causal, keep)

    def outline(self) -> "Problem":
        """Return a problem with the same sizes, dtypes and device whose tensors occupy no memory."""

        def outlined(x: Tensor) -> Tensor:
            return torch.empty(1, dtype=x.dtype, device=x.device).expand(x.shape)

        keep = None if self.keep is None else outlined(self.keep)
        return Problem(outlined(self.q), outlined(self.k), outlined(self.v), self.scale, self.causal, keep)

    def detach(self) -> "Problem":
        """Return the problem without gradients, or itself if it has none."""
        if not (self.q.requires_grad or self.k.requires_grad or self.v.requires_grad):
            return self
        return Problem(self.q.detach(), self.k.detach(), self.v.detach(), self.scale, self.causal, self.keep)


@dataclass(frozen=True)
class Request:
    """The validated arguments of `attention`; `scale` is a number even where the option was None."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    scale: float

    @property
    def groups(self) -> int:
        """G, the number of query heads that share a key head."""
        return self.q.shape[-3] // self.k.shape[-3] if self.options.enable_gqa else 1

    def flat(self) -> Problem:
        """Return the request as a Problem. Its tensors are views where the memory layout allows it."""
        (n, d), (m, e) = self.q.shape[-2:], (self.k.shape[-2], self.v.shape[-1])
        k, v = self.k.reshape(-1, m, d), self.v.reshape(-1, m, e)
        q = self.q.reshape(k.shape[0], self.groups, n, d)
        keep, padding, is_causal = None, self.options.key_padding, self.options.is_causal
        if padding is not None:
            heads = self.k.shape[-3] if self.k.ndim > 2 else 1
            keep = ~padding.reshape(-1, 1, m).expand(-1, heads, m).reshape(-1, m)
        if is_causal and m > n:  # no row attends to the keys after the last row
            k, v, keep = k[:, :n], v[:, :n], None if keep is None else keep[:, :n]
        return Problem(q, k, v, self.scale, is_causal, keep)

    def shaped(self, flat: Tensor) -> Tensor:
        """Reshape [N, G, n, ...] to the caller's [..., heads, n, ...]."""
        return flat.reshape(*self.q.shape[:-1], *flat.shape[3:])


def is_dual(*tensors: Tensor) -> bool:
    """Return whether a tensor carries a tangent of forward-mode differentiation, which the kernels do not propagate."""
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
        for x in tensors
    )


def autocast_tensors(*tensors: Tensor | None) -> list[Any]:
    """Return the tensors as torch's attention gets them under autocast: float64 and masks of bools are not cast."""
    return [
        x.to(torch.get_autocast_dtype(x.device.type))
        if x is not None and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    ]


def kind_of(q: Tensor, k: Tensor, v: Tensor, outline: Outline) -> Kind | None:
    """Return what calls of the same kind have in common, or None if this call cannot repeat an earlier decision.

    Where hooks see what is saved for gradients, no call repeats one: it would save tensors of other shapes.
    """
    if not type(q) is type(k) is type(v) is Tensor or is_dual(q, k, v) or is_watched(q, k, v):
        return None
    needs = (q.requires_grad, k.requires_grad, v.requires_grad) if torch.is_grad_enabled() else None
    # The outline says whether q is on a GPU.
    devices = q.get_device(), k.get_device(), v.get_device(), k.is_cuda, v.is_cuda
    return Kind(outline, (k.shape, v.shape, k.dtype, v.dtype, devices, needs))


def broadcast(q: object, k: object, v: object, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor, bool] | None:
    """Return q, k, v and `enable_gqa` with equal batches, as torch's attention broadcasts them.

    One key head for several query heads becomes a group, so that keys are not repeated.

    Returns:
        The tensors and whether query heads share a key head; None if nothing has to change, or if these are no tensors
        that can be broadcast, which `checked` reports.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return None
    if min(q.ndim, k.ndim, v.ndim) < (3 if enable_gqa else 2):
        return None
    given = q.shape[:-2], k.shape[:-2], v.shape[:-2]
    if given[1] == given[2] and (given[0] == given[1] or (enable_gqa and given[0][:-1] == given[1][:-1])):
        return None
    heads = [shape[-1] if shape else 1 for shape in given]
    try:
        if enable_gqa and (heads[0] % heads[1] or heads[0] % heads[2]):
            return None
        batch = broadcast_shapes(*(shape[:-1] for shape in given))
        if not enable_gqa and not heads[0] > heads[1] == heads[2] == 1:
            heads = [*broadcast_shapes(*((count,) for count in heads))] * 3
        elif heads[1] != heads[2]:
            k, v = (x.repeat_interleave(heads[0] // count, dim=-3) for x, count in zip((k, v), heads[1:], strict=True))
            heads = [heads[0]] * 3
        q, k, v = (x.expand(*batch, count, *x.shape[-2:]) for x, count in zip((q, k, v), heads, strict=True))
    except (RuntimeError, ZeroDivisionError):
        return None
    return q, k, v, heads[0] != heads[1]


def checked(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Request:
    """Validate the arguments of `attention` and return them as a Request."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.ndim < 2:
            given = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(type(tensor).__name__)
            raise InputError(f"{name} must be a tensor [..., heads, tokens, width], got {given}")
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name} must be float64, float32, float16 or bfloat16, got {tensor.dtype}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise InputError(
                f"q, k and v must have the same dtype and device, got {q.dtype} on {q.device} for q and "
                f"{tensor.dtype} on {tensor.device} for {name}"
            )
    _check_shapes(q, k, v, options.enable_gqa)
    _check_options(k, options)
    scale = float(options.scale) if options.scale is not None else 1 / math.sqrt(max(1, q.shape[-1]))
    typed = options._replace(
        dropout_p=float(options.dropout_p), is_causal=bool(options.is_causal), tolerance=float(options.tolerance)
    )
    return Request(q, k, v, typed, scale)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    given = f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.shape[-1] != k.shape[-1]:
        raise InputError(f"q and k must have the same width, {given}")
    if k.shape[:-1] != v.shape[:-1]:
        raise InputError(f"k and v must have the same tokens, and heads that are equal or 1, {given}")
    if not enable_gqa and q.shape[:-2] != k.shape[:-2]:
        raise InputError(
            f"the batch and heads of q, k and v must be equal or 1 unless enable_gqa is set, which needs several query "
            f"heads for each key head, {given}"
        )
    if enable_gqa:
        if q.ndim < 3 or q.ndim != k.ndim or q.shape[:-3] != k.shape[:-3]:
            raise InputError(f"with enable_gqa, q and k must have the same batch and a head axis, {given}")
        if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
            raise InputError(f"with enable_gqa, the query heads must be a multiple of the key heads, {given}")


def _check_options(k: Tensor, options: Options) -> None:
    require_positive(
        "tolerance", options.tolerance, "the largest error of an output entry, as a fraction of the range of its values"
    )
    scale, dropout_p, key_padding = options.scale, options.dropout_p, options.key_padding
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale)
    ):
        raise InputError(f"scale must be a finite number, got {scale!r}; it multiplies q·k and is 1/√d by default")
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real) or not 0 <= dropout_p <= 1:
        raise InputError(f"dropout_p must be a probability between 0 and 1, got {dropout_p!r}")
    if options.force is not None and options.force not in FORCES:
        raise unknown_name("force", options.force, FORCES)
    if options.attn_mask is not None and options.is_causal:
        raise InputError(
            "attn_mask and is_causal cannot be combined; include the causal mask in attn_mask and leave is_causal False"
        )
    require_type("attn_mask", options.attn_mask, (Tensor, NoneType), "a tensor or None")
    if key_padding is not None:
        wanted = [*k.shape[:-3], k.shape[-2]]
        expected = f"a bool tensor of shape {wanted}, True at padding keys"
        require_type("key_padding", key_padding, Tensor, expected)
        if key_padding.dtype != torch.bool or list(key_padding.shape) != wanted:
            raise InputError(
                f"key_padding must be {expected}, got {key_padding.dtype} of shape {list(key_padding.shape)}"
            )
