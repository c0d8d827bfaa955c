"""Results keep copies: changing the arrays that they were made from changes no result."""

from typing import Any

import pytest
import torch
from gpt_networks import difference, drawn, gpt
from torch import Tensor, nn

import depthgauge as dg


def changed(*made_from: nn.Module | Tensor) -> None:
    """Multiply all arrays by 50, in place."""
    for one in made_from:
        with torch.no_grad():
            for array in one.parameters() if isinstance(one, nn.Module) else [one]:
                array.mul_(50)


NETWORKS: dict[str, tuple[dict[str, Any], str]] = {
    "box": ({}, "mean-field"),
    "ball": ({}, "corrected"),
    "tokens": ({}, "mean-field"),
    "causal": ({"causal": True}, "parallel"),
    "deletion": ({"mlp": 3}, "last-layer"),
    "wide block": ({"mlp": 3, "mlp_skip": True, "norm": "pre"}, "parallel"),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_a_certificate_keeps_its_networks_and_its_tokens(case: str) -> None:
    kind, method = NETWORKS[case]
    net = dg.random_network(layers=2, heads=2, dim=4, eta=0.02, **kind)
    small, embeddings, positions = dg.collapse(net, method=method), drawn(3, 4), drawn(2, 4, seed=1)
    over: dict[str, Any] = {"ball": {"ball": 1.0}, "tokens": {"inputs": dg.Tokens(embeddings, positions)}}
    over["wide block"] = over["tokens"]
    certificate = dg.certify(net, small, **over.get(case, {"radius": 1.0}), starts=2, steps=2)
    assert certificate.upper is not None
    changed(net, small, embeddings, positions)
    attained = difference(certificate.network, certificate.surrogate, certificate.witness)
    assert certificate.lower * (1 - 1e-9) <= attained <= certificate.upper
    assert certificate.verify()


@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"certified": False}, {"inputs": "tokens"}], ids=str)
def test_an_effective_depth_that_keeps_every_layer_keeps_its_network(request_: dict[str, Any]) -> None:
    net, x = dg.random_network(layers=2, heads=1, dim=3, eta=1.0), drawn(5, 3)
    chosen = {"certified": {"x": x, "certified": False}, "inputs": {"inputs": dg.Tokens(x)}}
    depth = dg.effective_depth(net, tolerance=1e-6, **chosen.get(next(iter(request_)), request_))
    assert depth.method == "none"
    with torch.no_grad():
        before = net(x)
        changed(net)
        assert torch.equal(depth.network(x), before)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("method", ["identity", "last-layer", "parallel", "mean-field", "corrected"])
def test_a_surrogate_shares_no_array_with_its_network(method: str, layers: int) -> None:
    nets = [dg.random_network(layers, 1, 3, 0.1, causal=causal) for causal in (False, True)]
    nets += [gpt(layers=layers, heads=1)] if method == "parallel" else []
    for net in nets:
        small = dg.collapse(net, method=method, length=4 if net.causal and method != "parallel" else None)
        assert not {w.data_ptr() for w in net.parameters()} & {w.data_ptr() for w in small.parameters()}
