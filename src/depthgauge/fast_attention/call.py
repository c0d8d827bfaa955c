"""A call of `attention`: what fixes its work (`Call`), its tensors (`Tensors`), and the modes of torch around it.

Everything that does not depend on the numbers in tensors or on the numbers of tokens is validated. The result is kept
by arguments, so that validating a call takes a few microseconds, for decoding steps with a growing cache too.
"""

import math
import numbers
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor
from torch.autograd import forward_ad

from depthgauge.base.errors import InputError, require_positive, require_type, unknown_name

FORCES = ("exact", "polynomial")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Flags = tuple[float, bool, float, float | None, bool, str | None]
"""dropout_p, is_causal, tolerance, scale, enable_gqa and force, as the user gave them."""
broadcast_shapes: Callable[..., Size] = torch.broadcast_shapes


class GuaranteeError(InputError):
    """The polynomial path cannot meet the tolerance, or a plan was followed where its proof does not hold."""


class Tensors(NamedTuple):
    """The tensors of a call: as the user gave them, or flat, with one row per key head.

    Given: q [..., heads, n, d], k [..., heads, m, d], v [..., heads, m, e], padding [..., m] and a mask.
    Flat: q [N, G, n, d], k [N, m, d], v [N, m, e] and padding [N, m]. Row i attends to the keys that are no padding,
    and to keys j ≤ i only if the call is causal.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None = None
    mask: Tensor | None = None

    def flat(self, call: "Call") -> "Tensors":
        """Return given tensors in the flat form, as views where the memory layout allows it."""
        q, k, v, padding, _ = self
        n, m, end = q.shape[-2], k.shape[-2], call.m  # no row attends to the keys after the last causal row
        if padding is not None:
            padding = padding.reshape(-1, 1, m).expand(-1, k.shape[-3] if k.ndim > 2 else 1, m).reshape(-1, m)[:, :end]
        k, v = k.reshape(call.heads, m, call.d)[:, :end], v.reshape(call.heads, m, call.e)[:, :end]
        return Tensors(q.reshape(call.heads, call.groups, n, call.d), k, v, padding)

    def select(self, heads: Tensor) -> "Tensors":
        """Return flat tensors restricted to some key heads."""
        return Tensors(*(None if x is None else x[heads] for x in self))  # type: ignore[arg-type]

    def detach(self) -> "Tensors":
        """Return the tensors without gradients, or themselves if they have none."""
        if not (self.q.requires_grad or self.k.requires_grad or self.v.requires_grad):
            return self
        return self._replace(q=self.q.detach(), k=self.k.detach(), v=self.v.detach())


@dataclass(frozen=True)
class Rates:
    """The cost of operations, relative to a multiply-add of the exact kernel.

    `exponential` is the cost of an exp, `product` that of a multiply-add of the feature products, `build` that of
    computing one feature, and `token` that of bounding, centring and copying one coordinate. A call costs `call` more.
    `block` is the size of the exact blocks on a causal diagonal. Numbers are examined only in calls in which a
    polynomial of degree `examined_from` or higher pays.

    The weights were fitted to `benchmarks/attention_cpu.py` and `benchmarks/attention_dropin.py`. Only the ratio of two
    costs matters.
    """

    exponential: float
    product: float
    build: float
    token: float
    call: float
    block: int
    examined_from: int = 0


CPU = Rates(exponential=12, product=2, build=37, token=300, call=6e7, block=256)
GPU_TORCH = Rates(exponential=8, product=150, build=500, token=2000, call=2e12, block=256)
GPU_TRITON = Rates(exponential=8, product=1.05, build=4, token=400, call=1e11, block=1024, examined_from=2)
"""Examining numbers waits for the GPU. Degree 1 covers far smaller scores than degree 2: where degree 1 alone pays, few
calls would repay the wait."""


class Call(NamedTuple):
    """Everything that fixes the work of a call, whatever the numbers in its tensors are.

    - `heads`: N, the number of key heads in all batches
    - `groups`: G, the number of query heads that share a key head
    - `n`, `m`, `d`, `e`: the numbers of rows and of keys that they attend to, the widths of keys and of values
    - `dtype`, `device`: those of q, k and v
    - `scale`, `causal`, `tolerance`, `force`: the options; the scale is a number even where none is given
    - `is_exact`: whether the arguments allow the exact path only
    - `most_pairs`: with at most this many pairs of a query and a key, a polynomial never pays
    - `named`: the arguments of torch's attention besides tensors that are not its default
    - `is_padded`: whether some keys may be padding
    - `gradients`: whether the tolerance holds for the gradients of q and k as well
    """

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
    tolerance: float
    force: str | None
    is_exact: bool = False
    most_pairs: float = 0.0
    named: tuple[tuple[str, Any], ...] = ()
    is_padded: bool = False
    gradients: bool = False

    @property
    def working(self) -> torch.dtype:
        """The dtype of sums: float64 for float64 inputs, float32 for all others."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def exact_cost(self, rates: Rates) -> float:
        """Return the cost of exact attention for one key head: scores, exponentials, and the sum over the values."""
        pairs = 2.0 * self.groups * self.n * self.m * (0.5 if self.causal else 1.0)
        return pairs * (self.d + self.e + rates.exponential)

    def polynomial_cost(self, degree: int, exact_rows: int, rates: Rates) -> float:
        """Return the cost of a polynomial for one key head: feature products, diagonal blocks and exact rows."""
        pair, tokens = self.d + self.e + rates.exponential, self.groups * self.n + self.m
        cost = 2.0 * tokens * feature_count(self.d, degree) * (rates.product * (self.e + 1) + rates.build)
        cost += 2.0 * tokens * self.d * rates.token
        if self.causal:
            cost += 2.0 * self.groups * self.n * min(self.n, rates.block) * pair
        return cost + 2.0 * exact_rows * self.m * pair + rates.call / self.heads


