"""The attack: its inputs are members of the set, it is deterministic, and its values are those of the networks."""

import pytest
import torch

from depthgauge.base.errors import InputError
from depthgauge.theory.certificates.attack import AttackOptions, attack, difference, prepare, search, sign_search
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.network.random_networks import random_network, uniform_inputs
from depthgauge.theory.suprema import network_on_shares
from depthgauge.theory.suprema.network_on_shares import difference_below, distinct_tokens
from depthgauge.theory.surrogates.closed_forms import closed_form

BOX = InputSet("box", 1.0)


@pytest.fixture(scope="module")
def pair():
    network = random_network(layers=3, heads=2, dim=4, eta=0.2, seed=5)
    return network, closed_form(network, "mean-field")


@pytest.mark.parametrize("inputs", [InputSet("box", 0.7), InputSet("ball", 1.3)])
def test_candidates_are_in_the_set_and_deterministic(pair, inputs):
    first, second = (attack(Comparison(*pair, inputs), AttackOptions(starts=6, steps=10, seed=3)) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert first.value == second.value
    x = first.expand()
    if inputs.kind == "box":
        assert float(x.abs().max()) <= 0.7
    else:
        assert float(x.square().sum(-1).max()) <= 1.3**2


def test_value_is_that_of_the_expanded_input(pair):
    found = attack(Comparison(*pair, BOX), AttackOptions(starts=6, steps=10))
    network, surrogate = pair
    x = found.expand()
    assert len(x) == int(found.counts.sum())
    with torch.no_grad():
        seen = float((network(x) - surrogate(x)).abs().max())
    assert seen == pytest.approx(found.value, rel=1e-9)
    proved = difference_below(network, surrogate, x)
    assert proved == pytest.approx(seen, rel=1e-9)


def test_number_of_tokens_can_be_fixed(pair):
    for tokens in (1, 2, 5, 40):
        found = attack(Comparison(*pair, BOX, tokens), AttackOptions(starts=4, steps=4))
        assert len(found.expand()) == tokens


def test_more_gradient_steps_find_a_larger_difference(pair):
    short, long = (attack(Comparison(*pair, BOX), AttackOptions(starts=4, steps=steps, seed=1)) for steps in (1, 40))
    assert long.value > short.value


def test_sign_search_reaches_the_enumerated_maximum():
    torch.manual_seed(0)
    T = torch.randn(2, 5, 5, 5, dtype=torch.float64)
    T = (T + T.mT) / 2
    every = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 5)
    truth = torch.einsum("abce,sc,se->asb", T, every, every).abs().sum(-1).amax(-1)
    found = sign_search(T, 16, torch.Generator().manual_seed(0))
    reached = torch.einsum("abce,asc,ase->asb", T, found, found).abs().sum(-1).amax(-1)
    torch.testing.assert_close(reached, truth)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"causal": True},
        {"skip": False},
        {"mlp": 5, "activation": "gelu"},
        {"mlp": 5, "activation": "relu", "mlp_skip": True},
        {"norm": "pre", "mlp": 3},
        {"norm": "post"},
        {"norm": "pre-rms", "mlp": 3, "mlp_skip": True},
        {"norm": "post-rms"},
    ],
)
def test_verified_evaluation_agrees_with_the_network(switches):
    network = random_network(layers=2, heads=2, dim=4, eta=0.4, key_dim=3, seed=2, **switches)
    other = random_network(layers=2, heads=1, dim=4, eta=0.4, key_dim=2, seed=7, **switches)
    x = uniform_inputs(1, 6, 4, seed=4)[0]
    x[3] = x[1]
    with torch.no_grad():
        seen = float((network(x) - other(x)).abs().max())
    proved = difference_below(network, other, x)
    assert proved <= seen * (1 + 1e-12)
    assert proved == pytest.approx(seen, rel=1e-10)


