"""Random data sets and sign vectors from a counter-based random number generator.

The key of the generator is a hash of the task, its parameters and the seed. Model r uses a fixed block of counters, so
every model can be drawn alone and results do not depend on how the work is divided. The attention kind is not part of
the key: all kinds are evaluated on the same models.
"""

import hashlib
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float, Int, Int8, UInt64

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import require_seed
from depthgauge.papers.separation.settings import AttentionSetting, Regression, Setting

_WORDS_PER_COUNTER = 4  # Philox-4×64 produces four words per counter value
_HEADER = 4


@dataclass(frozen=True, eq=False, repr=False)
class AttentionDraws(ArrayRecord):
    """Models for self-attention or cross-attention: `j2` and `j3` for (D₀, D₁), and the bits of the sign vectors."""

    j2: Int[np.ndarray, "models 2"]
    j3: Int[np.ndarray, "models 2"]
    words: UInt64[np.ndarray, "models m w"]


@dataclass(frozen=True, eq=False, repr=False)
class RegressionDraws(ArrayRecord):
    """Models for regression: (Ax)ᵢ = log n·(1 + 0.4·uniformᵢ), the index `j` of D₁, the bits of the sign vectors."""

    uniform: Float[np.ndarray, "models 2 n"]
    j: Int[np.ndarray, " models"]
    words: UInt64[np.ndarray, "models m w"]


def stream_key(setting: Setting, seed: int) -> int:
    """Return a 128-bit key from the task, its parameters and the seed.

    The name `depthgauge.separation/1` must not change with the name of a module: the drawn networks depend on it.
    """
    require_seed(seed)
    parameters = [f"{f.name}={_plain(getattr(setting, f.name))}" for f in fields(setting) if f.name != "attention"]
    text = "|".join(["depthgauge.separation/1", setting.kind, *parameters, f"seed={seed}"])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


def _plain(parameter: int | float | str) -> str:
    """Return the parameter as text; 1.0 and 1 give the same text."""
    return repr(float(parameter)).removesuffix(".0") if isinstance(parameter, float) else str(parameter)


def _raw_words(setting: Setting, seed: int, first: int, models: int, per_model: int) -> UInt64[np.ndarray, "models k"]:
    counters = -(-per_model // _WORDS_PER_COUNTER)
    generator = np.random.Philox(key=stream_key(setting, seed), counter=first * counters)
    raw = generator.random_raw(models * counters * _WORDS_PER_COUNTER)
    return raw.reshape(models, counters * _WORDS_PER_COUNTER)[:, :per_model]


def _uniform(words: UInt64[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Convert words to multiples of 2⁻⁵³ in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _index(words: UInt64[np.ndarray, "..."], n: int) -> Int[np.ndarray, "..."]:
    """Convert words to indices in 0, …, n − 1, uniform up to a deviation of n·2⁻⁵³."""
    return (_uniform(words) * n).astype(np.int64)


def draw_attention(setting: AttentionSetting, seed: int, first: int, models: int) -> AttentionDraws:
    """Draw the models first, …, first + models − 1 of a self-attention or cross-attention setting."""
    per_vector = -(-setting.d // 64)
    raw = _raw_words(setting, seed, first, models, _HEADER + setting.m * per_vector)
    indices = _index(raw[:, :_HEADER], setting.n)
    return AttentionDraws(indices[:, 2:], indices[:, :2], raw[:, _HEADER:].reshape(models, setting.m, per_vector))


def draw_regression(setting: Regression, seed: int, first: int, models: int) -> RegressionDraws:
    """Draw the models first, …, first + models − 1 of a regression setting."""
    n, per_vector = setting.n, -(-setting.n // 64)
    raw = _raw_words(setting, seed, first, models, _HEADER + 2 * n + setting.m * per_vector)
    uniform = _uniform(raw[:, _HEADER : _HEADER + 2 * n]).reshape(models, 2, n)
    signs = raw[:, _HEADER + 2 * n :].reshape(models, setting.m, per_vector)
    return RegressionDraws(uniform, _index(raw[:, 0], n), signs)


def unpack(words: UInt64[np.ndarray, "models m w"], length: int) -> Int8[np.ndarray, "models m length"]:
    """Return the first `length` bits of each sign vector as 0 and 1."""
    octets = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=length, bitorder="little").view(np.int8)