def feature_count(dim: int, degree: int) -> int:
    """Return C(d+g, g), the number of monomials of degree at most g in d variables.

    >>> feature_count(64, 2)
    2145
    """
    return math.comb(dim + degree, degree)


def call_of(given: Tensors, flags: Flags) -> tuple[Tensors, Call]:
    """Validate the arguments of `attention`. Return the tensors with equal batches, and the call.

    Raises:
        InputError: An argument is invalid.
    """
    given, call = arguments_of(given, flags)
    return given, with_tokens(call, given)


def with_tokens(call: Call, given: Tensors) -> Call:
    """Return the call with what `arguments_of` leaves out."""
    return filled(call, *left_out(given))


def left_out(given: Tensors) -> tuple[int, int, bool, bool]:
    """Return the numbers of rows and of keys, whether keys may be padding, and whether q or k needs a gradient."""
    q, k, _, padding, _ = given
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return q.shape[-2], k.shape[-2], padding is not None, gradients


def filled(call: Call, n: int, m: int, is_padded: bool, gradients: bool) -> Call:
    """Return the call with these numbers of tokens."""
    return call._replace(n=n, m=min(n, m) if call.causal else m, is_padded=is_padded, gradients=gradients)


def arguments_of(given: Tensors, flags: Flags) -> tuple[Tensors, Call]:
    """Validate the arguments as `call_of`. The call has no tokens, and is kept for all numbers of them."""
    q, k, v, padding, mask = given
    call = None
    try:
        rows, keys, values = q.shape, k.shape, v.shape
        shapes = (rows[:-2], rows[-1]), (keys[:-2], keys[-1]), (values[:-2], values[-1])
        kinds = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, type(mask), type(padding)
        are_tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
        if are_tensors and len(rows) > 1 and len(keys) > 1 and len(values) > 1:
            # torch.compile may have symbols as sizes
            call = (validated if torch.compiler.is_compiling() else kept_validated)(shapes, kinds, *flags)
    except (AttributeError, IndexError, TypeError):  # no tensors, or an option that is not hashable: see below
        pass
    if call is None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.ndim < 2:
                what = f"shape {list(x.shape)}" if isinstance(x, Tensor) else repr(type(x).__name__)
                raise InputError(f"{name} must be a tensor [..., heads, tokens, width], got {what}")
        call = validated(shapes, kinds, *flags)
    if call is None:
        q, k, v, is_grouped = broadcast(q, k, v, flags[4])
        return arguments_of(given._replace(q=q, k=k, v=v), (*flags[:4], is_grouped, flags[5]))
    if padding is not None or k.shape[-2] != v.shape[-2]:
        check_tokens(k, v, padding)
    return given, call


