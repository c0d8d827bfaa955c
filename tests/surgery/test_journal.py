"""The journal of an interrupted run."""

from pathlib import Path

import pytest

from depthgauge.errors import InputError
from depthgauge.surgery.journal import Journal, journal_folder


def test_entries_are_read_again(tmp_path: Path) -> None:
    folder = journal_folder(tmp_path / "out")
    Journal(folder, {"seed": 1}).put("search", [1, 2])
    assert Journal(folder, {"seed": 1}, resume=True).get("search") == [1, 2]
    (folder / "heal-1-2.pt").write_bytes(b"states of the interrupted run")
    (folder / ".0123456789abcdef.partial").write_bytes(b"cut short")
    assert Journal(folder, {"seed": 1}).get("search") is None
    assert not folder.exists()  # a new run does not continue the healing of another one


def test_the_name_of_a_folder_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert journal_folder(".") == tmp_path.with_name(tmp_path.name + ".partial")
    with pytest.raises(InputError, match="give the name"):
        journal_folder("/")


def test_another_run_is_refused(tmp_path: Path) -> None:
    folder = journal_folder(tmp_path / "out")
    Journal(folder, {"seed": 1}).put("search", [])
    with pytest.raises(InputError, match="started with seed 1, now it is 2"):
        Journal(folder, {"seed": 2}, resume=True)


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    folder = journal_folder(tmp_path / "out")
    Journal(folder, {}).put("search", [])
    (folder / "journal.json").write_text("{")
    with pytest.raises(InputError, match=r"is damaged.*start again"):
        Journal(folder, {}, resume=True)


def test_it_is_deleted(tmp_path: Path) -> None:
    folder = journal_folder(tmp_path / "out")
    journal = Journal(folder, {})
    journal.put("a", 1)
    assert folder.is_dir()
    journal.delete()
    assert not folder.exists()
    Journal(None, {}).delete()
