"""`sweep` and `sweep_status`: run a grid from Python; records with table, JSON and notebook representations."""

import builtins
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from depthgauge.base.errors import InterruptedRunError, MissingPackageError
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import SEED, Cell, Grid, Parameter, Task, count
from depthgauge.sweeps.store import Count
from depthgauge.workflows.sweep import sweep, sweep_status


def inverse(cell: Cell) -> dict[str, Any]:
    k = cell.parameters["k"]
    return {"inverse": 1 / k, "powers": [k, k**2], "even": k % 2 == 0}


INVERSE = Task("inverse", 1, {"k": Parameter(count("a number", 0)), "seed": SEED}, inverse)


@pytest.fixture
def grid() -> Grid:
    return Grid(INVERSE, {"k": [1, 0, 3]}, name="inverse<1>")


def test_rows_are_those_of_the_grid_in_its_order(grid: Grid, tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    sweep(Grid(INVERSE, {"k": [3, 5]}), store, jobs=1)
    done = sweep(grid, store, jobs=1)
    assert (done.store, done.summary.computed, done.summary.count) == (str(store), 2, Count(2, 1, 0))
    assert [row["k"] for row in done.rows] == [1, 0, 3]
    assert [row.get("inverse") for row in done.rows] == [1.0, None, 1 / 3]
    assert [row["error_text"] for row in done.rows] == [None, "ZeroDivisionError: division by zero", None]
    assert sweep(grid, store, jobs=1).summary.computed == 0
    assert sweep(grid, store, jobs=1, retry_failed=True).summary.computed == 1


def test_a_grid_can_be_an_object_a_dictionary_or_a_file(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "inverse", INVERSE)
    (tmp_path / "g.toml").write_text('task = "inverse"\n[parameters]\nk = [1, 0, 3]\n', encoding="utf-8")
    wanted = sweep(grid, jobs=1).to_json()["rows"]
    assert sweep(grid.document(), jobs=1).to_json()["rows"] == wanted
    assert sweep(str(tmp_path / "g.toml"), jobs=1).to_json()["rows"] == wanted


def test_without_a_store_nothing_is_left_behind(grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert sweep(grid, jobs=1).store is None

    def stop(done: int, total: int, label: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="give store=FILE to keep rows"):
        sweep(grid, jobs=1, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_the_result_as_json_csv_and_frame(grid: Grid, tmp_path: Path) -> None:
    done = sweep(grid, tmp_path / "s.db", jobs=1)
    document = json.loads(json.dumps(done.to_json()))
    assert list(document) == ["schema", "store", "computed", "done", "failed", "missing", "seconds", "rows"]
    assert (document["computed"], document["done"], document["failed"]) == (3, 2, 1)
    names = list(csv.DictReader(io.StringIO(done.rows.to_csv())).fieldnames or [])
    frame = done.to_frame()
    assert list(frame.columns) == list(document["rows"][0]) == names
    assert frame["powers"][2] == [3, 9]
    assert frame["even"].tolist()[::2] == [False, False]
    assert frame["inverse"].isna().tolist() == [False, True, False]


def test_without_pandas_the_error_names_it(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    done, real = sweep(grid, jobs=1), builtins.__import__

    def no_pandas(name: str, *rest: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_pandas)
    with pytest.raises(MissingPackageError, match="pip install 'pandas"):
        done.to_frame()


def test_short_representations(grid: Grid, tmp_path: Path) -> None:
    done = sweep(grid, tmp_path / "s.db", jobs=1)
    found = sweep_status(tmp_path / "s.db")
    assert repr(done.rows) == "SweepRows(3 rows, 1 failed)"
    assert repr(done) == f"SweepResult(2 done, 1 failed, 0 missing in {tmp_path / 's.db'}; 3 computed in this run)"
    assert repr(found) == f"SweepStatus({tmp_path / 's.db'}: 2 done, 1 failed, 0 missing)"
    assert len(done) == 3
    for record in (done, done.rows, found):
        page = record._repr_html_()
        assert page.count("<table>") == page.count("</table>") == 1
        assert len(repr(record)) < 300
    assert "0.333" in done._repr_html_()
    assert "inverse&lt;1&gt;" in found._repr_html_()


def test_a_long_table_shows_its_first_rows(grid: Grid) -> None:
    done = sweep(Grid(INVERSE, {"k": list(range(1, 31))}), jobs=1)
    assert done.rows._repr_html_().count("<tr>") == 11
    assert "30 rows, the first 10 shown" in done._repr_html_()


def test_status_is_a_record_with_the_keys_of_the_command(grid: Grid, tmp_path: Path) -> None:
    sweep(grid, tmp_path / "s.db", jobs=1)
    document = sweep_status(tmp_path / "s.db").to_json()
    assert list(document) == [
        "schema", "store", "done", "failed", "missing", "rows_sha256", "seconds", "running", "grids", "errors",
    ]  # fmt: skip
    assert document["grids"] == [{"name": "inverse<1>", **grid.document(), "done": 2, "failed": 1, "missing": 0}]
    (failure,) = document["errors"]
    assert (failure["task"], failure["parameters"]["k"]) == ("inverse", 0)
