"""The statements of paper B about random signs on the attention data sets: Lemmas D.4 to F.16 and the theorems."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Computation, Evaluation, Inequality, Instance, Observed, Size
from depthgauge.papers.ledger.search import search
from depthgauge.papers.ledger.softmax_linear.parts import DenseAttention
from depthgauge.papers.ledger.softmax_linear.probabilities import (
    Case,
    NetworkEvent,
    RowChoice,
    RowEvent,
    SuccessEvent,
    compare_readings,
    cross_case,
    judge_equality,
    judge_event,
    least_width_factor,
    self_case,
)
from depthgauge.papers.ledger.softmax_linear.self_attention import CONTRADICTION, IMPOSSIBLE, SETUPS
from depthgauge.papers.separation.settings import Dataset

_C_UNIT = 0.99498743710662
"""√(1 − b²) for b = 0.1, rounded to 14 decimals."""
D_1 = (self_case(), self_case(a1=0.7, b=0.9, c=0.1), self_case(a1=0.7, b=0.1, c=0.9))
D_0 = (self_case(), self_case(a0=0.09, b=0.9, c=0.1), self_case(a0=0.09, b=0.1, c=0.9))
E_PRINTED = (self_case("identity"), self_case("identity", a1=0.7, b=0.1, c=0.9))
E_INTENDED = (self_case("identity", a1=1.0, b=0.1, c=_C_UNIT), self_case("identity"))
E_SQUARES = (E_INTENDED[0], self_case("identity", a1=1.2, b=0.1, c=_C_UNIT))
F_1 = (cross_case(), cross_case(a1=1.01))
F_0 = (cross_case(), cross_case(a0=0.09))

_SELF = "Definition D.1 ({}), QKᵀ {}, d growing like √n"
_CROSS = "Definition F.1 ({}), QKᵀ = I_d, d growing like √n"
HYPOTHESES = {
    "D1": _SELF.format("b + c = 1, b and c ≥ 1/10, a₁ ≥ 7/10", "all ones"),
    "D0": _SELF.format("b + c = 1, b and c ≥ 1/10, 0 < a₀ < 1/10", "all ones"),
    "E": _SELF.format("a₁ ≥ 7/10 as printed, a₁ ≥ 1 in Lemma E.1", "= I_d"),
    "E4": _SELF.format("a₁ ≥ 1, b² + c² = 1, 0 < b < 1/5", "= I_d"),
    "F1": _CROSS.format("a₁ > 1"),
    "F0": _CROSS.format("0 < a₀ < 1/10"),
}
_BOTH: tuple[tuple[str, RowChoice], ...] = (("1", "special"), ("2", "other"))
_COMPARISONS = {"reaches": "⟨{c}, σ⟩ ≥ {tau}", "below": "⟨{c}, σ⟩ < {tau}", "within": "|⟨{c}, σ⟩| < {tau}"}


def _row_claim(
    id: str, event: RowEvent, where: str, run: Callable[[], Observed], sign: str = "≥", **more: Any
) -> Claim:
    """A part about the special row or the other rows of a data set; `where` is the key of the hypotheses."""
    name, check = f"Lemma {id[:-2]}, Part {id[-1]}", Computation(run)
    return Claim(f"B.{id}", name, _statement(event, sign), check, HYPOTHESES[where], **more)


def _statement(event: RowEvent, sign: str = "≥") -> str:
    tau = "(c + 0.1)√(log n)" if event.threshold is None else str(float(event.threshold))
    described = _COMPARISONS[event.comparison].format(c=f"c_{event.kind}[j₀]", tau=tau)
    rows = "= j₃" if event.which == "special" else "≠ j₃"
    return f"for j₀ {rows}: Pr[{described}] {sign} " + ("1/10" if event.comparison == "reaches" else "1 − δ/poly(n)")


def _row(id: str, event: RowEvent, cases: Sequence[Case], where: str, **more: Any) -> Claim:
    """A part about a self-attention data set, as printed."""
    return _row_claim(id, event, where, lambda: judge_event(event, cases), **more)


def _self_rows(id: str, dataset: Dataset, kind: str, cases: Sequence[Case]) -> Iterable[Claim]:
    """Both parts of Lemmas D.8, D.12 and D.16."""
    for part, which in _BOTH:
        yield _row(f"{id}.{part}", RowEvent(dataset, kind, which, "within"), cases, f"D{dataset}")


def _cross_row(id: str, event: RowEvent, cases: Sequence[Case], reading: str) -> Claim:
    """A part of Lemmas F.4, F.8, F.12 and F.16, which are printed with j₃ for j₂ and “=” for “≥”.

    Row j₃ may or may not be row j₂, and so may the rows other than j₃. The printed reading therefore covers every row.
    """
    printed = replace(event, which="every")

    def run() -> Observed:
        literal = judge_event(printed, cases)
        if literal.verdict == "holds":
            literal = judge_equality(printed, cases[0])
        return compare_readings(literal, judge_event(event, cases), reading)

    note = "“=” is printed in place of “≥”, and j₃ in place of j₂."
    return _row_claim(id, event, f"F{event.dataset}", run, "=", note=note)


_HALF = Fraction(1, 2)
_J2 = "As intended, with j₂ in place of j₃ and ≥ in place of ="


def _cross_rows(id: str, dataset: Dataset, kind: str, cases: Sequence[Case], reading: str = _J2) -> Iterable[Claim]:
    """Both parts of Lemmas F.8, F.12 and F.16."""
    for part, which in _BOTH:
        yield _cross_row(f"{id}.{part}", RowEvent(dataset, kind, which, "within", _HALF), cases, reading)


def _network(
    id: str,
    event: NetworkEvent,
    cases: Sequence[Case],
    where: str,
    printed: Callable[[], Observed] | None = None,
    reading: str = "",
    note: str = "",
    printed_dataset: Dataset | None = None,
) -> Claim:
    """A theorem: F > 0 or F = 0 with probability at least 1 − δ/poly(n), as `event` says for the intended statement.

    `where` is the key of the hypotheses. If the printed statement differs, `printed` judges it, `reading` is how the
    intended statement differs from it, and `printed_dataset` is its data set.
    """
    dataset = event.dataset if printed_dataset is None else printed_dataset

    def run() -> Observed:
        intended = judge_event(event, cases)
        if event.positive:
            remark = f"The least integer C for which m = ⌈C log(n/δ)⌉ suffices is {least_width_factor(event, cases)}."
            intended = replace(intended, remarks=(*intended.remarks, remark))
        return intended if printed is None else compare_readings(printed(), intended, reading)

    statement = f"for D{'₀₁'[dataset]}: Pr[F_{event.kind} {'> 0' if event.positive else '= 0'}] ≥ 1 − δ/poly(n)"
    hypothesis = f"{HYPOTHESES[where]}, m = O(log(n/δ))"
    return Claim(f"B.{id}", f"Theorem {id}", statement, Computation(run), hypothesis, note=note)


def _refuted(inequality: Inequality, id: str, left: str, right: str, remark: str) -> Observed:
    """Search for a counterexample to an inequality whose two sides have these names."""
    found = search(inequality, id)
    witness = found.witness
    named = witness and replace(witness, left=f"{witness.left}, {left}", right=f"{witness.right}, {right}")
    return replace(found, remarks=(remark,), witness=named)


def _displayed() -> Inequality:
    """Theorem D.17 displays the network of c_exp and then makes a statement about F_lin: compare the two."""

    def evaluate(ar: Arithmetic, *, y: Value, **given: Value) -> Evaluation:
        steps, results = dict[str, Value](), []
        for kind in ("lin", "exp"):
            att = DenseAttention(ar, SETUPS[kind, 0], "a0", **given)
            over = att.c @ y - (att.c_parameter + ar.number("1/10")) * att.root
            steps |= {f"c_{kind}": att.c, f"⟨c_{kind}[j₀], y⟩ − τ": over}
            results.append(((over + abs(over)) / 2).sum())
        return steps, results[0], results[1]

    def starts(size: Size) -> Iterable[Instance]:
        for signs in product((1, -1), repeat=3):
            y = np.array(signs, dtype=float)[:, None]
            yield {**size, "j3": 1, "a0": Fraction(1, 20), "b": Fraction(1, 2), "y": y}

    def draw(random: np.random.Generator, size: Size) -> Instance:
        y = random.choice([-1.0, 1.0], size=(size["d"], 1))
        return {**size, "j3": 1, "a0": float(random.uniform(0.01, 0.1)), "b": float(random.uniform(0.1, 0.9)), "y": y}

    def allowed(ar: Arithmetic, *, a0: Value, b: Value, **_: Value) -> bool:
        tenth = ar.number("1/10")
        return bool(a0 > 0 and a0 < tenth and b >= tenth and 1 - b >= tenth)

    return Inequality(
        "F_lin, the network of the statement", "φ(Σ φ_τ(⟨c_exp[j₀], y⟩)), the network displayed", evaluate, draw,
        ({"d": 3, "t": 2},), allowed, starts, fixed=frozenset({"y"}),
    )  # fmt: skip


_FOUR: tuple[tuple[str, NetworkEvent, Sequence[Case]], ...] = (
    ("F_exp(D₁) > 0", NetworkEvent(1, "exp", True), D_1),
    ("F_lin(D₁) = 0", NetworkEvent(1, "lin", False), D_1),
    ("F_exp(D₀) = 0", NetworkEvent(0, "exp", False), D_0),
    ("F_lin(D₀) = 0", NetworkEvent(0, "lin", False), D_0),
)


def _main_theorem() -> Observed:
    """Theorem 6.2: as printed F_exp(D₁) is positive and zero; as intended, the four conditions of E_success."""
    printed = judge_event(NetworkEvent(1, "exp", False), D_1)
    found = [(name, judge_event(event, cases)) for name, event, cases in _FOUR]
    remarks = tuple(f"{name}: {line}" for name, seen in found for line in seen.remarks[:-1])
    verdicts = {seen.verdict for _, seen in found}
    intended = replace(found[0][1], verdict="holds" if verdicts == {"holds"} else "undecided", remarks=remarks)
    return compare_readings(
        printed, intended, "As intended, with F_exp > 0 and F_lin = 0 for D₁, F_exp = 0 and F_lin = 0 for D₀"
    )


def _informal(id: str, case: Case, section: str) -> Claim:
    return Claim(
        f"B.{id}", f"Theorem {id}, the informal version of Section {section}",
        "for some D₀, D₁ and networks: with high probability F_exp separates D₀ from D₁ and F_lin does not",
        Computation(lambda: judge_event(SuccessEvent(), (case,))),
        f"the data sets of Section {section} at the paper's own parameters, one y for all four networks",
        note="“With high probability” is read as 1 − δ/n. The number of layers is not examined.",
    )  # fmt: skip


def _zero_for_d1(id: str, cases: Sequence[Case], printed: Sequence[Case]) -> Claim:
    """Theorems D.9 and F.9, which are printed for D₁."""
    return _network(
        id, NetworkEvent(0, "exp", False), cases, f"{id[0]}0",
        lambda: judge_event(NetworkEvent(1, "exp", False), printed),
        "As intended, with D₀ in place of D₁", "D₁ is printed in the section on data set 0.", printed_dataset=1,
    )  # fmt: skip


_REACHES, _BELOW = RowEvent(1, "exp", "special", "reaches"), RowEvent(1, "exp", "other", "below")
CLAIMS: tuple[Claim, ...] = (
    _informal("1.1", self_case(), "D"),
    _informal("1.2", cross_case(), "F"),
    Claim(
        "B.6.2", "Theorem 6.2",
        "for D₁: F_exp > 0 and F_exp = 0, for D₀: F_lin = 0 and F_lin = 0, with probability 1 − δ/poly(n)",
        Computation(_main_theorem), f"{HYPOTHESES['D1']}, m = O(log(n/δ))",
        note="F_exp is printed in place of F_lin, and F_lin in place of F_exp; no network is both positive and zero.",
    ),
    _row("D.4.1", _REACHES, D_1, "D1"),
    _row(
        "D.4.2", _BELOW, D_1, "D1", corrected="ours.b-d-4-2",
        note="Violated in the cases with a₁ ≥ 1, where the weight of j₃ in the other rows does not vanish as n grows.",
    ),
    Claim(
        "ours.b-d-4-2", "Lemma D.4, Part 2, for smaller a₁", f"if a₁ ≤ 4/5, {_statement(_BELOW)}",
        Computation(lambda: judge_event(_BELOW, (*D_1[1:], self_case(a1=0.8)))),
        HYPOTHESES["D1"].replace("a₁ ≥ 7/10", "7/10 ≤ a₁ ≤ 4/5"),
    ),
    _network("D.5", NetworkEvent(1, "exp", True), D_1, "D1"),
    *_self_rows("D.8", 0, "exp", D_0),
    _zero_for_d1("D.9", D_0, D_1),
    *_self_rows("D.12", 1, "lin", D_1),
    _network("D.13", NetworkEvent(1, "lin", False), D_1, "D1"),
    *_self_rows("D.16", 0, "lin", D_0),
    _network(
        "D.17", NetworkEvent(0, "lin", False), D_0, "D0",
        lambda: _refuted(
            _displayed(), "B.D.17", "F_lin", "the displayed network", "the displayed network, with c_exp, is not F_lin."
        ),
        "As intended, with c_lin in the network",
        "The theorem defines F_exp with c_exp and makes a statement about F_lin.",
    ),
    _row_claim(
        "E.3.1", _REACHES, "E",
        lambda: compare_readings(
            judge_event(_REACHES, E_PRINTED), judge_event(_REACHES, E_INTENDED),
            "With a₁ ≥ 1 as in Lemma E.1, which the proof uses",
        ),
        note="The lemma requires only Definition D.1, hence a₁ ≥ 7/10.",
    ),
    _row("E.3.2", _BELOW, (*E_PRINTED, E_INTENDED[0]), "E"),
    _network(
        "E.4", NetworkEvent(1, "exp", True), E_SQUARES, "E4",
        lambda: _refuted(CONTRADICTION, "B.E.4", "the required b² + c²", "the actual b² + c²", f"{IMPOSSIBLE}."),
        "With b² + c² = 1 in place of b + c = 1",
        "Its conditions contradict each other, like those of Lemma E.1 (see B.E.1).",
    ),
    _cross_row("F.4.1", RowEvent(1, "exp", "special", "reaches", Fraction(9, 10)), F_1, _J2),
    _cross_row("F.4.2", RowEvent(1, "exp", "other", "within", _HALF), F_1, _J2),
    _network("F.5", NetworkEvent(1, "exp", True), F_1, "F1"),
    *_cross_rows("F.8", 0, "exp", F_0),
    _zero_for_d1("F.9", F_0, F_1),
    *_cross_rows("F.12", 1, "lin", F_1, f"{_J2}, and D₁ in place of D₀"),
    _network("F.13", NetworkEvent(1, "lin", False), F_1, "F1"),
    *_cross_rows("F.16", 0, "lin", F_0),
    _network("F.17", NetworkEvent(0, "lin", False), F_0, "F0"),
)  # fmt: skip
