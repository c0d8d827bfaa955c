"""Exact probabilities over random signs on the attention data sets: of a row of c, of a network, of all four networks.

The paper's width m = O(log(n/δ)) is read as m = ⌈8 log(n/δ)⌉ with δ = 1/10.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, Literal

from flint import arb, ctx, fmpz

from depthgauge._format import number
from depthgauge.separation.decisions import decision_table
from depthgauge.separation.exact import exact
from depthgauge.separation.rows import Row, Signs, rows
from depthgauge.separation.score_maps import Attention, parse_attention
from depthgauge.separation.settings import AttentionSetting, CrossAttention, Dataset, SelfAttention
from depthgauge.separation.settle import sign_of_sum

DELTA = Fraction(1, 10)
WIDTH = 8
_PRECISION = 96
_LAST_BITS = 2.0**-80

Event = Literal["reaches", "below", "within"]
Which = Literal["special", "other", "every"]


@dataclass(frozen=True)
class Case:
    """Parameters of the data sets, and the setting that they make with a number of classes."""

    parameters: dict[str, float]
    build: Callable[[int], AttentionSetting]

    def used(self, dataset: Dataset | None) -> dict[str, float]:
        """The parameters that a data set has; of both, where none is named."""
        return {name: value for name, value in self.parameters.items() if dataset is None or name != f"a{1 - dataset}"}

    def text(self, dataset: Dataset | None) -> str:
        """The same in words."""
        letters = {"a0": "a₀", "a1": "a₁"}
        return ", ".join(
            f"{letters.get(name, name)} = {number(value, 6)}" for name, value in self.used(dataset).items()
        )


def self_case(x: str = "ones", *, a0: float = 0.01, a1: float = 1.2, b: float = 0.2, c: float = 0.8) -> Case:
    """Self-attention; the paper's own parameters where none are given."""
    return Case({"a0": a0, "a1": a1, "b": b, "c": c}, lambda k: SelfAttention(k * k, k + 2, 1, a0, a1, b, c, x))


def cross_case(*, a0: float = 0.01, a1: float = 3.0) -> Case:
    """Cross-attention; the paper's own parameters where none are given."""
    return Case({"a0": a0, "a1": a1}, lambda k: CrossAttention(k * k, k + 1, 1, a0, a1))


@dataclass(frozen=True)
class RowChance:
    """Of rows of c on a data set, the chance that a random sign vector does otherwise than the event says.

    reaches: ⟨c, σ⟩ ≥ τ; below: ⟨c, σ⟩ < τ; within: |⟨c, σ⟩| < τ. `threshold` is τ in units of √(log n) (self) or 1
    (cross), the setting's own where none is given. The special row is j₃ (self) or j₂ (cross).
    """

    dataset: Dataset
    kind: str
    which: Which
    event: Event
    threshold: Fraction | None = None

    def contrary(self, setting: AttentionSetting) -> float:
        """The largest chance of the contrary among the rows."""
        return self._worst(setting)[0]

    def _worst(self, setting: AttentionSetting) -> tuple[float, Row]:
        found = rows(setting, self.dataset)
        chosen = {"special": found[:1], "other": found[1:], "every": found}[self.which]
        return max(((self._contrary(setting, row), row) for row in chosen), key=lambda pair: pair[0])

    def _tau(self, setting: AttentionSetting) -> Fraction:
        return self.threshold or setting.threshold

    def _contrary(self, setting: AttentionSetting, row: Row) -> float:
        above = at_least(setting, row, parse_attention(self.kind), self._tau(setting))
        return {"reaches": 1 - above, "below": above, "within": 2 * above}[self.event]

    def steps(self, setting: AttentionSetting) -> tuple[tuple[str, str], ...]:
        """The worst row's coefficients, for the reader of a witness."""
        _, worst = self._worst(setting)
        with ctx.workprec(_PRECISION):
            first, own, others, turn, last = (
                number(float(v.mid()), 7) for v in worst.coefficients(parse_attention(self.kind), setting.n)
            )
        unit = " over √(log n)" if isinstance(setting, SelfAttention) else ""
        named = [("σ₁", first), ("the sign of j₃'s class", own), ("the sum of the other classes' signs", others)]
        named += [("the sign of the row's own class besides", turn)] if float(turn) else []
        named += [("σ_d", last)] if isinstance(setting, SelfAttention) else []
        return (
            *((f"what ⟨c[j₀], σ⟩{unit} has of {name}", value) for name, value in named),
            (f"τ{unit}", f"{self._tau(setting)}"),
        )


