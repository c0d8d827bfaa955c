"""Output files: atomic, never replaced unless asked, links followed, devices and pipes written to."""

import os
import stat
import threading
from pathlib import Path

import pytest

from depthgauge.base.errors import InputError, OutputError
from depthgauge.base.io import check_outputs, write_text


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "made.txt")
    write_text(tmp_path / "dangling.txt", "made")
    assert (tmp_path / "made.txt").read_text() == "made"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling.txt", "link.txt", "made.txt", "real.txt"]


def test_devices_are_written_to_and_stay_devices() -> None:
    write_text("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OutputError, match="cannot write /dev/full: No space left on device"):
        write_text("/dev/full", "x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    check_outputs({"--out": "/dev/null", "--report": "/dev/null"}, {})


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through the pipe")
    reader.join(timeout=10)
    assert received == ["through the pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_missing_folder_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path, sentence = (
        tmp_path / "deep" / "er" / "r.json",
        r"there is no folder .*/deep/er; create it: mkdir -p .*/deep/er$",
    )
    with pytest.raises(OutputError, match=sentence):
        write_text(path, "x")
    with pytest.raises(InputError, match=sentence):
        check_outputs({"--out": path}, {})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_only_if_asked(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("mine")
    with pytest.raises(InputError, match=r"r\.json exists; use --overwrite to replace it, or give another --out"):
        check_outputs({"--out": tmp_path / "r.json"}, {})
    check_outputs({"--out": tmp_path / "r.json"}, {}, overwrite=True)
    assert (tmp_path / "r.json").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]  # the trial file is gone


@pytest.mark.parametrize("other", ["a.json", "./a.json", "sub/../a.json", "link.json"])
def test_no_file_has_two_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.json").symlink_to("a.json")
    with pytest.raises(InputError, match="--report and --out are the same file"):
        check_outputs({"--out": "a.json", "--report": other}, {}, overwrite=True)
    with pytest.raises(InputError, match="--out and TARGET are the same file"):
        check_outputs({"--out": other}, {"TARGET": "a.json"}, overwrite=True)
    check_outputs({"--out": "a.json", "--report": None}, {"TARGET": None})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_noticed_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        check_outputs({"--out": tmp_path / "r.json"}, {})


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is a directory; give the name of a file"):
        check_outputs({"--out": tmp_path}, {})
