"""No one-layer network is close to the deep one: the annihilators, checked by plain NumPy and by fractions."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from depthgauge.base.errors import InputError
from depthgauge.papers.ledger.arithmetic import precise
from depthgauge.papers.ledger.one_layer import DIMS, THREE, TWO, decide, deep_network
from depthgauge.papers.ledger.registry import registry
from depthgauge.papers.ledger.search import judge


def attend(X, W, V):
    scores = X @ W @ X.T
    P = np.exp(scores - scores.max(axis=1, keepdims=True))
    return P / P.sum(axis=1, keepdims=True) @ X @ V


def inputs(one, d):
    """The inputs as matrices, with as few tokens as the share allows."""
    n, many = one.share.denominator, one.share.numerator
    pairs = zip(one.x, one.y, strict=True)
    return [np.outer([float(x)] * (n - many) + [float(y)] * many, np.ones(d)) for x, y in pairs]


def combined(one, outputs):
    return abs(sum(float(m) * (out - float(x)) for m, out, x in zip(one.multipliers, outputs, one.x, strict=True)))


@pytest.mark.parametrize("one", [TWO, THREE])
def test_random_one_layer_networks_are_annihilated(one):
    random = np.random.default_rng(0)
    for heads, scale in ((1, 0.1), (3, 1.0), (40, 3.0)):
        weights = [(random.normal(size=(5, 5)) * scale, random.normal(size=(5, 5))) for _ in range(heads)]
        outputs = [X + sum(attend(X, W, V) for W, V in weights) for X in inputs(one, 5)]
        for c in range(5):
            assert combined(one, [out[0, c] for out in outputs]) < 1e-11 * sum(abs(V).sum() for _, V in weights)
        assert max(abs(out[0] - float(x)).max() for out, x in zip(outputs, one.x, strict=True)) > 0.01


def test_the_multipliers_of_three_inputs_by_hand():
    t = {x * (x - y) for x, y in zip(THREE.x, THREE.y, strict=True)}
    assert len(t) == 1
    for value in (THREE.y, [x - y for x, y in zip(THREE.x, THREE.y, strict=True)]):
        assert sum(m * v for m, v in zip(THREE.multipliers, value, strict=True)) == 0


@pytest.mark.parametrize("one", [TWO, THREE])
@pytest.mark.parametrize("d", DIMS)
def test_the_enclosure_is_the_value_of_the_network(one, d):
    """The network is built here again, and `deep_network` has weights of at most η = 1/d."""
    query = np.full((d, d), np.sqrt(16 / d**3))
    outputs = []
    for X in inputs(one, d):
        middle = X + X.mean(axis=0) / d @ np.ones((d, d))
        outputs.append((middle + attend(middle, query @ query.T, np.full((d, d), 1 / d)))[0, 0])
    here = combined(one, outputs) / float(sum(map(abs, one.multipliers)))
    with precise():
        enclosed = one.enclosed()
    assert enclosed.rad() < 1e-60
    assert float(enclosed.mid()) == pytest.approx(here, rel=1e-11)
    assert one.measured(d) == pytest.approx(here, rel=1e-11)
    assert max(float(weight.detach().abs().max()) for weight in deep_network(d).parameters()) <= 1 / d + 1e-15


def test_the_proved_distances():
    with precise():
        assert bool(THREE.enclosed() > 0.4155)
        assert bool(TWO.enclosed() > 0.558)
    found = decide()
    assert found.verdict == "fails"
    assert found.ratio == pytest.approx(0.558332 * 256, rel=1e-5)


def test_multipliers_that_do_not_annihilate_are_refused():
    planted = [
        (TWO, {"multipliers": (Fraction(1), Fraction(-3))}),
        (THREE, {"multipliers": THREE.multipliers[::-1]}),
        (THREE, {"x": (*THREE.x[:2], THREE.x[2] + Fraction(1, 1000))}),
        (THREE, {"multipliers": (Fraction(),) * 3}),
    ]
    for one, change in planted:
        with pytest.raises(InputError, match="must cancel V and every value of H"):
            replace(one, **change)
    with pytest.raises(InputError, match="at most 1"):
        replace(TWO, x=(Fraction(2), Fraction(0)), y=(Fraction(2), Fraction(2)))


@pytest.mark.parametrize("size", [4, 16, 64])
def test_the_statement_fails_for_one_coordinate_and_large_inputs(size):
    """d = 1, η = 1/L = 1/φ₀: the distance grows like φ₀, and Theorem D.1 claims O(1/L)."""
    X, one = np.array([[0.0], [size]]), np.array([[float(size)]])
    for _ in range(size):
        X, one = (state + attend(state, np.eye(1) / size**2, np.eye(1) / size) for state in (X, one))
    distance = abs(2 * X[0, 0] - (one[0, 0] - size)) / 3
    assert distance >= size * (1 - 1 / size) * np.tanh(0.25) / 6


@pytest.mark.parametrize("name", ["distance", "error"])
def test_both_bounds_hold(name):
    found = judge(registry()[f"ours.one-layer-{name}"], evaluations=300)
    assert found.verdict == "holds"
    assert 0 < found.ratio <= 1


def test_keeping_the_first_layer_is_within_its_bound():
    """3.14 (ii) with a = (1 + r)^L − 1 − r, attained by one token of ones."""
    d, L, eta = 3, 4, 0.05
    V, X = np.full((d, d), eta), np.ones((1, d))
    states = [X]
    for _ in range(L):
        states.append(states[-1] + states[-1] @ V)
    assert abs(states[-1] - states[1]).max() == pytest.approx((1 + d * eta) ** L - 1 - d * eta)
