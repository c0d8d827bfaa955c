"""One-layer surrogates: what they compute, the order of their error in η, and the networks they do not cover."""

import math

import pytest
import torch
from gpt_networks import attention_of, drawn, gpt, mlp_of

from depthgauge.base.errors import InputError
from depthgauge.theory.certificates.attack import AttackOptions, attack
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.depth import methods as fitted_module
from depthgauge.theory.depth.methods import collapse
from depthgauge.theory.network.files import load_network, save_network
from depthgauge.theory.network.random_networks import random_network, uniform_inputs
from depthgauge.theory.surrogates.closed_forms import CLOSED_FORMS, METHODS, closed_form, fold, refusal

ORDERS = {"identity": 1, "last-layer": 1, "parallel": 2, "mean-field": 3, "corrected": 4}


def error_on_inputs(network, surrogate, x):
    with torch.no_grad():
        return float((network(x) - surrogate(x)).abs().max())


def test_the_wide_block_adds_all_sublayers_to_what_it_reads():
    """With norms and biases, whose sublayers are written out in tests/support/gpt_networks.py."""
    network, x = gpt(layers=3), drawn(5, 4, seed=3)
    y = x + sum(attention_of(network, k, x) for k in range(3))
    expected = y + sum(mlp_of(network, k, y) for k in range(3))
    assert torch.allclose(closed_form(network, "parallel")(x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ORDERS)
def test_error_has_the_documented_order_in_eta(method):
    x = uniform_inputs(4, 32, 6, seed=3)
    base = random_network(layers=5, heads=2, dim=6, eta=0.1, seed=1)
    etas = [0.008, 0.004, 0.002]
    errors = [error_on_inputs(base.rescale(eta), closed_form(base.rescale(eta), method), x) for eta in etas]
    slopes = [math.log(errors[i] / errors[i + 1]) / math.log(2) for i in range(2)]
    for slope in slopes:
        assert abs(slope - ORDERS[method]) < 0.15, (slopes, errors)


def test_surrogates_compute_their_formulas():
    network = random_network(layers=3, heads=2, dim=4, eta=0.3, key_dim=3, seed=2)
    x = uniform_inputs(2, 7, 4, seed=1)
    values = [layer.value.sum(0) for layer in network]
    product = torch.eye(4, dtype=torch.float64)
    for V in values:
        product = product @ (torch.eye(4, dtype=torch.float64) + V)
    mean = x.mean(dim=-2, keepdim=True)
    attentions = sum(network.step(0, x) * 0 + _attention(network, k, x) for k in range(3))
    drift = product - torch.eye(4, dtype=torch.float64)
    expected = {
        "identity": x,
        "last-layer": x + _attention(network, 2, x),
        "parallel": x + attentions,
        "mean-field": x + mean @ drift,
        "corrected": x + attentions + mean @ (drift - sum(values)),
    }
    for method, answer in expected.items():
        surrogate = closed_form(network, method)
        assert len(surrogate) == 1
        torch.testing.assert_close(surrogate(x), answer, rtol=1e-12, atol=1e-12)


def _attention(network, k, x):
    layer = network[k]
    total = torch.zeros_like(x)
    for h in range(layer.heads):
        scores = network.scale * (x @ layer.query[h]) @ (x @ layer.key[h]).mT
        total = total + torch.softmax(scores, -1) @ x @ layer.value[h]
    return total


def test_mean_field_is_exact_for_zero_scores():
    network = random_network(layers=4, heads=2, dim=5, eta=0.8, seed=0)
    with torch.no_grad():
        for layer in network:
            layer.query.zero_()
    x = uniform_inputs(3, 9, 5)
    torch.testing.assert_close(closed_form(network, "mean-field")(x), network(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kept", [(), (0,), (2,), (1, 3), (0, 1, 2, 3)])
def test_folding_equals_replacing_layers_by_averages(kept):
    network = random_network(layers=4, heads=2, dim=5, eta=0.2, seed=4)
    x = uniform_inputs(2, 6, 5)
    y = x
    for k in range(4):
        y = network.step(k, y) if k in kept else y + y.mean(-2, keepdim=True) @ network[k].value.sum(0)
    folded = fold(network, kept)
    torch.testing.assert_close(folded(x), y, rtol=1e-12, atol=1e-12)
    runs = sum(1 for k in range(4) if k not in kept and (k == 0 or k - 1 in kept))
    assert len(folded) == len(kept) + runs


def test_mean_field_without_skips_is_the_product_of_the_values():
    network = random_network(layers=3, heads=2, dim=4, eta=0.5, skip=False)
    x = uniform_inputs(1, 5, 4)[0]
    product = network[0].value.sum(0) @ network[1].value.sum(0) @ network[2].value.sum(0)
    expected = (x.mean(0, keepdim=True) @ product).expand(5, 4)
    torch.testing.assert_close(closed_form(network, "mean-field")(x), expected)


@pytest.mark.parametrize(
    ("switches", "refused"),
    [
        ({"causal": True}, {"mean-field", "corrected", "fitted"}),
        ({"skip": False}, {"identity", "parallel", "corrected"}),
        ({"mlp": 6}, {"parallel", "mean-field", "corrected", "fitted"}),
        ({"mlp": 6, "mlp_skip": True}, {"mean-field", "corrected", "fitted"}),
        ({"norm": "pre"}, set(METHODS) - {"parallel"}),
        ({"norm": "post"}, set(METHODS)),
        ({}, set()),
    ],
)
def test_methods_that_do_not_apply_raise_and_name_those_that_do(switches, refused):
    network = random_network(layers=2, heads=1, dim=4, eta=0.1, **switches)
    assert {method for method in METHODS if refusal(network, method) is not None} == refused
    for method in refused:
        with pytest.raises(InputError, match=method):
            collapse(network, method)
        works = set(METHODS) - refused
        assert all(name in refusal(network, method) for name in works)


def test_collapsing_a_network_with_mlps_deletes_attention_only():
    network = random_network(layers=3, heads=2, dim=4, eta=0.4, mlp=5)
    x = uniform_inputs(1, 4, 4)[0]
    y = x
    for layer in network:
        y = layer.mlp(y, "relu")
    torch.testing.assert_close(collapse(network, "identity")(x), y)
    assert len(collapse(network, "last-layer")) == 3


def test_surrogates_survive_saving_and_loading(tmp_path):
    network = random_network(layers=3, heads=2, dim=4, eta=0.1, seed=9)
    for method in CLOSED_FORMS:
        surrogate = collapse(network, method)
        save_network(surrogate, tmp_path / "s.safetensors")
        again = load_network(tmp_path / "s.safetensors")
        x = uniform_inputs(1, 4, 4)
        assert torch.equal(again(x), surrogate(x))
        assert again.provenance["method"] == method
        assert again.provenance["of"]["layers"] == 3


def test_unknown_method_and_invalid_radius_raise():
    network = random_network(layers=1, heads=1, dim=2, eta=0.1)
    with pytest.raises(InputError, match="did you mean 'mean-field'"):
        collapse(network, "mean-feild")
    with pytest.raises(InputError, match="radius must be a positive number"):
        collapse(network, "fitted", radius=float("nan"))


def test_fitted_is_not_worse_than_its_start(monkeypatch):
    for name, less in {"ROUNDS": 2, "STEPS": 20, "STARTS": 4, "CLIMB": 8}.items():
        monkeypatch.setattr(fitted_module, name, less)
    network = random_network(layers=3, heads=1, dim=3, eta=0.4, seed=1)
    fitted = collapse(network, "fitted", seed=0)
    assert len(fitted) == 1
    assert fitted.provenance["error"] <= fitted.provenance["error_of_start"]
    start = collapse(network, fitted.provenance["from"])
    box = InputSet("box", 1.0)
    # A new attack, with a seed not used in training, agrees up to the variation between attacks.
    options = AttackOptions(starts=8, steps=20, seed=77)
    fresh = attack(Comparison(network, fitted, box), options).value
    known = max(attack(Comparison(network, start, box), options).value, fitted.provenance["error_of_start"])
    assert fresh <= 1.1 * known
