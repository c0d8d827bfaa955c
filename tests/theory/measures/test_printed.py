"""The printed quantities of paper A: their logarithms agree with the formulas, and none overflows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthgauge.theory.depth.certificate import certify
from depthgauge.theory.depth.methods import collapse
from depthgauge.theory.measures import printed
from depthgauge.theory.network.random_networks import random_network

etas = st.floats(1e-6, 0.05)
phis = st.floats(0.01, 3.0)
heads = st.integers(1, 4)
layers = st.integers(1, 8)


@given(etas, phis, heads, layers)
def test_logarithms_agree_with_the_formulas_where_these_do_not_overflow(eta, phi, H, L):
    epsilon = [2 * eta * phi * (1 + H * eta) ** ell for ell in range(L + 1)]
    g = lambda e: 2 * (math.exp(e) - 1)  # noqa: E731
    delta = max(2 * g(2 * H * e) for e in epsilon[1:])
    C = max(3 * eta * (e * e + 1) for e in epsilon[1:])
    bound = sum(C**power for power in range(L + 1)) * delta
    assert math.exp(printed.log_epsilon(eta, phi, H, L)) == pytest.approx(epsilon[L], rel=1e-9)
    assert math.exp(printed.log_g(math.log(epsilon[L]))) == pytest.approx(g(epsilon[L]), rel=1e-6)
    assert math.exp(printed.log_delta(eta, phi, H, L)) == pytest.approx(delta, rel=1e-6)
    assert math.exp(printed.log_C(eta, phi, H, L)) == pytest.approx(C, rel=1e-9)
    assert math.exp(printed.log_final_bound(eta, phi, H, L)) == pytest.approx(bound, rel=1e-6)


@given(st.floats(0.01, 2.0), heads, st.integers(1, 16), st.integers(1, 3), st.floats(0.1, 3.0))
def test_rank_collapse_rates(beta, H, k, L, residual):
    exponent = (3**L - 1) // 2
    rate = (4 * beta * H / math.sqrt(k)) ** exponent * residual ** (3**L)
    assert printed.log_dong_rate(beta, H, k, L, math.log(residual)) == pytest.approx(math.log(rate), abs=1e-6)


def test_nothing_overflows():
    assert printed.log_final_bound(1.0, 1e6, 64, 100) > 700
    assert printed.log_dong_rate(1e-3, 1, 4, 1000, 0.5) == math.inf or math.isinf(
        printed.log_dong_rate(1e-3, 1, 4, 1000, -0.5)
    )
    bound = printed.printed_bound(random_network(layers=20, heads=8, dim=2, eta=1.0), 10.0)
    assert bound.printed_bound is None
    assert bound.printed_log10 is None or bound.printed_log10 > 307
    assert not bound.printed_applies


def test_aligned_weights_violate_the_printed_bound_although_its_conditions_hold():
    network = random_network(layers=4, heads=1, dim=8, eta=0.01, distribution="aligned")
    bound = printed.printed_bound(network, 1.0)
    assert bound.printed_applies
    certificate = certify(network, collapse(network, "last-layer"), radius=1.0, starts=4, steps=4)
    assert certificate.lower > 1.5 * bound.printed_bound
    assert certificate.upper >= certificate.lower


def test_conditions_that_fail_are_named():
    causal = printed.printed_bound(random_network(layers=2, heads=1, dim=2, eta=0.01, causal=True), 1.0)
    assert not causal.printed_applies
    assert not causal.printed_conditions["is not causal"]
    large = printed.printed_bound(random_network(layers=2, heads=1, dim=2, eta=0.9), 1.0)
    assert not large.printed_conditions["2Hε_L < 1/2"]
    assert large.printed_conditions["η ≤ 1"]
