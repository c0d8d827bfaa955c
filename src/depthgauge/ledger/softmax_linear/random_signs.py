"""Paper B's statements about random signs on the attention data sets: Lemmas D.4 to F.16 and the theorems."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from depthgauge.ledger.arithmetic import Arithmetic, Value
from depthgauge.ledger.claim import Claim, Inequality, Instance, Observed, Size, Study
from depthgauge.ledger.judge import judge_inequality
from depthgauge.ledger.softmax_linear.chance import (
    Case,
    NetworkChance,
    RowChance,
    SuccessChance,
    Which,
    cross_case,
    self_case,
)
from depthgauge.ledger.softmax_linear.dense_attention import Kind, World
from depthgauge.ledger.softmax_linear.identity import CONTRADICTION, NEVER
from depthgauge.ledger.softmax_linear.ladder import high, least_factor, never_equal, observe, tenth, unless
from depthgauge.ledger.softmax_linear.self_attention import SCENES
from depthgauge.separation.settings import Dataset

_C_UNIT = 0.99498743710662
"""√(1 − b²) for b = 0.1, to the digits of a decimal."""
D_1 = (self_case(), self_case(a1=0.7, b=0.9, c=0.1), self_case(a1=0.7, b=0.1, c=0.9))
D_0 = (self_case(), self_case(a0=0.09, b=0.9, c=0.1), self_case(a0=0.09, b=0.1, c=0.9))
E_PRINTED = (self_case("identity"), self_case("identity", a1=0.7, b=0.1, c=0.9))
E_MEANT = (self_case("identity", a1=1.0, b=0.1, c=_C_UNIT), self_case("identity"))
E_SQUARES = (E_MEANT[0], self_case("identity", a1=1.2, b=0.1, c=_C_UNIT))
F_1 = (cross_case(), cross_case(a1=1.01))
F_0 = (cross_case(), cross_case(a0=0.09))

_SELF = "Definition D.1 ({}), QKᵀ {}, d growing like √n"
_CROSS = "Definition F.1 ({}), QKᵀ = I_d, d growing like √n"
HYPOTHESES = {
    "D1": _SELF.format("b + c = 1, b and c ≥ 1/10, a₁ ≥ 7/10", "all ones"),
    "D0": _SELF.format("b + c = 1, b and c ≥ 1/10, 0 < a₀ < 1/10", "all ones"),
    "E": _SELF.format("a₁ ≥ 7/10 as printed, a₁ ≥ 1 as Lemma E.1 has it", "= I_d"),
    "E4": _SELF.format("a₁ ≥ 1, b² + c² = 1, 0 < b < 1/5", "= I_d"),
    "F1": _CROSS.format("a₁ > 1"),
    "F0": _CROSS.format("0 < a₀ < 1/10"),
}
_BOTH: tuple[tuple[str, Which], ...] = (("1", "special"), ("2", "other"))
_EVENTS = {"reaches": "⟨{c}, σ⟩ ≥ {tau}", "below": "⟨{c}, σ⟩ < {tau}", "within": "|⟨{c}, σ⟩| < {tau}"}


def _says(chance: RowChance, rows: str, sign: str = "≥") -> str:
    """The statement in one line."""
    tau = "(c + 0.1)√(log n)" if chance.threshold is None else str(float(chance.threshold))
    event = _EVENTS[chance.event].format(c=f"c_{chance.kind}[j₀]", tau=tau)
    return f"for j₀ {rows}: Pr[{event}] {sign} " + ("1/10" if chance.event == "reaches" else "1 − δ/poly(n)")


def _limit(chance: RowChance) -> Callable[[int], float]:
    return tenth if chance.event == "reaches" else high


def _row(
    id: str, chance: RowChance, cases: Sequence[Case], where: str, corrected: str | None = None, note: str = ""
) -> Claim:
    """A part about one kind of row of the self-attention data sets, as printed."""
    return Claim(
        id=f"B.{id}",
        where=f"Lemma {id[:-2]}, Part {id[-1]}",
        statement=_says(chance, "= j₃" if chance.which == "special" else "≠ j₃"),
        check=Study(lambda: observe(chance, cases, _limit(chance))),
        hypothesis=HYPOTHESES[where],
        corrected=corrected,
        note=note,
    )


def _self_rows(id: str, dataset: Dataset, kind: str, cases: Sequence[Case]) -> Iterable[Claim]:
    """Both parts of Lemmas D.8, D.12 and D.16."""
    for part, which in _BOTH:
        yield _row(f"{id}.{part}", RowChance(dataset, kind, which, "within"), cases, f"D{dataset}")


def _cross_row(id: str, chance: RowChance, cases: Sequence[Case], difference: str, unequal: bool = True) -> Claim:
    """A part of Lemmas F.4, F.8, F.12 and F.16, which print j₃ for j₂ and “=” for “≥”.

    A row that the print calls j₃ may be j₂ or not, and so may the rows other than j₃: as printed every row is meant.
    """
    printed = replace(chance, which="every")

    def run() -> Observed:
        literal = observe(printed, cases, _limit(chance))
        if literal.verdict == "holds" and unequal:
            literal = never_equal(printed, cases[0])
        return unless(literal, observe(chance, cases, _limit(chance)), difference)

    return Claim(
        id=f"B.{id}",
        where=f"Lemma {id[:-2]}, Part {id[-1]}",
        statement=_says(chance, "= j₃" if chance.which == "special" else "≠ j₃", sign="="),
        check=Study(run),
        hypothesis=HYPOTHESES[f"F{chance.dataset}"],
        note="“=” is printed for “≥”, and j₃ for j₂.",
    )


_HALF = Fraction(1, 2)
_J2 = "As meant, for j₂ in place of j₃ and ≥ in place of ="


def _cross_rows(id: str, dataset: Dataset, kind: str, cases: Sequence[Case], difference: str = _J2) -> Iterable[Claim]:
    """Both parts of Lemmas F.8, F.12 and F.16."""
    for part, which in _BOTH:
        yield _cross_row(f"{id}.{part}", RowChance(dataset, kind, which, "within", _HALF), cases, difference)


def _network(
    id: str,
    chance: NetworkChance,
    cases: Sequence[Case],
    where: str,
    printed: Callable[[], Observed] | None = None,
    difference: str = "",
    note: str = "",
    says: Dataset | None = None,
) -> Claim:
    """A theorem: F > 0 or F = 0 with probability at least 1 − δ/poly(n); `says` is the data set that is printed."""
    dataset = chance.dataset if says is None else says

    def run() -> Observed:
        meant = observe(chance, cases)
        if chance.positive:
            words = f"The least whole C that does with m = ⌈C log(n/δ)⌉ is {least_factor(chance, cases)}."
            meant = replace(meant, words=(*meant.words, words))
        return meant if printed is None else unless(printed(), meant, difference)

    return Claim(
        id=f"B.{id}",
        where=f"Theorem {id}",
        statement=f"for D{'₀₁'[dataset]}: Pr[F_{chance.kind} {'> 0' if chance.positive else '= 0'}] ≥ 1 − δ/poly(n)",
        check=Study(run),
        hypothesis=f"{HYPOTHESES[where]}, m = O(log(n/δ))",
        note=note,
    )


def _impossible() -> Observed:
    """Theorem E.4 asks b² + c² = 1 of a data set that has b + c = 1."""
    return _sided(judge_inequality(CONTRADICTION, "B.E.4"), "asked of b² + c²", "what b² + c² is", f"{NEVER}.")


def _sided(found: Observed, left: str, right: str, words: str) -> Observed:
    """A failing inequality with its sides named for readers."""
    witness = found.witness
    named = witness and replace(witness, left=f"{witness.left}, {left}", right=f"{witness.right}, {right}")
    return replace(found, words=(words,), witness=named)


_KINDS: tuple[Kind, Kind] = ("lin", "exp")


def _displayed() -> Inequality:
    """Theorem D.17 displays the network of c_exp and speaks of F_lin: are they one?"""

    def work(ar: Arithmetic, *, y: Value, **given: Value) -> Any:
        results = []
        for kind in _KINDS:
            w = World(ar, SCENES[kind, 0], "a0", **given)
            over = w.c @ y - (w.c_size + ar.number("1/10")) * w.root
            yield f"c_{kind}", w.c
            yield f"⟨c_{kind}[j₀], y⟩ − τ", over
            results.append(((over + abs(over)) / 2).sum())
        return results[0], results[1]

    def starts(size: Size) -> Iterable[Instance]:
        for signs in product((1, -1), repeat=3):
            y = np.array(signs, dtype=float)[:, None]
            yield {**size, "j3": 1, "a0": Fraction(1, 20), "b": Fraction(1, 2), "y": y}

    def draw(random: np.random.Generator, size: Size) -> Instance:
        y = random.choice([-1.0, 1.0], size=(size["d"], 1))
        return {**size, "j3": 1, "a0": float(random.uniform(0.01, 0.1)), "b": float(random.uniform(0.1, 0.9)), "y": y}

    return Inequality(
        left="F_lin, of which the theorem speaks",
        right="φ(Σ φ_τ(⟨c_exp[j₀], y⟩)), which it displays",
        work=work,
        draw=draw,
        sizes=({"d": 3, "t": 2},),
        allowed=lambda ar, *, a0, b, **_: bool(
            a0 > 0 and a0 < ar.number("1/10") and b >= ar.number("1/10") and 1 - b >= ar.number("1/10")
        ),
        starts=starts,
        fixed=frozenset({"y"}),
    )


def _misnamed() -> Observed:
    """Theorem D.17 defines one network and speaks of another."""
    words = "the network that is displayed, with c_exp, is not F_lin."
    return _sided(judge_inequality(_displayed(), "B.D.17"), "F_lin", "the network that is displayed", words)


_FOUR: tuple[tuple[str, NetworkChance, Sequence[Case]], ...] = (
    ("F_exp(D₁) > 0", NetworkChance(1, "exp", True), D_1),
    ("F_lin(D₁) = 0", NetworkChance(1, "lin", False), D_1),
    ("F_exp(D₀) = 0", NetworkChance(0, "exp", False), D_0),
    ("F_lin(D₀) = 0", NetworkChance(0, "lin", False), D_0),
)


def _main_theorem() -> Observed:
    """Theorem 6.2: as printed F_exp(D₁) is both positive and zero; as meant the four conditions of the figures."""
    printed = observe(NetworkChance(1, "exp", False), D_1)
    found = [(name, observe(chance, cases)) for name, chance, cases in _FOUR]
    words = tuple(f"{name}: {line}" for name, seen in found for line in seen.words[:-1])
    verdicts = {seen.verdict for _, seen in found}
    meant = replace(found[0][1], verdict="holds" if verdicts == {"holds"} else "undecided", words=words)
    return unless(printed, meant, "As meant, F_exp > 0 and F_lin = 0 for D₁, F_exp = 0 and F_lin = 0 for D₀")


def _informal(id: str, case: Case, section: str) -> Claim:
    return Claim(
        id=f"B.{id}",
        where=f"Theorem {id}, informal of Section {section}",
        statement="some D₀, D₁ and networks: with high probability F_exp tells D₀ from D₁ and F_lin does not",
        check=Study(lambda: observe(SuccessChance(), (case,))),
        hypothesis=f"the data sets of Section {section} at the paper's own parameters, one y for all four networks",
        note="“With high probability” is read as 1 − δ/n; that both have four layers is not examined.",
    )


_BELOW_ONE = RowChance(1, "exp", "other", "below")
CLAIMS: tuple[Claim, ...] = (
    _informal("1.1", self_case(), "D"),
    _informal("1.2", cross_case(), "F"),
    Claim(
        id="B.6.2",
        where="Theorem 6.2",
        statement="for D₁: F_exp > 0 and F_exp = 0, for D₀: F_lin = 0 and F_lin = 0, with probability 1 − δ/poly(n)",
        check=Study(_main_theorem),
        hypothesis=f"{HYPOTHESES['D1']}, m = O(log(n/δ))",
        note="F_exp is printed for F_lin, and F_lin for F_exp: no network is both positive and zero.",
    ),
    _row("D.4.1", RowChance(1, "exp", "special", "reaches"), D_1, "D1"),
    _row(
        "D.4.2",
        _BELOW_ONE,
        D_1,
        "D1",
        corrected="ours.b-d-4-2",
        note="It fails for a₁ ≥ 1, where j₃ keeps its weight in every row as n grows.",
    ),
    Claim(
        id="ours.b-d-4-2",
        where="Lemma D.4, Part 2, for smaller a₁",
        statement=f"if a₁ ≤ 4/5, {_says(_BELOW_ONE, '≠ j₃')}",
        check=Study(lambda: observe(_BELOW_ONE, (*D_1[1:], self_case(a1=0.8)))),
        hypothesis=HYPOTHESES["D1"].replace("a₁ ≥ 7/10", "7/10 ≤ a₁ ≤ 4/5"),
    ),
    _network("D.5", NetworkChance(1, "exp", True), D_1, "D1"),
    *_self_rows("D.8", 0, "exp", D_0),
    _network(
        "D.9",
        NetworkChance(0, "exp", False),
        D_0,
        "D0",
        printed=lambda: observe(NetworkChance(1, "exp", False), D_1),
        difference="As meant, for D₀ in place of D₁",
        note="The theorem says D₁ under the heading of data set 0.",
        says=1,
    ),
    *_self_rows("D.12", 1, "lin", D_1),
    _network("D.13", NetworkChance(1, "lin", False), D_1, "D1"),
    *_self_rows("D.16", 0, "lin", D_0),
    _network(
        "D.17",
        NetworkChance(0, "lin", False),
        D_0,
        "D0",
        printed=_misnamed,
        difference="As meant, with c_lin in the network",
        note="The theorem defines F_exp by c_exp and then speaks of F_lin.",
    ),
    Claim(
        id="B.E.3.1",
        where="Lemma E.3, Part 1",
        statement=_says(RowChance(1, "exp", "special", "reaches"), "= j₃"),
        check=Study(
            lambda: unless(
                observe(RowChance(1, "exp", "special", "reaches"), E_PRINTED, tenth),
                observe(RowChance(1, "exp", "special", "reaches"), E_MEANT, tenth),
                "With a₁ ≥ 1 as in Lemma E.1, which its proof uses",
            )
        ),
        hypothesis=HYPOTHESES["E"],
        note="The lemma asks for Definition D.1 alone, hence a₁ ≥ 7/10.",
    ),
    _row("E.3.2", _BELOW_ONE, (*E_PRINTED, E_MEANT[0]), "E"),
    _network(
        "E.4",
        NetworkChance(1, "exp", True),
        E_SQUARES,
        "E4",
        printed=_impossible,
        difference="With b² + c² = 1 in place of b + c = 1",
        note="Its conditions contradict each other as those of Lemma E.1 do (see B.E.1).",
    ),
    _cross_row("F.4.1", RowChance(1, "exp", "special", "reaches", Fraction(9, 10)), F_1, _J2),
    _cross_row("F.4.2", RowChance(1, "exp", "other", "within", _HALF), F_1, _J2),
    _network("F.5", NetworkChance(1, "exp", True), F_1, "F1"),
    *_cross_rows("F.8", 0, "exp", F_0),
    _network(
        "F.9",
        NetworkChance(0, "exp", False),
        F_0,
        "F0",
        printed=lambda: observe(NetworkChance(1, "exp", False), F_1),
        difference="As meant, for D₀ in place of D₁",
        note="The theorem says D₁ under the heading of data set 0.",
        says=1,
    ),
    *_cross_rows("F.12", 1, "lin", F_1, f"{_J2}, and D₁ in place of D₀"),
    _network("F.13", NetworkChance(1, "lin", False), F_1, "F1"),
    *_cross_rows("F.16", 0, "lin", F_0),
    _network("F.17", NetworkChance(0, "lin", False), F_0, "F0"),
)
