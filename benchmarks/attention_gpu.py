"""Claim: on an H200 (bf16, 16 heads of 64, degree 2) `attention` is 40 times the fastest exact kernel at n = 131072.

Causal attention is 15 times as fast, forward and backward 25 times (causal 13 times), and the forward pass is at least
1.6 times as fast from n = 8192 on. The peers are torch's exact backends (flash, cuDNN) and our torch backend, an
unfused polynomial. A time is the median over calls that all have new tensors, with score sizes that differ by up to
30 %, in turns with the peers (see fresh_tensors.py). It includes the proof of B and the decision. The column
`repeated` shows calls on the same tensors, and `first` the first call, in which kernels are compiled. The polynomial
path is forced; attention_dropin.py measures the choice between the paths. Before anything is timed, outputs and
gradients are compared with exact attention in float64 and with the guarantee of the plan.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from attention_checks import check_all_gradients, check_kinds, check_small
from fresh_tensors import (
    HEADS,
    VARIATION,
    WIDTH,
    Contender,
    Effort,
    Place,
    Stopwatch,
    compare,
    exact_peers,
    of,
    small_scores,
)

from depthgauge.fast_attention.attention import attention, decide
from depthgauge.fast_attention.backends import TORCH_GPU
from depthgauge.fast_attention.polynomial_path import make_spec
from depthgauge.fast_attention.problem import Options, checked

CLAIMS = {"forward": 40.0, "causal": 15.0, "forward and backward": 25.0, "causal forward and backward": 13.0}
LARGEST = 131072
CROSSOVER, FROM_THERE = 8192, 1.6
FEATURES = 10 * 256
"""The features that the kernels compute: ten pairs of tiles of 16 coordinates, 256 products each."""


def milliseconds(run: Callable[[], object], seconds: float) -> float:
    """Return the median time of repeated runs between two events, after a warm-up."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < until and len(times) < 200):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def unfused(place: Place, n: int, bound: float, seconds: float) -> float:
    """Return the time of the same polynomial in plain torch operations, without the decision."""
    call = small_scores(place, n, bound, 1 + VARIATION)
    request = checked(call.q, call.k, call.v, Options(force="polynomial"))
    problem = request.flat()
    spec = make_spec(problem, decide(request, problem), list(range(problem.heads)), 2)
    return milliseconds(lambda: TORCH_GPU.forward(spec, problem.q, problem.k, problem.v, False), seconds)


def failed_checks(place: Place, bound: float, gradient_bound: float, is_short: bool) -> list[str]:
    """Return a description of every failed check. A later group of checks runs only if the groups before it passed."""
    if wrong := list(check_kinds(place, is_short)):
        return wrong
    sizes = ((3001, False), (5000, True), (LARGEST, False), (LARGEST, True))
    found = [check_small(place, n, bound, is_causal, "polynomial") for n, is_causal in sizes]
    if wrong := [problem for problem in found if problem is not None]:
        return wrong
    return list(check_all_gradients(place, gradient_bound, is_short))


def measured(place: Place, kind: str, n: int, bound: float, effort: Effort, watch: Stopwatch) -> dict[str, Any]:
    """Return one row of the table: the times of our path and of the fastest exact kernel."""
    is_causal, with_backward = kind.startswith("causal"), kind.endswith("backward")
    ours = Contender("ours", of(lambda q, k, v: attention(q, k, v, is_causal=is_causal, force="polynomial")))
    times = compare(
        [ours, *exact_peers(is_causal)],
        lambda factor: small_scores(place, n, bound, factor, with_backward),
        effort,
        watch,
    )
    mine = times.pop("ours")
    peer = min(times, key=lambda name: times[name].median)
    # Forward: moments and rows. Backward: the moments again, ∂v, and all 4096 ordered pairs for ∂q and for ∂k.
    products = 2 * FEATURES + (2 * FEATURES + 2 * WIDTH**2 if with_backward else 0)
    return {
        "kind": kind, "n": n, "peer": peer, "exact_ms": {name: t.median for name, t in times.items()},
        "ours_ms": asdict(mine), "times": times[peer].median / mine.median,
        "tflops": 2.0 * products * WIDTH * n * HEADS / mine.median / 1e9,
    }  # fmt: skip


