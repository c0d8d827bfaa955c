"""Writing a model: complete or absent, never over something else, with everything that belongs to it."""

import copy
import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import exit_code, forked
from layered_models import layered_model, output_of
from safetensors.torch import load_file
from shrink_documents import DOCUMENT, encoder
from tiny_checkpoints import save_checkpoint, save_tokenizer
from tiny_gguf import write_gguf
from tiny_models import tokens
from written_models import write_model

from depthgauge.base.errors import InputError, OutputError
from depthgauge.base.format import ranges
from depthgauge.checkpoints.source.model_files import Source, find
from depthgauge.checkpoints.weights.load import Placement, load_config, load_model, load_tokenizer, wrap
from depthgauge.results.shrink_document import guarantee_sentences, texts_caption, times_sentence
from depthgauge.results.shrink_record import check_shrink
from depthgauge.surgery import write_model as writer
from depthgauge.surgery.extract import extract
from depthgauge.surgery.write_model import check_output_directory, remove_unfinished
from depthgauge.surgery.write_shrunk import hub_name, mergekit_plan, model_card

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
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "../private"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
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
    with pytest.raises(InputError, match=r"do not belong to a checkpoint, thesis\.tex; --overwrite replaces"):
        write_model(shrunk, None, None, out, {}, overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"
    (out / "thesis.tex").unlink()
    old_checkpoint(out)
    write_model(shrunk, None, None, out, {}, overwrite=True)
    assert names(out) == {"config.json", "generation_config.json", "model.safetensors"}
    assert names(tmp_path) == {"out"}


def old_checkpoint(out: Path) -> None:
    """Make the directory of a checkpoint without its content."""
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text('{"model_type": "llama"}')
    (out / "model.safetensors").write_bytes(b"old")


@pytest.mark.parametrize(
    "foreign",
    [".git/HEAD", "notes.txt", "1_Pooling/config.json", "tokenizer/notes.txt", "model.ckpt", "vocab_of_my_thesis.txt"],
)
def test_a_checkpoint_with_another_file_is_not_replaced(tmp_path: Path, shrunk: Any, foreign: str) -> None:
    out = tmp_path / "out"
    old_checkpoint(out)
    (out / foreign).parent.mkdir(exist_ok=True)
    (out / foreign).write_text("mine")
    with pytest.raises(InputError, match=rf"do not belong to a checkpoint, {re.escape(foreign)}; "):
        write_model(shrunk, None, None, out, {}, overwrite=True)
    assert (out / foreign).read_text() == "mine"
    assert (out / "model.safetensors").read_bytes() == b"old"


@pytest.mark.parametrize("config", ['{"editor.fontSize": 12}', "not JSON", "[1]"])
def test_a_config_of_something_else_is_no_checkpoint(tmp_path: Path, shrunk: Any, config: str) -> None:
    out = tmp_path / "out"
    old_checkpoint(out)
    (out / "config.json").write_text(config)
    with pytest.raises(InputError, match="is not a checkpoint"):
        write_model(shrunk, None, None, out, {}, overwrite=True)
    (out / "config.json").write_text('{"model_type": "llama"}')
    (out / "model.safetensors").unlink()
    with pytest.raises(InputError, match="is not a checkpoint: it has no weights"):
        write_model(shrunk, None, None, out, {}, overwrite=True)
    assert names(out) == {"config.json"}


def test_a_file_that_appears_during_the_work_is_kept(tmp_path: Path, shrunk: Any) -> None:
    out = tmp_path / "out"
    old_checkpoint(out)

    def verify(folder: Path) -> dict[str, str]:
        (out / "notes.txt").write_text("mine")
        return {}

    with pytest.raises(InputError, match=r"notes\.txt"):
        write_model(shrunk, None, None, out, {}, overwrite=True, verify=verify)
    assert names(out) == {"config.json", "model.safetensors", "notes.txt"}
    assert names(tmp_path) == {"out"}


def test_everything_that_is_copied_may_be_replaced(tmp_path: Path, shrunk: Any) -> None:
    """A model that was written with all its companions is a checkpoint for `--overwrite`."""
    folder, out = tmp_path / "model", tmp_path / "out"
    save_checkpoint(folder, "bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("x")
    (folder / "LICENSE.txt").write_text("x")
    checkpoint = loaded(folder)
    documents = {"README.md": "x", "depthgauge.json": "{}", "plan.mergekit.yaml": "x"}
    for _ in range(2):
        write_model(extract(checkpoint, (1,)), checkpoint.source, None, out, documents, overwrite=True)
    assert {"1_Pooling", "additional_chat_templates", "LICENSE.txt", *documents} <= names(out)


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
    old_checkpoint(out)

    def fail(*args: Any) -> None:
        raise failure

    monkeypatch.setattr(writer, step, fail)
    with pytest.raises((OutputError, KeyboardInterrupt)) as caught:
        write_model(shrunk, None, None, out, {}, overwrite=True)
    if isinstance(failure, OSError):
        assert str(caught.value) == f"cannot write {out}: No space left on device"
    assert names(tmp_path) == {"out"}
    assert (out / "model.safetensors").read_bytes() == b"old"


def test_a_failed_replacement_restores_the_old_checkpoint(
    tmp_path: Path, shrunk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    old_checkpoint(out)
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
    assert (out / "model.safetensors").read_bytes() == b"old"


class KilledModel:
    """A model whose process is killed while its weights are written."""

    generation_config = None

    def save_pretrained(self, folder: str, max_shard_size: str) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half of the weights")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_no_final_directory(tmp_path: Path) -> None:
    def run() -> None:
        with writer.written_model(KilledModel(), None, None, tmp_path / "out", overwrite=True):
            pass

    assert exit_code(forked(run)) == -signal.SIGKILL
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

    document = copy.deepcopy(DOCUMENT)
    document["plan"] |= {"model": "/somewhere/Smol: 'one'.gguf"}
    record = check_shrink(copy.deepcopy(document))
    for one in (document["texts"][0], document["plan"]["calibration"]["sources"][0]):
        one["name"] = "/somewhere/else/corpus.txt"
    card = model_card(check_shrink(document), "org/Smol: 'one'")
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "org/Smol: 'one'", "library_name": "transformers", "tags": ["depthgauge", "pruned"],
    }  # fmt: skip
    for part in (f"removed {len(record.removed)} of the {record.layers_before} layers", "(counted from 0)",
                 ranges(sorted(record.removed)), "were repaired: ", "trained on 2,000,000 tokens",
                 "| your text (corpus.txt) | 80 | 3.51 | 3.91 | 0.401 [0.36, 0.445] | abababababababab… |",
                 texts_caption(record), times_sentence(record),
                 *guarantee_sentences(record), f"{record.parameters.after:,} parameters instead of",
                 "| prefill | 812 ms | 634 ms | 0.781 [0.763, 0.8] |", "dequantized",
                 "    depthgauge shrink Smol: 'one'.gguf --remove depthgauge.json"):  # fmt: skip
        assert part in body, part
    assert "/somewhere" not in card
    bare = encoder() | {"guarantee": None, "repaired": False}
    plain = model_card(check_shrink(bare), None)
    assert "| your text (corpus.txt) | 120 | 0.313 [0.291, 0.334] | abababababababab… |" in plain
    assert "The remaining weights are unchanged." in plain
    assert "Relative change of the final states" in plain
    for missing in ("With confidence", "None", "base_model", "trained", "dequantized", "generation"):
        assert missing not in plain


def test_the_base_model_is_a_name_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "local").mkdir(parents=True)
    names = {"org/name": "org/name", "HuggingFaceTB/SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M"}
    paths = ("models/local", "./models/local", "../name", "/models/local", "a/b/c", "name", "", None)
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
