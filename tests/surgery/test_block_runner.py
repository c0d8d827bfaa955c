"""Running blocks one at a time equals the model's own forward pass, in every family."""

from typing import Any

import pytest
import torch
from layered_models import LAYERS, layered_model, output_of, skipping
from tiny_models import MODELS, OTHERS, tiny_model, tokens

from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.checkpoints.weights.load import wrap

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def runner_of(model: Any, ids: torch.Tensor, batch: int) -> BlockRunner:
    runner = BlockRunner(wrap(model), ids[:1])
    assert runner.batches.size >= 1
    runner.batches.size = batch
    return runner


@pytest.mark.parametrize("batch", [1, 3, 100])
@pytest.mark.parametrize("name", MODELS)
def test_all_blocks_and_the_output_equal_the_model(name: str, batch: int) -> None:
    model, ids = layered_model(name), tokens(count=13, batch=7)
    runner = runner_of(model, ids, batch)
    states = runner.through(range(LAYERS), runner.embed(ids))
    with torch.no_grad():
        torch.testing.assert_close(runner.output(states), output_of(model, ids), **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_every_state_equals_the_hidden_states_of_the_model(name: str) -> None:
    model, ids = layered_model(name), tokens(count=13, batch=4)
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True).hidden_states
    runner = runner_of(model, ids, 3)
    state = runner.embed(ids)
    for layer in range(LAYERS):
        torch.testing.assert_close(state, expected[layer], **CLOSE)
        state = runner.through([layer], state)


@pytest.mark.parametrize("name", MODELS)
def test_some_blocks_equal_the_model_with_the_others_skipped(name: str) -> None:
    model, ids = layered_model(name), tokens(count=13, batch=3)
    runner = runner_of(model, ids, 2)
    with torch.no_grad():
        found = runner.output(runner.through([0, 2, 5], runner.embed(ids)))
    torch.testing.assert_close(found, skipping(model, find_blocks(model, LAYERS), [1, 3, 4], ids), **CLOSE)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "smollm3"])
def test_sliding_windows_matter_in_these_tests(name: str) -> None:
    model, ids = layered_model(name), tokens(count=13, batch=1)
    wide = layered_model(name, sliding_window=64)
    assert (output_of(model, ids) - output_of(wide, ids)).abs().max() > 1e-3


def test_the_model_is_the_same_afterwards() -> None:
    model, ids = layered_model("gpt2"), tokens()
    before = output_of(model, ids)
    runner = runner_of(model, ids, 1)
    with torch.no_grad():
        runner.output(runner.through(range(LAYERS), runner.embed(ids)))
    torch.testing.assert_close(output_of(model, ids), before, rtol=0, atol=0)
    for block in runner.blocks:
        assert not block._forward_hooks
        assert not block._forward_pre_hooks
        assert "forward" not in block.__dict__


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
def test_states_keep_the_dtype_and_the_place_in_which_they_are_stored() -> None:
    model, ids = layered_model("llama", dtype=torch.bfloat16), tokens(batch=3)
    runner = runner_of(model, ids, 2)
    stored = runner.embed(ids).float()
    assert runner.through([0, 1], stored).dtype == torch.float32
    assert runner.through([], stored) is stored
    assert runner.on_device(stored).dtype == torch.bfloat16
    assert runner.batches.map(lambda these: len(stored[these]), len(stored)) == [2, 1]


def test_a_model_whose_layers_share_one_module_is_refused() -> None:
    assert "albert" in OTHERS
    with pytest.raises(CheckpointError, match="no list of 3 blocks"):
        BlockRunner(wrap(tiny_model("albert")), tokens(batch=1))
