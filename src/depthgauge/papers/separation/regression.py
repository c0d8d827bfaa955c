"""The regression model, batched. Decisions near the threshold are made in exact arithmetic."""

from fractions import Fraction
from math import log

import numpy as np
from jaxtyping import Bool, Float

from depthgauge.papers.separation.sampling import RegressionDraws, unpack
from depthgauge.papers.separation.score_maps import LIN, ScoreMap
from depthgauge.papers.separation.settings import Dataset, Regression, strong
from depthgauge.papers.separation.settle import sign_of_sum

_SINGLE_UP_TO = 100_000
"""The largest n for which the first pass uses single precision. It leaves few decisions undecided."""

_INTERVAL = Fraction(4, 10)
_PEAK = Fraction(4)


def conditions(setting: Regression, draws: RegressionDraws) -> Bool[np.ndarray, "models 4"]:
    """Return whether F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0; F uses the attention of the setting.

    Because Σ f = 1, ⟨f, y⟩ > τ is equivalent to Σ_{i: yᵢ = +1} fᵢ > (1 + τ)/2.
    """
    bits = unpack(draws.words, setting.n)
    cases: list[tuple[ScoreMap, Dataset]] = [(strong(setting), 1), (LIN, 1), (strong(setting), 0), (LIN, 0)]
    f = np.stack([_normalised(kind, setting.n, _scores(draws, dataset)) for kind, dataset in cases], axis=-1)
    single = setting.n <= _SINGLE_UP_TO
    kept = np.float32 if single else np.float64
    share = np.matmul(bits.astype(kept), f.astype(kept)).astype(np.float64)
    margin = share - float((1 + setting.threshold) / 2)
    positive = margin > 0
    for model, vector, case in np.argwhere(np.abs(margin) <= _rounding(setting, single)):
        kind, dataset = cases[case]
        signs, scores = 2 * bits[model, vector].astype(int) - 1, _exact_scores(draws, dataset, int(model))
        terms = [(int(y) - setting.threshold, q) for y, q in zip(signs, scores, strict=True)]
        positive[model, vector, case] = sign_of_sum(kind, setting.n, terms) > 0  # of ⟨f, y⟩ − τ
    return np.asarray(positive.any(axis=1) == [True, False, False, False])


def _scores(draws: RegressionDraws, dataset: Dataset) -> Float[np.ndarray, "models n"]:
    """Return (Ax)ᵢ / log n."""
    scores = 1 + float(_INTERVAL) * draws.uniform[:, dataset]
    if dataset == 1:
        scores[np.arange(len(scores)), draws.j] = float(_PEAK)
    return scores


def _normalised(kind: ScoreMap, n: int, scores: Float[np.ndarray, "models n"]) -> Float[np.ndarray, "models n"]:
    """Return f = k(u) / Σ k(u) with u = log n · scores."""
    u = log(n) * scores
    if kind.family == "exp":
        k = np.exp(u - u.max(axis=1, keepdims=True))
    elif kind.family == "lin":
        k = scores
    else:
        k = np.ones_like(u)
        for i in range(kind.degree, 0, -1):
            k = 1 + k * u / i
    return np.asarray(k / k.sum(axis=1, keepdims=True))


def _rounding(setting: Regression, single: bool) -> float:
    """Return a bound on the rounding error of Σ_{i: yᵢ = +1} fᵢ.

    It covers n additions in the precision of the product, and the error of f in double precision: k(u) with
    u ≤ 4·log n has relative error at most (8u + 4g + 16)·2⁻⁵², and its normaliser at most n·2⁻⁵² more.
    """
    u = 4 * log(setting.n)
    in_double = (8 * u + 4 * strong(setting).degree + setting.n + 32) * 2.0**-52
    return (1.01 * (setting.n + 4) * 2.0**-24 if single else 0.0) + 4 * in_double


def _exact_scores(draws: RegressionDraws, dataset: Dataset, model: int) -> list[Fraction]:
    """Return (Ax)ᵢ / log n of one model as fractions."""
    scores = [1 + _INTERVAL * Fraction(float(u)) for u in draws.uniform[model, dataset]]
    if dataset == 1:
        scores[int(draws.j[model])] = _PEAK
    return scores
