"""Decision tables: for each pattern of signs, whether some row of c exceeds the threshold. The tables are exact.

With them self-attention and cross-attention take O(d·m) operations per model: count signs, then look up the decision.
"""

from functools import lru_cache

import numpy as np
from flint import ctx
from jaxtyping import Bool, Float, Int, UInt64

from depthgauge.papers.separation.rows import OutputRow, Signs, rows
from depthgauge.papers.separation.sampling import AttentionDraws
from depthgauge.papers.separation.score_maps import LIN, ScoreMap
from depthgauge.papers.separation.settings import AttentionSetting, Dataset, strong
from depthgauge.papers.separation.settle import sign_of_sum

_PRECISION = 128
_ONES_IN_OCTET = np.array([octet.bit_count() for octet in range(256)], dtype=np.uint8)
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


def conditions(setting: AttentionSetting, draws: AttentionDraws) -> Bool[np.ndarray, "models 4"]:
    """Return whether F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0; F uses the attention of the setting."""
    words = draws.words
    first = _bit(words, np.zeros(len(words), dtype=np.int64))
    last = _bit(words, np.full(len(words), setting.d - 1)) if setting.kind == "self" else np.zeros_like(first)
    plus = _count_ones(words & _class_bits(setting))
    found = []
    for table, dataset in zip(tables(setting), (1, 1, 0, 0), strict=True):
        own = _bit(words, 1 + draws.j3[:, dataset] % setting.classes)
        found.append(table[first, last, own, plus - own].any(axis=1))
    return np.asarray(np.stack(found, axis=1) == [True, False, False, False])


def _bit(words: UInt64[np.ndarray, "models m w"], position: Int[np.ndarray, " models"]) -> Int[np.ndarray, "models m"]:
    """Return bit `position` of each sign vector of a model."""
    chosen = np.take_along_axis(words, (position // 64)[:, None, None], axis=2)[:, :, 0]
    return ((chosen >> (position % 64).astype(np.uint64)[:, None]) & np.uint64(1)).astype(np.int64)


def _class_bits(setting: AttentionSetting) -> UInt64[np.ndarray, " w"]:
    """Return a mask of the bits 1, …, K, which are the signs of the classes."""
    mask = ((1 << setting.classes) - 1) << 1
    words = -(-setting.d // 64)
    return np.array([(mask >> (64 * i)) & (2**64 - 1) for i in range(words)], dtype=np.uint64)


def _count_ones(words: UInt64[np.ndarray, "models m w"]) -> Int[np.ndarray, "models m"]:
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.asarray(_ONES_IN_OCTET[octets].sum(axis=-1, dtype=np.int64))
