"""For every pattern of signs, whether it lifts some row of c above the threshold: one small table, no rounding left."""

from functools import lru_cache

import numpy as np
from flint import ctx
from jaxtyping import Bool, Float

from depthgauge.separation.rows import Row, Signs, rows
from depthgauge.separation.score_maps import LIN, Attention
from depthgauge.separation.settings import AttentionSetting, Dataset, strong
from depthgauge.separation.settle import sign_of_sum

_PRECISION = 128
_ROUNDING = 16 * 2.0**-52
"""Six products of numbers good to an ulp, and their sum: well below 16 ulps of Σ|terms|."""

Table = Bool[np.ndarray, "2 2 2 classes"]


@lru_cache(maxsize=8)
def tables(setting: AttentionSetting) -> tuple[Table, Table, Table, Table]:
    """Where one y makes F > 0: (strong, D₁), (lin, D₁), (strong, D₀), (lin, D₀), each as in `decision_table`."""
    kind = strong(setting)
    return (
        decision_table(setting, 1, kind),
        decision_table(setting, 1, LIN),
        decision_table(setting, 0, kind),
        decision_table(setting, 0, LIN),
    )


def decision_table(setting: AttentionSetting, dataset: Dataset, kind: Attention) -> Table:
    """Entry [y₁, y_d, y_κ, p] says whether Σ_{j₀} φ_τ(⟨c_{j₀}, y⟩) > 0; signs count 0 for − and 1 for +.

    p is the number of + among the K − 1 classes other than κ.  Of the rows of those classes the largest belongs to
    a class with sign +, if there is one: k increases, so a row weighs its own class at least like any other.
    """
    others = setting.classes - 1
    first = np.array([-1.0, 1.0])[:, None, None, None]
    last = np.array([-1.0, 1.0])[None, :, None, None]
    own = np.array([-1.0, 1.0])[None, None, :, None]
    plus = np.arange(setting.classes)
    total = (2.0 * plus - others)[None, None, None, :]
    turn = np.where(plus > 0, 1.0, -1.0)[None, None, None, :]
    tau = float(setting.threshold)
    fires = np.zeros((2, 2, 2, setting.classes), dtype=bool)
    for row in rows(setting, dataset):
        c = _rounded(row, kind, setting.n)
        with np.errstate(over="ignore", invalid="ignore"):
            margin = c[0] * first + c[1] * own + c[2] * total + c[3] * turn + c[4] * last - tau
            size = c[0] + c[1] + c[2] * np.abs(total) + np.abs(c[3]) + c[4] + tau
            clear = np.abs(margin) > _ROUNDING * size
        fires |= clear & (margin > 0)
        for index in np.argwhere(~clear & ~fires):
            signs = _signs(index.tolist(), others)
            fires[tuple(index)] = sign_of_sum(kind, setting.n, row.excess(signs, setting.threshold)) > 0
    fires.setflags(write=False)
    return fires


def _signs(index: list[int], others: int) -> Signs:
    """The signs that an entry of the table stands for."""
    first, last, own, plus = index
    return Signs(2 * first - 1, 2 * own - 1, 2 * plus - others, 1 if plus > 0 else -1, 2 * last - 1)


def _rounded(row: Row, kind: Attention, n: int) -> Float[np.ndarray, " 5"]:
    """The row's coefficients, each within an ulp of its value."""
    with ctx.workprec(_PRECISION):
        return np.array([float(value.mid()) for value in row.coefficients(kind, n)])
