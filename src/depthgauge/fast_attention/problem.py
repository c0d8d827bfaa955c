"""What is asked, checked and laid flat: every head that has keys of its own is one row of the first axis."""

import math
import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgauge.errors import InputError, require_positive, unknown_name

FORCES = ("exact", "polynomial")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Problem:
    """Softmax attention of N key heads, each read by G query heads.

    q [N, G, n, d], k [N, m, d], v [N, m, e]; `keep` [N, m] is False where a key is padding.
    Row i sees the keys that are kept, and of these, when `causal`, only j ≤ i.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    keep: Tensor | None

    @property
    def heads(self) -> int:
        """N, the number of key heads of all batches together."""
        return self.q.shape[0]

    @property
    def working(self) -> torch.dtype:
        """What sums are kept in: float64 for float64, float32 for everything shorter."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def select(self, heads: Tensor) -> "Problem":
        """The same for some of the heads."""
        keep = None if self.keep is None else self.keep[heads]
        return Problem(self.q[heads], self.k[heads], self.v[heads], self.scale, self.causal, keep)

    def detach(self) -> "Problem":
        """The same without gradients; itself where there are none."""
        if not (self.q.requires_grad or self.k.requires_grad or self.v.requires_grad):
            return self
        return Problem(self.q.detach(), self.k.detach(), self.v.detach(), self.scale, self.causal, self.keep)


@dataclass(frozen=True)
class Request:
    """The arguments of `attention`, checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    tolerance: float
    scale: float
    key_padding: Tensor | None
    enable_gqa: bool
    force: str | None

    @property
    def groups(self) -> int:
        """G, how many query heads share a key head."""
        return self.q.shape[-3] // self.k.shape[-3] if self.enable_gqa else 1

    def flat(self) -> Problem:
        """The request as a Problem; views where the layout allows it."""
        (n, d), (m, e) = self.q.shape[-2:], (self.k.shape[-2], self.v.shape[-1])
        k, v = self.k.reshape(-1, m, d), self.v.reshape(-1, m, e)
        q = self.q.reshape(k.shape[0], self.groups, n, d)
        keep = None
        if self.key_padding is not None:
            heads = self.k.shape[-3] if self.k.ndim > 2 else 1
            keep = ~self.key_padding.reshape(-1, 1, m).expand(-1, heads, m).reshape(-1, m)
        if self.is_causal and m > n:  # no row sees the keys after the last row
            k, v, keep = k[:, :n], v[:, :n], None if keep is None else keep[:, :n]
        return Problem(q, k, v, self.scale, self.is_causal, keep)

    def shaped(self, flat: Tensor) -> Tensor:
        """[N, G, n, ...] as the caller's [..., heads, n, ...]."""
        return flat.reshape(*self.q.shape[:-1], *flat.shape[3:])


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    tolerance: float,
    scale: float | None,
    key_padding: Tensor | None,
    enable_gqa: bool,
    force: str | None,
) -> Request:
    """The arguments as a Request, or the error that says which of them cannot be used."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.ndim < 2:
            given = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(type(tensor).__name__)
            raise InputError(f"{name} must be a tensor [..., heads, tokens, width], got {given}")
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name} must be float64, float32, float16 or bfloat16, got {tensor.dtype}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise InputError(
                f"q, k and v must share dtype and device, got {q.dtype} on {q.device} and "
                f"{tensor.dtype} on {tensor.device} for {name}"
            )
    _check_shapes(q, k, v, enable_gqa)
    require_positive("tolerance", tolerance, "the largest error of an output entry, as a share of its values' range")
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale)
    ):
        raise InputError(f"scale must be a finite number, got {scale!r}; it multiplies q·k, by default 1/√d")
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real) or not 0 <= dropout_p <= 1:
        raise InputError(f"dropout_p must be a probability, got {dropout_p!r}")
    if force is not None and force not in FORCES:
        raise unknown_name("force", force, FORCES)
    if attn_mask is not None and is_causal:
        raise InputError("attn_mask and is_causal cannot both be given; put the causal mask into attn_mask")
    if key_padding is not None:
        wanted = [*k.shape[:-3], k.shape[-2]]
        if key_padding.dtype != torch.bool or list(key_padding.shape) != wanted:
            raise InputError(
                f"key_padding must be bool of shape {wanted}, True where a key is padding, "
                f"got {key_padding.dtype} of shape {list(key_padding.shape)}"
            )
    beta = float(scale) if scale is not None else 1 / math.sqrt(max(1, q.shape[-1]))
    return Request(
        q, k, v, attn_mask, float(dropout_p), bool(is_causal), float(tolerance), beta, key_padding, enable_gqa, force
    )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    given = f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.shape[-1] != k.shape[-1]:
        raise InputError(f"q and k must have the same width, {given}")
    if k.shape[:-1] != v.shape[:-1]:
        raise InputError(f"k and v must have the same heads and tokens, {given}")
    if not enable_gqa and q.shape[:-2] != k.shape[:-2]:
        raise InputError(f"q and k must have the same batch and heads (or set enable_gqa), {given}")
    if enable_gqa:
        if q.ndim < 3 or q.ndim != k.ndim or q.shape[:-3] != k.shape[:-3]:
            raise InputError(f"with enable_gqa q and k need the same batch and a head axis, {given}")
        if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
            raise InputError(f"with enable_gqa the query heads must be a multiple of the key heads, {given}")
