"""The store: one row for each cell, committed at once, never lost or duplicated; other files are not changed."""

import json
import shutil
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from depthgauge.base.errors import InputError, OutputError
from depthgauge.base.lock import holder_of
from depthgauge.sweeps.grid import Cell, CellOutcome
from depthgauge.sweeps.store import Count, Store, lock_path, run_lock


def cells(count: int, task: str = "t") -> list[Cell]:
    return [Cell(task, 1, {"eta": 0.1 * k, "word": "é"}, 0) for k in range(count)]


def done(cell: Cell, value: float = 1.0) -> CellOutcome:
    return CellOutcome(cell.identity, {"value": value}, None, 0.25)


def record_all(store: Store, every: list[Cell]) -> None:
    for cell in every:
        store.record(done(cell))


def failed(cell: Cell) -> CellOutcome:
    return CellOutcome(cell.identity, None, "it broke", 0.25)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    return tmp_path / "deep" / "s.db"


def test_other_readers_see_a_row_at_once(path: Path) -> None:
    first, second, *_ = cells(3)
    with Store.open(path, create=True) as store, Store.open(path) as reader:
        grid = store.plan("g", {"n": 3}, cells(3))
        assert reader.count() == Count(0, 0, 3)
        store.record(done(first))
        assert reader.count() == reader.count(grid) == Count(1, 0, 2)
        store.record(failed(second))
        assert reader.count() == Count(1, 1, 1)
        assert reader.settled([first.identity, second.identity, "x"]) == {first.identity, second.identity}
        assert reader.settled([first.identity, second.identity], failed=False) == {first.identity}
        assert reader.seconds() == 0.5
        rows = list(reader.results().values())
    assert [row.cell for row in rows] == cells(3)
    assert [row.result for row in rows] == [{"value": 1.0}, None, None]
    assert [row.error for row in rows] == [None, "it broke", None]


def test_done_rows_are_final_and_failed_rows_can_be_replaced(path: Path) -> None:
    first, second = cells(2)
    with Store.open(path, create=True) as store:
        store.plan("g", {}, [first, second])
        for outcome in (done(first, 1.0), done(first, 2.0), failed(first), failed(second), done(second, 3.0)):
            store.record(outcome)
        assert [row.result for row in store.results().values()] == [{"value": 1.0}, {"value": 3.0}]
        assert store.count() == Count(2, 0, 0)


def test_durability_settings(path: Path) -> None:
    with Store.open(path, create=True) as store:
        for opened in (store, Store.open(path)):
            with opened:
                assert opened._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
                assert opened._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_the_hash_depends_on_identities_and_results_only(tmp_path: Path) -> None:
    hashes = []
    outcomes = [done(cell, 0.1 * k) for k, cell in enumerate(cells(4))]
    slower = [CellOutcome(o.identity, o.result, o.error, 9.0) for o in reversed(outcomes)]
    other = [*outcomes[:3], done(cells(4)[3], 0.31)]
    fewer, broken = outcomes[:3], [*outcomes[:3], failed(cells(4)[3])]
    for k, rows in enumerate((outcomes, slower, other, fewer, broken)):
        with Store.open(tmp_path / f"{k}.db", create=True) as store:
            for row in rows:
                store.record(row)
            hashes.append(store.rows_sha256())
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


def test_grids_are_stored_and_share_cells(path: Path) -> None:
    every = cells(4)
    with Store.open(path, create=True) as store:
        store.plan("one", {"a": [1]}, every[:3])
        store.plan("two", {"a": [2]}, every[2:])
        store.plan("one again", {"a": [1]}, every[:3])
        store.record(done(every[2]))
        assert store.grids() == [("one", {"a": [1]}, Count(1, 0, 2)), ("two", {"a": [2]}, Count(1, 0, 1))]
        assert store.count() == Count(1, 0, 3)
        store.plan(
            "one", {"a": [1]}, [*every[:2], Cell("t", 2, {}, 0)]
        )  # the version of a task changed, so its cells are new
        assert store.grids()[0][2] == Count(0, 0, 3)
        assert store.count() == Count(1, 0, 4)


