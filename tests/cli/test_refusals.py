"""Refusals that need no weights come at once: neither torch nor transformers is imported before them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import save_checkpoint
from tiny_gguf import write_gguf
from tiny_speech import save_wave

from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.source.model_files import check_config, check_gguf, is_known

# Runs each command of a JSON list and prints for each: its exit code, its error, and the slow modules that it imported.
SCRIPT = """
import contextlib, io, json, sys
from depthgauge.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:], said, code = words, io.StringIO(), None
    with contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    found.append([code, said.getvalue(), [name for name in ("torch", "transformers") if name in sys.modules]])
print(json.dumps(found))
"""
REFUSED = {
    "gauge nowhere/at/all": "cannot read nowhere/at/all",
    "gauge empty": "it contains no config.json",
    "gauge no-json": "cannot read config.json of no-json",
    "gauge list": "config.json of list must be a JSON object, got a list",
    "gauge no-type": "config.json of no-type has no model_type",
    "gauge unknown": "unknown is a 'fantasy' model, which transformers",
    "gauge code": "needs to run the Python code in its directory",
    "gauge pickled": "use --allow pickle",
    "gauge cut": "model.safetensors is cut off or damaged",
    "gauge no-shard": "no-shard lacks the file model-00001-of",
    "gauge cut-shard": "model-00002-of-00002.safetensors is cut off or damaged",
    "gauge wrong-index --device stream": "says that extra is in model-00002-of-00002.safetensors",
    "shrink no-shard --remove 1 --out new --text text.txt --device stream": "no-shard lacks the file model-00001-of",
    "shrink cut-shard --remove 1 --out new --text text.txt --device stream": "safetensors is cut off",
    "shrink wrong-index --remove 1 --out new": "which does not have it; download the files again",
    "gauge good --dtype half": "dtype must be one of",
    "gauge good --what-if nothing": "what-if must be one of",
    "gauge good --text nowhere.txt": "cannot read text nowhere.txt",
    "gauge good --out taken.json": "taken.json exists",
    "gauge foreign.gguf": "foreign.gguf is not a GGUF file",
    "gauge empty.gguf": "empty.gguf is not a GGUF file",
    "gauge cut.gguf": "cut.gguf is cut off: it has",
    "gauge org/nowhere": "it is not in the cache",
    "shrink good --remove 1 --out empty": "empty exists",
    "shrink good --remove 1 --out new.gguf": "a GGUF file can be written if the model is one",
    "shrink whole.gguf --remove 1 --out new.gguf --dtype Q3_K": "dtype must be one of Q4_0",
    "shrink good --remove 1 --out new --bos maybe": "bos must be one of",
    "shrink good --remove 1 --out new --evaluate no_such_task": "there is no task 'no_such_task'",
    "shrink good --remove 1 --text nowhere.txt --out new": "cannot read text nowhere.txt",
    "shrink unknown --remove 1 --out new": "unknown is a 'fantasy' model",
    "gauge vit --data nowhere": "cannot read text nowhere: No such file or directory",
    "gauge vit --data empty": "empty contains no images and no WAV files",
    "gauge vit --data photos --data nowhere.csv": "cannot read nowhere.csv",
    "gauge vit --data photos --data short.csv": "short.csv has no label for 1 image of photos, such as b.png",
    "gauge vit --data photos --data other.csv": "the label 'dog' of a.png is none of the 2 labels of the model",
    "gauge vit --data photos --data other.csv --data text.txt": "beside which one file of labels can be given",
    "gauge vit --data photos --bos no": "--bos is about text, and photos has images; leave it out",
    "gauge vit --data text.txt": "which reads images; give it a folder of images with --data DIR; text.txt has text",
    "gauge bare-vit --data photos --data other.csv": "bare-vit is a ViTModel; leave the file of labels out",
    "gauge vit": "vit is a ViTForImageClassification, which reads images; give it a folder of images with --data DIR",
    "gauge no-processor --data photos": "contains no image processor, expected preprocessor_config.json",
    "gauge good --data photos": "good is a LlamaForCausalLM, which reads text; give it text with --data FILE",
    "gauge clip --data photos": "clip is a CLIPModel with a vision tower and other parts",
    "gauge good --data nowhere.jsonl": "cannot read text nowhere.jsonl",
    "gauge good --data no.jsonl": "line 2 of no.jsonl is not JSON: Expecting property name",
    "gauge bart --data half.jsonl": "line 2 of half.jsonl lacks source or target; give both",
    "gauge good --data pairs.jsonl": "which reads text; give it text with --data FILE; pairs.jsonl has pairs",
    "gauge good --data other.csv": "other.csv is not plain text but comma-separated values",
    "gauge good --data text.txt --data pairs.jsonl": "gauge reads one text; give one file, or join the files",
    "gauge good --data text.txt --samples 3": "--samples is a number of images, labelled texts, pairs or recordings",
    "gauge good --data text.txt --stack encoder": "--stack is for encoder–decoder models",
    "gauge good --stack all": "stack must be one of decoder, encoder",
    "gauge bart": "which reads pairs of a source and a target; give it JSON lines with source and target",
    "gauge bart --data text.txt": "give it JSON lines with source and target, with --data FILE.jsonl; text.txt has",
    "gauge whisper --data recordings --data other.csv": "recordings has recordings, whose transcripts are beside them",
    "gauge whisper --data recordings": "whisper contains no feature extractor",
    "shrink whisper --remove 1 --out new --data photos": "which reads recordings with transcripts; give it a folder of",
    "shrink whisper --remove 1 --out new": "give it a folder of WAV files with transcripts, with --data DIR",
    "shrink vit --remove 1 --out new --data empty": "empty contains no images",
    "shrink vit --remove 1 --out new --data photos --data other.csv": "the label 'dog' of a.png is none of the 2",
    "shrink good --remove 1 --out new --data pairs.jsonl": "good is a LlamaForCausalLM, which reads text",
    "evaluate unknown": "unknown is a 'fantasy' model",
    "evaluate good --tasks no_such_task": "there is no task 'no_such_task'",
    "evaluate good --perplexity nowhere.txt": "cannot read text nowhere.txt",
    "shrink good --remove abc --out new": "remove must be a number of blocks from 1 on, or a share",
    "shrink good --remove 0 --out new": "remove must be a number of blocks from 1 on",
    "shrink good --remove 100% --out new": "a share of them below 100%",
    "shrink good --remove 1.5 --out new": "got '1.5'",
    "shrink good --remove abc --out new.json": "remove must be a number of blocks",
    "shrink good --remove 1 --out new --allow pickles": "allow must be one of code, pickle, unused, unread",
    "shrink good --remove 1 --keep abc --out new": "keep must name blocks, such as 12-18",
    "shrink good --remove-layers 3-1 --out new": "remove-layers: 3-1 is not a block or an increasing range",
    "shrink good --remove 0,2 --out new": "remove must be a number of blocks",
    "shrink good --max-bytes much --out new": "max-bytes must be a size",
    "shrink good --remove 1 --sampled 0 --out new": "--sampled 0 divides the windows between --text and the model",
    "shrink good --remove 1 --text text.txt --text ./text.txt --out new": "the text text.txt is given twice",
    "shrink good --remove 1 --window 1 --out new": "window must be a whole number of at least 2, got 1",
    "shrink good --remove 1 --device stream --out new": "does not sample text from the model; give --text",
    "shrink good --remove 1 --device stream --text text.txt --recover 2M --out new": "leave --recover out",
    "shrink good --remove 1 --device stream --text text.txt --dtype float16 --out new": "good cannot be streamed",
    "shrink good --remove 1 --tokenizer empty --out new": "empty is none: it has none of tokenizer.json",
    "shrink good --remove 1 --report page.txt --out new": "page.txt is not the name of one; give a name that ends with",
    "gauge good --report page.txt": "--report writes a page, and page.txt is not the name of one",
    "gauge --report page": "--report writes a page, and page is not the name of one",
    "gauge good --window 0": "window must be a whole number of at least 2, got 0",
    "gauge good --tokens 1": "tokens must be a whole number of at least 2, got 1",
    "gauge good --device stream --dtype float16": "good cannot be streamed: its dtype is the stored one",
    "gauge good --data none --tokens 64": "--tokens applies to text, and --data none reads none",
    "gauge good --data none --what-if none": "--what-if applies to text, and --data none reads none",
    "gauge good --data none --seed 3": "--seed applies to text, and --data none reads none",
    "gauge vit --data photos --samples 0": "samples must be a whole number of at least 1, got 0",
    "gauge --samples 0": "samples must be a whole number of at least 1, got 0",
    "gauge --tokens 0": "tokens must be a whole number of at least 1, got 0",
    "gauge --radius nan": "radius must be a positive number, got nan",
    "gauge --seed -1": "seed must be a whole number from 0",
    "gauge net.safetensors --input x.safetensors --seed 3": "--seed describes random inputs and --input reads them",
    "evaluate good --limit 60 --perplexity text.txt": "--limit has no effect without --tasks; leave it out",
    "evaluate good --confidence 0.9": "--confidence has no effect without --tasks and a second model; leave it out",
    "evaluate good bare-vit --confidence 0.9 --perplexity text.txt": "--confidence has no effect without --tasks",
    "evaluate good --perplexity text.txt --window 1": "window must be a whole number of at least 2, got 1",
    "evaluate good --perplexity text.txt --perplexity photos/../text.txt": "has the name 'text.txt' twice",
    "evaluate good --perplexity :text.txt": "has the name '' twice, or none; give each text its own, NAME:FILE",
    "evaluate good --perplexity text.txt --device stream --dtype float16": "good cannot be streamed: its dtype",
    "evaluate good --perplexity text.txt --report page.txt": "--report writes a page, and page.txt is not the name",
    "evaluate good --perplexity text.txt --tokenizer empty": "empty is none: it has none of tokenizer.json",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a good checkpoint and with damaged ones."""
    folder = tmp_path_factory.mktemp("refused")
    save_checkpoint(folder / "good", "llama")
    configs = {
        "no-json": "{",
        "list": "[]",
        "no-type": "{}",
        "unknown": '{"model_type": "fantasy"}',
        "code": '{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}',
        "pickled": '{"model_type": "llama"}',
        "cut": '{"model_type": "llama"}',
        "no-shard": '{"model_type": "llama"}',
    }
    weights = (folder / "good" / "model.safetensors").read_bytes()
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
        file = {"pickled": "pytorch_model.bin", "no-shard": "unrelated"}.get(name, "model.safetensors")
        (folder / name / file).write_bytes(weights[:-1] if name == "cut" else weights)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "no-shard" / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, tensors in {"cut-shard": (), "wrong-index": ("extra",)}.items():
        _save_shards(folder / name, tensors, cut=name == "cut-shard")
    _save_other_inputs(folder, weights)
    write_gguf(folder / "whole.gguf", add_bos=True)
    (folder / "cut.gguf").write_bytes((folder / "whole.gguf").read_bytes()[:-1000])
    (folder / "foreign.gguf").write_bytes(b"something else")
    (folder / "empty.gguf").touch()
    (folder / "taken.json").touch()
    (folder / "empty").mkdir()
    return folder


