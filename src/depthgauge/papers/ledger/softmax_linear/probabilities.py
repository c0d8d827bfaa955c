"""Probabilities over random signs, and verdicts on statements that hold "with high probability"."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from flint import arb, ctx, fmpz

from depthgauge.base.format import number
from depthgauge.papers.ledger.claim import Observed
from depthgauge.papers.ledger.finding import Witness
from depthgauge.papers.ledger.softmax_linear.parts import NAMES
from depthgauge.papers.separation.decisions import OutputRow, Signs, decision_table, rows, sign_of_sum
from depthgauge.papers.separation.probability import exact
from depthgauge.papers.separation.settings import (
    AttentionSetting,
    CrossAttention,
    Dataset,
    ScoreMap,
    SelfAttention,
    decimal,
    parse_attention,
)

# --- Probabilities of a row of c, of one network, and of all four networks --------------------------------------------
# Every comparison ⟨c, σ⟩ ≥ τ is decided without rounding. The probabilities are computed in 96-bit arithmetic and
# returned as floats. The paper's width m = O(log(n/δ)) is read as m = ⌈8 log(n/δ)⌉ with δ = 1/10.

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


# --- Verdicts on "with high probability" statements, from probabilities computed for a list of n ---------------------
# In this list d − 2 (self-attention) or d − 1 (cross-attention) equals t, so d grows like √n and satisfies every
# condition that the paper puts on d. The paper's 1 − δ/poly(n) is read as 1 − δ/n with δ = 1/10. A verdict is about the
# values of n that were computed; it is not a proof for all large n.

CLASS_COUNTS = tuple(round(10 ** (k / 4)) for k in range(3, 17))
"""The numbers k of classes, with k tokens each: n = k² = 36, …, 10⁸."""
READING = (
    "Read with δ = 1/10, δ/n for δ/poly(n), and d growing like √n. Probabilities were computed for "
    f"{len(CLASS_COUNTS)} values of n from {CLASS_COUNTS[0] ** 2} to {CLASS_COUNTS[-1] ** 2:,}, and for further values "
    "between them to find the n from which on there is no violation."
)
_FLAT = 0.99
"""A failure probability that keeps this share over the last four values of n counts as not decreasing."""
_AHEAD = 8
"""The number of further k that are tried after the first success."""


def least_width_factor(event: NetworkEvent, cases: Sequence[Case], most: int = 64) -> int | None:
    """Return the least integer C such that m = ⌈C log(n/δ)⌉ gives Pr[F > 0] ≥ 1 − δ/n in all cases and for all n."""
    log_zero = [
        (k * k, math.log1p(-positive_probability(case.build(k), event.dataset, parse_attention(event.kind))))
        for case in cases
        for k in CLASS_COUNTS
    ]
    for factor in range(1, most + 1):
        if all(q * width(n, factor) <= math.log(allowed_failure(event, n)) for n, q in log_zero):
            return factor
    return None


@dataclass(frozen=True)
class FailureCurve:
    """The failure probability of an event for every n of the list, and the failure probability that is allowed.

    `first` is the index from which on the statement holds, and `start` is the number of classes k from which on no
    violation was found. Both are None if the last n is a violation.
    """

    case: Case
    dataset: Dataset | None
    failure: tuple[float, ...]
    limit: tuple[float, ...]
    first: int | None
    start: int | None

    @property
    def keeps_failing(self) -> bool:
        """Whether the statement fails at the last n and the failure probability does not decrease towards it."""
        return self.first is None and self.failure[-1] >= _FLAT * self.failure[-4]

    @property
    def ratio(self) -> float:
        """The largest failure/limit from `first` on."""
        return max(x / y for x, y in list(zip(self.failure, self.limit, strict=True))[self.first :])

    def remark(self) -> str:
        """Return a sentence: from which n on the statement holds, or how it fails."""
        parameters, last = self.case.text(self.dataset), f"{CLASS_COUNTS[-1] ** 2:,}"
        failure = probability_text(self.failure[-1])
        if self.start is None:
            return (
                f"{parameters}: violated at n = {last}, where the failure probability is {failure} and "
                f"{number(self.limit[-1])} is allowed."
            )
        start = f"{self.start**2:,}"
        return f"{parameters}: no violation from n = {start} on; the failure probability at n = {last} is {failure}."


def failure_curve(event: SignEvent, case: Case) -> FailureCurve:
    """Compute the curve of a case, and the least k from which on no violation was found."""
    failure = tuple(event.failure_probability(case.build(k)) for k in CLASS_COUNTS)
    limit = tuple(allowed_failure(event, k * k) for k in CLASS_COUNTS)
    bad = [step for step, (x, y) in enumerate(zip(failure, limit, strict=True)) if x > y]
    first = bad[-1] + 1 if bad else 0
    if first == len(failure):
        return FailureCurve(case, event.dataset, failure, limit, None, None)

    def holds_at(k: int) -> bool:
        return event.failure_probability(case.build(k)) <= allowed_failure(event, k * k)

    start = _start(holds_at, CLASS_COUNTS[first - 1], CLASS_COUNTS[first]) if first else CLASS_COUNTS[0]
    return FailureCurve(case, event.dataset, failure, limit, first, start)


def _start(holds_at: Callable[[int], bool], bad: int, top: int) -> int:
    """Bisect between a violation and a success, then move on while one of the next values is a violation.

    The parity of k makes the failure probability oscillate slightly, so the first success need not be the start.
    """
    while top - bad > 1:
        middle = (bad + top) // 2
        bad, top = (bad, middle) if holds_at(middle) else (middle, top)
    while True:
        failing = [k for k in range(top + 1, top + 1 + _AHEAD) if not holds_at(k)]
        if not failing:
            return top
        top = failing[-1] + 1


def probability_text(probability: float) -> str:
    """Return a probability with three digits; one that rounds to zero as `below 1e-15`."""
    return number(probability) if probability > 0 else "below 1e-15"


def allowed_failure(event: SignEvent, n: int) -> float:
    """Return the allowed failure probability: δ/n, or 9/10 for "with probability at least 1/10"."""
    return 0.9 if isinstance(event, RowEvent) and event.comparison == "reaches" else float(DELTA) / n


def judge_event(event: SignEvent, cases: Sequence[Case]) -> Observed:
    """Judge the statement that an event occurs with high probability.

    It holds if there is no violation from some n on in every case. It fails if in some case the failure probability is
    too large at the last n and does not decrease.
    """
    curves = [failure_curve(event, case) for case in cases]
    ordered = sorted(curves, key=lambda curve: curve.first is not None)
    remarks = (*(curve.remark() for curve in ordered), READING)
    seen = len(cases) * len(CLASS_COUNTS)
    failing = [curve for curve in curves if curve.keeps_failing]
    if failing:
        witness = _witness(event, failing[0])
        return Observed("fails", witness.ratio, seen, remarks, witness)
    if any(curve.first is None for curve in curves):
        return Observed("undecided", None, seen, remarks)
    return Observed("holds", max(curve.ratio for curve in curves), seen, remarks)


def _witness(event: SignEvent, curve: FailureCurve) -> Witness:
    """Return the last n: the claimed probability against the computed one."""
    claimed, computed = 1 - curve.limit[-1], 1 - curve.failure[-1]
    return Witness(
        instance=_instance(event, curve.case, CLASS_COUNTS[-1]),
        left=f"{number(claimed, 10)}, the least probability that is claimed",
        right=f"{number(computed, 7)}, the computed probability" if computed > 0 else "a probability below 1e-15",
        ratio=claimed / computed if computed > 0 else None,
        steps=event.steps(curve.case.build(CLASS_COUNTS[-1])),
    )


def _instance(event: SignEvent, case: Case, t: int) -> dict[str, Any]:
    setting = case.build(t)
    used = case.used(event.dataset)
    return {"n": setting.n, "d": setting.d, "t": t, **{name: decimal(value) for name, value in used.items()}}


def compare_readings(printed: Observed, intended: Observed, reading: str) -> Observed:
    """Return `misprint` if the printed reading fails and the intended one holds, else the result of the printed one."""
    if printed.verdict != "fails":
        return printed
    seen = printed.evaluations + intended.evaluations
    results = {"holds": "no violation in the cases computed", "fails": "violated too", "misprint": "violated too"}
    result = results.get(intended.verdict, "not decided by the cases computed")
    remarks = (f"As printed: {printed.remarks[0]}", f"{reading}: {result}.", *intended.remarks)
    verdict = "misprint" if intended.verdict == "holds" else printed.verdict
    return replace(printed, verdict=verdict, evaluations=seen, remarks=remarks)


def judge_equality(event: SignEvent, case: Case) -> Observed:
    """Judge whether the probability can *equal* 1 − δ/poly(n).

    Then poly(n) = δ/Pr[failure], and its degree log(poly(n))/log n must stay bounded. The statement fails if the degree
    more than doubles from each computed n to the next.
    """
    steps = CLASS_COUNTS[5::3][:3]
    failures = [event.failure_probability(case.build(k)) for k in steps]
    degrees = [
        math.log(float(DELTA) / x) / math.log(k * k) if x else math.inf for x, k in zip(failures, steps, strict=True)
    ]
    name = "log(δ/Pr[failure])/log n"
    if not all(0 < x < y / 2 for x, y in itertools.pairwise(degrees)):
        return Observed("undecided", None, len(steps), (f"{name} was not found to grow.",))
    sizes = ", ".join(f"{number(degree)} at n = {k * k:,}" for degree, k in zip(degrees, steps, strict=True))
    remark = (
        f"“=” requires poly(n) = δ/Pr[failure], and for a polynomial {name} tends to the degree. The computed values "
        f"keep growing: {sizes}."
    )
    witness = Witness(
        instance=_instance(event, case, steps[-1]),
        left=f"{number(degrees[-1], 7)}, {name}",
        right=f"{number(degrees[0], 7)}, the same at n = {steps[0] ** 2:,}",
        ratio=degrees[-1] / degrees[0],
        steps=event.steps(case.build(steps[-1])),
    )
    return Observed("fails", witness.ratio, len(steps), (remark,), witness)
