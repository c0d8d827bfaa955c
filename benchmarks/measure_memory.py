"""Claim: `measure` at n = 8192 with 8 heads, 12 layers and dim 64 in float64 needs less than 2 GB of memory.

One attention matrix of that size has 0.5 GB, and the network has 96 of them; `measure` computes scores in blocks of
rows. The measurement runs in a separate process, and the operating system reports its peak resident size.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

CLAIM_GB = 2.0

CHILD = """
import json, resource, sys, time
import torch
from depthgauge import measure, random_network
from depthgauge.theory.network.random_networks import uniform_inputs
tokens, layers, threads = map(int, sys.argv[1:])
torch.set_num_threads(threads)
network = random_network(layers=layers, heads=8, dim=64, eta=0.1, seed=0)
x = uniform_inputs(1, tokens, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
profile = measure(network, x)
seconds = time.perf_counter() - started
heads = profile.heads[-1]
ok = len(profile.heads) == layers and bool((heads.contraction <= heads.contraction_bound).all())
print(json.dumps({"before_kb": before, "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                  "seconds": seconds, "ok": ok}))
"""


def main() -> int:
    """Run, print and save. Return 1 if the claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/measure_memory.json"))
    options = parser.parse_args()
    started = time.perf_counter()
    sizes = [str(options.tokens), str(options.layers), str(options.threads)]
    child = subprocess.run([sys.executable, "-c", CHILD, *sizes], capture_output=True, text=True, check=False)
    if child.returncode:
        print(f"no result: the run failed with {child.stderr.strip().splitlines()[-1:]}")
        return 1
    found = json.loads(child.stdout)
    if not found["ok"]:
        print("no result: a contraction exceeds its bound")
        return 1
    in_gb = 1024 / 1e9 if sys.platform != "darwin" else 1 / 1e9  # kilobytes on Linux, bytes on macOS
    peak, before = found["peak_kb"] * in_gb, found["before_kb"] * in_gb
    met = peak < CLAIM_GB
    dense = options.tokens**2 * 8 * 8 / 1e9
    print(f"n={options.tokens}, L={options.layers}, H=8, d=64, float64, {options.threads} thread(s)")
    print(f"{'before measuring':34} {before:7.3f} GB")
    print(f"{'peak':34} {peak:7.3f} GB")
    print(f"{'all scores of one layer, if stored':34} {dense:7.1f} GB")
    print(f"{'seconds':34} {found['seconds']:7.1f}")
    print(f"claim under {CLAIM_GB} GB: {'met' if met else 'NOT MET'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "claim": f"measure stays under {CLAIM_GB} GB", "met": met, "peak_gb": peak, "before_gb": before,
        "seconds": found["seconds"], "wall_seconds": time.perf_counter() - started, "tokens": options.tokens,
        "layers": options.layers, "heads": 8, "dim": 64, "dtype": "float64", "threads": options.threads,
        "python": platform.python_version(), "own_peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
