"""Claims from tables of lemma parts: a part compares some entries of u, f or c with a bound.

The data sets are those of Definitions D.1 and F.1, with the attention on them as dense matrices in either arithmetic.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from numpy.random import Generator as Random

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Evaluate, Evaluation, Inequality, Instance, Misprint, Relation, Size

Kind = Literal["exp", "lin"]
Symbol = Literal["a0", "a1"]
NAMES: dict[str, str] = {"a0": "a₀", "a1": "a₁"}


@dataclass(frozen=True)
class AttentionSetup:
    """The setup of a lemma: self-attention (Definition D.1) or cross-attention (Definition F.1) on D₀ or D₁.

    `kind` is softmax or linear attention, `product` is QKᵀ, `tie` is b + c = 1 or b² + c² = 1. The bound on a₁ is
    a₁ ≥ least for self-attention and a₁ > least for cross-attention.
    """

    family: Literal["self", "cross"]
    dataset: Literal[0, 1]
    kind: Kind
    product: Literal["ones", "identity"] = "identity"
    tie: Literal["sum", "squares"] = "sum"
    least: Fraction = Fraction(1)

    @property
    def symbol(self) -> Symbol:
        """The name of the special token's size: a₀ in D₀, a₁ in D₁."""
        return "a1" if self.dataset else "a0"

    @property
    def extra_columns(self) -> int:
        """The number of columns besides the repeated identity."""
        return 2 if self.family == "self" else 1


class DenseAttention:
    """One instance of a setup: n tokens, the matrices A₁ and A₂ = A₃, and u, f, c computed from them (V = I).

    There are d columns and t tokens of each class. `j3` is the special key and `j2` the special query of
    cross-attention, counted from 1; `a` holds the values of a₀ and a₁, of which `formula` is the one in the formulas.
    """

    def __init__(
        self,
        ar: Arithmetic,
        setup: AttentionSetup,
        formula: Symbol,
        *,
        d: int,
        t: int,
        j3: int,
        j2: int = 0,
        b: Value = None,
        **a: Value,
    ) -> None:
        self.ar, self.setup, self.d, self.t = ar, setup, d, t
        self.classes = d - setup.extra_columns
        self.n = self.classes * t
        self.token, self.column = np.arange(self.n), np.arange(d)
        self.token_class = self.token % self.classes
        self.log = ar.log(ar.number(self.n))
        self.root = ar.sqrt(self.log)
        self.j2, self.j3 = j2 - 1, j3 - 1
        self.a, self.special_size = a[formula], a[setup.symbol]
        self.b = b

    @cached_property
    def c_parameter(self) -> Value:
        """The parameter c of Definition D.1: 1 − b, or √(1 − b²)."""
        return 1 - self.b if self.setup.tie == "sum" else self.ar.sqrt(1 - self.b * self.b)

    def power(self, exponent: Value) -> Value:
        """n^exponent."""
        return self.ar.exp(exponent * self.log)

    def fraction(self, top: int, bottom: int) -> Value:
        """top/bottom."""
        return self.ar.number(Fraction(top, bottom))

    @cached_property
    def unscaled(self) -> tuple[Value, Value]:
        """A₁ and A₂ without their factors √(log n) (self), or log n and 1 (cross)."""
        blank = np.full((self.n, self.d), self.ar.number(0))
        keys = blank.copy()
        block = (self.token, 1 + self.token_class)
        if self.setup.family == "self":
            keys[self.j3, 0] = self.special_size
            keys[block] = self.b
            keys[:, -1] = self.c_parameter
            return keys, keys
        queries = blank.copy()
        queries[self.j2, 0] = self.special_size
        queries[:, 1:] = self.ar.number(1)
        keys[self.j3, 0] = self.ar.number(1)
        keys[block] = self.ar.number(1)
        return queries, keys

    @cached_property
    def inputs(self) -> tuple[Value, Value]:
        """A₁ and A₂ = A₃."""
        queries, keys = self.unscaled
        return (queries * self.root, keys * self.root) if self.setup.family == "self" else (queries * self.log, keys)

    @cached_property
    def u(self) -> Value:
        """u_exp = exp(A₁ QKᵀ A₂ᵀ), u_lin = A₁ QKᵀ A₂ᵀ."""
        queries, keys = self.inputs
        if self.setup.product == "ones":
            scores = queries.sum(axis=1)[:, None] * keys.sum(axis=1)[None, :]
        else:
            scores = queries @ keys.T
        return self.ar.exp(scores) if self.setup.kind == "exp" else scores

    @cached_property
    def f(self) -> Value:
        """f = u / row sums of u."""
        return self.u / self.u.sum(axis=1, keepdims=True)

    @cached_property
    def c(self) -> Value:
        """c = f·A₃."""
        return self.f @ self.inputs[1]


