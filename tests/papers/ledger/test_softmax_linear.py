"""The claims of paper B are complete, have the known verdicts, and use the data sets as defined."""

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import dense_separation as naive
import numpy as np
import pytest
import torch
from dense_separation import inputs, threshold

from depthgauge.papers.ledger import random_signs
from depthgauge.papers.ledger.arithmetic import EXACT, FLOATS, precise, to_exact, to_float
from depthgauge.papers.ledger.claim import Computation, Inequality, Misprint, Observed
from depthgauge.papers.ledger.lemma_parts import AttentionSetup, DenseAttention
from depthgauge.papers.ledger.random_signs import (
    NetworkEvent,
    RowEvent,
    allowed_failure,
    compare_readings,
    cross_case,
    failure_curve,
    judge_equality,
    judge_event,
    least_width_factor,
    self_case,
)
from depthgauge.papers.ledger.registry import explain, registry
from depthgauge.papers.ledger.regression_lemmas import largest_squares
from depthgauge.papers.ledger.search import judge, refute, search
from depthgauge.papers.separation.decisions import rows
from depthgauge.papers.separation.probability import exact
from depthgauge.papers.separation.settings import EXP, LIN, CrossAttention, SelfAttention, parse_attention

CLAIMS = [claim for claim in registry().values() if claim.id.startswith(("B.", "ours.b-"))]
BY_ID = {claim.id: claim for claim in CLAIMS}
FEW = 100
"""The number of evaluations. The structured starts come first, so most counterexamples are found among these."""


def parts(lemma, names):
    return [f"B.{lemma}.{name}" for name in names.split()]


ENTRIES = "1a 1b 2a 2b 3a 3b 4a 4b"
ALL = ["B.1.1", "B.1.2", "B.3.1", "B.3.6", *parts("4.1", "1 2"), *parts("4.2", "1 2 3"), *parts("5", "1 2 3 4")]
ALL += ["B.6.2", "B.A.1", *parts("C.3", "1 2"), *parts("C.5", "1 2"), "B.C.6"]
ALL += [*parts("D.2", ENTRIES), *parts("D.3", "1 2a 2b 3 4 5 6"), *parts("D.4", "1 2"), "B.D.5"]
ALL += [*parts("D.6", ENTRIES), *parts("D.7", "1 2 2a 2b 3 4 5 5a 5b 6"), *parts("D.8", "1 2"), "B.D.9"]
ALL += [*parts("D.10", ENTRIES), *parts("D.11", "1 2 3 4 5 6"), *parts("D.12", "1 2"), "B.D.13"]
ALL += [*parts("D.14", ENTRIES), *parts("D.15", "1 2 3 4 5 6"), *parts("D.16", "1 2"), "B.D.17"]
ALL += ["B.E.1", *parts("E.1", "1a 1b 1b.1 1b.2 2 2a 2b 3a 3b 4a 4b"), "B.E.2", *parts("E.2", "1 2a 2b 3 4 5 6")]
ALL += [*parts("E.3", "1 2"), "B.E.4", *parts("F.2", ENTRIES), *parts("F.3", "1 2a 2b 3 4"), *parts("F.4", "1 2")]
ALL += ["B.F.5", *parts("F.6", ENTRIES), *parts("F.7", "1 2 4 5"), *parts("F.8", "1 2"), "B.F.9"]
ALL += [*parts("F.10", "1 2 3 4 5"), *parts("F.11", "1 2 3 4"), *parts("F.12", "1 2"), "B.F.13"]
ALL += [*parts("F.14", "1 2 3 4 5"), "B.F.15", *parts("F.15", "1 2 3 4"), *parts("F.16", "1 2"), "B.F.17"]
OURS = ["ours.b-d-3-5", "ours.b-d-4-2", "ours.b-e-1", "ours.b-squares", "ours.b-tensor-columns"]

