"""Removing blocks: the new model equals the old one with these blocks skipped, in every family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from layered_models import LAYERS, layered_model, output_of, skipping
from tiny_checkpoints import save_checkpoint
from tiny_gguf import write_gguf
from tiny_models import MODELS, tiny_model, tokens

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks.attention_calls import attending
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.checkpoints.weights.load import Placement, load_config, load_model, wrap
from depthgauge.surgery.extract import _places, extract, require_supported, shrunk_config

KEPT = [(0, 2, 5), (1, 3, 4), (5,), (0, 1, 2, 3, 4, 5)]


def per_layer(config: Any) -> dict[str, list[Any]]:
    """The lists of a configuration with one entry per layer, written by hand for the families in scope."""
    return {key: list(getattr(config, key)) for key in ("layer_types", "no_rope_layers") if getattr(config, key, None)}


@pytest.mark.parametrize("name", MODELS)
def test_the_new_model_equals_the_old_one_with_blocks_skipped(name: str) -> None:
    model, ids = layered_model(name), tokens()
    checkpoint = wrap(model, name)
    blocks = find_blocks(model, LAYERS)
    intact = output_of(model, ids)
    for kept in KEPT:
        removed = [layer for layer in range(LAYERS) if layer not in kept]
        shrunk = extract(checkpoint, kept)
        expected = skipping(model, blocks, removed, ids)
        found = output_of(shrunk, ids)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        if removed:
            assert (found - intact).abs().max() > 1e-3  # the removed blocks did something
        assert type(shrunk) is type(model)
        assert not shrunk.training
        assert shrunk.config.num_hidden_layers == len(find_blocks(shrunk, len(kept))) == len(kept)
    assert model.config.num_hidden_layers == LAYERS
    torch.testing.assert_close(output_of(model, ids), intact, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_the_new_model_is_independent_of_the_old_one(name: str) -> None:
    model, ids = layered_model(name), tokens()
    shrunk = extract(wrap(model), (1, 4))
    before = output_of(shrunk, ids)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    torch.testing.assert_close(output_of(shrunk, ids), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_every_list_with_one_entry_per_layer_follows(name: str, tmp_path: Path) -> None:
    config = layered_model(name).config
    kept = (0, 3, 4)
    shrunk = shrunk_config(config, kept)
    lists = per_layer(config)
    assert per_layer(shrunk) == {key: [value[layer] for layer in kept] for key, value in lists.items()}
    assert shrunk.num_hidden_layers == 3
    shrunk.save_pretrained(tmp_path)
    again = type(config).from_pretrained(tmp_path)
    assert per_layer(again) == per_layer(shrunk)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert all(raw[key] == value for key, value in per_layer(shrunk).items())
    assert "_name_or_path" not in raw


def test_the_kinds_of_layers_differ_in_these_tests() -> None:
    for name in ("qwen2-window", "qwen3", "smollm3", "gemma2", "gemma3"):
        assert all(len(set(value)) == 2 for value in per_layer(layered_model(name).config).values()), name
    assert layered_model("gpt2").config.scale_attn_by_inverse_layer_idx


@pytest.mark.parametrize("name", ["qwen2-window", "qwen3"])
@pytest.mark.parametrize("kept", [(0, 1), (4, 5), (1, 2, 3), (0, 5)])
def test_without_layer_types_the_window_rule_gives_the_same_layers(name: str, kept: tuple[int, ...]) -> None:
    shrunk = shrunk_config(layered_model(name).config, kept)
    values = shrunk.to_dict()
    listed = values.pop("layer_types")
    assert type(shrunk).from_dict(values).layer_types == listed


def test_patterns_cannot_create_other_layers_on_reload(tmp_path: Path) -> None:
    """A Gemma 3 configuration as it is published: a pattern and no list."""
    import transformers

    settings = {key: value for key, value in MODELS["gemma3"][2].items() if key != "layer_types"}
    config = transformers.Gemma3TextConfig(**settings | {"num_hidden_layers": 6, "sliding_window_pattern": 3})
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"] * 2
    shrunk = shrunk_config(config, (2, 3, 5))
    shrunk.save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert again.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    assert "sliding_window_pattern" not in json.loads((tmp_path / "config.json").read_text())


def test_unknown_lists_follow_if_they_speak_of_layers() -> None:
    config = layered_model("llama").config
    config.mlp_layer_types = ["dense"] * 6
    config.layer_gains = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    config.watched_layers = [0, 2, 3]  # indices, not one entry per layer
    config.all_idxs = [0, 1, 2, 3, 4, 5]
    config.first_k_dense_replace = 2
    config.eos_token_id = [2, 3, 4, 5, 6, 7]
    config.no_rope_layers = [1, 0, 1, 0, 1, 0, 1, 0]  # longer than the model
    shrunk = shrunk_config(config, (1, 2))
    assert shrunk.mlp_layer_types == ["dense"] * 2
    assert shrunk.layer_gains == [0.2, 0.3]
    assert shrunk.watched_layers == [1]
    assert shrunk.all_idxs == [0, 1]
    assert shrunk.first_k_dense_replace == 1
    assert shrunk.eos_token_id == [2, 3, 4, 5, 6, 7]
    assert shrunk.no_rope_layers == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    model = layered_model("llama", dtype=dtype)
    shrunk = extract(wrap(model), (0, 4))
    assert {parameter.dtype for parameter in shrunk.parameters()} == {dtype}
    assert torch.equal(shrunk.model.layers[1].mlp.up_proj.weight, model.model.layers[4].mlp.up_proj.weight)
    assert shrunk.dtype == dtype


@pytest.mark.parametrize(("name", "tied"), [("gemma", True), ("gpt2", True), ("llama", False), ("qwen2", False)])
def test_tied_embeddings_stay_tied(name: str, tied: bool) -> None:
    shrunk = extract(wrap(layered_model(name)), (0, 4))
    assert (shrunk.get_input_embeddings().weight is shrunk.get_output_embeddings().weight) is tied
    assert shrunk.config.tie_word_embeddings is tied


def test_the_configuration_says_whether_embeddings_are_tied_in_fact() -> None:
    model = layered_model("gemma")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    shrunk = extract(wrap(model), (0, 4))
    assert shrunk.config.tie_word_embeddings is False
    assert torch.equal(shrunk.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox", "bert"])
def test_layer_indices_are_renumbered(name: str) -> None:
    shrunk = extract(wrap(layered_model(name)), (1, 3, 5))
    for layer, block in enumerate(find_blocks(shrunk, 3)):
        found = {module.layer_idx for module in block.modules() if hasattr(module, "layer_idx")}
        assert found == {layer}


def test_an_observed_model_gives_a_model_with_its_own_attention() -> None:
    model = layered_model("llama")
    with attending(model):
        shrunk = extract(wrap(model), (0, 1))
    assert shrunk.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"
    eager = layered_model("llama", attn_implementation="eager")
    assert extract(wrap(eager), (0, 1)).config._attn_implementation == "eager"


def test_the_random_state_is_not_used() -> None:
    model = layered_model("bert")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    extract(wrap(model), (0, 1))
    assert torch.equal(torch.rand(4), expected)


def loaded(path: Path) -> Any:
    source, here = find(path), Placement(device="cpu")
    return load_model(source, load_config(source, here), here)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_source_becomes_an_ordinary_model(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, add_bos=True, family=family, layers=4)
    checkpoint = loaded(path)
    assert checkpoint.config.quantization_config is not None
    shrunk = extract(checkpoint, (0, 3))
    ids = tokens()
    expected = skipping(checkpoint.model, checkpoint.model.model.layers, (1, 2), ids)
    torch.testing.assert_close(output_of(shrunk, ids), expected, rtol=1e-5, atol=1e-5)
    assert getattr(shrunk.config, "quantization_config", None) is None
    assert getattr(shrunk, "hf_quantizer", None) is None
    shrunk.save_pretrained(tmp_path / "out")


def test_a_pooler_that_the_files_lack_is_not_invented(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_checkpoint(tmp_path, "bert", tokenizer=False)
    assert extract(loaded(tmp_path), (0, 2)).pooler is not None
    stored = load_file(tmp_path / "model.safetensors")
    save_file(
        {key: value for key, value in stored.items() if "pooler" not in key},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert extract(loaded(tmp_path), (0, 2)).pooler is None


def test_offloaded_weights_are_read_from_disk(tmp_path: Path) -> None:
    import transformers

    model = layered_model("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "disk" if layer % 2 else "cpu" for layer in range(LAYERS)}
    distributed = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert distributed.model.layers[3].mlp.up_proj.weight.device.type == "meta"
    shrunk = extract(wrap(distributed), (0, 3, 5))
    ids = tokens()
    expected = skipping(model, model.model.layers, (1, 2, 4), ids)
    torch.testing.assert_close(output_of(shrunk, ids), expected, rtol=1e-5, atol=1e-5)


def test_blocks_stay_on_their_devices() -> None:
    devices = {"model.embed": 0, "model.layers.0": 0, "model.layers.1.mlp": 1, "model.layers.10": "disk", "lm_head": 1}
    expected = {"model.embed": 0, "model.layers.0.mlp": 1, "model.layers.1": "cpu", "lm_head": 1}
    kept = {"model.layers.1": "model.layers.0", "model.layers.10": "model.layers.1"}
    assert _places(devices, ["model.layers"], kept) == expected
    assert _places({"": "cpu"}, "model.layers", (1, 10)) == {"": "cpu"}
    assert _places({"model": 0, "lm_head": 1}, "model.layers", (1, 10)) == {"model": 0, "lm_head": 1}


@pytest.mark.parametrize(
    ("kept", "complaint"),
    [
        ((), "at least one of 6 layers must be kept, got none; remove fewer layers"),
        ((0, 6), r"the layers to keep must be from 0 to 5, got \[0, 6\]"),
        ((-1, 3), r"the layers to keep must be from 0 to 5, got \[-1, 3\]"),
        ((3, 1), r"increasing order without repetition, got \[3, 1\]"),
        ((1, 1), r"increasing order without repetition, got \[1, 1\]"),
    ],
)
def test_layers_that_cannot_be_kept_are_refused(kept: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        extract(wrap(layered_model("llama")), kept)


def test_models_without_a_list_of_blocks_are_refused() -> None:
    with pytest.raises(CheckpointError, match="the blocks of tiny cannot be found: no list has 3 modules"):
        require_supported(wrap(tiny_model("albert"), "tiny"))


def test_models_that_are_more_than_a_stack_are_refused() -> None:
    import transformers

    class Custom(transformers.LlamaForCausalLM):
        pass

    model = layered_model("llama")
    with pytest.raises(CheckpointError, match="tiny is a Custom, which is not part of transformers"):
        require_supported(wrap(Custom(model.config), "tiny", objective="loss"))
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(CheckpointError, match=r"the weights of tiny are quantized \(gptq\)"):
        require_supported(wrap(model, "tiny"))
    crossed = layered_model("gpt2", add_cross_attention=True)
    with pytest.raises(CheckpointError, match="tiny has cross-attention"):
        require_supported(wrap(crossed, "tiny"))
    text = MODELS["gemma3"][2] | {"num_hidden_layers": 3}
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    both = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    with pytest.raises(CheckpointError, match="tiny is a gemma3 model that contains a text model"):
        require_supported(wrap(transformers.Gemma3ForConditionalGeneration(both), "tiny", objective="loss"))
