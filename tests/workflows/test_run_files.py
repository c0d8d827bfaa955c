"""The files of `gauge` and `shrink`: what may be replaced, what is never replaced, and two runs at once."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import save_checkpoint, text_of

import depthgauge as dg
from depthgauge.base.errors import DepthgaugeError, InputError, MissingPackageError, OutputError
from depthgauge.base.journal import journal_folder
from depthgauge.workflows.shrink import plan_shrink

pytestmark = pytest.mark.usefixtures("forked_verification")

QUICK = {"window": 16, "effort": "quick", "recover": "none", "remove": 1, "confidence": 0.5, "device": "cpu"}
GAUGE = {"window": 16, "tokens": 32, "what_if": "none", "device": "cpu"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a text."""
    folder = tmp_path_factory.mktemp("files")
    save_checkpoint(folder / "model", "llama")
    (folder / "corpus.txt").write_text(text_of(4000))
    return folder


def gauged(shared: Path, **changes: Any) -> Any:
    return dg.gauge(shared / "model", text=shared / "corpus.txt", **GAUGE, **changes)


def shrunk(shared: Path, **changes: Any) -> Any:
    return dg.shrink(shared / "model", text=shared / "corpus.txt", **QUICK, **changes)


def planned(shared: Path, **changes: Any) -> Any:
    return plan_shrink(shared / "model", text=shared / "corpus.txt", **QUICK, **changes)


class StoppedError(Exception):
    """A crash."""


def crash(*_: Any, **__: Any) -> Any:
    raise StoppedError


