"""The probe of a `SelfAttentionNetwork` agrees with `dg.measure` and with plain computations."""

from pathlib import Path
from typing import Any

import pytest
import torch

import depthgauge as dg

DRAW = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "settings", [{}, {"causal": True}, {"skip": False}, {"mlp": 6, "mlp_skip": True}, {"norm": "pre", "mlp": 6}]
)
def test_measures_agree_with_the_profile(tmp_path: Path, settings: dict[str, Any]) -> None:
    network = dg.random_network(layers=3, heads=2, dim=4, eta=0.7, seed=1, **settings)
    x = torch.randn(2, 7, 4, dtype=torch.float64, generator=DRAW)
    probe = dg.Monitor(network, x, 1, tmp_path, action="log").step(0)
    assert probe is not None
    profile = dg.measure(network, x)
    ratios = profile.residual_ratio("frobenius", "mean").mean(dim=0)[1:].tolist()
    assert [layer.residual_ratio for layer in probe.layers] == pytest.approx(ratios)
    for layer, heads, weights, trace in zip(
        probe.layers, profile.heads, profile.weights, network.trace(x), strict=True
    ):
        assert layer.heads is not None
        assert layer.heads.score_range == pytest.approx(heads.score_range.amax(dim=0).tolist())
        assert layer.heads.entropy == pytest.approx(heads.entropy.mean(dim=0).tolist())
        assert layer.heads.tv_mean == pytest.approx(heads.tv_mean.mean(dim=0).tolist())
        assert layer.eta == pytest.approx(float(weights.eta.max()))
        own = network[layer.index]
        values = [torch.linalg.matrix_norm(v.detach(), 2) for v in own.value]
        circuits = [torch.linalg.matrix_norm((q @ k.mT).detach(), 2) for q, k in zip(own.query, own.key, strict=True)]
        assert layer.ov_norm == pytest.approx(float(max(values)), rel=2e-3)
        assert layer.qk_norm == pytest.approx(float(max(circuits)), rel=2e-3)
        change = (trace.after - trace.before).norm(dim=-1) / trace.before.norm(dim=-1)
        assert layer.update == pytest.approx(float(change.mean()))
        if network.skip and own.mlp is None:
            assert layer.attention_update == pytest.approx(layer.update)
        assert (layer.mlp_update is None) == (own.mlp is None)


def test_skipping_a_layer_changes_the_output_by_this_much(tmp_path: Path) -> None:
    network = dg.random_network(layers=3, heads=2, dim=4, eta=0.3, seed=2)
    x = torch.randn(2, 5, 4, dtype=torch.float64, generator=DRAW)
    options = dg.results.MonitorOptions(what_if_every=1, depth=0.05)
    probe = dg.Monitor(network, x, 1, tmp_path, action="log", options=options).step(0)
    assert probe is not None
    with torch.no_grad():
        intact = network(x)

        def change(kept: list[int]) -> float:
            made = dg.SelfAttentionNetwork([network[k] for k in kept], scale=network.scale)(x) if kept else x
            return float((made - intact).norm() / intact.norm())

        assert [layer.skip_loss for layer in probe.layers] == pytest.approx(
            [change([1, 2]), change([0, 2]), change([0, 1])]
        )
        kept = [0, 1, 2]
        while len(kept) > 1:
            best = min(([k for k in kept if k != gone] for gone in kept), key=change)
            if change(best) > 0.05:
                break
            kept = best
    assert probe.depth == len(kept)


def test_layers_with_different_numbers_of_heads(tmp_path: Path) -> None:
    parts = [dg.random_network(layers=1, heads=heads, dim=4, eta=0.5, seed=heads) for heads in (1, 3)]
    network = dg.SelfAttentionNetwork([part[0] for part in parts], scale=0.5)
    probe = dg.Monitor(network, torch.randn(2, 5, 4, dtype=torch.float64, generator=DRAW), 1, tmp_path).step(0)
    assert probe is not None
    assert [len(layer.heads.entropy) for layer in probe.layers if layer.heads is not None] == [1, 3]
    assert all(value is not None for layer in probe.layers if layer.heads is not None for value in layer.heads.entropy)


def test_training_a_network_is_not_affected(tmp_path: Path) -> None:
    def run(monitored: bool) -> list[float]:
        network = dg.random_network(layers=2, heads=2, dim=4, eta=0.3, seed=2)
        x = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        monitor = dg.Monitor(network, x, 1, tmp_path, action="log") if monitored else None
        optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.1), []
        for step in range(4):
            loss = network(x).square().mean()
            loss.backward()
            if monitor is not None:
                monitor.step(step, loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    assert run(True) == run(False)


def test_a_probe_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    network = dg.random_network(layers=1, heads=1, dim=4, eta=0.3)
    with pytest.raises(dg.InputError, match="probe must be a tensor of input states"):
        dg.Monitor(network, {"input_ids": torch.zeros(1, 2)}, 1, tmp_path)
    with pytest.raises(dg.InputError, match=r"must have shape \[..., tokens, 4\]"):
        dg.Monitor(network, torch.zeros(2, 3, dtype=torch.float64), 1, tmp_path)
    for shape, value in (((0, 3, 4), 0.0), ((2, 1, 4), 0.0), ((2, 3, 4), float("nan"))):
        with pytest.raises(dg.InputError, match="at least one sequence of at least 2 tokens with finite entries"):
            dg.Monitor(network, torch.full(shape, value, dtype=torch.float64), 1, tmp_path)
