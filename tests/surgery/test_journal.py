"""The journal of an interrupted run."""

from pathlib import Path

import pytest

from depthgauge.errors import InputError
from depthgauge.surgery.journal import Journal, journal_folder


def test_entries_are_read_again(tmp_path: Path) -> None:
    folder = journal_folder(tmp_path / "out")
    Journal(folder, {"seed": 1}).put("search", [1, 2])
    assert Journal(folder, {"seed": 1}, resume=True).get("search") == [1, 2]
    assert Journal(folder, {"seed": 1}).get("search") is None


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
