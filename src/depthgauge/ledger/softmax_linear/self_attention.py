"""Lemmas D.2 to D.16 without signs: the entries of u, f and c on the self-attention data sets with QKᵀ all ones."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from depthgauge.ledger.claim import Claim
from depthgauge.ledger.softmax_linear.dense_attention import Scene, World
from depthgauge.ledger.softmax_linear.parts import Lemma, Part, entrywise

SCENES = {
    (kind, dataset): Scene("self", dataset, kind, product="ones", least=Fraction(7, 10))
    for kind in ("exp", "lin")
    for dataset in (0, 1)
}
HYPOTHESIS = "Definition D.1 (n = (d−2)t ≥ 2, b + c = 1, b and c ≥ 1/10, {a}), QKᵀ all ones"
SIZE = {"a1": "a₁ ≥ 7/10", "a0": "0 < a₀ < 1/10"}
_J1_FOR_J0 = {"keys": "any j₁"}
_WRONG_INDEX = "Part 4b repeats the condition j₀ ≠ j₃ where j₁ ≠ j₃ is meant; as printed j₁ is free."
_BULLETS = "Unnumbered bullets are called a and b."


def _half(w: World) -> object:
    return w.share(1, 2)


def u_parts(kind: str) -> tuple[Part, ...]:
    """Parts 1 and 2 of Lemmas D.2, D.6 (exp) and D.10, D.14 (lin)."""
    if kind == "exp":
        special = ("n^((1 + {a})²)", lambda w: w.power((1 + w.a) ** 2))
        mixed = ("n^(1 + {a})", lambda w: w.power(1 + w.a))
        plain = ("n", lambda w: w.ar.number(w.n))
    else:
        special = ("(1 + {a})² log n", lambda w: (1 + w.a) ** 2 * w.log)
        mixed = ("(1 + {a}) log n", lambda w: (1 + w.a) * w.log)
        plain = ("log n", lambda w: w.log)
    return (
        Part("1a", "u", "j₀ = j₃", "j₁ = j₃", "=", *special),
        Part("1b", "u", "j₀ = j₃", "j₁ ≠ j₃", "=", *mixed),
        Part("2a", "u", "j₀ ≠ j₃", "j₁ = j₃", "=", *mixed),
        Part("2b", "u", "j₀ ≠ j₃", "j₁ ≠ j₃", "=", *plain),
    )


_NTH = ("1/n", lambda w: w.share(1, w.n))
_NEAR_NTH = ("1/n^(1 − {a})", lambda w: w.power(w.a - 1))
_SQUARED = ("1/n^(1 − 2{a})", lambda w: w.power(2 * w.a - 1))
_TILTED = ("(1 + {a})/n", lambda w: (1 + w.a) * w.share(1, w.n))

F_1 = (
    Part("3a", "f", "j₀ = j₃", "j₁ = j₃", ">=", "1/2", _half),
    Part("3b", "f", "j₀ = j₃", "j₁ ≠ j₃", "<=", *_NTH),
    Part("4a", "f", "j₀ ≠ j₃", "j₁ = j₃", "<=", *_NEAR_NTH),
    Part("4b", "f", "j₀ ≠ j₃", "j₁ ≠ j₃", "<=", *_NTH, printed=_J1_FOR_J0),
)
F_0 = (Part("3a", "f", "j₀ = j₃", "j₁ = j₃", "<=", *_SQUARED), *F_1[1:])
F_LIN = (
    Part("3a", "f", "j₀ = j₃", "j₁ = j₃", "<=", *_TILTED, sharp=True),
    Part("3b", "f", "j₀ = j₃", "j₁ ≠ j₃", "<=", *_NTH, sharp=True),
    Part("4a", "f", "j₀ ≠ j₃", "j₁ = j₃", "<=", *_TILTED, sharp=True),
    F_1[3],
)

_FIRST, _OWN, _OTHER, _BLOCK, _LAST = (
    "i₀ = 1",
    "i₀ of the class of j₃",
    "i₀ of another class",
    "i₀ of a class",
    "i₀ = d",
)


def last_column(name: str, rows: str) -> Part:
    """The last coordinate is c√(log n): rows of f sum to one."""
    return Part(name, "c", rows, _LAST, "=", "c√(log n)", lambda w: w.c_size * w.root)


def spread_evenly(name: str, rows: str, columns: str, corrected: str | None = None) -> Part:
    """A class coordinate is at most its t keys' share of 1/n each."""
    text = "(t/n) b√(log n)"
    return Part(name, "c", rows, columns, "<=", text, lambda w: w.share(w.t, w.n) * w.b * w.root, corrected=corrected)


def _with_special(name: str, rows: str, factor: int) -> Part:
    """The class of j₃: j₃'s own weight and 1/n from each of its t − 1 mates."""
    power = "1/n^(1 − 2{a})" if factor == 2 else "1/n^(1 − {a})"
    return Part(
        name,
        "c",
        rows,
        _OWN,
        "<=",
        f"({power} + (t − 1)/n) b√(log n)",
        lambda w: (w.power(factor * w.a - 1) + w.share(w.t - 1, w.n)) * w.b * w.root,
    )


