"""What a claim is, and what can be found out about it."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from numpy.random import Generator as Random

from depthgauge.ledger.arithmetic import Arithmetic, Value

Verdict = Literal["holds", "fails", "misprint", "undecided"]
VERDICTS: tuple[Verdict, ...] = ("holds", "fails", "misprint", "undecided")
Relation = Literal["<=", "<", "="]
Instance = Mapping[str, Any]
"""Named matrices, vectors and scalars: everything that the two sides depend on."""
Size = Mapping[str, int]
"""Dimensions such as {"n": 2, "d": 3}."""
Steps = Generator[tuple[str, Value], None, tuple[Value, Value]]
"""Named steps to show, ending in the two sides."""
Work = Callable[..., Steps]
"""`work(ar, **instance)` yields named steps to show and returns the two sides: numbers, or arrays entry by entry."""


def _always(ar: Arithmetic, **_: Value) -> bool:
    return True


def _nothing(size: Size) -> Iterable[Instance]:
    return ()


@dataclass(frozen=True)
class Inequality:
    """Left side ≤, < or = right side, for every instance that the hypotheses allow.

    Attributes:
        left, right: the two sides as text.
        work: the two sides as functions.
        draw: `draw(random, size)`, a random instance; it need not satisfy the hypotheses.
        sizes: the dimensions to try, smallest first.
        allowed: the hypotheses as a predicate, in either arithmetic.
        starts: structured instances and corners of a size, tried first.
        relation: ≤, < or =.
        slack: what the right side is multiplied by; below 1 for a planted false variant.
        fixed: names whose values the search and the simplification leave alone (sizes, signs).
    """

    left: str
    right: str
    work: Work
    draw: Callable[[Random, Size], Instance]
    sizes: Sequence[Size]
    allowed: Callable[..., bool] = _always
    starts: Callable[[Size], Iterable[Instance]] = _nothing
    relation: Relation = "<="
    slack: Fraction = Fraction(1)
    fixed: frozenset[str] = frozenset()

    def shrunk(self, factor: Fraction) -> "Inequality":
        """The same with a smaller right side: false, if the constant is sharp."""
        return replace(self, slack=self.slack * factor)

    def text(self) -> str:
        """`left ≤ right`."""
        sign = {"<=": "≤", "<": "<", "=": "="}[self.relation]
        factor = "" if self.slack == 1 else f"{self.slack} · "
        return f"{self.left} {sign} {factor}{self.right}"


@dataclass(frozen=True)
class Misprint:
    """A statement that is one thing as printed and another as its proof has it."""

    printed: Inequality
    proved: Inequality


@dataclass(frozen=True)
class Observed:
    """What running a check came to.

    Attributes:
        verdict: holds, fails, misprint or undecided.
        ratio: left/right, the largest seen where the claim holds, the witness's own where it does not; None where the
            right side is nought or there is no such pair.
        evaluations: how many instances were looked at.
        words: sentences for the reader.
        witness: where the statement as printed fails.
    """

    verdict: Verdict
    ratio: float | None
    evaluations: int
    words: tuple[str, ...] = ()
    witness: "Witness | None" = None


@dataclass(frozen=True)
class Study:
    """A statement decided otherwise than by a search: by exact probability, or not at all because constants hide.

    `run` computes what can be computed and says what it came to.
    """

    run: Callable[[], Observed]


@dataclass(frozen=True)
class Claim:
    """One numbered statement.

    Attributes:
        id: such as `A.4.1`, `B.D.2.3a` or `ours.residual-lipschitz`; what stands before the first dot is the paper.
        where: how the paper calls it.
        statement: one line of plain mathematics.
        check: how it is decided.
        hypothesis: the conditions, in words.
        corrected: the id of the statement that holds instead.
        sharp: whether its constant cannot be improved; the search then comes close to ratio 1.
        note: what a reader should know besides, for instance about the transcription.
    """

    id: str
    where: str
    statement: str
    check: Inequality | Misprint | Study
    hypothesis: str = "none"
    corrected: str | None = None
    sharp: bool = False
    note: str = ""

    @property
    def paper(self) -> str:
        """A, B or ours."""
        return self.id.split(".")[0]


@dataclass(frozen=True)
class Witness:
    """An instance in fractions at which a statement certainly fails.

    Attributes:
        instance: named matrices, vectors and scalars.
        left, right: the two sides, as text.
        ratio: left/right; None where the right side is nought.
        steps: what a reader computes on the way to the two sides, name and value.
    """

    instance: Mapping[str, Any]
    left: str
    right: str
    ratio: float | None
    steps: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Named matrices as nested lists of fraction strings, scalars as fraction strings."""
        return {name: _strings(value) for name, value in self.instance.items()}


def _strings(value: Any) -> Any:
    return [_strings(v) for v in value] if hasattr(value, "__len__") else str(value)


@dataclass(frozen=True)
class Finding:
    """A claim and what running its check came to."""

    claim: Claim
    observed: Observed

    def to_json(self) -> dict[str, Any]:
        """A row of the ledger."""
        witness = self.observed.witness
        return {
            "id": self.claim.id,
            "paper": self.claim.paper,
            "statement": self.claim.statement,
            "verdict": self.observed.verdict,
            "ratio": self.observed.ratio,
            "witness": None if witness is None else witness.to_json(),
            "corrected": self.claim.corrected,
        }
