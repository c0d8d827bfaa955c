"""Benchmark of sweeps: overhead per cell, and speed-up with a second process.

Claims checked here: (1) a cell that does nothing costs less than 2 ms with the local engine, including the commit of
its row to disk; (2) two processes compute a grid of real cells at least 1.7 times as fast as one, not counting the
start of the processes. The benchmark fails if one process and two processes give different rows.

Run: python benchmarks/sweep.py [--out results/benchmarks/sweep.json]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from depthgauge.base.io import write_text
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import SEED, Cell, Grid, Task
from depthgauge.sweeps.run import Local, run_grid
from depthgauge.sweeps.store import read_status

EMPTY_CELLS = 2000
MOST_MILLISECONDS, LEAST_SCALING = 2.0, 1.7


def nothing(cell: Cell) -> dict[str, Any]:
    """Do nothing."""
    return {}


NOTHING = Task("nothing", 1, {"seed": SEED}, nothing)


def seconds(grid: Grid, store: Path, jobs: int) -> float:
    """Return the wall-clock time of a run into a new store."""
    begun = time.perf_counter()
    done = run_grid(grid, store, engine=Local(jobs))
    taken = time.perf_counter() - begun
    if done.count.missing or done.count.failed:
        sys.exit(f"the run is incomplete: {done.count}")
    return taken


def warm(folder: Path, jobs: int) -> None:
    """Start the worker processes and import everything that a cell needs."""
    small = Grid(TASKS["collapse-error"], {**REAL, "tokens": [8]}, 8)
    run_grid(small, folder / f"warm{jobs}.db", engine=Local(jobs))


REAL: dict[str, Any] = {
    "method": ["mean-field", "parallel"],
    "eta": [0.01, 0.1],
    "layers": [12],
    "heads": [4],
    "dim": [64],
    "tokens": [256],
}


def overhead(folder: Path, jobs: int) -> float:
    """Return the milliseconds per empty cell."""
    grid = Grid(NOTHING, {"seed": list(range(EMPTY_CELLS))})
    best = min(seconds(grid, folder / f"empty{jobs}-{k}.db", jobs) for k in range(3))
    return 1000 * best / EMPTY_CELLS


def scaling(folder: Path, repetitions: int) -> dict[str, float]:
    """Time the same real cells with one and with two processes alternately; keep the best of three."""
    grid, times = Grid(TASKS["collapse-error"], REAL, repetitions), {1: float("inf"), 2: float("inf")}
    hashes = set()
    for turn in range(3):
        for jobs in times:
            store = folder / f"real{jobs}-{turn}.db"
            times[jobs] = min(times[jobs], seconds(grid, store, jobs))
            hashes.add(read_status(store).rows_sha256)
    if len(hashes) != 1:
        sys.exit("one process and two processes give different rows")
    return {"cells": len(grid.cells()), "one": times[1], "two": times[2], "ratio": times[1] / times[2]}


def main() -> None:
    """Measure, print and save; exit with an error if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/benchmarks/sweep.json")
    parser.add_argument("--repetitions", type=int, default=25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm(folder, 2)
        per_cell = {jobs: overhead(folder, jobs) for jobs in (1, 2)}
        real = scaling(folder, options.repetitions)
    for jobs, cost in per_cell.items():
        print(f"overhead per cell with jobs = {jobs}: {cost:.3f} ms   (claim: < {MOST_MILLISECONDS} ms)")
    print(
        f"{real['cells']} real cells: one process {real['one']:.2f} s, two {real['two']:.2f} s, "
        f"ratio {real['ratio']:.2f}   (claim: >= {LEAST_SCALING})"
    )
    load = os.getloadavg()[0]
    print(f"cores {os.cpu_count()}, load over the last minute {load:.2f}")
    found = {"overhead_ms": {str(jobs): cost for jobs, cost in per_cell.items()}, "scaling": real, "load": load}
    write_text(options.out, json.dumps(found, indent=2) + "\n")
    if max(per_cell.values()) >= MOST_MILLISECONDS or real["ratio"] < LEAST_SCALING:
        sys.exit("a claim does not hold in this run")


if __name__ == "__main__":
    main()
