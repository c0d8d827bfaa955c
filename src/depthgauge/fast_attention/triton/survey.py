"""The survey on the GPU: one kernel that writes eight numbers per head."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.fast_attention.problem import Problem, is_capturing
from depthgauge.fast_attention.theory.bounds import Survey
from depthgauge.fast_attention.triton.kernels import kernels
from depthgauge.fast_attention.triton.launch import Launch
from depthgauge.fast_attention.triton.tuning import BLOCK, survey_steps


def outward(d: int) -> tuple[float, float]:
    """Return (up, lost) with ‖x − c‖ ≤ up·√S + lost for the kernel's float32 sum of squares S, as in `norm_up`."""
    return 1 + 2 * (d + 8) * 2.0**-24, 2 * math.sqrt(d * torch.finfo(torch.float32).tiny)


@lru_cache(maxsize=1024)
def survey_launch(heads: int, rows: int, m: int, d: int, e: int, device: torch.device) -> Launch:
    """Prepare `survey`. Tensors: q [N, rows, d], k [N, m, d], v [N, m, e], out [8·N + 2·N·d]."""
    steps = survey_steps(max(rows, m))
    grid = math.ceil(max(rows, m) / (BLOCK * steps)), heads, 3
    return Launch(kernels().survey, grid, (rows, m, heads), (d, e, BLOCK, steps), num_warps=4)


def surveyed(problem: Problem) -> Tensor:
    """Return on the device, in float32, eight numbers of every head, [8, N], and behind them the centres μ and c.

    The numbers are the largest ‖q‖², ‖k‖², ‖q−μ‖², ‖k−c‖² and Σ|v| of a token, ‖μ‖², and the largest 1/‖q‖² and
    1/‖q−μ‖². No number is NaN. The centres are [2, N, d].
    """
    q, k, v = problem.q.contiguous(), problem.k.contiguous(), problem.v.contiguous()
    (heads, groups, n, d), (_, m, e) = q.shape, v.shape
    out = q.new_zeros(heads * (8 + 2 * d), dtype=torch.float32)
    survey_launch(heads, groups * n, m, d, e, q.device)((q, k, v, out))
    return out


def survey(problem: Problem) -> Survey:
    """Return the bounds of `bounds.survey`, computed by one kernel.

    The centres are means of a sample of tokens. Any centres are valid, because the bounds hold for those that are used.
    """
    if is_capturing(problem.q):
        raise InputError(
            "attention cannot be captured in a CUDA graph: it chooses a path by numbers that are not known during "
            "the capture; pass a plan that attention_plan made of similar tensors before, or leave force unset: "
            "the call is then exact"
        )
    heads, on_device, (up, lost) = problem.heads, surveyed(problem), outward(problem.q.shape[-1])
    q0, k0, q1, k1, values, mean, *inverse = on_device[: 8 * heads].view(8, heads).tolist()
    found = Survey(problem)
    found.query, found.key, found.query_centred, found.key_centred, found.query_mean = (
        [math.sqrt(x) * up + lost for x in squares] for squares in (q0, k0, q1, k1, mean)
    )
    found.query_least, found.query_centred_least = ([x**-0.5 for x in row] for row in inverse)
    found.value_width = found.value_size = values
    found.is_finite = [True] * heads  # otherwise a norm or a width is infinite
    found.query_centre, found.key_centre = on_device[8 * heads :].view(2, heads, -1).unbind()
    return found
