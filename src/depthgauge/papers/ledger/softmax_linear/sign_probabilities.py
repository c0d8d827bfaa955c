"""Probabilities over random signs on the attention data sets: of a row of c, of one network, of all four networks.

Every comparison ⟨c, σ⟩ ≥ τ is decided without rounding. The probabilities are computed in 96-bit arithmetic and
returned as floats. The paper's width m = O(log(n/δ)) is read as m = ⌈8 log(n/δ)⌉ with δ = 1/10.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from flint import arb, ctx, fmpz

from depthgauge.base.format import number
from depthgauge.papers.ledger.softmax_linear.dense_attention import NAMES
from depthgauge.papers.separation.decisions import decision_table
from depthgauge.papers.separation.exact import exact
from depthgauge.papers.separation.rows import OutputRow, Signs, rows
from depthgauge.papers.separation.score_maps import ScoreMap, parse_attention
from depthgauge.papers.separation.settings import AttentionSetting, CrossAttention, Dataset, SelfAttention
from depthgauge.papers.separation.settle import sign_of_sum

DELTA = Fraction(1, 10)
WIDTH = 8
_PRECISION = 96
_LAST_BITS = 2.0**-80

Comparison = Literal["reaches", "below", "within"]
RowChoice = Literal["special", "other", "every"]


@dataclass(frozen=True)
class Case:
    """Parameters of the data sets: a0, a1, and for self-attention b and c.

    `build` returns the setting with k classes of k tokens each, so n = k².
    """

    parameters: dict[str, float]
    build: Callable[[int], AttentionSetting]

    def used(self, dataset: Dataset | None) -> dict[str, float]:
        """Return the parameters that a data set has; those of both data sets for None."""
        return {name: value for name, value in self.parameters.items() if dataset is None or name != f"a{1 - dataset}"}

    def text(self, dataset: Dataset | None) -> str:
        """Return these parameters as text."""
        return ", ".join(f"{NAMES.get(name, name)} = {number(value, 6)}" for name, value in self.used(dataset).items())


def self_case(x: str = "ones", *, a0: float = 0.01, a1: float = 1.2, b: float = 0.2, c: float = 0.8) -> Case:
    """Return a case of self-attention; the defaults are the paper's parameters."""
    return Case({"a0": a0, "a1": a1, "b": b, "c": c}, lambda k: SelfAttention(k * k, k + 2, 1, a0, a1, b, c, x))


def cross_case(*, a0: float = 0.01, a1: float = 3.0) -> Case:
    """Return a case of cross-attention; the defaults are the paper's parameters."""
    return Case({"a0": a0, "a1": a1}, lambda k: CrossAttention(k * k, k + 1, 1, a0, a1))


@dataclass(frozen=True)
class RowEvent:
    """The event that ⟨c, σ⟩ satisfies a comparison for a row of c and a random sign vector σ.

    Attributes:
        which: The special row (j₃ for self-attention, j₂ for cross-attention), the other rows, or every row.
        comparison: `reaches` is ⟨c, σ⟩ ≥ τ, `below` is ⟨c, σ⟩ < τ, `within` is |⟨c, σ⟩| < τ.
        threshold: τ, in units of √(log n) for self-attention; the setting's own threshold if None.
    """

    dataset: Dataset
    kind: str
    which: RowChoice
    comparison: Comparison
    threshold: Fraction | None = None

    def failure_probability(self, setting: AttentionSetting) -> float:
        """Return the largest probability, over the rows, that the event does not occur."""
        return self._worst(setting)[0]

    def _worst(self, setting: AttentionSetting) -> tuple[float, OutputRow]:
        found = rows(setting, self.dataset)
        chosen = {"special": found[:1], "other": found[1:], "every": found}[self.which]
        return max(((self._row_failure(setting, row), row) for row in chosen), key=lambda pair: pair[0])

    def _row_failure(self, setting: AttentionSetting, row: OutputRow) -> float:
        above = probability_at_least(setting, row, parse_attention(self.kind), self.threshold or setting.threshold)
        return {"reaches": 1 - above, "below": above, "within": 2 * above}[self.comparison]

    def steps(self, setting: AttentionSetting) -> tuple[tuple[str, str], ...]:
        """Return the coefficients of the worst row, for the story of a witness."""
        _, worst = self._worst(setting)
        with ctx.workprec(_PRECISION):
            first, own, others, turn, last = (
                number(float(v.mid()), 7) for v in worst.coefficients(parse_attention(self.kind), setting.n)
            )
        unit = "/√(log n)" if isinstance(setting, SelfAttention) else ""
        named = [("σ₁", first), ("the sign of j₃'s class", own), ("the sum of the other classes' signs", others)]
        named += [("the sign of the row's own class, in addition", turn)] if float(turn) else []
        named += [("σ_d", last)] if isinstance(setting, SelfAttention) else []
        return (
            *((f"coefficient in ⟨c[j₀], σ⟩{unit} of {name}", value) for name, value in named),
            (f"τ{unit}", f"{self.threshold or setting.threshold}"),
        )