def _save_shards(folder: Path, extra: tuple[str, ...], cut: bool) -> None:
    """Save a checkpoint in two files, with an index that names `extra` tensors; cut the last tensor off the second."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    files = {name: f"model-{number:05}-of-00002.safetensors" for number, name in enumerate("ab", 1)}
    for name, file in files.items():
        save_file({name: np.ones(100)}, folder / file)
    index = {"weight_map": files | dict.fromkeys(extra, files["b"])}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if cut:
        os.truncate(folder / files["b"], (folder / files["b"]).stat().st_size - 400)


def _save_other_inputs(folder: Path, weights: bytes) -> None:
    """Save models of images, of speech and of pairs as far as refusals read them, and inputs for them."""
    names = {"label2id": {"cat": 0, "tabby": 1}}
    models = {
        "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "patch_size": 16, **names},
        "no-processor": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "patch_size": 16},
        "bare-vit": {"model_type": "vit", "architectures": ["ViTModel"]},
        "clip": {"model_type": "clip", "architectures": ["CLIPModel"], "vision_config": {}},
        "bart": {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True},
        "whisper": {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "num_mel_bins": 80,
            "is_encoder_decoder": True,
        },
    }
    for name, config in models.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").write_bytes(weights)
        if name not in ("no-processor", "whisper"):
            (folder / name / "preprocessor_config.json").write_text("{}")
    files = {
        "photos/a.png": "", "photos/b.png": "", "short.csv": "a.png,cat\n", "other.csv": "a.png,dog\nb.png,cat\n",
        "pairs.jsonl": '{"source": "a", "target": "b"}\n', 
        "half.jsonl": '{"source": "a", "target": "b"}\n{"source": "a"}\n',
        "text.txt": "some text", "no.jsonl": '{"source": "a", "target": "b"}\n{\n', "recordings/a.txt": "text",
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    save_wave(folder / "recordings" / "a.wav", [0] * 100)


def test_refusals_import_neither_torch_nor_transformers(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    words = json.dumps([command.split() for command in REFUSED])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, words],
        cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for (command, sentence), (code, said, slow) in zip(REFUSED.items(), json.loads(done.stdout), strict=True):
        assert code == 2, command
        last = said.splitlines()[-1]  # on a busy machine, a line of progress may come before
        assert last.startswith("error: "), command
        assert sentence in last, command
        assert slow == [], command
    assert sorted(folder.rglob("*")) == before


def test_a_gguf_file_cut_anywhere_is_refused(folder: Path, tmp_path: Path) -> None:
    whole, path = (folder / "whole.gguf").read_bytes(), tmp_path / "cut.gguf"
    check_gguf(folder / "whole.gguf", "whole.gguf")
    for length in [4, 7, 23, 24, *range(30, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf is cut off.*; download it again") as caught:
            check_gguf(path, "cut.gguf")
        assert f"{length:,} bytes" in str(caught.value)
    path.write_bytes(whole[:-20])
    with pytest.raises(CheckpointError, match="the last 20 of its tensors are missing"):
        check_gguf(path, "cut.gguf")
    path.write_bytes(whole[:4] + b"\x01" + whole[5:])
    with pytest.raises(CheckpointError, match="version 1 of the GGUF format"):
        check_gguf(path, "old.gguf")


def test_the_source_of_transformers_names_every_model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    types = list(transformers.CONFIG_MAPPING)
    assert all(map(is_known, types))
    monkeypatch.delitem(sys.modules, "transformers")
    assert all(map(is_known, types))
    assert not is_known("fantasy")
    assert not is_known(None)


def test_a_type_that_was_registered_is_known(tmp_path: Path) -> None:
    import transformers

    (tmp_path / "config.json").write_text('{"model_type": "registered"}')
    with pytest.raises(CheckpointError, match="does not know"):
        check_config(tmp_path / "config.json", "it", trust_remote_code=False)

    class RegisteredConfig(transformers.LlamaConfig):  # type: ignore[misc]
        model_type = "registered"

    transformers.AutoConfig.register("registered", RegisteredConfig)
    try:
        check_config(tmp_path / "config.json", "it", trust_remote_code=False)
    finally:
        del transformers.CONFIG_MAPPING._extra_content["registered"]
