"""Certificates of causal networks: they hold on attacked inputs, and each inequality behind them holds."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from example_counts import few
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import InputError, VerificationError
from depthgauge.theory.certificates.causal_proof import CausalLayers, CausalProof, pattern_powers
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.certificates.regions import BallRegion, BoxRegion, ConvexRegion, PointRegion, Region
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.norms import softm
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import closed_form, drift_orders, pattern_layer, prefix_average
from depthgauge.theory.surrogates.expansion import CausalExpansion

METHODS = ("identity", "last-layer", "parallel", "mean-field", "corrected")
SLACK = 1 + 1e-9
LENGTH = 6


def drawn(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    unit = 2 * torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 1
    return size * unit


def network(eta: float = 0.05, seed: int = 0, **sizes: int) -> SelfAttentionNetwork:
    return dg.random_network(**{"layers": 3, "heads": 2, "dim": 4} | sizes, eta=eta, seed=seed, causal=True)


def largest_difference(one: SelfAttentionNetwork, other: SelfAttentionNetwork, x: Tensor) -> float:
    with torch.no_grad():
        return float((one(x) - other(x)).abs().max())


def sets(d: int, seed: int = 0) -> list[dict[str, Any]]:
    tokens = Tokens(drawn(4, d, seed=seed), length=LENGTH)
    placed = Tokens(drawn(2, d, seed=seed), drawn(LENGTH, d, seed=seed + 1, size=0.5))
    return [{"radius": 1.0, "tokens": LENGTH}, {"ball": 1.0, "tokens": LENGTH}, {"inputs": tokens}, {"inputs": placed}]


# --- the one causal layer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "order"), [("identity", 1), ("parallel", 2), ("mean-field", 3), ("corrected", 4)])
def test_the_error_has_the_order_that_is_claimed(method: str, order: int) -> None:
    unit, x = network(1.0, layers=4), drawn(200, LENGTH, 4)
    errors = []
    for eta in (0.01, 0.005, 0.0025):
        net = unit.rescale(eta)
        errors.append(largest_difference(net, dg.collapse(net, method, length=LENGTH), x))
    slopes = [float(torch.log2(torch.tensor(a / b))) for a, b in pairwise(errors)]
    assert all(abs(slope - order) < 0.25 for slope in slopes)


def test_mean_field_is_exact_where_attention_averages() -> None:
    """With zero scores every head is C, and X_L = Σ_m C^m X e_m exactly."""
    net = network(0.5, layers=4)
    with torch.no_grad():
        for layer in net:
            layer.query.zero_()
    small, x = dg.collapse(net, "mean-field", length=LENGTH), drawn(20, LENGTH, 4)
    assert torch.allclose(net(x), small(x), rtol=1e-12, atol=1e-12)
    C, orders = prefix_average(LENGTH), drift_orders(net)
    expected = x + sum(torch.linalg.matrix_power(C, m) @ x @ e for m, e in enumerate(orders, start=1))
    assert torch.allclose(net(x), expected, rtol=1e-12, atol=1e-12)


def test_a_file_keeps_the_layer(tmp_path: Any) -> None:
    small = dg.collapse(network(), "corrected", length=LENGTH)
    dg.save_network(small, tmp_path / "one.safetensors")
    again, x = dg.load_network(tmp_path / "one.safetensors"), drawn(3, 4, 4)
    assert torch.equal(again(x), small(x))
    assert again.length == LENGTH


# --- soundness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("eta", [0.02, 0.3])
def test_the_attack_does_not_exceed_the_bound_and_arb_confirms_it(method: str, eta: float) -> None:
    net = network(eta)
    small = dg.collapse(net, method, length=LENGTH)
    for given_set in sets(4):
        certificate = dg.certify(net, small, **given_set, starts=4, steps=10)
        assert certificate.upper is not None
        assert certificate.lower <= certificate.upper
        assert certificate.verify()
        if method in ("mean-field", "corrected") and eta == 0.02:
            with pytest.raises(VerificationError):
                replace(certificate, upper=certificate.upper * 0.95).verify()


@few(30)
@given(
    seed=st.integers(0, 10**6),
    method=st.sampled_from(METHODS),
    eta=st.sampled_from([0.001, 0.01, 0.1, 0.5, 2.0]),
    kind=st.sampled_from(["box", "ball", "tokens"]),
)
def test_no_random_input_exceeds_the_bound_in_a_campaign(seed: int, method: str, eta: float, kind: str) -> None:
    _attacked(seed, method, eta, kind)


def _attacked(seed: int, method: str, eta: float, kind: str) -> None:
    net = network(eta, seed % 1000, layers=1 + seed % 4, heads=1 + seed % 3, dim=2 + seed % 3)
    n = 1 + seed % 7
    small = dg.collapse(net, method, length=n)
    tokens = Tokens(drawn(2 + seed % 4, net.dim, seed=seed), length=n)
    inputs = tokens if kind == "tokens" else InputSet(kind, 1.0)
    upper = float(CausalProof(Comparison(net, small, inputs, None if kind == "tokens" else n)).value.max())
    generator = torch.Generator().manual_seed(seed)
    if isinstance(inputs, Tokens):
        x = tokens.embeddings[torch.randint(0, len(tokens.embeddings), (60, n), generator=generator)]
    else:
        x = inputs.extreme(torch.randn(60, n, net.dim, generator=generator, dtype=torch.float64))
    rounding = 256 * torch.finfo(torch.float64).eps * (1 + eta) ** (2 * len(net))
    assert largest_difference(net, small, x) <= upper * SLACK + rounding


def test_drawn_networks_are_bounded_sharply() -> None:
    ratios = []
    for seed, eta in enumerate((0.001, 0.003, 0.01, 0.02)):
        net = network(eta, seed, layers=4, dim=12)
        tokens = Tokens(drawn(12, 12, seed=seed), length=8)
        ratio = dg.certify(net, dg.collapse(net, length=8), inputs=tokens).ratio
        assert ratio is not None
        ratios.append(ratio)
    assert sorted(ratios)[2] < 2.5
    assert max(ratios) < 6


# --- each inequality --------------------------------------------------------------------------------------------------


A = Outward()
REGIONS = [PointRegion(A, Tokens(drawn(5, 3, seed=4))), BoxRegion(A, 3, 0.8), BallRegion(A, 3, 0.8)]


def members(region: Region, *shape: int) -> Tensor:
    """Draw extreme points of a region of width 3."""
    if isinstance(region, PointRegion):
        return region.floats[torch.randint(0, len(region.floats), shape, generator=torch.Generator().manual_seed(1))]
    assert isinstance(region, ConvexRegion)
    return InputSet(region.kind, region.radius).extreme(drawn(*shape, 3, seed=3))


@pytest.mark.parametrize("region", REGIONS, ids=["points", "box", "ball"])
def test_ranges_and_rows_hold_on_extreme_points_and_are_attained(region: Region) -> None:
    M = drawn(2, 3, 3, seed=7)
    x, y = members(region, 4000), members(region, 3999)
    made = x @ M
    ranges = made.amax(1) - made.amin(1)
    rows = (members(region, 300) @ M @ y.mT).amax(-1) - (members(region, 300) @ M @ y.mT).amin(-1)
    for bound, found in (
        (region.largest(Enclosure.exact(M)).floats(), made.abs().amax(1)),
        (region.ranges(Enclosure.exact(M)).floats(), ranges),
        (region.widest_row(Enclosure.exact(M)).floats(), rows.amax(-1)),
    ):
        assert bool((found <= bound * SLACK).all())
        assert bool((found >= 0.9 * bound).all())


@pytest.mark.parametrize("region", REGIONS, ids=["points", "box", "ball"])
def test_states_and_heads_stay_within_the_bounds_of_their_layer(region: Region) -> None:
    """x_j^k − x_j − u_j D is at most err, scores have at most the range θ, and heads are within `gap` and `rest`."""
    net = network(0.3, layers=3, dim=3)
    expansion = CausalExpansion(net, A)
    bounds, C = CausalLayers(expansion, region), prefix_average(LENGTH)
    for x in members(region, 60, LENGTH):
        state = x
        for k, layer in enumerate(bounds.layers):
            D, W, V = layer.drift.floats()[0], expansion.W[k].floats(), expansion.V[k].floats()
            assert bool(((state - x - C @ x @ D).abs() <= layer.err.floats() * SLACK + 1e-14).all())
            scores = (state @ W @ state.mT).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
            low = scores.masked_fill(scores == -torch.inf, torch.inf).amin(-1)
            assert bool((scores.amax(-1) - low <= layer.theta.floats()[:, None] * SLACK).all())
            weights = softm(scores) - C
            exact = weights @ state @ V
            assert bool((exact.abs().amax(1) <= bounds.gap(k, expansion.V[k]).floats() * SLACK).all())
            for with_drift in (True, False):
                query = x + C @ x @ D if with_drift else x
                lead = _covariance(query @ W @ x.mT, x @ V, C)
                rest = bounds.rest(k, expansion.V[k], with_drift=with_drift).floats()
                assert bool(((exact - lead).abs().amax(1) <= rest * SLACK).all())
            with torch.no_grad():
                state = net.step(k, state)


def _covariance(scores: Tensor, z: Tensor, C: Tensor) -> Tensor:
    """Return Cov_j(s_ij, z_j) over the visible tokens j of every row i."""
    mean = (scores * C).sum(-1, keepdim=True)
    return ((scores - mean) * C) @ z


def test_the_expansion_is_exact() -> None:
    net = network(0.4, layers=4)
    X, C, x = CausalExpansion(net, A), prefix_average(LENGTH), drawn(LENGTH, 4)
    states, errors = [x], []
    for k in range(4):
        scores = (states[-1] @ X.W[k].floats() @ states[-1].mT).masked_fill(
            torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf
        )
        errors.append(((softm(scores) - C) @ states[-1] @ X.V[k].floats()).sum(0))
        with torch.no_grad():
            states.append(net.step(k, states[-1]))
    powers = [torch.linalg.matrix_power(C, m) for m in range(5)]
    eye = torch.eye(4, dtype=torch.float64)

    def carried(start: Tensor, k: int) -> Tensor:
        orders = [eye, *(order.floats() for order in X.orders(k, 4))]
        return sum((powers[m] @ start @ e for m, e in enumerate(orders)), torch.zeros_like(start))

    whole = carried(x, 0) + sum((carried(error, k + 1) for k, error in enumerate(errors)), torch.zeros_like(x))
    assert torch.allclose(states[-1], whole, rtol=1e-12, atol=1e-12)


def test_patterns_are_recognised_by_their_bias() -> None:
    layer = pattern_layer({m: drawn(2, 2, seed=m) for m in (1, 2, 4)}, LENGTH)
    powers = pattern_powers(layer, A)
    assert [m for m, _ in powers] == [1, 2, 4]
    assert all(float(slip.floats()) < 1e-11 for _, slip in powers)
    C = prefix_average(LENGTH)[torch.ones(LENGTH, LENGTH).tril().bool()]
    for apart in (0.0, 1e-5, 1.0):
        slip = float(A.log_distance(C.log() + apart, Enclosure.exact(C)).floats())
        assert apart <= slip < apart * 1.1 + 1e-11


# --- bad input --------------------------------------------------------------------------------------------------------


def test_what_is_not_covered_is_refused() -> None:
    net = network()
    with pytest.raises(InputError, match="needs the largest number of tokens, the length of collapse"):
        dg.collapse(net, "mean-field")
    small = dg.collapse(net, "mean-field", length=4)
    for wrong in ({"radius": 1.0}, {"radius": 1.0, "tokens": 5}, {"inputs": Tokens(drawn(3, 4))}):
        with pytest.raises(InputError, match="position biases are for up to 4 tokens"):
            dg.certify(net, small, **wrong)
    for other in (net, dg.collapse(net, "identity")):
        with pytest.raises(InputError, match="position biases in the surrogate alone"):
            dg.certify(small, other, radius=1.0, tokens=4)
    certificate = dg.certify(net, small, radius=1.0, tokens=4)
    swapped = replace(certificate.comparison, network=small, surrogate=net)
    with pytest.raises(VerificationError, match="position biases in the surrogate alone"):
        replace(certificate, comparison=swapped).verify()
    with pytest.raises(InputError, match="causal and has no skip"):
        closed_form(dg.random_network(layers=2, heads=1, dim=3, eta=0.1, causal=True, skip=False), "mean-field", 4)
    odd = SelfAttentionNetwork(
        [Layer(drawn(1, 4, 2) * 0, drawn(1, 4, 2), drawn(1, 4, 4), position_bias=drawn(1, 4, 4))], causal=True
    )
    with pytest.raises(InputError, match="not that of repeated averages"):
        dg.certify(net, odd, radius=1.0, tokens=4)
    both = SelfAttentionNetwork(
        [Layer(drawn(1, 4, 2), drawn(1, 4, 2), drawn(1, 4, 4), position_bias=drawn(1, 4, 4))], causal=True
    )
    with pytest.raises(InputError, match="has scores and a position bias"):
        dg.certify(net, both, radius=1.0, tokens=4)
