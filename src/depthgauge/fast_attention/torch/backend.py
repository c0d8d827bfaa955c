"""Polynomial attention in plain torch, on any device: blocked, so that no tensor of tokens × features is kept.

With V⁺ = [v − mid, 1] numerator and denominator are one product:

    S = Σ_j w_j φ(k̃_j) V⁺_jᵀ      (chunks of keys; the sum over chunks is kept in float64)
    [N_i, Z_i] = φ(q̃_i)ᵀ diag(a) S,   out_i = N_i / Z_i + mid      (chunks of queries)

a holds p's coefficient times the multinomial of every feature. Causal: chunks in order, exact exponentials inside a
chunk, S for everything before it, one N and one Z. The backward pass is the same two products the other way round.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from depthgauge.fast_attention.features import Featurizer, feature_count, features_vjp, multinomials
from depthgauge.fast_attention.spec import Spec, weights

CHUNK = 512
"""Tokens taken at once; also how many terms are summed in the working dtype, which the rounding allowance counts."""
CAUSAL_CHUNK = 256
"""The same on the causal path, where it is also the size of the exact blocks on the diagonal."""


def roundings(dim: int, degree: int) -> int:
    """How many roundings of the working dtype a term of numerator or denominator may see (README, Rounding)."""
    return CHUNK + feature_count(dim, degree) + 6 * degree + dim + 12


def by_group(x: Tensor, axis: int, groups: int) -> Tensor:
    """The axis that holds all query heads' tokens, G·n, as two axes G, n: a view."""
    axis %= x.ndim
    split: Tensor = torch.unflatten(x, axis, (groups, x.shape[axis] // groups))
    return split


@dataclass(frozen=True)
class Prepared:
    """q̃ [N, d, G·n] and k̃ [N, d, m] with tokens last, V⁺ [N, m, e+1], w [N, m] or None, a [N, F, 1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    a: Tensor
    groups: int
    features: Featurizer

    def weighted(self, keys: slice) -> Tensor:
        """w_j V⁺_j of some keys."""
        v = self.v[:, keys]
        return v if self.w is None else self.w[:, keys, None] * v

    def scaled(self, s: Tensor) -> Tensor:
        """diag(a) S in the working dtype."""
        return (self.a * s).to(self.q.dtype)

    def rows(self, chunk: slice) -> Tensor:
        """q̃ of the same rows of every query head: [N, d, G·rows]."""
        return by_group(self.q, -1, self.groups)[..., chunk].flatten(2)


def head_groups(heads: int, per_head: int, device: torch.device) -> Iterator[slice]:
    """Heads taken together: as many as keep a chunk of features in cache on the CPU, in a few hundred MB elsewhere."""
    budget = 2**18 if device.type == "cpu" else 2**26
    size = max(1, min(heads, budget // max(1, per_head)))
    for start in range(0, heads, size):
        yield slice(start, min(start + size, heads))


def prepare(spec: Spec, at: slice, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
    """Centre, scale and augment what a spec says, for some of the heads."""
    work = spec.problem.working
    q, k, v = q[at].to(work), k[at].to(work), v[at].to(work)
    keep = None if spec.keep is None else spec.keep[at]
    qt = (q - spec.query_centre[at, None, None]) * spec.query_factor[at, None, None, None].to(work)
    kt = (k - spec.key_centre[at, None]) * spec.key_factor[at, None, None].to(work)
    vp = v.new_ones(*v.shape[:-1], v.shape[-1] + 1)
    torch.sub(v, spec.middle[at, None], out=vp[..., :-1])
    if spec.exact_rows is not None:
        qt = qt.masked_fill(spec.exact_rows[at, ..., None], 0)
    if keep is not None:
        kt = kt.masked_fill(~keep[..., None], 0)
        vp[..., :-1].masked_fill_(~keep[..., None], 0)
    values, degrees = multinomials(q.shape[-1], spec.degree)
    own = torch.tensor(spec.coefficients[at], dtype=torch.float64)
    a = (own[:, degrees] * values)[..., None].to(q.device)
    tokens_last = qt.flatten(1, 2).transpose(1, 2).contiguous(), kt.transpose(1, 2).contiguous()
    return Prepared(*tokens_last, vp, weights(spec, at, k), a, q.shape[1], Featurizer(spec.degree))


def state(p: Prepared, keys: slice) -> Tensor:
    """S = Σ_j w_j φ(k̃_j) V⁺_jᵀ over some keys, in float64: [N, F, e+1]."""
    k, v = p.k[..., keys], p.weighted(keys)
    total = k.new_zeros(k.shape[0], p.a.shape[1], v.shape[-1], dtype=torch.float64)
    for start in range(0, k.shape[-1], CHUNK):
        total += p.features(k[..., start : start + CHUNK]) @ v[:, start : start + CHUNK]
    return total


def forward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool = True
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """out [N, G, n, e] in the dtype of q, Z [N, G, n], and for the backward pass [N, Z] before the division."""
    raw = q.new_empty(*q.shape[:-1], v.shape[-1] + 1, dtype=spec.problem.working)
    for at in _groups(spec, q):
        (_forward_causal if spec.causal else _forward_full)(prepare(spec, at, q, k, v), raw[at])
    out = raw[..., :-1] / raw[..., -1:]
    out += spec.middle[:, None, None]
    return out.to(q.dtype), raw[..., -1], (raw,)


def _groups(spec: Spec, q: Tensor) -> Iterator[slice]:
    return head_groups(q.shape[0], feature_count(q.shape[-1], spec.degree) * CHUNK, q.device)


def _forward_full(p: Prepared, raw: Tensor) -> None:
    s, target = p.scaled(state(p, slice(None))), raw.flatten(1, 2)
    for start in range(0, p.q.shape[-1], CHUNK):
        rows = slice(start, start + CHUNK)
        target[:, rows] = p.features(p.q[..., rows]).transpose(1, 2) @ s


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _forward_causal(p: Prepared, raw: Tensor) -> None:
    total: Tensor | None = None
    for rows in _chunks(raw.shape[2], CAUSAL_CHUNK):
        here = diagonal(p, rows) @ p.v[:, rows]
        if total is not None:
            here += p.features(p.rows(rows)).transpose(1, 2) @ p.scaled(total)
        raw[:, :, rows] = by_group(here, 1, p.groups)
        total = state(p, rows) if total is None else total.add_(state(p, rows))


def diagonal(p: Prepared, rows: slice) -> Tensor:
    """w_j exp(t_ij) for j ≤ i inside one chunk: [N, G·rows, keys]; keys may be fewer than rows."""
    t = p.rows(rows).transpose(1, 2) @ p.k[..., rows]
    value = by_group(t.exp_(), 1, p.groups).tril_().flatten(1, 2)
    return value if p.w is None else value.mul_(p.w[:, None, rows])


def backward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of out; centres, the weights' largest and the middle are constants."""
    (raw,), work = saved, spec.problem.working
    grad = grad.to(work)
    if spec.exact_rows is not None:
        grad = grad.masked_fill(spec.exact_rows[..., None], 0)
    scaled = grad / raw[..., -1:]
    mean = raw[..., :-1] / raw[..., -1:]
    back = torch.cat([scaled, -(scaled * mean).sum(-1, keepdim=True)], dim=-1)  # the gradient of [N, Z]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for at in _groups(spec, q):
        p = prepare(spec, at, q, k, v)
        qt, kt, vt = (_backward_causal if spec.causal else _backward_full)(p, back[at])
        if p.w is not None:
            vt *= p.w[..., None]  # of w V⁺ so far, now of V⁺
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


def _backward_full(p: Prepared, back: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q̃, k̃ (tokens last) and w V⁺."""
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
    """∂S of some rows; their own gradient ∂φ(q̃) = S upᵀ goes to `dq`, 0 where there is no S yet."""
    phi = p.features(q)
    if s is None:
        dq.zero_()
    else:
        dq.copy_(features_vjp(q, phi, s @ up.transpose(1, 2), p.features.degree))
    return phi @ up


def _keys_back(p: Prepared, keys: slice, ds: Tensor, dk: Tensor, dv: Tensor) -> None:
    """What ∂S hands to some keys: ∂(w V⁺) = φ(k̃)ᵀ ∂S and ∂φ(k̃) = ∂S (w V⁺)ᵀ."""
    here = p.k[..., keys]
    phi = p.features(here)
    dv[:, keys] = phi.transpose(1, 2) @ ds
    dk[..., keys] = features_vjp(here, phi, ds @ p.weighted(keys).transpose(1, 2), p.features.degree)


def _backward_causal(p: Prepared, back: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, chunk by chunk: S of everything before reaches the queries, ∂S of everything after the keys."""
    chunks = _chunks(back.shape[2], CAUSAL_CHUNK)
    dq, dk, dv = torch.empty_like(p.q), torch.zeros_like(p.k), torch.zeros_like(p.v)
    split = by_group(dq, -1, p.groups)
    total: Tensor | None = None
    parts = []  # ∂S of every chunk's rows is found on the way; F·(e+1) numbers each
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
    """The exact exponentials' share: with P = w_j exp(t_ij), ∂t = P ∘ (back V⁺ᵀ) and ∂(w V⁺) = exp(t)ᵀ back."""
    q, k, up = p.rows(rows), p.k[..., rows], back[:, :, rows].flatten(1, 2)
    weight = diagonal(p, rows)
    grad = weight * (up @ p.v[:, rows].transpose(1, 2))
    dq[..., rows] += by_group(k @ grad.transpose(1, 2), -1, p.groups)
    dk[..., rows] += q @ grad
    bare = weight if p.w is None else diagonal(replace(p, w=None), rows)
    dv[:, rows] += bare.transpose(1, 2) @ up
