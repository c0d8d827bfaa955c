"""Section E: self-attention with QKᵀ = I_d, Lemmas E.1 and E.2, and the conditions that contradict each other."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from depthgauge.ledger.arithmetic import Arithmetic, Value
from depthgauge.ledger.claim import Claim, Inequality, Misprint
from depthgauge.ledger.softmax_linear.dense_attention import Scene, World
from depthgauge.ledger.softmax_linear.parts import Lemma, Part, about, joined, whole
from depthgauge.ledger.softmax_linear.self_attention import HALF_FIRST, HALF_OWN, last_column

SCENE = Scene("self", 1, "exp", product="identity", tie="squares", least=Fraction(1))
HYPOTHESIS = "a₁ ≥ 1, b² + c² = 1, b and c ≥ 1/10, else Definition D.1 (n = (d−2)t ≥ 2); QKᵀ = I_d"
_UNTIED = "Read with b² + c² = 1 in place of Definition D.1's b + c = 1: both together cannot be (see B.E.1)."
_J3, _NOT_J3 = "j₀ = j₃", "j₀ ≠ j₃"
_NEAR = ("1/n^(1 − b²)", lambda w: w.power(w.b * w.b - 1))


def _near_power(w: World) -> Value:
    return w.power(w.b * w.b + w.c_size * w.c_size)


def _far_power(w: World) -> Value:
    return w.power(w.c_size * w.c_size)


E_1 = Lemma(
    "E.1",
    SCENE,
    "a1",
    (
        Part(
            "1a",
            "u",
            _J3,
            "j₁ = j₃",
            "=",
            "n^({a}² + b² + c²)",
            lambda w: w.power(w.a * w.a + w.b * w.b + w.c_size * w.c_size),
            printed={"bound": "n^((1 + {a})²)", "value": lambda w: w.power((1 + w.a) ** 2)},
        ),
        Part("3a", "f", _J3, "j₁ = j₃", ">=", "1/2", lambda w: w.share(1, 2), sharp=True),
        Part("3b", "f", _J3, "j₁ ≠ j₃", "<=", *_NEAR),
        Part("4a", "f", _NOT_J3, "j₁ of the class of j₀", "<=", *_NEAR, printed={"quantity": "u"}),
        Part(
            "4b",
            "f",
            _NOT_J3,
            "j₁ of another class than j₀",
            "<=",
            "1/n",
            lambda w: w.share(1, w.n),
            printed={"quantity": "u"},
        ),
    ),
    HYPOTHESIS,
    note=f"{_UNTIED} Part 4 prints u where its proof has f, and t−1 indices where there are t.",
)

E_2 = Lemma(
    "E.2",
    SCENE,
    "a1",
    (
        HALF_FIRST,
        HALF_OWN,
        Part(
            "2b",
            "c",
            _J3,
            "i₀ of another class",
            "<=",
            "(t/n^(1 − b²)) b√(log n)",
            lambda w: w.t * _NEAR[1](w) * w.b * w.root,
        ),
        last_column("3", _J3),
        Part("4", "c", _NOT_J3, "i₀ = 1", "<=", "(1/n^(1 − b²)) {a}√(log n)", lambda w: _NEAR[1](w) * w.a * w.root),
        Part(
            "5",
            "c",
            _NOT_J3,
            "i₀ of a class",
            "<=",
            "(t/n^(1 − b²)) b√(log n)",
            lambda w: w.t * _NEAR[1](w) * w.b * w.root,
        ),
        last_column("6", _NOT_J3),
    ),
    f"as printed: Definition D.1 with QKᵀ all ones; as meant: {HYPOTHESIS}",
    printed={"product": "ones", "tie": "sum", "least": Fraction(7, 10)},
    note="QKᵀ all ones is printed where Section E and the proof have I_d.",
)


def _rows(w: World, special: bool) -> Any:
    return np.flatnonzero((w.token == w.j3) == special)


def _range(name: str, special: bool, text: str) -> Claim:
    """u between n^(c²) and n^(b² + c²) in some rows; of row j₃ without its own entry."""

    def sides(w: World) -> tuple[Value, Value]:
        rows = w.u[_rows(w, special)]
        found = np.ravel(rows[:, w.token != w.j3] if special else rows)
        low, high = np.full(found.size, _far_power(w)), np.full(found.size, _near_power(w))
        return joined((low, found)), joined((found, high))

    where = f"{_row(special)} and " + ("j₁ ≠ j₃" if special else "any j₁")
    check = about(SCENE, "a1", ("n^(c²), u_exp[j₀, j₁]", "u_exp[j₀, j₁], n^(b² + c²)"), sides)
    statement = f"for {where}: n^(c²) ≤ u_exp[j₀, j₁] ≤ n^(b² + c²)"
    return Claim(f"B.E.1.{name}", f"Lemma E.1, Part {text}", statement, check, HYPOTHESIS, sharp=True, note=_UNTIED)


_NUMBERS: dict[str, Callable[[World], int]] = {
    "t": lambda w: w.t,
    "t − 1": lambda w: w.t - 1,
    "n − t": lambda w: w.n - w.t,
}


def _counted(special: bool, near: bool, number: str) -> Inequality:
    """How many of a row's keys j₁ (other than j₃ in row j₃) have u = n^(b² + c²), or n^(c²)."""

    def sides(w: World) -> tuple[Value, Value]:
        between = w.power(w.c_size * w.c_size + w.b * w.b / 2)
        rows = w.u[_rows(w, special)]
        keys = rows[:, w.token != w.j3] if special else rows
        alike = (keys > between) if near else (keys < between)
        return alike.sum(axis=1).astype(int), _NUMBERS[number](w)

    return about(SCENE, "a1", (f"how many j₁ have {_level(near)}, for {_row(special)}", number), sides, relation="=")