FAILS = ["B.D.3.5", "B.D.4.2"]
MISPRINTS = ["B.3.6", "B.6.2", "B.C.5.2", "B.C.6", *(f"B.D.{k}.4b" for k in (2, 6, 10, 14)), "B.D.9", "B.D.17"]
MISPRINTS += [*parts("D.6", "1a 1b 2a 3a 4a"), *parts("D.14", "1a 1b 2a 2b 3a 3b 4a")]
MISPRINTS += ["B.E.1", *parts("E.1", "1a 2a 4a 4b"), "B.E.2", *parts("E.2", "4 5"), "B.E.3.1", "B.E.4"]
MISPRINTS += ["B.F.2.4a", *parts("F.4", "1 2"), *parts("F.6", "1a 3a 4a"), *parts("F.7", "4 5"), *parts("F.8", "1 2")]
MISPRINTS += ["B.F.9", *parts("F.11", "3 4"), *parts("F.12", "1 2"), *parts("F.14", "1 3 5"), "B.F.15"]
MISPRINTS += parts("F.16", "1 2")


@cache
def judged(id):
    return judge(BY_ID[id], FEW)


def test_every_part_is_listed_in_the_order_of_the_paper():
    assert [claim.id for claim in CLAIMS] == ALL + OURS


def test_verdicts():
    for id in ALL + OURS:
        expected = "fails" if id in FAILS else "misprint" if id in MISPRINTS else "holds"
        found = judged(id)
        assert found.verdict == expected, (id, found)
        if expected == "holds":
            assert found.witness is None, id
            assert found.ratio is None or found.ratio <= 1, id
        else:
            assert found.witness is not None, id
            assert found.witness.ratio is None or found.witness.ratio > 1, id
        if expected == "fails":
            assert judged(BY_ID[id].corrected).verdict == "holds", id


def test_the_intended_form_of_every_misprint_holds():
    for claim in CLAIMS:
        if not isinstance(claim.check, Misprint):
            continue
        assert search(claim.check.proved, f"{claim.id}/proved", FEW).verdict == "holds", claim.id
        witness = judged(claim.id).witness
        if witness is not None:
            assert refute(claim.check.printed, witness.arrays()) is not None, claim.id
            assert judged(claim.id).ratio == witness.ratio, claim.id


def test_sharp_claims_are_those_with_ratios_near_one():
    assert len([claim for claim in CLAIMS if claim.sharp]) > 60
    loose = [claim for claim in CLAIMS if isinstance(claim.check, Inequality) and not claim.sharp]
    close = [claim.id for claim in loose if judged(claim.id).verdict == "holds" and judged(claim.id).ratio > 0.95]
    assert close == ["ours.b-e-1"]  # all parts together, including equations


def test_hypotheses_are_checked():
    check = BY_ID["B.D.3.1"].check
    good = {"d": 4, "t": 2, "j3": 1, "a1": 0.7, "b": 0.5}
    assert check.allowed(FLOATS, **good)
    for wrong in ({"a1": 0.69}, {"b": 0.09}, {"b": 0.91}):
        assert not check.allowed(FLOATS, **{**good, **wrong})
    cross = BY_ID["B.F.7.1"].check.proved
    good = {"d": 4, "t": 2, "j2": 1, "j3": 2, "a0": 0.05}
    assert cross.allowed(FLOATS, **good)
    for wrong in ({"a0": 0.0}, {"a0": 0.1}):
        assert not cross.allowed(FLOATS, **{**good, **wrong})
    assert not BY_ID["B.F.3.1"].check.allowed(FLOATS, d=4, t=2, j2=1, j3=2, a1=1.0)
    # with one class there is no other class
    assert not BY_ID["B.D.3.2b"].check.allowed(FLOATS, d=3, t=2, j3=1, a1=1.0, b=0.5)


