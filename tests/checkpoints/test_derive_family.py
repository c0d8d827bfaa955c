"""The derived structure of every family, against the table of families and against lists written by hand."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from edited_outputs import edited_outputs
from tiny_models import DERIVED, MODELS, tiny_model, tokens
from torch import Tensor, nn

from depthgauge.checkpoints.blocks.attention_calls import Session
from depthgauge.checkpoints.blocks.block_runner import BlockRunner, Stack
from depthgauge.checkpoints.blocks.probe import derive_families, derived
from depthgauge.checkpoints.blocks.window_observer import SublayerScores, added_influence
from depthgauge.checkpoints.weights.families import Family, find_blocks
from depthgauge.checkpoints.weights.load import wrap

LLAMA = Family("self_attn", "mlp", "self_attn.o_proj", "mlp.down_proj")
# Written by hand from the source of transformers.
EXPECTED = {
    "olmo": LLAMA,
    "olmo2": replace(
        LLAMA,
        attention="post_attention_layernorm",
        mlp="post_feedforward_layernorm",
        attention_norm="post_attention_layernorm",
        mlp_norm="post_feedforward_layernorm",
    ),
    "granite": replace(LLAMA, multiplier=0.22),
    "phi": Family("self_attn", "mlp", "self_attn.dense", "mlp.fc2", order="parallel"),
    "phi3": LLAMA,
    "cohere": replace(LLAMA, order="parallel"),
    "opt": Family("self_attn", "fc2", "self_attn.out_proj", "fc2"),
    "opt-post": Family(
        "self_attn",
        "fc2",
        "self_attn.out_proj",
        "fc2",
        order="post",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
    ),
    "bloom": Family(
        "self_attention.dense", "mlp.dense_4h_to_h", "self_attention.dense", "mlp.dense_4h_to_h"
    ),  # the modules around them return the residual stream
    "falcon": Family("self_attention", "mlp", "self_attention.dense", "mlp.dense_4h_to_h", order="parallel"),
    "falcon-alibi": Family("self_attention", "mlp", "self_attention.dense", "mlp.dense_4h_to_h"),
    "mixtral": replace(LLAMA, down=None),
    "gpt_oss": replace(LLAMA, down=None),
    "modernbert": Family("attn", "mlp", "attn.Wo", "mlp.Wo"),
    "granitemoe": replace(LLAMA, mlp="block_sparse_moe", down=None),
    "xglm": Family("self_attn", "fc2", "self_attn.out_proj", "fc2"),
    "mpnet": Family(
        "attention.attn",
        "output.dense",
        "attention.attn.o",
        "output.dense",
        order="post",
        attention_norm="attention.LayerNorm",
        mlp_norm="output.LayerNorm",
    ),
}


def family_of_all(model: Any, ids: Tensor | None = None) -> Family:
    """Derive the families of all blocks, which must be equal."""
    families, reasons = derive_families(wrap(model), tokens() if ids is None else ids)
    (found,) = set(families)
    assert found is not None
    assert reasons == []
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_declared_families_are_derived(name: str) -> None:
    checkpoint = wrap(tiny_model(name))
    declared = checkpoint.family
    assert declared is not None
    found = family_of_all(checkpoint.model)
    kept = ("projections", "gain", "gain_offset")
    assert found == replace(declared, **{name: getattr(found, name) for name in kept})


@pytest.mark.parametrize("name", EXPECTED)
def test_other_families_are_derived(name: str) -> None:
    checkpoint = derived(wrap(tiny_model(name)), tokens())
    assert checkpoint.family is not None
    assert checkpoint.family.multiplier == pytest.approx(EXPECTED[name].multiplier, rel=1e-5)
    assert replace(checkpoint.family, multiplier=EXPECTED[name].multiplier) == EXPECTED[name]
    assert checkpoint.underived == ""


def test_every_family_without_an_entry_is_covered() -> None:
    assert set(EXPECTED) | {"lfm2", "qwen3_moe"} == set(DERIVED)  # those two have blocks of different kinds


@pytest.mark.parametrize("name", [name for name, family in EXPECTED.items() if family.order != "post"])
def test_a_block_adds_the_outputs_of_its_sublayers(name: str) -> None:
    """Sum the outputs of the modules that are named by hand, without any change of the model."""
    model, family, seen = tiny_model(name), EXPECTED[name], list[Tensor]()
    checkpoint = wrap(model)
    runner = BlockRunner(checkpoint, tokens(batch=1))
    x = runner.full(tokens(batch=1)).states[1]

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        seen.append((out[0] if isinstance(out, tuple) else out).clone().reshape(x.shape))

    with ExitStack() as hooks:
        for path in family.sublayers:
            hooks.enter_context(runner.blocks[1].get_submodule(path).register_forward_hook(keep))
        with torch.no_grad():
            found = runner.block(1, x.clone())
    torch.testing.assert_close(found, x + family.multiplier * (seen[0] + seen[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@pytest.mark.parametrize("name", EXPECTED)
def test_sublayers_are_skipped_without_observed_attention(name: str, kind: str) -> None:
    """Compare with hooks, on modules that are named by hand, during complete passes of the stock model."""
    model, ids = tiny_model(name), tokens(batch=1)
    checkpoint = derived(wrap(model), ids)
    loss = checkpoint.objective == "loss"
    intact, outputs = Stack(checkpoint, Session()).run(ids), edited_outputs(checkpoint, ids, kind, range(3))
    for block, found in zip(find_blocks(model, 3), outputs, strict=True):
        module = block.get_submodule(getattr(EXPECTED[name], kind))
        zeros = module.register_forward_hook(
            lambda module, args, out: (0 * out[0], *out[1:]) if isinstance(out, tuple) else 0 * out
        )
        with zeros, torch.no_grad():
            out = model(input_ids=ids)
        expected = out.logits if loss else out.last_hidden_state
        scale = intact.abs().max()
        assert (found - expected).abs().max() < 3e-5 * scale
        assert (expected - intact).abs().max() > 1e-3 * scale


@pytest.mark.parametrize("name", ["granite", "opt", "falcon", "mpnet"])
def test_scores_of_sublayers_use_what_is_added(name: str) -> None:
    """The two scores of a block are computed from its input, output and what the attention adds."""
    checkpoint = derived(wrap(tiny_model(name)), tokens(batch=1))
    family, seen = checkpoint.family, list[Tensor]()
    assert family is not None
    stack = Stack(checkpoint, Session())
    assert family.attention is not None
    scores = SublayerScores(stack.blocks, checkpoint.families)
    attention = stack.blocks[1].get_submodule(family.attention)
    with scores.listening(), attention.register_forward_hook(lambda m, a, out: seen.append(out[0].clone())):
        states = stack.full(tokens(batch=1)).states
    x, y = states[1], states[2]
    added = EXPECTED[name].multiplier * seen[0].reshape(x.shape)
    assert scores.attention[1] == pytest.approx(added_influence(x, added), rel=1e-5)
    if family.order == "post":
        return
    read = x if family.order == "parallel" else x + added
    assert scores.mlp[1] == pytest.approx(added_influence(read, y - x - added), rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "granite", "gemma2", "bert", "phi"])
def test_half_precision_gives_the_same_structure(name: str) -> None:
    exact = family_of_all(tiny_model(name))
    coarse = family_of_all(tiny_model(name).bfloat16())
    assert coarse.multiplier == pytest.approx(exact.multiplier, rel=0.03)
    assert replace(coarse, multiplier=exact.multiplier) == exact


def test_one_token_of_text_is_enough() -> None:
    assert family_of_all(tiny_model("phi3"), tokens(1)) == LLAMA


def test_the_model_is_left_as_it_was() -> None:
    model, ids = tiny_model("olmo2"), tokens()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        derive_families(wrap(model), ids)
        assert torch.equal(model(input_ids=ids).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def complaint(model: Any, failing: tuple[int, ...] = (0, 1, 2)) -> str:
    """Return why the blocks `failing` have no family; the others have one."""
    checkpoint = derived(wrap(model), tokens())
    assert tuple(layer for layer in range(3) if checkpoint.families[layer] is None) == failing
    return checkpoint.underived


def test_a_model_without_a_list_of_blocks_is_named() -> None:
    assert complaint(tiny_model("albert")) == "it has no list of 3 blocks"
    assert complaint(tiny_model("xlnet")) == "its states are not arranged by window and token"


def test_a_block_that_cannot_be_called_is_named() -> None:
    model = tiny_model("olmo")
    find_blocks(model, 3)[1].self_attn.register_forward_hook(lambda module, args, out: out[0][:, :, 3:])
    assert complaint(model).startswith("its blocks cannot be called one by one: ")


def test_a_block_that_adds_something_else_is_not_accepted() -> None:
    model = tiny_model("olmo")
    block = find_blocks(model, 3)[0]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs) + 0.01
    assert complaint(model, (0,)).startswith(
        "block 0 (OlmoDecoderLayer) is not the identity, or a norm, without at most 3 submodules"
    )


def test_every_block_is_verified() -> None:
    """Block 2 is of the same kind as block 0, from which the structure is derived, and computes something else."""
    model = tiny_model("olmo")
    block = find_blocks(model, 3)[2]
    own = block.forward
    block.forward = lambda *args, **kwargs: 1.01 * own(*args, **kwargs)
    assert complaint(model, (2,)) == "block 2 (OlmoDecoderLayer) without self_attn and mlp is not the identity"
    block.forward = own
    block.mlp.register_forward_hook(lambda module, args, out: out.abs())
    found = complaint(model, (2,))
    assert found == "the output of block 2 (OlmoDecoderLayer) is not affine in the output of mlp.down_proj"


def test_the_output_map_is_affine_on_its_way_to_the_stream() -> None:
    model = tiny_model("olmo")
    for block in find_blocks(model, 3):
        block.mlp.register_forward_hook(lambda module, args, out: out.tanh())
    found = family_of_all(model)
    assert (found.mlp, found.down, found.out) == ("mlp", None, "self_attn.o_proj")


def test_a_model_that_needs_more_than_the_states_is_refused() -> None:
    model = tiny_model("olmo")
    block = find_blocks(model, 3)[1]
    own, calls = block.forward, count()
    block.forward = lambda *args, **kwargs: own(*args, **kwargs) + next(calls) * torch.arange(16)
    assert complaint(model).startswith("its blocks applied one by one do not give its output")
