"""Gradients of the polynomial path, as autograd functions whose own gradient raises an error."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from depthgauge.base.errors import DepthgaugeError


class DoubleBackwardError(DepthgaugeError, RuntimeError):
    """A gradient of the polynomial path was differentiated. Second derivatives have no error bound."""


@runtime_checkable
class Computer(Protocol):
    """What computes outputs and gradients: a backend. `spec` is what it needs besides tensors."""

    def forward(
        self, spec: Any, q: Tensor, k: Tensor, v: Tensor, needs_z: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Return the output, the normaliser Z, and the tensors that `backward` needs."""

    def backward(
        self, spec: Any, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v from `grad`, the gradient of the output."""


def is_autocast(x: Tensor) -> bool:
    """Return whether torch casts x in products. Reading the type of its device would take microseconds."""
    if x.is_cuda or x.is_cpu:
        return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products on the device of x keep the dtype of their operands.

    Autocast would round the operands, which the rounding allowance does not count.
    """
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


def is_watched(*tensors: Tensor) -> bool:
    """Return whether hooks see what a function of the tensors saves for its gradient, as in torch.utils.checkpoint.

    Torch has no public function for this. Without the private one, the answer is no.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is not None and hooks(True) is not None


class PolynomialAttention(torch.autograd.Function):
    """The output and the normaliser Z of a backend; centres and value midpoints are constants in the gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: Any, backend: Computer) -> tuple[Tensor, Tensor]:
        """Return (out, Z) of the backend."""
        out, normaliser, saved = backend.forward(spec, q, k, v, True)
        assert normaliser is not None
        ctx.save_for_backward(q, k, v, *saved)
        ctx.spec, ctx.backend = spec, backend
        ctx.mark_non_differentiable(normaliser)
        ctx.set_materialize_grads(False)  # the normaliser would get a tensor of zeros
        return out, normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        grad = grads[0]
        if grad is None:
            return (None,) * 5
        q, k, v, *saved = ctx.saved_tensors
        with without_autocast(q):
            if torch.is_grad_enabled():  # create_graph: differentiating the gradients raises an error
                gradients = _Gradient.apply(q, k, v, grad, ctx.spec, ctx.backend, *saved)  # type: ignore[no-untyped-call]
            else:
                gradients = ctx.backend.backward(ctx.spec, q, k, v, tuple(saved), grad)
        return (*gradients, None, None)


class _Gradient(torch.autograd.Function):
    """The gradients of q, k and v, as a function that cannot be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, spec: Any, backend: Computer, *saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backend.backward(spec, q, k, v, saved, grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise DoubleBackwardError(
            "the gradient of the polynomial path cannot be differentiated: second derivatives have no error bound; "
            'call attention with force="exact" where they are needed'
        )
