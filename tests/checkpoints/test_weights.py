"""Circuits of heads against the model's own computation, and the distance from the small-weight regime."""

import pytest
import torch
from tiny_models import MODELS, tiny_model, tokens

import depthgauge as dg
from depthgauge.checkpoints.blocks.attention_calls import AttentionCall, attending
from depthgauge.checkpoints.blocks.block_runner import Stack
from depthgauge.checkpoints.blocks.circuits import (
    TOLERANCE,
    CircuitSizes,
    HeadWeights,
    circuit_sizes,
    corrected_bound,
    head_weights,
    regime,
)
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.theory.linalg.norms import column_norm, composite_norm
from depthgauge.theory.measures.printed import printed_bound
from depthgauge.theory.network.random_networks import uniform_inputs


def silence_biases(model: torch.nn.Module) -> None:
    """Set all biases to zero, because the circuits leave them out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()


# Qwen 3 and Gemma 3 normalize queries and keys inside the heads, which the circuits leave out.
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("qwen3", "gemma3")])
def test_circuits_reproduce_scores_and_values(name: str) -> None:
    """On a single token all rotary angles are 0, so the observed scores and values must equal those of the circuits."""
    model, ids = tiny_model(name), tokens(1, batch=1)
    silence_biases(model)
    checkpoint, seen = wrap(model), []

    def watch(call: AttentionCall) -> torch.Tensor:
        seen.append(call)
        return call.output()

    with attending(model) as session:
        stack = Stack(checkpoint, session)
        base = stack.full(ids)
        stack.run(ids, watch=watch)
    family = checkpoint.family
    assert family is not None
    for layer, block in enumerate(find_blocks(model, 3)):
        x = base.states[layer][0]
        if family.gain is not None:
            norm = block.get_submodule(family.gain)
            gain = norm.weight + family.gain_offset
            with torch.no_grad():
                x = norm(x) / gain  # the gain is part of the circuits
        call = seen[layer]
        for h, head in enumerate(head_weights(checkpoint, block)):
            score = head.scale * (x @ head.query) @ (x @ head.key).mT
            assert torch.allclose(call.scale * call.query[0, h] @ call.key[0, h].mT, score, atol=1e-4, rtol=1e-4)
            assert torch.allclose(call.value[0, h], x @ head.value, atol=1e-5, rtol=1e-4)
        outputs = [(call.value[0, h]) @ head.output for h, head in enumerate(head_weights(checkpoint, block))]
        assert len(outputs) == 4
        expected = attention_output(model, block, name, call)
        assert torch.allclose(sum(outputs), expected, atol=1e-4, rtol=1e-3)  # type: ignore[arg-type]


def attention_output(model: torch.nn.Module, block: torch.nn.Module, name: str, call: AttentionCall) -> torch.Tensor:
    """Apply the model's own output projection to the values of one token."""
    paths = ("self_attn.o_proj", "attn.c_proj", "attention.dense", "attention.output.dense", "attention.out_lin")
    (projection,) = [module for path, module in block.named_modules() if path in paths]
    with torch.no_grad():
        return projection(call.value[0].transpose(0, 1).reshape(1, -1))


def test_sizes_of_a_head() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    o = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    sizes = circuit_sizes(HeadWeights(q, k, v, o, 0.25))
    W, V = q @ k.mT, v @ o
    assert sizes.eta == max(float(m.abs().max()) for m in (q, k, V))
    assert sizes.value_col == pytest.approx(float(column_norm(V)))
    assert sizes.dong_beta == pytest.approx(float(column_norm(W) * composite_norm(V)))
    assert sizes.qk_norm == pytest.approx(float(torch.linalg.matrix_norm(W, 2)))
    assert sizes.ov_norm == pytest.approx(float(torch.linalg.matrix_norm(V, 2)))
    assert sizes.qk_stable_rank == pytest.approx(float((W.norm() / torch.linalg.matrix_norm(W, 2)) ** 2))
    assert sizes.ov_stable_rank == pytest.approx(float((V.norm() / torch.linalg.matrix_norm(V, 2)) ** 2))
    signs = torch.tensor([[1.0 if (i >> b) & 1 else -1.0 for b in range(7)] for i in range(128)], dtype=torch.float64)
    attained = float((signs @ W @ signs.mT).abs().max())
    assert 0.25 * attained <= sizes.score_norm <= 0.25 * float(W.abs().sum()) + 1e-9
    zero = circuit_sizes(HeadWeights(0 * q, k, 0 * v, o, 0.25))
    assert (zero.qk_stable_rank, zero.ov_norm) == (0.0, 0.0)


def sizes_of(network: dg.SelfAttentionNetwork) -> list[list[CircuitSizes]]:
    eye = torch.eye(network.dim, dtype=torch.float64)
    return [
        [
            circuit_sizes(HeadWeights(layer.query[h].detach(), layer.key[h].detach(), layer.value[h].detach(), eye,
                                      network.scale))
            for h in range(layer.heads)
        ]
        for layer in network
    ]  # fmt: skip


@pytest.mark.parametrize("eta", [1e-3, 0.02, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_the_corrected_bound_holds(eta: float, seed: int) -> None:
    """The bound is at least the observed error, and at least the sharper certificate."""
    network = dg.random_network(layers=3, heads=2, dim=4, eta=eta, seed=seed)
    small = dg.collapse(network, method="mean-field")
    bound = corrected_bound(sizes_of(network), 1.0)
    x = uniform_inputs(20, 6, 4, seed=seed)
    with torch.no_grad():
        error = float((network(x) - small(x)).abs().max())
    assert 0 < error <= bound
    if eta == 0.02 and seed == 0:
        certificate = dg.certify(network, small, radius=1.0, starts=1, steps=1)
        assert certificate.upper is not None
        assert bound >= certificate.upper


def test_the_regime_is_where_the_bounds_reach_the_tolerance() -> None:
    network = dg.random_network(layers=4, heads=2, dim=8, eta=0.5, seed=0)
    found = regime(sizes_of(network))
    assert found.eta == pytest.approx(network.eta)
    assert 0 < found.corrected_orders < found.printed_orders
    just, not_yet = 10 ** -(found.corrected_orders + 0.001), 10 ** -(found.corrected_orders - 0.01)
    assert corrected_bound(sizes_of(network), just) <= TOLERANCE < corrected_bound(sizes_of(network), not_yet)
    inside = printed_bound(network.rescale(found.printed_eta * 0.999), 1.0)
    assert inside.printed_applies
    assert inside.printed_bound <= TOLERANCE
    outside = printed_bound(network.rescale(found.printed_eta * 1.05), 1.0)
    assert not outside.printed_applies or outside.printed_bound > TOLERANCE
    tiny = regime(sizes_of(network.rescale(1e-6)))
    assert (tiny.printed_orders, tiny.corrected_orders) == (0.0, 0.0)
