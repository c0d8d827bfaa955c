"""Loading checkpoints: what loads, what is refused with which message, the probe, and windows of text."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from edited_outputs import edited_outputs
from tiny_checkpoints import save_checkpoint, text_of
from tiny_gguf import write_gguf
from tiny_models import tiny_model, tokens

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks.attention_calls import attending
from depthgauge.checkpoints.blocks.block_runner import Stack
from depthgauge.checkpoints.blocks.probe import Probed, probe
from depthgauge.checkpoints.inputs import text_files as text
from depthgauge.checkpoints.inputs.windows import read_windows, special_tokens
from depthgauge.checkpoints.source.hub import resolve
from depthgauge.checkpoints.source.library import short
from depthgauge.checkpoints.source.model_class import context_length
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.tasks.language import plan_start
from depthgauge.checkpoints.weights import load
from depthgauge.checkpoints.weights.load import Placement, check_memory, load_config, load_model, load_tokenizer, wrap
from depthgauge.checkpoints.weights.stored_weights import count_parameters, free_memory
from depthgauge.results.labels import WHAT_IFS

HERE = Placement(device="cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save_checkpoint(folder, "bert")
    return folder


def loaded(folder: Path, placement: Placement = HERE) -> Any:
    source = find(folder)
    return load_model(source, load_config(source, placement), placement)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_directory_loads_as_it_was_saved(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    checkpoint = loaded(folder)
    original = tiny_model(name)
    assert checkpoint.objective == ("loss" if name == "llama" else "states")
    assert checkpoint.name == folder.name
    for key, value in original.state_dict().items():
        assert torch.equal(checkpoint.model.state_dict()[key], value)
    described = checkpoint.describe()
    assert described.layers == 3
    assert described.heads == 4
    assert described.kv_heads == (2 if name == "llama" else 4)
    assert described.dtype == "float32"
    assert described.parameters == sum(p.numel() for p in original.parameters())
    assert not checkpoint.model.training


def test_the_requested_dtype_is_used(llama: Path) -> None:
    assert loaded(llama, Placement("float64", "cpu")).describe().dtype == "float64"
    with pytest.raises(InputError, match=r"device 'cuda:77' cannot be used: .*; choose a device of this machine"):
        loaded(llama, Placement(device="cuda:77"))


def test_a_device_map_is_passed_through(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    given: dict[str, Any] = {}
    real = transformers.AutoModelForCausalLM.from_pretrained

    def watched(*args: Any, **keywords: Any) -> Any:
        given.update(keywords)
        return real(*args, **keywords)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", watched)
    monkeypatch.setattr(load, "free_memory", lambda _: 0)  # with a device map, the model need not fit on one device
    assert probe(loaded(llama, Placement(device_map="cpu")), tokens(batch=1)) == Probed(None, None)
    assert given["device_map"] == "cpu"
    assert given["trust_remote_code"] is False
    assert given["local_files_only"] is True


def test_a_model_offloaded_by_accelerate_gives_the_same_what_ifs() -> None:
    """Accelerate gives every module its own forward, which moves the weights in."""
    from accelerate import cpu_offload

    model, ids = tiny_model("llama"), tokens(batch=1)
    outputs = []
    for offloaded in (False, True):
        if offloaded:
            cpu_offload(model, execution_device=torch.device("cpu"))
            assert "forward" in model.model.layers[0].self_attn.q_proj.__dict__
        with attending(model) as session:
            outputs.append([edited_outputs(wrap(model), ids, kind, [1], session)[0] for kind in WHAT_IFS])
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def test_a_decoder_without_its_head_is_measured_by_its_states(tmp_path: Path) -> None:
    from transformers import LlamaModel

    model = tiny_model("llama").model
    assert isinstance(model, LlamaModel)
    model.save_pretrained(tmp_path)
    checkpoint = loaded(tmp_path)
    assert checkpoint.objective == "states"
    assert isinstance(checkpoint.model, LlamaModel)
    assert probe(checkpoint, tokens(batch=1)) == Probed(None, None)
    with attending(checkpoint.model) as session, torch.no_grad():
        output = Stack(checkpoint, session).run(tokens(batch=1))
        assert torch.allclose(output, model(tokens(batch=1)).last_hidden_state, atol=1e-5)


def test_remote_code_is_not_run_unless_allowed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(InputError, match=r"needs to run the Python code in its directory; .* use --allow code"):
        resolve(tmp_path)
    resolve(tmp_path, trust_remote_code=True)


@pytest.mark.parametrize("named", ["MistralForCausalLM", "BertForMaskedLM", "ViTModel"])
def test_a_class_of_another_family_is_refused(named: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    with pytest.raises(InputError, match=rf"the model_type is 'llama', and architectures names a {named}; correct"):
        load_config(find(tmp_path), HERE)


def test_missing_weights_are_noticed(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_checkpoint(tmp_path, "llama", tokenizer=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 weight of a LlamaForCausalLM, such as model\.layers\.1\.mlp\.up"):
        loaded(tmp_path)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    stored = config["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": stored + 8}))
    with pytest.raises(InputError) as caught:
        loaded(tmp_path)
    wide = config["hidden_size"]
    assert f"down_proj.weight has the shape [{wide}, {stored}]" in str(caught.value)
    assert f"the configuration asks for [{wide}, {stored + 8}]" in str(caught.value)
    assert "report" not in str(caught.value)


def test_no_error_points_to_a_report_that_is_not_shown() -> None:
    from transformers.utils import loading_report

    said = re.findall(r'"([^"]*)"\s+"(the above report!)"', Path(loading_report.__file__).read_text("utf-8"))
    assert said, "transformers has changed these sentences"
    for sentence in map("".join, said):
        assert "report" in sentence
        assert "report" not in short(RuntimeError(sentence))
    assert short(RuntimeError("For details look at the above report!")) == "RuntimeError"


def test_paths_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        find(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"contains no config\.json"):
        find(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"contains no weights that transformers reads.*; download the complete"):
        find(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="use --allow pickle to read them, or convert them to safetensors"):
        find(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match="cannot load the configuration of"):
        load_config(find(tmp_path), HERE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(InputError, match="which reads pairs of a source and a target; give it JSON lines"):
        load_config(find(tmp_path), HERE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match=r"contains no tokenizer, expected one of tokenizer\.json"):
        load_tokenizer(find(tmp_path), HERE)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot load the tokenizer of"):
        load_tokenizer(find(tmp_path), HERE)
    with pytest.raises(InputError, match="cannot load the weights of"):
        load_model(find(tmp_path), load_config(find(tmp_path), HERE), HERE)


def test_gguf_files_are_recognised(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        find(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGML1234")
    with pytest.raises(InputError, match="is not a GGUF file: it does not start with the bytes GGUF"):
        find(tmp_path / "m.gguf")


def test_a_gguf_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    write_gguf(tmp_path / "m.gguf", add_bos=True)
    parsed, parse = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: parsed.append(path) or parse(path))
    source = find(tmp_path / "m.gguf")
    config = load_config(source, HERE)
    plan_start("auto", source, load_tokenizer(source, HERE))
    load_model(source, config, HERE)
    assert parsed == [tmp_path / "m.gguf"]
    assert "reader" not in source.__dict__  # its memory is freed
    assert gguf.GGUFReader is not parse


def test_a_model_too_large_is_refused_before_it_is_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find(llama)
    count, stored = count_parameters(source)
    assert count == sum(p.numel() for p in tiny_model("llama").parameters())
    assert stored == 4 * count
    check_memory(source, HERE)
    monkeypatch.setattr(load, "free_memory", lambda _: 4 * count)
    with pytest.raises(
        InputError, match=rf"is too large: {count:,} parameters need .* kB, and .* kB are free on cpu; use --dtype "
    ):
        load_model(source, load_config(source, HERE), HERE)
    check_memory(source, Placement("bfloat16", "cpu"))
    monkeypatch.setattr(load, "free_memory", lambda _: count)
    with pytest.raises(InputError, match=r"are free on cpu; use --device spread or a larger machine"):
        check_memory(source, Placement("bfloat16", "cpu"))


def test_free_memory_is_plausible() -> None:
    assert 10**6 < free_memory() < 10**15


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"the extra `models`; install it with `pip install .*'transformers>="):
        load_config(find(llama), HERE)


# --- the probe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "calls"), [("mpnet", 0), ("bloom", 0), ("falcon", 0), ("lfm2", 1)])
def test_a_model_that_bypasses_the_interface_is_not_observable(name: str, calls: int) -> None:
    model = tiny_model(name)
    before = model.config._attn_implementation
    found = probe(wrap(model), tokens(batch=1))
    bypassed = f"{type(model).__name__} bypasses transformers' attention interface: {calls} of its 3 layers call it"
    assert found == Probed(bypassed, None)
    assert model.config._attn_implementation == before


def test_attention_with_sinks_is_not_observable() -> None:
    found = probe(wrap(tiny_model("gpt_oss")), tokens(batch=1))
    assert found.attention is not None
    assert "GptOssForCausalLM uses another form of attention: expected 3 attention calls" in found.attention
    assert found.blocks is None


def test_a_model_with_unsupported_attention_is_not_observable(monkeypatch: pytest.MonkeyPatch) -> None:
    from depthgauge.checkpoints.blocks import attention_calls

    plain = attention_calls.attention_call
    monkeypatch.setattr(attention_calls, "attention_call", lambda q, *rest: plain(1.5 * q, *rest))
    found = probe(wrap(tiny_model("llama")), tokens(batch=1))
    assert re.match(r"LlamaForCausalLM uses another form of attention: .* got 3 calls", found.attention or "")
    assert found.blocks is None
    with pytest.raises(InputError, match=r"its blocks cannot be rerun \(its states are not arranged by window"):
        probe(wrap(tiny_model("xlnet")), tokens(batch=1))
    with pytest.raises(InputError, match=r"AlbertModel cannot be gauged: its attention weights are not obs"):
        probe(wrap(tiny_model("albert")), tokens(batch=1))


def test_families_outside_the_table_can_be_probed() -> None:
    assert wrap(tiny_model("olmo")).family is None
    assert probe(wrap(tiny_model("olmo")), tokens(batch=1)) == Probed(None, None)
    assert probe(wrap(tiny_model("albert")), tokens(batch=1)) == Probed(None, "its blocks are not kept in one list")


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = tiny_model("mistral")
    before = model.config._attn_implementation
    probe(wrap(model), tokens(batch=1))
    assert model.config._attn_implementation == before


# --- text ------------------------------------------------------------------------------------------------------------


def windows_of(folder: Path, path: Path | None, **asked: Any) -> torch.Tensor:
    tokenizer = load_tokenizer(find(folder), HERE)
    settings = {"tokens": 64, "window": 16, "context": 64, "seed": 0} | asked
    return read_windows(tokenizer, path, **settings).ids


def test_windows_are_pieces_of_the_text(llama: Path, bert: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text_of(100), encoding="utf-8")
    tokenizer = load_tokenizer(find(llama), HERE)
    ids = torch.tensor(tokenizer(text_of(100))["input_ids"])
    assert torch.equal(windows_of(llama, tmp_path / "t", tokens=96), ids[:96].reshape(6, 16))
    chosen = windows_of(llama, tmp_path / "t", tokens=40)
    assert chosen.shape == (2, 16)
    assert all(any(torch.equal(row, one) for one in ids[:96].reshape(6, 16)) for row in chosen)
    assert not torch.equal(chosen, windows_of(llama, tmp_path / "t", tokens=40, seed=1))
    assert windows_of(llama, tmp_path / "t", tokens=10**6).shape == (6, 16)
    wrapped = windows_of(bert, tmp_path / "t")
    assert special_tokens(load_tokenizer(find(bert), HERE)) == ([1], [2])
    assert wrapped.shape == (4, 16)
    assert set(wrapped[:, 0].tolist()) == {1}
    assert set(wrapped[:, -1].tolist()) == {2}


def test_windows_by_default(llama: Path) -> None:
    assert windows_of(llama, None, tokens=2048, window=None, context=2048).shape == (8, 256)
    assert windows_of(llama, None, tokens=10**6, window=None, context=2048).shape[1] == 512
    assert windows_of(llama, None, tokens=2048, window=None, context=64).shape == (32, 64)
    assert windows_of(llama, None, tokens=256, window=None).shape == (4, 64)
    assert windows_of(llama, None, tokens=32, window=None).shape == (1, 32)


def test_unusable_text_is_refused(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(InputError, match="cannot read text"):
        windows_of(llama, path)
    path.write_text(text_of(15))
    with pytest.raises(InputError, match="has 15 tokens, but one window needs 16; use a longer text"):
        windows_of(llama, path)
    path.write_bytes(b"w1 \xff w2")
    with pytest.raises(InputError, match="is not UTF-8 text: invalid start byte at byte 3"):
        windows_of(llama, path)
    with pytest.raises(InputError, match="window must be at most 64 for this model, got 65"):
        windows_of(llama, path, window=65)


def test_large_texts_are_read_in_pieces(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    (tmp_path / "t").write_text("é " + text_of(30_000), encoding="utf-8")
    found = windows_of(llama, tmp_path / "t", tokens=80)
    assert found.shape == (5, 16)
    assert (found > 3).all()  # no word was cut, so no token is [UNK]
    assert not torch.equal(found, windows_of(llama, tmp_path / "t", tokens=80, seed=5))
    (tmp_path / "t").write_text("é" * 5000, encoding="utf-8")
    with pytest.raises(InputError, match="one window needs 16"):
        windows_of(llama, tmp_path / "t", tokens=80)
    (tmp_path / "t").write_bytes(b"\xff\xfe\x00" * 3000)
    with pytest.raises(InputError, match="is not UTF-8 text"):
        windows_of(llama, tmp_path / "t", tokens=80)


def test_context_of_families_whose_positions_start_late() -> None:
    assert context_length(tiny_model("llama").config) == 64
    assert context_length(tiny_model("roberta").config) == 63
    assert context_length(tiny_model("gpt2").config) == 64
    assert context_length(tiny_model("xlnet").config) is None


def test_pickled_weights_are_read_only_if_allowed(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"its weights are pickled \(\*\.bin\): use --allow pickle to read them"):
        find(tmp_path)
    source = find(tmp_path, allow_pickle=True)
    assert count_parameters(source)[0] == sum(tensor.numel() for tensor in model.state_dict().values())
    loaded = load_model(source, load_config(source, HERE), HERE)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)


class Attack:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("hacked"),)


def test_code_in_pickled_weights_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"x": Attack()}, tmp_path / "pytorch_model.bin")
    source = find(tmp_path, allow_pickle=True)
    with pytest.raises(InputError, match="weights"):
        load_model(source, load_config(source, HERE), HERE)
    assert not (tmp_path / "hacked").exists()
