"""A grid for tests, `depthgauge sweep` as a separate process, and the rows of an undisturbed run."""

import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from divided_runs import forkserver, run_command

from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import read_grid
from depthgauge.sweeps.run import Local, run_grid
from depthgauge.sweeps.store import Store

GRID = """
task = "collapse-error"
repetitions = {repetitions}
[parameters]
method = ["mean-field", "parallel", "last-layer"]
eta = [0.01, 0.1]
layers = [8]
heads = [2]
dim = [32]
tokens = [{tokens}]
"""


def write_grid(directory: Path, repetitions: int, tokens: int = 256) -> Path:
    path = directory / "grid.toml"
    path.write_text(GRID.format(repetitions=repetitions, tokens=tokens), encoding="utf-8")
    return path


def undisturbed(grid: Path, directory: Path) -> str:
    """Return the hash of the rows of an undisturbed run."""
    store = directory / "undisturbed.db"
    run_grid(read_grid(grid, TASKS), store, engine=Local(1))
    return rows_sha256(store)


def rows_sha256(store: Path) -> str:
    with Store.open(store) as opened:
        return opened.rows_sha256()


def rows_done(store: Path) -> int:
    if not store.exists():
        return 0
    with Store.open(store) as opened:
        return opened.count().done


class SweepProcess:
    """`depthgauge sweep …` in its own process group; `largest` is the size in bytes that files may have.

    The methods are those of `subprocess.Popen`. The process is forked from one that has imported torch.
    """

    def __init__(self, *words: object, largest: int = resource.RLIM_INFINITY) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        command = "-m", "depthgauge", "sweep", *map(str, words)
        given = command, os.environ | {"OMP_NUM_THREADS": "1"}, self._out, self._err
        self._process = forkserver().Process(target=_run_alone, args=(largest, *given))
        self._process.start()
        self.pid, self.kill = self._process.pid or 0, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("sweep", timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        self.wait(timeout)
        with self._folder:
            return self._out.read_text(encoding="utf-8"), self._err.read_text(encoding="utf-8")


def _run_alone(largest: int, *given: Any) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes started in the background ignore Ctrl-C
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    run_command(*given)


def wait_until(ready: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
