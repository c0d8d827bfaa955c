"""Softmax against linear attention: the structured path against batched dense torch, the panels, and large n.

Claims, each checked here: the structured path decides exactly as the dense one and is at least 100 times faster a
model at n = 1000, d = 12; all 19 panels of the paper, exact curves, files and pictures included, take less than
60 seconds; 100 models at n = 10⁶, d = 1002 take less than one.

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

from depthgauge._io import write_text
from depthgauge.separation import dense as naive
from depthgauge.separation import structured
from depthgauge.separation.decisions import tables
from depthgauge.separation.montecarlo import estimate
from depthgauge.separation.panels import PAPER_PANELS, SHEETS
from depthgauge.separation.sampling import draw_attention
from depthgauge.separation.settings import AttentionSetting, CrossAttention, SelfAttention, build_setting
from depthgauge.workflows.reproduce.draw import reproduce

NAIVE_MODELS, AT_ONCE, MANY = 24, 4, 20_000
LEAST_RATIO, MOST_PANEL_SECONDS, MOST_LARGE_SECONDS = 100.0, 60.0, 1.0


def seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """The least of several wall-clock times."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def dense(setting: AttentionSetting, models: int) -> np.ndarray:
    """The dense way, a few models to a batch so that the n × n scores stay in memory."""
    batches = [draw_attention(setting, 0, first, AT_ONCE) for first in range(0, models, AT_ONCE)]
    return np.concatenate([naive.conditions(setting, batch) for batch in batches])


def ours(setting: AttentionSetting, models: int) -> np.ndarray:
    """The structured way from nothing: the tables are made anew, the models drawn, the decisions looked up."""
    tables.cache_clear()
    return structured.conditions(setting, draw_attention(setting, 0, 0, models))


def against_dense(setting: AttentionSetting) -> dict[str, Any]:
    """Time a model both ways, after checking that both decide alike."""
    expected = dense(setting, NAIVE_MODELS)
    if not np.array_equal(ours(setting, NAIVE_MODELS), expected):
        sys.exit(f"structured and dense disagree at {setting}: nothing to time")
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
    """Every sheet of the paper at its repetition counts, written to a directory that is thrown away."""
    figures = [name for name in SHEETS if name != "B-degree"]
    taken = {}
    with tempfile.TemporaryDirectory() as directory:
        for figure in figures:
            taken[figure] = seconds(lambda figure=figure: reproduce(figure, directory), repeats=1)
    return {"panels": len(PAPER_PANELS), "seconds": sum(taken.values()), "by_figure": taken}


def large() -> dict[str, Any]:
    """100 models of a million tokens."""
    setting = build_setting("self", n=10**6, d=1002)

    def work() -> None:
        tables.cache_clear()
        estimate(setting, 100)

    return {"n": 10**6, "d": 1002, "models": 100, "seconds": seconds(work)}


def main() -> None:
    """Measure, print, save, and fail when a claim does not hold."""
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
    print(f"{panels['panels']} panels at the paper's repetition counts: {panels['seconds']:.1f} s ({parts})")
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
