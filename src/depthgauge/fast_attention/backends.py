"""The backends of the fast path, and which one computes what."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from depthgauge.fast_attention.decide.bounds import Survey, product_unit, rounding_share, survey, unit
from depthgauge.fast_attention.decide.cost import CPU, GPU_TORCH, GPU_TRITON, Rates
from depthgauge.fast_attention.decide.minimax import Minimax
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.torch import backend as torch_backend
from depthgauge.fast_attention.triton import backend as triton_backend
from depthgauge.fast_attention.triton import gradient as triton_gradient
from depthgauge.fast_attention.triton import survey as triton_survey
from depthgauge.fast_attention.triton import tuning as triton_tuning

Saved = tuple[Tensor, ...]
Forward = Callable[[Spec, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None, Saved]]
Backward = Callable[[Spec, Tensor, Tensor, Tensor, Saved, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Backend:
    """`forward` and `backward` of a Spec, what they cost, and what their rounding may add (share of range(v)).

    `forward` is told whether Z, and what `backward` keeps, will be needed.

    `rounding` takes the problem, p, B, what is centred (0, 1, 2) and the range of log w. `holds` says whether a head's
    sums stay in range, for the scale, the longest query and key, and the largest value.
    """

    name: str
    rates: Rates
    forward: Forward
    backward: Backward
    rounding: Callable[[Problem, Minimax, float, int, float], float]
    holds: Callable[[float, float, float, float], bool]


def torch_rounding(problem: Problem, p: Minimax, bound: float, centring: int, spread: float) -> float:
    """The allowance of the torch backend: roundings of the working dtype, and of the operands of its products."""
    d, work = problem.q.shape[-1], problem.working
    coarse = 4 * product_unit(work, problem.q.device)
    log_error = (d + 6) * 2.0**-53 * spread
    return rounding_share(p, bound, torch_backend.roundings(d, p.degree) * unit(work), coarse, log_error)


def always_holds(scale: float, query: float, key: float, value: float) -> bool:
    """The torch backend balances q and k before it sums anything."""
    return True


_TORCH = torch_backend.forward, torch_backend.backward, torch_rounding, always_holds
TORCH_CPU = Backend("torch", CPU, *_TORCH)
TORCH_GPU = Backend("torch", GPU_TORCH, *_TORCH)
TRITON = Backend(
    "triton",
    GPU_TRITON,
    triton_backend.forward,
    triton_gradient.backward,
    triton_backend.rounding,
    triton_backend.holds,
)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether the extra `gpu` is installed."""
    return find_spec("triton") is not None


def backend_for(problem: Problem, degree: int) -> Backend:
    """triton for what its kernels do on a GPU, torch for the rest."""
    if not problem.q.is_cuda:
        return TORCH_CPU
    (heads, groups, n, d), (m, e) = problem.q.shape, problem.v.shape[1:]
    is_known = triton_tuning.is_supported(problem.q.dtype, d, e, degree)
    is_known = is_known and triton_tuning.is_addressable(heads * groups, max(groups * n, m), max(d, e))
    return TRITON if is_known and has_triton() else TORCH_GPU


def survey_of(problem: Problem) -> Survey:
    """The survey of a problem: in one kernel where there is one."""
    is_fused = problem.keep is None and backend_for(problem, 2).name == "triton"
    return triton_survey.survey(problem) if is_fused else survey(problem)


def notes(device: torch.device) -> list[str]:
    """What a user should know about the choice of backend."""
    if device.type == "cuda" and not has_triton():
        return ["triton is not installed (extra gpu): the torch backend is used on the GPU"]
    return []
