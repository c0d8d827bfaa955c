"""The Wilson interval against its definition, and the validation of counts."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthgauge.base.errors import InputError
from depthgauge.papers.separation.probability import Estimate, wilson

Z = NormalDist().inv_cdf(0.975)


@given(trials=st.integers(1, 10**6), share=st.floats(0, 1))
def test_the_ends_solve_the_equation_of_the_score_test(trials: int, share: float) -> None:
    """Each end p solves |ratio − p| = z·√(p(1 − p)/N), which defines the interval."""
    successes = round(share * trials)
    low, high = wilson(successes, trials)
    ratio = successes / trials
    assert 0 <= low <= ratio <= high <= 1
    for end in (low, high):
        assert abs(ratio - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / trials), abs=1e-9)


def test_none_and_all_reach_the_ends() -> None:
    assert wilson(0, 100)[0] == 0
    assert wilson(100, 100)[1] == 1
    assert wilson(0, 100)[1] > 0.03


@pytest.mark.parametrize(("successes", "trials"), [(-1, 10), (11, 10), (0, 0)])
def test_impossible_counts_are_refused(successes: int, trials: int) -> None:
    with pytest.raises(InputError, match=r"counts must be between 0 and the number of models, got .* of \d+"):
        Estimate(trials, successes, (0, 0, 0, 0))
    with pytest.raises(InputError, match="counts must be between 0 and the number of models"):
        Estimate(trials, 0, (0, 0, successes, 0) if trials else (0, 0, 0, 0))
