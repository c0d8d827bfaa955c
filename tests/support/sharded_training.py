"""A training that FSDP2 divides: `python sharded_training.py FOLDER` in each process, as `accelerate launch` starts it.

accelerate ignores FSDP on a CPU; here it takes the CPU for a GPU. The training is interrupted at a step and continued.
Process RANK writes what it has found to FOLDER/RANK.pt.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from tiny_distillation import BATCH, RATE, STEPS, WINDOW, pair_of, train
from torch.distributed.tensor import DTensor

from depthgauge.cli.torchrun import LaunchedCommand
from depthgauge.recovery.distillation import Training
from depthgauge.recovery.divergence import TRAIN, Pair
from depthgauge.recovery.helpers import help_train

INTERRUPTED = 8
"""The step that fails at first."""
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "ACCELERATE_TORCH_DEVICE": "cpu",
}  # fmt: skip


def numbers(weight: Any) -> int:
    """Return how many numbers of a weight this process has."""
    return int((weight.to_local() if isinstance(weight, DTensor) else weight).numel())


def main(folder: Path) -> None:
    """Train, and write the curve, the weights, and what share of student and teacher this process had at each step."""
    os.environ.update(FSDP)
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    launch = LaunchedCommand()
    launch.join()
    training, shares, forward = Training(STEPS, BATCH, WINDOW, RATE, save_every=0.0), [], Pair.forward

    def watched(self: Pair, index: Any, part: str = TRAIN) -> torch.Tensor:
        if part == TRAIN:
            models = ([*self.student.parameters()], [*self.teacher.parameters()])
            shares.append([sum(map(numbers, one)) / sum(weight.numel() for weight in one) for one in models])
            if len(shares) == INTERRUPTED:
                raise KeyboardInterrupt
        return forward(self, index, part)

    Pair.forward = watched  # type: ignore[method-assign]
    saved = None if launch.index else folder  # only process 0 has a journal
    with suppress(KeyboardInterrupt):
        train(pair_of("llama"), training, saved)
    pair = pair_of("llama")
    made = train(pair, training, saved)
    found = {
        "curve": [(point.tokens, point.select, point.apart) for point in made.curve], "train": made.curve[-1].train,
        "student": [*pair.student.parameters()], "teacher": [*pair.teacher.parameters()], "shares": shares,
    }  # fmt: skip
    torch.save(found, folder / f"{launch.index}.pt")
    if launch.index:
        help_train()  # until process 0 ends
    launch.end(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