SETUPS = [
    AttentionSetup(family, dataset, kind, product)
    for family, dataset, kind, product in itertools.product(
        ("self", "cross"), (0, 1), ("exp", "lin"), ("ones", "identity")
    )
    if (family, product) != ("cross", "ones")
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_dense_attention_matches_the_separation_package(setup):
    d, t, j2, j3 = (5, 3, 4, 2) if setup.family == "self" else (4, 3, 4, 2)
    n, product = (d - setup.extra_columns) * t, setup.product
    if setup.family == "self":
        setting = SelfAttention(n, d, 1, 0.05, 1.3, 0.3, 0.7, product)
    else:
        setting = CrossAttention(n, d, 1, 0.05, 1.3, product)
    given = {"d": d, "t": t, "j3": j3, "a0": 0.05, "a1": 1.3}
    given |= {"b": 0.3} if setup.family == "self" else {"j2": j2}
    at = (torch.tensor([j2 - 1]), torch.tensor([j3 - 1]))
    matrices = inputs(setting, setup.dataset, *at)
    u = naive.scores(matrices.a1, naive.product(setting), matrices.a2)
    kind = parse_attention(setup.kind)
    expected = {
        "u": u.exp() if setup.kind == "exp" else u,
        "f": naive.attend(kind, u),
        "c": naive.output(setting, kind, setup.dataset, *at),
    }
    floats = DenseAttention(FLOATS, setup, setup.symbol, **given)
    with precise():
        exact_numbers = DenseAttention(
            EXACT, setup, setup.symbol, **{name: to_exact(value) for name, value in given.items()}
        )
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(floats, name), value[0].numpy(), rtol=1e-12)
            numbers = getattr(exact_numbers, name)
            np.testing.assert_allclose([to_float(v) for v in numbers.flat], value[0].numpy().ravel(), rtol=1e-12)


BRUTE = [
    (self_case(), 3),
    (self_case("identity"), 3),
    (self_case("identity", a1=0.7, b=0.4, c=0.6), 4),
    (cross_case(), 4),
]


@pytest.mark.parametrize(("case", "classes"), BRUTE)
@pytest.mark.parametrize("dataset", [0, 1])
@pytest.mark.parametrize("kind", [EXP, LIN])
def test_row_probabilities_against_all_sign_vectors(case, classes, dataset, kind):
    setting = case.build(classes)
    at = (torch.tensor([0]), torch.tensor([0]))
    c = naive.output(setting, kind, dataset, *at)[0].numpy()
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=setting.d)))
    tau = threshold(setting)
    above = {round(float((c[row] @ signs.T >= tau).mean()), 12) for row in range(setting.n)}
    mine = {
        round(random_signs.probability_at_least(setting, row, kind, setting.threshold), 12)
        for row in rows(setting, dataset)
    }
    assert mine == above
    special = float((c[0] @ signs.T >= tau).mean())
    assert RowEvent(dataset, kind.family, "special", "below").failure_probability(setting) == pytest.approx(
        special, abs=1e-12
    )
    within = float((np.abs(c[0] @ signs.T) >= tau).mean())
    assert RowEvent(dataset, kind.family, "special", "within").failure_probability(setting) == pytest.approx(
        within, abs=1e-12
    )
    reaches = RowEvent(dataset, kind.family, "special", "reaches").failure_probability(setting)
    assert reaches == pytest.approx(1 - special, abs=1e-12)
    positive = float((c @ signs.T > tau).any(axis=0).mean())
    assert random_signs.positive_probability(setting, dataset, kind) == pytest.approx(positive, abs=1e-12)


@pytest.mark.parametrize("guess", [-5.0, 0.0, 3.2, 7.0, 50.0, float("inf")])
def test_the_least_p_is_found_from_any_guess(guess):
    for top in range(9):
        for least in range(top + 2):
            assert random_signs._least_count(lambda p, least=least: p >= least, top, guess) == least


@pytest.mark.parametrize("case", [self_case(), self_case("identity"), cross_case()])
def test_networks_against_the_exact_probabilities(case):
    setting = case.build(40)
    expected = exact(replace(setting, m=random_signs.width(setting.n))).parts
    events = [
        NetworkEvent(1, "exp", True),
        NetworkEvent(1, "lin", False),
        NetworkEvent(0, "exp", False),
        NetworkEvent(0, "lin", False),
    ]
    assert [1 - each.failure_probability(setting) for each in events] == pytest.approx(expected, abs=1e-12)


@dataclass(frozen=True)
class Fake:
    """An event whose failure probability is a given function of n."""

    curve: str
    dataset: int = 1

    def failure_probability(self, setting):
        return {"falls": setting.n**-1.5, "late": 10.0 * setting.n**-0.5, "stays": 0.2, "rare": 0.5 ** (setting.d / 8)}[
            self.curve
        ]

    def steps(self, setting):
        return ()


