"""A run that is killed while it writes a GGUF file leaves a complete file or none, and is resumed."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import exit_code, forked
from tiny_checkpoints import text_of
from tiny_gguf import write_gguf

from depthgauge.workflows import shrink_stages
from depthgauge.workflows.shrink import shrink

EVENTS = {"open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir"}
"""Audit events of Python that come before a change of a directory, and before a file is opened."""
FILES = {"model.gguf", "text.txt", "smaller.gguf", "smaller.depthgauge.json"}


def run(folder: Path, notice: Callable[[str], None]) -> None:
    """Shrink a tiny GGUF file; `notice` is called before every change of a file, from the first output on."""
    begun = False

    def progress(done: int, total: int, label: str) -> None:
        nonlocal begun
        if label == "writing the GGUF file":
            begun = True
        if begun:
            notice(f"{label} {done}")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if begun and event in EVENTS and str(arguments[0]).startswith(str(folder)):
            notice(f"{event} {arguments[0]}")

    sys.addaudithook(hook)  # for the life of the process
    quick: dict[str, Any] = {"recover": "none", "effort": "quick", "window": 16, "allow": "unread", "sampled": 0.0}
    given: dict[str, Any] = {"text": folder / "text.txt", "remove_layers": "1", "out": folder / "smaller.gguf"}
    shrink(folder / "model.gguf", progress=progress, **given, **quick)


def save_inputs(folder: Path) -> None:
    write_gguf(folder / "model.gguf", add_bos=True, layers=3)
    (folder / "text.txt").write_text(text_of(3000))


def kill_at(last: int) -> Callable[[str], None]:
    """Return a function that kills the process when it is called for the last of so many times."""
    left = [last]

    def notice(_: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return notice


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the folder of a run that was not killed, and what it did."""
    import transformers

    assert transformers.LlamaForCausalLM  # imported before processes are forked
    folder = tmp_path_factory.mktemp("finished")
    save_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrink_stages, "has_llama", lambda: False)

        def note(what: str) -> None:
            with open(log, "a") as handle:
                handle.write(what + "\n")

        log = tmp_path_factory.mktemp("log") / "events"
        assert exit_code(forked(lambda: run(folder, note))) == 0
    assert {path.name for path in folder.iterdir()} == FILES
    return folder, log.read_text().splitlines()


def check_killed(finished: tuple[Path, list[str]], folder: Path, event: int) -> None:
    reference = (finished[0] / "smaller.gguf").read_bytes()
    save_inputs(folder)
    assert exit_code(forked(lambda: run(folder, kill_at(event + 1)))) == -signal.SIGKILL
    if (folder / "smaller.gguf").exists():
        assert (folder / "smaller.gguf").read_bytes() == reference
    assert exit_code(forked(lambda: run(folder, lambda _: None))) == 0
    assert (folder / "smaller.gguf").read_bytes() == reference
    assert {path.name for path in folder.iterdir()} == FILES


def chosen(events: list[str]) -> list[int]:
    """Return an event in the middle of the tensors, and those before and after the file gets its name."""
    named = next(index for index, event in enumerate(events) if event.startswith(("os.link", "os.rename")) and
                 event.endswith("result.gguf"))  # fmt: skip
    return [7, named, named + 1]


@pytest.mark.parametrize("which", range(3))
def test_a_killed_run_is_resumed(
    which: int, finished: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shrink_stages, "has_llama", lambda: False)
    check_killed(finished, tmp_path, chosen(finished[1])[which])


@pytest.mark.soak
def test_soak_killed_anywhere(
    finished: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shrink_stages, "has_llama", lambda: False)
    for event in range(len(finished[1])):
        (tmp_path / str(event)).mkdir()
        check_killed(finished, tmp_path / str(event), event)
