"""Random data sets and sign vectors, each model from its own stretch of one counter-based stream.

The key of the stream is a digest of the task, its parameters and the seed; repetition r owns a fixed block of
counters.  So any model can be drawn alone, and how the work was split changes nothing.  The attention kind is no
part of the key: the same models are seen through every kind.
"""

import hashlib
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float, Int, Int8, UInt64

from depthgauge.errors import require_count
from depthgauge.separation.settings import AttentionSetting, Regression, Setting

_WORDS_PER_COUNTER = 4  # what Philox-4×64 yields for one value of its counter
_HEADER = 4


@dataclass(frozen=True)
class AttentionDraws:
    """Models for self- or cross-attention: `j2` and `j3` for (D₀, D₁), and the bits of every sign vector."""

    j2: Int[np.ndarray, "models 2"]
    j3: Int[np.ndarray, "models 2"]
    words: UInt64[np.ndarray, "models m w"]


@dataclass(frozen=True)
class RegressionDraws:
    """Models for regression: (Ax)ᵢ = log n·(1 + 0.4·uniformᵢ) on (D₀, D₁), D₁'s index `j`, bits of the signs."""

    uniform: Float[np.ndarray, "models 2 n"]
    j: Int[np.ndarray, " models"]
    words: UInt64[np.ndarray, "models m w"]


def stream_key(setting: Setting, seed: int) -> int:
    """A 128-bit key from the task, its parameters and the seed."""
    require_count("seed", seed, "where the random numbers start", least=0)
    parameters = [f"{f.name}={_plain(getattr(setting, f.name))}" for f in fields(setting) if f.name != "attention"]
    text = "|".join(["depthgauge.separation/1", setting.kind, *parameters, f"seed={seed}"])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


def _plain(parameter: int | float | str) -> str:
    """The parameter in words; 1.0 and 1 are one parameter."""
    return repr(float(parameter)).removesuffix(".0") if isinstance(parameter, float) else str(parameter)


def _raw_words(setting: Setting, seed: int, first: int, models: int, per_model: int) -> UInt64[np.ndarray, "models k"]:
    """`per_model` random words for each of the repetitions first, …, first + models − 1."""
    counters = -(-per_model // _WORDS_PER_COUNTER)
    generator = np.random.Philox(key=stream_key(setting, seed), counter=first * counters)
    raw = generator.random_raw(models * counters * _WORDS_PER_COUNTER)
    return raw.reshape(models, counters * _WORDS_PER_COUNTER)[:, :per_model]


def _uniform(words: UInt64[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Multiples of 2⁻⁵³ in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _index(words: UInt64[np.ndarray, "..."], n: int) -> Int[np.ndarray, "..."]:
    """Uniform in 0, …, n − 1, up to n·2⁻⁵³."""
    return (_uniform(words) * n).astype(np.int64)


def draw_attention(setting: AttentionSetting, seed: int, first: int, models: int) -> AttentionDraws:
    """Repetitions first, …, first + models − 1 of a self- or cross-attention setting."""
    per_vector = -(-setting.d // 64)
    raw = _raw_words(setting, seed, first, models, _HEADER + setting.m * per_vector)
    indices = _index(raw[:, :_HEADER], setting.n)
    return AttentionDraws(indices[:, 2:], indices[:, :2], raw[:, _HEADER:].reshape(models, setting.m, per_vector))


def draw_regression(setting: Regression, seed: int, first: int, models: int) -> RegressionDraws:
    """Repetitions first, …, first + models − 1 of a regression setting."""
    n, per_vector = setting.n, -(-setting.n // 64)
    raw = _raw_words(setting, seed, first, models, _HEADER + 2 * n + setting.m * per_vector)
    uniform = _uniform(raw[:, _HEADER : _HEADER + 2 * n]).reshape(models, 2, n)
    signs = raw[:, _HEADER + 2 * n :].reshape(models, setting.m, per_vector)
    return RegressionDraws(uniform, _index(raw[:, 0], n), signs)


def unpack(words: UInt64[np.ndarray, "models m w"], length: int) -> Int8[np.ndarray, "models m length"]:
    """The first `length` bits of every sign vector, as 0 and 1."""
    octets = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=length, bitorder="little").view(np.int8)
