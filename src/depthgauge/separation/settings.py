"""What one experiment is: the data sets of Definitions 3.8, D.1 and F.1 with the width of the network, checked."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from depthgauge.errors import InputError, require_count, unknown_name
from depthgauge.separation.score_maps import Attention, parse_attention

Dataset = Literal[0, 1]
DELTA = 0.01
"""The paper's failure probability δ, which only decides how wide its networks are."""

_MEANINGS = {
    "a0": "the size of the special token in D₀",
    "a1": "the size of the special token in D₁",
    "b": "the size of the repeated identity block",
    "c": "the size of the last, constant column",
}


def decimal(value: float) -> Fraction:
    """The decimal that a parameter was written as: 0.1 is one tenth, not the nearest binary fraction.

    >>> decimal(0.1)
    Fraction(1, 10)
    """
    return Fraction(repr(float(value)))


def width_regression(n: int) -> int:
    """m = ⌈log n⌉, the paper's width for the regression model."""
    return math.ceil(math.log(n))


def width_self(n: int) -> int:
    """m = max(⌈log(n/δ)⌉, 15), the paper's width for self-attention."""
    return max(math.ceil(math.log(n / DELTA)), 15)


def width_cross(n: int) -> int:
    """m = ⌈log(n/δ)⌉, the paper's width for cross-attention."""
    return math.ceil(math.log(n / DELTA))


