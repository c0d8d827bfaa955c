"""The sign of Σ r·k(q·log n), in particular for sums that are zero or nearly zero."""

from fractions import Fraction
from math import comb

import pytest
from flint import arb, ctx, fmpq
from hypothesis import given
from hypothesis import strategies as st

from depthgauge.papers.separation.decisions import sign_of_sum
from depthgauge.papers.separation.settings import EXP, LIN, ScoreMap

F = Fraction
TINY = F(1, 10**400)

small = st.fractions(min_value=-3, max_value=3, max_denominator=20)
scores = st.fractions(min_value=0, max_value=4, max_denominator=12)
terms = st.lists(st.tuples(small, scores), max_size=6)


def reference(kind: ScoreMap, n: int, given_terms: list[tuple[Fraction, Fraction]]) -> int:
    """Return the sign at 3000 bits, computed independently of the code under test; 0 if it is undecided."""
    with ctx.workprec(3000):
        total = arb(0)
        for r, q in given_terms:
            u = arb(fmpq(q.numerator, q.denominator)) * arb(n).log()
            if kind is EXP:
                k = u.exp()
            elif kind is LIN:
                k = u
            else:
                k = sum((u**i / arb.fac_ui(i) for i in range(kind.degree + 1)), arb(0))
            total += arb(fmpq(r.numerator, r.denominator)) * k
        return 1 if total > 0 else -1 if total < 0 else 0


@given(terms=terms, n=st.integers(2, 300), kind=st.sampled_from([EXP, LIN, ScoreMap("poly", 1), ScoreMap("poly", 4)]))
def test_the_sign_is_that_of_a_long_evaluation(terms: list[tuple[F, F]], n: int, kind: ScoreMap) -> None:
    assert sign_of_sum(kind, n, terms) == reference(kind, n, terms)


@given(
    root=st.integers(2, 30),
    power=st.integers(1, 6),
    shift=st.integers(0, 5),
    pieces=st.lists(st.tuples(small, scores), min_size=1, max_size=4),
)
def test_powers_that_cancel_are_recognised(root: int, power: int, shift: int, pieces: list[tuple[F, F]]) -> None:
    """r·n^q and r·v^s·n^(q − s/k) are equal if n = v^k, so they cancel and the remaining term decides."""
    n = root**power
    zero = []
    for r, q in pieces:
        high = q + F(shift, power)
        zero += [(r, high), (-r * root**shift, q)]
    assert sign_of_sum(EXP, n, zero) == 0
    assert sign_of_sum(EXP, n, [*zero, (TINY, F(1))]) == 1
    assert sign_of_sum(EXP, n, [*zero, (-TINY, F(7, 3))]) == -1


@given(degree=st.integers(1, 8), step=st.fractions(F(1, 9), 2, max_denominator=9), n=st.integers(2, 10**6))
def test_polynomials_that_vanish_are_recognised(degree: int, step: F, n: int) -> None:
    """The (g+1)-th difference of a polynomial of degree g is zero; the g-th is not."""
    kind = ScoreMap("poly", degree)
    zero = [(F((-1) ** i * comb(degree + 1, i)), i * step) for i in range(degree + 2)]
    assert sign_of_sum(kind, n, zero) == 0
    assert sign_of_sum(kind, n, [*zero, (TINY, F(1))]) == 1
    rest = [(F((-1) ** (degree - i) * comb(degree, i)), i * step) for i in range(degree + 1)]
    assert sign_of_sum(kind, n, rest) == 1


def test_exp_does_not_vanish_where_its_truncation_does() -> None:
    difference = [(F(1), F(0)), (F(-2), F(1)), (F(1), F(2))]
    assert sign_of_sum(ScoreMap("poly", 1), 7, difference) == 0
    assert sign_of_sum(EXP, 7, difference) == 1  # (7 − 1)²


def test_irrational_powers_do_not_cancel() -> None:
    close = round(2**0.5 * 10**12)
    assert sign_of_sum(EXP, 2, [(F(close, 10**12), F(0)), (F(-1), F(1, 2))]) == (1 if close**2 > 2 * 10**24 else -1)


def test_very_large_exponents_terminate() -> None:
    huge = F(10) ** 30
    assert sign_of_sum(EXP, 5, [(F(1), huge), (F(-1), huge + 1), (F(5), huge)]) == 1
    assert sign_of_sum(EXP, 5, [(F(-5), huge), (F(1), huge + 1)]) == 0
    assert sign_of_sum(EXP, 5, [(F(-5), huge), (F(1), huge + 1), (F(-1), F(0))]) == -1


@pytest.mark.parametrize("kind", [EXP, LIN, ScoreMap("poly", 3)])
def test_empty_and_cancelling_sums_are_zero(kind: ScoreMap) -> None:
    assert sign_of_sum(kind, 10, []) == 0
    assert sign_of_sum(kind, 10, [(F(1), F(1, 3)), (F(-1), F(1, 3))]) == 0
