"""Effective depth: the search agrees with brute force, and its errors are within the tolerance."""

import math
from itertools import chain, combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthgauge.base.errors import InputError
from depthgauge.theory.certificates.attack import AttackOptions
from depthgauge.theory.certificates.compared_networks import InputSet
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.depth.certificate import certify
from depthgauge.theory.depth.effective import (
    DepthBounds,
    certified_depth,
    cheapest_choices,
    effective_depth,
    measured_errors,
    proved_depth,
    runs_between,
)
from depthgauge.theory.depth.methods import collapse
from depthgauge.theory.network.random_networks import random_network, uniform_inputs
from depthgauge.theory.surrogates.closed_forms import CLOSED_FORMS, closed_form

BOX = InputSet("box", 1.0)


def subsets(L):
    return chain.from_iterable(combinations(range(L), count) for count in range(L + 1))


@given(st.integers(1, 6), st.data())
def test_all_choices_of_a_depth_are_listed_in_order_of_cost(L, data):
    costs = data.draw(st.lists(st.floats(0, 10), min_size=L, max_size=L))
    for layers in range(1, L + 1):
        expected = {kept for kept in subsets(L) if len(kept) + len(runs_between(L, kept)) == layers}
        ordered = cheapest_choices(costs, layers, 2**L)
        assert set(ordered) == expected
        spent = [sum(costs[k] for k in range(L) if k not in kept) for kept in ordered]
        assert spent == sorted(spent)
        few = cheapest_choices(costs, layers, 3)
        assert [sum(costs[k] for k in range(L) if k not in kept) for kept in few] == pytest.approx(spent[:3])


@pytest.mark.parametrize(("eta", "tolerance"), [(0.05, 3e-3), pytest.param(0.1, 1e-2, marks=pytest.mark.soak)])
def test_certified_depth_is_the_least_over_all_foldings(eta, tolerance):
    network = random_network(layers=4, heads=1, dim=3, eta=eta, seed=3)
    # One layer is much larger than the others, so the best folding keeps it.
    with torch.no_grad():
        network[2].value.mul_(3)
    bounds = DepthBounds(network, BOX, attack=AttackOptions(starts=4, steps=4))
    brute = min(len(kept) + len(runs_between(4, kept)) for kept in subsets(4) if bounds.error(kept) <= tolerance)
    brute = min([brute, *(1 for method in CLOSED_FORMS if bounds.error(method) <= tolerance)])
    depth = certified_depth(bounds, tolerance)
    assert depth.layers == brute
    assert depth.error <= tolerance
    assert len(depth.network) == brute
    if depth.certificate is not None:
        assert depth.certificate.lower <= tolerance


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_measured_depth_is_the_least_over_all_foldings(tolerance):
    network = random_network(layers=5, heads=1, dim=3, eta=0.25, seed=1)
    x = uniform_inputs(2, 12, 3)
    error = measured_errors(network, x)
    brute = min(len(kept) + len(runs_between(5, kept)) for kept in subsets(5) if error(kept) <= tolerance)
    brute = min([brute, *(1 for method in CLOSED_FORMS if error(method) <= tolerance)])
    depth = effective_depth(network, tolerance=tolerance, certified=False, x=x)
    assert depth.layers == brute
    with torch.no_grad():
        assert float((network(x) - depth.network(x)).abs().max()) <= tolerance


def test_small_weights_need_one_layer_and_large_ones_need_all():
    base = random_network(layers=5, heads=1, dim=4, eta=0.5, seed=0)
    small = effective_depth(base.rescale(0.005), radius=1.0, tolerance=1e-4)
    assert small.layers == 1
    assert small.certificate.lower <= small.error <= 1e-4
    large = effective_depth(base, radius=1.0, tolerance=1e-2)
    assert large.layers == 5
    assert large.error == 0.0
    assert large.network is not base
    assert torch.equal(large.network[0].value, base[0].value)