def _level(near: bool) -> str:
    return "u_exp[j₀, j₁] = " + ("n^(b² + c²)" if near else "n^(c²)")


def _row(special: bool) -> str:
    return _J3 if special else _NOT_J3


def _count_claim(name: str, where: str, special: bool, near: bool, number: str, proved: str | None = None) -> Claim:
    """A bullet of Part 1b or 2, with the number that its proof has where it is another."""
    printed = _counted(special, near, number)
    return Claim(
        id=f"B.E.1.{name}",
        where=f"Lemma E.1, Part {where}",
        statement=f"for {_row(special)}: {number} indices j₁ have {_level(near)}",
        check=printed if proved is None else Misprint(printed, _counted(special, near, proved)),
        hypothesis=HYPOTHESIS,
        sharp=proved is None,
        note=_UNTIED if proved is None else f"{_UNTIED} Part 4's proof counts {proved}: j₀ is of its own class.",
    )


def _squares(text: tuple[str, str], sides: Callable[[Arithmetic, Value], tuple[Value, Value]]) -> Inequality:
    """An inequality about b² + c² for b + c = 1, b and c at least 1/10."""

    def work(ar: Arithmetic, *, b: Value) -> Any:
        c = 1 - b
        yield "c = 1 − b", c
        yield "(b + c)²", (b + c) * (b + c)
        yield "2bc", 2 * b * c
        yield "b² + c² = (b + c)² − 2bc", b * b + c * c
        yield "the most that 1 − 2bc can be, at b = 1/10 and c = 9/10", 1 - 2 * ar.number("1/10") * ar.number("9/10")
        return sides(ar, b * b + c * c)

    def starts(size: object) -> Iterable[dict[str, Fraction]]:
        return ({"b": Fraction(k, 10)} for k in (5, 1, 9))

    return Inequality(
        left=text[0],
        right=text[1],
        work=work,
        draw=lambda random, size: {"b": float(random.uniform(0.1, 0.9))},
        sizes=({"scalars": 2},),
        allowed=lambda ar, b: bool(b >= ar.number("1/10")) and bool(1 - b >= ar.number("1/10")),
        starts=starts,
    )


CONTRADICTION = _squares(("1", "b² + c² where b + c = 1"), lambda ar, squares: (ar.number(1), squares))
TIED = "Definition D.1 (b + c = 1, b and c ≥ 1/10)"
NEVER = (
    "No data set satisfies the printed conditions: b + c = 1 gives b² + c² = 1 − 2bc ≤ 41/50, never 1, "
    "so as printed the statement is about nothing"
)

_WHOLE = Claim(
    id="B.E.1",
    where="Lemma E.1, its conditions and all of its parts",
    statement="for b and c of Definition D.1: b² + c² = 1, and then Parts 1 to 4",
    check=Misprint(
        CONTRADICTION,
        replace(
            whole(E_1, SCENE), left="with b² + c² = 1 put for b + c = 1, every part's left side", right="its right"
        ),
    ),
    hypothesis=TIED,
    corrected="ours.b-e-1",
    note=f"{NEVER}. Its parts stand beside it, read without b + c = 1.",
)
_PARTS_TOGETHER = Claim(
    id="ours.b-e-1",
    where="Lemma E.1 with conditions that can be met",
    statement="u = n^(a₁² + b² + c²) at (j₃, j₃), f ≥ ½ there, f ≤ 1/n^(1 − b²) within a class, f ≤ 1/n outside",
    check=whole(E_1, SCENE),
    hypothesis=HYPOTHESIS,
    note="The tokens of a class other than j₃ are t, themselves counted.",
)
_BOUND = Claim(
    id="ours.b-squares",
    where="why the conditions of Lemma E.1 and Theorem E.4 cannot be met",
    statement="b² + c² ≤ 41/50",
    check=_squares(("b² + c²", "41/50"), lambda ar, squares: (squares, ar.number("41/50"))),
    hypothesis=TIED,
    sharp=True,
)
_E_2 = Claim(
    id="B.E.2",
    where="Lemma E.2, all of its parts",
    statement="Parts 1 to 6 with QKᵀ all ones",
    check=Misprint(whole(E_2, replace(SCENE, **E_2.printed)), whole(E_2, SCENE)),
    hypothesis=E_2.hypothesis,
    note=E_2.note,
)

CLAIMS: tuple[Claim, ...] = (
    _WHOLE,
    *E_1.claims(),
    _range("1b", True, "1b"),
    _count_claim("1b.1", "1b, first bullet", True, True, "t − 1"),
    _count_claim("1b.2", "1b, second bullet", True, False, "n − t"),
    _range("2", False, "2"),
    _count_claim("2a", "2, first bullet", False, True, "t − 1", proved="t"),
    _count_claim("2b", "2, second bullet", False, False, "n − t"),
    _E_2,
    *E_2.claims(),
    _PARTS_TOGETHER,
    _BOUND,
)