@pytest.mark.parametrize("run", [gauged, planned])
def test_a_file_that_no_run_wrote_is_not_replaced(shared: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    out = tmp_path / "out.json"
    out.write_text("MY NOTES")
    with pytest.raises(InputError, match="exists; use --overwrite"):
        run(shared, out=out)
    assert out.read_text() == "MY NOTES"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("run", [gauged, shrunk])
def test_a_page_that_no_run_wrote_is_not_replaced(
    shared: Path, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither without an interrupted run, nor with one that did not write the page."""
    out, page = tmp_path / "out", tmp_path / "notes.html"
    page.write_text("MY NOTES")
    with pytest.raises(InputError, match="exists; use --overwrite"):
        run(shared, out=out, report=page)
    page.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("depthgauge.report.page.page_text", crash)
        patch.setattr("depthgauge.workflows.shrink.sizes_page_text", crash)
        with pytest.raises(StoppedError):
            run(shared, out=out, report=page)
    assert out.exists()
    assert journal_folder(out).exists()
    page.write_text("MY NOTES")
    with pytest.raises(InputError, match="exists; use --overwrite"):
        run(shared, out=out, report=page)
    assert page.read_text() == "MY NOTES"
    page.unlink()
    run(shared, out=out, report=page)  # replaces what it wrote itself
    assert page.read_text().startswith("<!doctype html>")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "notes.html"}


def test_an_output_that_was_changed_after_the_interruption_is_not_replaced(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page = tmp_path / "r.json", tmp_path / "page.html"
    with monkeypatch.context() as patch:
        patch.setattr("depthgauge.report.page.page_text", crash)
        with pytest.raises(StoppedError):
            gauged(shared, out=out, report=page)
    out.write_text(out.read_text() + "with my remarks")
    with pytest.raises(InputError, match="exists; use --overwrite"):
        gauged(shared, out=out, report=page)
    assert out.read_text().endswith("with my remarks")


def test_a_page_that_somebody_else_writes_meanwhile_is_kept(shared: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    def write(done: int, total: int, label: str) -> None:
        page.write_text("of another run")

    with pytest.raises(OutputError, match="another process has created it meanwhile"):
        gauged(shared, out=tmp_path / "r.json", report=page, progress=write)
    assert page.read_text() == "of another run"


def test_two_gauge_runs_into_one_file_do_not_lose_a_result(shared: Path, tmp_path: Path) -> None:
    out, tried = tmp_path / "r.json", []

    def second(done: int, total: int, label: str) -> None:
        if not tried:
            command = [sys.executable, "-m", "depthgauge", "gauge", str(shared / "model"), "--out", str(out)]
            tried.append(subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False))

    gauged(shared, out=out, progress=second)
    assert tried[0].returncode == 2
    assert f"r.json is in use by process {os.getpid()}" in tried[0].stderr
    assert dg.results.load_result(out).settings.tokens == 32


def test_files_of_the_model_are_not_replaced(shared: Path, tmp_path: Path) -> None:
    config = shared / "model" / "config.json"
    before = config.read_bytes()
    for run, option in ((gauged, "out"), (gauged, "report"), (shrunk, "report"), (planned, "out")):
        place = {} if option == "out" else {"out": tmp_path / "x"}
        said = "which is only read" if option == "out" else "give a name that ends with .html"  # no page has this name
        with pytest.raises(InputError, match=said):
            run(shared, overwrite=True, **place, **{option: config})
    assert config.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_written_files_have_no_path_that_was_not_given(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared.name
    monkeypatch.chdir(shared.parent)
    out = tmp_path / "smaller"
    dg.shrink(f"{folder}/model", text=f"{folder}/corpus.txt", **QUICK, out=out)
    documents = {path.name: path.read_text() for path in out.glob("*.[jmy]*") if path.suffix != ".safetensors"}
    assert {"README.md", "depthgauge.json", "plan.mergekit.yaml", "config.json"} <= set(documents)
    found = [name for name, content in documents.items() if str(shared.parent) in content.replace(str(out), "")]
    assert not found
    assert folder not in documents["README.md"]


def test_a_missing_extra_is_noticed_before_the_work(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for run in (gauged, shrunk):
        with pytest.raises(MissingPackageError, match="extra `report`"):
            run(shared, out=tmp_path / "out", report=tmp_path / "page.html", progress=crash)
    assert list(tmp_path.iterdir()) == []


# --- the campaign -----------------------------------------------------------------------------------------------------

PLACES = ("new", "file", "link", "dangling", "folder", "checkpoint", "project", "input", "inside", "missing/x", "fifo")


def lay_out(folder: Path, shared: Path) -> None:
    """Make every kind of place in a folder."""
    for name in ("file", "text", "file.partial", "notes.lock"):
        (folder / name).write_text(f"content of {name}")
    (folder / "link").symlink_to(folder / "text")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "folder").mkdir()
    save_checkpoint(folder / "checkpoint", "llama")
    save_checkpoint(folder / "project", "llama")
    (folder / "project" / "thesis.tex").write_text("years of work")
    (folder / "journal.partial").mkdir()
    (folder / "journal.partial" / "journal.json").write_text('{"mine": true}')
    save_checkpoint(folder / "input", "llama")
    os.mkfifo(folder / "fifo")


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return every file and link below a folder with its content."""
    found: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.readlink(path)
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(60))
def test_no_combination_of_paths_loses_a_file(shared: Path, tmp_path: Path, seed: int) -> None:
    """A run may create files, and with `overwrite` replace exactly its outputs; everything else stays as it was."""
    lay_out(tmp_path, shared)
    draw = random.Random(seed)
    places = [*PLACES, "input/config.json", "journal", "file.partial", "notes", "text", "checkpoint/README.md"]

    def place() -> Path:
        return tmp_path / draw.choice([one for one in places if one not in ("fifo", "inside")])

    before = contents(tmp_path)
    verb = draw.choice(["gauge", "shrink", "plan"])
    out, page = place(), draw.choice([None, place()])
    flags = {"overwrite": draw.random() < 0.5}
    crashes = draw.random() < 0.3
    calls = itertools.count()
    stop = draw.randrange(1, 12)

    def progress(done: int, total: int, label: str) -> None:
        if crashes and next(calls) == stop:
            raise StoppedError

    model, text = tmp_path / "input", draw.choice([shared / "corpus.txt", tmp_path / "text"])
    keywords: dict[str, Any] = {"text": text, "out": out, "progress": progress, **flags}
    try:
        if verb == "gauge":
            dg.gauge(model, report=page, **GAUGE, **keywords)
        elif verb == "shrink":
            dg.shrink(model, report=page, **QUICK, **keywords)
        else:
            plan_shrink(model, **QUICK, **keywords)
        done = True
    except (DepthgaugeError, StoppedError):
        done = False
    after = contents(tmp_path)
    given = [out] if page is None or verb == "plan" else [out, page]
    outputs = {os.path.relpath(os.path.realpath(path), tmp_path) for path in given}
    for name, content in before.items():
        inside = verb == "shrink" and name.startswith("checkpoint/") and "checkpoint" in outputs
        if not (done and flags["overwrite"] and (name in outputs or inside)) or name.startswith("input/"):
            assert after.get(name) == content, (verb, out, page, flags, name)
    assert not [name for name in after if name.endswith(("lock", ".replaced")) and name not in before]
