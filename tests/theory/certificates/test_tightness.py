"""Tightness of certificates at small weights. Soundness is tested in tests/contracts/test_certificates.py."""

import statistics

import pytest

from depthgauge.theory.certificates.expansion_proof import ExpansionProof, layers_of
from depthgauge.theory.depth.certificate import certify
from depthgauge.theory.depth.methods import collapse
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.network.random_networks import random_network


def ratios(dim, heads, layers, method, effort, seeds, **attack):
    found = []
    for seed in seeds:
        network = random_network(layers=layers, heads=heads, dim=dim, eta=0.01, seed=seed)
        found.append(certify(network, collapse(network, method), radius=1.0, effort=effort, **attack).ratio)
    return found


@pytest.mark.parametrize(
    ("shape", "effort", "most"),
    [((4, 1, 2), "default", 1.6), ((8, 2, 4), "default", 1.7), ((4, 1, 2), "high", 1.35), ((8, 2, 4), "high", 1.45)],
)
def test_error_of_the_mean_field_is_known_within_a_small_factor(shape, effort, most):
    assert statistics.median(ratios(*shape, "mean-field", effort, range(3), starts=16, steps=25)) <= most


@pytest.mark.parametrize("method", ["identity", "last-layer", "parallel"])
def test_errors_of_first_order_surrogates_are_known_within_five_percent(method):
    assert max(ratios(8, 2, 4, method, "default", range(3), starts=4, steps=4)) <= 1.05


def test_joint_beats_plain_and_squares_beat_both():
    network = random_network(layers=4, heads=2, dim=8, eta=0.01, seed=1)
    surrogate = collapse(network, "mean-field")
    default = certify(network, surrogate, radius=1.0, starts=1, steps=1)
    high = certify(network, surrogate, radius=1.0, effort="high", starts=1, steps=1)
    assert default.methods == ("joint",)
    assert high.methods == ("joint", "squares")
    layers = layers_of(default.comparison, Outward(), joint=False)
    assert high.upper < default.upper < 0.5 * ExpansionProof(default.comparison, layers).upper


def test_the_bound_on_a_ball_is_tight():
    network = random_network(layers=4, heads=2, dim=8, eta=0.01, seed=1)
    certificate = certify(network, collapse(network, "mean-field"), ball=8**0.5)
    assert certificate.ratio <= 1.5
