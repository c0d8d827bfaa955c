"""The networks exactly as the definitions write them: dense, batched over models, O(n²·d) a model.

This is the reference that the structured and the exact way are held against.  It shares nothing with them but the
drawn models and the arithmetic that settles the sign of a sum.
"""

from fractions import Fraction
from functools import lru_cache
from math import lgamma

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthgauge.separation.datasets import inputs, rational_inputs, threshold
from depthgauge.separation.sampling import AttentionDraws, RegressionDraws, unpack
from depthgauge.separation.score_maps import LIN, Attention
from depthgauge.separation.settings import AttentionSetting, CrossAttention, Dataset, Regression, strong
from depthgauge.separation.settle import sign_of_sum

_ULP = 2.0**-53


def product(setting: AttentionSetting) -> Float[Tensor, "d d"]:
    """X = QKᵀ: the identity, or all ones."""
    d = setting.d
    return torch.eye(d, dtype=torch.float64) if setting.x == "identity" else torch.ones(d, d, dtype=torch.float64)


def scores(
    a1: Float[Tensor, "*models n d"], x: Float[Tensor, "d d"], a2: Float[Tensor, "*models n d"]
) -> Float[Tensor, "*models n n"]:
    """u = A₁ X A₂ᵀ."""
    return a1 @ x @ a2.mT


def scores_kronecker(
    a1: Float[Tensor, "n d"], x: Float[Tensor, "d d"], a2: Float[Tensor, "n d"]
) -> Float[Tensor, "n n"]:
    """The same by Fact A.1: (A₁ ⊗ A₂)·vec(X), n²·d² numbers, for tiny sizes; vec goes along the rows."""
    n = a1.shape[0]
    return (torch.kron(a1, a2) @ x.reshape(-1)).reshape(n, n)


def attend(kind: Attention, u: Float[Tensor, "*models n"]) -> Float[Tensor, "*models n"]:
    """f = k(u) / Σ k(u) along the last axis."""
    if kind.family == "exp":
        return torch.softmax(u, dim=-1)
    if kind.family == "lin":
        return u / u.sum(dim=-1, keepdim=True)
    log_k = torch.zeros_like(u)
    for i in range(1, kind.degree + 1):
        log_k = torch.logaddexp(log_k, torch.xlogy(torch.tensor(float(i), dtype=u.dtype), u) - lgamma(i + 1))
    return torch.softmax(log_k, dim=-1)


def network(c: Float[Tensor, "models n d"], y: Float[Tensor, "models d m"], tau: float) -> Float[Tensor, " models"]:
    """F = φ(Σ_{j₀,l} φ_τ(⟨c_{j₀}, y_l⟩)), φ_τ(z) = max(z − τ, 0)."""
    return torch.relu(torch.relu(c @ y - tau).sum(dim=(-2, -1)))


def output(
    setting: AttentionSetting, kind: Attention, dataset: Dataset, j2: Int[Tensor, " models"], j3: Int[Tensor, " models"]
) -> Float[Tensor, "models n d"]:
    """c = f·A₃V with V = I."""
    given = inputs(setting, dataset, j2, j3)
    v = torch.eye(setting.d, dtype=torch.float64)
    return attend(kind, scores(given.a1, product(setting), given.a2)) @ (given.a2 @ v)


def signs(draws: AttentionDraws | RegressionDraws, length: int) -> Float[Tensor, "models length m"]:
    """The drawn sign vectors as columns of ±1."""
    return torch.from_numpy(unpack(draws.words, length).astype(np.float64)).mT * 2 - 1


def conditions(setting: AttentionSetting, draws: AttentionDraws) -> Bool[np.ndarray, "models 4"]:
    """For each model: F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0, F with the setting's attention kind."""
    kind = strong(setting)
    met = [
        positive(setting, kind, 1, draws),
        ~positive(setting, LIN, 1, draws),
        ~positive(setting, kind, 0, draws),
        ~positive(setting, LIN, 0, draws),
    ]
    return np.stack(met, axis=1)


def positive(
    setting: AttentionSetting, kind: Attention, dataset: Dataset, draws: AttentionDraws
) -> Bool[np.ndarray, " models"]:
    """Whether F > 0 on the data set, decided without rounding where the margin to τ is within it."""
    j2, j3 = torch.from_numpy(draws.j2[:, dataset]), torch.from_numpy(draws.j3[:, dataset])
    c = output(setting, kind, dataset, j2, j3)
    y = signs(draws, setting.d)
    tau = threshold(setting)
    margin = c @ y - tau
    slack = rounding(setting, kind, dataset) * (c.sum(dim=-1, keepdim=True) + tau)
    answer: Bool[np.ndarray, " models"] = network(c, y, tau).numpy() > 0
    sure = _any(margin > slack)  # F > 0 whatever the others do
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


def rounding(setting: AttentionSetting, kind: Attention, dataset: Dataset) -> float:
    """A bound on the rounding of ⟨c, y⟩ − τ, relative to Σ|c| + τ.

    All numbers before the signs are non-negative, so relative errors add up: (2d + 16) for a score u, then
    u times that for exp and poly:g (their logarithm has slope at most 1) and the terms of the polynomial's own
    logarithm, n for each of the two sums over keys, d for the product with y.
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
    """max u / log n, from the row sums of A₁ and A₂."""
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
    """For each row of A₁ the first row equal to it: equal queries attend alike and are settled once."""
    first: dict[tuple[Fraction, ...], int] = {}
    return tuple(first.setdefault(query, i) for i, query in enumerate(_rational(setting, dataset, at)[0]))


@lru_cache(maxsize=4096)
def _settled(
    setting: AttentionSetting, kind: Attention, dataset: Dataset, at: tuple[int, int], row: int, y: tuple[int, ...]
) -> bool:
    """Whether ⟨c_row, y⟩ > τ: the sign of Σ_j (⟨(A₃)_j, y⟩ − τ)·k(u_{row,j}) over all n keys."""
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
    """Definitions 3.5 and 3.6, F = φ(Σ_l φ_τ(⟨f, y_l⟩)): the four conditions for each model."""
    kind = strong(setting)
    met = [
        _regression_positive(setting, kind, 1, draws),
        ~_regression_positive(setting, LIN, 1, draws),
        ~_regression_positive(setting, kind, 0, draws),
        ~_regression_positive(setting, LIN, 0, draws),
    ]
    return np.stack(met, axis=1)


def regression_scores(setting: Regression, dataset: Dataset, draws: RegressionDraws) -> Float[Tensor, "models n"]:
    """u = Ax of Definition 3.8: log n·(1 + 0.4·uniform), and 4·log n at D₁'s index j."""
    log_n = float(np.log(setting.n))
    u = log_n * (1 + 0.4 * torch.from_numpy(draws.uniform[:, dataset]))
    if dataset == 1:
        u[torch.arange(len(u)), torch.from_numpy(draws.j)] = 4 * log_n
    return u


def _regression_positive(
    setting: Regression, kind: Attention, dataset: Dataset, draws: RegressionDraws
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
