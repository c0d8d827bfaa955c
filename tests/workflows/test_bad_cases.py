"""Runs with streamed and with loaded weights that end early lose nothing, and are resumed with the same result."""

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import check_in_forks, exit_code, forked
from safetensors.torch import load_file
from tiny_checkpoints import save_tokenizer, text_of
from tiny_models import tiny_model, tokens
from tiny_shrinks import KEPT_STEPS, LAYERS, quick, train_for
from transformers import PreTrainedModel

from depthgauge.base.errors import OutputError
from depthgauge.checkpoints.blocks import model_output, what_if
from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.blocks.what_if import DenseStates
from depthgauge.checkpoints.source.library import quiet
from depthgauge.checkpoints.source.model_files import find, weight_bytes
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.surgery import write_shrunk
from depthgauge.workflows.shrink import ShrinkResult

pytestmark = pytest.mark.usefixtures("forked_verification", "kept_training")
Run = partial[ShrinkResult]
Whole = tuple[ShrinkResult, Path]
WAYS = {"streamed": {"device": "stream:cpu"}, "loaded": {"sampled": 0.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several files, and a text beside it."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "text.txt").write_text(text_of(6000))
    with quiet():
        tiny_model("llama", layers=LAYERS).save_pretrained(folder / "model", max_shard_size="8KB")
    save_tokenizer(folder / "model", special=False)
    assert len(list((folder / "model").glob("*.safetensors"))) > 3
    return folder


@pytest.fixture(scope="module", params=WAYS)
def run(request: pytest.FixtureRequest, folder: Path) -> Run:
    asked = {"remove": 2, "allow": "unread", "device": "cpu", **WAYS[request.param]}
    return partial(quick, folder / "model", folder / "text.txt", **asked)


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The result of a run that was not interrupted, and its directory."""
    out, devices = tmp_path_factory.mktemp("whole") / "out", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        check_in_forks(patch)
        train_for(KEPT_STEPS, patch)
        watch_devices(devices, patch)
        made = run(out=out)
    if "sampled" in run.keywords:
        assert devices == ["cpu"]  # there is room beside the source
        assert made.record.stages[-1].kept  # otherwise tests of loaded runs would compare original weights
    return made, out


def watch_devices(devices: list[str], patch: pytest.MonkeyPatch) -> None:
    """Note the device of every check of a written model."""
    verify = write_shrunk.verify_reload

    def watched(*given: Any, **named: Any) -> Any:
        devices.append(named["device"])
        return verify(*given, **named)

    patch.setattr(write_shrunk, "verify_reload", watched)


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in out.glob("*.safetensors") for name, value in load_file(path).items()}


def require_same_result(run: Run, whole: Whole, out: Path) -> None:
    """Resume a run; its result must be that of a run that was not interrupted."""
    resumed, (expected, folder) = run(out=out), whole
    assert resumed.plan.removed == expected.plan.removed
    assert resumed.plan.search == expected.plan.search
    ours, theirs = weights_of(out), weights_of(folder)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {path.name for path in out.parent.iterdir()} == {out.name}


def no_room(self: Any, folder: Path, **_: Any) -> None:
    """Write one of several files, and a part of the next one."""
    (Path(folder) / "model-00001-of-00002.safetensors").write_bytes(b"complete")
    (Path(folder) / "model-00002-of-00002.safetensors").write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_while_the_model_is_written(
    run: Run, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as full:
        full.setattr(PreTrainedModel, "save_pretrained", no_room)
        with pytest.raises(OutputError) as caught:
            run(out=out)
    kept = f"the finished steps are kept in {out}.partial: run the same command again to continue"
    assert str(caught.value) == f"cannot write {out}: No space left on device; {kept}"
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    require_same_result(run, whole, out)


@contextmanager
def files_up_to(most: int) -> Iterator[None]:
    """Limit the size of files, which stops writers as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def saved_on_full_disk(state: Any, handle: Any, save: Callable[..., None] = torch.save) -> None:
    with files_up_to(1000):
        save(state, handle)
        handle.flush()


def test_a_disk_that_fills_while_a_repair_is_kept(
    run: Run, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as full:
        full.setattr(torch, "save", saved_on_full_disk)
        with pytest.raises(OutputError, match=r"repair-[0-9-]+\.pt: File too large; .* run the same"):
            run(out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == ["journal.json"]
    require_same_result(run, whole, out)


@pytest.mark.parametrize("run", ["streamed"], indirect=True)
@pytest.mark.parametrize("phase", ["removal 2", "least squares", "fresh process"])
def test_a_killed_run_with_streamed_weights_is_resumed(phase: str, run: Run, whole: Whole, tmp_path: Path) -> None:
    def progress(done: int, total: int, label: str) -> None:
        if phase in label:
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(forked(partial(run, out=tmp_path / "out", progress=progress))) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    require_same_result(run, whole, tmp_path / "out")


def test_a_disk_without_room_for_all_outputs_is_reported_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    free = weight_bytes(find(folder / "model"))  # enough for each of the models
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(OutputError, match=r"out: it needs .* of the disk are free; free some space or give"):
        quick(folder / "model", folder / "text.txt", remove="1,2", out=tmp_path / "out", message=said.append)
    assert said == []  # not even that the weights are loaded
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run", ["loaded"], indirect=True)
def test_a_model_without_room_beside_the_source_is_checked_on_what_is_left(
    run: Run, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = list[str]()
    watch_devices(devices, monkeypatch)
    monkeypatch.setattr(write_shrunk, "free_memory", lambda device: 0)
    alone, (beside, folder) = run(out=tmp_path / "alone").record, whole
    assert devices == ["auto"]
    assert alone.loss.shrunk == pytest.approx(beside.record.loss.shrunk, rel=1e-5)
    ours, theirs = weights_of(tmp_path / "alone"), weights_of(folder)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_batch_takes_a_part_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    most = model_output.batch_size(model, 8, loss=True)
    monkeypatch.setattr(model_output, "free_memory", lambda device: 16 * 4 * 8 * 8 * model.config.hidden_size * 3)
    assert model_output.batch_size(model, 8, loss=True) == 3 < most


def test_states_without_room_in_memory_are_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(batch=3)
    runner = BlockRunner(wrap(tiny_model("llama")), ids[:1])
    expected = DenseStates(runner, ids)
    monkeypatch.setattr(what_if, "free_memory", lambda device=None: 0)
    mapped = DenseStates(runner, ids)
    assert all(torch.equal(mapped.at(k), expected.at(k)) for k in range(len(runner) + 1))
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    with files_up_to(1000), pytest.raises(OutputError, match=r"they need .*, File too large; set TMPDIR to a folder"):
        DenseStates(runner, ids)
