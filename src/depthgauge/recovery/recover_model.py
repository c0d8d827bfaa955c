"""Distil a smaller model towards its source, and decide by the selection windows whether the result is kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.inputs.windows import Inputs
from depthgauge.checkpoints.weights.load import Checkpoint, blocks_of
from depthgauge.recovery.distillation import Training, TrainingMemoryError, distil, usual_rate
from depthgauge.recovery.divergence import APART, SELECT, TRAIN, Pair
from depthgauge.recovery.helpers import ended_processes, send_training
from depthgauge.recovery.training_data import RecoveryData
from depthgauge.results.record import finite
from depthgauge.results.recover_record import Amount, RecoveryRecord


def trained_weights(checkpoint: Checkpoint) -> list[nn.Parameter]:
    """Return the weights of all blocks that nothing outside the blocks uses as well."""
    blocks = blocks_of(checkpoint)
    inside = {weight: None for block in blocks for weight in block.parameters()}
    within = {id(module) for block in blocks for module in block.modules()}
    others = [module for module in checkpoint.model.modules() if id(module) not in within]
    outside = {weight for module in others for weight in module.parameters(recurse=False)}
    return [weight for weight in inside if weight not in outside]


@dataclass(frozen=True, eq=False)
class Recovery:
    """How a smaller model is trained towards its source.

    - `data`: the windows to train on
    - `select`: windows that decide; nothing is trained on them
    - `apart`: windows of another text, which are measured and decide nothing
    - `amount`: how long to train
    - `seed`: the order of the windows
    """

    data: RecoveryData
    select: Inputs
    apart: Inputs | None
    amount: Amount
    seed: int

    def run(
        self,
        student: Checkpoint,
        teacher: Checkpoint,
        weights: Sequence[nn.Parameter],
        folder: Path | None = None,
        progress: Step = silent,
    ) -> RecoveryRecord:
        """Train weights of the student in place; put them back unless the selection windows gain.

        The gain must be larger than its standard error. The student has float32 weights afterwards. The training is
        saved in `folder`; one that was interrupted there is continued.

        Raises:
            TrainingMemoryError: memory is too small; the weights are as before.
            EndedRunError: another process has ended.
        """
        before = [weight.detach().to("cpu", copy=True) for weight in weights]
        parts = {TRAIN: self.data.windows, SELECT: self.select}
        pair = Pair(student, teacher, parts | ({} if self.apart is None else {APART: self.apart}))
        measured = len(self.select) + (0 if self.apart is None else len(self.apart))
        training = Training.of(self.amount, len(self.data.windows), pair.tokens, usual_rate(weights), measured)
        order = self.data.order(training.steps * training.batch, self.seed).tolist()
        device = student.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            with ended_processes():
                send_training(pair, weights, order, training)
                made = distil(pair, weights, order, training, folder=folder, progress=progress)
        except TrainingMemoryError:
            _put_back(weights, before)
            raise
        gains = made.before - made.after
        gain, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        if not gain > error:
            _put_back(weights, before)
        return RecoveryRecord(
            tokens=made.steps * training.batch * training.tokens,
            steps=made.steps,
            rate=training.rate,
            seconds=made.seconds,
            memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            how=made.how,
            data=self.data.sources,
            before=finite(made.before.mean()),
            after=finite(made.after.mean()),
            error=finite(error),
            kept=gain > error,
            ended=made.ended,
            curve=made.curve,
        )


def _put_back(weights: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.data.copy_(value)
