"""Decision tables: for each pattern of signs, whether some row of c exceeds the threshold. The tables are exact."""

from functools import lru_cache

import numpy as np
from flint import ctx
from jaxtyping import Bool, Float

from depthgauge.papers.separation.rows import OutputRow, Signs, rows
from depthgauge.papers.separation.score_maps import LIN, ScoreMap
from depthgauge.papers.separation.settings import AttentionSetting, Dataset, strong
from depthgauge.papers.separation.settle import sign_of_sum

_PRECISION = 128
_ROUNDING = 16 * 2.0**-52
"""The margin sums six products of factors with relative error 2⁻⁵²; its error is at most 16·2⁻⁵² Σ|terms|."""

Table = Bool[np.ndarray, "2 2 2 classes"]


@lru_cache(maxsize=8)
def tables(setting: AttentionSetting) -> tuple[Table, Table, Table, Table]:
    """Return the decision tables of (strong, D₁), (lin, D₁), (strong, D₀) and (lin, D₀)."""
    cases: tuple[tuple[Dataset, ScoreMap], ...] = ((1, strong(setting)), (1, LIN), (0, strong(setting)), (0, LIN))
    return tuple(decision_table(setting, dataset, kind) for dataset, kind in cases)  # type: ignore[return-value]


def decision_table(setting: AttentionSetting, dataset: Dataset, kind: ScoreMap) -> Table:
    """Return the table whose entry [y₁, y_d, y_κ, p] is True if Σ_{j₀} φ_τ(⟨c_{j₀}, y⟩) > 0.

    Index 0 stands for the sign − and index 1 for +. p is the number of + among the K − 1 classes other than κ. Among
    the rows of those classes, a row of a class with sign + has the largest ⟨c, y⟩ if there is one: k is increasing, so
    a row gives its own class at least the weight of any other class.
    """
    others = setting.classes - 1
    signs = np.array([-1.0, 1.0])
    first, last, own, plus = np.ix_(signs, signs, signs, np.arange(float(setting.classes)))
    total, turn = 2.0 * plus - others, np.where(plus > 0, 1.0, -1.0)
    tau = float(setting.threshold)
    positive = np.zeros((2, 2, 2, setting.classes), dtype=bool)
    for row in rows(setting, dataset):
        c = _rounded(row, kind, setting.n)
        with np.errstate(over="ignore", invalid="ignore"):
            margin = c[0] * first + c[1] * own + c[2] * total + c[3] * turn + c[4] * last - tau
            size = c[0] + c[1] + c[2] * np.abs(total) + np.abs(c[3]) + c[4] + tau
            clear = np.abs(margin) > _ROUNDING * size
        positive |= clear & (margin > 0)
        for index in np.argwhere(~clear & ~positive):
            excess = row.excess(_signs(index.tolist(), others), setting.threshold)
            positive[tuple(index)] = sign_of_sum(kind, setting.n, excess) > 0
    positive.setflags(write=False)
    return positive


def _signs(index: list[int], others: int) -> Signs:
    first, last, own, plus = index
    return Signs(2 * first - 1, 2 * own - 1, 2 * plus - others, 1 if plus > 0 else -1, 2 * last - 1)


def _rounded(row: OutputRow, kind: ScoreMap, n: int) -> Float[np.ndarray, " 5"]:
    """Return the coefficients of the row, each with relative error at most 2⁻⁵²."""
    with ctx.workprec(_PRECISION):
        return np.array([float(value.mid()) for value in row.coefficients(kind, n)])
