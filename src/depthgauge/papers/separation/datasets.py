"""The data sets as dense matrices: float64 for a batch of models, exact rational numbers for one model."""

from dataclasses import dataclass
from fractions import Fraction
from math import log, sqrt

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge._records import ArrayRecord
from depthgauge.papers.separation.settings import AttentionSetting, Dataset, SelfAttention, decimal, special


@dataclass(frozen=True, eq=False, repr=False)
class Inputs(ArrayRecord):
    """A₁ and A₂. In all data sets, A₃ = A₂."""

    a1: Float[Tensor, "models n d"]
    a2: Float[Tensor, "models n d"]


def inputs(
    setting: AttentionSetting, dataset: Dataset, j2: Int[Tensor, " models"], j3: Int[Tensor, " models"]
) -> Inputs:
    """Return the inputs of the models from D₀ or D₁ (`dataset`), with special tokens in rows `j2` and `j3`."""
    if isinstance(setting, SelfAttention):
        return self_inputs(setting, dataset, j3)
    models, n, d = len(j3), setting.n, setting.d
    a1 = torch.zeros(models, n, d, dtype=torch.float64)
    a1[torch.arange(models), j2, 0] = float(special(setting, dataset)) * log(n)
    a1[:, :, 1:] = log(n)
    a2 = torch.zeros(models, n, d, dtype=torch.float64)
    a2[torch.arange(models), j3, 0] = 1.0
    a2[:, :, 1:] = torch.eye(d - 1, dtype=torch.float64).repeat(n // (d - 1), 1)
    return Inputs(a1, a2)


def self_inputs(setting: SelfAttention, dataset: Dataset, j3: Int[Tensor, " models"]) -> Inputs:
    """Return Definition D.1: √(log n) · [ a·e_{j₃} | b·I repeated | c·1 ]."""
    models, n, d = len(j3), setting.n, setting.d
    a = torch.zeros(models, n, d, dtype=torch.float64)
    a[torch.arange(models), j3, 0] = float(special(setting, dataset))
    a[:, :, 1:-1] = setting.b * torch.eye(d - 2, dtype=torch.float64).repeat(n // (d - 2), 1)
    a[:, :, -1] = setting.c
    a = a * sqrt(log(n))
    return Inputs(a, a)


def threshold(setting: AttentionSetting) -> float:
    """Return τ: (c + 0.1)·√(log n) for self-attention, 0.9 for cross-attention."""
    return float(setting.threshold) * (sqrt(log(setting.n)) if isinstance(setting, SelfAttention) else 1.0)


Rational = list[list[Fraction]]


def rational_inputs(setting: AttentionSetting, dataset: Dataset, j2: int, j3: int) -> tuple[Rational, Rational]:
    """Return A₁ and A₂ of one model, divided by √(log n) both (self), or by log n and 1 (cross): rational matrices."""
    n, d, a = setting.n, setting.d, special(setting, dataset)
    classes, zero, one = setting.classes, Fraction(0), Fraction(1)
    if isinstance(setting, SelfAttention):
        b, c = decimal(setting.b), decimal(setting.c)
        both = [
            [a if i == j3 else zero, *(b if i % classes == k else zero for k in range(classes)), c] for i in range(n)
        ]
        return both, both
    a1 = [[a if i == j2 else zero, *([one] * (d - 1))] for i in range(n)]
    a2 = [[one if i == j3 else zero, *(one if i % classes == k else zero for k in range(classes))] for i in range(n)]
    return a1, a2
