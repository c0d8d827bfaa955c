"""Run a model in evaluation mode in the middle of training, without any effect on the training."""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), Tensor)
"""Types of module attributes that are put back, such as `training` and the cached length of a rotary embedding."""
_INTERNAL = frozenset(name for name, value in vars(nn.Module()).items() if not isinstance(value, _PLAIN))
"""Attributes of every module that are never plain, such as the dictionaries of its parts; `isinstance` is slow."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate a model within this context and leave no trace.

    Inside, the model is in evaluation mode (no dropout, no gradient checkpointing), gradients are not recorded,
    autocast is off if all weights have one dtype, and compiled modules run uncompiled. Afterwards these are as before:
    the random number generators of torch (on the CPU and on the model's devices), numpy and Python, the mode, the
    buffers and the plain attributes of every module. Gradients that were accumulated are not touched.
    """
    modules = list(model.modules())
    weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
    devices = {weight.device for weight in weights}
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    before = [_ModuleState(module) for module in modules]
    with ExitStack() as contexts:
        for context in (*_generators(devices), torch.no_grad()):
            contexts.enter_context(context)
        for kind in sorted({device.type for device in devices} - {"meta"} if len(dtypes) <= 1 else ()):
            contexts.enter_context(torch.autocast(kind, enabled=False))
        if "torch._dynamo" in sys.modules:  # nothing can be compiled before
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
        for state in before:
            contexts.callback(state.restore)
        contexts.callback(_reshard, modules)
        model.eval()
        try:
            yield
        except BaseException:
            _leave_forward(modules)
            raise


class _ModuleState:
    """The plain attributes and the buffers of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        attributes = vars(module)
        self.names = frozenset(attributes)
        self.plain = {
            name: value for name, value in attributes.items() if name not in _INTERNAL and isinstance(value, _PLAIN)
        }
        self.buffers = dict(module._buffers)
        self.copies = {name: (b._version, b.clone()) for name, b in self.buffers.items() if b is not None}

    def restore(self) -> None:
        """Put back what has changed; plain attributes that are new are removed."""
        attributes = vars(self.module)
        for name in attributes.keys() - self.names:
            if isinstance(attributes[name], _PLAIN):
                del attributes[name]
        attributes.update(self.plain)
        if self.buffers or self.module._buffers:
            self.module._buffers.clear()
            self.module._buffers.update(self.buffers)
        for name, (version, copy) in self.copies.items():
            buffer = self.buffers[name]
            if buffer is not None and buffer._version != version:
                buffer.copy_(copy)


def sharded(modules: list[nn.Module]) -> list[Any]:
    """Return the modules that are sharded with `fully_shard`; none can be before it is imported."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in modules if isinstance(module, FSDPModule)]


def _reshard(modules: list[nn.Module]) -> None:
    """Free the gathered weights of a model that is sharded with `fully_shard`.

    Its root keeps them after a forward pass, for the backward pass that follows. After a probe none follows, and the
    next training step would use weights from before the optimizer step.
    """
    for module in sharded(modules):
        module.reshard()


def _leave_forward(modules: list[nn.Module]) -> None:
    """End the forward pass of a sharded model in which an error was raised.

    `fully_shard` resets these attributes in hooks after the forward pass, which an error skips. Then `reshard` would
    keep the gathered weights, and the next forward pass would not wait for the optimizer.
    """
    for module in sharded(modules):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # older torch has one
        for part in (state, *filter(None, groups)):
            part._training_state = type(part._training_state).IDLE
        for group in filter(None, groups):
            group.wait_for_unshard()  # of weights that were requested and not used
        state._state_ctx.iter_forward_root = None


@contextmanager
def _python_generators() -> Iterator[None]:
    """Put the global generators of Python and numpy back."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _generators(devices: set[torch.device]) -> list[Any]:
    """Return contexts that put all random number generators back: Python, numpy, the CPU, and the model's devices."""
    indices: dict[str, set[int]] = {"cuda": set()}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            indices.setdefault(device.type, set()).add(device.index or 0)
    forks = [torch.random.fork_rng(devices=sorted(found), device_type=kind) for kind, found in indices.items()]
    return [_python_generators(), *forks]
