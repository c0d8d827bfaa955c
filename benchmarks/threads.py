"""Claim: with the default number of threads, certificates take at most 1.3 times as long as with the best number.

Measured in fresh processes, as a user starts them, on an idle machine and under synthetic load (one busy process per
core). The network is that of the README: 6 layers, 2 heads, width 16.

    python benchmarks/threads.py
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ALLOWED = 1.3
RUNS = 3
BUSY = "while True: pass"


def seconds(network: Path, threads: int | None) -> float:
    """Return the shortest of a few runs of `depthgauge collapse --method corrected`."""
    environment = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "depthgauge", "collapse", str(network), "--method", "corrected", "--json"]
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        subprocess.run(command, env=environment, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return min(times)


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
                default = seconds(network, None)
                fixed = {threads: seconds(network, threads) for threads in sorted({1, 2, cores})}
            finally:
                for process in busy:
                    process.kill()
            ratio = default / min(fixed.values())
            missed |= ratio > ALLOWED
            others = ", ".join(f"{threads} threads {value:.1f} s" for threads, value in fixed.items())
            name = "under load" if loaded else "idle"
            print(f"{name}: default {default:.1f} s, {others}; ratio to the best {ratio:.2f} (allowed {ALLOWED})")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