def test_networks_with_many_layers_are_searched():
    network = random_network(layers=8, heads=1, dim=2, eta=0.05, seed=2)
    depth = effective_depth(network, radius=1.0, tolerance=1e-2)
    assert depth.layers == 1
    assert depth.folded == (tuple(range(8)),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0, "radius": 1.0}, "tolerance must be a positive number"),
        ({"tolerance": 1e-2}, "needs a radius"),
        ({"tolerance": 1e-2, "radius": -1.0}, "radius must be a positive number"),
        ({"tolerance": 1e-2, "certified": False}, "needs inputs"),
    ],
)
def test_invalid_arguments_raise_before_any_computation(options, message):
    with pytest.raises(InputError, match=message):
        effective_depth(random_network(layers=2, heads=1, dim=2, eta=0.1), **options)


CAUSAL = {"causal": True}
BLOCKS = {"causal": True, "norm": "pre", "mlp": 4, "mlp_skip": True, "activation": "gelu"}
KINDS = [CAUSAL, BLOCKS, {"mlp": 4, "mlp_skip": True}, {"norm": "pre-rms"}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("length", [None, 3])
def test_networks_without_foldings_have_a_depth_over_tokens(kind, length):
    """Every sequence is within the proved error, and the measured depth is not larger."""
    network = random_network(layers=2, heads=2, dim=4, eta=0.005, **kind)
    embeddings = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    depth = effective_depth(network, tolerance=0.05, inputs=Tokens(embeddings, length=length))
    sharpest = ("parallel" if length is None else "corrected") if kind is CAUSAL else "parallel"
    assert (depth.layers, len(depth.network), depth.status, depth.method) == (1, 1, "proved", sharpest)
    assert depth.certificate.verify()
    for n in (1, 2, 3):
        x = embeddings[torch.tensor(list(product(range(3), repeat=n)))]
        gap = (network(x) - depth.network(x)).abs().max().item()
        assert gap <= depth.error * (1 + 1e-9) + 1e-14
    assert effective_depth(network, tolerance=0.05, certified=False, x=x).layers == 1
    tight = effective_depth(network, tolerance=1e-15, inputs=Tokens(embeddings, length=length))
    assert (tight.layers, tight.method) == (2, "none")
    assert tight.status in {"refuted", "undecided"}


def test_a_causal_network_has_a_depth_over_a_box():
    network = random_network(layers=3, heads=2, dim=4, eta=0.005, causal=True)
    depth = effective_depth(network, radius=1.0, tolerance=0.01)
    assert (depth.layers, depth.status, depth.method) == (1, "proved", "parallel")
    x = uniform_inputs(50, 6, 4, seed=0)
    assert (network(x) - depth.network(x)).abs().max().item() <= depth.error
    assert depth.certificate.verify()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ({"mlp": 4, "mlp_skip": True}, {"radius": 1.0}, "give the tokens"),
        ({"causal": True, "skip": False}, {"radius": 1.0}, "give the tokens"),
        ({"norm": "pre"}, {"radius": 1.0}, "give the tokens"),
        ({"norm": "post"}, {"inputs": Tokens(torch.eye(2))}, "after the sublayers"),
        ({"mlp": 4}, {"inputs": Tokens(torch.eye(2))}, "no skip connections around each sublayer"),
        ({"causal": True, "skip": False}, {"inputs": Tokens(torch.eye(2))}, "skip connections"),
        ({"norm": "post"}, {"certified": False, "x": torch.ones(2, 2, dtype=torch.float64)}, "no method works on it"),
    ],
)
def test_networks_without_a_method_raise(kind, options, message):
    with pytest.raises(InputError, match=message):
        effective_depth(random_network(layers=2, heads=1, dim=2, eta=0.1, **kind), tolerance=0.1, **options)


@pytest.mark.parametrize("eta", [1e150, 1e308])
def test_weights_that_overflow_keep_every_layer(eta):
    network = random_network(layers=2, heads=1, dim=2, eta=eta)
    assert effective_depth(network, radius=1.0, tolerance=0.1).layers == 2
    x = uniform_inputs(1, 3, 2)
    assert effective_depth(network, certified=False, x=x, tolerance=0.1).layers == 2
    certificate = certify(network, collapse(network, "identity"), radius=1.0, starts=1, steps=1)
    assert (certificate.upper is None) == (certificate.lost_at is not None) == (eta == 1e308)


