"""Claim: on two CPU cores (float32, width 16, degree 2) `attention` is faster from n = 4096, 10 times at 65536.

The peer is torch's `scaled_dot_product_attention` on the same cores. Our times include the proof of B and the decision.
Peak memory must grow linearly in n. Outputs are compared with exact attention before anything is timed.
`--picture FILE.png` measures speed-up and degree against B and draws docs/concepts/speed.png.
"""

import argparse
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgauge.fast_attention.attention import attention, attention_plan

WIDTH = 16
CROSSOVER, AT_LEAST, LARGEST = 4096, 10.0, 65536
MEMORY = """
import resource, sys, torch
sys.path[:0] = [{path!r}]
from attention_cpu import draw
from depthgauge.fast_attention.attention import attention
attention(*draw(int(sys.argv[1]), 0.3), force="polynomial")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def draw(n: int, bound: float, heads: int = 1) -> list[Tensor]:
    """Draw q, k, v whose proved score bound is just below `bound`."""
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, heads, n, WIDTH, generator=generator) for _ in range(3))
    longest = (0.97 * bound * math.sqrt(WIDTH)) ** 0.5
    q, k = (x * (longest / x.norm(dim=-1).max()) for x in (q, k))
    return [q, k, v]


def seconds(run: Callable[[], object], repetitions: int) -> float:
    """Return the median time of repeated runs after one warm-up run."""
    run()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def is_within_guarantee(tensors: list[Tensor], tolerance: float = 1e-3) -> bool:
    """Return whether the output is within its guarantee of float64, on at most 256 rows."""
    q, k, v = tensors
    rows = torch.linspace(0, q.shape[-2] - 1, min(256, q.shape[-2])).long()
    plan = attention_plan(q, k, v, tolerance=tolerance, force="polynomial")
    out = attention(q, k, v, tolerance=tolerance, force="polynomial")
    assert isinstance(out, Tensor)
    exact = F.scaled_dot_product_attention(q[..., rows, :].double(), k.double(), v.double())
    width = v.amax(-2, keepdim=True) - v.amin(-2, keepdim=True)
    allowed = (plan.guarantee + plan.rounding) * width + plan.output_unit * exact.abs()
    return bool(((out[..., rows, :] - exact).abs() <= allowed).all())


def peak_memory(n: int) -> float:
    """Return the peak resident size in MB of a process that computes one call with n tokens."""
    code = MEMORY.format(path=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code, str(n)], capture_output=True, text=True, check=True)
    return int(done.stdout) * (1024 if sys.platform != "darwin" else 1) / 1e6


def picture(target: Path, n: int, repetitions: int) -> None:
    """Measure and draw the speed-up over exact attention and the degree against B, for three tolerances."""
    import matplotlib.pyplot as plt

    from depthgauge.papers.reproduce.style import MARKERS, ORDERED, figure_style

    bounds = [2.0 ** (i / 2) for i in range(-16, 3)]
    exact = seconds(lambda: F.scaled_dot_product_attention(*draw(n, 0.1)), repetitions)
    with figure_style():
        figure, (above, below) = plt.subplots(2, 1, figsize=(5.2, 4.2), sharex=True, height_ratios=(3, 2))
        for tolerance, colour, marker in zip((1e-2, 1e-3, 1e-4), ORDERED, MARKERS, strict=False):
            times, degrees = [], []
            for bound in bounds:
                q, k, v = draw(n, bound)
                head = attention_plan(q, k, v, tolerance=tolerance).heads[0]
                ours = seconds(lambda: attention(q, k, v, tolerance=tolerance), repetitions)  # noqa: B023
                times.append(exact / ours)
                degrees.append(head.degree if head.path == "polynomial" else math.nan)
            label = f"tolerance {tolerance:g}"
            above.plot(bounds, times, color=colour, marker=marker, markersize=3, label=label)
            below.step(bounds, degrees, where="mid", color=colour, marker=marker, markersize=3)
        above.axhline(1, color="#6B6B6B", linewidth=0.8, linestyle="--")
        above.set(
            xscale="log",
            yscale="log",
            ylabel="speed-up over exact attention",
            title=f"n = {n}, width {WIDTH}, one head",
        )
        above.legend()
        below.set(xlabel="B, the proved bound on the scores", ylabel="degree", yticks=range(5))
        figure.tight_layout()
        figure.savefig(target, dpi=150)
    print(f"wrote {target}")


def main() -> int:
    """Check, measure, print and save. Return 1 if a check fails or the claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384, 65536])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="draw speed-up and degree against B into this file and exit")
    parser.add_argument("--out", type=Path, default=Path("results/attention_cpu.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.picture is not None:
        picture(options.picture, 16384, options.repetitions)
        return 0
    print(f"float32, one head of {WIDTH}, degree 2, {options.threads} thread(s), torch {torch.__version__}")
    print(f"{'n':>7} {'exact':>10} {'ours':>10} {'times':>6}")
    rows = []
    for n in options.tokens:
        tensors = draw(n, 0.3)
        plan = attention_plan(*tensors, force="polynomial")
        if not is_within_guarantee(tensors) or plan.heads[0].degree != 2:
            print(f"not measured: the output at n = {n} exceeds its guarantee or does not have degree 2")
            return 1
        few = options.repetitions if n < LARGEST else 2
        exact = seconds(lambda: F.scaled_dot_product_attention(*tensors), few)  # noqa: B023
        ours = seconds(lambda: attention(*tensors, force="polynomial"), options.repetitions)  # noqa: B023
        rows.append({"n": n, "exact": exact, "ours": ours, "times": exact / ours})
        print(f"{n:7d} {exact:9.4f}s {ours:9.4f}s {exact / ours:6.1f}")
    ahead = [row["n"] for row in rows if row["times"] > 1]
    peaks = {n: peak_memory(n) for n in (131072, 262144, 524288)}
    steps = [(peaks[262144] - peaks[131072]) / 131072, (peaks[524288] - peaks[262144]) / 262144]
    print("peak memory: " + ", ".join(f"{mb:.0f} MB at {n}" for n, mb in peaks.items()))
    met = {
        f"faster than exact from n = {CROSSOVER}": all(row["times"] > 1 for row in rows if row["n"] >= CROSSOVER)
        and bool(ahead),
        f"at least {AT_LEAST:g} times as fast at n = {LARGEST}": rows[-1]["n"] < LARGEST
        or rows[-1]["times"] >= AT_LEAST,
        "peak memory is linear in n": steps[1] <= 1.3 * steps[0],
    }
    for claim, is_met in met.items():
        print(f"{claim}: {'met' if is_met else 'NOT MET'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "met": met, "rows": rows, "peak_mb": peaks, "threads": options.threads, "width": WIDTH,
        "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
        "own_peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
