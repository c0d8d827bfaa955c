"""What exact probabilities say of "with high probability", along a ladder of n.

Along the ladder d − 2 (self) or d − 1 (cross) equals t, so d grows like √n: inside every condition that the paper puts
on d. Its 1 − δ/poly(n) is read as 1 − δ/n with δ = 1/10.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from depthgauge._format import number
from depthgauge.ledger.claim import Observed, Witness
from depthgauge.ledger.softmax_linear.chance import DELTA, Case, NetworkChance, fires, width
from depthgauge.separation.score_maps import parse_attention
from depthgauge.separation.settings import AttentionSetting, Dataset, decimal

LADDER = tuple(round(10 ** (k / 4)) for k in range(3, 17))
"""Numbers of classes, and of their repetitions: n = 36, …, 10⁸."""
READING = (
    "Read with δ = 1/10, δ/n for δ/poly(n), and d growing like √n: "
    f"{len(LADDER)} values of n from {LADDER[0] ** 2} to {LADDER[-1] ** 2:,} were computed, the start between them."
)
_FLAT = 0.99
"""A probability that keeps this share over the last steps of the ladder is not on its way to nought."""
_AHEAD = 8
"""How many t beyond the first success are tried before it is called the start."""


@runtime_checkable
class Chance(Protocol):
    """Something said of random signs on a data set (None: of both), and the chance that it is not so."""

    @property
    def dataset(self) -> Dataset | None:
        """0 or 1, or None where both data sets take part."""

    def contrary(self, setting: AttentionSetting) -> float:
        """The probability of the contrary."""

    def steps(self, setting: AttentionSetting) -> tuple[tuple[str, str], ...]:
        """What a reader of a witness should see."""


def least_factor(chance: NetworkChance, cases: Sequence[Case], most: int = 64) -> int | None:
    """The least whole C for which m = ⌈C log(n/δ)⌉ sign vectors make F positive as often as asked, all along."""
    quiet = [
        (k * k, math.log1p(-fires(case.build(k), chance.dataset, parse_attention(chance.kind))))
        for case in cases
        for k in LADDER
    ]
    for factor in range(1, most + 1):
        if all(q * width(n, factor) <= math.log(high(n)) for n, q in quiet):
            return factor
    return None


@dataclass(frozen=True)
class Curve:
    """The chance of the contrary, along the ladder, against what is allowed; `start` is t where it begins to hold."""

    case: Case
    dataset: Dataset | None
    contrary: tuple[float, ...]
    limit: tuple[float, ...]
    start: int | None = None

    @property
    def since(self) -> int | None:
        """The first step of the ladder from which on the statement holds."""
        bad = [step for step, (x, y) in enumerate(zip(self.contrary, self.limit, strict=True)) if x > y]
        first = bad[-1] + 1 if bad else 0
        return first if first < len(self.contrary) else None

    @property
    def stays(self) -> bool:
        """Whether it fails at the end and is not on its way."""
        return self.since is None and self.contrary[-1] >= _FLAT * self.contrary[-4]

    @property
    def ratio(self) -> float:
        """contrary/allowed, the largest from `since` on."""
        return max(x / y for x, y in list(zip(self.contrary, self.limit, strict=True))[self.since :])

    def words(self) -> str:
        """From which n on, or where it ends."""
        last = f"at n = {LADDER[-1] ** 2:,} the contrary has probability {shown(self.contrary[-1])}"
        if self.start is None:
            return f"{self.case.text(self.dataset)}: not for large n; {last} where {number(self.limit[-1])} is allowed."
        return f"{self.case.text(self.dataset)}: from n = {self.start**2:,} on; {last}."


def follow(chance: Chance, case: Case, limit: Callable[[int], float]) -> Curve:
    """The curve of a case, and the least t from which on no failure was seen."""
    contrary = tuple(chance.contrary(case.build(k)) for k in LADDER)
    curve = Curve(case, chance.dataset, contrary, tuple(limit(k * k) for k in LADDER))
    if curve.since is None or curve.since == 0:
        return curve if curve.since is None else replace(curve, start=LADDER[0])

    def good(k: int) -> bool:
        return chance.contrary(case.build(k)) <= limit(k * k)

    return replace(curve, start=_start(good, LADDER[curve.since - 1], LADDER[curve.since]))


def _start(good: Callable[[int], bool], bad: int, top: int) -> int:
    """Halving between a failure and a success, then on while one of the next few fails: parity makes small waves."""
    while top - bad > 1:
        middle = (bad + top) // 2
        bad, top = (bad, middle) if good(middle) else (middle, top)
    while True:
        failing = [k for k in range(top + 1, top + 1 + _AHEAD) if not good(k)]
        if not failing:
            return top
        top = failing[-1] + 1


def shown(probability: float) -> str:
    """A probability in short; what rounded to nought is said to be small."""
    return number(probability) if probability > 0 else "below 1e-15"


def tenth(n: int) -> float:
    """With probability at least 1/10: the contrary may have 9/10."""
    return 0.9


def high(n: int) -> float:
    """With probability at least 1 − δ/n."""
    return float(DELTA) / n


def observe(chance: Chance, cases: Sequence[Case], limit: Callable[[int], float] = high) -> Observed:
    """`holds` from some n on in every case, `fails` where the contrary stays likely, else `undecided`."""
    curves = [follow(chance, case, limit) for case in cases]
    words = tuple(curve.words() for curve in sorted(curves, key=lambda curve: curve.since is not None))
    seen = len(cases) * len(LADDER)
    failing = [curve for curve in curves if curve.stays]
    if failing:
        witness = _witness(chance, failing[0])
        return Observed("fails", witness.ratio, seen, (*words, READING), witness)
    if any(curve.since is None for curve in curves):
        return Observed("undecided", None, seen, (*words, READING))
    return Observed("holds", max(curve.ratio for curve in curves), seen, (*words, READING))


def _witness(chance: Chance, curve: Curve) -> Witness:
    """The end of the ladder: what is asked for against what there is."""
    asked, there = 1 - curve.limit[-1], 1 - curve.contrary[-1]
    return Witness(
        instance=_instance(chance, curve.case, LADDER[-1]),
        left=f"{number(asked, 10)}, the probability that is claimed at least",
        right=f"{number(there, 7)}, the probability that there is" if there > 0 else "a probability below 1e-15",
        ratio=asked / there if there > 0 else None,
        steps=chance.steps(curve.case.build(LADDER[-1])),
    )


def _instance(chance: Chance, case: Case, t: int) -> dict[str, Any]:
    """The sizes and those parameters that the data set has."""
    setting = case.build(t)
    used = case.used(chance.dataset)
    return {"n": setting.n, "d": setting.d, "t": t, **{name: decimal(value) for name, value in used.items()}}


def unless(printed: Observed, meant: Observed, difference: str) -> Observed:
    """`misprint` where the printed reading fails and the meant one holds; else what the printed one came to."""
    if printed.verdict != "fails":
        return printed
    seen = printed.evaluations + meant.evaluations
    words = (f"As printed: {printed.words[0]}", f"{difference}: it {meant.verdict}.", *meant.words)
    verdict = "misprint" if meant.verdict == "holds" else printed.verdict
    return replace(printed, verdict=verdict, evaluations=seen, words=words)


def never_equal(chance: Chance, case: Case) -> Observed:
    """Whether the probability can *equal* 1 − δ/poly(n): then poly(n) is δ/contrary, whose degree must not grow."""
    steps = LADDER[5::3][:3]
    chances = [chance.contrary(case.build(k)) for k in steps]
    degrees = [
        math.log(float(DELTA) / x) / math.log(k * k) if x else math.inf for x, k in zip(chances, steps, strict=True)
    ]
    name = "log(δ/Pr[contrary])/log n"
    if not all(0 < x < y / 2 for x, y in itertools.pairwise(degrees)):
        return Observed("undecided", None, len(steps), (f"{name} was not seen to grow.",))
    sizes = " and ".join(f"{number(degree)} at n = {k * k:,}" for degree, k in zip(degrees, steps, strict=True))
    words = f"“=” asks that poly(n) be δ/Pr[contrary], but {name} grows, {sizes}: no polynomial does that."
    witness = Witness(
        instance=_instance(chance, case, steps[-1]),
        left=f"{number(degrees[-1], 7)}, {name}",
        right=f"{number(degrees[0], 7)}, the same at n = {steps[0] ** 2:,}; of a polynomial it tends to the degree",
        ratio=degrees[-1] / degrees[0],
        steps=chance.steps(case.build(steps[-1])),
    )
    return Observed("fails", witness.ratio, len(steps), (words,), witness)


def _degree(contrary: float, n: int) -> float:
    return math.log(float(DELTA) / contrary) / math.log(n) if contrary > 0 else math.inf
