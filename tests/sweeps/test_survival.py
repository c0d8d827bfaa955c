"""Crash safety: committed rows are kept, no cell occurs twice, and resumed runs give the rows of an undisturbed run."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sweeping import SweepProcess, rows_done, rows_sha256, undisturbed, wait_until, write_grid

from depthgauge.cli.main import main
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import read_grid
from depthgauge.sweeps.run import Local, run_grid
from depthgauge.sweeps.store import Store

pytestmark = pytest.mark.xdist_group("several processes")  # forked from the same one


def resumed(grid: Path, store: Path) -> int:
    """Run the grid to its end in this process; return how many cells were computed."""
    return run_grid(read_grid(grid, TASKS), store, engine=Local(1)).computed


def committed(store: Path) -> dict[str, str]:
    with Store.open(store) as opened:
        return {row[0]: row[1] for row in opened._read("SELECT identity, result FROM rows")}


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(status[1]) == pid:
                found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def kill_and_resume(tmp_path: Path, kills: int, repetitions: int, seed: int) -> None:
    grid, store = write_grid(tmp_path, repetitions, tokens=128), tmp_path / "s.db"
    rng, killed, before = random.Random(seed), 0, {}
    for _ in range(kills):
        process = SweepProcess(grid, "--store", store, "--jobs", 2)
        have = len(before)
        wait_until(lambda p=process, have=have: rows_done(store) > have or p.poll() is not None)
        try:
            process.wait(rng.uniform(0, 0.3))
        except subprocess.TimeoutExpired:
            workers = children_of(process.pid)
            process.kill()
            killed += 1
            wait_until(lambda w=workers: not any(map(is_alive, w)), 10)
        process.communicate()
        after = committed(store)
        assert before.items() <= after.items()  # no committed row is lost or changed
        before = after
    assert killed >= kills // 2
    assert resumed(grid, store) == 6 * repetitions - len(before)
    assert rows_sha256(store) == undisturbed(grid, tmp_path)
    assert len(committed(store)) == 6 * repetitions
    connection = sqlite3.connect(store)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.long
def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=2, repetitions=8, seed=1)


@pytest.mark.soak
def test_killed_twenty_times_and_resumed(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=20, repetitions=150, seed=2)


@pytest.mark.long
def test_locked_interrupted_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run is rejected, --status works meanwhile, and Ctrl-C to the process group ends the run cleanly."""
    grid, store, total = write_grid(tmp_path, 16, tokens=128), tmp_path / "s.db", 96

    def typed(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["depthgauge", "sweep", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    process = SweepProcess(grid, "--store", store, "--jobs", 2)
    wait_until(lambda: rows_done(store) > 5)
    os.kill(process.pid, signal.SIGSTOP)  # the stopped process keeps the lock
    code, out, err = typed(grid, "--store", store)
    assert (code, out) == (2, "")
    assert f"in use by process {process.pid} on" in err
    assert err.count("\n") == 1
    code, out, _ = typed("--status", store, "--json")
    assert json.loads(out)["running"]["pid"] == process.pid
    os.killpg(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate()
    assert process.poll() == 130
    kept = rows_done(store)
    assert 5 < kept < total
    expected = f"error: interrupted: {kept} of {total} cells done and kept in {store}; "
    # Progress comes first, as standard error is not a terminal.
    assert err.splitlines()[-1] == expected + "run the same command again to resume"
    code, out, err = typed(grid, "--store", store, "--json", "--jobs", 1)
    assert code == 0
    assert f"{total - kept} cells computed" in err
    found = json.loads(out)
    assert (found["done"], found["failed"], found["missing"]) == (total, 0, 0)
    assert found["running"] is None
    assert found["rows_sha256"] == undisturbed(grid, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.toml", "s.db", "undisturbed.db"]


def test_a_full_disk_ends_the_run_with_one_error_and_keeps_rows(tmp_path: Path) -> None:
    grid, store = write_grid(tmp_path, 30, tokens=4), tmp_path / "s.db"
    process = SweepProcess(grid, "--store", store, "--jobs", 1, largest=2**18)
    _, err = process.communicate()
    assert process.poll() == 1
    assert [line.split(":")[0] for line in err.splitlines() if not line.startswith("computing")] == ["error"]
    assert "free some disk space and run the same command again" in err
    kept = rows_done(store)
    assert 0 < kept < 180
    assert resumed(grid, store) == 180 - kept
    assert rows_sha256(store) == undisturbed(grid, tmp_path)
