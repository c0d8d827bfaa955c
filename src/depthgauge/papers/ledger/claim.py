"""What a claim is, one statement of the ledger and how it is checked, and the instances that it is searched over.

Matrices of random instances have several scales and kinds, so that extreme cases are frequent.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
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


SCALES = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


def matrix(random: Random, *shape: int) -> np.ndarray:
    """Draw a matrix or vector of a random scale: Gaussian, random signs, sparse, or constant."""
    scale = random.choice(SCALES)
    kind = random.integers(4)
    normal = random.normal(size=shape)
    if kind == 1:
        normal = np.where(normal >= 0, 1.0, -1.0)
    elif kind == 2:
        normal = normal * (random.random(shape) < 0.5)
    elif kind == 3:
        normal = np.full(shape, float(normal.flat[0]))
    return np.asarray(scale * normal)


def drawing(shapes: Mapping[str, str]) -> Callable[[Random, Size], Instance]:
    """Return a function that draws instances with these shapes.

    For example, `drawing({"X": "n d", "a": "n", "c": ""})` draws a matrix, a vector and a scalar.
    """

    def draw(random: Random, size: Size) -> Instance:
        return {
            name: matrix(random, *(size[axis] for axis in shape.split())) if shape else random.choice(SCALES)
            for name, shape in shapes.items()
        }

    return draw


def corners(shapes: Mapping[str, str], most: int = 1000) -> Callable[[Size], Iterator[Instance]]:
    """Return a function that lists all instances with entries 0, 1 and −1, if there are at most `most` of them."""

    def starts(size: Size) -> Iterator[Instance]:
        lengths = {name: tuple(size[axis] for axis in shape.split()) for name, shape in shapes.items()}
        total = sum(math.prod(shape) for shape in lengths.values())
        if 3**total > most:
            return
        for entries in itertools.product((0.0, 1.0, -1.0), repeat=total):
            instance, rest = {}, np.array(entries)
            for name, shape in lengths.items():
                instance[name], rest = rest[: math.prod(shape)].reshape(shape), rest[math.prod(shape) :]
            yield instance

    return starts


def sizes(**lists: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    """Zip lists of dimensions: `sizes(n=(1, 2), d=(3, 4))` is `({"n": 1, "d": 3}, {"n": 2, "d": 4})`."""
    return tuple(dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))


def searched(
    id: str,
    where: str,
    sides: tuple[str, str],
    evaluate: Evaluate,
    shapes: Mapping[str, str] | Callable[[Random, Size], Instance],
    over: Sequence[Size],
    hypothesis: str = "none",
    corrected: str | None = None,
    *,
    statement: str | None = None,
    sharp: bool = False,
    note: str = "",
    **more: Any,
) -> Claim:
    """Return the claim left ≤ right, which a search checks.

    `shapes` are those of `drawing`, or a function that draws an instance; `over` are the sizes. The statement is the
    text of the inequality unless it is given. `more` are further attributes of the `Inequality`.
    """
    draw = shapes if callable(shapes) else drawing(shapes)
    check = Inequality(*sides, evaluate, draw, over, **more)
    return Claim(id, where, statement or check.text(), check, hypothesis, corrected, sharp, note)
