"""Self-attention and cross-attention in O(d·m) operations per model: count signs, then look up the decision."""

import numpy as np
from jaxtyping import Bool, Int, UInt64

from depthgauge.papers.separation.decisions import tables
from depthgauge.papers.separation.sampling import AttentionDraws
from depthgauge.papers.separation.settings import AttentionSetting

_ONES_IN_OCTET = np.array([octet.bit_count() for octet in range(256)], dtype=np.uint8)


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
