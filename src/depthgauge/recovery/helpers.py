"""Processes that help process 0 to train: it sends them both models, the windows and their order.

They read no files but the saved state of a training, and wait between two trainings. Process 0 decides everything, and
says when it has finished.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from depthgauge.base.errors import EndedRunError, is_out_of_memory
from depthgauge.checkpoints.inputs.windows import Inputs
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.recovery.distillation import Training, distil
from depthgauge.recovery.divergence import Pair


@dataclass(frozen=True, eq=False)
class SentTraining:
    """The arguments of `distil`, without the numbers of the models.

    - `models`: the student and the teacher, whose tensors are empty
    - `tensors`: these tensors, and for each one its shape, its type of device, and the first one in the same memory
    - `weights`: which of the tensors are trained
    """

    models: tuple[Checkpoint, Checkpoint]
    tensors: list[Any]
    places: list[tuple[torch.Size, str, int]]
    weights: list[int]
    windows: Mapping[str, Inputs]
    order: Sequence[int]
    training: Training


def send_training(pair: Pair, weights: Sequence[nn.Parameter], order: Sequence[int], training: Training) -> None:
    """Let the other processes, if there are any, call `distil` with these arguments, as this one is about to do."""
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        sent, tensors = packed(pair, weights, order, training)
        _broadcast(sent)
        _share(tensors, sent.places)


def packed(
    pair: Pair, weights: Sequence[nn.Parameter], order: Sequence[int], training: Training
) -> tuple[SentTraining, list[Tensor]]:
    """Return a training without the numbers of the models, and the tensors that have them."""
    tensors = {id(one): one for one in (*pair.parameters(), *pair.buffers())}
    empty = {key: _empty(one) for key, one in tensors.items()}
    first: dict[Any, int] = {}
    places = [
        (one.shape, one.device.type, first.setdefault((one.data_ptr(), one.shape, one.stride(), one.dtype), number))
        for number, one in enumerate(tensors.values())
    ]
    numbers = {key: number for number, key in enumerate(tensors)}
    student, teacher = copy.deepcopy(tuple(replace(one, source=None) for one in pair.checkpoints), {**empty})
    chosen = [numbers[id(one)] for one in weights]
    sent = SentTraining((student, teacher), [*empty.values()], places, chosen, pair.windows, order, training)
    return sent, [*tensors.values()]


def help_train() -> None:
    """Take part in every training of process 0, until it has finished.

    Raises:
        EndedRunError: another process has ended.
    """
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()  # type: ignore[no-untyped-call]  # models that are defined by code in their directories
    try:
        while (sent := _broadcast(None)) is not None:
            with suppress(CheckpointError):  # process 0 has the same error, and decides
                _train(sent)
            del sent
            torch.cuda.empty_cache()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise EndedRunError from error


def _train(sent: SentTraining) -> None:
    """Receive the numbers of both models, and train with them."""
    unpack(sent)
    _share(sent.tensors, sent.places)
    weights = [sent.tensors[number] for number in sent.weights]
    distil(Pair(*sent.models, sent.windows), weights, sent.order, sent.training)


def unpack(sent: SentTraining) -> None:
    """Give the tensors of a training their memory, whose numbers come later."""
    for number, (one, (shape, device, first)) in enumerate(zip(sent.tensors, sent.places, strict=True)):
        is_first = first == number
        one.data = torch.empty(shape, dtype=one.dtype, device=device) if is_first else sent.tensors[first].data


@contextmanager
def ended_processes() -> Iterator[None]:
    """Raise EndedRunError where gloo or NCCL say that another process does not answer."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            raise EndedRunError from error
        raise


def dismiss() -> None:
    """Let the other processes return from `help_train`."""
    _broadcast(None)


def _broadcast(sent: SentTraining | None) -> SentTraining | None:
    """Return what process 0 sends."""
    held = [sent]
    distributed.broadcast_object_list(held, src=0)
    return held[0]


def _share(tensors: Sequence[Tensor], places: Sequence[tuple[torch.Size, str, int]]) -> None:
    """Send the numbers of tensors, once for each memory, from process 0 to the others."""
    for number, (one, (_, _, first)) in enumerate(zip(tensors, places, strict=True)):
        if first == number:
            distributed.broadcast(one.detach().contiguous(), src=0)


def _empty(one: Tensor) -> Tensor:
    made = torch.empty(0, dtype=one.dtype)
    return nn.Parameter(made, requires_grad=one.requires_grad) if isinstance(one, nn.Parameter) else made
