"""The interface of the backends of the polynomial path, their instances, and the choice between them."""

from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.theory.bounds import Survey
from depthgauge.fast_attention.theory.cost import CPU, GPU_TORCH, Rates
from depthgauge.fast_attention.theory.minimax import Minimax
from depthgauge.fast_attention.torch.backend import TorchBackend
from depthgauge.fast_attention.triton.backend import TritonBackend

Saved = tuple[Tensor, ...]


@runtime_checkable
class Backend(Protocol):
    """What computes polynomial attention. A backend owns everything that it keeps between calls."""

    @property
    def name(self) -> str:
        """The name shown in a plan."""

    @property
    def rates(self) -> Rates:
        """The relative speed of the operations, from which costs are predicted."""

    def survey(self, problem: Problem) -> Survey:
        """Return proved bounds on the norms of q, k and v."""

    def is_outside(self, problem: Problem, bound: float) -> Tensor:
        """Return a bool tensor [] on the device: whether scores may exceed `bound`, or q, k or v is unusable."""

    def forward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """Return out [N, G, n, e], the normaliser Z [N, G, n], and the tensors that `backward` needs.

        Unless `needs_z`, Z may be None and the tensors for `backward` may be missing.
        """

    def backward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: Saved, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v from `grad`, the gradient of out."""

    def rounding(self, problem: Problem, p: Minimax, bound: float, centring: int, spread: float) -> float:
        """Return the most that rounding can add to an output entry, as a fraction of range(v).

        `bound` is B, `centring` is 0, 1 or 2 as in `Spec`, and `spread` bounds log w_i − log w_j.
        """

    def holds(self, scale: float, query: float, key: float, value: float) -> bool:
        """Return whether the sums of a head stay in range, given the largest ‖q‖, ‖k‖ and |v|."""

    def largest_log_range(self, problem: Problem) -> float:
        """Return the largest spread of log w for which no weight is lost to underflow."""

    def is_capturable(self, problem: Problem) -> bool:
        """Return whether `forward` and `is_outside` copy nothing to the host for problems like this one."""


TORCH_CPU = TorchBackend(CPU)
TORCH_GPU = TorchBackend(GPU_TORCH)
TRITON = TritonBackend()


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether the extra `gpu` is installed."""
    return find_spec("triton") is not None


def backend_for(problem: Problem, degree: int) -> Backend:
    """Return the Triton backend for GPU tensors that its kernels support, and a torch backend otherwise."""
    if not problem.q.is_cuda:
        return TORCH_CPU
    return TRITON if TRITON.supports(problem, degree) and has_triton() else TORCH_GPU


def notes(device: torch.device) -> list[str]:
    """Return remarks for the user about the choice of backend."""
    if device.type == "cuda" and not has_triton():
        return ["triton is not installed (extra gpu): the torch backend is used on the GPU"]
    return []
