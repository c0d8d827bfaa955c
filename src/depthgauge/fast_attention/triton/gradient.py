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

import torch
from torch import Tensor

from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton.forward import (
    Coefficients,
    exponents,
    is_plain,
    kernel_coefficients,
    kernel_inputs,
)
from depthgauge.fast_attention.triton.gradient_launches import GradientSizes
from depthgauge.fast_attention.triton.gradient_pass import GradientPass
from depthgauge.fast_attention.triton.passes import aligned
from depthgauge.fast_attention.triton.workspace import Workspace

Saved = tuple[Tensor, ...]


def normalised(grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ∂out [N, G, n, e] times a power of two, and the inverse factor [N]. Only float16 needs a factor."""
    if grad.dtype != torch.float16:
        return grad, None
    exponent = torch.frexp(grad.abs().amax(dim=(1, 2, 3)).float()).exponent
    one = torch.ones_like(exponent, dtype=torch.float32)
    return (grad * torch.ldexp(one, -exponent)[:, None, None, None]).to(grad.dtype), torch.ldexp(one, exponent)


def head_factors(spec: Spec, small: Tensor, size: Tensor | None) -> tuple[Tensor, ...]:
    """Return the factors of ∂q, ∂k and ∂v [N]: those of q̃ and k̃, times `size` and, for keys and values, 1 / weight.

    They are not needed if q and k are those of the caller: the kernels then read 1 / weight in the small state.
    """
    query, key = (x.float() for x in spec.factors)
    share = small[0, :, -1].contiguous()
    if size is not None:
        query, share = query * size, share * size
    return query, share * key, share


def plain_backward(
    p: GradientPass, coefficients: Coefficients, scale: float, given: tuple[Tensor, Tensor, Tensor], saved: Saved,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, read by the kernels directly, with one polynomial for all heads.

    Any shapes with the same order in memory as [N, G, n, d] and [N, m, ·] are accepted. Values are centred after the
    sums.
    """
    q, k, v = (x.contiguous() for x in given)
    found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    numbers = {"coefficients": coefficients, "exponents": exponents(scale)}
    out, *kept = map(aligned, saved)  # hooks of autograd may have moved them
    p((q, k, v, grad.contiguous(), out, *found), tuple(kept), numbers)
    return found


def backward(
    workspace: Workspace, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from `grad`, the gradient of out."""
    (heads, groups, n, d), (m, e) = q.shape, v.shape[1:]
    out, *kept = map(aligned, saved)  # hooks of autograd may have moved them
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
    extra: tuple[Tensor, ...] = () if w is None else (w,)
    if is_shifted:
        extra += (spec.middle.float().contiguous(),)
    table, coefficients = kernel_coefficients(spec, scale, q.device)
    values, dtype = v.contiguous(), torch.float32 if spec.is_weighted else q.dtype
    dq, dk, dv = torch.empty_like(qt), torch.empty_like(kt, dtype=dtype), torch.empty_like(values, dtype=dtype)
    weighted: tuple[Tensor, ...] = ()
    if spec.is_weighted:
        weighted = q.new_empty(heads, m, dtype=torch.float32), torch.empty_like(values)
    factors = () if is_plain(spec) else head_factors(spec, p.kept.view(tuple(kept), "key_small"), size)
    given = qt, kt, values, up, out, *extra, *factors, *table, dq, dk, dv, *weighted
    p(given, tuple(kept), {"coefficients": coefficients, "exponents": exponents(scale)})
    if weighted:  # through w_j = exp(s μ·(k_j − c))
        dw, centred_values = weighted
        through = (dv * centred_values).sum(-1) + dw
        dk = dk + spec.scale * through[..., None] * spec.query_centre[:, None]
    if spec.keep is not None:
        dk = dk.masked_fill(~spec.keep[..., None], 0)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
