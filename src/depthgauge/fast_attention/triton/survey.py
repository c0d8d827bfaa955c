"""The survey on the GPU: one kernel, and six numbers per head that are copied to the host."""

import math

import torch
from torch import Tensor

from depthgauge.fast_attention.decide.bounds import Survey, summed_up
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.triton.launches import SurveySizes, TransposeSizes, survey_blocks
from depthgauge.fast_attention.triton.workspace import Workspace


def outward(d: int) -> tuple[float, float]:
    """Return (up, lost) with ‖x − c‖ ≤ up·√S + lost for the kernel's float32 sum of squares S, as in `norm_up`."""
    return 1 + 2 * (d + 8) * 2.0**-24, 2 * math.sqrt(d * torch.finfo(torch.float32).tiny)


def is_outside(workspace: Workspace, problem: Problem, bound: float) -> Tensor:
    """Return a bool tensor []: whether scores may exceed `bound`, or q, k or v is out of the kernels' range.

    The conditions are those of `Route.decided`. Nothing is copied to the host.
    """
    q, k, v = problem.q.flatten(1, 2).contiguous(), problem.k.contiguous(), problem.v.contiguous()
    numbers = q.new_empty(6, q.shape[0], dtype=torch.float32)
    _launch(workspace, q, k, v, numbers)
    query, key, _, _, values, _ = numbers.double().unbind()
    up, lost = outward(q.shape[-1])
    scores = (up * query.sqrt() + lost) * (up * key.sqrt() + lost) * (abs(problem.scale) * (1 + 2.0**-40))
    sizes = torch.stack((query, key, values))
    is_held = (sizes == 0) | ((sizes >= 2.0**-40) & (sizes <= 2.0**40))
    return ~((scores <= bound).all() & is_held.all() & torch.isfinite(numbers).all())


def _launch(workspace: Workspace, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    """Write six numbers per head to `numbers` [6, N], and return the centres [2, N, d]."""
    (heads, rows, d), (m, e), device = q.shape, v.shape[1:], q.device
    centres = q.new_empty(2, heads, d, dtype=torch.float32)
    found = centres.new_empty(heads, survey_blocks(rows, m), 6)
    workspace.launch(SurveySizes(heads, rows, m, d, e, device))((q, k, v, centres, found))
    workspace.launch(TransposeSizes(heads, m, d, 0, found.shape[1], False, device))((k, found, k, numbers))
    return centres


def survey(workspace: Workspace, problem: Problem) -> Survey:
    """Return the bounds of `bounds.survey`, computed by one kernel.

    The centres are means of a sample of tokens. Any centres are valid, because the bounds hold for those that are used.
    """
    q, k, v = problem.q.flatten(1, 2).contiguous(), problem.k.contiguous(), problem.v.contiguous()
    heads, device = q.shape[0], q.device
    readback = workspace.readbacks.get(heads, device)
    try:
        readback.expect()
        centres = _launch(workspace, q, k, v, readback.numbers)
        q0, k0, q1, k1, values, mean = readback.read()
    except BaseException:
        workspace.readbacks.abandon(readback)
        raise
    up, lost = outward(q.shape[-1])
    norms = [[math.sqrt(x) * up + lost for x in column] for column in (q0, k0, q1, k1, mean)]
    return summed_up(problem, [*norms, values, [1.0] * heads, values], centres[0], centres[1], None)