def test_other_files_are_rejected_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database " * 100, encoding="utf-8")
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    (tmp_path / "empty.db").write_bytes(b"")
    for name in ("text.db", "other.db", "empty.db"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(InputError, match="is not a sweep store"):
            Store.open(tmp_path / name)
        with pytest.raises(InputError, match="is not a sweep store"):
            Store.open(tmp_path / name, create=True)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(InputError, match="there is no store"):
        Store.open(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(InputError, match="is a directory"):
        Store.open(tmp_path)
    with pytest.raises(OutputError, match="cannot write"):
        Store.open(tmp_path / "text.db" / "s.db", create=True)


def test_a_store_of_a_newer_format_is_rejected(path: Path) -> None:
    Store.open(path, create=True).__exit__(None, None, None)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(InputError, match="newer than this version reads"):
        Store.open(path, create=True)


def test_a_full_disk_raises_and_the_store_stays_valid(path: Path) -> None:
    every = cells(400)
    with Store.open(path, create=True) as store:
        store.plan("g", {}, every)
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(OutputError, match="full; free some disk space and run the same command again") as raised:
            record_all(store, every)
        assert "\n" not in str(raised.value)
        kept = store.count().done
        assert 0 < kept < 400
        assert store.count() == Count(kept, 0, 400 - kept)
        store._connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
        record_all(store, every[kept:])
        assert store.count() == Count(400, 0, 0)
        assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_truncated_log_leaves_a_prefix_of_the_rows(path: Path, tmp_path: Path) -> None:
    """A power cut can leave the file of the last checkpoint and a log that is truncated anywhere."""
    every = cells(12)
    with Store.open(path, create=True) as store:
        store.plan("g", {}, every)
        store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for cell in every:
            store.record(done(cell))
        log = path.with_name(path.name + "-wal").read_bytes()
        seen = set()
        for cut in range(0, len(log) + 1, max(1, len(log) // 60)):
            copy = tmp_path / f"cut{cut}.db"
            shutil.copyfile(path, copy)
            copy.with_name(copy.name + "-wal").write_bytes(log[:cut])
            with Store.open(copy, create=True) as after:
                rows = [row.result is not None for row in after.results().values()]
                assert rows == sorted(rows, reverse=True)  # a prefix without gaps
                seen.add(sum(rows))
                record_all(after, every)
                assert after.rows_sha256() == store.rows_sha256()
        assert {0, 6, 11} <= seen


# --- the lock --------------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from depthgauge.sweeps.store import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_lock_names_its_holder_and_is_released_with_it(path: Path) -> None:
    for ending in ("kill", "communicate"):
        process = hold(path)
        holder = holder_of(lock_path(path))
        assert holder is not None
        assert holder.pid == process.pid
        assert holder.host == socket.gethostname()
        with pytest.raises(InputError, match=rf"in use by process {process.pid} on .*, since 20"), run_lock(path):
            pass
        getattr(process, ending)()
        process.communicate()
        assert holder_of(lock_path(path)) is None
        with run_lock(path):
            assert holder_of(lock_path(path)) is not None
        assert not lock_path(path).exists()


def test_holder_of_does_not_disturb_a_run(path: Path) -> None:
    assert holder_of(lock_path(path)) is None
    assert list(path.parent.iterdir()) == []
    with run_lock(path):
        for _ in range(50):
            assert holder_of(lock_path(path)) is not None
    lock_path(path).write_text('{"pid": 1', encoding="utf-8")  # as a killed process leaves it
    assert holder_of(lock_path(path)) is None
    with run_lock(path):
        assert json.loads(lock_path(path).read_text(encoding="utf-8"))["pid"] > 0


def test_an_impossible_lock_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="Not a directory"), run_lock(tmp_path / "file" / "s.db"):
        pass
    name = "s" * 255  # the longest name of a file; that of the lock is longer
    with pytest.raises(OutputError, match="cannot lock"), run_lock(tmp_path / name):
        pass


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    store = tmp_path / "mistyped" / "deep" / "s.db"
    with pytest.raises(InputError, match=rf"mkdir -p {store.parent}"), run_lock(store):
        pass
    assert list(tmp_path.iterdir()) == []