def test_precision_increases_until_large_weights_are_resolved(monkeypatch):
    network = random_network(layers=10, heads=2, dim=8, eta=1.0, distribution="sign", seed=0)
    surrogate = closed_form(network, "identity")
    x = uniform_inputs(1, 5, 8, seed=1)[0]
    with torch.no_grad():
        seen = float((network(x) - surrogate(x)).abs().max())
    monkeypatch.setattr(network_on_shares, "MOST_PRECISION", network_on_shares.PRECISION)
    assert difference_below(network, surrogate, x) == 0.0
    monkeypatch.undo()
    assert difference_below(network, surrogate, x) == pytest.approx(seen, rel=1e-6)


def test_multiplicities_add_up_to_the_number_of_tokens():
    x = torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    rows, counts = distinct_tokens(x, is_ordered=False)
    assert int(counts.sum()) == 3
    assert sorted(counts.tolist()) == [1, 2]
    assert len(rows) == 2
    assert distinct_tokens(x, is_ordered=True)[1].tolist() == [1, 1, 1]


def test_difference_on_a_multiset_equals_that_on_the_expanded_input(pair):
    tokens = uniform_inputs(1, 3, 4, seed=8)[0]
    counts = torch.tensor([1, 4, 2])
    expanded = tokens.repeat_interleave(counts, dim=0)
    network, surrogate = pair
    with torch.no_grad():
        plain = (network(expanded) - surrogate(expanded))[[0, 1, 5]]
        grouped = difference(network, surrogate, tokens, counts)
    torch.testing.assert_close(grouped, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"causal": True},
        {"skip": False},
        {"key_dim": 1},
        {"mlp": 5, "activation": "gelu", "mlp_skip": True},
        {"mlp": 5, "causal": True},
        {"norm": "pre", "mlp": 3},
    ],
)
def test_the_fast_network_equals_the_plain_one_on_expanded_inputs(switches):
    network = random_network(layers=3, heads=2, dim=4, eta=0.6, seed=3, **switches)
    x = uniform_inputs(3, 3, 4, seed=8)
    counts = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    if not network.causal:  # the order of equal tokens matters in causal networks
        counts = torch.tensor([[1, 4, 2], [1, 9, 0], [3, 0, 0]])
    found = prepare(network, torch.device("cpu"))(x, counts.double().log())
    for tokens, times, row in zip(x, counts, found, strict=True):
        with torch.no_grad():
            plain = network(tokens.repeat_interleave(times, dim=0))
        places = [int(times[:j].sum()) for j in range(3) if times[j]]
        torch.testing.assert_close(row[times > 0], plain[places], rtol=1e-11, atol=1e-13)


def climb_plainly(network, surrogate, inputs, x, counts, steps):
    """Projected gradient ascent of one path, all steps, by the definition."""
    best = -1.0
    for step in range(steps + 1):
        x = x.detach().requires_grad_(True)
        size = difference(network, surrogate, x, counts).abs().amax()
        best = max(best, float(size.detach()))
        (gradient,) = torch.autograd.grad(size, x)
        x = inputs.project(x.detach() + 0.8 * inputs.radius * (1 - step / steps) ** 2 * inputs.steepest(gradient))
    return best


@pytest.mark.parametrize("inputs", [BOX, InputSet("ball", 1.5)])
def test_batches_and_paths_that_end_early_reach_the_values_of_single_paths(inputs):
    network = random_network(layers=3, heads=2, dim=4, eta=0.05, seed=5)
    surrogate = closed_form(network, "identity")  # nearly linear: most paths in a box end after a few steps
    comparison = Comparison(network, surrogate, inputs)
    patterns = list(search(comparison, AttackOptions(starts=3, steps=12, seed=2)))
    begun = list(search(comparison, AttackOptions(starts=3, steps=0, seed=2)))  # the starting points
    assert {len(counts) for _, counts, _ in patterns} == {2, 3, 4, 5}
    for (_, counts, values), (x, _, _) in zip(patterns, begun, strict=True):
        alone = [climb_plainly(network, surrogate, inputs, one, counts, 12) for one in x]
        torch.testing.assert_close(values, torch.tensor(alone, dtype=torch.float64), rtol=1e-9, atol=0)


def test_widths_must_agree(pair):
    other = random_network(layers=1, heads=1, dim=5, eta=0.1)
    with pytest.raises(InputError, match="widths 4 and 5"):
        attack(Comparison(pair[0], other, BOX))
