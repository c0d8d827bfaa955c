"""From a table of a lemma's parts to claims: which entries of u, f or c, compared with what."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.random import Generator as Random

from depthgauge.ledger.arithmetic import Arithmetic, Value
from depthgauge.ledger.claim import Claim, Inequality, Instance, Misprint, Relation, Size, Work
from depthgauge.ledger.softmax_linear.dense_attention import NAMES, Scene, Symbol, World

Axis = Callable[[World], Any]
Sides = Callable[[World], tuple[Value, Value]]

ROWS: dict[str, Axis] = {
    "j₀ = j₂": lambda w: w.token == w.j2,
    "j₀ ≠ j₂": lambda w: w.token != w.j2,
    "j₀ = j₃": lambda w: w.token == w.j3,
    "j₀ ≠ j₃": lambda w: w.token != w.j3,
}
KEYS: dict[str, Axis] = {
    "j₁ = j₃": lambda w: w.token == w.j3,
    "j₁ ≠ j₃": lambda w: w.token != w.j3,
    "any j₁": lambda w: np.full(w.n, True),
    "i₀ = 1": lambda w: w.column == 0,
    "i₀ = d": lambda w: w.column == w.d - 1,
    "i₀ of the class of j₃": lambda w: w.column == 1 + w.home[w.j3],
    "i₀ of another class": lambda w: _block(w) & (w.column != 1 + w.home[w.j3]),
    "i₀ of a class": lambda w: _block(w),
}
PAIRS: dict[str, Axis] = {
    "j₁ of the class of j₀": lambda w: w.home[:, None] == w.home[None, :],
    "j₁ of another class than j₀": lambda w: w.home[:, None] != w.home[None, :],
}


def _block(w: World) -> Any:
    return (w.column >= 1) & (w.column <= w.classes)


@dataclass(frozen=True)
class Part:
    """Entries of u, f or c at some rows and keys (or columns) against a bound.

    Attributes:
        name: such as `3a`.
        quantity: u, f or c.
        rows, keys: which entries, by their names in `ROWS` and in `KEYS` or `PAIRS`.
        relation: = , <= or >=.
        bound: as text, `{a}` standing for a₀ or a₁.
        value: the bound as a function.
        sharp: whether the bound cannot be improved by a constant factor.
        printed: what the paper prints otherwise, by the names above.
        corrected: the id of what holds instead, where the part fails.
    """

    name: str
    quantity: Literal["u", "f", "c"]
    rows: str
    keys: str
    relation: Literal["=", "<=", ">="]
    bound: str
    value: Callable[[World], Value]
    sharp: bool = False
    printed: Mapping[str, Any] = field(default_factory=dict)
    corrected: str | None = None

    def text(self, scene: Scene, formula: Symbol) -> tuple[str, str]:
        """The two sides in words."""
        index = "i₀" if self.quantity == "c" else "j₁"
        return f"{self.quantity}_{scene.kind}[j₀, {index}]", self.bound.format(a=NAMES[formula])

    def entries(self, w: World) -> Value:
        """The entries that the part speaks of."""
        return getattr(w, self.quantity)[self.mask(w)]

    def mask(self, w: World) -> Any:
        """Where they stand."""
        keys = PAIRS[self.keys](w) if self.keys in PAIRS else KEYS[self.keys](w)[None, :]
        return ROWS[self.rows](w)[:, None] & keys

    def sides(self, w: World) -> tuple[Value, Value]:
        """Left and right of ≤ or =; a lower bound stands on the left."""
        found, bound = self.entries(w), self.value(w)
        return (bound, found) if self.relation == ">=" else (found, bound)


@dataclass(frozen=True)
class Lemma:
    """A lemma with numbered parts about one scene; `printed` says what of the scene the paper prints otherwise."""

    id: str
    scene: Scene
    formula: Symbol
    parts: tuple[Part, ...]
    hypothesis: str
    printed: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def claims(self) -> tuple[Claim, ...]:
        """A claim for every part."""
        return tuple(self._claim(part) for part in self.parts)

    def proved(self, part: Part) -> Inequality:
        """A part as its proof has it."""
        return entrywise(self.scene, self.formula, part)

    def _claim(self, part: Part) -> Claim:
        shown = replace(part, **part.printed)
        left, right = shown.text(self.scene, self.formula)
        sign = {"=": "=", "<=": "≤", ">=": "≥"}[part.relation]
        check: Inequality | Misprint = self.proved(part)
        if self.printed or part.printed:
            check = Misprint(entrywise(replace(self.scene, **self.printed), self.formula, shown), self.proved(part))
        return Claim(
            id=f"B.{self.id}.{part.name}",
            where=f"Lemma {self.id}, Part {part.name}",
            statement=f"for {shown.rows} and {shown.keys}: {left} {sign} {right}",
            check=check,
            hypothesis=self.hypothesis,
            corrected=part.corrected,
            sharp=isinstance(check, Inequality) and (part.sharp or part.relation == "="),
            note=self.note,
        )


def entrywise(scene: Scene, formula: Symbol, part: Part) -> Inequality:
    """The inequality of a part; a lower bound stands on the left."""
    left, right = part.text(scene, formula)
    if part.relation == ">=":
        left, right = right, left
    return about(
        scene,
        formula,
        (f"{left} for {part.rows}, {part.keys}", right),
        part.sides,
        relation="=" if part.relation == "=" else "<=",
        speaks=lambda w: bool(part.mask(w).any()),
        shown=part.quantity,
    )


def whole(lemma: Lemma, scene: Scene) -> Inequality:
    """All parts of a lemma at once, about a scene: every part as one or two inequalities."""

    def sides(w: World) -> tuple[Value, Value]:
        pairs = [pair for part in lemma.parts for pair in _directions(part, w)]
        return joined(left for left, _ in pairs), joined(right for _, right in pairs)

    return about(scene, lemma.formula, ("the left sides of all parts", "their right sides"), sides, shown="c")


def _directions(part: Part, w: World) -> Iterable[tuple[Value, Value]]:
    left, right = np.broadcast_arrays(*map(np.asarray, part.sides(w)))
    yield left, right
    if part.relation == "=":
        yield right, left


def joined(pieces: Iterable[Value]) -> Value:
    """Numbers and arrays in one row."""
    return np.concatenate([np.ravel(piece) for piece in pieces])


SIZES: dict[str, tuple[Size, ...]] = {
    "self": tuple({"d": d, "t": t} for d, t in ((3, 2), (4, 1), (4, 2), (5, 3), (8, 5))),
    "cross": tuple({"d": d, "t": t} for d, t in ((2, 2), (3, 1), (3, 2), (4, 3), (7, 5))),
}


def about(
    scene: Scene,
    formula: Symbol,
    text: tuple[str, str],
    sides: Sides,
    relation: Relation = "<=",
    speaks: Callable[[World], bool] = lambda w: True,
    shown: str = "u",
) -> Inequality:
    """An inequality about a scene: `sides` from a world, `speaks` where it says anything, `shown` in the story."""
    symbols = tuple(dict.fromkeys((scene.symbol, formula)))

    def allowed(ar: Arithmetic, **given: Value) -> bool:
        w = World(ar, scene, formula, **given)
        return speaks(w) and _conditions(w, {name: given[name] for name in symbols})

    return Inequality(
        left=text[0],
        right=text[1],
        work=_work(scene, formula, sides, shown),
        draw=lambda random, size: _draw(scene, symbols, random, size),
        sizes=SIZES[scene.family],
        allowed=allowed,
        starts=lambda size: _starts(scene, symbols, size),
        relation=relation,
    )


def _work(scene: Scene, formula: Symbol, sides: Sides, shown: str) -> Work:
    matrices = ("A₁ = A₂ = A₃ over √(log n)",) if scene.family == "self" else ("A₁ over log n", "A₂ = A₃")
    kept = {"u": ("u",), "f": ("u", "f"), "c": ("f", "c")}[shown]

    def work(ar: Arithmetic, **given: Value) -> Any:
        w = World(ar, scene, formula, **given)
        yield "n", w.n
        yield from zip(matrices, w.plain, strict=False)
        for name in kept:
            yield f"{name}_{scene.kind}", getattr(w, name)
        return sides(w)

    return work


def _conditions(w: World, a: Mapping[str, Value]) -> bool:
    """The conditions of the definitions: 0 < a₀ < 1/10, a₁ ≥ 7/10 (self) or > 1 (cross), b and c at least 1/10."""
    tenth, least = w.ar.number("1/10"), w.ar.number(w.scene.least)
    if "a0" in a and not (a["a0"] > 0 and a["a0"] < tenth):
        return False
    if w.scene.family == "cross":
        return "a1" not in a or bool(a["a1"] > least)
    return ("a1" not in a or bool(a["a1"] >= least)) and w.b >= tenth and w.b < 1 and bool(w.c_size >= tenth)


def _draw(scene: Scene, symbols: Iterable[Symbol], random: Random, size: Size) -> Instance:
    sizes = {
        "a0": float(random.uniform(0, 0.1)),
        "a1": float(scene.least) + float(random.exponential(0.7)),
    }
    a: dict[str, float] = {name: sizes[name] for name in symbols}
    n = (size["d"] - scene.spare) * size["t"]
    special = {name: int(random.integers(1, n + 1)) for name in _indices(scene)}
    b = {"b": float(random.uniform(0.1, 0.9))} if scene.family == "self" else {}
    return {**size, **special, **a, **b}


def _starts(scene: Scene, symbols: tuple[Symbol, ...], size: Size) -> Iterable[Instance]:
    """Corners and simple values: special tokens first or last, a's and b small, middling and large."""
    n = (size["d"] - scene.spare) * size["t"]
    options: dict[str, tuple[Any, ...]] = dict.fromkeys(_indices(scene), (1, n))
    values = {"a0": (Fraction(1, 20), Fraction(1, 11)), "a1": (scene.least, Fraction(3, 2), Fraction(3))}
    options |= {name: values[name] for name in symbols}
    if scene.family == "self":
        options["b"] = (Fraction(1, 10), Fraction(1, 2), Fraction(9, 10))
    for chosen in itertools.product(*options.values()):
        yield {**size, **dict(zip(options, chosen, strict=True))}


def _indices(scene: Scene) -> tuple[str, ...]:
    return ("j3",) if scene.family == "self" else ("j2", "j3")