def _loose(name: str, rows: str, factor: int) -> Part:
    """Every class coordinate, as if all of its t keys had j₃'s weight."""
    power = "n^(1 − 2{a})" if factor == 2 else "n^(1 − {a})"
    return Part(
        name,
        "c",
        rows,
        _BLOCK,
        "<=",
        f"(t/{power}) b√(log n)",
        lambda w: w.t * w.power(factor * w.a - 1) * w.b * w.root,
    )


def _first(name: str, rows: str, factor: int) -> Part:
    power = "n^(1 − 2{a})" if factor == 2 else "n^(1 − {a})"
    return Part(
        name, "c", rows, _FIRST, "<=", f"(1/{power}) {{a}}√(log n)", lambda w: w.power(factor * w.a - 1) * w.a * w.root
    )


HALF_FIRST = Part("1", "c", "j₀ = j₃", _FIRST, ">=", "½ {a}√(log n)", lambda w: w.a * w.root / 2)
HALF_OWN = Part("2a", "c", "j₀ = j₃", _OWN, ">=", "½ b√(log n)", lambda w: w.b * w.root / 2)

C_1 = (
    HALF_FIRST,
    HALF_OWN,
    spread_evenly("2b", "j₀ = j₃", _OTHER),
    last_column("3", "j₀ = j₃"),
    _first("4", "j₀ ≠ j₃", 1),
    spread_evenly("5", "j₀ ≠ j₃", _BLOCK, corrected="ours.b-d-3-5"),
    last_column("6", "j₀ ≠ j₃"),
)
C_0 = tuple(
    replace(part, sharp=True)
    for part in (
        _first("1", "j₀ = j₃", 2),
        _loose("2", "j₀ = j₃", 2),
        _with_special("2a", "j₀ = j₃", 2),
        spread_evenly("2b", "j₀ = j₃", _OTHER),
        last_column("3", "j₀ = j₃"),
        _first("4", "j₀ ≠ j₃", 1),
        _loose("5", "j₀ ≠ j₃", 1),
        _with_special("5a", "j₀ ≠ j₃", 1),
        spread_evenly("5b", "j₀ ≠ j₃", _OTHER),
        last_column("6", "j₀ ≠ j₃"),
    )
)


def _linear_first(name: str, rows: str) -> Part:
    text = "((1 + {a})/n) {a}√(log n)"
    return Part(name, "c", rows, _FIRST, "<=", text, lambda w: (1 + w.a) * w.share(1, w.n) * w.a * w.root, sharp=True)


def _linear_class(name: str, rows: str) -> Part:
    text = "((1 + {a})/n) t b√(log n)"
    return Part(name, "c", rows, _BLOCK, "<=", text, lambda w: (1 + w.a) * w.share(w.t, w.n) * w.b * w.root)


C_LIN = (
    _linear_first("1", "j₀ = j₃"),
    _linear_class("2", "j₀ = j₃"),
    last_column("3", "j₀ = j₃"),
    _linear_first("4", "j₀ ≠ j₃"),
    _linear_class("5", "j₀ ≠ j₃"),
    last_column("6", "j₀ ≠ j₃"),
)


def _lemma(id: str, kind: str, a: int, parts: tuple[Part, ...], note: str = "", **printed: Any) -> Lemma:
    """A lemma about D₀ (a = 0) or D₁ (a = 1); `printed` is what the paper says of its scene instead."""
    scene = SCENES[kind, a]
    return Lemma(id, scene, scene.symbol, parts, HYPOTHESIS.format(a=SIZE[scene.symbol]), printed, note)


LEMMAS = (
    _lemma("D.2", "exp", 1, u_parts("exp") + F_1, note=_WRONG_INDEX),
    _lemma("D.3", "exp", 1, C_1, note=_BULLETS),
    _lemma(
        "D.6",
        "exp",
        0,
        u_parts("exp") + F_0,
        dataset=1,
        note=f"The lemma says D₁ where its formulas, in a₀, are those of D₀. {_WRONG_INDEX}",
    ),
    _lemma("D.7", "exp", 0, C_0, note=_BULLETS),
    _lemma("D.10", "lin", 1, u_parts("lin") + F_LIN, note=_WRONG_INDEX),
    _lemma("D.11", "lin", 1, C_LIN),
    _lemma(
        "D.14",
        "lin",
        0,
        u_parts("lin") + F_LIN,
        product="identity",
        note=f"The lemma says QKᵀ = I_d where its proof has all ones. {_WRONG_INDEX}",
    ),
    _lemma("D.15", "lin", 0, tuple(replace(part, sharp=True) for part in C_LIN)),
)

_ROW_OF_ANOTHER = "for j₀ ≠ j₃: c_exp[j₀, i₀] ≤ (1/n^(1 − a₁) + (t − 1)/n) b√(log n) for the class of j₃"
CORRECTED = Claim(
    id="ours.b-d-3-5",
    where="Lemma D.3, Part 5, as Lemma D.7, Part 5 has it",
    statement=_ROW_OF_ANOTHER,
    check=entrywise(SCENES["exp", 1], "a1", _with_special("5", "j₀ ≠ j₃", 1)),
    hypothesis=HYPOTHESIS.format(a=SIZE["a1"]),
    note="For the other classes the printed bound (t/n) b√(log n) stands.",
)

CLAIMS: tuple[Claim, ...] = (*(claim for lemma in LEMMAS for claim in lemma.claims()), CORRECTED)
