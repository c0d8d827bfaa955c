"""Lemmas D.2 to D.15 without random signs: entries of u, f and c on the self-attention data sets, QKᵀ all ones."""

from fractions import Fraction
from typing import Any

from depthgauge.papers.ledger.claim import Claim
from depthgauge.papers.ledger.softmax_linear.dense_attention import AttentionSetup
from depthgauge.papers.ledger.softmax_linear.parts import Lemma, LemmaPart, part_inequality, sharpened

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

CLAIMS: tuple[Claim, ...] = (*(claim for lemma in LEMMAS for claim in lemma.claims()), CORRECTED)