def judged(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return every claim about sizes that were measured, and whether it is met."""
    met = {}
    for kind, claim in CLAIMS.items():
        for row in rows:
            if row["kind"] == kind and row["n"] == LARGEST:
                met[f"{kind}: at least {claim:g} times as fast at {LARGEST} tokens"] = row["times"] >= claim
    from_there = [row["times"] >= FROM_THERE for row in rows if row["kind"] == "forward" and row["n"] >= CROSSOVER]
    if from_there:
        met[f"forward: at least {FROM_THERE:g} times as fast from {CROSSOVER} tokens"] = all(from_there)
    return met


def main() -> int:
    """Check, measure, print and save. Return 1 if a check fails or a claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 8192, 16384, 65536, LARGEST])
    parser.add_argument("--bound", type=float, default=0.3, help="the largest B of the forward runs")
    parser.add_argument(
        "--gradient-bound", type=float, default=0.045,
        help="the largest B of the runs with gradients, which meet 1e-3 at degree 2",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=2.0, help="time for every measurement")
    parser.add_argument("--short", action="store_true", help="check bf16 and width 64 only")
    parser.add_argument("--out", type=Path, default=Path("results/attention_gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU is available: nothing was measured")
        return 0
    torch.manual_seed(0)
    place = Place(torch.device("cuda", torch.cuda.current_device()))
    if wrong := failed_checks(place, options.bound, options.gradient_bound, options.short):
        print("not measured, because a check failed:", *wrong, sep="\n")
        return 1
    big = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / milliseconds(lambda: big @ big, options.seconds / 4) / 1e9
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, bf16, {HEADS} heads of {WIDTH}, degree 2")
    print(f"matrix products reach {rate:.0f} TFLOP/s; outputs and gradients agree with float64 within their bounds")
    print(
        f"milliseconds, medians over fresh tensors, B up to {options.bound} ({options.gradient_bound} with gradients)"
    )
    columns = ("n", "exact", "by", "ours", "times", "mean", "repeated", "first", "TFLOP/s", "share")
    print(f"{'':28}" + "".join(f"{column:>9}" for column in columns), flush=True)
    rows, effort, watch = [], Effort(seconds=options.seconds), Stopwatch(place.device)
    for kind in CLAIMS:
        for n in options.tokens:
            bound = options.gradient_bound if kind.endswith("backward") else options.bound
            row = measured(place, kind, n, bound, effort, watch)
            row["share_of_matrix_rate"] = row["tflops"] / rate
            if kind == "forward":
                row["unfused_ms"] = unfused(place, n, options.bound, options.seconds / 4)
            rows.append(row)
            ours = row["ours_ms"]
            print(
                f"{kind:28}{n:9d}{row['exact_ms'][row['peer']]:9.3f}{row['peer']:>9}{ours['median']:9.3f}"
                f"{row['times']:9.1f}{ours['mean']:9.3f}{ours['repeated']:9.3f}{ours['first']:9.1f}{row['tflops']:9.0f}"
                f"{row['share_of_matrix_rate']:9.0%}"
                + (f"   unfused torch {row['unfused_ms']:.2f}" if "unfused_ms" in row else ""),
                flush=True,
            )
    met = judged(rows)
    for claim_text, is_met in met.items():
        print(f"{claim_text}: {'met' if is_met else 'NOT MET'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "met": met, "rows": rows, "matrix_tflops": rate, "device": name, "heads": HEADS, "width": WIDTH,
        "bound": options.bound, "gradient_bound": options.gradient_bound, "torch": torch.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
