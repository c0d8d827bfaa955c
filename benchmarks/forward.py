"""Claim: the forward pass takes at most 1.2 times as long as a plain loop over torch's attention.

For every layer and head, the plain loop projects, calls `scaled_dot_product_attention` and adds the result. The outputs
are compared before the timing. The two implementations alternate, and the medians are compared.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgauge import SelfAttentionNetwork, random_network

CLAIM = 1.2
TOLERANCE = 1e-5


def plain_loop(network: SelfAttentionNetwork, x: Tensor) -> Tensor:
    """Compute the network with one call of torch's attention per head."""
    for layer in network:
        y = x.clone()
        for h in range(layer.heads):
            # With four dimensions torch uses the fused kernel; with fewer it is three times slower.
            q, k, v = ((x @ weight[h])[None, None] for weight in (layer.query, layer.key, layer.value))
            y += F.scaled_dot_product_attention(q, k, v, scale=network.scale)[0, 0]
        x = y
    return x


def seconds(run: Callable[[], Tensor]) -> float:
    """Return the wall-clock time of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> int:
    """Check, time, print and save. Return 1 if the claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/forward.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    network = random_network(layers=12, heads=8, dim=64, eta=0.05, seed=0, dtype=torch.float32)
    x = 2 * torch.rand(options.tokens, 64, generator=torch.Generator().manual_seed(0)) - 1
    with torch.no_grad():
        ours, theirs = network(x), plain_loop(network, x)
        gap = float((ours - theirs).abs().max() / theirs.abs().max())
        if not gap <= TOLERANCE:
            print(f"no timing: the relative difference of the outputs is {gap:.2e}, more than {TOLERANCE:.0e}")
            return 1
        times: dict[str, list[float]] = {"depthgauge": [], "plain loop": []}
        runs = [("depthgauge", lambda: network(x)), ("plain loop", lambda: plain_loop(network, x))]
        for repetition in range(options.repetitions):
            for name, run in runs[:: 1 if repetition % 2 else -1]:  # alternate which one runs first
                times[name].append(seconds(run))

    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["depthgauge"] / medians["plain loop"]
    met = ratio <= CLAIM
    print(f"n={options.tokens}, L=12, H=8, d=64, float32, {options.threads} thread(s), torch {torch.__version__}")
    print(f"relative difference of the outputs: {gap:.1e}")
    print(f"{'':12} {'median':>10} {'min':>10} {'max':>10}")
    for name, values in times.items():
        print(f"{name:12} {medians[name]:9.4f}s {min(values):9.4f}s {max(values):9.4f}s")
    print(f"ratio {ratio:.2f}; claim at most {CLAIM}: {'met' if met else 'NOT MET'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "claim": f"forward takes at most {CLAIM} times a plain loop over scaled_dot_product_attention",
        "met": met, "ratio": ratio, "median_seconds": medians, "seconds": times, "relative_gap": gap,
        "tokens": options.tokens, "layers": 12, "heads": 8, "dim": 64, "dtype": "float32", "threads": options.threads,
        "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
