"""Lemmas D.2 to D.15 without random signs: entries of u, f and c on the self-attention data sets, QKᵀ all ones."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from depthgauge.papers.ledger.claim import Claim
from depthgauge.papers.ledger.softmax_linear.dense_attention import AttentionSetup, DenseAttention
from depthgauge.papers.ledger.softmax_linear.parts import Lemma, LemmaPart, part_inequality

SETUPS = {
    (kind, dataset): AttentionSetup("self", dataset, kind, product="ones", least=Fraction(7, 10))
    for kind in ("exp", "lin")
    for dataset in (0, 1)
}
HYPOTHESIS = "Definition D.1 (n = (d−2)t ≥ 2, b + c = 1, b and c ≥ 1/10, {a}), QKᵀ all ones"
SIZE = {"a1": "a₁ ≥ 7/10", "a0": "0 < a₀ < 1/10"}
_WRONG_INDEX = "Part 4b repeats the condition j₀ ≠ j₃ where j₁ ≠ j₃ is intended; as printed j₁ is arbitrary."
_BULLETS = "The unnumbered bullets are called a and b here."


def u_parts(kind: str) -> tuple[LemmaPart, ...]:
    """Parts 1 and 2 of Lemmas D.2, D.6 (exp) and D.10, D.14 (lin)."""
    if kind == "exp":
        special = ("n^((1 + {a})²)", lambda att: att.power((1 + att.a) ** 2))
        mixed = ("n^(1 + {a})", lambda att: att.power(1 + att.a))
        plain = ("n", lambda att: att.ar.number(att.n))
    else:
        special = ("(1 + {a})² log n", lambda att: (1 + att.a) ** 2 * att.log)
        mixed = ("(1 + {a}) log n", lambda att: (1 + att.a) * att.log)
        plain = ("log n", lambda att: att.log)
    return (
        LemmaPart("1a", "u", "j₀ = j₃", "j₁ = j₃", "=", *special),
        LemmaPart("1b", "u", "j₀ = j₃", "j₁ ≠ j₃", "=", *mixed),
        LemmaPart("2a", "u", "j₀ ≠ j₃", "j₁ = j₃", "=", *mixed),
        LemmaPart("2b", "u", "j₀ ≠ j₃", "j₁ ≠ j₃", "=", *plain),
    )


_NTH = ("1/n", lambda att: att.fraction(1, att.n))
_NEAR_NTH = ("1/n^(1 − {a})", lambda att: att.power(att.a - 1))
_SQUARED = ("1/n^(1 − 2{a})", lambda att: att.power(2 * att.a - 1))
_TILTED = ("(1 + {a})/n", lambda att: (1 + att.a) * att.fraction(1, att.n))

F_1 = (
    LemmaPart("3a", "f", "j₀ = j₃", "j₁ = j₃", ">=", "1/2", lambda att: att.fraction(1, 2)),
    LemmaPart("3b", "f", "j₀ = j₃", "j₁ ≠ j₃", "<=", *_NTH),
    LemmaPart("4a", "f", "j₀ ≠ j₃", "j₁ = j₃", "<=", *_NEAR_NTH),
    LemmaPart("4b", "f", "j₀ ≠ j₃", "j₁ ≠ j₃", "<=", *_NTH, printed={"keys": "any j₁"}),
)
F_0 = (LemmaPart("3a", "f", "j₀ = j₃", "j₁ = j₃", "<=", *_SQUARED), *F_1[1:])
F_LIN = (
    LemmaPart("3a", "f", "j₀ = j₃", "j₁ = j₃", "<=", *_TILTED, sharp=True),
    LemmaPart("3b", "f", "j₀ = j₃", "j₁ ≠ j₃", "<=", *_NTH, sharp=True),
    LemmaPart("4a", "f", "j₀ ≠ j₃", "j₁ = j₃", "<=", *_TILTED, sharp=True),
    F_1[3],
)

_FIRST, _OWN, _OTHER, _BLOCK = "i₀ = 1", "i₀ in the class of j₃", "i₀ in another class", "i₀ in a class"


def last_column(name: str, rows: str) -> LemmaPart:
    """The last coordinate is c√(log n), because the rows of f sum to 1."""
    return LemmaPart(name, "c", rows, "i₀ = d", "=", "c√(log n)", lambda att: att.c_parameter * att.root)


def _column(
    name: str, rows: str, columns: str, bound: str, value: Callable[[DenseAttention], Any], **more: Any
) -> LemmaPart:
    """An upper bound on the first coordinate of c or on the coordinates of classes."""
    return LemmaPart(name, "c", rows, columns, "<=", bound, value, **more)


def _spread_evenly(name: str, rows: str, columns: str, corrected: str | None = None) -> LemmaPart:
    """A class coordinate is at most t·(1/n)·b√(log n): each of its t keys has weight at most 1/n."""
    return _column(
        name, rows, columns, "(t/n) b√(log n)", lambda att: att.fraction(att.t, att.n) * att.b * att.root,
        corrected=corrected,
    )  # fmt: skip


def _power(factor: int) -> str:
    return "n^(1 − 2{a})" if factor == 2 else "n^(1 − {a})"


def _with_special(name: str, rows: str, factor: int) -> LemmaPart:
    """The class of j₃: the weight of j₃, and 1/n for each of the t − 1 other keys."""
    return _column(
        name, rows, _OWN, f"(1/{_power(factor)} + (t − 1)/n) b√(log n)",
        lambda att: (att.power(factor * att.a - 1) + att.fraction(att.t - 1, att.n)) * att.b * att.root,
    )  # fmt: skip


def _loose(name: str, rows: str, factor: int) -> LemmaPart:
    """Every class coordinate, with the weight of j₃ as the bound for all t keys."""
    return _column(
        name, rows, _BLOCK, f"(t/{_power(factor)}) b√(log n)",
        lambda att: att.t * att.power(factor * att.a - 1) * att.b * att.root,
    )  # fmt: skip


def _first(name: str, rows: str, factor: int) -> LemmaPart:
    return _column(
        name, rows, _FIRST, f"(1/{_power(factor)}) {{a}}√(log n)",
        lambda att: att.power(factor * att.a - 1) * att.a * att.root,
    )  # fmt: skip


HALF_FIRST = LemmaPart("1", "c", "j₀ = j₃", _FIRST, ">=", "½ {a}√(log n)", lambda att: att.a * att.root / 2)
HALF_OWN = LemmaPart("2a", "c", "j₀ = j₃", _OWN, ">=", "½ b√(log n)", lambda att: att.b * att.root / 2)

C_1 = (
    HALF_FIRST,
    HALF_OWN,
    _spread_evenly("2b", "j₀ = j₃", _OTHER),
    last_column("3", "j₀ = j₃"),
    _first("4", "j₀ ≠ j₃", 1),
    _spread_evenly("5", "j₀ ≠ j₃", _BLOCK, corrected="ours.b-d-3-5"),
    last_column("6", "j₀ ≠ j₃"),
)
C_0 = tuple(
    replace(part, sharp=True)
    for part in (
        _first("1", "j₀ = j₃", 2),
        _loose("2", "j₀ = j₃", 2),
        _with_special("2a", "j₀ = j₃", 2),
        _spread_evenly("2b", "j₀ = j₃", _OTHER),
        last_column("3", "j₀ = j₃"),
        _first("4", "j₀ ≠ j₃", 1),
        _loose("5", "j₀ ≠ j₃", 1),
        _with_special("5a", "j₀ ≠ j₃", 1),
        _spread_evenly("5b", "j₀ ≠ j₃", _OTHER),
        last_column("6", "j₀ ≠ j₃"),
    )
)


def _linear_first(name: str, rows: str) -> LemmaPart:
    return _column(
        name, rows, _FIRST, "((1 + {a})/n) {a}√(log n)",
        lambda att: (1 + att.a) * att.fraction(1, att.n) * att.a * att.root, sharp=True,
    )  # fmt: skip


def _linear_class(name: str, rows: str) -> LemmaPart:
    return _column(
        name, rows, _BLOCK, "((1 + {a})/n) t b√(log n)",
        lambda att: (1 + att.a) * att.fraction(att.t, att.n) * att.b * att.root,
    )  # fmt: skip


C_LIN = (
    _linear_first("1", "j₀ = j₃"),
    _linear_class("2", "j₀ = j₃"),
    last_column("3", "j₀ = j₃"),
    _linear_first("4", "j₀ ≠ j₃"),
    _linear_class("5", "j₀ ≠ j₃"),
    last_column("6", "j₀ ≠ j₃"),
)


def _lemma(id: str, kind: str, a: int, parts: tuple[LemmaPart, ...], note: str = "", **printed: Any) -> Lemma:
    """A lemma about D₀ (a = 0) or D₁ (a = 1); `printed` holds the parts of the setup that are printed differently."""
    setup = SETUPS[kind, a]
    return Lemma(id, setup, setup.symbol, parts, HYPOTHESIS.format(a=SIZE[setup.symbol]), printed, note)


LEMMAS = (
    _lemma("D.2", "exp", 1, u_parts("exp") + F_1, _WRONG_INDEX),
    _lemma("D.3", "exp", 1, C_1, _BULLETS),
    _lemma(
        "D.6", "exp", 0, u_parts("exp") + F_0,
        f"D₁ is printed in place of D₀: the formulas contain a₀. {_WRONG_INDEX}", dataset=1,
    ),
    _lemma("D.7", "exp", 0, C_0, _BULLETS),
    _lemma("D.10", "lin", 1, u_parts("lin") + F_LIN, _WRONG_INDEX),
    _lemma("D.11", "lin", 1, C_LIN),
    _lemma(
        "D.14", "lin", 0, u_parts("lin") + F_LIN,
        f"The lemma is printed with QKᵀ = I_d; its proof has all ones. {_WRONG_INDEX}", product="identity",
    ),
    _lemma("D.15", "lin", 0, tuple(replace(part, sharp=True) for part in C_LIN)),
)  # fmt: skip

CORRECTED = Claim(
    "ours.b-d-3-5", "Lemma D.3, Part 5, in the form of Lemma D.7, Part 5",
    "for j₀ ≠ j₃: c_exp[j₀, i₀] ≤ (1/n^(1 − a₁) + (t − 1)/n) b√(log n) for i₀ in the class of j₃",
    part_inequality(SETUPS["exp", 1], "a1", _with_special("5", "j₀ ≠ j₃", 1)), HYPOTHESIS.format(a=SIZE["a1"]),
    note="For the other classes the bound (t/n) b√(log n) is as printed.",
)  # fmt: skip

CLAIMS: tuple[Claim, ...] = (*(claim for lemma in LEMMAS for claim in lemma.claims()), CORRECTED)
