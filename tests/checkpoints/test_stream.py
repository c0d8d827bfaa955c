"""Models whose weights stay on the disk compute what they compute in memory."""

import gc
import os
import re
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from safetensors.torch import save_file
from tiny_checkpoints import save_checkpoint, text_of
from tiny_gguf import write_gguf
from tiny_models import tokens
from torch import nn
from transformers import modeling_gguf_pytorch_utils as gguf_utils

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.base.progress import silent
from depthgauge.checkpoints.blocks.circuits import HeadWeights
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.source.model_files import Source, find
from depthgauge.checkpoints.weights import load
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, blocks_of, fitted, load_config, load_model
from depthgauge.checkpoints.weights.stored_weights import Stream, reader
from depthgauge.cli.main import main
from depthgauge.workflows import gauge_checkpoint
from depthgauge.workflows.gauge_checkpoint import measure_weights

STREAMED = Placement(device="cpu", stream=True)


def loaded(folder: Path, placement: Placement = STREAMED) -> Checkpoint:
    source = find(folder)
    return load_model(source, load_config(source, placement), placement)


def saved(folder: Path, name: str) -> Path:
    save_checkpoint(folder, name)
    return folder


@torch.no_grad()
def output(checkpoint: Checkpoint) -> torch.Tensor:
    found: Any = checkpoint.model(tokens(batch=2))
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bert", "mixtral"])
def test_a_streamed_model_computes_what_it_computes_in_memory(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name)
    streamed, resident = loaded(folder), loaded(folder, Placement(device="cpu"))
    assert streamed.stream is not None
    assert not any(weight.is_meta for weight in streamed.model.parameters())
    assert torch.equal(output(streamed), output(resident))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_gguf_file_is_unpacked_block_by_block(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than one block is in memory, the numbers are those of a model in memory, and nothing is left behind."""
    file, temporary = tmp_path / "model.gguf", tmp_path / "temporary"
    write_gguf(file, add_bos=False, family=family, types={"ffn_down": "Q8_0"})
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    unpack, together = gguf_utils.load_gguf_checkpoint, list[set[str]]()

    def counted(*args: Any, **keywords: Any) -> Any:
        found = unpack(*args, **keywords)
        if found.get("tensors"):
            together.append({name.split(".")[2] for name in found["tensors"] if ".layers." in name})
        return found

    monkeypatch.setattr(gguf_utils, "load_gguf_checkpoint", counted)
    streamed = loaded(file)
    assert sorted(map(sorted, together)) == [[], ["0"], ["1"], ["2"]]
    assert streamed.source == find(file)
    assert len([*temporary.glob("depthgauge-*/*.safetensors")]) == 4
    assert torch.equal(output(streamed), output(loaded(file, Placement(device="cpu"))))
    assert loaded(file, replace(STREAMED, dtype="bfloat16")).model.dtype == torch.bfloat16
    del streamed
    gc.collect()
    assert not [*temporary.glob("depthgauge-*")]


def test_a_disk_without_room_for_an_unpacked_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", add_bos=False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"unpacked, it takes .*, and 1 kB are free .*; set TMPDIR to"):
        loaded(tmp_path / "model.gguf")


def test_a_terminated_command_removes_the_unpacked_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", add_bos=False)
    temporary, seen = tmp_path / "temporary", list[Path]()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(
        "sys.argv", ["depthgauge", "gauge", str(tmp_path / "model.gguf"), "--device", "stream", "--allow", "unread"]
    )

    def ended(source: Source, skeleton: Any, folder: Path, dtype: torch.dtype) -> None:
        seen.append(folder)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(load, "unpack_gguf", ended)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stopped:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 130
    assert seen[0].parent == temporary
    assert not seen[0].exists()


@pytest.mark.usefixtures("forked_verification")
def test_shrink_writes_the_same_gguf_file_with_streamed_weights(tmp_path: Path) -> None:
    file, text = tmp_path / "model.gguf", tmp_path / "text.txt"
    write_gguf(file, add_bos=False, layers=5)
    text.write_text(text_of(6000), encoding="utf-8")
    asked = {"text": text, "remove": 2, "effort": "quick", "window": 16, "allow": "unread", "device": "cpu"}
    repaired = dg.shrink(file, **asked | {"device": "stream:cpu"}, out=tmp_path / "repaired.gguf").record
    assert repaired.stages[0] == dg.shrink(file, **asked, sampled=0.0).record.stages[0]
    asked |= {"recover": "none"}
    streamed = dg.shrink(file, **asked | {"device": "stream:cpu"}, out=tmp_path / "streamed.gguf").record
    resident = dg.shrink(file, **asked, sampled=0.0, out=tmp_path / "resident.gguf").record
    assert (streamed.removed, streamed.loss) == (resident.removed, resident.loss)
    assert (tmp_path / "streamed.gguf").read_bytes() == (tmp_path / "resident.gguf").read_bytes()


def changed_bytes(file: Path) -> int:
    """Return how many bytes of the mappings of a file this process has changed, which are then its own memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Private_Dirty:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what memory is made of")
def test_mapped_weights_take_no_memory_until_they_change(tmp_path: Path) -> None:
    checkpoint, file = loaded(saved(tmp_path, "llama")), tmp_path / "model.safetensors"
    output(checkpoint)
    assert str(file) in Path("/proc/self/smaps").read_text()
    assert changed_bytes(file) == 0
    weights = [weight for block in blocks_of(checkpoint) for weight in block.parameters()]
    before = file.read_bytes()
    with torch.no_grad():
        for weight in weights:
            weight.mul_(2.0)
    assert changed_bytes(file) >= sum(weight.nbytes for weight in weights)
    assert file.read_bytes() == before
    assert checkpoint.stream is not None
    assert torch.equal(2 * checkpoint.stream.original(weights[0]), weights[0])


class OnDevice(OffloadedWeightsLoader):
    """Weights that accelerate would bring to a GPU."""

    def __getitem__(self, key: str) -> Any:
        assert self.device is None, f"{key} would be loaded to {self.device}"
        return super().__getitem__(key)


def test_weights_are_mapped_although_accelerate_would_bring_them_to_a_device(tmp_path: Path) -> None:
    stored = torch.arange(6.0).reshape(2, 3)
    save_file({"block.weight": stored}, tmp_path / "model.safetensors")
    index = {"block.weight": {"safetensors_file": str(tmp_path / "model.safetensors"), "dtype": "float32"}}
    offloaded = PrefixedDataset(OnDevice(index=index, device="cuda:0"), "block.")
    with pytest.raises(AssertionError, match="would be loaded to cuda:0"):
        offloaded["weight"]
    assert torch.equal(reader(offloaded, "weight")(), stored)


class Moving(Stream):
    """A stream that copies the weights of a block although the device is the CPU."""

    _moves = True


def test_one_block_at_a_time_is_on_the_device(tmp_path: Path) -> None:
    checkpoint = loaded(saved(tmp_path, "llama"))
    expected, blocks = output(checkpoint), blocks_of(checkpoint)
    stored = {weight: weight.data_ptr() for block in blocks for weight in block.parameters()}
    elsewhere: list[set[int]] = []

    def look(module: nn.Module, args: Any) -> None:
        moved = {k for k, block in enumerate(blocks) for w in block.parameters() if w.data_ptr() != stored[w]}
        elsewhere.append(moved)

    Moving(blocks, torch.device("cpu"))
    for block in blocks:
        block.get_submodule("mlp").register_forward_pre_hook(look)
    assert torch.equal(output(checkpoint), expected)
    assert elsewhere == [{layer} for layer in range(len(blocks))]
    assert all(weight.data_ptr() == place for weight, place in stored.items())


def test_the_sizes_of_weights_are_computed_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = loaded(saved(tmp_path, "llama"))
    blocks = blocks_of(checkpoint)
    stored = {weight: weight.data_ptr() for block in blocks for weight in block.parameters()}
    elsewhere = []

    def look(checkpoint: Checkpoint, block: nn.Module) -> list[HeadWeights]:
        elsewhere.append(all(weight.data_ptr() != stored[weight] for weight in block.parameters()))
        return []

    monkeypatch.setattr(gauge_checkpoint, "head_weights", look)
    measure_weights(replace(checkpoint, stream=Moving(blocks, torch.device("cpu"))), silent)
    assert elsewhere == [True] * len(blocks)


def test_a_copy_made_in_advance_is_not_used_after_a_change(tmp_path: Path) -> None:
    checkpoint = loaded(saved(tmp_path, "llama"))
    blocks = blocks_of(checkpoint)
    stream = Moving(blocks, torch.device("cpu"))
    weight = next(blocks[1].parameters())
    for change in (lambda: weight.mul_(2.0), lambda: setattr(weight, "data", 3 * weight.data)):
        with stream.resident(0):  # begins to copy block 1
            pass
        with torch.no_grad():
            change()
        expected = weight.detach().clone()
        with stream.resident(1):
            assert torch.equal(weight, expected)


def test_weights_that_do_not_fit_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, said = find(saved(tmp_path, "llama")), list[str]()
    here = Placement(device="cpu")
    config = load_config(source, here)
    assert fitted(source, config, here, said.append) == here
    assert said == []
    weights = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    monkeypatch.setattr(load, "free_memory", lambda device=None: weights)  # and no room for anything else
    assert fitted(source, config, here, said.append).stream
    assert said == ["the weights do not fit into the free memory of cpu: they are streamed, block by block"]
    with pytest.raises(CheckpointError, match="too large"):
        fitted(source, config, Placement(device="cpu", dtype="float32"), said.append)
    monkeypatch.setattr(load, "free_memory", lambda device=None: 1000)  # less than a block
    with pytest.raises(CheckpointError, match="too large"):
        fitted(source, config, here, said.append)


def test_streamed_weights_have_the_stored_dtype(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its dtype is the stored one; leave --dtype out"):
        loaded(saved(tmp_path, "llama"), Placement(stream=True, dtype="float32"))


@pytest.mark.usefixtures("forked_verification")
def test_shrink_finds_the_same_model_with_streamed_weights(tmp_path: Path) -> None:
    folder, text = saved(tmp_path / "model", "llama"), tmp_path / "text.txt"
    text.write_text(text_of(6000), encoding="utf-8")
    asked = {"text": text, "remove": 2, "effort": "quick", "window": 16, "allow": "unread", "device": "cpu"}
    streamed = dg.shrink(folder, **asked | {"device": "stream:cpu"}, out=tmp_path / "streamed").record
    resident = dg.shrink(folder, **asked, sampled=0.0).record
    assert streamed.removed == resident.removed
    assert [step.objective for step in streamed.plan.search] == [step.objective for step in resident.plan.search]
    assert [stage.name for stage in streamed.stages] == ["least squares"]
    assert streamed.stages[0] == resident.stages[0]
    assert streamed.speed is None
    assert streamed.reload is not None
    assert any("streamed" in note for note in streamed.notes)
    bare = dg.shrink(folder, **asked, sampled=0.0, recover="none", out=tmp_path / "resident").record
    assert bare.removed == streamed.removed


def test_gauge_measures_the_same_with_streamed_weights(tmp_path: Path) -> None:
    folder, text = saved(tmp_path / "model", "llama"), tmp_path / "text.txt"
    text.write_text(text_of(3000), encoding="utf-8")
    asked = {"text": text, "tokens": 128, "window": 16, "allow": "unread"}
    streamed, resident = (dg.gauge(folder, **asked, device=device) for device in ("stream:cpu", "cpu"))
    assert streamed.subjects == resident.subjects


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "does not sample text from the model; give --text"),
        ({"text": "TEXT", "sampled": 0.5}, "leave --sampled out"),
        ({"text": "TEXT", "recover": "4k"}, "leave --recover out"),
    ],
)
def test_shrink_refuses_what_streamed_weights_cannot_do(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, text = saved(tmp_path / "model", "llama"), tmp_path / "text.txt"
    text.write_text(text_of(6000), encoding="utf-8")
    asked = given | ({"text": text} if "text" in given else {})
    with pytest.raises(InputError, match=message):
        dg.shrink(folder, remove=1, device="stream:cpu", effort="quick", allow="unread", **asked)
