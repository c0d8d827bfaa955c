"""The backward pass in Triton: the sums of the forward pass, the same sums over queries, and rows that read them.

Let p(t) = a0 + a1 t + a2 t², level = −∂out·(out − shift) and dN = ∂out/Z′, where Z′ and all sums over keys are divided
by W. Then

    ∂q_i = 1/Z′ · Σ_j w_j p′(t) s k_j (∂out·ṽ_j + level) = 1/Z′ · (L ∂out + 2 S(q, ·, ∂out) + level (z1 + 2 C q))
    ∂v_j = w_j Σ_i p(t) dN_i,   ∂k_j = w_j Σ_i p′(t) s q_i (dN_i·ṽ_j + level_i/Z′)

L, S, C and z1 are the sums over keys of the forward pass. The same sums over queries, with dN in place of v, give ∂v
and ∂k. ∂v is quadratic in one vector. ∂q and ∂k are bilinear, so they need S with its axes in another order (`turn`).

Causal row i of block b reads earlier blocks through state b of the forward pass, and its own block through exact
exponentials: p and p′ become e^t there. The keys of block b read the sums over the queries of all blocks after b. The
rows of a block enter these sums with dN = ∂out · floor/Z′, where floor is the smallest Z′ of the block: early rows
attend to few keys, and 1/Z′ would overflow short dtypes. State b is divided by the weight of all rows after b, the sum
of 1/floor. Turned states are large and are computed a few at a time. float16 gradients are scaled by a power of two,
because the range of the dtype is small.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton.forward import Coefficients, is_plain, kernel_coefficients, kernel_inputs
from depthgauge.fast_attention.triton.gradient_launches import GradientLaunches, GradientSizes
from depthgauge.fast_attention.triton.workspace import Workspace

Saved = tuple[Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """What all parts of the backward pass read.

    q̃ and ∂out are [N, G, n, ·]; Z′ and level are [N, G, n]; k̃ and ṽ are [N, m, ·]; w is [N, m] or None. big and small
    are the states of the forward pass. `query_states` fills in v and level.
    """

    q: Tensor
    grad: Tensor
    z: Tensor
    level: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    big: Tensor
    small: Tensor
    scale: float


@dataclass(frozen=True)
class QueryStates:
    """The states that keys read: big and small [states, N, …]; floor [N, blocks] and after [N, states] if causal.

    `turned` is memory for turned states. It holds those of `Inputs` and these, if both are turned at once.
    """

    big: Tensor
    small: Tensor
    floor: Tensor
    after: Tensor
    turned: Tensor


@dataclass(frozen=True)
class HeadFactors:
    """The factors of the rows of a head, for ∂q, ∂k and ∂v: [N] each, or the small states if q and k are unchanged."""

    query: Tensor
    key: Tensor
    value: Tensor


def normalised(grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ∂out [N, G, n, e] times a power of two, and the inverse factor [N]. Only float16 needs a factor."""
    if grad.dtype != torch.float16:
        return grad, None
    exponent = torch.frexp(grad.abs().amax(dim=(1, 2, 3)).float()).exponent
    one = torch.ones_like(exponent, dtype=torch.float32)
    return (grad * torch.ldexp(one, -exponent)[:, None, None, None]).to(grad.dtype), torch.ldexp(one, exponent)


def head_factors(spec: Spec, small: Tensor, size: Tensor | None) -> HeadFactors:
    """Return the factors of q̃ and k̃, times `size` and, for keys and values, 1 / total weight."""
    if is_plain(spec):
        return HeadFactors(small, small, small)
    query, key = (x.float() for x in spec.factors)
    share = small[0, :, -1].contiguous()
    if size is not None:
        query, share = query * size, share * size
    return HeadFactors(query, share * key, share)


def second_sums(p: GradientLaunches, queries: Tensor, dn: Tensor) -> Tensor:
    """Return the sums of (q ⊗ q) dN of every split, from q̃ as [N, d, tokens]."""
    sums = queries.new_empty(p.second_shape, dtype=p.second_dtype)
    for at, launch in enumerate(p.second):
        table, target = (p.second_programs, sums[..., 256:, :]) if at else (p.programs, sums)
        launch((queries, queries, dn, table, target))
    return sums


def query_states(
    p: GradientLaunches, x: Inputs, v: Tensor, out: Tensor, shift: Tensor, coefficients: tuple[Tensor, Coefficients]
) -> QueryStates:
    """Return the states that keys read, and fill in x.v and x.level."""
    heads, short, wide = p.sizes.heads, x.q.new_empty, x.z.new_empty
    dn, first = torch.empty_like(x.grad), wide(p.first_shape)
    floor, after = (wide(p.floor_shape), wide(heads, p.states)) if p.is_causal else (first, first)
    queries = short(p.transposed_shape) if p.is_second else first
    p.prepare((x.q, v, shift, queries, x.v))
    p.moments((x.q, x.grad, out, x.z, shift, floor, dn, x.level, first))
    second = second_sums(p, queries, dn) if p.is_second else first
    big, small = short(p.states, heads, p.big_size), wide(p.states, heads, p.query_small_size)
    table, numbers = coefficients
    p.finish((second, first, table, floor, p.slots, big, small, after), numbers)
    del queries, second, dn  # turned states can use their memory
    turned = short(p.turned_shape) if p.is_second else big
    if p.turn_both is not None:
        p.turn_both((x.big, big, p.pairs, turned))
    return QueryStates(big, small, floor, after, turned)


