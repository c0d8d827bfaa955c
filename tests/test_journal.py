"""The journal of a run: what is kept after an interruption, which files it recognizes, and what it never touches."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from depthgauge.base.errors import InputError, InterruptedRunError, OutputError
from depthgauge.base.journal import Journal, journal_folder


class StoppedError(Exception):
    """A crash."""


@contextmanager
def stopped(out: Path | None, error: type[BaseException] = StoppedError, **keywords: Any) -> Iterator[Journal]:
    """A run that stops with an error after the block."""
    with suppress(StoppedError), Journal(out, **keywords) as journal:
        yield journal
        raise error


def interrupt(out: Path, about: dict[str, int], entries: dict[str, object]) -> Path:
    """Start a run that stops after its entries, and return the folder of its journal."""
    with stopped(out) as journal:
        journal.begin(about)
        for name, value in entries.items():
            journal.put(name, value)
    return journal_folder(out)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_entries_are_kept_until_a_run_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = interrupt(out, {"seed": 1}, {"search": (1, 2)})
    assert names(folder) == {"journal.json"}  # the lock is released
    with Journal(out) as journal:
        journal.begin({"seed": 1})
        assert journal.get("search") == [1, 2]
    assert names(tmp_path) == set()


def test_a_run_that_fails_before_its_first_step_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoppedError), Journal(tmp_path / "out"):
        raise StoppedError
    assert names(tmp_path) == set()


def test_another_run_replaces_an_interrupted_one_only_if_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = interrupt(out, {"seed": 1}, {"search": []})
    (folder / "repair-1-2.pt").write_bytes(b"weights of the interrupted run")
    (folder / "recovery-1-2" / "checkpoint-3").mkdir(parents=True)
    (folder / "training-2" / "checkpoint-3").mkdir(parents=True)
    (folder / ".0123456789abcdef.partial").write_bytes(b"cut short")
    with pytest.raises(InputError, match="or use --overwrite to start again"), Journal(out) as journal:
        journal.begin({"seed": 2})
    assert len(names(folder)) == 5
    with Journal(out, overwrite=True) as journal:
        left = {"journal.json", "repair-1-2.pt", "recovery-1-2", "training-2", ".0123456789abcdef.partial"}
        assert names(folder) == {*left, "lock"}
        journal.begin({"seed": 2})
        assert names(folder) == {"lock"}  # a new run does not continue the training of another one
        assert journal.get("search") is None
        assert not journal.is_continued
    assert names(tmp_path) == set()


def test_the_same_run_is_continued_also_if_it_may_overwrite(tmp_path: Path) -> None:
    interrupt(tmp_path / "out", {"seed": 1}, {"search": []})
    with Journal(tmp_path / "out", overwrite=True) as journal:
        journal.begin({"seed": 1})
        assert journal.get("search") == []


def test_a_run_that_is_continued_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with stopped(tmp_path / "out", message=said.append) as journal:
            journal.begin({"seed": 1})
            journal.put("search", [])
    assert said == [f"continuing the interrupted run in {tmp_path / 'out'}.partial"]


def test_a_keyboard_interrupt_says_how_to_continue_if_there_is_something_to_continue(tmp_path: Path) -> None:
    resumable = pytest.raises(InterruptedRunError, match=r"out\.partial: run the same command again")
    with resumable, stopped(tmp_path / "out", KeyboardInterrupt) as journal:
        journal.put("search", [])
    with pytest.raises(KeyboardInterrupt), stopped(tmp_path / "other", KeyboardInterrupt):
        pass
    with pytest.raises(KeyboardInterrupt), stopped(None, KeyboardInterrupt) as journal:
        journal.put("search", [])


def test_only_files_of_the_interrupted_run_count_as_written(tmp_path: Path) -> None:
    out, page, mine = (tmp_path / name for name in ("r.json", "page.html", "mine.html"))
    mine.write_text("MY NOTES")
    with stopped(out) as journal:
        journal.write(out, "result")
        journal.write(page, "page")
    with stopped(out) as journal:
        assert journal.has_written(out)
        assert journal.has_written(page)
        assert not journal.has_written(mine)
        page.write_text("edited by the user")
        assert not journal.has_written(page)
        with pytest.raises(OutputError, match="another process has created it meanwhile"):
            journal.write(page, "page")
        journal.write(out, "result again")
    assert (out.read_text(), page.read_text(), mine.read_text()) == ("result again", "edited by the user", "MY NOTES")


def test_a_file_is_known_even_if_the_run_was_killed_while_it_was_written(tmp_path: Path) -> None:
    """The digest is saved before the file gets its name."""
    out = tmp_path / "r.json"
    with stopped(out) as journal:
        journal.claim(out, "result")
    out.write_text("result")
    with Journal(out) as journal:
        assert journal.has_written(out)


def test_a_directory_is_known_by_its_record(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with Journal(out) as journal:
        journal.claim(out, "record")
        out.mkdir()
        assert not journal.has_written(out)
        (out / "depthgauge.json").write_text("record")
        assert journal.has_written(out)


def test_another_run_is_refused(tmp_path: Path) -> None:
    interrupt(tmp_path / "out", {"seed": 1}, {"search": []})
    other = pytest.raises(InputError, match="started with seed 1, now it is 2")
    with other, Journal(tmp_path / "out") as journal:
        journal.begin({"seed": 2})
    assert names(tmp_path / "out.partial") == {"journal.json"}


HOLD = """
import sys
from depthgauge.base.journal import Journal
with Journal(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_do_not_write_the_same_output(tmp_path: Path) -> None:
    """The second run is refused, also through a link; when the first one ends or dies, the output is free."""
    out, link = tmp_path / "r.json", tmp_path / "link.json"
    link.symlink_to(out)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    for name in (out, link):
        for keywords in ({}, {"overwrite": True}):
            busy = pytest.raises(InputError, match=rf"r\.json is in use by process {process.pid}")
            with busy, Journal(name, **keywords):
                pass
    process.kill()
    process.communicate()
    with Journal(out):
        pass
    assert names(tmp_path) == {"link.json"}


@pytest.mark.parametrize(
    "name",
    [
        "mine.txt",
        "repair-notes.txt",
        "repair-1.pt.bak",
        "recovery-1",
        "recovery-notes/x",
        "lock",
        "journal.json",
        ".mine.partial",
        "folder/x",
    ],
)
@pytest.mark.parametrize("keywords", [{}, {"overwrite": True}], ids=["new", "overwrite"])
def test_foreign_files_are_not_touched(tmp_path: Path, name: str, keywords: dict[str, bool]) -> None:
    folder = journal_folder(tmp_path / "out")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text('{"mine": true}')
    with pytest.raises(InputError, match=r"move"), Journal(tmp_path / "out", **keywords) as journal:
        journal.begin({})
    assert (folder / name).read_text() == '{"mine": true}'


def test_a_file_or_link_in_place_of_the_folder_is_not_touched(tmp_path: Path) -> None:
    folder = journal_folder(tmp_path / "out")
    folder.write_text("mine")
    with pytest.raises(InputError, match="something else is there"), Journal(tmp_path / "out", overwrite=True):
        pass
    assert folder.read_text() == "mine"
    folder.unlink()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="something else is there"), Journal(tmp_path / "out", overwrite=True):
        pass
    assert folder.is_symlink()


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    folder = interrupt(tmp_path / "out", {}, {"search": []})
    document = json.loads((folder / "journal.json").read_text())
    for damaged in ("{", json.dumps(document | {"entries": 3}), json.dumps(document | {"schema": "x/9"})):
        (folder / "journal.json").write_text(damaged)
        refused = pytest.raises(InputError, match=r"is not a journal that this version can read.*start again")
        with refused, Journal(tmp_path / "out"):
            pass


def test_the_name_of_an_output_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert journal_folder(".") == tmp_path.with_name(tmp_path.name + ".partial")
    with pytest.raises(InputError, match="give the name"):
        journal_folder("/")
    assert Journal("/dev/null").folder is None
