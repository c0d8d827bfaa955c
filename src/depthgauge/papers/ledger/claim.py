"""What a claim is: one statement of the ledger and how it is checked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numpy.random import Generator as Random

from depthgauge.papers.ledger.arithmetic import Value
from depthgauge.papers.ledger.finding import Verdict, Witness

Relation = Literal["<=", "<", "="]
Instance = Mapping[str, Any]
"""Named matrices, vectors and scalars: everything that the two sides depend on."""
Size = Mapping[str, int]
"""Dimensions such as {"n": 2, "d": 3}."""
Evaluation = tuple[Mapping[str, Value], Value, Value]
"""Named intermediate values, and the two sides: numbers, or arrays that are compared entry by entry."""
Evaluate = Callable[..., Evaluation]
"""`evaluate(ar, **instance)` computes the two sides at an instance."""
Starts = Callable[[Size], Iterable[Instance]]


@dataclass(frozen=True)
class Inequality:
    """The statement that left ≤, < or = right for every instance that satisfies the hypotheses.

    Attributes:
        draw: `draw(random, size)` returns a random instance, which need not satisfy the hypotheses.
        sizes: The dimensions to try, smallest first.
        allowed: `allowed(ar, **instance)` returns whether an instance satisfies the hypotheses.
        starts: `starts(size)` returns structured instances, which are evaluated before random ones.
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
    condition: str = ""
    fixed: frozenset[str] = frozenset()

    def text(self) -> str:
        """Return `left ≤ right`, or `left ≤ right for condition`."""
        sign = {"<=": "≤", "<": "<", "=": "="}[self.relation]
        condition = f" for {self.condition}" if self.condition else ""
        return f"{self.left} {sign} {self.right}{condition}"


@dataclass(frozen=True)
class Misprint:
    """A statement whose printed form differs from the intended form, which the proof or the context uses."""

    printed: Inequality
    proved: Inequality


@dataclass(frozen=True)
class Observed:
    """The result of a check. `Finding` explains the attributes."""

    verdict: Verdict
    ratio: float | None
    evaluations: int
    remarks: tuple[str, ...] = ()
    witness: Witness | None = None


@dataclass(frozen=True)
class Computation:
    """A statement that `run` checks without a search, such as a statement about probabilities."""

    run: Callable[[], Observed]


@dataclass(frozen=True)
class Claim:
    """One numbered statement.

    Attributes:
        id: Such as `A.4.1`, `B.D.2.3a` or `ours.residual-lipschitz`. The part before the first dot is the paper.
        where: The name of the statement in the paper.
        statement: The statement as one line of mathematics.
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