@pytest.mark.parametrize(
    ("layers", "seed"),
    [(2, 0), (3, 1), pytest.param(5, 2, marks=pytest.mark.soak), pytest.param(6, 3, marks=pytest.mark.soak)],
)
def test_depth_is_the_least_over_all_foldings_and_closed_forms(layers, seed):
    network = random_network(layers=layers, heads=1, dim=3, eta=0.08, seed=seed)
    bounds = DepthBounds(network, BOX, attack=AttackOptions(starts=2, steps=2))
    for tolerance in (1e-2, 1e-3, 1e-4):
        within = [len(k) + len(runs_between(layers, k)) for k in subsets(layers) if bounds.error(k) <= tolerance]
        within += [1 for method in CLOSED_FORMS if bounds.error(method) <= tolerance]
        depth = certified_depth(bounds, tolerance)
        assert depth.layers == min(within)
        assert depth.status in (("proved",) if depth.layers < layers else ("refuted", "undecided"))


def test_a_sharper_method_is_used_and_named():
    """One layer by `corrected` is proved to 7.6e-5 here, where folding all layers is not within 1e-4."""
    network = random_network(layers=3, heads=2, dim=4, eta=0.05, seed=1)
    bounds = DepthBounds(network, BOX, attack=AttackOptions(starts=2, steps=4))
    depth = certified_depth(bounds, 1e-3)
    assert (depth.layers, depth.method, depth.status) == (1, "corrected", "proved")
    assert bounds.error(()) > 1e-3  # the folding alone would have kept layers
    assert depth.certificate.upper <= 1e-3
    assert depth.certificate.verify()
    assert len(depth.network) == 1


def test_large_weights_are_refuted_and_the_middle_is_undecided():
    base = random_network(layers=3, heads=1, dim=4, eta=0.8, seed=0)
    refuted = effective_depth(base, radius=1.0, tolerance=1e-3)
    assert (refuted.layers, refuted.status, refuted.method) == (3, "refuted", "none")
    assert refuted.tried > 5
    bounds = DepthBounds(base, BOX, attack=AttackOptions(starts=2, steps=2))
    assert "undecided" in {certified_depth(bounds, tolerance).status for tolerance in (0.5, 5.0, 50.0)}
    single = effective_depth(random_network(layers=1, heads=1, dim=2, eta=0.5), radius=1.0, tolerance=1e-6)
    assert (single.layers, single.status, single.tried) == (1, "proved", 0)


def test_a_depth_is_refuted_only_if_every_choice_is():
    bounds = DepthBounds(random_network(layers=2, heads=1, dim=2, eta=0.1), BOX)
    bounds.error = lambda choice: 0.6
    for exceeding, status in (({"identity", "parallel"}, "undecided"), (set(), "undecided"), (None, "refuted")):
        bounds.seen = lambda choice, exceeding=exceeding: float(exceeding is None or choice in exceeding)
        depth = proved_depth(bounds, 0.5)
        assert (depth.layers, depth.method, depth.status) == (2, "none", status)
    bounds.seen = lambda choice: 0.0
    assert proved_depth(bounds, 0.6).layers == 1


def test_one_layer_counts_as_soon_as_its_certificate_proves_it():
    network = random_network(layers=4, heads=1, dim=4, eta=0.05, seed=3)
    with torch.no_grad():
        network[2].query.mul_(3)
        network[2].value.mul_(3)
    proved = certify(network, closed_form(network, "corrected"), radius=1.0, starts=1, steps=0).upper
    depth = effective_depth(network, tolerance=proved, radius=1.0)
    assert (depth.layers, depth.method, depth.status) == (1, "corrected", "proved")
    assert depth.error <= proved


def test_an_evaluation_that_overflows_refutes_nothing():
    network = random_network(layers=3, heads=1, dim=2, eta=0.5)
    bounds = DepthBounds(network, BOX, attack=AttackOptions(starts=2, steps=2))
    bounds.seen = lambda choice: math.inf
    assert certified_depth(bounds, 1e-9).status == "undecided"
