"""What a claim is, one statement of the ledger and how it is checked, and the records of what was found.

The records `Witness`, `Finding` and `Findings` hold plain data only (text, numbers, fractions), so they can be
compared, pickled and written as JSON. Matrices of random instances have several scales and kinds, so that extreme cases
are frequent.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

import numpy as np
from numpy.random import Generator as Random

from depthgauge.base.format import counted, number, short
from depthgauge.base.frames import frame, html_table
from depthgauge.papers.ledger.arithmetic import Value

Verdict = Literal["holds", "fails", "misprint", "undecided"]
VERDICTS: tuple[Verdict, ...] = ("holds", "fails", "misprint", "undecided")
_COLUMNS = ("id", "paper", "statement", "verdict", "ratio", "witness", "corrected")
PAPER_A = "Only Large Weights (And Not Skip Connections) Can Prevent the Perils of Rank Collapse"
PAPER_B = "Superiority of Softmax: Unveiling the Performance Edge Over Linear Attention"


@dataclass(frozen=True, repr=False)
class Witness:
    """An instance that satisfies the hypotheses of a statement and violates the statement.

    Attributes:
        instance: Named matrices and vectors as nested tuples of fractions, scalars as fractions or integers.
        left: The value of the left side, as text.
        right: The value of the right side, as text.
        ratio: left/right at the worst entry; None where the right side is zero.
        steps: The intermediate values on the way to the two sides, each as (name, value).
    """

    instance: Mapping[str, Any] = field(hash=False)
    left: str
    right: str
    ratio: float | None
    steps: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return f"Witness({short(self.text(), 60)!r}, ratio={ratio_text(self.ratio)})"

    def _repr_html_(self) -> str:
        return "<br>".join(escape(line) for line in self.lines())

    def arrays(self) -> dict[str, Any]:
        """Return the instance with NumPy object arrays of fractions in place of nested tuples."""
        return {
            name: np.array(value, dtype=object) if isinstance(value, tuple) else value
            for name, value in self.instance.items()
        }

    def lines(self) -> list[str]:
        """Return one line of text per value; names with equal values share a line, such as `Q = K = 0`."""
        names: dict[str, list[str]] = {}
        for name, value in self.to_json().items():
            names.setdefault(compact(value), []).append(name)
        return [f"{' = '.join(group)} = {value}" for value, group in names.items()]

    def text(self) -> str:
        """Return the instance in one line."""
        return ", ".join(self.lines())

    def to_json(self) -> dict[str, Any]:
        """Return matrices as nested lists of strings such as `"3/2"`, and scalars as such strings."""
        return {name: _as_strings(value) for name, value in self.instance.items()}


@dataclass(frozen=True, repr=False)
class Finding:
    """A statement of the ledger and the verdict of its check.

    Attributes:
        id: The statement, such as `A.4.1`.
        paper: `A`, `B` or `ours`.
        statement: The statement as one line of mathematics.
        verdict: `holds` (no counterexample was found, which is not a proof), `fails` (there is a counterexample),
            `misprint` (there is a counterexample to the printed form and none was found to the intended form) or
            `undecided`.
        ratio: left/right. The largest one found where the statement holds, the witness's own where it does not, None
            where there is none.
        witness: The counterexample to the printed statement, or None.
        corrected: The id of a corrected statement, or None.
        evaluations: The number of instances that were evaluated.
        remarks: What the check found besides, in sentences.
        story: The explanation of the finding: the statement, its hypotheses, the witness with every intermediate
            value, and the corrected statement.
    """

    id: str
    paper: str
    statement: str
    verdict: Verdict
    ratio: float | None = None
    witness: Witness | None = None
    corrected: str | None = None
    evaluations: int = 0
    remarks: tuple[str, ...] = ()
    story: str = ""

    def __repr__(self) -> str:
        corrected = "" if self.corrected is None else f", corrected={self.corrected!r}"
        return f"Finding({self.id!r}, {self.verdict!r}, ratio={ratio_text(self.ratio)}{corrected})"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.story or repr(self))}</pre>"

    def reason(self, length: int = 70) -> str:
        """Return the witness, or why the statement is undecided, in at most `length` characters."""
        if self.witness is not None:
            return short(self.witness.text(), length)
        undecided = self.verdict == "undecided" and self.remarks
        return short(self.remarks[0], length) if undecided else ""

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return id, statement, verdict, ratio and the corrected statement as text."""
        return self.id, self.statement, self.verdict, ratio_text(self.ratio), self.corrected or ""

    def to_json(self) -> dict[str, Any]:
        """Return the row of the ledger: id, paper, statement, verdict, ratio, witness, corrected."""
        row = {name: getattr(self, name) for name in _COLUMNS}
        return row | {"witness": None if self.witness is None else self.witness.to_json()}


class Findings(tuple[Finding, ...]):
    """The findings of one run, in the order of the papers: a tuple of `Finding`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Findings({counted(len(self), 'statement')}: {self.summary() or 'none'})"

    def _repr_html_(self) -> str:
        columns = ("id", "statement", "verdict", "ratio", "corrected")
        rows = [dict(zip(columns, finding.cells(), strict=True)) for finding in self]
        return html_table(f"{counted(len(self), 'statement')}: {self.summary() or 'none'}", rows)

    def summary(self) -> str:
        """Return the number of findings of each verdict, such as `10 holds, 19 fails`."""
        counts = Counter(finding.verdict for finding in self)
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])

    def to_json(self) -> list[dict[str, Any]]:
        """Return one row per finding; see `Finding.to_json`."""
        return [finding.to_json() for finding in self]

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per finding and the columns of `Finding.to_json`.

        Raises:
            MissingPackageError: If pandas is not installed.
        """
        return frame(self.to_json())


def compact(value: Any) -> str:
    """Return nested lists of fraction strings as text; a matrix of equal entries as `all 1/100 (8 × 8)`, or `0`."""
    if not isinstance(value, list):
        return str(value)
    if value and isinstance(value[0], list) and not isinstance(value[0][0], list):
        entries = {entry for row in value for entry in row}
        if entries == {"0"}:
            return "0"
        if len(entries) == 1 and len(value) * len(value[0]) > 2:
            return f"all {entries.pop()} ({len(value)} × {len(value[0])})"
    return "[" + ", ".join(compact(v) for v in value) + "]"


def ratio_text(ratio: float | None) -> str:
    """Return a ratio with four digits; one below 1 that rounds to 1 is written `1⁻`."""
    if ratio is None:
        return "–"
    shown = number(ratio, 4)
    return "1⁻" if ratio < 1 and float(shown) >= 1 else shown


def plain(value: Any) -> Any:
    """Return an array as nested tuples of its entries; anything else as it is."""
    return tuple(plain(v) for v in value) if isinstance(value, np.ndarray) else value


def _as_strings(value: Any) -> Any:
    return [_as_strings(v) for v in value] if isinstance(value, tuple) else str(value)


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


def corners(shapes: Mapping[str, str]) -> Callable[[Size], Iterator[Instance]]:
    """Return a function that lists all instances with entries 0, 1 and −1, if there are at most 1000 of them."""

    def starts(size: Size) -> Iterator[Instance]:
        lengths = {name: tuple(size[axis] for axis in shape.split()) for name, shape in shapes.items()}
        total = sum(math.prod(shape) for shape in lengths.values())
        if 3**total > 1000:
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
