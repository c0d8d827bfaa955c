"""Gradients through the fast path: one function of autograd, and a second that refuses to be differentiated again."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from depthgauge.errors import DepthgaugeError
from depthgauge.fast_attention.spec import Spec


class DoubleBackwardError(DepthgaugeError, RuntimeError):
    """A gradient of the fast path was differentiated; it has a bound of its own, and second derivatives have none."""


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Where products are done in the dtype they are given in: autocast would round them, and no allowance counts it."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class PolynomialAttention(torch.autograd.Function):
    """out and Z of a backend; the gradient treats centres and the values' middle as constants."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: Spec, backend: Any) -> tuple[Tensor, Tensor]:
        """What the backend's forward returns."""
        out, normaliser, saved = backend.forward(spec, q, k, v, True)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.spec, ctx.backend = spec, backend
        ctx.mark_non_differentiable(normaliser)
        return out, normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The backend's gradients of q, k and v."""
        q, k, v, *saved = ctx.saved_tensors
        with without_autocast(q.device):
            gradients = _Gradient.apply(q, k, v, grads[0], ctx.spec, ctx.backend, *saved)  # type: ignore[no-untyped-call]
        return (*gradients, None, None)


class _Gradient(torch.autograd.Function):
    """The gradients themselves, as a function that cannot be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, spec: Spec, backend: Any, *saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = backend.backward(spec, q, k, v, saved, grad)
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise DoubleBackwardError(
            "the fast path's gradient cannot be differentiated again: no bound is known for second derivatives; "
            'use force="exact" where they are needed'
        )
