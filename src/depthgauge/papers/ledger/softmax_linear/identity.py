"""Section E: self-attention with QKᵀ = I_d. Lemmas E.1 and E.2, and their contradictory conditions."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Evaluation, Inequality, Misprint
from depthgauge.papers.ledger.softmax_linear.dense_attention import AttentionSetup, DenseAttention
from depthgauge.papers.ledger.softmax_linear.parts import Lemma, LemmaPart, all_parts, concatenated, data_set_inequality
from depthgauge.papers.ledger.softmax_linear.self_attention import HALF_FIRST, HALF_OWN, LAST

SETUP = AttentionSetup("self", 1, "exp", product="identity", tie="squares", least=Fraction(1))
HYPOTHESIS = "a₁ ≥ 1, b² + c² = 1, b and c ≥ 1/10, otherwise Definition D.1 (n = (d−2)t ≥ 2); QKᵀ = I_d"
_READING = "Read with b² + c² = 1 in place of b + c = 1 of Definition D.1; the two contradict each other (see B.E.1)."
_J3, _NOT_J3 = "j₀ = j₃", "j₀ ≠ j₃"
_ROW = {True: _J3, False: _NOT_J3}
_LEVEL = {True: "u_exp[j₀, j₁] = n^(b² + c²)", False: "u_exp[j₀, j₁] = n^(c²)"}


E_1 = Lemma(
    "E.1", SETUP, "a1",
    (
        LemmaPart("1a", "u", _J3, "j₁ = j₃", "=", "n^({a}² + b² + c²)", printed={"bound": "n^((1 + {a})²)"}),
        LemmaPart("3a", "f", _J3, "j₁ = j₃", ">=", "1/2", sharp=True),
        LemmaPart("3b", "f", _J3, "j₁ ≠ j₃", "<=", "1/n^(1 − b²)"),
        LemmaPart("4a", "f", _NOT_J3, "j₁ in the class of j₀", "<=", "1/n^(1 − b²)", printed={"quantity": "u"}),
        LemmaPart("4b", "f", _NOT_J3, "j₁ in another class than j₀", "<=", "1/n", printed={"quantity": "u"}),
    ),
    HYPOTHESIS, note=f"{_READING} Part 4 has u where its proof has f, and t−1 indices where there are t.",
)  # fmt: skip

E_2 = Lemma(
    "E.2", SETUP, "a1",
    (
        HALF_FIRST,
        HALF_OWN,
        LemmaPart("2b", "c", _J3, "i₀ in another class", "<=", "(t/n^(1 − b²)) b√(log n)"),
        LAST[0],
        LemmaPart("4", "c", _NOT_J3, "i₀ = 1", "<=", "(1/n^(1 − b²)) {a}√(log n)"),
        LemmaPart("5", "c", _NOT_J3, "i₀ in a class", "<=", "(t/n^(1 − b²)) b√(log n)"),
        LAST[1],
    ),
    f"as printed: Definition D.1 with QKᵀ all ones; as intended: {HYPOTHESIS}",
    printed={"product": "ones", "tie": "sum", "least": Fraction(7, 10)},
    note="The lemma is printed for QKᵀ all ones; Section E and the proof have I_d.",
)  # fmt: skip


def _rows(att: DenseAttention, special: bool) -> Any:
    return np.flatnonzero((att.token == att.j3) == special)


def _range(name: str, special: bool, text: str) -> Claim:
    """n^(c²) ≤ u ≤ n^(b² + c²) in row j₃ without its own entry, or in the other rows."""

    def sides(att: DenseAttention) -> tuple[Value, Value]:
        rows = att.u[_rows(att, special)]
        found = np.ravel(rows[:, att.token != att.j3] if special else rows)
        b, c = att.b * att.b, att.c_parameter * att.c_parameter
        low, high = np.full(found.size, att.power(c)), np.full(found.size, att.power(b + c))
        return concatenated((low, found)), concatenated((found, high))

    where = f"{_ROW[special]} and " + ("j₁ ≠ j₃" if special else "any j₁")
    check = data_set_inequality(SETUP, "a1", ("n^(c²), u_exp[j₀, j₁]", "u_exp[j₀, j₁], n^(b² + c²)"), sides)
    statement = f"for {where}: n^(c²) ≤ u_exp[j₀, j₁] ≤ n^(b² + c²)"
    return Claim(f"B.E.1.{name}", f"Lemma E.1, Part {text}", statement, check, HYPOTHESIS, sharp=True, note=_READING)


_NUMBERS: dict[str, Callable[[DenseAttention], int]] = {
    "t": lambda att: att.t,
    "t − 1": lambda att: att.t - 1,
    "n − t": lambda att: att.n - att.t,
}


def _counted(special: bool, near: bool, number: str) -> Inequality:
    """The number of keys j₁ of a row (other than j₃ in row j₃) with u = n^(b² + c²), or with n^(c²)."""

    def sides(att: DenseAttention) -> tuple[Value, Value]:
        between = att.power(att.c_parameter * att.c_parameter + att.b * att.b / 2)
        rows = att.u[_rows(att, special)]
        keys = rows[:, att.token != att.j3] if special else rows
        counted = (keys > between) if near else (keys < between)
        return counted.sum(axis=1).astype(int), _NUMBERS[number](att)

    text = (f"the number of j₁ with {_LEVEL[near]}", number)
    return data_set_inequality(SETUP, "a1", text, sides, relation="=", condition=_ROW[special])


def _count_claim(name: str, where: str, special: bool, near: bool, number: str, proved: str | None = None) -> Claim:
    """A bullet of Part 1b or 2; `proved` is the number in the proof if it differs from the printed one."""
    printed = _counted(special, near, number)
    check, note = printed if proved is None else Misprint(printed, _counted(special, near, proved)), _READING
    if proved is not None:
        note += f" The proof of Part 4 counts {proved}, because j₀ belongs to its own class."
    statement = f"for {_ROW[special]}: {number} indices j₁ have {_LEVEL[near]}"
    return Claim(
        f"B.E.1.{name}", f"Lemma E.1, Part {where}", statement, check, HYPOTHESIS, sharp=proved is None, note=note
    )


def _squares(text: tuple[str, str], sides: Callable[[Arithmetic, Value], tuple[Value, Value]]) -> Inequality:
    """An inequality about b² + c² for b + c = 1, b and c at least 1/10."""

    def evaluate(ar: Arithmetic, *, b: Value) -> Evaluation:
        c, largest = 1 - b, 1 - 2 * ar.number("1/10") * ar.number("9/10")
        steps = {"c = 1 − b": c, "(b + c)²": (b + c) * (b + c), "2bc": 2 * b * c}
        steps |= {"b² + c² = (b + c)² − 2bc": b * b + c * c}
        steps |= {"the largest value of 1 − 2bc, at b = 1/10 and c = 9/10": largest}
        return steps, *sides(ar, b * b + c * c)

    return Inequality(
        *text, evaluate, lambda random, size: {"b": float(random.uniform(0.1, 0.9))}, ({"scalars": 2},),
        allowed=lambda ar, b: bool(b >= ar.number("1/10")) and bool(1 - b >= ar.number("1/10")),
        starts=lambda size: ({"b": Fraction(k, 10)} for k in (5, 1, 9)), condition="b + c = 1",
    )  # fmt: skip


CONTRADICTION = _squares(("1", "b² + c²"), lambda ar, squares: (ar.number(1), squares))
PRINTED_CONDITIONS = "Definition D.1 (b + c = 1, b and c ≥ 1/10)"
IMPOSSIBLE = (
    "No data set satisfies the printed conditions: b + c = 1 gives b² + c² = 1 − 2bc ≤ 41/50 < 1. "
    "As printed the statement is therefore vacuous"
)

_WHOLE = Claim(
    "B.E.1", "Lemma E.1, its conditions and all of its parts",
    "for b and c of Definition D.1: b² + c² = 1, and Parts 1 to 4 hold",
    Misprint(CONTRADICTION, all_parts(E_1, SETUP, "b² + c² = 1 in place of b + c = 1")), PRINTED_CONDITIONS,
    "ours.b-e-1",
    note=f"{IMPOSSIBLE}. The parts have their own entries (B.E.1.1a and following), read without b + c = 1.",
)  # fmt: skip
_PARTS_TOGETHER = Claim(
    "ours.b-e-1", "Lemma E.1 with satisfiable conditions",
    "u = n^(a₁² + b² + c²) at (j₃, j₃), f ≥ ½ there, f ≤ 1/n^(1 − b²) within a class, f ≤ 1/n outside",
    all_parts(E_1, SETUP), HYPOTHESIS, note="In rows j₀ ≠ j₃ the class of j₀ has t keys, j₀ included.",
)  # fmt: skip
_BOUND = Claim(
    "ours.b-squares", "why the conditions of Lemma E.1 and Theorem E.4 contradict each other", "b² + c² ≤ 41/50",
    _squares(("b² + c²", "41/50"), lambda ar, squares: (squares, ar.number("41/50"))), PRINTED_CONDITIONS, sharp=True,
)  # fmt: skip
_E_2 = Claim(
    "B.E.2", "Lemma E.2, all of its parts", "Parts 1 to 6 with QKᵀ all ones",
    Misprint(all_parts(E_2, replace(SETUP, **E_2.printed)), all_parts(E_2, SETUP)), E_2.hypothesis, note=E_2.note,
)  # fmt: skip

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
