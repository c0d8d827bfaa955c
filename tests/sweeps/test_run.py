"""A run computes the missing cells and no others, with either engine, and reports what it did."""

import csv
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from joblib.externals.loky import reusable_executor
from sweeping import rows_sha256, undisturbed, write_grid

from depthgauge.base.errors import InputError, InterruptedRunError
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps import run
from depthgauge.sweeps.grid import SEED, Cell, CellOutcome, Grid, Parameter, Task, count, read_grid
from depthgauge.sweeps.run import Dask, EngineError, Local, choose_engine, run_grid
from depthgauge.sweeps.store import Count, export_rows, read_status


def odd_ones_fail(cell: Cell) -> dict[str, int]:
    if cell.parameters["k"] % 2 and not os.environ.get("DEPTHGAUGE_TEST_FIXED"):
        raise ValueError("odd\n  numbers break")
    return {"square": cell.parameters["k"] ** 2}


SQUARES = Task("squares", 1, {"k": Parameter(count("a number", 0)), "seed": SEED}, odd_ones_fail)


@pytest.fixture
def squares() -> Grid:
    return Grid(SQUARES, {"k": [0, 1, 2, 3, 4]}, name="squares.toml")


class Counting:
    """The local engine in this process; `given` records the number of cells of each call."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def check(self) -> None:
        pass

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        self.given.append(len(cells))
        yield from Local(1).outcomes(cells)


def test_failed_cells_keep_their_error_and_are_retried_on_request(
    squares: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, engine = tmp_path / "s.db", Counting()
    done = run_grid(squares, store, engine=engine)
    assert (done.computed, done.count) == (5, Count(3, 2, 0))
    assert {failure.error for failure in read_status(store).errors} == {"ValueError: odd numbers break"}
    run_grid(squares, store, engine=engine)
    monkeypatch.setenv("DEPTHGAUGE_TEST_FIXED", "1")
    run_grid(squares, store, engine=engine)
    assert engine.given == [5]  # failed cells are not retried automatically
    done = run_grid(squares, store, engine=engine, retry_failed=True)
    assert (done.computed, done.count) == (2, Count(5, 0, 0))
    assert read_status(store).errors == ()
    run_grid(squares, store, engine=engine, retry_failed=True)
    assert engine.given == [5, 2]


def test_a_larger_grid_computes_only_what_is_new(squares: Grid, tmp_path: Path) -> None:
    store, engine = tmp_path / "s.db", Counting()
    run_grid(squares, store, engine=engine)
    run_grid(Grid(SQUARES, {"k": [0, 2, 6, 8]}), store, engine=engine)
    assert engine.given == [5, 2]
    found = read_status(store)
    assert found.count == Count(5, 2, 0)
    assert [grid.name for grid in found.grids] == ["squares.toml", ""]


def test_progress_counts_the_cells_of_this_run_and_shows_the_rate(squares: Grid, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    run_grid(squares, tmp_path / "s.db", engine=Local(1), progress=lambda *where: seen.append(where))
    assert [(done, total) for done, total, _ in seen] == [(k, 5) for k in range(6)]
    assert all(label.endswith(" cells/s") for _, _, label in seen[1:])


def test_an_interrupt_reports_what_is_kept_and_how_to_resume(squares: Grid, tmp_path: Path) -> None:
    def stop_at_two(done: int, total: int, label: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match=r"1 of 5 cells done and kept in .*; run the same command again"):
        run_grid(squares, tmp_path / "s.db", engine=Local(1), progress=stop_at_two)
    assert run_grid(squares, tmp_path / "s.db", engine=Local(1)).computed == 3


def test_the_exported_table_contains_all_rows(squares: Grid, tmp_path: Path) -> None:
    run_grid(squares, tmp_path / "s.db", engine=Local(1))
    ranks = Grid(TASKS["rank-collapse"], {"eta": [0.1], "layers": [2], "heads": [1], "dim": [3], "tokens": [4]})
    run_grid(ranks, tmp_path / "s.db", engine=Local(1))
    assert export_rows(tmp_path / "s.db", tmp_path / "s.csv") == 6
    with open(tmp_path / "s.csv", encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["square"] for row in rows] == ["0", "", "4", "", "16", ""]
    assert rows[1]["error_text"] == "ValueError: odd numbers break"
    assert rows[5]["task"] == "rank-collapse"
    assert rows[5]["log10_ratio"].startswith("[-")
    assert rows[5]["skip"] == "true"
    assert rows[0]["identity"] == squares.cells()[0].identity
    assert "seconds" not in rows[0]


def test_an_empty_store_exports_no_rows(squares: Grid, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        run_grid(squares, tmp_path / "s.db", engine=Local(1), progress=_stop)
    assert export_rows(tmp_path / "s.db", tmp_path / "s.csv") == 0


def _stop(done: int, total: int, label: str) -> None:
    raise KeyboardInterrupt


# --- engines ---------------------------------------------------------------------------------------------------------


def test_one_and_two_processes_give_the_same_rows(tmp_path: Path) -> None:
    grid = write_grid(tmp_path, 2, tokens=20)
    run_grid(read_grid(grid, TASKS), tmp_path / "two.db", engine=Local(2))
    assert rows_sha256(tmp_path / "two.db") == undisturbed(grid, tmp_path)


def test_a_dead_worker_ends_the_run_and_rows_are_kept(tmp_path: Path) -> None:
    grid = read_grid(write_grid(tmp_path, 5, tokens=60), TASKS)

    def kill_one(done: int, total: int, label: str) -> None:
        if done == 5:
            os.kill(next(iter(reusable_executor._executor._processes)), signal.SIGKILL)

    with pytest.raises(EngineError, match=r"a worker process died.*cells done and kept"):
        run_grid(grid, tmp_path / "s.db", engine=Local(2), progress=kill_one)
    kept = read_status(tmp_path / "s.db").count.done
    assert 5 <= kept < 30
    assert run_grid(grid, tmp_path / "s.db", engine=Local(1)).computed == 30 - kept
    assert rows_sha256(tmp_path / "s.db") == undisturbed(tmp_path / "grid.toml", tmp_path)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("ray",), "engine must be one of local, dask"),
        (("local", "tcp://x"), "applies to the engine dask only"),
        (("local", None, 0), "jobs must be a whole number of at least 1"),
        (("dask",), "needs --scheduler ADDRESS"),
        (("dask", "tcp://x", 3), "--jobs applies to the engine local only, got 3"),
    ],
)
def test_invalid_engine_options_are_rejected(asked: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        choose_engine(*asked)  # type: ignore[arg-type]


def test_engines_by_name() -> None:
    assert choose_engine("local", jobs=3) == Local(3)
    assert choose_engine("dask", "tcp://x:1") == Dask("tcp://x:1")


def test_the_error_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.__dict__["__builtins__"], "__import__", _no_distributed)
    with pytest.raises(
        InputError, match=r"needs the extra `cluster`; install it with `pip install 'dask>=.*' 'distributed>="
    ):
        Dask("tcp://127.0.0.1:1").check()


_real_import = __import__


def _no_distributed(name: str, *rest: object, **more: object) -> object:
    if name == "distributed":
        raise ImportError(name)
    return _real_import(name, *rest, **more)  # type: ignore[arg-type]
