"""Removing blocks of families without an entry in the table, and what is refused because it cannot be verified."""

import pytest
import torch
from layered_models import LAYERS, layered_model, output_of, skipping
from tiny_models import DERIVED, tiny_model, tokens

from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.surgery.extract import extract, shrunk_config
from depthgauge.surgery.student import first_removable, require_same_output, why_not_removed

KEPT = [(0, 2, 5), (0, 1, 3, 4), (1, 3, 4), (4,)]


@pytest.mark.parametrize("name", DERIVED)
def test_the_new_model_equals_the_old_one_with_blocks_skipped(name: str) -> None:
    model, ids = layered_model(name, dtype=torch.float32), tokens()
    checkpoint, blocks = wrap(model, name), find_blocks(model, LAYERS)
    assert first_removable(checkpoint, ids) == (0, "")
    for kept in KEPT:
        removed = [layer for layer in range(LAYERS) if layer not in kept]
        if name == "modernbert" and 0 in removed:
            with pytest.raises(CheckpointError, match=r"gives layers\.0\.attn_norm other weights than layers\.\d"):
                extract(checkpoint, kept)
            continue
        expected = skipping(model, blocks, removed, ids)
        shrunk = extract(checkpoint, kept)
        torch.testing.assert_close(output_of(shrunk, ids), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi", "opt", "gpt_oss", "xglm", "granitemoe"])
def test_blocks_run_one_by_one_in_batches(name: str) -> None:
    """Bloom's position biases have one row per window and head, which cannot be broadcast over a batch."""
    model, ids = tiny_model(name), tokens(batch=3)
    runner = BlockRunner(wrap(model), ids[:1])
    with torch.no_grad():
        found = runner.output(runner.through(range(3), runner.embed(ids)))
        expected = model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_states_that_are_arranged_otherwise_are_refused() -> None:
    with pytest.raises(CheckpointError, match="blocks cannot be removed from tiny: its states are not arranged by"):
        first_removable(wrap(tiny_model("xlnet"), "tiny"), tokens())


def test_indices_of_layers_follow() -> None:
    config = layered_model("qwen3_moe").config
    assert config.mlp_only_layers == [1, 2, 4]
    assert shrunk_config(config, (0, 2, 3, 4)).mlp_only_layers == [1, 3]


def test_a_rule_about_the_index_that_is_not_known_is_noticed() -> None:
    """Qwen's MoE models with `decoder_sparse_step` 2 have experts in every second layer."""
    model = layered_model("qwen3_moe", dtype=torch.float32, mlp_only_layers=[], decoder_sparse_step=2)
    with pytest.raises(CheckpointError, match=r"the configuration gives model\.layers\.0\.mlp other weights"):
        extract(wrap(model), (1, 2, 3, 4, 5))
    runner = BlockRunner(wrap(model), tokens(batch=1))
    assert first_removable(wrap(model), tokens()) == (0, "")  # every set is checked by itself
    assert why_not_removed(runner, (LAYERS - 1,), tokens(batch=1)) is None  # no other block has another index then
    assert why_not_removed(runner, (1, 2), tokens(batch=1)) is None
    reason = why_not_removed(runner, (1,), tokens(batch=1))
    assert reason is not None
    assert "the configuration gives model.layers.1.mlp other weights" in reason


def test_the_check_of_a_set_changes_no_weight() -> None:
    """GPT-2 has a scale by layer index, which is folded into the queries of the new model."""
    model, ids = layered_model("gpt2", dtype=torch.float32), tokens(batch=1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert why_not_removed(BlockRunner(wrap(model), ids), (0, 3), ids) is None
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_rule_about_the_index_of_a_single_block_is_noticed() -> None:
    """DiffLlama's blocks have one kind and compute with their index: all but the last are fixed."""
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    model = DiffLlamaForCausalLM(DiffLlamaConfig(**{**tiny_model("llama").config.to_dict(), "num_hidden_layers": 3}))
    first, reason = first_removable(wrap(model.eval(), "tiny"), tokens())
    assert first == 2
    assert "blocks [0] cannot be removed from tiny" in reason


def test_a_model_that_computes_something_else_is_refused() -> None:
    model, ids = tiny_model("olmo"), tokens(batch=1)
    checkpoint = wrap(model, "tiny")
    runner, kept = BlockRunner(checkpoint, ids), (0, 2)
    shrunk = extract(checkpoint, kept)
    require_same_output(shrunk, runner, kept, ids)
    with torch.no_grad():
        shrunk.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    with pytest.raises(CheckpointError, match=r"blocks \[1\] cannot be removed from tiny: .* its output differs by"):
        require_same_output(shrunk, runner, kept, ids)
