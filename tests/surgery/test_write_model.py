"""Writing a model: complete or absent, never over something else, with everything that belongs to it."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layered_models import layered_model, output_of
from safetensors.torch import load_file
from tiny_checkpoints import save_checkpoint, save_tokenizer
from tiny_gguf import write_gguf
from tiny_models import tokens

from depthgauge.checkpoints.load import Placement, Source, find, load_config, load_model, load_tokenizer, wrap
from depthgauge.errors import InputError, OutputError
from depthgauge.surgery import write_model as writer
from depthgauge.surgery.extract import extract
from depthgauge.surgery.model_card import CardFacts, contiguous, hub_name, mergekit_plan, model_card, ranges
from depthgauge.surgery.write_model import check_output_directory, remove_unfinished, write_model

HERE = Placement(device="cpu")


def loaded(path: Path) -> Any:
    source = find(path)
    return load_model(source, load_config(source, HERE), HERE)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def shrunk() -> Any:
    return extract(wrap(layered_model("llama", dtype=torch.float32)), (0, 2, 5))


def test_a_directory_keeps_what_belongs_to_its_model(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    save_checkpoint(folder, "llama")
    # As in many published models: transformers refuses to save a temperature without sampling.
    generation = '{"do_sample": false, "temperature": 0.6, "max_new_tokens": 7, "eos_token_id": [2, 5]}'
    (folder / "generation_config.json").write_text(generation)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (folder / "LICENSE").write_text("free")
    (folder / "training_args.bin").write_bytes(b"not ours")
    checkpoint = loaded(folder)
    tokenizer = load_tokenizer(checkpoint.source, HERE)
    write_model(
        extract(checkpoint, (0, 2)),
        checkpoint.source,
        tokenizer,
        out,
        {"README.md": "Δ", "a.json": "{}"},
        overwrite=False,
    )
    assert names(out) == {
        "config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "LICENSE", "README.md", "a.json",
    }  # fmt: skip
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert (out / "README.md").read_text("utf-8") == "Δ"
    again = loaded(out)
    assert again.layers == 2
    assert again.model.generation_config.max_new_tokens == 7
    other = load_tokenizer(again.source, HERE)
    assert other.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False) == "w1!"
    assert other("w1 w2")["input_ids"] == tokenizer("w1 w2")["input_ids"]
    assert checkpoint.model.generation_config.temperature == 0.6  # the model in memory is left as it was
    assert names(tmp_path) == {"model", "out"}


def test_a_gguf_source_gives_an_ordinary_checkpoint(tmp_path: Path) -> None:
    path, out = tmp_path / "tiny.gguf", tmp_path / "out"
    write_gguf(path, add_bos=True)
    checkpoint = loaded(path)
    tokenizer = load_tokenizer(checkpoint.source, HERE)
    tokenizer.chat_template = "{{ messages[0].content }}?"
    shrunk = extract(checkpoint, (0, 2))
    check_output_directory(out, checkpoint.source, overwrite=False)  # next to the file is not inside the model
    write_model(shrunk, checkpoint.source, tokenizer, out, {}, overwrite=False)
    again = loaded(out)
    ids = tokens()
    torch.testing.assert_close(output_of(again.model, ids), output_of(shrunk, ids), rtol=0, atol=0)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert again.model.generation_config.eos_token_id == checkpoint.model.generation_config.eos_token_id == 258
    other = load_tokenizer(again.source, HERE)
    assert other("ab c")["input_ids"] == tokenizer("ab c")["input_ids"]
    assert other.chat_template == tokenizer.chat_template


def test_a_model_from_memory_is_written_with_its_tokenizer(tmp_path: Path, shrunk: Any) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path / "tokenizer", special=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    write_model(shrunk, None, tokenizer, tmp_path / "out", {}, overwrite=False)
    other = load_tokenizer(find(tmp_path / "out"), HERE)
    assert other("w1 w2")["input_ids"] == tokenizer("w1 w2")["input_ids"]
    assert loaded(tmp_path / "out").model.generation_config.bos_token_id == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_and_tied_weights_are_kept_on_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    model = extract(wrap(layered_model("gemma", dtype=dtype)), (0, 3))
    write_model(model, None, None, tmp_path / "out", {}, overwrite=False)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert "lm_head.weight" not in stored
    assert torch.equal(stored["model.embed_tokens.weight"], model.lm_head.weight)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_shards_load(tmp_path: Path, shrunk: Any) -> None:
    write_model(shrunk, None, None, tmp_path / "out", {}, overwrite=False, max_shard="10KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    ids = tokens()
    torch.testing.assert_close(output_of(loaded(tmp_path / "out").model, ids), output_of(shrunk, ids), rtol=0, atol=0)


def test_files_have_the_default_permissions(tmp_path: Path, shrunk: Any) -> None:
    write_model(shrunk, None, None, tmp_path / "out", {"a.json": "{}"}, overwrite=False)
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_the_pipeline_of_a_sentence_model_is_copied(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_checkpoint(folder, "bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    outside = tmp_path / "private"
    outside.mkdir()
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "../private"}]')
    checkpoint = loaded(folder)
    write_model(extract(checkpoint, (1,)), checkpoint.source, None, tmp_path / "out", {}, overwrite=False)
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()
    assert "private" not in names(tmp_path / "out")


# --- output directories that cannot be used ---------------------------------------------------------------------------


def test_bad_output_directories_get_one_sentence(tmp_path: Path) -> None:
    model = tmp_path / "models" / "big"
    model.mkdir(parents=True)
    source = Source(model)
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(model)
    for out, complaint in {
        model: "is the model itself",
        tmp_path / "link": "is the model itself",
        tmp_path / "link" / "small": "is inside the model directory",
        model / "small": "is inside the model directory",
        tmp_path / "models": "contains the model",
        tmp_path / "file": "is a file; give the name of a directory",
        tmp_path / "there": "exists; use --overwrite to replace it, or give another --out",
        tmp_path / "no" / "small": f"create it: mkdir -p {tmp_path / 'no'}",
        tmp_path / "file" / "small": "there is no directory",
        tmp_path / ("x" * 300): "File name too long",
    }.items():
        with pytest.raises(InputError, match=complaint) as caught:
            check_output_directory(out, source, overwrite=False)
        assert "\n" not in str(caught.value)
    check_output_directory(tmp_path / "small", source, overwrite=False)
    check_output_directory(tmp_path / "there", source, overwrite=True)
    with pytest.raises(InputError, match="is the model itself"):
        check_output_directory(model, source, overwrite=True)
    gguf = Source(model, "a.gguf")
    with pytest.raises(InputError, match="contains the model"):
        check_output_directory(model, gguf, overwrite=True)
    assert names(tmp_path) == {"models", "file", "there", "link"}


def test_only_checkpoints_are_replaced(tmp_path: Path, shrunk: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="a directory with other files, not a checkpoint"):
        write_model(shrunk, None, None, out, {}, overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"
    (out / "config.json").write_text("{}")
    (out / "pytorch_model.bin").touch()
    write_model(shrunk, None, None, out, {}, overwrite=True)
    assert names(out) == {"config.json", "generation_config.json", "model.safetensors"}
    assert names(tmp_path) == {"out"}


def test_a_folder_that_cannot_be_written_is_reported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OutputError, match=r"cannot write .*out: Permission denied"):
        check_output_directory(tmp_path / "out", None, overwrite=False)


def test_a_disk_without_room_is_reported_first(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"it needs 1e6 TB, and .* of the disk are free"):
        check_output_directory(tmp_path / "out", None, overwrite=False, needed=10**18)


def test_small_sizes_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(OutputError, match=r"it needs 4\.12 MB, and 4\.1 kB of the disk are free; free some space"):
        check_output_directory(tmp_path / "out", None, overwrite=False, needed=4_120_000)


# --- failures in the middle -------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing(tmp_path: Path, shrunk: Any) -> None:
    """A limit on the size of files stops the writer inside the weights, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*out"):
            write_model(shrunk, None, None, tmp_path / "out", {}, overwrite=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == set()


@pytest.mark.parametrize("step", ["_write_generation_config", "_synchronize", "_move"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_checkpoint(
    step: str, failure: BaseException, tmp_path: Path, shrunk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")

    def fail(*args: Any) -> None:
        raise failure

    monkeypatch.setattr(writer, step, fail)
    with pytest.raises((OutputError, KeyboardInterrupt)) as caught:
        write_model(shrunk, None, None, out, {}, overwrite=True)
    if isinstance(failure, OSError):
        assert str(caught.value) == f"cannot write {out}: No space left on device"
    assert names(tmp_path) == {"out"}
    assert (out / "config.json").read_text() == "old"


def test_a_failed_replacement_restores_the_old_checkpoint(
    tmp_path: Path, shrunk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    rename, calls = os.rename, []

    def second_fails(start: Path, end: Path) -> None:
        calls.append(end)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(start, end)

    monkeypatch.setattr(writer.os, "rename", second_fails)
    with pytest.raises(OutputError, match="Input/output error"):
        write_model(shrunk, None, None, out, {}, overwrite=True)
    assert names(tmp_path) == {"out"}
    assert (out / "config.json").read_text() == "old"


KILLED = """
import sys, time
from pathlib import Path
from depthgauge.surgery import write_model as writer
class Model:
    generation_config = None
    def save_pretrained(self, folder, max_shard_size):
        (Path(folder) / "model.safetensors").write_bytes(b"half of the weights")
        print("writing", flush=True)
        time.sleep(60)
writer.write_model(Model(), None, None, sys.argv[1], {}, overwrite=True)
"""


def test_a_killed_process_leaves_no_final_directory(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = names(tmp_path)
    assert left.startswith(".")
    assert left.endswith(".partial")
    assert names(tmp_path / left) == {"model.safetensors"}  # it was killed in the middle
    (tmp_path / ".other.0123456789abcdef.partial").mkdir()
    (tmp_path / ".0123456789abcdef.partial").mkdir()  # what --overwrite was about to replace
    remove_unfinished(tmp_path / "out")
    assert names(tmp_path) == {".other.0123456789abcdef.partial", ".0123456789abcdef.partial"}


# --- the texts beside the model ---------------------------------------------------------------------------------------


def test_the_model_card_says_what_was_done() -> None:
    import yaml

    facts = CardFacts(
        name="Smol: 'one'", layers=30, base_model="org/Smol: 'one'", removed=(3, 7, 8, 9),
        repaired="least squares at every interface",
        objective="loss", before=2.5, after=2.75, texts=(("corpus.txt", 0.25), ("samples", 0.125)),
        guarantees=("On 95 % of windows the loss grows by at most 0.4.",), parameters=(100_000, 80_000),
        speed=(0.875, 0.75), dequantized=True, command="depthgauge shrink ./Smol --remove 4 --out small",
    )  # fmt: skip
    card = model_card(facts)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "org/Smol: 'one'", "library_name": "transformers", "tags": ["depthgauge", "pruned"],
    }  # fmt: skip
    for part in ("removed 4 of the 30 layers", "3, 7–9 (counted from 0)", "least squares", "2.5 before, 2.75 after",
                 "| corpus.txt | 0.25 |", "grows by at most 0.4.", "80,000 parameters instead of 100,000",
                 "0.875", "0.75", "dequantized", "    depthgauge shrink ./Smol", "depthgauge.json"):  # fmt: skip
        assert part in body, part
    plain = model_card(CardFacts("b", 6, (2,), None, "states", 0.0, 0.1))
    assert "The remaining weights are unchanged." in plain
    assert "Relative change of the final states" in plain
    assert "## Guarantee" not in plain
    assert "None" not in plain
    assert "base_model" not in plain


def test_the_base_model_is_a_name_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "local").mkdir(parents=True)
    names = {"org/name": "org/name", "HuggingFaceTB/SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M"}
    paths = ("models/local", "./models/local", "../name", "/models/name", "a/b/c", "name", "", None)
    for recorded in (*names, *paths):
        config = SimpleNamespace(_name_or_path=recorded)
        assert hub_name(config, None) == names.get(str(recorded))
        (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": recorded}))
        loaded = SimpleNamespace(_name_or_path=str(tmp_path))  # as transformers leaves it
        assert hub_name(loaded, Source(tmp_path)) == names.get(str(recorded))
    assert hub_name(SimpleNamespace(_name_or_path="org/name"), Source(tmp_path, "model.gguf")) is None


def test_the_plan_for_mergekit_keeps_the_same_layers() -> None:
    import yaml

    kept = [0, 1, 2, 5, 7, 8]
    plan = yaml.safe_load(mergekit_plan("a: b/c", "bfloat16", kept))
    assert plan["merge_method"] == "passthrough"
    assert plan["dtype"] == "bfloat16"
    sources = [entry for part in plan["slices"] for entry in part["sources"]]
    assert {entry["model"] for entry in sources} == {"a: b/c"}
    assert [layer for entry in sources for layer in range(*entry["layer_range"])] == kept
    assert len(sources) == 3
    assert contiguous([]) == []
    assert ranges([]) == "none"
