"""Softmax against linear attention: the structured implementation against dense torch, the panels, and large n.

Claims: The structured implementation makes the same decisions as the dense one, and is at least 100 times faster per
model at n = 1000, d = 12. All 19 panels of the paper, including exact curves, files and pictures, take less than 60
seconds. 100 models at n = 10⁶, d = 1002 take less than one second.

Run: python benchmarks/separation.py [--out results/benchmarks/separation.json]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthgauge.base.io import write_text
from depthgauge.papers.reproduce.study import reproduce
from depthgauge.papers.separation import decisions
from depthgauge.papers.separation.decisions import draw_attention, tables
from depthgauge.papers.separation.probability import estimate
from depthgauge.papers.separation.settings import SHEETS, AttentionSetting, CrossAttention, SelfAttention, build_setting

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import dense_separation as naive

NAIVE_MODELS, AT_ONCE, MANY = 24, 4, 20_000
LEAST_RATIO, MOST_PANEL_SECONDS, MOST_LARGE_SECONDS = 100.0, 60.0, 1.0


def seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """Return the minimum of several wall-clock times."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def dense(setting: AttentionSetting, models: int) -> np.ndarray:
    """Run the dense implementation in small batches, so that the n × n scores fit into memory."""
    batches = [draw_attention(setting, 0, first, AT_ONCE) for first in range(0, models, AT_ONCE)]
    return np.concatenate([naive.conditions(setting, batch) for batch in batches])


def ours(setting: AttentionSetting, models: int) -> np.ndarray:
    """Run the structured implementation with an empty cache: build the tables, draw the models, look up decisions."""
    tables.cache_clear()
    return decisions.conditions(setting, draw_attention(setting, 0, 0, models))


def against_dense(setting: AttentionSetting) -> dict[str, Any]:
    """Check that both implementations make the same decisions, then time them."""
    expected = dense(setting, NAIVE_MODELS)
    if not np.array_equal(ours(setting, NAIVE_MODELS), expected):
        sys.exit(f"no timing: structured and dense disagree at {setting}")
    slow = seconds(lambda: dense(setting, NAIVE_MODELS), repeats=1) / NAIVE_MODELS
    few = seconds(lambda: ours(setting, NAIVE_MODELS)) / NAIVE_MODELS
    many = seconds(lambda: ours(setting, MANY)) / MANY
    return {
        "setting": f"{setting.kind}, X = {setting.x}, n = {setting.n}, d = {setting.d}, m = {setting.m}",
        "decisions_checked": int(expected.size),
        "dense_ms_a_model": 1e3 * slow,
        f"structured_ms_a_model_of_{NAIVE_MODELS}": 1e3 * few,
        f"structured_ms_a_model_of_{MANY}": 1e3 * many,
        f"times_faster_of_{NAIVE_MODELS}": slow / few,
        f"times_faster_of_{MANY}": slow / many,
    }


def all_panels() -> dict[str, Any]:
    """Reproduce every figure of the paper with its number of models, in a temporary directory."""
    figures = [name for name in SHEETS if name != "B-degree"]
    taken = {}
    with tempfile.TemporaryDirectory() as directory:
        for figure in figures:
            taken[figure] = seconds(lambda figure=figure: reproduce(figure, directory), repeats=1)
    count = sum(len(SHEETS[name].panels) for name in figures)
    return {"panels": count, "seconds": sum(taken.values()), "by_figure": taken}


def large() -> dict[str, Any]:
    """Time 100 models of a million tokens."""
    setting = build_setting("self", n=10**6, d=1002)

    def work() -> None:
        tables.cache_clear()
        estimate(setting, 100)

    return {"n": 10**6, "d": 1002, "models": 100, "seconds": seconds(work)}


def main() -> None:
    """Measure, print and save. Exit with status 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/separation.json"))
    out = parser.parse_args().out
    print(f"{os.cpu_count()} cores, torch {torch.__version__} on {torch.get_num_threads()} threads")
    settings = [
        SelfAttention(1000, 12, 15, 0.01, 1.2, 0.2, 0.8),
        SelfAttention(1000, 12, 15, 0.01, 1.2, 0.2, 0.8, "ones"),
        CrossAttention(1001, 12, 12, 0.01, 3.0),
    ]
    compared = [against_dense(setting) for setting in settings]
    print(f"\n{'setting':52} {'dense':>10} {'ours/' + str(NAIVE_MODELS):>10} {'ours/' + str(MANY):>11} {'faster':>15}")
    for row in compared:
        name, _, *times, few, many = row.values()
        print(f"{name:52} " + " ".join(f"{t:8.4f}ms" for t in times) + f"  {few:6.0f}× {many:7.0f}×")
    million = large()
    print(f"\nn = 10⁶, d = 1002, 100 models: {million['seconds']:.3f} s")
    panels = all_panels()
    parts = ", ".join(f"{name} {taken:.1f}" for name, taken in panels["by_figure"].items())
    print(f"{panels['panels']} panels with the paper's number of models: {panels['seconds']:.1f} s ({parts})")
    held = {
        "structured at least 100 times faster": min(r[f"times_faster_of_{NAIVE_MODELS}"] for r in compared)
        >= LEAST_RATIO,
        "19 panels under 60 s": panels["panels"] == 19 and panels["seconds"] < MOST_PANEL_SECONDS,
        "a million tokens under 1 s": million["seconds"] < MOST_LARGE_SECONDS,
    }
    found = {"cores": os.cpu_count(), "compared": compared, "large": million, "panels": panels, "held": held}
    write_text(out, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    print(f"saved {out}\n" + "\n".join(f"{'held ' if good else 'NOT HELD'} {claim}" for claim, good in held.items()))
    if not all(held.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
