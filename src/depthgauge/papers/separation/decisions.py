"""Whether a network separates a pair of data sets: random draws of the data, and decisions that are exact.

With decision tables, self-attention and cross-attention take O(d·m) operations per model.
"""

import hashlib
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from math import floor, lcm, log
from typing import Any, NamedTuple

import numpy as np
from flint import arb, ctx, fmpz
from jaxtyping import Bool, Float, Int, Int8, UInt64

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import require_seed
from depthgauge.papers.separation.settings import (
    LIN,
    AttentionSetting,
    Dataset,
    Regression,
    ScoreMap,
    SelfAttention,
    Setting,
    decimal,
    special,
    strong,
    to_arb,
    weights,
)

# --- Random data sets and sign vectors from a counter-based random number generator ----------------------------------
# The key of the generator is a hash of the task, its parameters and the seed. Model r uses a fixed block of counters,
# so every model can be drawn alone and results do not depend on how the work is divided. The attention kind is not part
# of the key: all kinds are evaluated on the same models.

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


# --- The distinct rows of the attention output, each as a few groups of keys with equal scores -----------------------
# The class of a token is its row of the repeated identity; κ is the class of j₃. For a row of c and a sign vector y,
# ⟨c, y⟩ depends only on y₁, y_κ, the sum S of the signs of the other K − 1 classes, the sign σ of the row's own class
# if that is not κ, and y_d (self-attention only). Values are divided by √(log n) for self-attention and scores by log
# n, so all numbers in this file are rational.

_ZERO = Fraction(0)


class Signs(NamedTuple):
    """The statistics of y on which ⟨c, y⟩ depends: y₁ (first), y_κ (own), S (others), σ (turn) and y_d (last)."""

    first: int
    own: int
    others: int
    turn: int
    last: int


@dataclass(frozen=True)
class Group:
    """Keys to which a row gives the same score: their number, their score q, and Σ ⟨(A₃)_j, y⟩ over them.

    The sum is first·y₁ + own·y_κ + others·S + turn·σ + last·y_d.
    """

    count: int
    score: Fraction
    first: Fraction = _ZERO
    own: Fraction = _ZERO
    others: Fraction = _ZERO
    turn: Fraction = _ZERO
    last: Fraction = _ZERO

    @property
    def factors(self) -> tuple[Fraction, ...]:
        """The factors of the statistics, in the order of `Signs`."""
        return self.first, self.own, self.others, self.turn, self.last


@dataclass(frozen=True)
class OutputRow:
    """One distinct row of c. The groups partition the n keys."""

    groups: tuple[Group, ...]

    def coefficients(self, kind: ScoreMap, n: int) -> list[Any]:
        """Return the coefficients of ⟨c, y⟩ on (y₁, y_κ, S, σ, y_d) as arb: Σ_g k(q_g)·sum_g / Σ_g k(q_g)·count_g."""
        ws = weights(kind, n, [group.score for group in self.groups])
        normaliser = sum((w * group.count for w, group in zip(ws, self.groups, strict=True)), arb(0))
        columns = zip(*(group.factors for group in self.groups), strict=True)
        return [
            sum((w * to_arb(v) for w, v in zip(ws, column, strict=True) if v), arb(0)) / normaliser
            for column in columns
        ]

    def excess(self, signs: Signs, threshold: Fraction) -> list[tuple[Fraction, Fraction]]:
        """Return terms (r, q) such that Σ r·k(q·log n) has the sign of ⟨c, y⟩ − τ."""
        return [
            (sum(map(operator.mul, group.factors, signs), _ZERO) - group.count * threshold, group.score)
            for group in self.groups
        ]


def rows(setting: AttentionSetting, dataset: Dataset) -> tuple[OutputRow, ...]:
    """Return the distinct rows of c = f·A₃V on the data set. Rows of classes other than κ differ only in σ."""
    return tuple(OutputRow(tuple(g for g in groups if g.count)) for groups in _rows(setting, dataset))