Axis = Callable[[DenseAttention], Any]
Sides = Callable[[DenseAttention], tuple[Value, Value]]

ROWS: Mapping[str, Axis] = {
    "j₀ = j₂": lambda att: att.token == att.j2,
    "j₀ ≠ j₂": lambda att: att.token != att.j2,
    "j₀ = j₃": lambda att: att.token == att.j3,
    "j₀ ≠ j₃": lambda att: att.token != att.j3,
}
KEYS: Mapping[str, Axis] = {
    "j₁ = j₃": lambda att: att.token == att.j3,
    "j₁ ≠ j₃": lambda att: att.token != att.j3,
    "any j₁": lambda att: np.full(att.n, True),
    "i₀ = 1": lambda att: att.column == 0,
    "i₀ = d": lambda att: att.column == att.d - 1,
    "i₀ in the class of j₃": lambda att: att.column == 1 + att.token_class[att.j3],
    "i₀ in another class": lambda att: _block(att) & (att.column != 1 + att.token_class[att.j3]),
    "i₀ in a class": lambda att: _block(att),
}
PAIRS: Mapping[str, Axis] = {
    "j₁ in the class of j₀": lambda att: att.token_class[:, None] == att.token_class[None, :],
    "j₁ in another class than j₀": lambda att: att.token_class[:, None] != att.token_class[None, :],
}
BOUNDS: Mapping[str, Axis] = {
    "n": lambda att: att.ar.number(att.n),
    "log n": lambda att: att.log,
    "1/2": lambda att: att.fraction(1, 2),
    "1/n": lambda att: att.fraction(1, att.n),
    "t/n": lambda att: att.fraction(att.t, att.n),
    "n^(1 + {a})": lambda att: att.power(1 + att.a),
    "n^((1 + {a})²)": lambda att: att.power((1 + att.a) ** 2),
    "n^({a}² + b² + c²)": lambda att: att.power(att.a * att.a + att.b * att.b + att.c_parameter * att.c_parameter),
    "1/n^(1 − {a})": lambda att: att.power(att.a - 1),
    "1/n^(1 − 2{a})": lambda att: att.power(2 * att.a - 1),
    "1/n^(1 − b²)": lambda att: att.power(att.b * att.b - 1),
    "t/n^(1 − {a})": lambda att: att.t * att.power(att.a - 1),
    "(1 + {a})/n": lambda att: (1 + att.a) * att.fraction(1, att.n),
    "(1 + {a}) t/n": lambda att: (1 + att.a) * att.fraction(att.t, att.n),
    "(1 + {a}) log n": lambda att: (1 + att.a) * att.log,
    "(1 + {a})² log n": lambda att: (1 + att.a) ** 2 * att.log,
    "c√(log n)": lambda att: att.c_parameter * att.root,
    "½ {a}√(log n)": lambda att: att.a * att.root / 2,
    "½ b√(log n)": lambda att: att.b * att.root / 2,
    "(1/n^(1 − {a})) {a}√(log n)": lambda att: att.power(att.a - 1) * att.a * att.root,
    "(1/n^(1 − 2{a})) {a}√(log n)": lambda att: att.power(2 * att.a - 1) * att.a * att.root,
    "(1/n^(1 − b²)) {a}√(log n)": lambda att: att.power(att.b * att.b - 1) * att.a * att.root,
    "((1 + {a})/n) {a}√(log n)": lambda att: (1 + att.a) * att.fraction(1, att.n) * att.a * att.root,
    "(t/n) b√(log n)": lambda att: att.fraction(att.t, att.n) * att.b * att.root,
    "(t/n^(1 − {a})) b√(log n)": lambda att: att.t * att.power(att.a - 1) * att.b * att.root,
    "(t/n^(1 − 2{a})) b√(log n)": lambda att: att.t * att.power(2 * att.a - 1) * att.b * att.root,
    "(t/n^(1 − b²)) b√(log n)": lambda att: att.t * att.power(att.b * att.b - 1) * att.b * att.root,
    "((1 + {a})/n) t b√(log n)": lambda att: (1 + att.a) * att.fraction(att.t, att.n) * att.b * att.root,
    "(1/n^(1 − {a}) + (t − 1)/n) b√(log n)": lambda att: _class_of_j3(att, 1),
    "(1/n^(1 − 2{a}) + (t − 1)/n) b√(log n)": lambda att: _class_of_j3(att, 2),
}
"""The bounds of the lemmas, with {a} for a₀ or a₁."""


