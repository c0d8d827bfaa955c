"""The search finds counterexamples, verifies them exactly, and finds none to true statements."""

from fractions import Fraction

import numpy as np
import pytest
from flint import arb, fmpq
from hypothesis import given
from hypothesis import strategies as st
from planted_claims import planted

from depthgauge.papers.ledger.arithmetic import EXACT, FLOATS, attention, precise, residual, softm, to_exact, to_float
from depthgauge.papers.ledger.claim import Inequality, Misprint, drawing, sizes
from depthgauge.papers.ledger.registry import registry
from depthgauge.papers.ledger.search import cost, judge, ratio, refute, search, show, simplest, violated

SHARP = [claim.id for claim in registry().values() if claim.sharp]


def test_sharp_constants_shrunk_by_a_tenth_are_refuted():
    for id in SHARP:
        check = registry()[id].check
        inequality = check.proved if isinstance(check, Misprint) else check
        found = search(planted(inequality), f"{id}/planted")
        assert found.verdict == "fails", id
        assert found.witness.ratio > 1, id


def test_number_of_sharp_claims():
    assert len([id for id in SHARP if id.startswith("ours.")]) >= 15
    assert len([id for id in SHARP if id.startswith("A.")]) >= 8


def square(constant):
    """x ≤ constant·x² for x ≥ 1, which is true for constant = 1 and false for a smaller one."""

    def evaluate(ar, x):
        return {"x²": x * x}, x, ar.number(constant) * x * x

    return Inequality(
        "x",
        "c x²",
        evaluate,
        drawing({"x": ""}),
        ({},),
        allowed=lambda ar, x: bool(x >= 1),
        starts=lambda s: [{"x": 1.5}],
    )


def test_the_simplest_witness_is_returned():
    assert search(square(1), "square").witness is None
    found = search(square("1/2"), "square").witness
    assert found.to_json() == {"x": "1"}
    assert (found.left, found.right, found.ratio) == ("1", "1/2", 2.0)


def test_a_rounding_error_is_no_witness():
    def evaluate(ar, x):
        return {"x": x}, (x + 1) - 1, x  # equal in exact arithmetic, may be larger in floats

    tiny = Inequality("(x + 1) − 1", "x", evaluate, lambda r, s: {"x": float(r.random()) * 1e-8}, ({},))
    seen = [FLOATS.number("1/3") * 10.0**-k for k in range(6, 12)]
    assert any((x + 1) - 1 > x for x in seen)
    assert search(tiny, "rounding").verdict != "fails"


def test_the_hypotheses_hold_exactly_at_every_witness():
    claim = registry()["A.C.2.3"]
    witness = judge(claim).witness
    exact = {name: to_exact(value) for name, value in witness.arrays().items()}
    with precise():
        assert claim.check.allowed(EXACT, **exact)
    assert refute(claim.check, witness.arrays()) is not None
    outside = {**witness.arrays(), "X0": witness.arrays()["X0"] * 100}
    assert refute(claim.check, outside) is None


def test_without_an_instance_the_verdict_is_undecided():
    never = Inequality("x", "x", square(1).evaluate, drawing({"x": ""}), ({},), allowed=lambda ar, x: False)
    assert search(never, "never").verdict == "undecided"


def test_a_search_is_reproducible():
    claim = registry()["A.5.1"]
    first, second = judge(claim), judge(claim)
    assert first.witness.to_json() == second.witness.to_json()
    assert (first.evaluations, first.ratio, first.remarks) == (second.evaluations, second.ratio, second.remarks)


@pytest.mark.parametrize(
    ("relation", "left", "right", "fails"),
    [
        ("<=", fmpq(1), fmpq(1), False),
        ("<=", fmpq(2), fmpq(1), True),
        ("<", fmpq(1), fmpq(1), True),
        ("<", fmpq(1), fmpq(2), False),
        ("=", fmpq(1), fmpq(1), False),
        ("=", fmpq(1), fmpq(2), True),
        ("<=", arb(1, 0.5), fmpq(1), False),  # an interval that contains the right side
    ],
)
def test_a_relation_fails_only_for_certain_values(relation, left, right, fails):
    assert violated(left, right, relation) is fails
    harmless = (fmpq(0), fmpq(0) if relation == "=" else fmpq(5))
    assert violated(np.array([harmless[0], left]), np.array([harmless[1], right]), relation) is fails


def test_the_ratio_of_zero_and_zero():
    assert ratio(0.0, 0.0, "<=") == 0.0
    assert ratio(0.0, 0.0, "<") == 1.0
    assert ratio(1.0, 0.0, "<=") == np.inf
    assert ratio(np.array([1.0, 3.0]), np.array([2.0, 4.0]), "<=") == 0.75
    assert ratio(np.nan, 1.0, "<=") == 0.0


fractions = st.fractions(min_value=-4, max_value=4, max_denominator=8)


@given(st.lists(st.lists(fractions, min_size=2, max_size=2), min_size=1, max_size=4))
def test_both_arithmetics_agree(rows):
    exact = np.array([[to_exact(v) for v in row] for row in rows], dtype=object)
    floats = np.array(rows, dtype=float)
    with precise():
        for function in (
            residual,
            softm,
            lambda ar, X: attention(ar, X, X.T @ X, X.T @ X, X.T @ X),
            lambda ar, X: ar.tanh(ar.sqrt(abs(X))),
            lambda ar, X: ar.min(X, axis=0),
            lambda ar, X: ar.log(ar.exp(X)),
        ):
            assert np.allclose(
                [to_float(v) for v in np.asarray(function(EXACT, exact)).flat],
                np.asarray(function(FLOATS, floats)).ravel(),
                rtol=1e-9,
                atol=1e-9,
            )


@given(fractions)
def test_exact_numbers_contain_the_true_value(value):
    with precise():
        x = to_exact(value)
        assert EXACT.sqrt(x * x) == abs(x)
        assert abs(EXACT.log(EXACT.exp(x)) - x) < fmpq(1, 10**60)


def test_numbers_as_text():
    assert show(fmpq(3, 2)) == "3/2"
    assert show(fmpq(1, 3**40)) == "8.225263e-20"
    with precise():
        assert show(arb(1).exp()) == "2.718282"
    assert show(np.array([[fmpq(1), fmpq(2)]], dtype=object)) == "[[1, 2]]"


def test_simple_instances_cost_less():
    def entries(*values):
        return {"x": np.array([Fraction(v) for v in values], dtype=object)}

    assert cost(entries(0, 0)) < cost(entries(1, 1)) < cost(entries(1, -1)) < cost(entries("3/7", "5/8"))


def test_simplification_keeps_the_violation():
    inequality = square("1/2")
    refutation = simplest(inequality, {"x": 1.2345678}, 1.6)
    assert refutation.instance["x"] == 1
    assert simplest(square(1), {"x": 1.5}, 0.7) is None


def test_sizes_are_zipped():
    assert sizes(n=(1, 2), d=(3, 4)) == ({"n": 1, "d": 3}, {"n": 2, "d": 4})
