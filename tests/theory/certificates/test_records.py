"""Certificates and depths as records: comparison, pickling, and their representations."""

import math
import pickle
from dataclasses import replace

import pytest
import torch

from depthgauge.theory.depth.certificate import Certificate, certify
from depthgauge.theory.depth.effective import Depth, effective_depth
from depthgauge.theory.network.random_networks import random_network
from depthgauge.theory.surrogates.closed_forms import closed_form

KEYS = [
    "set",
    "radius",
    "tokens",
    "effort",
    "upper",
    "lower",
    "ratio",
    "methods",
    "notes",
    "share",
    "lost_at",
    "seconds",
    "attack_seconds",
]


def certificate(**request) -> Certificate:
    network = random_network(layers=2, heads=2, dim=3, eta=0.05, causal=request.pop("causal", False))
    request = request or {"radius": 1.0}
    return certify(network, closed_form(network, "last-layer"), starts=1, steps=1, **request)


@pytest.fixture(scope="module")
def depth() -> Depth:
    return effective_depth(random_network(layers=2, heads=1, dim=2, eta=0.02), radius=1.0, tolerance=0.1)


@pytest.mark.parametrize("request_", [{}, {"ball": 1.0}, {"causal": True}, {"radius": 1.0, "tokens": 1}], ids=str)
def test_certificates_compare_and_survive_pickling(request_):
    c = certificate(**request_)
    again = pickle.loads(pickle.dumps(c))
    assert c == c
    assert c != again
    assert c in [again, c]
    assert len({c, again}) == 2
    assert torch.equal(again.witness, c.witness)
    assert again.to_json() == c.to_json()
    assert again.verify()


def test_the_proof_of_a_certificate_is_the_same_each_time():
    one, two = (certificate() for _ in range(2))
    assert one != two
    assert torch.equal(one.method.value, two.method.value)
    assert len(repr(one.comparison)) < 300


def test_json_has_the_documented_keys_in_order():
    assert list(certificate().to_json()) == KEYS


def test_representation_is_one_short_line():
    c = certificate()
    text = repr(c)
    assert text.startswith("Certificate(")
    assert "≤ sup|S−S'| ≤" in text
    assert "box of radius 1, joint" in text
    assert len(text) < 100
    assert "ball of radius 2.5" in repr(certificate(ball=2.5))
    assert "1 tokens" not in repr(c)
    assert "5 tokens" in repr(certificate(radius=1.0, tokens=5))


def test_a_missing_upper_bound_is_represented():
    c = certificate()
    lost = replace(c, upper=None, coordinate=None, lost_at=1)
    assert "no finite upper bound (lost at layer 1)" in repr(lost)
    assert lost.upper is lost.ratio is None
    assert "<td>–</td>" in lost._repr_html_()


def test_html_is_a_small_table():
    html = certificate()._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<tr>") == 7
    assert "box of radius 1" in html
    assert "S&#x27;" in html


def test_depths_compare_pickle_and_have_short_representations(depth):
    again = pickle.loads(pickle.dumps(depth))
    assert depth == depth
    assert depth != again
    assert again.to_json() == depth.to_json()
    assert repr(depth) == f"Depth(1 of 2 layers within 0.1, proved error {repr(depth).split('error ')[1]}"
    assert len(repr(depth)) < 100
    assert depth._repr_html_().count("<tr>") == 6
    assert "1 of 2" in depth._repr_html_()


def test_bounds_are_kept_apart_from_each_other():
    c = certificate()
    assert c.ratio == c.upper / c.lower
    assert c.seconds > 0
    assert c.attack_seconds > 0
    assert math.isclose(sum(map(sum, c.share)), 1.0)
