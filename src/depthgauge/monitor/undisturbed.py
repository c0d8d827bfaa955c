"""Measure a model in the middle of training, without any effect on the training.

The processes that train a model together exchange what each measured, and a probe fails in all of them or in none.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from depthgauge.base.errors import DepthgaugeError

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others in an exchange: longer than one of them needs to save a checkpoint."""


def ranks() -> int:
    """Return the number of processes that train the model together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the index of this process; 0 without a process group."""
    return dist.get_rank() if ranks() > 1 else 0


def cause_of(error: BaseException) -> str:
    """Return type and text of an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


@dataclass(frozen=True)
class Failure:
    """What one process exchanges instead of a value: `cause` is type and text of its error."""

    process: int
    cause: str


class ProbeError(Exception):
    """A probe failed in at least one process; raised in all of them. The message is the cause."""


class ExchangeError(DepthgaugeError):
    """The processes of a distributed run could not exchange what they measured."""


T = TypeVar("T")


class Processes:
    """All processes of a training run; one without a process group.

    They exchange Python objects through a group of their own on the CPU, because a process that fails in the middle of
    a sharded forward pass must not meet the collectives of the others in the exchange.
    """

    def __init__(self) -> None:
        self.count, self.index = ranks(), rank()
        self._group: Any = None
        if self.count > 1 and dist.is_gloo_available():
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def exchanged(self, value: T | Failure) -> list[T]:
        """Return the values of all processes, in the same order in every process.

        A process that has failed exchanges its failure at any time. The others receive it in their next exchange,
        whatever they exchange there.

        Raises:
            ProbeError: A process has failed.
            ExchangeError: A process has ended, or does not take part within `PATIENCE`.
        """
        found: list[Any] = [value]
        if self.count > 1:
            found = [None] * self.count
            try:
                dist.all_gather_object(found, value, group=self._group)
            except RuntimeError as error:
                raise ExchangeError(
                    f"process {self.index} could not exchange the measures of a probe with the other processes "
                    f"({cause_of(error)}); one of them has ended, or waits in a forward pass that failed here"
                ) from error
        for one in found:
            if isinstance(one, Failure):
                raise ProbeError(one.cause if self.count == 1 else f"{one.cause} (in process {one.process})")
        return cast(list[T], found)

    def mean(self, value: float) -> float:
        """Return the mean of a number over all processes."""
        return sum(self.exchanged(value)) / self.count

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Turn an error of this process into a `ProbeError` in all processes, in their next exchange."""
        try:
            yield
        except (ProbeError, ExchangeError):
            raise
        except Exception as error:
            self.exchanged(Failure(self.index, cause_of(error)))


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
