"""Removing blocks of families without an entry in the table, and what is refused because it cannot be verified."""

import pytest
import torch
from layered_models import LAYERS, layered_model, output_of, skipping
from tiny_models import DERIVED, tiny_model, tokens

from depthgauge.checkpoints.layers import BlockRunner, find_blocks
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import wrap
from depthgauge.surgery.extract import extract, shrunk_config
from depthgauge.surgery.verify_removal import first_removable, require_same_output

KEPT = [(0, 2, 5), (0, 1, 3, 4), (1, 3, 4), (4,)]


@pytest.mark.parametrize("name", DERIVED)
def test_the_new_model_equals_the_old_one_with_blocks_skipped(name: str) -> None:
    model, ids = layered_model(name, dtype=torch.float32), tokens()
    checkpoint, blocks = wrap(model, name), find_blocks(model, LAYERS)
    first, reason = first_removable(checkpoint, ids)
    assert (first, bool(reason)) == ((1, True) if name == "modernbert" else (0, False))
    for kept in KEPT:
        removed = [layer for layer in range(LAYERS) if layer not in kept]
        if first == 1 and 0 in removed:
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
    first, _ = first_removable(wrap(model), tokens())
    assert first == LAYERS - 1  # the last block has no successor whose kind would change


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
