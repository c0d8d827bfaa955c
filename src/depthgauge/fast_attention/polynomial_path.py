"""Polynomial attention: what a backend receives and returns, its gradients, and the backend in plain torch.

The backend in plain torch runs on any device, in chunks so that no tensor of tokens × features is kept. With
V⁺ = [v − mid, 1], numerator and denominator are one product:

    S = Σ_j w_j φ(k̃_j) V⁺_jᵀ      (chunks of keys; the sum over chunks is float64)
    [N_i, Z_i] = φ(q̃_i)ᵀ diag(a) S,   out_i = N_i / Z_i + mid      (chunks of queries)

a_f is the coefficient of p times the multinomial coefficient of feature f. The causal path visits the chunks in order:
exact exponentials inside a chunk, S for all earlier chunks, one N and one Z. The backward pass consists of the
transposes of the same two products.

Features are the C(d+g, g) monomials of degree at most g, each once:

    (x·y)^k = Σ over monomials α of degree k of multinomial(α) · x^α · y^α

The block of degree k holds the products x_a1 x_a2 … x_ak with a1 ≤ a2 ≤ … ≤ ak in lexicographic order. The products
that begin with a are x_a times the tail of block k−1 whose indices are all at least a, so a block consists of d scaled
tails.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import combinations_with_replacement, groupby
from typing import Any

import torch
from torch import Tensor

from depthgauge.base.errors import DepthgaugeError
from depthgauge.fast_attention.bounds import (
    LARGEST_LOG_RANGE,
    Minimax,
    Survey,
    is_outside,
    product_unit,
    rounding_share,
    share_beyond,
    survey,
    unit,
)
from depthgauge.fast_attention.call import Call, Rates, Tensors, feature_count, without_autocast

ROUNDING = 2.0**-11
"""Centred norms below this share of the norm itself count as this share: those of equal tokens are rounding errors of
their mean, and balanced against them the other side would leave the range of float16."""
CHUNK = 512
"""Tokens per chunk, which is also the number of terms summed in the working dtype; `roundings` counts them."""
CAUSAL_CHUNK = 256
"""Tokens per chunk on the causal path, which is also the size of the exact blocks on the diagonal."""
CAUSAL_STEP = 256
"""Causal moments are accumulated in steps of this many keys.

The step divides the exact diagonal block of every backend. Row i therefore sums over all keys that it meets through the
polynomial, and possibly more; the terms are nonnegative, so the sum over more keys is still an upper bound.
"""
Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor, Tensor]


class DoubleBackwardError(DepthgaugeError, RuntimeError):
    """A gradient of the polynomial path was differentiated. Second derivatives have no error bound."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Heads that are computed together by polynomials of one degree. Nothing has a gradient.

    - `call`: the call of these heads
    - `coefficients`: those of p for every head
    - `centrings`: 0 for a head that is not centred, 1 if its keys are centred, 2 if its keys and queries are centred
    - `survey`: the survey of these heads
    - `tensors`: the flat tensors of these heads; None where nothing is centred, padded or subtracted from values
    - `exact_rows`: [N, G, n], the rows that are computed exactly elsewhere
    """

    call: Call
    coefficients: tuple[tuple[float, ...], ...]
    centrings: tuple[int, ...]
    survey: Survey
    tensors: Tensors | None
    exact_rows: Tensor | None = None

    @cached_property
    def degree(self) -> int:
        """The degree of the polynomials."""
        return len(self.coefficients[0]) - 1

    @property
    def padding(self) -> Tensor | None:
        """The padding keys [N, m]."""
        return None if self.tensors is None else self.tensors.padding

    @property
    def is_centred(self) -> bool:
        """Whether any head is centred."""
        return any(self.centrings)

    @cached_property
    def is_alike(self) -> bool:
        """Whether all heads have the same polynomial."""
        return self.coefficients.count(self.coefficients[0]) == len(self.coefficients)

    @property
    def is_weighted(self) -> bool:
        """Whether the keys of some head have different weights w_j, which is so if its queries are centred."""
        return 2 in self.centrings

    def _per_head(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.survey.query_centre.device)

    def _where(self, least: int, centre: Tensor) -> Tensor:
        is_used = torch.tensor([c >= least for c in self.centrings], device=centre.device)
        return torch.where(is_used[:, None], centre, 0).to(self.call.working)

    @cached_property
    def query_centre(self) -> Tensor:
        """μ [N, d] in the working dtype, 0 where queries are not centred."""
        return self._where(2, self.survey.query_centre)

    @cached_property
    def key_centre(self) -> Tensor:
        """c [N, d] in the working dtype, 0 where keys are not centred."""
        return self._where(1, self.survey.key_centre)

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The factors [N] of q − μ and of k − c. Their product is the scale, and the factor of k is a power of two."""
        s, pairs = self.survey, []
        # Norms of zero vectors are rounded up to this number. Balanced against it, the other side would leave float16.
        lost = 2 * math.sqrt(self.call.d * torch.finfo(self.call.working).tiny) * (1 + 2.0**-20)
        for head, centring in enumerate(self.centrings):
            query = max(s.query_centred[head], ROUNDING * s.query[head]) if centring == 2 else s.query[head]
            key = max(s.key_centred[head], ROUNDING * s.key[head]) if centring else s.key[head]
            pairs.append(balance(query, key, self.call.scale) if min(query, key) > lost else (self.call.scale, 1.0))
        return self._per_head([q for q, _ in pairs]), self._per_head([k for _, k in pairs])

    @cached_property
    def middle(self) -> Tensor:
        """The midpoint of the range of every value column: [N, e]."""
        assert self.tensors is not None
        return self.survey.middle(self.tensors)


