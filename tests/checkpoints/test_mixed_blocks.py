"""Models whose blocks are of different kinds, or have no attention: a family for every block."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from edited_outputs import edited_outputs
from tiny_models import tiny_model, tokens
from torch import Tensor

from depthgauge.checkpoints.blocks.attention_calls import Session
from depthgauge.checkpoints.blocks.block_runner import Stack
from depthgauge.checkpoints.blocks.probe import derived, probe
from depthgauge.checkpoints.blocks.what_if import layers_of
from depthgauge.checkpoints.blocks.window_observer import SublayerScores, added_influence
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.weights.families import Family
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.surgery.student import first_removable

QWEN = Family("self_attn", "mlp", "self_attn.o_proj", "mlp.down_proj")
DELTA = replace(QWEN, attention="linear_attn", out="linear_attn.out_proj")
CONV = Family("conv", "feed_forward", "conv.out_proj", "feed_forward.w2")
LFM = replace(CONV, attention="self_attn", out="self_attn.out_proj")
SSM = Family("mamba", "feed_forward", "mamba.out_proj", "feed_forward.down_proj")
JAMBA = replace(SSM, attention="self_attn", out="self_attn.o_proj")
GRIFFIN = Family("temporal_block", "mlp_block", "temporal_block.linear_out", "mlp_block.down_proj")
MIXER = Family("mixer", None, "mixer.out_proj", None)
NORMED = replace(
    QWEN,
    attention="post_attention_layernorm",
    mlp="post_feedforward_layernorm",
    attention_norm="post_attention_layernorm",
    mlp_norm="post_feedforward_layernorm",
)
RWKV = Family("attention", "feed_forward", "attention.output", None)  # the gate of the MLP multiplies its last map
# Written by hand from the source of transformers.
EXPECTED: dict[str, tuple[Family | None, ...]] = {
    "qwen3_moe": (replace(QWEN, down=None), QWEN, replace(QWEN, down=None)),
    "lfm2": (CONV, LFM, CONV),
    "lfm2_moe": (CONV, replace(LFM, down=None), replace(CONV, down=None)),
    "jamba": (SSM, replace(JAMBA, down=None), SSM),
    "bamba": (SSM, JAMBA, SSM),
    "nemotron_h": (MIXER, replace(MIXER, out="mixer.o_proj"), Family(None, "mixer", None, "mixer.down_proj")),
    "recurrent_gemma": (GRIFFIN, replace(GRIFFIN, out="temporal_block.o_proj"), GRIFFIN),
    "qwen3_next": (DELTA, replace(QWEN, down=None), replace(DELTA, down=None)),
    "qwen3_5": (DELTA, QWEN, DELTA),
    "olmo_hybrid": (replace(DELTA, out="linear_attn.o_proj"), NORMED, replace(DELTA, out="linear_attn.o_proj")),
    "mamba": (MIXER,) * 3,
    "mamba2": (MIXER,) * 3,
    "falcon_mamba": (MIXER,) * 3,
    "rwkv": (None, RWKV, RWKV),  # its first block starts with a norm
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_block_has_its_own_family(name: str) -> None:
    checkpoint = derived(wrap(tiny_model(name)), tokens())
    assert checkpoint.families == EXPECTED[name]
    assert bool(checkpoint.underived) is (None in EXPECTED[name])


def silenced(model: Any, block: Any, path: str, ids: Tensor) -> Tensor:
    """Return the logits of a complete pass in which a module returns zeros."""
    hook = block.get_submodule(path).register_forward_hook(
        lambda module, args, out: (0 * out[0], *out[1:]) if isinstance(out, tuple) else 0 * out
    )
    with hook, torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("name", EXPECTED)
def test_sublayers_are_skipped_where_a_block_has_them(name: str) -> None:
    model, ids = tiny_model(name), tokens(batch=1)
    checkpoint = derived(wrap(model), ids)
    stack = Stack(checkpoint, Session())
    intact = stack.run(ids)
    for kind in ("attention", "mlp"):
        paths = {k: getattr(one, kind) for k, one in enumerate(EXPECTED[name]) if one and len(one.sublayers) == 2}
        assert layers_of(kind, checkpoint.families) == list(paths)
        outputs = edited_outputs(checkpoint, ids, kind, list(paths))
        for (layer, path), found in zip(paths.items(), outputs, strict=True):
            expected, scale = silenced(model, stack.blocks[layer], path, ids), intact.abs().max()
            assert (found - expected).abs().max() < 1e-4 * scale
            assert (expected - intact).abs().max() > 1e-4 * scale


@pytest.mark.parametrize("name", ["lfm2", "mamba", "nemotron_h", "rwkv"])
def test_a_block_with_two_sublayers_is_scored_by_both(name: str) -> None:
    checkpoint, seen = derived(wrap(tiny_model(name)), tokens(batch=1)), list[Tensor]()
    stack = Stack(checkpoint, Session())
    scores = SublayerScores(stack.blocks, checkpoint.families)
    last = EXPECTED[name][2]
    assert last is not None
    module = stack.blocks[2].get_submodule(last.sublayers[0])
    hook = module.register_forward_hook(lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with scores.listening(), hook:
        x, y = stack.full(tokens(batch=1)).states[2:]
    has_both = [family is not None and len(family.sublayers) == 2 for family in EXPECTED[name]]
    assert [score == score for score in scores.attention] == has_both
    assert [score == score for score in scores.mlp] == has_both
    if has_both[2]:
        added = seen[0].reshape(x.shape)
        assert scores.attention[2] == pytest.approx(added_influence(x, added), rel=1e-4)
        assert scores.mlp[2] == pytest.approx(added_influence(x + added, y - x - added), rel=1e-4)


def test_states_that_change_between_blocks_are_noticed() -> None:
    """RWKV halves its states after every `rescale_every` blocks: states that are put in there would be halved again."""
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(
        hidden_size=16, vocab_size=40, context_length=64, intermediate_size=24, num_hidden_layers=4, rescale_every=2
    )
    checkpoint = wrap(RwkvForCausalLM(config).eval(), "tiny")
    with pytest.raises(CheckpointError, match="the model changes the states between the blocks 1 and 2"):
        probe(checkpoint, tokens(batch=1))
    with pytest.raises(CheckpointError, match="its blocks applied one by one do not give its output"):
        first_removable(checkpoint, tokens())
