"""Validated arguments of `attention`, and the same problem flattened to one row per key head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from depthgauge.base.errors import InputError


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


class Sizes(NamedTuple):
    """Everything about a `Problem` except the numbers in its tensors."""

    heads: int
    groups: int
    n: int
    m: int
    d: int
    e: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    causal: bool
    is_padded: bool

    def outline(self) -> "Problem":
        """Return a problem of these sizes whose tensors occupy no memory."""

        def outlined(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(1, dtype=dtype, device=self.device).expand(shape)

        keep = outlined(self.heads, self.m, dtype=torch.bool) if self.is_padded else None
        q = outlined(self.heads, self.groups, self.n, self.d)
        k, v = outlined(self.heads, self.m, self.d), outlined(self.heads, self.m, self.e)
        return Problem(q, k, v, self.scale, self.causal, keep)


@dataclass(frozen=True, eq=False)
class Rules:
    """What the arguments of a call fix, whatever the numbers in q, k and v and the numbers of tokens are.

    - `heads`, `d`, `e`, `dtype`, `device`: the number of key heads in all batches, and the sizes and kinds of tensors
    - `groups`: the number of query heads that share a key head
    - `scale`, `causal`, `tolerance`, `force`: the options; the scale is a number even where the option is None
    - `named`: the arguments of torch's attention besides tensors that are not its default
    - `is_exact`: whether the options allow the exact path only
    - `most_pairs`: with at most this many pairs of a query and a key, n·m, a polynomial never pays
    """

    heads: int
    groups: int
    d: int
    e: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    causal: bool
    tolerance: float
    force: str | None
    named: Mapping[str, Any]
    is_exact: bool
    most_pairs: float

    def sizes(self, n: int, m: int, is_padded: bool) -> Sizes:
        """Return the sizes of the problem with n rows and m keys."""
        m = min(n, m) if self.causal else m  # no row attends to the keys after the last row
        of_tensors = self.heads, self.groups, n, m, self.d, self.e, self.dtype, self.device
        return Sizes(*of_tensors, self.scale, self.causal, is_padded)


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

    def detach(self) -> "Problem":
        """Return the problem without gradients, or itself if it has none."""
        if not (self.q.requires_grad or self.k.requires_grad or self.v.requires_grad):
            return self
        return Problem(self.q.detach(), self.k.detach(), self.v.detach(), self.scale, self.causal, self.keep)


@dataclass(frozen=True)
class Request:
    """The validated arguments of `attention`. Batches are equal, apart from query heads that share a key head."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    rules: Rules

    @property
    def needs_gradients(self) -> bool:
        """Whether the tolerance must hold for the gradients of q and k as well."""
        return torch.is_grad_enabled() and (self.q.requires_grad or self.k.requires_grad)

    def flat(self) -> Problem:
        """Return the request as a Problem. Its tensors are views where the memory layout allows it."""
        rules, (n, m) = self.rules, (self.q.shape[-2], self.k.shape[-2])
        k, v = self.k.reshape(rules.heads, m, rules.d), self.v.reshape(rules.heads, m, rules.e)
        q = self.q.reshape(rules.heads, rules.groups, n, rules.d)
        keep, padding = None, self.options.key_padding
        if padding is not None:
            heads = self.k.shape[-3] if self.k.ndim > 2 else 1
            keep = ~padding.reshape(-1, 1, m).expand(-1, heads, m).reshape(-1, m)
        if rules.causal and m > n:  # no row attends to the keys after the last row
            k, v, keep = k[:, :n], v[:, :n], None if keep is None else keep[:, :n]
        return Problem(q, k, v, rules.scale, rules.causal, keep)

    def shaped(self, flat: Tensor) -> Tensor:
        """Reshape [N, G, n, ...] to the caller's [..., heads, n, ...]."""
        return flat.reshape(*self.q.shape[:-1], *flat.shape[3:])


def is_dual(*tensors: Tensor) -> bool:
    """Return whether a tensor carries a tangent of forward-mode differentiation, which the kernels do not propagate."""
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
        for x in tensors
    )


def autocast_tensors(*tensors: object) -> list[Any]:
    """Return the tensors as torch's attention gets them under autocast: float64 and masks of bools are not cast."""
    return [
        x.to(torch.get_autocast_dtype(x.device.type))
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    ]


def is_capturing(tensor: Tensor) -> bool:
    """Return whether work on the GPU of this tensor is being captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