def _rows(setting: AttentionSetting, dataset: Dataset) -> Iterator[list[Group]]:
    a, n, t = special(setting, dataset), setting.n, setting.n // setting.classes
    one = Fraction(1)
    first, b, c = (
        (a, decimal(setting.b), decimal(setting.c)) if isinstance(setting, SelfAttention) else (one, one, _ZERO)
    )

    def groups(special_key: Fraction, same_class: Fraction, other_classes: Fraction) -> list[Group]:
        """Return the groups of a row from its scores of j₃, of the other keys of class κ, and of the other classes."""
        return [
            Group(1, special_key, first=first, own=b, last=c),
            Group(t - 1, same_class, own=(t - 1) * b, last=(t - 1) * c),
            Group(n - t, other_classes, others=t * b, last=(n - t) * c),
        ]

    if setting.x == "ones":  # u_{ij} = (row sum of i)·(row sum of j)
        key = first + b + c, b + c
        plain = b + c if isinstance(setting, SelfAttention) else Fraction(setting.d - 1)
        for query in (a + plain, plain):
            yield groups(query * key[0], query * key[1], query * key[1])
        return
    if not isinstance(setting, SelfAttention):
        yield groups(1 + a, one, one)
        yield groups(one, one, one)
        return
    near, far = b * b + c * c, c * c
    yield groups(a * a + near, near, far)
    if t > 1:
        yield groups(near, near, far)
    if setting.classes > 1:
        own_class = Group(t, near, turn=t * b, last=t * c)
        rest = Group(n - 2 * t, far, others=t * b, turn=-t * b, last=(n - 2 * t) * c)
        yield [*groups(far, far, far)[:2], own_class, rest]


# --- Exact decisions at the threshold: the sign of Σ r·k(q·log n) for rational r and q -------------------------------
# Up to a positive factor, ⟨c_{j₀}, y⟩ − τ has this form: r is the contribution of a key minus τ, and q is its score
# divided by log n. The sign is computed with interval arithmetic (arb) of increasing precision. This terminates unless
# the sum is zero, and a zero sum is recognised algebraically:
#
# - lin: The sum is log n · Σ r·q, a rational number times log n.
# - poly:g: The sum is a polynomial in log n with rational coefficients. log n is transcendental for n ≥ 2
#   (Lindemann), so the sum is zero only if all coefficients are zero.
# - exp: The sum is Σ r·n^q. Let n = v^k where v is not a perfect power. For every N the numbers v^{i/N}, 0 ≤ i < N, are
#   linearly independent over the rationals (x^N − v is irreducible). So the sum is zero only if, for each class of
#   exponents kq that differ by integers, the terms of the class sum to zero.

_FIRST_PRECISION = 128
_MODERATE_BITS = 10_000


def sign_of_sum(kind: ScoreMap, n: int, terms: Iterable[tuple[Fraction, Fraction]]) -> int:
    """Return the sign (−1, 0 or 1) of Σ r·k(q·log n) over the (r, q) of `terms`, with all q ≥ 0 and n ≥ 2.

    >>> from depthgauge.papers.separation.settings import EXP
    >>> sign_of_sum(EXP, 4, [(Fraction(2), Fraction(0)), (Fraction(-1), Fraction(1, 2))])  # 2·4⁰ − 4^½
    0
    """
    merged: defaultdict[Fraction, Fraction] = defaultdict(Fraction)
    for coefficient, score in terms:
        merged[score] += coefficient
    nonzero = {score: coefficient for score, coefficient in merged.items() if coefficient}
    if not nonzero:
        return 0
    if kind.family == "lin":
        rational = sum((r * q for q, r in nonzero.items()), Fraction(0))
        return (rational > 0) - (rational < 0)
    precision = _FIRST_PRECISION
    while True:
        with ctx.workprec(precision):
            pairs = zip(nonzero.values(), weights(kind, n, list(nonzero)), strict=True)
            total = sum((to_arb(r) * w for r, w in pairs), arb(0))  # up to a positive factor
        if total > 0:
            return 1
        if total < 0:
            return -1
        if precision == _FIRST_PRECISION:  # the sign is undecided: test for zero
            if kind.family == "exp":
                n, nonzero = _combined(n, nonzero)
            if _zero_polynomial(kind.degree, nonzero) if kind.family == "poly" else _zero_powers(n, nonzero):
                return 0
        precision *= 2


