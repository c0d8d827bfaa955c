"""The Dask engine on a cluster of two worker processes."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest
from divided_runs import forkserver
from sweeping import rows_sha256, undisturbed, write_grid

from depthgauge.base.errors import InputError, InterruptedRunError
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps import run
from depthgauge.sweeps.grid import SEED, Grid, Task, read_grid
from depthgauge.sweeps.run import Dask, EngineError, run_grid
from depthgauge.sweeps.store import read_status

dask = pytest.importorskip("dask", reason="the extra cluster is not installed")
distributed = pytest.importorskip("distributed", reason="the extra cluster is not installed")
pytestmark = pytest.mark.xdist_group("several processes")  # forked from the same one


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """Let clusters fork their workers from a process that has imported torch."""
    forkserver()
    ensure_running()  # Dask would name other packages to import
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        yield


def local_cluster(workers: int) -> "distributed.LocalCluster":
    return distributed.LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address=":0", host="127.0.0.1", silence_logs=50
    )


@pytest.fixture(scope="module")
def cluster(forked_workers: None) -> Iterator["distributed.LocalCluster"]:
    with local_cluster(2) as running:
        yield running


def test_the_run_survives_a_killed_worker(cluster: "distributed.LocalCluster", tmp_path: Path) -> None:
    grid, store = write_grid(tmp_path, 20, tokens=100), tmp_path / "s.db"
    killed: list[int] = []

    def kill_one(done: int, total: int, label: str) -> None:
        if done == 30:
            killed.append(next(iter(cluster.workers.values())).pid)
            os.kill(killed[0], signal.SIGKILL)

    done = run_grid(read_grid(grid, TASKS), store, engine=Dask(cluster.scheduler_address), progress=kill_one)
    assert killed
    assert (done.computed, done.count.done) == (120, 120)
    assert rows_sha256(store) == undisturbed(grid, tmp_path)


def test_an_interrupted_run_is_resumed(cluster: "distributed.LocalCluster", tmp_path: Path) -> None:
    grid, store = write_grid(tmp_path, 4, tokens=20), tmp_path / "s.db"

    def stop(done: int, total: int, label: str) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="7 of 24 cells done"):
        run_grid(read_grid(grid, TASKS), store, engine=Dask(cluster.scheduler_address), progress=stop)
    assert run_grid(read_grid(grid, TASKS), store, engine=Dask(cluster.scheduler_address)).computed == 17
    assert rows_sha256(store) == undisturbed(grid, tmp_path)


def test_the_error_names_a_worker_with_another_version(
    cluster: "distributed.LocalCluster", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "__version__", "0.0.0")
    with pytest.raises(InputError, match=r"the worker tcp://.* has depthgauge .*, this machine has 0\.0\.0"):
        run_grid(read_grid(write_grid(tmp_path, 1), TASKS), tmp_path / "s.db", engine=Dask(cluster.scheduler_address))
    assert not (tmp_path / "s.db").exists()


def test_a_wrong_address_raises_within_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * run.CONNECT_SECONDS < 10
    monkeypatch.setattr(run, "CONNECT_SECONDS", 0.5)
    with socket.socket() as taken:  # bound but not listening: no other process can answer there
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(InputError, match="no Dask scheduler answers at"):
            run_grid(read_grid(write_grid(tmp_path, 1), TASKS), tmp_path / "s.db", engine=Dask(address))
        assert time.monotonic() - begun < 5
    assert not (tmp_path / "s.db").exists()


def test_a_scheduler_without_workers_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CONNECT_SECONDS", 1)
    with (
        local_cluster(0) as empty,
        pytest.raises(InputError, match="has no workers; start some with `dask worker tcp://"),
    ):
        Dask(empty.scheduler_address).check()


def test_a_cell_that_the_cluster_abandons_ends_the_run(tmp_path: Path) -> None:
    """The run must not wait forever for a cell that kills every worker it runs on."""
    deadly = Task("deadly", 1, {"seed": SEED}, lambda cell: os._exit(1))
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        local_cluster(1) as fragile,
        pytest.raises(EngineError, match=r"the cluster abandoned a cell.*0 of 1 cell done and kept"),
    ):
        run_grid(Grid(deadly, {"seed": [0]}), tmp_path / "s.db", engine=Dask(fragile.scheduler_address))
    assert read_status(tmp_path / "s.db").count.missing == 1
