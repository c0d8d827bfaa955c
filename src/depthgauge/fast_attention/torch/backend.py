"""Polynomial attention in plain torch, on any device, in chunks so that no tensor of tokens × features is kept.

With V⁺ = [v − mid, 1], numerator and denominator are one product:

    S = Σ_j w_j φ(k̃_j) V⁺_jᵀ      (chunks of keys; the sum over chunks is float64)
    [N_i, Z_i] = φ(q̃_i)ᵀ diag(a) S,   out_i = N_i / Z_i + mid      (chunks of queries)

a_f is the coefficient of p times the multinomial coefficient of feature f. The causal path visits the chunks in order:
exact exponentials inside a chunk, S for all earlier chunks, one N and one Z. The backward pass consists of the
transposes of the same two products.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Spec, centred, weights
from depthgauge.fast_attention.theory.bounds import (
    LARGEST_LOG_RANGE,
    Survey,
    is_outside,
    product_unit,
    rounding_share,
    survey,
    unit,
)
from depthgauge.fast_attention.theory.cost import Rates, feature_count
from depthgauge.fast_attention.theory.minimax import Minimax
from depthgauge.fast_attention.torch.features import Featurizer, features_vjp, multinomials

CHUNK = 512
"""Tokens per chunk, which is also the number of terms summed in the working dtype; `roundings` counts them."""
CAUSAL_CHUNK = 256
"""Tokens per chunk on the causal path, which is also the size of the exact blocks on the diagonal."""


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


class TorchBackend:
    """Polynomial attention of any degree in plain torch.

    The backend keeps the multinomial coefficients of the features it has used.
    """

    name = "torch"

    def __init__(self, rates: Rates, causal_chunk: int = CAUSAL_CHUNK) -> None:
        self.rates, self.causal_chunk = rates, causal_chunk
        self._multinomials: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def survey(self, problem: Problem) -> Survey:
        """Return proved bounds on the norms of q, k and v."""
        return survey(problem)

    def is_outside(self, problem: Problem, bound: float) -> Tensor:
        """Return on the device whether scores may exceed `bound`, or q, k or v is unusable."""
        return is_outside(problem, bound)

    def rounding(self, problem: Problem, p: Minimax, bound: float, centring: int, spread: float) -> float:
        """Return the most that rounding can add to an output entry, as a fraction of range(v)."""
        d, work = problem.q.shape[-1], problem.working
        coarse = 4 * product_unit(work, problem.q.device)
        log_error = (d + 6) * 2.0**-53 * spread
        return rounding_share(p, bound, roundings(d, p.degree) * unit(work), coarse, log_error)

    def holds(self, scale: float, query: float, key: float, value: float) -> bool:
        """Return True: q and k are balanced before they are summed."""
        return True

    def largest_log_range(self, problem: Problem) -> float:
        """Return the largest spread of log w for which no weight is lost to underflow."""
        return LARGEST_LOG_RANGE if problem.causal else math.inf

    def is_capturable(self, problem: Problem) -> bool:
        """Return False: tables of coefficients are copied from the host."""
        return False

    def forward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool = True
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return out [N, G, n, e] in the dtype of q, Z [N, G, n], and [N, Z] before the division for `backward`."""
        raw = q.new_empty(*q.shape[:-1], v.shape[-1] + 1, dtype=spec.problem.working)
        for at in _head_groups(spec, q):
            (_forward_causal if spec.causal else _forward_full)(self.prepare(spec, at, q, k, v), raw[at])
        out = raw[..., :-1] / raw[..., -1:]
        out += spec.middle[:, None, None]
        return out.to(q.dtype), raw[..., -1], (raw,)

    def backward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. Centres, the largest weight and the midpoints are constants."""
        (raw,), work = saved, spec.problem.working
        grad = grad.to(work)
        if spec.exact_rows is not None:
            grad = grad.masked_fill(spec.exact_rows[..., None], 0)
        scaled = grad / raw[..., -1:]
        mean = raw[..., :-1] / raw[..., -1:]
        up = torch.cat([scaled, -(scaled * mean).sum(-1, keepdim=True)], dim=-1)  # the gradient of [N, Z]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for at in _head_groups(spec, q):
            p = self.prepare(spec, at, q, k, v)
            qt, kt, vt = (_backward_causal if spec.causal else _backward_full)(p, up[at])
            if p.w is not None:
                vt *= p.w[..., None]  # from the gradient of w V⁺ to that of V⁺
            qt = by_group(qt.transpose(1, 2), 1, p.groups) * spec.query_factor[at, None, None, None].to(work)
            kt = kt.transpose(1, 2) * spec.key_factor[at, None, None].to(work)
            if spec.is_weighted:  # through w_j = exp(s μ·(k_j − c))
                kt += spec.scale * (vt * p.v).sum(-1, keepdim=True) * spec.query_centre[at, None]
            if spec.exact_rows is not None:
                qt = qt.masked_fill(spec.exact_rows[at, ..., None], 0)
            dq[at], dk[at], dv[at] = qt, kt, vt[..., :-1]
        if spec.keep is not None:
            dk = dk.masked_fill(~spec.keep[..., None], 0)
        return dq, dk, dv

    def prepare(self, spec: Spec, at: slice, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """Centre, scale and augment q, k and v for some of the heads."""
        qt, kt = centred(spec, at, q[at], k[at])
        values = v[at].to(spec.problem.working)
        vp = values.new_ones(*values.shape[:-1], values.shape[-1] + 1)
        torch.sub(values, spec.middle[at, None], out=vp[..., :-1])
        if spec.keep is not None:
            vp[..., :-1].masked_fill_(~spec.keep[at, ..., None], 0)
        counts, degrees = self._features_of(q.shape[-1], spec.degree)
        own = torch.tensor(spec.coefficients[at], dtype=torch.float64)
        return Prepared(
            q=qt.flatten(1, 2).transpose(1, 2).contiguous(),
            k=kt.transpose(1, 2).contiguous(),
            v=vp,
            w=weights(spec, at, k[at].to(spec.problem.working)),
            a=(own[:, degrees] * counts)[..., None].to(q.device),
            groups=q.shape[1],
            features=Featurizer(spec.degree),
            chunk=self.causal_chunk,
        )

    def _features_of(self, dim: int, degree: int) -> tuple[Tensor, Tensor]:
        key = dim, degree
        if key not in self._multinomials:
            self._multinomials[key] = multinomials(dim, degree)
        return self._multinomials[key]


def _head_groups(spec: Spec, q: Tensor) -> Iterator[slice]:
    """Yield groups of heads that keep a chunk of features in cache on the CPU, or in a few hundred MB elsewhere."""
    heads, per_head = q.shape[0], feature_count(q.shape[-1], spec.degree) * CHUNK
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
