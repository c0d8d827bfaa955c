"""Wrong arguments of the Python interface get a sentence, without runtime type checks."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import depthgauge as dg

pytestmark = pytest.mark.wrong_types


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("dg.collapse('n.safetensors')", "network must be a SelfAttentionNetwork, got str; load it with load_network("),
        ("dg.certify(net, 'n.safetensors', radius=1.0)", "surrogate must be a SelfAttentionNetwork, got str"),
        ("dg.effective_depth(7, tolerance=1.0, radius=1.0)", "network must be a SelfAttentionNetwork, got int"),
        ("dg.measure(net, np.zeros((3, 2)))", "the input must be a torch tensor, got numpy.ndarray; convert it"),
        ("net(np.zeros((3, 2)))", "the input must be a torch tensor, got numpy.ndarray"),
        ("dg.certify(net, net, radius=1e308)", "radius must be at most 1e+100, got 1e+308"),
        ("dg.certify(net, net, ball=1e200)", "ball must be at most 1e+100, got 1e+200"),
        ("dg.certify(net, net, radius=1.0, seed=-1)", "seed must be a whole number from 0 to 2^63 - 1, got -1"),
        ("dg.collapse(net, seed=2**63)", "seed must be a whole number from 0 to 2^63 - 1"),
        ("dg.gauge(net, tokens=99999999999)", "tokens must be at most"),
        ("dg.gauge(net, radius=1e308)", "radius must be at most 1e+100"),
        ("dg.gauge(net, token=3)", "option of gauge must be one of"),
        ("dg.papers.separate('self', seed=-1)", "seed must be a whole number from 0 to 2^63 - 1, got -1"),
    ],
)
def test_the_error_says_what_was_given_and_what_to_do(call: str, sentence: str) -> None:
    net = dg.random_network(layers=2, heads=1, dim=2, eta=0.1)
    with pytest.raises(dg.InputError) as raised:
        eval(call, {"np": np, "dg": dg, "net": net})
    assert str(raised.value).startswith(sentence)


def test_numbers_of_other_types_are_converted_in_every_call() -> None:
    """The first calls of a kind are validated in full, and later ones are not."""
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    wanted = dg.attention(q, k, v, scale=0.5, force="exact")
    for _ in range(4):
        assert torch.equal(dg.attention(q, k, v, scale=Fraction(1, 2)), wanted)  # type: ignore[arg-type]
        assert torch.equal(dg.attention(q, k, v, scale=0.5, is_causal=0, enable_gqa=0), wanted)  # type: ignore[arg-type]
    with pytest.raises(dg.InputError, match=r"tolerance must be a positive number, got \[0.001\]"):
        dg.attention(q, k, v, tolerance=[1e-3])  # type: ignore[arg-type]