def _zero_polynomial(degree: int, nonzero: dict[Fraction, Fraction]) -> bool:
    """Return whether Σ r·qⁱ = 0 for all i ≤ g. Divided by i!, these are the coefficients of the polynomial in log n."""
    powers = dict.fromkeys(nonzero, Fraction(1))
    for _ in range(degree + 1):
        if sum((r * powers[q] for q, r in nonzero.items()), Fraction(0)):
            return False
        powers = {q: power * q for q, power in powers.items()}
    return True


def _by_fraction(nonzero: dict[Fraction, Fraction]) -> dict[Fraction, dict[int, Fraction]]:
    """Group the terms by the fractional part of the exponent, then by its integer part."""
    found: defaultdict[Fraction, dict[int, Fraction]] = defaultdict(dict)
    for exponent, r in nonzero.items():
        whole = floor(exponent)
        found[exponent - whole][whole] = r
    return found


def _combined(n: int, nonzero: dict[Fraction, Fraction]) -> tuple[int, dict[Fraction, Fraction]]:
    """Rewrite Σ r·n^q as Σ r'·v^e with n = v^k, and merge terms whose exponents differ by a moderate integer.

    Terms that cancel exactly disappear for exponents of any size. Interval arithmetic can then decide the rest.
    """
    v, k = _primitive_root(n)
    combined: dict[Fraction, Fraction] = {}
    for fraction, coefficients in _by_fraction({k * q: r for q, r in nonzero.items()}).items():
        base = min(coefficients)
        for whole in sorted(coefficients):
            if (whole - base) * v.bit_length() > _MODERATE_BITS:
                base = whole
            at = base + fraction
            combined[at] = combined.get(at, Fraction(0)) + coefficients[whole] * v ** (whole - base)
    return v, {exponent: r for exponent, r in combined.items() if r}


def _zero_powers(v: int, nonzero: dict[Fraction, Fraction]) -> bool:
    """Return whether Σ r·v^e = 0, where v is not a perfect power. Each class of exponents must sum to zero."""
    return all(_zero_at_integer(v, coefficients) for coefficients in _by_fraction(nonzero).values())


def _zero_at_integer(v: int, coefficients: dict[int, Fraction]) -> bool:
    """Return whether Σ r·vᵉ = 0 for integer e. From the lowest power up, the partial sum must be divisible by v."""
    common = lcm(*(r.denominator for r in coefficients.values()))
    carry, at = 0, min(coefficients)
    for exponent in sorted(coefficients):
        for _ in range(exponent - at):
            if carry == 0:
                break
            carry, rest = divmod(carry, v)
            if rest:
                return False
        at = exponent
        carry += int(coefficients[exponent] * common)
    return carry == 0


@lru_cache(maxsize=1024)
def _primitive_root(n: int) -> tuple[int, int]:
    """Return (v, k) with n = v^k and k as large as possible.

    >>> _primitive_root(64), _primitive_root(200)
    ((2, 6), (200, 1))
    """
    for power in range(n.bit_length(), 1, -1):
        root = int(fmpz(n).root(power))
        if root >= 2 and root**power == n:
            return root, power
    return n, 1


# --- The regression model, batched. Decisions near the threshold are made in exact arithmetic ------------------------

_SINGLE_UP_TO = 100_000
"""The largest n for which the first pass uses single precision. It leaves few decisions undecided."""

_INTERVAL = Fraction(4, 10)
_PEAK = Fraction(4)


def regression_conditions(setting: Regression, draws: RegressionDraws) -> Bool[np.ndarray, "models 4"]:
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
            y_first, y_last, y_own, p = index.tolist()
            signs_at = Signs(2 * y_first - 1, 2 * y_own - 1, 2 * p - others, 1 if p > 0 else -1, 2 * y_last - 1)
            excess = row.excess(signs_at, setting.threshold)
            positive[tuple(index)] = sign_of_sum(kind, setting.n, excess) > 0
    positive.setflags(write=False)
    return positive


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
