"""A run computes what is missing and nothing else, on either engine, and says what it did."""

import csv
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from joblib.externals.loky import reusable_executor
from sweeping import rows_sha256, undisturbed, write_grid

from depthgauge.errors import InputError
from depthgauge.sweeps import engines, tasks
from depthgauge.sweeps.cells import Cell, Outcome
from depthgauge.sweeps.engines import Dask, EngineError, Local, choose_engine, compute, one_thread
from depthgauge.sweeps.grid import Grid, read_grid
from depthgauge.sweeps.parameters import SEED, Parameter, count
from depthgauge.sweeps.run import InterruptedRunError, export, run_grid, status
from depthgauge.sweeps.store import Count


def odd_ones_fail(cell: Cell) -> dict[str, int]:
    if cell.parameters["k"] % 2 and not os.environ.get("DEPTHGAUGE_TEST_MENDED"):
        raise ValueError("odd\n  numbers break")
    return {"square": cell.parameters["k"] ** 2}


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> Grid:
    parameters = {"k": Parameter(count("a number", 0)), "seed": SEED}
    monkeypatch.setitem(tasks.TASKS, "squares", tasks.Task("squares", 1, parameters, odd_ones_fail))
    return Grid("squares", {"k": [0, 1, 2, 3, 4]}, name="squares.toml")


class Counting:
    """The local engine, with a count of what it was given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def check(self) -> None:
        pass

    def outcomes(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        self.given.append(len(cells))
        yield from Local(1).outcomes(cells)


def test_failed_cells_keep_their_error_and_are_retried_when_asked(
    squares: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, engine = tmp_path / "s.db", Counting()
    done = run_grid(squares, store, engine=engine)
    assert (done.computed, done.count) == (5, Count(3, 2, 0))
    found = status(store)
    assert {failure["error"] for failure in found["errors"]} == {"ValueError: odd numbers break"}
    run_grid(squares, store, engine=engine)
    monkeypatch.setenv("DEPTHGAUGE_TEST_MENDED", "1")
    run_grid(squares, store, engine=engine)
    assert engine.given == [5]  # failed ones are not tried again by themselves
    done = run_grid(squares, store, engine=engine, retry_failed=True)
    assert (done.computed, done.count) == (2, Count(5, 0, 0))
    assert status(store)["errors"] == []
    run_grid(squares, store, engine=engine, retry_failed=True)
    assert engine.given == [5, 2]


def test_a_larger_grid_computes_only_what_is_new(squares: Grid, tmp_path: Path) -> None:
    store, engine = tmp_path / "s.db", Counting()
    run_grid(squares, store, engine=engine)
    run_grid(Grid("squares", {"k": [0, 2, 6, 8]}), store, engine=engine)
    assert engine.given == [5, 2]
    found = status(store)
    assert (found["done"], found["failed"], found["missing"]) == (5, 2, 0)
    assert [grid["name"] for grid in found["grids"]] == ["squares.toml", ""]


def test_progress_counts_this_run_and_tells_the_rate(squares: Grid, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    run_grid(squares, tmp_path / "s.db", engine=Local(1), step=lambda *where: seen.append(where))
    assert [(done, total) for done, total, _ in seen] == [(k, 5) for k in range(6)]
    assert all(label.endswith(" cells/s") for _, _, label in seen[1:])


def test_an_interrupt_says_what_is_kept_and_how_to_go_on(squares: Grid, tmp_path: Path) -> None:
    def stop_at_two(done: int, total: int, label: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match=r"1 of 5 cells are done and kept in .*; run the same command again"):
        run_grid(squares, tmp_path / "s.db", engine=Local(1), step=stop_at_two)
    assert run_grid(squares, tmp_path / "s.db", engine=Local(1)).computed == 3


def test_the_exported_table_has_every_row_and_every_number(squares: Grid, tmp_path: Path) -> None:
    run_grid(squares, tmp_path / "s.db", engine=Local(1))
    ranks = Grid("rank-collapse", {"eta": [0.1], "layers": [2], "heads": [1], "dim": [3], "tokens": [4]})
    run_grid(ranks, tmp_path / "s.db", engine=Local(1))
    assert export(tmp_path / "s.db", tmp_path / "s.csv") == 6
    with open(tmp_path / "s.csv", encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["square"] for row in rows] == ["0", "", "4", "", "16", ""]
    assert rows[1]["error_text"] == "ValueError: odd numbers break"
    assert rows[5]["task"] == "rank-collapse"
    assert rows[5]["log10_ratio"].startswith("[-")
    assert rows[5]["skip"] == "true"
    assert rows[0]["identity"] == squares.cells()[0].identity
    assert "seconds" not in rows[0]


def test_a_store_in_which_nothing_is_done_exports_nothing(squares: Grid, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        run_grid(squares, tmp_path / "s.db", engine=Local(1), step=_stop)
    assert export(tmp_path / "s.db", tmp_path / "s.csv") == 0


def _stop(done: int, total: int, label: str) -> None:
    raise KeyboardInterrupt


# --- engines ---------------------------------------------------------------------------------------------------------


def test_rows_are_the_same_with_one_process_and_with_two(tmp_path: Path) -> None:
    grid = write_grid(tmp_path, 4, tokens=40)
    run_grid(read_grid(grid), tmp_path / "two.db", engine=Local(2))
    assert rows_sha256(tmp_path / "two.db") == undisturbed(grid, tmp_path)


def test_a_worker_that_dies_is_said_and_what_was_done_is_kept(tmp_path: Path) -> None:
    grid = read_grid(write_grid(tmp_path, 15, tokens=60))

    def kill_one(done: int, total: int, label: str) -> None:
        if done == 20:
            os.kill(next(iter(reusable_executor._executor._processes)), signal.SIGKILL)

    with pytest.raises(EngineError, match=r"a worker process died.*cells are done and kept"):
        run_grid(grid, tmp_path / "s.db", engine=Local(2), step=kill_one)
    kept = status(tmp_path / "s.db")["done"]
    assert kept >= 20
    assert run_grid(grid, tmp_path / "s.db", engine=Local(2)).computed == 90 - kept
    assert rows_sha256(tmp_path / "s.db") == undisturbed(tmp_path / "grid.toml", tmp_path)


def test_threads_are_one_while_a_cell_is_computed_and_as_before_afterwards() -> None:
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_cell_of_another_version_of_its_task_is_refused() -> None:
    with pytest.raises(EngineError, match="install the same depthgauge on every machine"):
        compute(odd_ones_fail, Cell("separation", 99, {}, 0))


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("ray",), "engine must be one of local, dask"),
        (("local", "tcp://x"), "of use to the engine dask only"),
        (("local", None, 0), "jobs must be a whole number of at least 1"),
        (("dask",), "needs --scheduler ADDRESS"),
        (("dask", "tcp://x", 3), "--jobs is for the engine local"),
    ],
)
def test_what_cannot_be_asked_of_an_engine(asked: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        choose_engine(*asked)  # type: ignore[arg-type]


def test_engines_by_name() -> None:
    assert choose_engine("local", jobs=3) == Local(3)
    assert choose_engine("dask", "tcp://x:1") == Dask("tcp://x:1")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.__dict__["__builtins__"], "__import__", _no_distributed)
    with pytest.raises(InputError, match=r"pip install 'depthgauge\[cluster\]'"):
        Dask("tcp://127.0.0.1:1").check()


_real_import = __import__


def _no_distributed(name: str, *rest: object, **more: object) -> object:
    if name == "distributed":
        raise ImportError(name)
    return _real_import(name, *rest, **more)  # type: ignore[arg-type]
