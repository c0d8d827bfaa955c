"""A grid for tests, `depthgauge sweep` as a separate process, and the rows of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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


def restore_interrupts() -> None:
    """Restore the default action of Ctrl-C, which processes started in the background ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def sweep(*words: object, **options: object) -> "subprocess.Popen[str]":
    """Start `depthgauge sweep …` in its own process group."""
    options.setdefault("preexec_fn", restore_interrupts)
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-m", "depthgauge", "sweep", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        **options,
    )


def wait_until(ready: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
