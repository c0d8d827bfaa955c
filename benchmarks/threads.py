"""Claim: with the default number of threads, certificates take at most 1.3 times as long as with the best number.

Measured in fresh processes, as a user starts them, on an idle machine and under synthetic load (one busy process per
core). The network is that of the README: 6 layers, 2 heads, width 16.

    python benchmarks/threads.py
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ALLOWED = 1.3
RUNS = 4
BUSY = "while True: pass"


@dataclass
class Spent:
    """The shortest wall-clock time and the least processor time of several runs."""

    wall: float = float("inf")
    processor: float = float("inf")


def run_once(network: Path, threads: int | None, spent: Spent) -> None:
    """Run `depthgauge collapse --method corrected` in a fresh process and lower `spent` to its times."""
    environment = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "depthgauge", "collapse", str(network), "--method", "corrected", "--json"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    spent.wall, spent.processor = min(spent.wall, wall), min(spent.processor, used)


def main() -> int:
    """Measure, print, and return 1 if the claim is not met."""
    import depthgauge as dg

    cores = os.cpu_count() or 1
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "n.safetensors"
        dg.save_network(dg.random_network(layers=6, heads=2, dim=16, eta=0.05, seed=1), network)
        for loaded in (False, True):
            busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(cores if loaded else 0)]
            try:
                found: dict[int | None, Spent] = {threads: Spent() for threads in (None, *sorted({1, 2, cores}))}
                for _ in range(RUNS):  # in turns, so that other work on the machine slows all settings alike
                    for threads, spent in found.items():
                        run_once(network, threads, spent)
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
            default = found.pop(None)
            ratio = default.wall / min(spent.wall for spent in found.values())
            missed |= ratio > ALLOWED
            others = ", ".join(
                f"{threads} threads {spent.wall:.1f} s ({spent.processor:.1f})" for threads, spent in found.items()
            )
            name = "under load" if loaded else "idle"
            print(
                f"{name}: default {default.wall:.1f} s ({default.processor:.1f} s of processor time), {others}; ratio "
                f"to the best {ratio:.2f} (allowed {ALLOWED})",
                flush=True,
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
