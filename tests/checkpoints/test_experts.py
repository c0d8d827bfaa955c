"""Models without single experts, against routers whose weights for the expert are 0."""

from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import Tensor, nn

from depthgauge.checkpoints.blocks.attention_calls import Session
from depthgauge.checkpoints.blocks.block_runner import BlockRunner, Stack
from depthgauge.checkpoints.blocks.probe import derived
from depthgauge.checkpoints.blocks.what_if import (
    DenseStates,
    Edit,
    ExpertWhatIfs,
    edited_states,
    expert_layers,
    expert_weights,
    without_expert,
)
from depthgauge.checkpoints.weights.load import wrap

# name → path of the router in a block, and the layers with experts, written by hand
ROUTERS = {
    "mixtral": ("mlp.gate", [0, 1, 2]),
    "qwen3_moe": ("mlp.gate", [0, 2]),
    "gpt_oss": ("mlp.router", [0, 1, 2]),
    "olmoe": ("mlp.gate", [0, 1, 2]),
    "granitemoe": ("block_sparse_moe.router", [0, 1, 2]),
    "lfm2_moe": ("feed_forward.gate", [1, 2]),
    "jamba": ("feed_forward.router", [1]),
    "qwen3_next": ("mlp.gate", [1, 2]),
}


def routed_elsewhere(model: Any, router: nn.Module, expert: int, ids: Tensor) -> tuple[Tensor, float]:
    """Return the logits where the router gives an expert the weight 0, and the share of tokens that it had chosen."""
    shares: list[float] = []

    def unweighted(module: nn.Module, args: Any, out: Any) -> Any:
        logits, weights, chosen = out
        shares.append(float((chosen == expert).any(dim=-1).double().mean()))
        return logits, weights.masked_fill(chosen == expert, 0.0), chosen

    with router.register_forward_hook(unweighted), torch.no_grad():
        return model(input_ids=ids).logits, shares[0]


@pytest.mark.parametrize("name", ROUTERS)
def test_an_expert_without_weights_is_an_expert_that_gets_no_token(name: str) -> None:
    model, ids = tiny_model(name), tokens(24, batch=1)
    path, layers = ROUTERS[name]
    runner = BlockRunner(derived(wrap(model), ids), ids)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    intact, experts = runner.run(ids), ExpertWhatIfs(runner)
    on, scale = [layer for layer in layers for _ in range(4)], intact.abs().max()
    assert expert_layers(runner.blocks, runner.checkpoint.families) == on
    models = [(Edit(layer, "expert", place % 4),) for place, layer in enumerate(on)]
    states = edited_states(DenseStates(runner, ids), models, experts=experts)
    for layer in layers:
        shares = [experts.shares[layer, expert] for expert in range(4)]
        for expert, (share,) in enumerate(shares):
            with torch.no_grad():
                output = runner.output(states[(Edit(layer, "expert", expert),)], ids)
            router = runner.blocks[layer].get_submodule(path)
            expected, expected_share = routed_elsewhere(model, router, expert, ids)
            assert share == pytest.approx(expected_share)
            assert (output - expected).abs().max() < 1e-4 * scale
            assert share == 0 or (output - intact).abs().max() > 1e-4 * scale
        assert sum(share for (share,) in shares) == pytest.approx(2)  # every token has two experts
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


def test_other_weights_with_three_dimensions_are_no_experts() -> None:
    assert expert_weights(nn.Conv1d(8, 8, 3)) == []
    assert expert_weights(tiny_model("llama").model.layers[0].mlp) == []
    for name in ("recurrent_gemma", "mamba"):  # gates by head, and convolutions, outside an MLP
        stack = Stack(derived(wrap(tiny_model(name)), tokens()), Session())
        assert expert_layers(stack.blocks, stack.checkpoint.families) == []


def test_weights_are_put_back_after_an_error() -> None:
    weight, seen = nn.Parameter(torch.randn(3, 4, 4)), list[Tensor]()
    before = weight.detach().clone()

    def fail() -> None:
        with without_expert([weight], 1):
            seen.append(weight.detach().clone())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert torch.equal(weight, before)
    assert torch.equal(seen[0], torch.stack([before[0], torch.zeros(4, 4), before[2]]))
