"""The command `depthgauge sweep`."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeping import rows_sha256, write_grid

from depthgauge.cli.main import main
from depthgauge.papers.sweep_tasks import TASKS

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in this process and an empty directory; return exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["depthgauge", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return command


def test_run_status_and_export(run: Run, tmp_path: Path) -> None:
    write_grid(tmp_path, 2, tokens=6)
    code, out, err = run("sweep", "grid.toml", "--store", "s.db", "--jobs", "1", "--export", "rows.csv")
    assert (code, out) == (0, "")
    assert "12 cells computed in" in err
    assert "the grid has 12 done, 0 failed, 0 missing" in err
    assert "12 rows written to rows.csv" in err
    assert len(list(csv.DictReader(Path("rows.csv").read_text(encoding="utf-8").splitlines()))) == 12
    code, out, err = run("sweep", "--status", "s.db", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == "depthgauge.sweep/1"
    assert (found["done"], found["failed"], found["missing"], found["running"]) == (12, 0, 0, None)
    assert found["rows_sha256"] == rows_sha256(Path("s.db"))
    (grid,) = found["grids"]
    assert grid["name"] == "grid.toml"
    assert grid["parameters"]["eta"] == [0.01, 0.1]
    assert (grid["repetitions"], grid["missing"]) == (2, 0)
    code, out, _ = run("sweep", "--status", "s.db")
    assert code == 0
    assert out.startswith("s.db: 12 done, 0 failed, 0 missing; rows ")
    code, _, err = run("sweep", "grid.toml", "--store", "s.db")
    assert code == 0
    assert err.startswith("0 cells computed")


def test_a_mistyped_store_creates_nothing(run: Run, tmp_path: Path) -> None:
    write_grid(tmp_path, 1, tokens=4)
    code, out, err = run("sweep", "grid.toml", "--store", "resluts/s.db", "--jobs", "1")
    assert (code, out) == (2, "")
    assert err.startswith("error: cannot write resluts/s.db: there is no folder resluts; create it: mkdir -p resluts")
    assert [path.name for path in tmp_path.iterdir()] == ["grid.toml"]


def test_export_without_a_run(run: Run, tmp_path: Path) -> None:
    write_grid(tmp_path, 1, tokens=4)
    code, out, _ = run("sweep", "grid.toml", "--store", "s.db", "--jobs", "1", "--json")
    assert json.loads(out)["done"] == 6
    for words in (["--store", "s.db"], ["--status", "s.db"]):
        Path("rows.csv").unlink(missing_ok=True)
        code, _, _ = run("sweep", *words, "--export", "rows.csv")
        assert code == 0
        assert Path("rows.csv").exists()


def test_help_shows_a_grid(run: Run) -> None:
    code, out, _ = run("sweep", "--help")
    assert code == 0
    for word in (*TASKS, "dask", "[parameters]", "--retry-failed"):
        assert word in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give a grid and --store, or --status STORE"),
        (["grid.toml"], "give --store FILE.db"),
        (["grid.toml", "--status", "s.db"], "not both"),
        (["--store", "s.db"], "nothing to do with s.db"),
        (["--store", "a.db", "--status", "b.db"], "name two stores"),
        (["--status", "none.db"], "there is no store at none.db"),
        (["none.toml", "--store", "s.db"], "cannot read the grid none.toml"),
        (["grid.toml", "--store", "grid.toml"], "grid.toml is not a sweep store"),
        (["grid.toml", "--store", "s.db", "--engine", "ray"], "engine must be one of local, dask"),
        (["grid.toml", "--store", "s.db", "--engine", "dask"], "needs --scheduler ADDRESS"),
        (["grid.toml", "--store", "s.db", "--jobs", "0"], "jobs must be a whole number of at least 1"),
        (
            ["bad.toml", "--store", "s.db"],
            "bad.toml: unknown parameter 'etas'; collapse-error takes method, eta, layers",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(run: Run, tmp_path: Path, words: list[str], sentence: str) -> None:
    grid = write_grid(tmp_path, 1)
    (tmp_path / "bad.toml").write_text(grid.read_text(encoding="utf-8") + "etas = [1]\n", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code, out, err = run("sweep", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
