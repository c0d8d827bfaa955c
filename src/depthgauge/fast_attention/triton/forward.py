"""The forward pass in Triton kernels: moments of the keys, the state that rows read, and the rows.

If nothing is centred, padded or computed exactly, the kernels read q, k and v directly and the scale is part of the
coefficients. Otherwise q̃ and k̃ are computed first, in the dtype of the tensors, and w multiplies one of the two factors
of every product of keys. bfloat16 values are centred after the sums, values of other dtypes before them (section
Rounding of docs/concepts/fast-attention-derivation.md).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from depthgauge.fast_attention.spec import Spec, centred, weights
from depthgauge.fast_attention.triton.forward_pass import ForwardSizes
from depthgauge.fast_attention.triton.workspace import Workspace

Coefficients = tuple[float, ...]


def is_plain(spec: Spec) -> bool:
    """Return whether the kernels can read q and k directly. float16 is scaled first because its range is small."""
    is_changed = spec.is_centred or spec.keep is not None or spec.exact_rows is not None
    return not is_changed and spec.problem.q.dtype != torch.float16


def kernel_inputs(spec: Spec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Return q̃, k̃, w and the scale that remains for the coefficients; (q, k, None, s) if nothing has to be changed."""
    if is_plain(spec):
        return q.contiguous(), k.contiguous(), None, spec.scale
    qt, kt = centred(spec, slice(None), q, k)
    w = weights(spec, slice(None), k)
    return qt.to(q.dtype).contiguous(), kt.to(q.dtype).contiguous(), None if w is None else w.contiguous(), 1.0


def scaled_coefficients(coefficients: Sequence[Coefficients], scale: float) -> list[Coefficients]:
    """Return a_g s^g, three coefficients for every head; the third is 0 at degree 1.

    >>> scaled_coefficients([(1.0, 1.0)], 0.5)
    [(1.0, 0.5, 0.0)]
    """
    return [tuple(c * scale**g for g, c in enumerate((*a, 0.0)[:3])) for a in coefficients]


def kernel_coefficients(spec: Spec, scale: float, device: torch.device) -> tuple[tuple[Tensor, ...], Coefficients]:
    """Return the coefficients with the scale included: those of every head on the device, and three numbers.

    If all heads have the same polynomial, the kernels read the numbers, and there is no tensor. Otherwise they read a
    tensor [N, 3]. Pinned memory keeps its copy from waiting for earlier work.
    """
    if spec.is_alike:
        return (), scaled_coefficients(spec.coefficients[:1], scale)[0]
    own = scaled_coefficients(spec.coefficients, scale)
    table = torch.tensor(own, dtype=torch.float32, pin_memory=device.type == "cuda")
    return (table.to(device, non_blocking=True),), own[0]


def exponents(scale: float) -> Coefficients:
    """Return `exponents` of a GradientPass: the scale in base 2 (`exponent` of a ForwardPass) and the scale."""
    return scale * math.log2(math.e), scale


def forward(
    workspace: Workspace, spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Return out [N, G, n, e] in the dtype of q, Z [N, G, n] if needed, and the tensors for the backward pass."""
    (heads, groups, n, d), (m, e), device = q.shape, v.shape[1:], q.device
    qt, kt, w, scale = kernel_inputs(spec, q, k)
    is_shifted = workspace.centres_before(v.dtype)
    shifted = (v.to(spec.problem.working) - spec.middle[:, None]).to(v.dtype) if is_shifted else v
    p = workspace.forward(
        ForwardSizes(
            heads, groups, n, m, d, e, q.dtype, spec.degree, workspace.causal_block if spec.causal else 0, is_shifted,
            w is not None, spec.is_alike, needs_z, False, device,
        )
    )  # fmt: skip
    weighted = () if w is None else ((kt.float() * w[..., None]).to(kt.dtype), w)
    table, coefficients = kernel_coefficients(spec, scale, device)
    out = q.new_empty(heads, groups, n, e, dtype=torch.float32 if is_shifted else q.dtype)
    kept = p.keep() if needs_z else ()
    numbers = {"coefficients": coefficients, "exponent": exponents(scale)[:1]}
    p((qt, kt, shifted.contiguous(), *weighted, *table, out), kept, numbers)
    if is_shifted:
        out = (out + spec.middle[:, None, None]).to(v.dtype)
    return (out, p.kept.view(kept, "z"), (out, *kept)) if kept else (out, None, ())
