"""A tiny model, the same with noise as its student, and a few steps of training."""

import copy
from pathlib import Path

import torch
from tiny_models import tiny_model

from depthgauge.checkpoints.weights.load import wrap
from depthgauge.recovery.distillation import Trained, Training, distil
from depthgauge.recovery.divergence import APART, SELECT, TRAIN, Pair
from depthgauge.recovery.recover_model import trained_weights

STEPS, BATCH, WINDOW, RATE = 12, 4, 16, 3e-3
ORDER = (torch.randperm(48, generator=torch.Generator().manual_seed(3)) % 32).tolist()
PLAIN = Training(STEPS, BATCH, WINDOW, RATE)


def windows(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 40, (count, WINDOW), generator=torch.Generator().manual_seed(seed))


def pair_of(name: str) -> Pair:
    """A model, and the same model with noise on its weights as its student."""
    teacher = tiny_model(name)
    student = copy.deepcopy(teacher)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    parts = {TRAIN: windows(32, 0), SELECT: windows(8, 1), APART: windows(4, 2)}
    return Pair(wrap(student), wrap(teacher), parts)


def train(pair: Pair, training: Training = PLAIN, folder: Path | None = None) -> Trained:
    return distil(pair, trained_weights(pair.checkpoints[0]), ORDER, training, folder=folder)