def query_rows(p: GradientLaunches, x: Inputs, behind: QueryStates, factor: Tensor) -> Tensor:
    """Return ∂q [N, G, n, d], from the states of keys and the exact blocks."""
    dq, exact = torch.empty_like(x.q), x.z
    if p.is_causal:
        exact = torch.empty_like(x.q, dtype=torch.float32)
        tensors = (x.q, x.grad, x.level, x.k, x.v, x.z if x.w is None else x.w, x.small, exact)
        p.exact_queries(tensors, (x.scale * math.log2(math.e), x.scale))
    for part in p.queries:
        if part.turn is not None:
            part.turn((x.big[part.first_state :], x.big, p.pairs, behind.turned))
        part.rows(
            (x.q, x.grad, behind.turned, x.big, x.small, x.level, exact, x.z, factor, x.z, p.turned_slots, dq, x.z),
            (1.0,),
        )
    return dq


def key_rows(
    p: GradientLaunches, x: Inputs, behind: QueryStates, factors: HeadFactors
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ∂k and ∂v [N, m, ·] and, if the weights depend on the keys, w ∂w [N, m], from the states of queries.

    They are in float32 if the weights depend on the keys.
    """
    is_weighted, is_causal = p.sizes.is_weighted, p.is_causal
    dtype = torch.float32 if is_weighted else x.k.dtype
    dk, dv = torch.empty_like(x.k, dtype=dtype), torch.empty_like(x.v, dtype=dtype)
    dw = x.z.new_empty(x.k.shape[:2]) if is_weighted else x.z
    exact_k = exact_v = x.z
    if is_causal:
        exact_k, exact_v = torch.empty_like(x.k, dtype=torch.float32), torch.empty_like(x.v, dtype=torch.float32)
        p.exact_keys(
            (x.q, x.grad, x.level, x.z, x.k, x.v, behind.floor, behind.after, exact_k, exact_v, dw),
            (x.scale * math.log2(math.e), x.scale),
        )
    big, small, turned, w = behind.big, behind.small, behind.turned, x.z if x.w is None else x.w
    weight = (1.0 if is_causal else float(p.n),)  # sums over queries are divided by after, or by the number of rows
    p.values((x.k, x.k, big, big, small, x.z, exact_v, w, factors.value, behind.after, p.slots, dv, dw), weight)
    for part in p.keys:
        if part.turn is not None:
            part.turn((big[part.first_state :], big, p.pairs, turned))
        part.rows(
            (x.k, x.v, turned, big, small, x.z, exact_k, w, factors.key, behind.after, p.turned_slots, dk, x.z), weight
        )
    return dk, dv, dw


def plain_backward(
    p: GradientLaunches, coefficients: Coefficients, scale: float, given: tuple[Tensor, Tensor, Tensor], saved: Saved,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, read by the kernels directly, with one polynomial for all heads.

    Any shapes with the same order in memory as [N, G, n, d] and [N, m, ·] are accepted. Values are centred after the
    sums.
    """
    q, k, v = (x.contiguous() for x in given)
    out, z, big, small = saved
    x = Inputs(q, grad.contiguous(), z, torch.empty_like(z), k, torch.empty_like(v), None, big, small, scale)
    behind = query_states(p, x, v, out, small, (small, coefficients))
    dq = query_rows(p, x, behind, small)
    dk, dv, _ = key_rows(p, x, behind, HeadFactors(small, small, small))
    return dq, dk, dv


def backward(
    workspace: Workspace, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from `grad`, the gradient of out."""
    (heads, groups, n, d), (m, e) = q.shape, v.shape[1:]
    out, z, big, small = saved
    qt, kt, w, scale = kernel_inputs(spec, q, k)
    is_shifted = workspace.centres_before(v.dtype)
    p = workspace.gradients(
        GradientSizes(
            heads, groups, n, m, d, e, q.dtype, spec.degree, workspace.causal_block if spec.causal else 0,
            workspace.turned_bytes, is_shifted, is_plain(spec), w is not None, spec.is_weighted, spec.is_alike,
            q.device,
        )
    )  # fmt: skip
    if spec.exact_rows is not None:
        grad = grad.masked_fill(spec.exact_rows[..., None], 0)
    up, size = normalised(grad.contiguous())
    x = Inputs(qt, up, z, torch.empty_like(z), kt, v.new_empty(v.shape), w, big, small, scale)
    shift = spec.middle.float().contiguous() if is_shifted else small
    factors = head_factors(spec, small, size)
    coefficients = kernel_coefficients(spec, scale, small)
    behind = query_states(p, x, v.contiguous(), out, shift, coefficients)
    dq = query_rows(p, x, behind, factors.query)
    dk, dv, dw = key_rows(p, x, behind, factors)
    if spec.is_weighted:  # through w_j = exp(s μ·(k_j − c))
        through = (dv * x.v).sum(-1) + dw
        dk = dk + spec.scale * through[..., None] * spec.query_centre[:, None]
    if spec.keep is not None:
        dk = dk.masked_fill(~spec.keep[..., None], 0)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
