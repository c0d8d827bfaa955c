"""The backends of the fast path, and which one computes what."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

from torch import Tensor

from depthgauge.fast_attention import torch_backend
from depthgauge.fast_attention.bounds import product_unit, rounding_share, unit
from depthgauge.fast_attention.cost import CPU, GPU_TORCH, Rates
from depthgauge.fast_attention.minimax import Minimax
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Spec

Forward = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Backward = Callable[[Spec, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Backend:
    """`forward` and `backward` of a Spec, what they cost, and what their rounding may add (share of range(v))."""

    name: str
    rates: Rates
    forward: Forward
    backward: Backward
    rounding: Callable[[Problem, Minimax, float, float], float]


def torch_rounding(problem: Problem, p: Minimax, bound: float, spread: float) -> float:
    """The allowance of the torch backend: roundings of the working dtype, and of the operands of its products."""
    d, work = problem.q.shape[-1], problem.working
    coarse = 4 * product_unit(work, problem.q.device)
    log_error = (d + 6) * 2.0**-53 * spread
    return rounding_share(p, bound, torch_backend.roundings(d, p.degree) * unit(work), coarse, log_error)


TORCH_CPU = Backend("torch", CPU, torch_backend.forward, torch_backend.backward, torch_rounding)
TORCH_GPU = Backend("torch", GPU_TORCH, torch_backend.forward, torch_backend.backward, torch_rounding)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether the extra `gpu` is installed."""
    return find_spec("triton") is not None


def backend_for(problem: Problem, degree: int) -> Backend:
    """triton for what its kernels do on a GPU, torch for the rest."""
    if not problem.q.is_cuda:
        return TORCH_CPU
    return TORCH_GPU


def notes(problem: Problem) -> list[str]:
    """What a user should know about the choice of backend."""
    if problem.q.is_cuda and not has_triton():
        return ["triton is not installed (extra gpu): the torch backend is used on the GPU"]
    return []
