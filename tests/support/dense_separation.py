"""The data sets and networks of paper B as dense matrices, batched over models: O(n²·d) operations per model.

Tests and the benchmark compare `decisions` and `exact` with it. It shares only the drawn models and `sign_of_sum`.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lgamma, log, sqrt

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.papers.separation.decisions import AttentionDraws, RegressionDraws, sign_of_sum, unpack
from depthgauge.papers.separation.settings import (
    LIN,
    AttentionSetting,
    CrossAttention,
    Dataset,
    Regression,
    ScoreMap,
    SelfAttention,
    decimal,
    special,
    strong,
)

_ULP = 2.0**-53


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


def product(setting: AttentionSetting) -> Float[Tensor, "d d"]:
    """Return X = QKᵀ: the identity or the matrix of ones."""
    d = setting.d
    return torch.eye(d, dtype=torch.float64) if setting.x == "identity" else torch.ones(d, d, dtype=torch.float64)


def scores(
    a1: Float[Tensor, "*models n d"], x: Float[Tensor, "d d"], a2: Float[Tensor, "*models n d"]
) -> Float[Tensor, "*models n n"]:
    """Return the scores u = A₁ X A₂ᵀ."""
    return a1 @ x @ a2.mT


def scores_kronecker(
    a1: Float[Tensor, "n d"], x: Float[Tensor, "d d"], a2: Float[Tensor, "n d"]
) -> Float[Tensor, "n n"]:
    """Return the scores by Fact A.1, (A₁ ⊗ A₂)·vec(X) with row-major vec. It needs n²·d² numbers."""
    n = a1.shape[0]
    return (torch.kron(a1, a2) @ x.reshape(-1)).reshape(n, n)


def attend(kind: ScoreMap, u: Float[Tensor, "*models n"]) -> Float[Tensor, "*models n"]:
    """Return f = k(u) / Σ k(u) along the last axis."""
    if kind.family == "exp":
        return torch.softmax(u, dim=-1)
    if kind.family == "lin":
        return u / u.sum(dim=-1, keepdim=True)
    log_k = torch.zeros_like(u)
    for i in range(1, kind.degree + 1):
        log_k = torch.logaddexp(log_k, torch.xlogy(torch.tensor(float(i), dtype=u.dtype), u) - lgamma(i + 1))
    return torch.softmax(log_k, dim=-1)


def network(c: Float[Tensor, "models n d"], y: Float[Tensor, "models d m"], tau: float) -> Float[Tensor, " models"]:
    """Return F = φ(Σ_{j₀,l} φ_τ(⟨c_{j₀}, y_l⟩)) with φ_τ(z) = max(z − τ, 0)."""
    return torch.relu(torch.relu(c @ y - tau).sum(dim=(-2, -1)))


def output(
    setting: AttentionSetting, kind: ScoreMap, dataset: Dataset, j2: Int[Tensor, " models"], j3: Int[Tensor, " models"]
) -> Float[Tensor, "models n d"]:
    """Return c = f·A₃V with V = I."""
    given = inputs(setting, dataset, j2, j3)
    v = torch.eye(setting.d, dtype=torch.float64)
    return attend(kind, scores(given.a1, product(setting), given.a2)) @ (given.a2 @ v)


def signs(draws: AttentionDraws | RegressionDraws, length: int) -> Float[Tensor, "models length m"]:
    """Return the drawn sign vectors as columns of ±1."""
    return torch.from_numpy(unpack(draws.words, length).astype(np.float64)).mT * 2 - 1


def conditions(setting: AttentionSetting, draws: AttentionDraws) -> Bool[np.ndarray, "models 4"]:
    """Return whether F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0; F uses the attention of the setting."""
    kind = strong(setting)
    met = [
        positive(setting, kind, 1, draws),
        ~positive(setting, LIN, 1, draws),
        ~positive(setting, kind, 0, draws),
        ~positive(setting, LIN, 0, draws),
    ]
    return np.stack(met, axis=1)


def positive(
    setting: AttentionSetting, kind: ScoreMap, dataset: Dataset, draws: AttentionDraws
) -> Bool[np.ndarray, " models"]:
    """Return whether F > 0 on the data set. Margins within the rounding error are decided in exact arithmetic."""
    j2, j3 = torch.from_numpy(draws.j2[:, dataset]), torch.from_numpy(draws.j3[:, dataset])
    c = output(setting, kind, dataset, j2, j3)
    y = signs(draws, setting.d)
    tau = threshold(setting)
    margin = c @ y - tau
    slack = rounding(setting, kind, dataset) * (c.sum(dim=-1, keepdim=True) + tau)
    answer: Bool[np.ndarray, " models"] = network(c, y, tau).numpy() > 0
    sure = _any(margin > slack)  # one positive margin is enough for F > 0
    undecided = margin.abs() <= slack
    for model in np.flatnonzero(_any(undecided) & ~sure):
        at = (int(j2[model]), int(j3[model]))
        alike = _first_alike(setting, dataset, at)
        vectors = [tuple(column) for column in y[model].T.int().tolist()]
        open_pairs = {(alike[row], vector) for row, vector in undecided[model].nonzero().tolist()}
        answer[model] = any(_settled(setting, kind, dataset, at, row, vectors[vector]) for row, vector in open_pairs)
    return answer


def _any(entries: Bool[Tensor, "models n m"]) -> Bool[np.ndarray, " models"]:
    return np.asarray(entries.flatten(1).any(dim=1).numpy())


def rounding(setting: AttentionSetting, kind: ScoreMap, dataset: Dataset) -> float:
    """Return a bound on the rounding error of ⟨c, y⟩ − τ, relative to Σ|c| + τ.

    All numbers before the product with y are non-negative, so relative errors add. In units of 2⁻⁵³: a score u has
    relative error 2d + 16. k(u) has at most u times that for exp and poly:g, because the derivative of log k is at most
    1, plus the error of evaluating log k. Each of the two sums over keys adds n, and the product with y adds d.
    """
    n, d = setting.n, setting.d
    a = setting.a1 if dataset == 1 else setting.a0
    top = max(1.0, _largest_score(setting, a) * float(np.log(n)))
    relative = 2.0 * d + 16
    if kind.family != "lin":
        relative = top * (relative + 2) + 4
    if kind.family == "poly":
        g = kind.degree
        relative += 8 * (lgamma(g + 1) + g * (abs(float(np.log(top))) + 40) + g * top)
    return 4 * (2 * relative + 2 * n + d + 32) * _ULP


def _largest_score(setting: AttentionSetting, a: float) -> float:
    """Return an upper bound on max u / log n, from the row sums of A₁ and A₂."""
    if isinstance(setting, CrossAttention):
        return 2 * (a + setting.d)
    return float((a + setting.b + setting.c) ** 2)


_Rational = tuple[tuple[Fraction, ...], ...]


@lru_cache(maxsize=256)
def _rational(setting: AttentionSetting, dataset: Dataset, at: tuple[int, int]) -> tuple[_Rational, _Rational]:
    a1, a2 = rational_inputs(setting, dataset, *at)
    return tuple(map(tuple, a1)), tuple(map(tuple, a2))


@lru_cache(maxsize=256)
def _first_alike(setting: AttentionSetting, dataset: Dataset, at: tuple[int, int]) -> tuple[int, ...]:
    """Return, for each row of A₁, the index of the first equal row. Equal queries need one decision only."""
    first: dict[tuple[Fraction, ...], int] = {}
    return tuple(first.setdefault(query, i) for i, query in enumerate(_rational(setting, dataset, at)[0]))


@lru_cache(maxsize=4096)
def _settled(
    setting: AttentionSetting, kind: ScoreMap, dataset: Dataset, at: tuple[int, int], row: int, y: tuple[int, ...]
) -> bool:
    """Decide ⟨c_row, y⟩ > τ exactly, from the sign of Σ_j (⟨(A₃)_j, y⟩ − τ)·k(u_{row,j}) over all n keys."""
    a1, a2 = _rational(setting, dataset, at)
    query = a1[row]
    terms = []
    for key in a2:
        if setting.x == "identity":
            score = sum((p * q for p, q in zip(query, key, strict=True) if p and q), Fraction(0))
        else:
            score = sum(query, Fraction(0)) * sum(key, Fraction(0))
        value = sum((v * s for v, s in zip(key, y, strict=True) if v), Fraction(0))
        terms.append((value - setting.threshold, score))
    return sign_of_sum(kind, setting.n, terms) > 0


def regression_conditions(setting: Regression, draws: RegressionDraws) -> Bool[np.ndarray, "models 4"]:
    """Return the four conditions for the regression model F = φ(Σ_l φ_τ(⟨f, y_l⟩)) of Definitions 3.5 and 3.6."""
    kind = strong(setting)
    met = [
        _regression_positive(setting, kind, 1, draws),
        ~_regression_positive(setting, LIN, 1, draws),
        ~_regression_positive(setting, kind, 0, draws),
        ~_regression_positive(setting, LIN, 0, draws),
    ]
    return np.stack(met, axis=1)


def regression_scores(setting: Regression, dataset: Dataset, draws: RegressionDraws) -> Float[Tensor, "models n"]:
    """Return u = Ax of Definition 3.8: log n·(1 + 0.4·uniform), and 4·log n at index j of D₁."""
    log_n = float(np.log(setting.n))
    u = log_n * (1 + 0.4 * torch.from_numpy(draws.uniform[:, dataset]))
    if dataset == 1:
        u[torch.arange(len(u)), torch.from_numpy(draws.j)] = 4 * log_n
    return u


def _regression_positive(
    setting: Regression, kind: ScoreMap, dataset: Dataset, draws: RegressionDraws
) -> Bool[np.ndarray, " models"]:
    u = regression_scores(setting, dataset, draws)
    y = signs(draws, setting.n)
    tau = float(setting.threshold)
    margin = (attend(kind, u).unsqueeze(1) @ y).squeeze(1) - tau
    slack = 4 * (8 * float(u.max()) + 8 * kind.degree * (kind.degree + 40) + 2 * setting.n + 64) * _ULP
    above = margin > slack
    answer: Bool[np.ndarray, " models"] = above.any(dim=1).numpy().copy()
    for model, vector in (margin.abs() <= slack).nonzero().tolist():
        scores_q = [1 + Fraction(2, 5) * Fraction(float(w)) for w in draws.uniform[model, dataset]]
        if dataset == 1:
            scores_q[int(draws.j[model])] = Fraction(4)
        terms = [(int(s) - setting.threshold, q) for s, q in zip(y[model, :, vector], scores_q, strict=True)]
        answer[model] |= sign_of_sum(kind, setting.n, terms) > 0
    return answer