def centred(batch: Batch, at: slice, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q̃ and k̃ of the heads `at` in the working dtype, with q̃_i·k̃_j = s (q_i − μ)·(k_j − c).

    q is [N, G, n, d] and k is [N, m, d], already restricted to these heads. Exact rows and padding keys become 0.
    """
    work = batch.call.working
    qt = (q.to(work) - batch.query_centre[at, None, None]) * batch.factors[0][at, None, None, None].to(work)
    kt = (k.to(work) - batch.key_centre[at, None]) * batch.factors[1][at, None, None].to(work)
    if batch.exact_rows is not None:
        qt = qt.masked_fill(batch.exact_rows[at, ..., None], 0)
    if batch.padding is not None:
        kt = kt.masked_fill(batch.padding[at, ..., None], 0)
    return qt, kt


def weights(batch: Batch, at: slice, k: Tensor) -> Tensor | None:
    """Return w_j = exp(s μ·(k_j − c)) divided by the largest: [N, m], or None if every weight is 1.

    `k` [N, m, d] holds the keys of the heads `at`. Padding keys have weight 0. The exponent is summed in float64.
    """
    padding = None if batch.padding is None else batch.padding[at]
    if not batch.is_weighted:
        return None if padding is None else (~padding).to(batch.call.working)
    shifted = k.double() - batch.key_centre[at, None].double()
    log_w = batch.call.scale * (shifted @ batch.query_centre[at, :, None].double()).squeeze(-1)
    if padding is not None:
        log_w = log_w.masked_fill(padding, -torch.inf)
    return torch.exp(log_w - log_w.amax(dim=1, keepdim=True)).to(batch.call.working)


def second_moments(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return Σ_j w_j t_ij² and Σ_j w_j over the keys that row i meets through the polynomial: two [N, G, n] float64."""
    assert batch.tensors is not None
    qt, k = (x.double() for x in centred(batch, slice(None), batch.tensors.q, batch.tensors.k))
    q = qt.permute(0, 3, 1, 2)
    weight_of = weights(batch, slice(None), batch.tensors.k)
    w = k.new_ones(k.shape[:2]) if weight_of is None else weight_of.double()
    if not batch.call.causal:
        second = _second(q, (w[..., None] * k).transpose(1, 2) @ k)
        return second, w.sum(1)[:, None, None].expand_as(second)
    second, total = torch.zeros_like(q[:, 0]), torch.zeros_like(q[:, 0])
    moment, weight = k.new_zeros(k.shape[0], k.shape[2], k.shape[2]), k.new_zeros(k.shape[0])
    for start in range(0, q.shape[-1], CAUSAL_STEP):
        rows = slice(start, start + CAUSAL_STEP)
        second[..., rows], total[..., rows] = _second(q[..., rows], moment), weight[:, None, None]
        here, part = k[:, rows], w[:, rows]
        moment = moment + (part[..., None] * here).transpose(1, 2) @ here
        weight = weight + part.sum(1)
    return second, total


def _second(q: Tensor, moment: Tensor) -> Tensor:
    """Return q_iᵀ M q_i: [N, d, G, n] and [N, d, d] → [N, G, n]."""
    return (q * torch.einsum("hde,hegi->hdgi", moment, q)).sum(1)


def balance(query_norm: float, key_norm: float, scale: float) -> tuple[float, float]:
    """Return factors of q and k whose product is `scale` and which make both norms about √B.

    The factor of k is a power of two.

    >>> balance(4.0, 1.0, 1.0)
    (0.5, 2.0)
    """
    if scale == 0 or query_norm == 0 or key_norm == 0:
        return scale, 1.0
    power = math.floor((math.log2(abs(scale)) + math.log2(query_norm) - math.log2(key_norm)) / 2)
    return math.ldexp(scale, -power), math.ldexp(1.0, power)


class Backend:
    """What computes polynomial attention. A backend owns everything that it keeps between calls.

    `name` is shown in plans. `rates` is the relative speed of operations, from which costs are predicted.
    """

    name: str
    rates: Rates

    def survey(self, call: Call, tensors: Tensors) -> Survey:
        """Return proved bounds on the norms of q, k and v."""
        return survey(call, tensors)

    def look(self, call: Call, tensors: Tensors, bound: float) -> Callable[[], float]:
        """Return what waits for a share of the rows of every head that are proved to have B_i > `bound`."""
        return partial(share_beyond, call, tensors.detach(), bound)

    def is_outside(self, call: Call, tensors: Tensors, bound: float) -> Tensor:
        """Return a bool tensor [] on the device: whether scores may exceed `bound`, or q, k or v is unusable."""
        return is_outside(call, tensors, bound)

    def forward(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, needs_z: bool = True
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """Return out [N, G, n, e] in the dtype of q, the normaliser Z [N, G, n], and the tensors for `backward`.

        Unless `needs_z`, Z may be None and the tensors for `backward` may be missing.
        """
        raise NotImplementedError

    def backward(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, saved: Saved, grad: Tensor) -> Gradients:
        """Return the gradients of q, k and v from `grad`, that of out. Centres and value midpoints are constants."""
        raise NotImplementedError

    def rounding(self, call: Call, p: Minimax, bound: float, centring: int, spread: float) -> float:
        """Return the most that rounding can add to an output entry, as a fraction of range(v).

        `bound` is B, `centring` is 0, 1 or 2 as in `Batch`, and `spread` bounds log w_i − log w_j.
        """
        raise NotImplementedError

    def holds(self, scale: float, query: float, key: float, value: float) -> bool:
        """Return whether the sums of a head stay in range, given the largest ‖q‖, ‖k‖ and |v|.

        In plain torch they do, because q and k are balanced before they are summed.
        """
        return True

    def largest_log_range(self, call: Call) -> float:
        """Return the largest spread of log w for which no weight is lost to underflow."""
        return LARGEST_LOG_RANGE if call.causal else math.inf

    def is_capturable(self, call: Call) -> bool:
        """Return whether a CUDA graph can capture `forward` and `is_outside`: they copy nothing to the host."""
        return False

    def compute(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, needs_z: bool) -> tuple[Tensor, Tensor | None]:
        """Return out and, if needed, Z. Gradients of q, k and v are computed by `backward`."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            out, normaliser = PolynomialAttention.apply(q, k, v, batch, self)  # type: ignore[no-untyped-call]
            return out, normaliser
        out, normaliser, _ = self.forward(batch, q, k, v, needs_z)
        return out, normaliser


class PolynomialAttention(torch.autograd.Function):
    """The output and the normaliser Z of a backend. The gradient of its gradient raises an error."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, backend: Backend) -> tuple[Tensor, Tensor]:
        """Return (out, Z) of the backend."""
        out, normaliser, saved = backend.forward(batch, q, k, v, True)
        assert normaliser is not None
        ctx.save_for_backward(q, k, v, *saved)
        ctx.batch, ctx.backend = batch, backend
        ctx.mark_non_differentiable(normaliser)
        ctx.set_materialize_grads(False)  # the normaliser would get a tensor of zeros
        return out, normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        grad = grads[0]
        if grad is None:
            return (None,) * 5
        q, k, v, *saved = ctx.saved_tensors
        with without_autocast(q):
            if torch.is_grad_enabled():  # create_graph: differentiating the gradients raises an error
                gradients = _Gradient.apply(q, k, v, grad, ctx.batch, ctx.backend, *saved)  # type: ignore[no-untyped-call]
            else:
                gradients = ctx.backend.backward(ctx.batch, q, k, v, tuple(saved), grad)
        return (*gradients, None, None)


class _Gradient(torch.autograd.Function):
    """The gradients of q, k and v, as a function that cannot be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, batch: Batch, backend: Backend, *saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backend.backward(batch, q, k, v, saved, grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise DoubleBackwardError(
            "the gradient of the polynomial path cannot be differentiated: second derivatives have no error bound; "
            'call attention with force="exact" where they are needed'
        )


# --- the backend in plain torch ---------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _blocks(dim: int, degree: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return for every degree k = 1 … g the length of its block, and for every a the start of the tail of block k−1."""
    blocks = []
    for k in range(1, degree + 1):
        before = math.comb(dim + k - 2, k - 1)
        starts = tuple(before - math.comb(dim - a + k - 2, k - 1) for a in range(dim))
        blocks.append((math.comb(dim + k - 1, k), starts))
    return tuple(blocks)


@lru_cache(maxsize=64)
def multinomials(dim: int, degree: int) -> tuple[Tensor, Tensor]:
    """Return the multinomial coefficient (float64) and the degree of every feature: two [F]."""
    values, degrees = [], []
    for k in range(degree + 1):
        for monomial in combinations_with_replacement(range(dim), k):
            repeats = math.prod(math.factorial(len(list(same))) for _, same in groupby(monomial))
            values.append(math.factorial(k) / repeats)
            degrees.append(k)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(degrees)


class FeatureBuffer:
    """A buffer for the features of one chunk of tokens, and the views that fill it.

    Tokens are the last axis, [..., F, n], so that every product runs over contiguous memory.
    """

    def __init__(self, like: Tensor, degree: int) -> None:
        """Allocate a buffer for chunks of the shape, dtype and device of `like` [..., d, n]."""
        dim, n = like.shape[-2:]
        self.out = like.new_empty(*like.shape[:-2], feature_count(dim, degree), n)
        self.out[..., 0, :] = 1
        self._linear = self.out[..., 1 : dim + 1, :]
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        end = 1
        previous = self.out[..., :1, :]
        for k, (length, starts) in enumerate(_blocks(dim, degree), start=1):
            block, at = self.out[..., end : end + length, :], 0
            for a, start in enumerate(starts if k > 1 else ()):
                tail = previous[..., start:, :]
                self._steps.append((self._linear[..., a : a + 1, :], tail, block[..., at : at + tail.shape[-2], :]))
                at += tail.shape[-2]
            previous, end = block, end + length

    def fill(self, x: Tensor) -> Tensor:
        """Return the features of x [..., d, n]. They are valid until the next call."""
        if self.out.shape[-2] > 1:
            self._linear.copy_(x)
        for scale, tail, target in self._steps:
            torch.mul(scale, tail, out=target)
        return self.out


class Featurizer:
    """All monomials up to a degree, the constant first, of many chunks of a few shapes, in reused buffers.

    >>> Featurizer(2)(torch.tensor([[2.0], [3.0]])).flatten()
    tensor([1., 2., 3., 4., 6., 9.])
    """

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._buffers: dict[tuple[int, ...], FeatureBuffer] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features [..., F, n] of x [..., d, n]. They are valid until the next call with this shape."""
        key = tuple(x.shape)
        if key not in self._buffers:
            self._buffers[key] = FeatureBuffer(x, self.degree)
        return self._buffers[key].fill(x)


def features_vjp(x: Tensor, phi: Tensor, grad: Tensor, degree: int) -> Tensor:
    """Return the gradient of ⟨grad, φ(x)⟩ with respect to x, [..., d, n]. It overwrites `grad`.

    `phi` is φ(x), the features. The blocks are visited from the highest degree down: the product x_a · tail adds
    grad·tail to the gradient of x_a and grad·x_a to that of the block below.
    """
    dim = x.shape[-2]
    out = torch.zeros_like(x)
    ends = [1]
    for length, _ in _blocks(dim, degree):
        ends.append(ends[-1] + length)
    for k in range(degree, 0, -1):
        begin, previous = ends[k - 1], ends[k - 2] if k > 1 else 0
        at = begin
        for a, start in enumerate(_blocks(dim, degree)[k - 1][1]):
            size = begin - previous - start
            part = grad[..., at : at + size, :]
            out[..., a, :] += (part * phi[..., previous + start : begin, :]).sum(-2)
            grad[..., previous + start : begin, :] += part * x[..., a : a + 1, :]
            at += size
    return out


def roundings(dim: int, degree: int) -> int:
    """Return the number of roundings, in the working dtype, that a term of the numerator or denominator undergoes."""
    return CHUNK + feature_count(dim, degree) + 6 * degree + dim + 12


def by_group(x: Tensor, axis: int, groups: int) -> Tensor:
    """Return a view in which the axis of all query tokens, G·n, is split into two axes G, n."""
    axis %= x.ndim
    split: Tensor = torch.unflatten(x, axis, (groups, x.shape[axis] // groups))
    return split


@dataclass(frozen=True)
class Prepared:
    """Centred tensors: q̃ [N, d, G·n] and k̃ [N, d, m] with tokens last, V⁺ [N, m, e+1], w [N, m] or None, a [N, F, 1].

    `chunk` is the size of causal chunks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    a: Tensor
    groups: int
    features: Featurizer
    chunk: int

    def weighted(self, keys: slice) -> Tensor:
        """Return w_j V⁺_j of some keys."""
        v = self.v[:, keys]
        return v if self.w is None else self.w[:, keys, None] * v

    def scaled(self, s: Tensor) -> Tensor:
        """Return diag(a) S in the working dtype."""
        return (self.a * s).to(self.q.dtype)

    def rows(self, chunk: slice) -> Tensor:
        """Return q̃ of the same rows of every query head: [N, d, G·rows]."""
        return by_group(self.q, -1, self.groups)[..., chunk].flatten(2)


class TorchBackend(Backend):
    """Polynomial attention of any degree in plain torch."""

    name = "torch"

    def __init__(self, rates: Rates, causal_chunk: int = CAUSAL_CHUNK) -> None:
        self.rates, self.causal_chunk = rates, causal_chunk

    def rounding(self, call: Call, p: Minimax, bound: float, centring: int, spread: float) -> float:
        """Return the most that rounding can add to an output entry, as a fraction of range(v)."""
        coarse = 4 * product_unit(call.working, call.device)
        log_error = (call.d + 6) * 2.0**-53 * spread
        return rounding_share(p, bound, roundings(call.d, p.degree) * unit(call.working), coarse, log_error)

    def forward(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, needs_z: bool = True
    ) -> tuple[Tensor, Tensor, Saved]:
        """Return out [N, G, n, e] in the dtype of q, Z [N, G, n], and [N, Z] before the division for `backward`."""
        raw = q.new_empty(*q.shape[:-1], v.shape[-1] + 1, dtype=batch.call.working)
        for at in _head_groups(batch, q):
            (_forward_causal if batch.call.causal else _forward_full)(self.prepare(batch, at, q, k, v), raw[at])
        out = raw[..., :-1] / raw[..., -1:]
        out += batch.middle[:, None, None]
        return out.to(q.dtype), raw[..., -1], (raw,)

    def backward(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, saved: Saved, grad: Tensor) -> Gradients:
        """Return the gradients of q, k and v. The largest weight is a constant too."""
        (raw,), work = saved, batch.call.working
        grad = grad.to(work)
        if batch.exact_rows is not None:
            grad = grad.masked_fill(batch.exact_rows[..., None], 0)
        scaled = grad / raw[..., -1:]
        mean = raw[..., :-1] / raw[..., -1:]
        up = torch.cat([scaled, -(scaled * mean).sum(-1, keepdim=True)], dim=-1)  # the gradient of [N, Z]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for at in _head_groups(batch, q):
            p = self.prepare(batch, at, q, k, v)
            qt, kt, vt = (_backward_causal if batch.call.causal else _backward_full)(p, up[at])
            if p.w is not None:
                vt *= p.w[..., None]  # from the gradient of w V⁺ to that of V⁺
            qt = by_group(qt.transpose(1, 2), 1, p.groups) * batch.factors[0][at, None, None, None].to(work)
            kt = kt.transpose(1, 2) * batch.factors[1][at, None, None].to(work)
            if batch.is_weighted:  # through w_j = exp(s μ·(k_j − c))
                kt += batch.call.scale * (vt * p.v).sum(-1, keepdim=True) * batch.query_centre[at, None]
            if batch.exact_rows is not None:
                qt = qt.masked_fill(batch.exact_rows[at, ..., None], 0)
            dq[at], dk[at], dv[at] = qt, kt, vt[..., :-1]
        if batch.padding is not None:
            dk = dk.masked_fill(batch.padding[..., None], 0)
        return dq, dk, dv

    def prepare(self, batch: Batch, at: slice, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """Centre, scale and augment q, k and v for some of the heads."""
        qt, kt = centred(batch, at, q[at], k[at])
        values = v[at].to(batch.call.working)
        vp = values.new_ones(*values.shape[:-1], values.shape[-1] + 1)
        torch.sub(values, batch.middle[at, None], out=vp[..., :-1])
        if batch.padding is not None:
            vp[..., :-1].masked_fill_(batch.padding[at, ..., None], 0)
        counts, degrees = multinomials(q.shape[-1], batch.degree)
        own = torch.tensor(batch.coefficients[at], dtype=torch.float64)
        return Prepared(
            q=qt.flatten(1, 2).transpose(1, 2).contiguous(),
            k=kt.transpose(1, 2).contiguous(),
            v=vp,
            w=weights(batch, at, k[at].to(batch.call.working)),
            a=(own[:, degrees] * counts)[..., None].to(q.device),
            groups=q.shape[1],
            features=Featurizer(batch.degree),
            chunk=self.causal_chunk,
        )


def _head_groups(batch: Batch, q: Tensor) -> Iterator[slice]:
    """Yield groups of heads that keep a chunk of features in cache on the CPU, or in a few hundred MB elsewhere."""
    heads, per_head = q.shape[0], feature_count(q.shape[-1], batch.degree) * CHUNK
    budget = 2**18 if q.device.type == "cpu" else 2**26
    size = max(1, min(heads, budget // max(1, per_head)))
    for start in range(0, heads, size):
        yield slice(start, min(start + size, heads))


def state(p: Prepared, keys: slice) -> Tensor:
    """Return S = Σ_j w_j φ(k̃_j) V⁺_jᵀ over some keys, in float64: [N, F, e+1]."""
    k, v = p.k[..., keys], p.weighted(keys)
    total = k.new_zeros(k.shape[0], p.a.shape[1], v.shape[-1], dtype=torch.float64)
    for start in range(0, k.shape[-1], CHUNK):
        total += p.features(k[..., start : start + CHUNK]) @ v[:, start : start + CHUNK]
    return total


def _forward_full(p: Prepared, raw: Tensor) -> None:
    s, target = p.scaled(state(p, slice(None))), raw.flatten(1, 2)
    for start in range(0, p.q.shape[-1], CHUNK):
        rows = slice(start, start + CHUNK)
        target[:, rows] = p.features(p.q[..., rows]).transpose(1, 2) @ s


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _forward_causal(p: Prepared, raw: Tensor) -> None:
    total: Tensor | None = None
    for rows in _chunks(raw.shape[2], p.chunk):
        here = diagonal(p, rows) @ p.v[:, rows]
        if total is not None:
            here += p.features(p.rows(rows)).transpose(1, 2) @ p.scaled(total)
        raw[:, :, rows] = by_group(here, 1, p.groups)
        total = state(p, rows) if total is None else total.add_(state(p, rows))


def diagonal(p: Prepared, rows: slice) -> Tensor:
    """Return w_j exp(t_ij) for j ≤ i inside one chunk: [N, G·rows, keys]. There may be fewer keys than rows."""
    t = p.rows(rows).transpose(1, 2) @ p.k[..., rows]
    value = by_group(t.exp_(), 1, p.groups).tril_().flatten(1, 2)
    return value if p.w is None else value.mul_(p.w[:, None, rows])


def _backward_full(p: Prepared, back: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q̃, k̃ (tokens last) and w V⁺ from `back`, the gradient of [N, Z]."""
    s, up = p.scaled(state(p, slice(None))), back.flatten(1, 2)
    dq, dk, dv = torch.empty_like(p.q), torch.empty_like(p.k), torch.empty_like(p.v)
    ds = torch.zeros_like(s, dtype=torch.float64)
    for start in range(0, p.q.shape[-1], CHUNK):
        rows = slice(start, start + CHUNK)
        ds += _queries_back(p, p.q[..., rows], up[:, rows], s, dq[..., rows])
    for keys in _chunks(p.k.shape[-1], CHUNK):
        _keys_back(p, keys, p.scaled(ds), dk, dv)
    return dq, dk, dv


def _queries_back(p: Prepared, q: Tensor, up: Tensor, s: Tensor | None, dq: Tensor) -> Tensor:
    """Return ∂S of some rows and write their gradient, from ∂φ(q̃) = S upᵀ, to `dq`; it is 0 if S is None."""
    phi = p.features(q)
    if s is None:
        dq.zero_()
    else:
        dq.copy_(features_vjp(q, phi, s @ up.transpose(1, 2), p.features.degree))
    return phi @ up


def _keys_back(p: Prepared, keys: slice, ds: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write the gradients of some keys: ∂(w V⁺) = φ(k̃)ᵀ ∂S, and ∂k̃ from ∂φ(k̃) = ∂S (w V⁺)ᵀ."""
    here = p.k[..., keys]
    phi = p.features(here)
    dv[:, keys] = phi.transpose(1, 2) @ ds
    dk[..., keys] = features_vjp(here, phi, ds @ p.weighted(keys).transpose(1, 2), p.features.degree)


def _backward_causal(p: Prepared, back: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same gradients chunk by chunk: queries use S of earlier chunks, keys use ∂S of later chunks."""
    chunks = _chunks(back.shape[2], p.chunk)
    dq, dk, dv = torch.empty_like(p.q), torch.zeros_like(p.k), torch.zeros_like(p.v)
    split = by_group(dq, -1, p.groups)
    total: Tensor | None = None
    parts = []  # ∂S of the rows of every chunk: F·(e+1) numbers each
    for rows in chunks:
        here, up = p.rows(rows), back[:, :, rows].flatten(1, 2)
        mine = torch.empty_like(here)
        parts.append(_queries_back(p, here, up, None if total is None else p.scaled(total), mine))
        split[..., rows] = by_group(mine, -1, p.groups)
        total = state(p, rows) if total is None else total.add_(state(p, rows))
    ds: Tensor | None = None
    for rows, part in zip(reversed(chunks), reversed(parts), strict=True):
        if rows.start < p.k.shape[-1]:
            if ds is not None:
                _keys_back(p, rows, p.scaled(ds), dk, dv)
            _diagonal_back(p, rows, back, split, dk, dv)
        ds = part.double() if ds is None else ds.add_(part)
    return dq, dk, dv


def _diagonal_back(p: Prepared, rows: slice, back: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients of the exact blocks: with P = w_j exp(t_ij), ∂t = P ∘ (back V⁺ᵀ), ∂(w V⁺) = exp(t)ᵀ back."""
    q, k, up = p.rows(rows), p.k[..., rows], back[:, :, rows].flatten(1, 2)
    weight = diagonal(p, rows)
    grad = weight * (up @ p.v[:, rows].transpose(1, 2))
    dq[..., rows] += by_group(k @ grad.transpose(1, 2), -1, p.groups)
    dk[..., rows] += q @ grad
    bare = weight if p.w is None else diagonal(replace(p, w=None), rows)
    dv[:, rows] += bare.transpose(1, 2) @ up