def test_the_three_verdicts_of_an_event():
    case = (self_case(),)
    found = judge_event(Fake("falls"), case)
    assert found.verdict == "holds"
    # n^(−1.5) ≤ 1/(10 n) from n = 100 on
    assert "from n = 100 on" in found.remarks[0]
    assert found.ratio == pytest.approx(1)
    assert judge_event(Fake("late"), case).verdict == "undecided"
    stays = judge_event(Fake("stays"), case)
    assert stays.verdict == "fails"
    assert stays.witness.instance["n"] == 10**8
    assert stays.witness.ratio == pytest.approx((1 - 1e-9) / 0.8)


@pytest.mark.parametrize("case", [self_case(), self_case(b=0.5, c=0.5), cross_case()])
def test_the_start_comes_after_the_last_violation(case):
    for each in (RowEvent(0, "exp", "special", "within"), NetworkEvent(1, "lin", False)):
        curve = failure_curve(each, case)
        good = [
            each.failure_probability(case.build(k)) <= allowed_failure(each, k * k)
            for k in range(curve.start - 1, curve.start + 40)
        ]
        assert good == [False] + [True] * 40


def test_equality_with_a_polynomial():
    assert judge_equality(Fake("falls"), self_case()).verdict == "undecided"
    assert judge_equality(Fake("rare"), self_case()).verdict == "fails"


def test_a_misprint_fails_as_printed_and_holds_as_intended():
    seen = {verdict: Observed(verdict, None, 1, (verdict,)) for verdict in ("holds", "fails", "undecided")}
    assert compare_readings(seen["fails"], seen["holds"], "As intended").verdict == "misprint"
    assert compare_readings(seen["fails"], seen["undecided"], "As intended").verdict == "fails"
    assert compare_readings(seen["holds"], seen["fails"], "As intended").verdict == "holds"


def test_the_least_width():
    """One y in four makes F positive: (3/4)^(C log(n/δ)) ≤ δ/n if and only if C ≥ 1/log(4/3) = 3.48."""
    assert least_width_factor(NetworkEvent(1, "exp", True), (self_case(),)) == 4
    assert "is 4." in judged("B.D.5").remarks[-1]


def test_where_lemma_d_4_fails():
    witness = judged("B.D.4.2").witness
    assert Fraction(str(witness.to_json()["a1"])) >= 1
    event = RowEvent(1, "exp", "other", "below")
    assert all(
        0.25 <= event.failure_probability(self_case(a1=a1).build(k)) <= 0.5
        for a1 in (1.0, 1.2, 2.0)
        for k in (100, 10**4)
    )


@pytest.mark.parametrize("dataset", [0, 1])
@pytest.mark.parametrize("kind", [EXP, LIN])
def test_the_largest_sum_of_squares(kind, dataset):
    random = np.random.default_rng(0)
    n = 7
    top = 1.4 if kind is LIN else n**0.4
    peak = [[], [4.0 if kind is LIN else n**3.0]][dataset]
    free = n - len(peak)
    corners = [[top] * k + [1.0] * (free - k) for k in range(free + 1)]
    values = [np.array([*peak, *rest]) for rest in (*corners, *random.uniform(1, top, size=(2000, free)))]
    squares = [float((v**2).sum() / v.sum() ** 2) for v in values]
    assert largest_squares(kind, dataset, n) == pytest.approx(max(squares))
    assert max(squares) in squares[: free + 1]


def test_the_story_of_lemma_e_1():
    story = explain(BY_ID["B.E.1"], judged("B.E.1"), BY_ID["ours.b-e-1"])
    for line in ("b + c = 1", "b = 1/2", "2bc = 1/2", "(b + c)² − 2bc = 1/2", "41/50", "ours.b-e-1"):
        assert line in story


def test_every_study_states_its_reading():
    studies = [claim.id for claim in CLAIMS if isinstance(claim.check, Computation)]
    holding = [id for id in studies if id not in FAILS + MISPRINTS]
    assert len(holding) > 10
    for id in holding:
        assert judged(id).verdict == "holds"
        assert any("δ = 1/10" in remark for remark in judged(id).remarks), id