Shapes = tuple[tuple[Size, int], tuple[Size, int], tuple[Size, int]]
"""The batch and the width of q, k and v."""


def validated(
    shapes: Shapes, kinds: tuple[Any, ...], dropout: float, is_causal: bool, tolerance: float, scale: float | None,
    is_grouped: bool, force: str | None,
) -> Call | None:  # fmt: skip
    """Validate the arguments and return the call without tokens: see `arguments_of`.

    `kinds` are the dtypes and devices of q, k and v, and the types of the mask and of the padding.
    """
    (q_batch, q_width), (k_batch, _), (v_batch, v_width) = shapes
    dtypes, devices, (mask, padding) = kinds[:3], kinds[3:6], kinds[6:]
    if common_batch(q_batch, k_batch, v_batch, is_grouped) is not None:
        return None
    for name, dtype, device in zip("qkv", dtypes, devices, strict=True):
        if dtype not in DTYPES:
            raise InputError(f"{name} must be float64, float32, float16 or bfloat16, got {dtype}")
        if dtype != dtypes[0] or device != devices[0]:
            raise InputError(
                f"q, k and v must have the same dtype and device, got {dtypes[0]} on {devices[0]} for q and {dtype} on "
                f"{device} for {name}"
            )
    _check_shapes(shapes, is_grouped)
    _check_options(mask, padding, dropout, is_causal, tolerance, scale, force)
    named: dict[str, Any] = {}
    if dropout:
        named["dropout_p"] = float(dropout)
    if is_causal:
        named["is_causal"] = True
    if scale is not None:
        named["scale"] = float(scale)
    if is_grouped:
        named["enable_gqa"] = True
    factor = 1 / math.sqrt(max(1, q_width)) if scale is None else float(scale)
    is_empty = 0 in (*q_batch, *k_batch, q_width, v_width)
    groups, heads = q_batch[-1] // k_batch[-1] if is_grouped else 1, math.prod(k_batch)
    flags = factor, bool(is_causal), float(tolerance), force
    pair = Call(heads, groups, 1, 1, q_width, v_width, dtypes[0], devices[0], *flags)
    rates = GPU_TRITON if devices[0].type == "cuda" else CPU
    return pair._replace(
        n=0,
        m=0,
        is_exact=force == "exact" or (force is None and (mask is not NoneType or dropout > 0 or is_empty)),
        most_pairs=-1.0 if force == "polynomial" else rates.call / (max(1, heads) * pair.exact_cost(rates)),
        named=tuple(named.items()),
    )


kept_validated: Callable[..., Call | None] = lru_cache(maxsize=4096, typed=True)(validated)


def _check_shapes(shapes: Shapes, is_grouped: bool) -> None:
    (q, q_width), (k, k_width), (v, _) = shapes
    given = "got " + ", ".join(
        f"{name} [{', '.join(map(str, (*batch, tokens, width)))}]"
        for name, tokens, (batch, width) in zip("qkv", "nmm", shapes, strict=True)
    )
    if q_width != k_width:
        raise InputError(f"q and k must have the same width, {given}")
    if k != v:
        raise InputError(f"k and v must have heads that are equal or 1, {given}")
    if not is_grouped and q != k:
        raise InputError(
            f"the batch and heads of q, k and v must be equal or 1 unless enable_gqa is set, which needs several query "
            f"heads for each key head, {given}"
        )
    if is_grouped:
        if not (q and k) or q[:-1] != k[:-1]:
            raise InputError(f"with enable_gqa, q and k must have the same batch and a head axis, {given}")
        if k[-1] == 0 or q[-1] % k[-1]:
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
        None if the batches are used as they are, or if they cannot be broadcast, which `validated` reports.
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


# --- modes of torch ---------------------------------------------------------------------------------------------------


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


def is_autocast(x: Tensor) -> bool:
    """Return whether torch casts x in products. Reading the type of its device would take microseconds."""
    if x.is_cuda or x.is_cpu:
        return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products on the device of x keep the dtype of their operands.

    Autocast would round the operands, which the rounding allowance does not count.
    """
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


def is_watched(*tensors: Tensor) -> bool:
    """Return whether hooks see what a function of the tensors saves for its gradient, as in torch.utils.checkpoint.

    Torch has no public function for this. Without the private one, the answer is no.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is not None and hooks(True) is not None
