"""What a claim is: one statement of the ledger and how it is checked."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from numpy.random import Generator as Random

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.finding import Verdict, Witness

Relation = Literal["<=", "<", "="]
Instance = Mapping[str, Any]
"""Named matrices, vectors and scalars: everything that the two sides depend on."""
Size = Mapping[str, int]
"""Dimensions such as {"n": 2, "d": 3}."""
Steps = Generator[tuple[str, Value], None, tuple[Value, Value]]
"""A generator that yields named intermediate values and returns the two sides."""
Evaluate = Callable[..., Steps]
"""`evaluate(ar, **instance)` returns `Steps`. The two sides are numbers, or arrays that are compared entry by entry."""
Starts = Callable[[Size], Iterable[Instance]]


@dataclass(frozen=True)
class Inequality:
    """The statement that left ≤, < or = right for every instance that satisfies the hypotheses.

    Attributes:
        left, right: The two sides, as text.
        evaluate: Computes the two sides at an instance.
        draw: `draw(random, size)` returns a random instance, which need not satisfy the hypotheses.
        sizes: The dimensions to try, smallest first.
        allowed: `allowed(ar, **instance)` returns whether an instance satisfies the hypotheses.
        starts: `starts(size)` returns structured instances, which are evaluated before random ones.
        relation: The relation between the two sides.
        right_factor: A factor on the right side. A factor below 1 makes a false variant of a sharp inequality.
        condition: A condition that the text of the inequality includes, such as the indices it is about.
        fixed: The names of values that the search and the simplification leave unchanged (sizes, signs).
    """

    left: str
    right: str
    evaluate: Evaluate
    draw: Callable[[Random, Size], Instance]
    sizes: Sequence[Size]
    allowed: Callable[..., bool] = lambda ar, **_: True
    starts: Starts = lambda size: ()
    relation: Relation = "<="
    right_factor: Fraction = Fraction(1)
    condition: str = ""
    fixed: frozenset[str] = frozenset()

    def shrunk(self, factor: Fraction) -> "Inequality":
        """Return left ≤ factor · right, which is false for factor < 1 if the constant is sharp."""
        return replace(self, right_factor=self.right_factor * factor)

    def text(self) -> str:
        """Return `left ≤ right`, or `left ≤ right for condition`."""
        sign = {"<=": "≤", "<": "<", "=": "="}[self.relation]
        factor = "" if self.right_factor == 1 else f"{self.right_factor} · "
        condition = f" for {self.condition}" if self.condition else ""
        return f"{self.left} {sign} {factor}{self.right}{condition}"

    def evaluated(self, ar: Arithmetic, instance: Instance) -> tuple[tuple[tuple[str, Value], ...], Value, Value]:
        """Return the intermediate values and the two sides at an instance."""
        evaluation, steps = self.evaluate(ar, **instance), []
        while True:
            try:
                steps.append(next(evaluation))
            except StopIteration as end:
                left, right = end.value
                return tuple(steps), left, right * ar.number(self.right_factor)


@dataclass(frozen=True)
class Misprint:
    """A statement whose printed form differs from the intended form, which the proof or the context uses."""

    printed: Inequality
    proved: Inequality


@dataclass(frozen=True)
class Observed:
    """The result of a check.

    Attributes:
        verdict: `holds`, `fails`, `misprint` or `undecided`.
        ratio: left/right: the largest one found where the statement holds, the witness's own where it does not; None
            where the right side is zero or there is no such pair.
        evaluations: The number of instances that were evaluated.
        remarks: Sentences for the reader.
        witness: A counterexample to the statement as printed.
    """

    verdict: Verdict
    ratio: float | None
    evaluations: int
    remarks: tuple[str, ...] = ()
    witness: Witness | None = None


@dataclass(frozen=True)
class Computation:
    """A statement that `run` checks by a computation of its own instead of a search.

    Examples are statements about probabilities, which are computed for a list of sizes, and statements with hidden
    constants, which stay undecided.
    """

    run: Callable[[], Observed]


@dataclass(frozen=True)
class Claim:
    """One numbered statement.

    Attributes:
        id: Such as `A.4.1`, `B.D.2.3a` or `ours.residual-lipschitz`. The part before the first dot is the paper.
        where: The name of the statement in the paper.
        statement: The statement as one line of mathematics.
        check: How the statement is checked.
        hypothesis: The hypotheses, as text.
        corrected: The id of a corrected statement, or None.
        sharp: Whether the constant cannot be improved. The search then comes close to ratio 1.
        note: Further information for the reader, for instance about the transcription.
    """

    id: str
    where: str
    statement: str
    check: Inequality | Misprint | Computation
    hypothesis: str = "none"
    corrected: str | None = None
    sharp: bool = False
    note: str = ""

    @property
    def paper(self) -> str:
        """`A`, `B` or `ours`."""
        return self.id.split(".")[0]