def _require_parameters(setting: object, names: str) -> None:
    for name in names.split():
        value = getattr(setting, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise InputError(f"{name} must be a finite number of at least 0, got {value!r}; it is {_MEANINGS[name]}")


def _require_sizes(setting: "SelfAttention | CrossAttention | Regression") -> None:
    require_count("n", setting.n, "the number of tokens", least=2)
    require_count("m", setting.m, "the number of sign vectors y, the network's width")
    parse_attention(setting.attention)


def _require_blocks(n: int, d: int, spare: int) -> None:
    if n % (d - spare):
        raise InputError(
            f"n must be a multiple of d − {spare} = {d - spare}, got n = {n}; "
            f"the data sets repeat an identity of that size n/(d − {spare}) times"
        )


def _require_product(x: str) -> None:
    if x not in ("identity", "ones"):
        raise unknown_name("x", x, ["identity", "ones"])


@dataclass(frozen=True)
class SelfAttention:
    """Definition D.1: A₁ = A₂ = A₃ = √(log n) · [ a·e_{j₃} | b·I_{d−2} repeated t times | c·1 ], n = (d−2)·t.

    `a0` and `a1` are the a of D₀ and D₁; `x` is QKᵀ, the identity or all ones; `m` is the number of sign
    vectors; `attention` is the kind that is held against linear attention.  The threshold is (c + 0.1)·√(log n).
    """

    n: int
    d: int
    m: int
    a0: float
    a1: float
    b: float
    c: float
    x: str = "identity"
    attention: str = "exp"
    kind = "self"

    def __post_init__(self) -> None:
        _require_sizes(self)
        require_count("d", self.d, "the width of a token: one column for a, d − 2 for b, one for c", least=3)
        _require_blocks(self.n, self.d, 2)
        _require_product(self.x)
        _require_parameters(self, "a0 a1 b c")
        if self.b == 0 and self.c == 0:
            raise InputError("b and c must not both be 0; linear attention would divide by the sum of a row of zeros")

    @property
    def classes(self) -> int:
        """K: tokens j and j' are in one class when they carry the same row of the repeated identity."""
        return self.d - 2

    @property
    def threshold(self) -> Fraction:
        """τ / √(log n) = c + 1/10."""
        return decimal(self.c) + Fraction(1, 10)


@dataclass(frozen=True)
class CrossAttention:
    """Definition F.1: A₁ = log n · [ a·e_{j₂} | 1 ], A₂ = A₃ = [ e_{j₃} | I_{d−1} repeated t times ], n = (d−1)·t.

    Symbols as in `SelfAttention`.  The threshold is 0.9.
    """

    n: int
    d: int
    m: int
    a0: float
    a1: float
    x: str = "identity"
    attention: str = "exp"
    kind = "cross"

    def __post_init__(self) -> None:
        _require_sizes(self)
        require_count("d", self.d, "the width of a token: one column for a and d − 1 for the identity", least=2)
        _require_blocks(self.n, self.d, 1)
        _require_product(self.x)
        _require_parameters(self, "a0 a1")

    @property
    def classes(self) -> int:
        """K: tokens j and j' are in one class when they carry the same row of the repeated identity."""
        return self.d - 1

    @property
    def threshold(self) -> Fraction:
        """τ = 9/10."""
        return Fraction(9, 10)


@dataclass(frozen=True)
class Regression:
    """Definition 3.8: (Ax)ᵢ in [log n, 1.4·log n] for every i, except one of D₁ that is 4·log n.

    Here (Ax)ᵢ is uniform in its interval and a sign vector has length n.  The threshold is 1/4 (Lemma 5.2).
    """

    n: int
    m: int
    attention: str = "exp"
    kind = "regression"

    def __post_init__(self) -> None:
        _require_sizes(self)

    @property
    def threshold(self) -> Fraction:
        """τ = 1/4."""
        return Fraction(1, 4)


AttentionSetting = SelfAttention | CrossAttention
Setting = SelfAttention | CrossAttention | Regression


def strong(setting: Setting) -> Attention:
    """The attention kind that should tell the data sets apart; linear attention is the one that should not."""
    return parse_attention(setting.attention)


def special(setting: AttentionSetting, dataset: Dataset) -> Fraction:
    """The parameter a of the data set: a₀ of D₀, a₁ of D₁."""
    return decimal(setting.a1 if dataset == 1 else setting.a0)


_USED = {
    "self": ("x", "n", "d", "m", "a0", "a1", "b", "c"),
    "cross": ("x", "n", "d", "m", "a0", "a1"),
    "regression": ("n", "m"),
}


def build_setting(
    kind: str,
    *,
    attention: str = "exp",
    x: str | None = None,
    n: int | None = None,
    d: int | None = None,
    m: int | None = None,
    a0: float | None = None,
    a1: float | None = None,
    b: float | str | None = None,
    c: float | None = None,
) -> Setting:
    """A setting from what a user gave; what was left out is the paper's, what `kind` does not use is an error.

    `b` may be "tied": then b = 1 − c, as Definition D.1 asks.

    >>> build_setting("cross", d=21).m
    10
    """
    if kind not in _USED:
        raise unknown_name("kind", kind, _USED)
    given = {"x": x, "n": n, "d": d, "m": m, "a0": a0, "a1": a1, "b": b, "c": c}
    unused = [name for name, value in given.items() if value is not None and name not in _USED[kind]]
    if unused:
        raise InputError(f"{unused[0]} is not used by kind {kind}; leave it out (used: {', '.join(_USED[kind])})")
    if kind == "regression":
        tokens = 1000 if n is None else require_count("n", n, "the number of tokens", least=2)
        return Regression(tokens, width_regression(tokens) if m is None else m, attention)
    tokens = 200 if n is None else require_count("n", n, "the number of tokens", least=2)
    product = "identity" if x is None else x
    size0 = 0.01 if a0 is None else a0
    if kind == "cross":
        width = width_cross(tokens) if m is None else m
        return CrossAttention(
            tokens, 11 if d is None else d, width, size0, 3.0 if a1 is None else a1, product, attention
        )
    last = 0.8 if c is None else c
    return SelfAttention(
        tokens,
        22 if d is None else d,
        width_self(tokens) if m is None else m,
        size0,
        1.2 if a1 is None else a1,
        _block_size(b, last),
        last,
        product,
        attention,
    )


def _block_size(b: float | str | None, c: float) -> float:
    """The number b stands for: 0.2 when not given, 1 − c when tied."""
    if b is None:
        return 0.2
    if b == "tied":
        if not (isinstance(c, int | float) and math.isfinite(c) and 0 <= c <= 1):
            raise InputError(f"c must be between 0 and 1 when b is tied to it, got {c!r}; tied means b = 1 − c")
        return float(1 - decimal(c))
    try:
        return float(b)
    except (TypeError, ValueError) as error:
        raise InputError(f"b must be a number or the word tied, got {b!r}; tied means b = 1 − c") from error
