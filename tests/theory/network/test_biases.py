"""Biases of the attention: of queries, outputs and positions."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from depthgauge import SelfAttentionNetwork, load_network, random_network, save_network
from depthgauge.base.errors import InputError
from depthgauge.theory.network.network import Layer


def test_biases_of_the_attention_are_added_where_they_belong() -> None:
    """Queries, scores and output, compared with the formula; the file keeps them, and the length has a limit."""
    torch.manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    layer = Layer(
        drawn(2, 4, 3), drawn(2, 4, 3), drawn(2, 4, 4), query_bias=drawn(2, 3), output_bias=drawn(4),
        position_bias=drawn(2, 6, 6),
    )  # fmt: skip
    network, x = SelfAttentionNetwork([layer], causal=True), drawn(5, 4)
    assert layer.query_bias is not None
    assert layer.position_bias is not None
    assert layer.output_bias is not None
    expected = x + layer.output_bias
    for h in range(2):
        scores = network.scale * (x @ layer.query[h] + layer.query_bias[h]) @ (x @ layer.key[h]).mT
        scores = (scores + layer.position_bias[h, :5, :5]).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        expected = expected + scores.softmax(-1) @ x @ layer.value[h]
    assert torch.allclose(network(x), expected)
    traced = next(network.trace(x))
    assert traced.query.shape == (2, 5, 8)
    with pytest.raises(InputError, match="up to 6 tokens, got 7"):
        network(drawn(7, 4))


def test_biases_of_the_attention_are_kept_and_change_the_version(tmp_path: Path) -> None:
    plain = random_network(layers=2, heads=2, dim=3, eta=0.5)
    layers = [Layer(*_weights(one), query_bias=torch.ones(2, one.key_dim).double()) for one in plain]
    network = SelfAttentionNetwork(layers, scale=plain.scale)
    for net, version in ((plain, "1"), (network, "2")):
        save_network(net, tmp_path / "net.safetensors")
        with safe_open(tmp_path / "net.safetensors", framework="pt") as handle:
            assert handle.metadata()["version"] == version
    x = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(load_network(tmp_path / "net.safetensors")(x), network(x))


def _weights(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return layer.query.detach(), layer.key.detach(), layer.value.detach()