def _class_of_j3(att: DenseAttention, factor: int) -> Value:
    """Return the bound on the class of j₃: the weight of j₃, and 1/n for each of the t − 1 other keys."""
    return (att.power(factor * att.a - 1) + att.fraction(att.t - 1, att.n)) * att.b * att.root


def _block(att: DenseAttention) -> Any:
    return (att.column >= 1) & (att.column <= att.classes)


@dataclass(frozen=True)
class LemmaPart:
    """One part of a lemma: entries of u, f or c at some rows and keys (or columns), compared with a bound.

    `rows` and `keys` (or columns) are names in `ROWS`, `KEYS` and `PAIRS`, `bound` is one in `BOUNDS`. `sharp` is
    whether no constant factor improves it. `printed` holds the attributes that are printed differently in the paper,
    `corrected` is the id of the corrected statement.
    """

    name: str
    quantity: Literal["u", "f", "c"]
    rows: str
    keys: str
    relation: Literal["=", "<=", ">="]
    bound: str
    sharp: bool = False
    printed: Mapping[str, Any] = field(default_factory=dict)
    corrected: str | None = None

    def text(self, setup: AttentionSetup, formula: Symbol) -> tuple[str, str]:
        """Return the two sides as text."""
        index = "i₀" if self.quantity == "c" else "j₁"
        return f"{self.quantity}_{setup.kind}[j₀, {index}]", self.bound.format(a=NAMES[formula])

    def mask(self, att: DenseAttention) -> Any:
        """Return the positions of the entries that the part is about, as a Boolean matrix."""
        keys = PAIRS[self.keys](att) if self.keys in PAIRS else KEYS[self.keys](att)[None, :]
        return ROWS[self.rows](att)[:, None] & keys

    def sides(self, att: DenseAttention) -> tuple[Value, Value]:
        """Return the two sides of ≤ or =; a lower bound is the left side."""
        found, bound = getattr(att, self.quantity)[self.mask(att)], BOUNDS[self.bound](att)
        return (bound, found) if self.relation == ">=" else (found, bound)


def sharpened(parts: Iterable[LemmaPart]) -> tuple[LemmaPart, ...]:
    """Return the parts of a lemma whose bounds are all sharp."""
    return tuple(replace(part, sharp=True) for part in parts)


@dataclass(frozen=True)
class Lemma:
    """A lemma with numbered parts about one setup.

    `formula` is which of a₀, a₁ the formulas contain, `printed` holds the attributes of the setup that are printed
    differently in the paper, `note` is a note for every part.
    """

    id: str
    setup: AttentionSetup
    formula: Symbol
    parts: tuple[LemmaPart, ...]
    hypothesis: str
    printed: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def claims(self) -> tuple[Claim, ...]:
        """Return one claim per part."""
        return tuple(self._claim(part) for part in self.parts)

    def _claim(self, part: LemmaPart) -> Claim:
        shown = replace(part, **part.printed)
        left, right = shown.text(self.setup, self.formula)
        sign = {"=": "=", "<=": "≤", ">=": "≥"}[part.relation]
        proved = part_inequality(self.setup, self.formula, part)
        check: Inequality | Misprint = proved
        if self.printed or part.printed:
            check = Misprint(part_inequality(replace(self.setup, **self.printed), self.formula, shown), proved)
        return Claim(
            f"B.{self.id}.{part.name}", f"Lemma {self.id}, Part {part.name}",
            f"for {shown.rows} and {shown.keys}: {left} {sign} {right}", check, self.hypothesis, part.corrected,
            isinstance(check, Inequality) and (part.sharp or part.relation == "="), self.note,
        )  # fmt: skip


def part_inequality(setup: AttentionSetup, formula: Symbol, part: LemmaPart) -> Inequality:
    """Return the inequality of a part; a lower bound is the left side."""
    left, right = part.text(setup, formula)
    if part.relation == ">=":
        left, right = right, left
    return data_set_inequality(
        setup, formula, (left, right), part.sides, "=" if part.relation == "=" else "<=",
        lambda att: bool(part.mask(att).any()), part.quantity, f"{part.rows} and {part.keys}",
    )  # fmt: skip


def all_parts(lemma: Lemma, setup: AttentionSetup, condition: str = "") -> Inequality:
    """Return all parts of a lemma as one inequality about a setup; an equation becomes two inequalities."""

    def sides(att: DenseAttention) -> tuple[Value, Value]:
        pairs = [pair for part in lemma.parts for pair in _directions(part, att)]
        return concatenated(left for left, _ in pairs), concatenated(right for _, right in pairs)

    text = ("the left sides of all parts", "their right sides")
    return data_set_inequality(setup, lemma.formula, text, sides, shown="c", condition=condition)