@dataclass(frozen=True)
class NetworkEvent:
    """The event that F = φ(Σ φ_τ(⟨c, y⟩)) with m random sign vectors y is positive, or that it is zero."""

    dataset: Dataset
    kind: str
    positive: bool

    def failure_probability(self, setting: AttentionSetting) -> float:
        """Return the probability that the event does not occur, with m = ⌈8 log(n/δ)⌉."""
        positive = positive_probability(setting, self.dataset, parse_attention(self.kind))
        log_zero = math.log1p(-positive) * width(setting.n)
        return math.exp(log_zero) if self.positive else -math.expm1(log_zero)

    def steps(self, setting: AttentionSetting) -> tuple[tuple[str, str], ...]:
        """Return m and the probability for one sign vector."""
        positive = number(positive_probability(setting, self.dataset, parse_attention(self.kind)), 7)
        return ("m = ⌈8 log(n/δ)⌉", str(width(setting.n))), ("the probability that one y makes F > 0", positive)


@dataclass(frozen=True)
class SuccessEvent:
    """The event E_success for one y: F_exp(D₁) > 0, and F_lin(D₁), F_exp(D₀), F_lin(D₀) are all zero."""

    dataset: None = None

    def failure_probability(self, setting: AttentionSetting) -> float:
        """Return the probability that the event does not occur, with m = ⌈8 log(n/δ)⌉."""
        return 1 - exact(replace(setting, m=width(setting.n))).success

    def steps(self, setting: AttentionSetting) -> tuple[tuple[str, str], ...]:
        """Return the probabilities of the four conditions."""
        parts = exact(replace(setting, m=width(setting.n))).parts
        names = ("F_exp(D₁) > 0", "F_lin(D₁) = 0", "F_exp(D₀) = 0", "F_lin(D₀) = 0")
        return tuple((f"Pr[{name}]", number(part, 7)) for name, part in zip(names, parts, strict=True))


SignEvent = RowEvent | NetworkEvent | SuccessEvent
"""An event over random signs. Its `dataset` is None if it involves both data sets."""


def width(n: int, factor: int = WIDTH) -> int:
    """m = ⌈C log(n/δ)⌉, where C is `factor`."""
    return math.ceil(factor * math.log(n / DELTA))


def probability_at_least(setting: AttentionSetting, row: OutputRow, kind: ScoreMap, tau: Fraction) -> float:
    """P(⟨c_row, σ⟩ ≥ τ) over random signs σ; every comparison is decided without rounding.

    For each pattern of the named signs, ⟨c, σ⟩ increases with the number p of positive signs among the remaining
    classes. The least p with ⟨c, σ⟩ ≥ τ is found by a search that starts at a guess in floats.
    """
    turned = any(group.turn for group in row.groups)
    remaining = setting.classes - 1 - turned
    both = (-1, 1)
    patterns = list(itertools.product(both, both, both if setting.kind == "self" else (1,), both if turned else (0,)))
    total = arb(0)
    with ctx.workprec(_PRECISION):
        c = [float(value.mid()) for value in row.coefficients(kind, setting.n)]
        for first, own, last, turn in patterns:
            short = float(tau) - c[0] * first - c[1] * own - c[2] * (turn - remaining) - c[3] * turn - c[4] * last
            guess = short / (2 * c[2]) if c[2] > 0 else 0.0
            fewest = Signs(first, own, turn - remaining, turn, last)
            reaches = partial(_reaches, setting.n, row, kind, tau, fewest)
            total += _tail(remaining, _least_count(reaches, remaining, guess))
        return float((total / len(patterns)).mid())


def _reaches(n: int, row: OutputRow, kind: ScoreMap, tau: Fraction, fewest: Signs, p: int) -> bool:
    """Return whether ⟨c_row, σ⟩ ≥ τ when p of the remaining classes have a positive sign."""
    signs = fewest._replace(others=fewest.others + 2 * p)
    return sign_of_sum(kind, n, row.excess(signs, tau)) >= 0


def _least_count(reaches: Callable[[int], bool], top: int, guess: float) -> int:
    """Return the least p in 0, …, top for which the monotone predicate `reaches` is true, or top + 1 if there is none.

    The guess affects the speed only: strides from it, doubled each time, bracket the answer, and bisection finds it.
    """
    low, high = 0, top + 1
    at, stride = math.ceil(min(max(guess, 0), top)), 1
    while low < high:
        inside = min(max(at, low), high - 1)
        if reaches(inside):
            high, at = inside, inside - stride
        else:
            low, at = inside + 1, inside + stride
        stride *= 2
        if not low <= at < high:
            at = (low + high) // 2
    return low


def _tail(r: int, p: int) -> Any:
    """P(Bin(r, ½) ≥ p) = Σ_{k ≥ p} C(r, k)/2^r, summed from k = p upwards until a term is below 2⁻⁸⁰ of the sum."""
    if p <= 0 or p > r:
        return arb(int(p <= 0))
    with ctx.workprec(_PRECISION):
        if 2 * p <= r:
            return 1 - _tail(r, r - p + 1)
        total = term = arb(fmpz.bin_uiui(r, p)) / arb(2) ** r
        while p < r and term > total * _LAST_BITS:
            term = term * (r - p) / (p + 1)
            total, p = total + term, p + 1
        return total


def positive_probability(setting: AttentionSetting, dataset: Dataset, kind: ScoreMap) -> float:
    """P(⟨c[j₀], y⟩ > τ for some row j₀) for one random sign vector y, from the table of all sign patterns."""
    counts = decision_table(setting, dataset, kind).sum(axis=(0, 1, 2))
    edges = [0, *(p for p in range(1, len(counts)) if counts[p] != counts[p - 1])]
    total = arb(0)
    with ctx.workprec(_PRECISION):
        for p in edges:
            before = int(counts[p - 1]) if p else 0
            total += (int(counts[p]) - before) * _tail(len(counts) - 1, p)
        return float((total / 8).mid())
