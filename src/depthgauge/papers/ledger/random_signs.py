"""The statements of paper B about random signs on the attention data sets: Lemmas D.4 to F.16 and the theorems."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
from flint import arb, ctx, fmpz

from depthgauge.base.format import number
from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.attention_lemmas import CONTRADICTION, IMPOSSIBLE, SETUPS
from depthgauge.papers.ledger.claim import Claim, Computation, Evaluation, Inequality, Instance, Observed, Size, Witness
from depthgauge.papers.ledger.lemma_parts import NAMES, DenseAttention
from depthgauge.papers.ledger.search import search
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


def least_width_factor(event: NetworkEvent, cases: Sequence[Case]) -> int | None:
    """Return the least integer C such that m = ⌈C log(n/δ)⌉ gives Pr[F > 0] ≥ 1 − δ/n in all cases and for all n."""
    log_zero = [
        (k * k, math.log1p(-positive_probability(case.build(k), event.dataset, parse_attention(event.kind))))
        for case in cases
        for k in CLASS_COUNTS
    ]
    for factor in range(1, 65):
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


_C_UNIT = 0.99498743710662
"""√(1 − b²) for b = 0.1, rounded to 14 decimals."""
D_1 = (self_case(), self_case(a1=0.7, b=0.9, c=0.1), self_case(a1=0.7, b=0.1, c=0.9))
D_0 = (self_case(), self_case(a0=0.09, b=0.9, c=0.1), self_case(a0=0.09, b=0.1, c=0.9))
E_PRINTED = (self_case("identity"), self_case("identity", a1=0.7, b=0.1, c=0.9))
E_INTENDED = (self_case("identity", a1=1.0, b=0.1, c=_C_UNIT), self_case("identity"))
E_SQUARES = (E_INTENDED[0], self_case("identity", a1=1.2, b=0.1, c=_C_UNIT))
F_1 = (cross_case(), cross_case(a1=1.01))
F_0 = (cross_case(), cross_case(a0=0.09))

_SELF = "Definition D.1 ({}), QKᵀ {}, d growing like √n"
_CROSS = "Definition F.1 ({}), QKᵀ = I_d, d growing like √n"
HYPOTHESES = {
    "D1": _SELF.format("b + c = 1, b and c ≥ 1/10, a₁ ≥ 7/10", "all ones"),
    "D0": _SELF.format("b + c = 1, b and c ≥ 1/10, 0 < a₀ < 1/10", "all ones"),
    "E": _SELF.format("a₁ ≥ 7/10 as printed, a₁ ≥ 1 in Lemma E.1", "= I_d"),
    "E4": _SELF.format("a₁ ≥ 1, b² + c² = 1, 0 < b < 1/5", "= I_d"),
    "F1": _CROSS.format("a₁ > 1"),
    "F0": _CROSS.format("0 < a₀ < 1/10"),
}
_BOTH: tuple[tuple[str, RowChoice], ...] = (("1", "special"), ("2", "other"))
_COMPARISONS = {"reaches": "⟨{c}, σ⟩ ≥ {tau}", "below": "⟨{c}, σ⟩ < {tau}", "within": "|⟨{c}, σ⟩| < {tau}"}


def _row_claim(
    id: str, event: RowEvent, where: str, run: Callable[[], Observed], sign: str = "≥", **more: Any
) -> Claim:
    """A part about the special row or the other rows of a data set; `where` is the key of the hypotheses."""
    name, check = f"Lemma {id[:-2]}, Part {id[-1]}", Computation(run)
    return Claim(f"B.{id}", name, _statement(event, sign), check, HYPOTHESES[where], **more)


def _statement(event: RowEvent, sign: str = "≥") -> str:
    tau = "(c + 0.1)√(log n)" if event.threshold is None else str(float(event.threshold))
    described = _COMPARISONS[event.comparison].format(c=f"c_{event.kind}[j₀]", tau=tau)
    rows = "= j₃" if event.which == "special" else "≠ j₃"
    return f"for j₀ {rows}: Pr[{described}] {sign} " + ("1/10" if event.comparison == "reaches" else "1 − δ/poly(n)")


def _row(id: str, event: RowEvent, cases: Sequence[Case], where: str, **more: Any) -> Claim:
    """A part about a self-attention data set, as printed."""
    return _row_claim(id, event, where, lambda: judge_event(event, cases), **more)


def _self_rows(id: str, dataset: Dataset, kind: str, cases: Sequence[Case]) -> Iterable[Claim]:
    """Both parts of Lemmas D.8, D.12 and D.16."""
    for part, which in _BOTH:
        yield _row(f"{id}.{part}", RowEvent(dataset, kind, which, "within"), cases, f"D{dataset}")


def _cross_row(id: str, event: RowEvent, cases: Sequence[Case], reading: str) -> Claim:
    """A part of Lemmas F.4, F.8, F.12 and F.16, which are printed with j₃ for j₂ and “=” for “≥”.

    Row j₃ may or may not be row j₂, and so may the rows other than j₃. The printed reading therefore covers every row.
    """
    printed = replace(event, which="every")

    def run() -> Observed:
        literal = judge_event(printed, cases)
        if literal.verdict == "holds":
            literal = judge_equality(printed, cases[0])
        return compare_readings(literal, judge_event(event, cases), reading)

    note = "“=” is printed in place of “≥”, and j₃ in place of j₂."
    return _row_claim(id, event, f"F{event.dataset}", run, "=", note=note)


_HALF = Fraction(1, 2)
_J2 = "As intended, with j₂ in place of j₃ and ≥ in place of ="


def _cross_rows(id: str, dataset: Dataset, kind: str, cases: Sequence[Case], reading: str = _J2) -> Iterable[Claim]:
    """Both parts of Lemmas F.8, F.12 and F.16."""
    for part, which in _BOTH:
        yield _cross_row(f"{id}.{part}", RowEvent(dataset, kind, which, "within", _HALF), cases, reading)


def _network(
    id: str,
    event: NetworkEvent,
    cases: Sequence[Case],
    where: str,
    printed: Callable[[], Observed] | None = None,
    reading: str = "",
    note: str = "",
    printed_dataset: Dataset | None = None,
) -> Claim:
    """A theorem: F > 0 or F = 0 with probability at least 1 − δ/poly(n), as `event` says for the intended statement.

    `where` is the key of the hypotheses. If the printed statement differs, `printed` judges it, `reading` is how the
    intended statement differs from it, and `printed_dataset` is its data set.
    """
    dataset = event.dataset if printed_dataset is None else printed_dataset

    def run() -> Observed:
        intended = judge_event(event, cases)
        if event.positive:
            remark = f"The least integer C for which m = ⌈C log(n/δ)⌉ suffices is {least_width_factor(event, cases)}."
            intended = replace(intended, remarks=(*intended.remarks, remark))
        return intended if printed is None else compare_readings(printed(), intended, reading)

    statement = f"for D{'₀₁'[dataset]}: Pr[F_{event.kind} {'> 0' if event.positive else '= 0'}] ≥ 1 − δ/poly(n)"
    hypothesis = f"{HYPOTHESES[where]}, m = O(log(n/δ))"
    return Claim(f"B.{id}", f"Theorem {id}", statement, Computation(run), hypothesis, note=note)


def _refuted(inequality: Inequality, id: str, left: str, right: str, remark: str) -> Observed:
    """Search for a counterexample to an inequality whose two sides have these names."""
    found = search(inequality, id)
    witness = found.witness
    named = witness and replace(witness, left=f"{witness.left}, {left}", right=f"{witness.right}, {right}")
    return replace(found, remarks=(remark,), witness=named)


def _displayed() -> Inequality:
    """Theorem D.17 displays the network of c_exp and then makes a statement about F_lin: compare the two."""

    def evaluate(ar: Arithmetic, *, y: Value, **given: Value) -> Evaluation:
        steps, results = dict[str, Value](), []
        for kind in ("lin", "exp"):
            att = DenseAttention(ar, SETUPS[kind, 0], "a0", **given)
            over = att.c @ y - (att.c_parameter + ar.number("1/10")) * att.root
            steps |= {f"c_{kind}": att.c, f"⟨c_{kind}[j₀], y⟩ − τ": over}
            results.append(((over + abs(over)) / 2).sum())
        return steps, results[0], results[1]

    def starts(size: Size) -> Iterable[Instance]:
        for signs in product((1, -1), repeat=3):
            y = np.array(signs, dtype=float)[:, None]
            yield {**size, "j3": 1, "a0": Fraction(1, 20), "b": Fraction(1, 2), "y": y}

    def draw(random: np.random.Generator, size: Size) -> Instance:
        y = random.choice([-1.0, 1.0], size=(size["d"], 1))
        return {**size, "j3": 1, "a0": float(random.uniform(0.01, 0.1)), "b": float(random.uniform(0.1, 0.9)), "y": y}

    def allowed(ar: Arithmetic, *, a0: Value, b: Value, **_: Value) -> bool:
        tenth = ar.number("1/10")
        return bool(a0 > 0 and a0 < tenth and b >= tenth and 1 - b >= tenth)

    return Inequality(
        "F_lin, the network of the statement", "φ(Σ φ_τ(⟨c_exp[j₀], y⟩)), the network displayed", evaluate, draw,
        ({"d": 3, "t": 2},), allowed, starts, fixed=frozenset({"y"}),
    )  # fmt: skip


_FOUR: tuple[tuple[str, NetworkEvent, Sequence[Case]], ...] = (
    ("F_exp(D₁) > 0", NetworkEvent(1, "exp", True), D_1),
    ("F_lin(D₁) = 0", NetworkEvent(1, "lin", False), D_1),
    ("F_exp(D₀) = 0", NetworkEvent(0, "exp", False), D_0),
    ("F_lin(D₀) = 0", NetworkEvent(0, "lin", False), D_0),
)


def _main_theorem() -> Observed:
    """Theorem 6.2: as printed F_exp(D₁) is positive and zero; as intended, the four conditions of E_success."""
    printed = judge_event(NetworkEvent(1, "exp", False), D_1)
    found = [(name, judge_event(event, cases)) for name, event, cases in _FOUR]
    remarks = tuple(f"{name}: {line}" for name, seen in found for line in seen.remarks[:-1])
    verdicts = {seen.verdict for _, seen in found}
    intended = replace(found[0][1], verdict="holds" if verdicts == {"holds"} else "undecided", remarks=remarks)
    return compare_readings(
        printed, intended, "As intended, with F_exp > 0 and F_lin = 0 for D₁, F_exp = 0 and F_lin = 0 for D₀"
    )


def _informal(id: str, case: Case, section: str) -> Claim:
    return Claim(
        f"B.{id}", f"Theorem {id}, the informal version of Section {section}",
        "for some D₀, D₁ and networks: with high probability F_exp separates D₀ from D₁ and F_lin does not",
        Computation(lambda: judge_event(SuccessEvent(), (case,))),
        f"the data sets of Section {section} at the paper's own parameters, one y for all four networks",
        note="“With high probability” is read as 1 − δ/n. The number of layers is not examined.",
    )  # fmt: skip


def _zero_for_d1(id: str, cases: Sequence[Case], printed: Sequence[Case]) -> Claim:
    """Theorems D.9 and F.9, which are printed for D₁."""
    return _network(
        id, NetworkEvent(0, "exp", False), cases, f"{id[0]}0",
        lambda: judge_event(NetworkEvent(1, "exp", False), printed),
        "As intended, with D₀ in place of D₁", "D₁ is printed in the section on data set 0.", printed_dataset=1,
    )  # fmt: skip


_REACHES, _BELOW = RowEvent(1, "exp", "special", "reaches"), RowEvent(1, "exp", "other", "below")
CLAIMS: tuple[Claim, ...] = (
    _informal("1.1", self_case(), "D"),
    _informal("1.2", cross_case(), "F"),
    Claim(
        "B.6.2", "Theorem 6.2",
        "for D₁: F_exp > 0 and F_exp = 0, for D₀: F_lin = 0 and F_lin = 0, with probability 1 − δ/poly(n)",
        Computation(_main_theorem), f"{HYPOTHESES['D1']}, m = O(log(n/δ))",
        note="F_exp is printed in place of F_lin, and F_lin in place of F_exp; no network is both positive and zero.",
    ),
    _row("D.4.1", _REACHES, D_1, "D1"),
    _row(
        "D.4.2", _BELOW, D_1, "D1", corrected="ours.b-d-4-2",
        note="Violated in the cases with a₁ ≥ 1, where the weight of j₃ in the other rows does not vanish as n grows.",
    ),
    Claim(
        "ours.b-d-4-2", "Lemma D.4, Part 2, for smaller a₁", f"if a₁ ≤ 4/5, {_statement(_BELOW)}",
        Computation(lambda: judge_event(_BELOW, (*D_1[1:], self_case(a1=0.8)))),
        HYPOTHESES["D1"].replace("a₁ ≥ 7/10", "7/10 ≤ a₁ ≤ 4/5"),
    ),
    _network("D.5", NetworkEvent(1, "exp", True), D_1, "D1"),
    *_self_rows("D.8", 0, "exp", D_0),
    _zero_for_d1("D.9", D_0, D_1),
    *_self_rows("D.12", 1, "lin", D_1),
    _network("D.13", NetworkEvent(1, "lin", False), D_1, "D1"),
    *_self_rows("D.16", 0, "lin", D_0),
    _network(
        "D.17", NetworkEvent(0, "lin", False), D_0, "D0",
        lambda: _refuted(
            _displayed(), "B.D.17", "F_lin", "the displayed network", "the displayed network, with c_exp, is not F_lin."
        ),
        "As intended, with c_lin in the network",
        "The theorem defines F_exp with c_exp and makes a statement about F_lin.",
    ),
    _row_claim(
        "E.3.1", _REACHES, "E",
        lambda: compare_readings(
            judge_event(_REACHES, E_PRINTED), judge_event(_REACHES, E_INTENDED),
            "With a₁ ≥ 1 as in Lemma E.1, which the proof uses",
        ),
        note="The lemma requires only Definition D.1, hence a₁ ≥ 7/10.",
    ),
    _row("E.3.2", _BELOW, (*E_PRINTED, E_INTENDED[0]), "E"),
    _network(
        "E.4", NetworkEvent(1, "exp", True), E_SQUARES, "E4",
        lambda: _refuted(CONTRADICTION, "B.E.4", "the required b² + c²", "the actual b² + c²", f"{IMPOSSIBLE}."),
        "With b² + c² = 1 in place of b + c = 1",
        "Its conditions contradict each other, like those of Lemma E.1 (see B.E.1).",
    ),
    _cross_row("F.4.1", RowEvent(1, "exp", "special", "reaches", Fraction(9, 10)), F_1, _J2),
    _cross_row("F.4.2", RowEvent(1, "exp", "other", "within", _HALF), F_1, _J2),
    _network("F.5", NetworkEvent(1, "exp", True), F_1, "F1"),
    *_cross_rows("F.8", 0, "exp", F_0),
    _zero_for_d1("F.9", F_0, F_1),
    *_cross_rows("F.12", 1, "lin", F_1, f"{_J2}, and D₁ in place of D₀"),
    _network("F.13", NetworkEvent(1, "lin", False), F_1, "F1"),
    *_cross_rows("F.16", 0, "lin", F_0),
    _network("F.17", NetworkEvent(0, "lin", False), F_0, "F0"),
)  # fmt: skip