def _directions(part: LemmaPart, att: DenseAttention) -> Iterable[tuple[Value, Value]]:
    left, right = np.broadcast_arrays(*map(np.asarray, part.sides(att)))
    return ((left, right), (right, left)) if part.relation == "=" else ((left, right),)


def concatenated(pieces: Iterable[Value]) -> Value:
    """Return numbers and arrays as one vector."""
    return np.concatenate([np.ravel(piece) for piece in pieces])


SIZES: Mapping[str, tuple[Size, ...]] = {
    "self": tuple({"d": d, "t": t} for d, t in ((3, 2), (4, 1), (4, 2), (5, 3), (8, 5))),
    "cross": tuple({"d": d, "t": t} for d, t in ((2, 2), (3, 1), (3, 2), (4, 3), (7, 5))),
}


def data_set_inequality(
    setup: AttentionSetup,
    formula: Symbol,
    text: tuple[str, str],
    sides: Sides,
    relation: Relation = "<=",
    applies: Callable[[DenseAttention], bool] = lambda att: True,
    shown: str = "u",
    condition: str = "",
) -> Inequality:
    """Return an inequality about the data sets of a setup.

    `formula` is which of a₀, a₁ the formulas contain, `applies` whether the statement is about any entry of an
    instance, `shown` the quantity (u, f or c) that the story displays.
    """
    symbols = tuple(dict.fromkeys((setup.symbol, formula)))

    def allowed(ar: Arithmetic, **given: Value) -> bool:
        att = DenseAttention(ar, setup, formula, **given)
        return applies(att) and _conditions(att, {name: given[name] for name in symbols})

    return Inequality(
        *text, _evaluate(setup, formula, sides, shown), partial(_draw, setup, symbols), SIZES[setup.family], allowed,
        partial(_starts, setup, symbols), relation, condition=condition,
    )  # fmt: skip


def _evaluate(setup: AttentionSetup, formula: Symbol, sides: Sides, shown: str) -> Evaluate:
    matrices = ("A₁/√(log n) = A₂/√(log n) = A₃/√(log n)",) if setup.family == "self" else ("A₁/log n", "A₂ = A₃")
    kept = {"u": ("u",), "f": ("u", "f"), "c": ("f", "c")}[shown]

    def evaluate(ar: Arithmetic, **given: Value) -> Evaluation:
        att = DenseAttention(ar, setup, formula, **given)
        steps = {"n": att.n, **dict(zip(matrices, att.unscaled, strict=False))}
        return steps | {f"{name}_{setup.kind}": getattr(att, name) for name in kept}, *sides(att)

    return evaluate


def _conditions(att: DenseAttention, a: Mapping[str, Value]) -> bool:
    """The conditions of the definitions: 0 < a₀ < 1/10, a₁ ≥ 7/10 (self) or > 1 (cross), b and c at least 1/10."""
    tenth, least = att.ar.number("1/10"), att.ar.number(att.setup.least)
    if "a0" in a and not (a["a0"] > 0 and a["a0"] < tenth):
        return False
    if att.setup.family == "cross":
        return "a1" not in a or bool(a["a1"] > least)
    return ("a1" not in a or bool(a["a1"] >= least)) and att.b >= tenth and att.b < 1 and bool(att.c_parameter >= tenth)


def _draw(setup: AttentionSetup, symbols: Iterable[Symbol], random: Random, size: Size) -> Instance:
    sizes = {"a0": float(random.uniform(0, 0.1)), "a1": float(setup.least) + float(random.exponential(0.7))}
    n = (size["d"] - setup.extra_columns) * size["t"]
    special = {name: int(random.integers(1, n + 1)) for name in _indices(setup)}
    b = {"b": float(random.uniform(0.1, 0.9))} if setup.family == "self" else {}
    return {**size, **special, **{name: sizes[name] for name in symbols}, **b}


def _starts(setup: AttentionSetup, symbols: tuple[Symbol, ...], size: Size) -> Iterable[Instance]:
    """Simple instances: special tokens first or last; small, medium and large a₀, a₁ and b."""
    n = (size["d"] - setup.extra_columns) * size["t"]
    options: dict[str, tuple[Any, ...]] = dict.fromkeys(_indices(setup), (1, n))
    values = {"a0": (Fraction(1, 20), Fraction(1, 11)), "a1": (setup.least, Fraction(3, 2), Fraction(3))}
    options |= {name: values[name] for name in symbols}
    if setup.family == "self":
        options["b"] = (Fraction(1, 10), Fraction(1, 2), Fraction(9, 10))
    for chosen in itertools.product(*options.values()):
        yield {**size, **dict(zip(options, chosen, strict=True))}


def _indices(setup: AttentionSetup) -> tuple[str, ...]:
    return ("j3",) if setup.family == "self" else ("j2", "j3")
