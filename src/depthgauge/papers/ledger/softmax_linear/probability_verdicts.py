"""Verdicts on "with high probability" statements, from probabilities computed for a list of n.

In this list d − 2 (self-attention) or d − 1 (cross-attention) equals t, so d grows like √n and satisfies every
condition that the paper puts on d. The paper's 1 − δ/poly(n) is read as 1 − δ/n with δ = 1/10. A verdict is about the
values of n that were computed; it is not a proof for all large n.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from depthgauge.base.format import number
from depthgauge.papers.ledger.claim import Observed
from depthgauge.papers.ledger.finding import Witness
from depthgauge.papers.ledger.softmax_linear.sign_probabilities import (
    DELTA,
    Case,
    NetworkEvent,
    RowEvent,
    SignEvent,
    positive_probability,
    width,
)
from depthgauge.papers.separation.score_maps import parse_attention
from depthgauge.papers.separation.settings import Dataset, decimal

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
