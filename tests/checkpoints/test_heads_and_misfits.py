"""Checkpoints as they come: heads of any kind, weights that do not fit, and files that transformers does not read."""

import builtins
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_checkpoint, save_tokenizer, text_of
from tiny_models import tiny_model

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.source.library import quiet
from depthgauge.checkpoints.source.model_files import find, weight_bytes, weight_files
from depthgauge.checkpoints.weights.load import Placement, load_config, load_model
from depthgauge.checkpoints.weights.stored_weights import count_parameters

pytestmark = pytest.mark.usefixtures("forked_verification")

HERE = Placement(device="cpu")
SMALL = {"window": 16, "device": "cpu"}
SHRINK = {"remove": 1, "effort": "quick", "confidence": 0.5}
HEADS = {
    "qwen3": ("Qwen3ForSequenceClassification", "score"),
    "llama": ("LlamaForTokenClassification", "score"),
    "bert": ("BertForSequenceClassification", "classifier"),
    "roberta": ("RobertaForMaskedLM", "lm_head"),
    "distilbert": ("DistilBertForMaskedLM", "vocab_projector"),
}


def with_head(name: str) -> Any:
    """Return a tiny model of a family with a head that is not a causal language model's."""
    import transformers

    config = tiny_model(name).config
    config.num_labels = 3
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    return getattr(transformers, HEADS[name][0])(config).eval()


def saved(model: Any, folder: Path) -> Path:
    with quiet():
        model.save_pretrained(folder)
    save_tokenizer(folder, special=False)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(text_of(4000))
    return path


