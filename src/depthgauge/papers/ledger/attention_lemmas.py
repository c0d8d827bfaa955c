"""Lemmas without random signs.

Self-attention with QKᵀ all ones (D.2 to D.15) or I_d (E.1, E.2), and cross-attention (F.2 to F.15).
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Evaluation, Inequality, Misprint
from depthgauge.papers.ledger.lemma_parts import (
    AttentionSetup,
    DenseAttention,
    Lemma,
    LemmaPart,
    all_parts,
    concatenated,
    data_set_inequality,
    part_inequality,
    sharpened,
)

SETUPS = {
    (kind, dataset): AttentionSetup("self", dataset, kind, product="ones", least=Fraction(7, 10))
    for kind in ("exp", "lin")
    for dataset in (0, 1)
}
HYPOTHESIS = "Definition D.1 (n = (d−2)t ≥ 2, b + c = 1, b and c ≥ 1/10, {a}), QKᵀ all ones"
SIZE = {"a1": "a₁ ≥ 7/10", "a0": "0 < a₀ < 1/10"}
_WRONG_INDEX = "Part 4b repeats the condition j₀ ≠ j₃ where j₁ ≠ j₃ is intended; as printed j₁ is arbitrary."
_BULLETS = "The unnumbered bullets are called a and b here."
_J3, _NOT_J3 = "j₀ = j₃", "j₀ ≠ j₃"
_KEY, _NOT_KEY = "j₁ = j₃", "j₁ ≠ j₃"
_FIRST, _LAST = "i₀ = 1", "i₀ = d"
_OWN, _OTHER, _BLOCK = "i₀ in the class of j₃", "i₀ in another class", "i₀ in a class"


def _u_parts(special: str, mixed: str, plain: str) -> tuple[LemmaPart, ...]:
    """Parts 1 and 2 of Lemmas D.2, D.6 (exp) and D.10, D.14 (lin)."""
    return (
        LemmaPart("1a", "u", _J3, _KEY, "=", special),
        LemmaPart("1b", "u", _J3, _NOT_KEY, "=", mixed),
        LemmaPart("2a", "u", _NOT_J3, _KEY, "=", mixed),
        LemmaPart("2b", "u", _NOT_J3, _NOT_KEY, "=", plain),
    )


U_EXP = _u_parts("n^((1 + {a})²)", "n^(1 + {a})", "n")
U_LIN = _u_parts("(1 + {a})² log n", "(1 + {a}) log n", "log n")
F_1 = (
    LemmaPart("3a", "f", _J3, _KEY, ">=", "1/2"),
    LemmaPart("3b", "f", _J3, _NOT_KEY, "<=", "1/n"),
    LemmaPart("4a", "f", _NOT_J3, _KEY, "<=", "1/n^(1 − {a})"),
    LemmaPart("4b", "f", _NOT_J3, _NOT_KEY, "<=", "1/n", printed={"keys": "any j₁"}),
)
F_0 = (LemmaPart("3a", "f", _J3, _KEY, "<=", "1/n^(1 − 2{a})"), *F_1[1:])
F_LIN = (
    LemmaPart("3a", "f", _J3, _KEY, "<=", "(1 + {a})/n", sharp=True),
    LemmaPart("3b", "f", _J3, _NOT_KEY, "<=", "1/n", sharp=True),
    LemmaPart("4a", "f", _NOT_J3, _KEY, "<=", "(1 + {a})/n", sharp=True),
    F_1[3],
)
HALF_FIRST = LemmaPart("1", "c", _J3, _FIRST, ">=", "½ {a}√(log n)")
HALF_OWN = LemmaPart("2a", "c", _J3, _OWN, ">=", "½ b√(log n)")
LAST = (LemmaPart("3", "c", _J3, _LAST, "=", "c√(log n)"), LemmaPart("6", "c", _NOT_J3, _LAST, "=", "c√(log n)"))
"""The last coordinate is c√(log n), because the rows of f sum to 1."""
_OWN_CLASS = LemmaPart("5a", "c", _NOT_J3, _OWN, "<=", "(1/n^(1 − {a}) + (t − 1)/n) b√(log n)")
C_1 = (
    HALF_FIRST,
    HALF_OWN,
    LemmaPart("2b", "c", _J3, _OTHER, "<=", "(t/n) b√(log n)"),
    LemmaPart("4", "c", _NOT_J3, _FIRST, "<=", "(1/n^(1 − {a})) {a}√(log n)"),
    LemmaPart("5", "c", _NOT_J3, _BLOCK, "<=", "(t/n) b√(log n)", corrected="ours.b-d-3-5"),
    *LAST,
)
C_0 = (
    LemmaPart("1", "c", _J3, _FIRST, "<=", "(1/n^(1 − 2{a})) {a}√(log n)"),
    LemmaPart("2", "c", _J3, _BLOCK, "<=", "(t/n^(1 − 2{a})) b√(log n)"),
    LemmaPart("2a", "c", _J3, _OWN, "<=", "(1/n^(1 − 2{a}) + (t − 1)/n) b√(log n)"),
    LemmaPart("2b", "c", _J3, _OTHER, "<=", "(t/n) b√(log n)"),
    LemmaPart("4", "c", _NOT_J3, _FIRST, "<=", "(1/n^(1 − {a})) {a}√(log n)"),
    LemmaPart("5", "c", _NOT_J3, _BLOCK, "<=", "(t/n^(1 − {a})) b√(log n)"),
    _OWN_CLASS,
    LemmaPart("5b", "c", _NOT_J3, _OTHER, "<=", "(t/n) b√(log n)"),
    *LAST,
)
C_LIN = (
    LemmaPart("1", "c", _J3, _FIRST, "<=", "((1 + {a})/n) {a}√(log n)", sharp=True),
    LemmaPart("2", "c", _J3, _BLOCK, "<=", "((1 + {a})/n) t b√(log n)"),
    LemmaPart("4", "c", _NOT_J3, _FIRST, "<=", "((1 + {a})/n) {a}√(log n)", sharp=True),
    LemmaPart("5", "c", _NOT_J3, _BLOCK, "<=", "((1 + {a})/n) t b√(log n)"),
    *LAST,
)


def _lemma(id: str, kind: str, a: int, parts: tuple[LemmaPart, ...], note: str = "", **printed: Any) -> Lemma:
    """A lemma about D₀ (a = 0) or D₁ (a = 1); `printed` holds the parts of the setup that are printed differently."""
    setup = SETUPS[kind, a]
    return Lemma(id, setup, setup.symbol, parts, HYPOTHESIS.format(a=SIZE[setup.symbol]), printed, note)


LEMMAS = (
    _lemma("D.2", "exp", 1, U_EXP + F_1, _WRONG_INDEX),
    _lemma("D.3", "exp", 1, C_1, _BULLETS),
    _lemma(
        "D.6", "exp", 0, U_EXP + F_0,
        f"D₁ is printed in place of D₀: the formulas contain a₀. {_WRONG_INDEX}", dataset=1,
    ),
    _lemma("D.7", "exp", 0, sharpened(C_0), _BULLETS),
    _lemma("D.10", "lin", 1, U_LIN + F_LIN, _WRONG_INDEX),
    _lemma("D.11", "lin", 1, C_LIN),
    _lemma(
        "D.14", "lin", 0, U_LIN + F_LIN,
        f"The lemma is printed with QKᵀ = I_d; its proof has all ones. {_WRONG_INDEX}", product="identity",
    ),
    _lemma("D.15", "lin", 0, sharpened(C_LIN)),
)  # fmt: skip

CORRECTED = Claim(
    "ours.b-d-3-5", "Lemma D.3, Part 5, in the form of Lemma D.7, Part 5",
    "for j₀ ≠ j₃: c_exp[j₀, i₀] ≤ (1/n^(1 − a₁) + (t − 1)/n) b√(log n) for i₀ in the class of j₃",
    part_inequality(SETUPS["exp", 1], "a1", _OWN_CLASS), HYPOTHESIS.format(a=SIZE["a1"]),
    note="For the other classes the bound (t/n) b√(log n) is as printed.",
)  # fmt: skip

ALL_ONES: tuple[Claim, ...] = (*(claim for lemma in LEMMAS for claim in lemma.claims()), CORRECTED)


# --- Section E: self-attention with QKᵀ = I_d. Lemmas E.1 and E.2, and their contradictory conditions ----------------

SETUP = AttentionSetup("self", 1, "exp", product="identity", tie="squares", least=Fraction(1))
HYPOTHESIS_E = "a₁ ≥ 1, b² + c² = 1, b and c ≥ 1/10, otherwise Definition D.1 (n = (d−2)t ≥ 2); QKᵀ = I_d"
_READING = "Read with b² + c² = 1 in place of b + c = 1 of Definition D.1; the two contradict each other (see B.E.1)."
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
    HYPOTHESIS_E, note=f"{_READING} Part 4 has u where its proof has f, and t−1 indices where there are t.",
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
    f"as printed: Definition D.1 with QKᵀ all ones; as intended: {HYPOTHESIS_E}",
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
    return Claim(f"B.E.1.{name}", f"Lemma E.1, Part {text}", statement, check, HYPOTHESIS_E, sharp=True, note=_READING)


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
        f"B.E.1.{name}", f"Lemma E.1, Part {where}", statement, check, HYPOTHESIS_E, sharp=proved is None, note=note
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
    all_parts(E_1, SETUP), HYPOTHESIS_E, note="In rows j₀ ≠ j₃ the class of j₀ has t keys, j₀ included.",
)  # fmt: skip
_BOUND = Claim(
    "ours.b-squares", "why the conditions of Lemma E.1 and Theorem E.4 contradict each other", "b² + c² ≤ 41/50",
    _squares(("b² + c²", "41/50"), lambda ar, squares: (squares, ar.number("41/50"))), PRINTED_CONDITIONS, sharp=True,
)  # fmt: skip
_E_2 = Claim(
    "B.E.2", "Lemma E.2, all of its parts", "Parts 1 to 6 with QKᵀ all ones",
    Misprint(all_parts(E_2, replace(SETUP, **E_2.printed)), all_parts(E_2, SETUP)), E_2.hypothesis, note=E_2.note,
)  # fmt: skip

IDENTITY: tuple[Claim, ...] = (
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


# --- Section F: the entries of u, f and c on the cross-attention data sets, QKᵀ = I_d ---------------------------------

CROSS_SETUPS = {(kind, a): AttentionSetup("cross", a, kind) for kind in ("exp", "lin") for a in (0, 1)}
_CROSS_HYPOTHESIS = "Definition F.1 (n = (d−1)t ≥ 2, {a}), QKᵀ = I_d, V = I_d"
_CROSS_SIZE = SIZE | {"a1": "a₁ > 1"}
_COLUMNS = "The repeated identity is read as columns 2 to d; the definition's “d−1” is one too small."
_INDEX = "j₃ is printed in place of j₂, the index of the special row."
_J2, _NOT_J2 = "j₀ = j₂", "j₀ ≠ j₂"
_AS_J3, _AS_NOT_J3 = {"rows": _J3}, {"rows": _NOT_J3}

_CROSS_U = (
    LemmaPart("1a", "u", _J2, _KEY, "=", "n^(1 + {a})"),
    LemmaPart("1b", "u", _J2, _NOT_KEY, "=", "n"),
    LemmaPart("2a", "u", _NOT_J2, _KEY, "=", "n"),
    LemmaPart("2b", "u", _NOT_J2, _NOT_KEY, "=", "n"),
)
_FLAT = (
    LemmaPart("3b", "f", _J2, _NOT_KEY, "<=", "1/n"),
    LemmaPart("4a", "f", _NOT_J2, _KEY, "=", "1/n", printed={"rows": _J2, "keys": "any j₁"}),
    LemmaPart("4b", "f", _NOT_J2, "any j₁", "=", "1/n"),
)
_CROSS_F_1 = (LemmaPart("3a", "f", _J2, _KEY, ">=", "1/2", sharp=True), *_FLAT)
_CROSS_F_0 = (LemmaPart("3a", "f", _J2, _KEY, "<=", "1/n^(1 − {a})"), *_FLAT)
_CROSS_C_1 = (
    LemmaPart("1", "c", _J2, _FIRST, ">=", "1/2", sharp=True),
    LemmaPart("2a", "c", _J2, _OWN, ">=", "1/2"),
    LemmaPart("2b", "c", _J2, _OTHER, "<=", "t/n"),
    LemmaPart("3", "c", _NOT_J2, _FIRST, "<=", "1/n", sharp=True),
    LemmaPart("4", "c", _NOT_J2, _BLOCK, "<=", "t/n", sharp=True),
)
_CROSS_C_0 = (
    LemmaPart("1", "c", _J2, _FIRST, "<=", "1/n^(1 − {a})", printed=_AS_J3),
    LemmaPart("2", "c", _J2, _BLOCK, "<=", "t/n^(1 − {a})", printed=_AS_J3),
    LemmaPart("4", "c", _NOT_J2, _FIRST, "<=", "1/n", printed=_AS_NOT_J3),
    LemmaPart("5", "c", _NOT_J2, _BLOCK, "<=", "t/n", printed=_AS_NOT_J3),
)


def _linear_u_and_f(row: dict[str, Any], other: dict[str, Any]) -> tuple[LemmaPart, ...]:
    """Lemmas F.10 and F.14 without Part 2; `row` and `other` are the conditions on the rows as printed."""
    return (
        LemmaPart("1", "u", _J2, _KEY, "=", "(1 + {a}) log n", printed=row),
        LemmaPart("3", "f", _J2, _KEY, "<=", "(1 + {a})/n", sharp=True, printed=row),
        LemmaPart("4", "f", _J2, _NOT_KEY, "<=", "1/n", sharp=True, printed=row),
        LemmaPart("5", "f", _NOT_J2, "any j₁", "=", "1/n", printed=other),
    )


def _linear_c(row: dict[str, Any], other: dict[str, Any]) -> tuple[LemmaPart, ...]:
    return (
        LemmaPart("1", "c", _J2, _FIRST, "<=", "(1 + {a})/n", sharp=True, printed=row),
        LemmaPart("2", "c", _J2, _BLOCK, "<=", "(1 + {a}) t/n", printed=row),
        LemmaPart("3", "c", _NOT_J2, _FIRST, "<=", "1/n", sharp=True, printed=other),
        LemmaPart("4", "c", _NOT_J2, _BLOCK, "<=", "t/n", sharp=True, printed=other),
    )


def _cross(id: str, kind: str, a: int, parts: tuple[LemmaPart, ...], note: str = "", **printed: Any) -> Lemma:
    """A lemma about D₀ (a = 0) or D₁ (a = 1); `printed` holds the parts of the setup that are printed differently."""
    setup = CROSS_SETUPS[kind, a]
    size = " and ".join(_CROSS_SIZE[name] for name in dict.fromkeys((setup.symbol, *(("a1", "a0") if printed else ()))))
    return Lemma(
        id, setup, setup.symbol, parts, _CROSS_HYPOTHESIS.format(a=size), printed, f"{note} {_COLUMNS}".strip()
    )


_FLAT_ROW = "Part 4a is printed for j₀ = j₂, but its proof has n/(n·n) for every entry, which needs j₀ ≠ j₂."
_D1_FOR_D0 = "D₁ is printed in place of D₀: the formulas contain a₀."
_D0_FOR_D1 = "D₀ is printed in place of D₁: the formulas contain a₁."
_PART_2 = LemmaPart("2", "u", _NOT_J2, _NOT_KEY, "=", "log n", printed=_AS_NOT_J3)
_CROSS_LEMMAS = (
    _cross("F.2", "exp", 1, _CROSS_U + _CROSS_F_1, note=_FLAT_ROW),
    _cross("F.3", "exp", 1, _CROSS_C_1, note="The unnumbered bullets are called a and b here."),
    _cross("F.6", "exp", 0, _CROSS_U + _CROSS_F_0, note=f"{_D1_FOR_D0} {_FLAT_ROW}", dataset=1),
    _cross("F.7", "exp", 0, _CROSS_C_0, note=f"{_INDEX} The paper numbers its parts 1, 2, 4, 5."),
    _cross("F.10", "lin", 1, _linear_u_and_f({}, {})),
    _cross("F.11", "lin", 1, _linear_c(_AS_J3, _AS_NOT_J3), note=f"{_D0_FOR_D1} {_INDEX}", dataset=0),
    _cross("F.14", "lin", 0, (*_linear_u_and_f(_AS_J3, _AS_NOT_J3), _PART_2), f"{_D1_FOR_D0} {_INDEX}", dataset=1),
    _cross("F.15", "lin", 0, sharpened(_linear_c({}, {}))),
)


def _everywhere_else(att: DenseAttention) -> tuple[Any, Any]:
    special = (att.token == att.j2)[:, None] & (att.token == att.j3)[None, :]
    return att.u[~special], att.log


_F_10_2 = Claim(
    "B.F.10.2", "Lemma F.10, Part 2", "for j₀ ≠ j₂ or j₁ ≠ j₃: u_lin[j₀, j₁] = log n",
    data_set_inequality(
        CROSS_SETUPS["lin", 1], "a1", ("u_lin[j₀, j₁]", "log n"), _everywhere_else, relation="=",
        condition="j₀ ≠ j₂ or j₁ ≠ j₃",
    ),
    _CROSS_HYPOTHESIS.format(a=_CROSS_SIZE["a1"]), sharp=True, note=_COLUMNS,
)  # fmt: skip


def _token_count(extra_columns: int) -> Inequality:
    return data_set_inequality(
        CROSS_SETUPS["lin", 0], "a0", ("the number of rows of A₂", f"t(d−{extra_columns})"),
        lambda att: (len(att.unscaled[1]), att.t * (att.d - extra_columns)), relation="=",
    )  # fmt: skip


_F_15 = Claim(
    "B.F.15", "Lemma F.15, its condition on n", "n = t(d−2) for the data set of Definition F.1",
    Misprint(_token_count(2), _token_count(1)), _CROSS_HYPOTHESIS.format(a=_CROSS_SIZE["a0"]),
    note=f"The parts of the lemma are checked with n = t(d−1). {_COLUMNS}",
)  # fmt: skip

CROSS: tuple[Claim, ...] = (*(claim for lemma in _CROSS_LEMMAS for claim in lemma.claims()), _F_10_2, _F_15)