@dataclass(frozen=True)
class NetworkChance:
    """The chance that F = φ(Σ φ_τ(⟨c, y⟩)) with m random sign vectors is positive, or that it is zero.

    `positive` is what the statement says of F; `contrary` is the chance of the opposite.
    """

    dataset: Dataset
    kind: str
    positive: bool

    def contrary(self, setting: AttentionSetting) -> float:
        """The chance of the contrary with m = ⌈8 log(n/δ)⌉."""
        quiet = math.log1p(-fires(setting, self.dataset, parse_attention(self.kind))) * width(setting.n)
        return math.exp(quiet) if self.positive else -math.expm1(quiet)

    def steps(self, setting: AttentionSetting) -> tuple[tuple[str, str], ...]:
        """What the chance is made of."""
        chance = fires(setting, self.dataset, parse_attention(self.kind))
        return (("m = ⌈8 log(n/δ)⌉", str(width(setting.n))), ("the chance that one y makes F > 0", number(chance, 7)))


@dataclass(frozen=True)
class SuccessChance:
    """The chance that E_success does not happen: F_exp(D₁) > 0, all of F_lin(D₁), F_exp(D₀), F_lin(D₀) zero, one y."""

    dataset: None = None

    def contrary(self, setting: AttentionSetting) -> float:
        """The chance of the contrary with m = ⌈8 log(n/δ)⌉."""
        return 1 - exact(replace(setting, m=width(setting.n))).success

    def steps(self, setting: AttentionSetting) -> tuple[tuple[str, str], ...]:
        """The chances of the four conditions."""
        parts = exact(replace(setting, m=width(setting.n))).parts
        names = ("F_exp(D₁) > 0", "F_lin(D₁) = 0", "F_exp(D₀) = 0", "F_lin(D₀) = 0")
        return tuple((f"Pr[{name}]", number(part, 7)) for name, part in zip(names, parts, strict=True))


def width(n: int, factor: int = WIDTH) -> int:
    """m = ⌈C log(n/δ)⌉."""
    return math.ceil(factor * math.log(n / DELTA))


def at_least(setting: AttentionSetting, row: Row, kind: Attention, tau: Fraction) -> float:
    """P(⟨c_row, σ⟩ ≥ τ) over random signs σ, every comparison settled without rounding.

    For each pattern of the named signs, ⟨c, σ⟩ grows with the number p of + among the remaining classes; the least p
    that does is found from a guess in floats.
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
            total += _tail(remaining, _least(partial(_over, setting.n, row, kind, tau, fewest), remaining, guess))
        return float((total / len(patterns)).mid())


def _over(n: int, row: Row, kind: Attention, tau: Fraction, fewest: Signs, p: int) -> bool:
    """Whether ⟨c_row, σ⟩ ≥ τ when p more of the remaining classes have sign + than with the fewest."""
    signs = replace(fewest, others=fewest.others + 2 * p)
    return sign_of_sum(kind, n, row.excess(signs, tau)) >= 0


def _least(over: Callable[[int], bool], top: int, guess: float) -> int:
    """The least p in 0, …, top at which `over` is true, top + 1 if it is nowhere; it is true from there on.

    The guess only saves steps: strides from it, doubled each time, enclose the answer, and halving finds it.
    """
    low, high = 0, top + 1
    at, stride = math.ceil(min(max(guess, 0), top)), 1
    while low < high:
        inside = min(max(at, low), high - 1)
        if over(inside):
            high, at = inside, inside - stride
        else:
            low, at = inside + 1, inside + stride
        stride *= 2
        if not low <= at < high:
            at = (low + high) // 2
    return low


@lru_cache(maxsize=4096)
def _tail(r: int, p: int) -> Any:
    """P(Bin(r, ½) ≥ p) = Σ_{k ≥ p} C(r, k)/2^r, from the middle outwards; what is left off is below the last bits."""
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


@lru_cache(maxsize=256)
def fires(setting: AttentionSetting, dataset: Dataset, kind: Attention) -> float:
    """The chance that one y lifts some row above τ, from the table of decisions for every pattern of signs."""
    counts = decision_table(setting, dataset, kind).sum(axis=(0, 1, 2))
    edges = [0, *(p for p in range(1, len(counts)) if counts[p] != counts[p - 1])]
    total = arb(0)
    with ctx.workprec(_PRECISION):
        for p in edges:
            before = int(counts[p - 1]) if p else 0
            total += (int(counts[p]) - before) * _tail(len(counts) - 1, p)
        return float((total / 8).mid())