def loaded(folder: Path, placement: Placement = HERE) -> Any:
    source = find(folder)
    return load_model(source, load_config(source, placement), placement)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_kept_by_shrink(name: str, tmp_path: Path, corpus: Path) -> None:
    """Written by shrink, loaded by its class: the head is the same, and the model has fewer layers."""
    import transformers

    model = with_head(name)
    source, out = saved(model, tmp_path / "model"), tmp_path / "out"
    result = dg.shrink(source, text=corpus, out=out, **SMALL, **SHRINK)
    kind, head = HEADS[name]
    again, found = getattr(transformers, kind).from_pretrained(out, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert again.config.num_hidden_layers == 2
    assert again.config.id2label == model.config.id2label
    before, after = model.state_dict(), again.state_dict()
    heads = [key for key in before if key.startswith(head)]
    assert heads
    assert all(torch.equal(before[key], after[key]) for key in heads)
    is_classifier = "Classification" in kind
    assert result.record.objective == ("logits" if is_classifier else "states")
    told = any(f"the head of the {kind} was kept unchanged; its own loss" in note for note in result.record.notes)
    assert told != is_classifier


def test_a_head_is_kept_in_memory_too(corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, special=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = with_head("bert")
    result = dg.shrink(model, tokenizer=tokenizer, text=corpus, window=16, **SHRINK)
    assert type(result.model) is type(model)
    assert torch.equal(result.model.classifier.weight, model.classifier.weight)


@pytest.mark.parametrize("name", HEADS)
def test_a_model_with_another_head_is_not_gauged_as_a_language_model(name: str, tmp_path: Path, corpus: Path) -> None:
    model = with_head(name)
    saved(model, tmp_path)
    result = dg.gauge(tmp_path, text=corpus, tokens=48, what_if="block", **SMALL)
    subject = result.to_json()["subjects"][0]
    assert subject["model"]["architecture"] == HEADS[name][0]
    saved(model.base_model, tmp_path / "bare")
    bare = dg.gauge(tmp_path / "bare", text=corpus, tokens=48, what_if="block", **SMALL).to_json()["subjects"][0]
    assert bare["model"]["objective"] == "states"
    if "Classification" not in HEADS[name][0]:
        assert subject["model"]["objective"] == "states"
        assert subject["layers"] == bare["layers"]  # the same encoder, the same numbers
        return
    assert subject["model"]["objective"] == "logits"
    costs, others = ([one["what_if"]["block"]["loss"] for one in found["layers"]] for found in (subject, bare))
    assert all(a > 0 and a != b for a, b in zip(costs, others, strict=True))


def test_an_unknown_class_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    change_config(tmp_path, architectures=["LlamaForDreaming"])
    with pytest.raises(InputError, match=r"is a LlamaForDreaming, which transformers .* does not know"):
        loaded(tmp_path)


# --- weights that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["gauge", "shrink"])
def test_weights_that_no_module_takes_are_named(verb: str, tmp_path: Path, corpus: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    change_config(tmp_path, num_hidden_layers=2)
    run = getattr(dg, verb)
    keywords: dict[str, Any] = {"text": corpus, **SMALL}
    keywords |= {"tokens": 48, "what_if": "none"} if verb == "gauge" else SHRINK
    with pytest.raises(InputError, match=r"with 2 layers does not use, such as model\.layers\.2\..*--allow unused"):
        run(tmp_path, **keywords)
    assert run(tmp_path, allow="unused", **keywords)


def test_modules_without_weights_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    change_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(InputError, match=r"lacks 9 weights of a LlamaForCausalLM, such as model\.layers\.3\."):
        loaded(tmp_path)


def test_a_language_model_without_its_head_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 weight of a LlamaForCausalLM, such as lm_head\.weight"):
        loaded(tmp_path)


def test_buffers_that_old_checkpoints_store_are_accepted(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert loaded(tmp_path).layers == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("verb", ["gauge", "shrink"])
def test_a_weight_that_is_not_finite_is_named_before_any_forward_pass(
    value: float, verb: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = value
    saved(model, tmp_path / "nan")
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", lambda *_, **__: pytest.fail("a forward pass"))
    keywords: dict[str, Any] = {"text": corpus, **SMALL} | (SHRINK if verb == "shrink" else {})
    match = r"the weight model\.layers\.1\.mlp\.up_proj\.weight of .*nan has entries that are NaN or infinite"
    with pytest.raises(InputError, match=match):
        getattr(dg, verb)(tmp_path / "nan", **keywords)


# --- files ------------------------------------------------------------------------------------------------------------


def sharded(folder: Path) -> Any:
    model = tiny_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return model


def test_only_files_that_transformers_loads_count(tmp_path: Path) -> None:
    model = sharded(tmp_path)
    source = find(tmp_path)
    parameters, size = count_parameters(source), weight_bytes(source)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    save_file(state, tmp_path / "consolidated.safetensors", {"format": "pt"})
    assert len(weight_files(source)) == len(list(tmp_path.glob("model-*.safetensors")))
    assert count_parameters(source) == parameters
    assert weight_bytes(source) == size == sum(path.stat().st_size for path in tmp_path.glob("model-*.safetensors"))
    assert parameters[0] == sum(weight.numel() for weight in model.parameters())


def test_other_weight_files_alone_are_no_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        find(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(InputError, match=rf"lacks the file {gone.name}; download it again"):
        find(tmp_path)


@pytest.mark.parametrize("verb", ["gauge", "shrink"])
def test_weights_that_cannot_be_read_are_named(
    verb: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, "llama")
    real = builtins.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith("model.safetensors"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refusing)
    keywords: dict[str, Any] = {"text": corpus, **SMALL} | (SHRINK if verb == "shrink" else {})
    with pytest.raises(InputError, match=r"cannot read .*model\.safetensors: Permission denied; check its permissions"):
        getattr(dg, verb)(tmp_path, **keywords)


# --- models without what is needed ------------------------------------------------------------------------------------


def test_the_weights_of_a_model_without_attention_are_refused(tmp_path: Path) -> None:
    saved(tiny_model("mamba"), tmp_path)
    with pytest.raises(InputError, match="does not know where a mamba model keeps its weights; gauge it on text"):
        dg.gauge(tmp_path, text="none", device="cpu")


def test_a_model_of_images_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=32)
    with quiet():
        ViTForImageClassification(config).save_pretrained(tmp_path)
    for text in (None, "none"):
        with pytest.raises(InputError, match="is a ViTForImageClassification, which reads images; give"):
            dg.gauge(tmp_path, text=text, device="cpu")


def test_weights_alone_need_a_known_architecture(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "olmo")
    with pytest.raises(InputError, match=r"--data none cannot be used for .*: depthgauge does not know where a olmo"):
        dg.gauge(tmp_path, text="none", device="cpu")


# --- models in memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_in_memory_is_gauged_like_its_files(name: str, tmp_path: Path, corpus: Path) -> None:
    from transformers import AutoTokenizer

    model = save_checkpoint(tmp_path, name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model.train()
    model.get_input_embeddings().eval()
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    keywords: dict[str, Any] = {"text": corpus, "tokens": 48, "window": 16}
    here = dg.gauge(model, tokenizer=tokenizer, **keywords)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    assert not model.get_input_embeddings().training
    there = dg.gauge(tmp_path, device="cpu", **keywords)
    ours, theirs = (result.to_json()["subjects"][0] for result in (here, there))
    assert ours["layers"] == theirs["layers"]
    assert here.settings.in_memory
    assert not there.settings.in_memory
    assert dg.gauge(model, text="none").subjects[0].name == here.subjects[0].name


def test_a_gauging_in_memory_is_resumed_for_the_same_weights_only(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    model = save_checkpoint(tmp_path / "model", "llama")
    keywords: dict[str, Any] = {"tokenizer": AutoTokenizer.from_pretrained(tmp_path / "model"), "text": corpus}
    keywords |= {"tokens": 48, "window": 16, "out": tmp_path / "r.json"}
    with monkeypatch.context() as patch:
        patch.setattr("depthgauge.workflows.gauge_checkpoint.subject_record", lambda *findings, **others: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dg.gauge(model, **keywords)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(InputError, match="was started with files"):
        dg.gauge(model, **keywords)
    with torch.no_grad():
        model.lm_head.weight.div_(2)
    assert dg.gauge(model, **keywords).subjects


def test_what_a_model_in_memory_does_not_take_is_refused(corpus: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(InputError, match="needs its tokenizer; give tokenizer="):
        dg.gauge(model, text=corpus)
    with pytest.raises(InputError, match="dtype applies to models that are loaded from disk"):
        dg.gauge(model, text="none", dtype="float32")
    for target in (3, object(), [model]):
        with pytest.raises(InputError, match="target must be a path, a name on the hub, a SelfAttentionNetwork"):
            dg.gauge(target)
