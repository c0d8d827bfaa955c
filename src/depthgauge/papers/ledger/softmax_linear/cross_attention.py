"""Lemmas F.2 to F.15 without random signs: the entries of u, f and c on the cross-attention data sets, QKᵀ = I."""

from typing import Any

from depthgauge.papers.ledger.claim import Claim, Inequality, Misprint
from depthgauge.papers.ledger.softmax_linear.parts import (
    AttentionSetup,
    DenseAttention,
    Lemma,
    LemmaPart,
    data_set_inequality,
    sharpened,
)

SETUPS = {(kind, dataset): AttentionSetup("cross", dataset, kind) for kind in ("exp", "lin") for dataset in (0, 1)}
HYPOTHESIS = "Definition F.1 (n = (d−1)t ≥ 2, {a}), QKᵀ = I_d, V = I_d"
SIZE = {"a1": "a₁ > 1", "a0": "0 < a₀ < 1/10"}
_COLUMNS = "The repeated identity is read as columns 2 to d; the definition's “d−1” is one too small."
_ROW = "j₃ is printed in place of j₂, the index of the special row."
_J2, _NOT_J2, _J3, _NOT_J3 = "j₀ = j₂", "j₀ ≠ j₂", "j₀ = j₃", "j₀ ≠ j₃"
_KEY, _NOT_KEY = "j₁ = j₃", "j₁ ≠ j₃"
_FIRST, _OWN, _OTHER, _CLASS = "i₀ = 1", "i₀ in the class of j₃", "i₀ in another class", "i₀ in a class"
_AS_J3, _AS_NOT_J3 = {"rows": _J3}, {"rows": _NOT_J3}

U_EXP = (
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
F_1 = (LemmaPart("3a", "f", _J2, _KEY, ">=", "1/2", sharp=True), *_FLAT)
F_0 = (LemmaPart("3a", "f", _J2, _KEY, "<=", "1/n^(1 − {a})"), *_FLAT)
C_1 = (
    LemmaPart("1", "c", _J2, _FIRST, ">=", "1/2", sharp=True),
    LemmaPart("2a", "c", _J2, _OWN, ">=", "1/2"),
    LemmaPart("2b", "c", _J2, _OTHER, "<=", "t/n"),
    LemmaPart("3", "c", _NOT_J2, _FIRST, "<=", "1/n", sharp=True),
    LemmaPart("4", "c", _NOT_J2, _CLASS, "<=", "t/n", sharp=True),
)
C_0 = (
    LemmaPart("1", "c", _J2, _FIRST, "<=", "1/n^(1 − {a})", printed=_AS_J3),
    LemmaPart("2", "c", _J2, _CLASS, "<=", "t/n^(1 − {a})", printed=_AS_J3),
    LemmaPart("4", "c", _NOT_J2, _FIRST, "<=", "1/n", printed=_AS_NOT_J3),
    LemmaPart("5", "c", _NOT_J2, _CLASS, "<=", "t/n", printed=_AS_NOT_J3),
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
        LemmaPart("2", "c", _J2, _CLASS, "<=", "(1 + {a}) t/n", printed=row),
        LemmaPart("3", "c", _NOT_J2, _FIRST, "<=", "1/n", sharp=True, printed=other),
        LemmaPart("4", "c", _NOT_J2, _CLASS, "<=", "t/n", sharp=True, printed=other),
    )


def _lemma(id: str, kind: str, a: int, parts: tuple[LemmaPart, ...], note: str = "", **printed: Any) -> Lemma:
    """A lemma about D₀ (a = 0) or D₁ (a = 1); `printed` holds the parts of the setup that are printed differently."""
    setup = SETUPS[kind, a]
    size = " and ".join(SIZE[name] for name in dict.fromkeys((setup.symbol, *(("a1", "a0") if printed else ()))))
    return Lemma(id, setup, setup.symbol, parts, HYPOTHESIS.format(a=size), printed, f"{note} {_COLUMNS}".strip())


_FLAT_ROW = "Part 4a is printed for j₀ = j₂, but its proof has n/(n·n) for every entry, which needs j₀ ≠ j₂."
_D1_FOR_D0 = "D₁ is printed in place of D₀: the formulas contain a₀."
_D0_FOR_D1 = "D₀ is printed in place of D₁: the formulas contain a₁."
_PART_2 = LemmaPart("2", "u", _NOT_J2, _NOT_KEY, "=", "log n", printed=_AS_NOT_J3)
LEMMAS = (
    _lemma("F.2", "exp", 1, U_EXP + F_1, note=_FLAT_ROW),
    _lemma("F.3", "exp", 1, C_1, note="The unnumbered bullets are called a and b here."),
    _lemma("F.6", "exp", 0, U_EXP + F_0, note=f"{_D1_FOR_D0} {_FLAT_ROW}", dataset=1),
    _lemma("F.7", "exp", 0, C_0, note=f"{_ROW} The paper numbers its parts 1, 2, 4, 5."),
    _lemma("F.10", "lin", 1, _linear_u_and_f({}, {})),
    _lemma("F.11", "lin", 1, _linear_c(_AS_J3, _AS_NOT_J3), note=f"{_D0_FOR_D1} {_ROW}", dataset=0),
    _lemma("F.14", "lin", 0, (*_linear_u_and_f(_AS_J3, _AS_NOT_J3), _PART_2), f"{_D1_FOR_D0} {_ROW}", dataset=1),
    _lemma("F.15", "lin", 0, sharpened(_linear_c({}, {}))),
)


def _everywhere_else(att: DenseAttention) -> tuple[Any, Any]:
    special = (att.token == att.j2)[:, None] & (att.token == att.j3)[None, :]
    return att.u[~special], att.log


_F_10_2 = Claim(
    "B.F.10.2", "Lemma F.10, Part 2", "for j₀ ≠ j₂ or j₁ ≠ j₃: u_lin[j₀, j₁] = log n",
    data_set_inequality(
        SETUPS["lin", 1], "a1", ("u_lin[j₀, j₁]", "log n"), _everywhere_else, relation="=",
        condition="j₀ ≠ j₂ or j₁ ≠ j₃",
    ),
    HYPOTHESIS.format(a=SIZE["a1"]), sharp=True, note=_COLUMNS,
)  # fmt: skip


def _token_count(extra_columns: int) -> Inequality:
    return data_set_inequality(
        SETUPS["lin", 0], "a0", ("the number of rows of A₂", f"t(d−{extra_columns})"),
        lambda att: (len(att.unscaled[1]), att.t * (att.d - extra_columns)), relation="=",
    )  # fmt: skip


_F_15 = Claim(
    "B.F.15", "Lemma F.15, its condition on n", "n = t(d−2) for the data set of Definition F.1",
    Misprint(_token_count(2), _token_count(1)), HYPOTHESIS.format(a=SIZE["a0"]),
    note=f"The parts of the lemma are checked with n = t(d−1). {_COLUMNS}",
)  # fmt: skip

CLAIMS: tuple[Claim, ...] = (*(claim for lemma in LEMMAS for claim in lemma.claims()), _F_10_2, _F_15)
