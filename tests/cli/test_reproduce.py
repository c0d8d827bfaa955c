"""The command `depthgauge reproduce`."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from depthgauge.papers.reproduce.catalog import FIGURES

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(typed: Run) -> Run:
    """Run `depthgauge` with these words."""
    return typed


def test_a_panel_is_written_and_listed(run: Run, tmp_path: Path) -> None:
    out_dir = tmp_path / "figs"
    code, out, _ = run("reproduce", "B4b", "--out", str(out_dir), "--models", "8", "--jobs", "1", "--json")
    assert code == 0
    (figure,) = json.loads(out)["figures"]
    assert figure["figure"] == "B4b"
    assert figure["points"] == 6
    assert sorted(map(Path, figure["files"])) == sorted(out_dir.glob("B4b.*"))
    assert {path.suffix for path in out_dir.iterdir()} == {".png", ".svg", ".csv", ".json", ".txt", ".db"}


def test_named_store_and_reproducible_files(run: Run, tmp_path: Path) -> None:
    store = tmp_path / "mine.db"
    code, _, _ = run(
        "reproduce", "B7b", "--out", str(tmp_path / "one"), "--models", "5", "--store", str(store), "--jobs", "1"
    )
    assert code == 0
    assert store.exists()
    code, _, _ = run("reproduce", "B7b", "--out", str(tmp_path / "two"), "--models", "5", "--jobs", "1")
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(
        path.name for path in (tmp_path / "two").glob("B7b.*")
    )
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_separate_gives_the_same_numbers_as_a_row(run: Run, tmp_path: Path) -> None:
    run("reproduce", "B4b", "--out", str(tmp_path), "--models", "40", "--seed", "2", "--jobs", "1")
    with open(tmp_path / "B4b.csv", encoding="utf-8", newline="") as handle:
        row = next(row for row in csv.DictReader(handle) if row["value"] == "10")
    typed = [f"--{name}={row[name]}" for name in ("kind", "x", "n", "d", "m", "a0", "a1", "b", "c", "models", "seed")]
    _, out, _ = run("separate", *typed, "--json")
    alone = json.loads(out)
    assert alone["ratio"] == float(row["ratio"])
    assert alone["exact"] == float(row["exact"])
    assert alone["interval"] == [float(row["low"]), float(row["high"])]


def test_help_names_every_figure(run: Run) -> None:
    code, out, _ = run("reproduce", "--help")
    assert code == 0
    for figure in FIGURES.values():
        assert f"{figure.id}: " in out
        assert all(need.label in " ".join(out.split()) for need in figure.needs)


def test_without_json_standard_output_stays_empty(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("reproduce", "B7b", "--out", str(tmp_path), "--models", "3", "--jobs", "1")
    assert code == 0
    assert out == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["B4g"], "got 'B4g'; did you mean 'B4"),
        (["B7b", "--models", "0"], "models must be a whole number of at least 1"),
        (["B7b", "--seed", "-3"], "seed must be a whole number from 0 to"),
        (["A9"], "figure must be one of A1, A2, A3, A4, "),
        (["A1", "--engine", "ray"], "engine must be one of local, dask"),
        (["A1", "--engine", "dask"], "needs --scheduler ADDRESS"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(run: Run, words: list[str], sentence: str, tmp_path: Path) -> None:
    out_dir = tmp_path / "never"
    code, out, err = run("reproduce", *words, "--out", str(out_dir))
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not out_dir.exists()
