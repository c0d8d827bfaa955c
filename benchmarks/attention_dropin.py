"""Claim: on an H200, `dg.attention` in place of scaled_dot_product_attention never costs more than 5 % or 10 µs.

bf16, 16 heads of 64, tolerance 1e-3, the path is chosen by `attention` itself. Every time is the median over calls that
all have new tensors, with score sizes that differ by up to 30 %, in turns with torch's attention in the same run (see
fresh_tensors.py). The column `noise` shows how much a second measurement of torch's attention differs. The sections:

- exact: scores of a trained model, 1 to 16,384 tokens, where exact attention is chosen.
- decoding: one query on 4,096 keys and more, one key more at every call, batch 8. cuDNN prepares a plan for every new
  length, which takes tens of milliseconds; this is done before the timed calls, because both sides would pay it.
- regime: small scores, where no call may take more than 5 % longer. At 131,072 tokens `attention` must be 40 times as
  fast as the fastest exact kernel (causal 15, with backward 25, causal with backward 13), and at 8,192 tokens 1.6 times
  as fast forward.
- host: the time that the Python calls of a forward and a backward pass take at 4,096 tokens with the polynomial path
  forced, at most 0.4 ms.
- model: a BERT encoder with the sizes of MiniLM and `dg.register_attention`, at most 5 % slower than stock SDPA.

Before anything is timed, outputs and gradients are compared with float64.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attention_checks import check_gradients, check_small, check_trained
from encoder_pair import EncoderPair, encoder
from fresh_tensors import (
    AGAIN,
    HEADS,
    VARIATION,
    WIDTH,
    Call,
    Contender,
    Effort,
    Place,
    Stopwatch,
    compare,
    exact_peers,
    factors,
    of,
    sdpa,
    sdpa_again,
    small_scores,
    trained_scores,
)

import depthgauge as dg

SHARE, MARGIN = 1.05, 0.010
"""A call may take SHARE times as long as torch's attention, or MARGIN milliseconds longer if this is more."""
LARGEST, CROSSOVER, FROM_THERE = 131072, 8192, 1.6
AT_LARGEST = {"forward": 40.0, "causal": 15.0, "forward and backward": 25.0, "causal forward and backward": 13.0}
KINDS = tuple(AT_LARGEST)
HOST_MS = 0.4
MODEL_SHARE = 1.05
MODEL_GAP = 0.01
"""The largest relative difference of the outputs of the two models, in Frobenius norm."""
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    exact: tuple[int, ...] = (1, 16, 256, 1024, 4096, 8192, 16384)
    decoding: int = 4096
    batch: int = 8
    regime: tuple[int, ...] = (4096, CROSSOVER, LARGEST)
    host: int = 4096
    checked: tuple[int, ...] = (1, 16, 300, 1024, 4096)
    model: tuple[tuple[int, int], ...] = ((1, 128), (8, 512), (64, 128))
    model_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    bound: float = 0.3
    gradient_bound: float = 0.045


QUICK = Sizes(exact=(1, 1024), regime=(4096, CROSSOVER), checked=(1, 300), model=((1, 128),))


@dataclass(frozen=True)
class Bench:
    """The settings of one run. `model_path` is a checkpoint, or None for random weights."""

    place: Place
    effort: Effort
    watch: Stopwatch
    sizes: Sizes
    model_path: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table. `ours` and `peers` are `Times` as dicts; `claims` maps each claim to whether it is met."""

    section: str
    what: str
    n: int
    path: str
    ours: dict[str, float]
    peers: dict[str, dict[str, float]]
    claims: dict[str, bool]

    def line(self) -> str:
        """Return the row as text. The ratio is ours ÷ SDPA, or SDPA ÷ ours with × where ours is faster."""
        theirs, mine, own = self.peers["SDPA"]["median"], self.ours["median"], self.ours
        times = f"{mine / theirs:8.2f}" if mine >= theirs else f"{theirs / mine:7.1f}×"
        return (
            f"{self.section:9}{self.what:40}{self.n:7d} {self.path:11}{theirs:9.3f}{mine:9.3f}{times:>9}"
            f"{1e3 * (mine - theirs):+10.1f}{self.noise():>8}{own['mean']:9.3f}{own['repeated']:9.3f}"
            f"{own['first']:9.1f}" + ("" if all(self.claims.values()) else "   NOT MET")
        )

    def noise(self) -> str:
        """Return the difference of two measurements of torch's attention in microseconds, or a dash."""
        if AGAIN not in self.peers:
            return "-"
        return f"{1e3 * (self.peers[AGAIN]['median'] - self.peers['SDPA']['median']):+.1f}"


HEADER = (
    f"{'section':9}{'what':40}{'n':>7} {'path':11}{'SDPA':>9}{'ours':>9}{'ratio':>9}{'µs more':>10}{'noise':>8}"
    f"{'mean':>9}{'repeated':>9}{'first':>9}"
)


def is_cheap(ours: float, theirs: float, margin: float = MARGIN) -> bool:
    """Return whether a call costs at most SHARE times as much as torch's attention, or `margin` ms more.

    >>> is_cheap(0.029, 0.02), is_cheap(0.031, 0.02), is_cheap(1.04, 1.0), is_cheap(1.06, 1.0)
    (True, False, True, False)
    """
    return ours <= max(SHARE * theirs, theirs + margin)


def polynomial(is_causal: bool) -> Callable[..., Any]:
    """Return `dg.attention` as a function of q, k and v, with the polynomial path forced."""
    return lambda q, k, v: dg.attention(q, k, v, is_causal=is_causal, tolerance=TOLERANCE, force="polynomial")


def ours(is_causal: bool) -> Contender:
    """Return `dg.attention` with the path that it chooses."""
    return Contender("ours", of(lambda q, k, v: dg.attention(q, k, v, is_causal=is_causal, tolerance=TOLERANCE)))


def path_of(call: Call, is_causal: bool) -> str:
    """Return the path that the full analysis chooses."""
    return dg.attention_plan(call.q, call.k, call.v, is_causal=is_causal, tolerance=TOLERANCE).path


def measured(
    bench: Bench, section: str, what: str, n: int, path: str, contenders: list[Contender],
    draw: Callable[[float], Call], margin: float = MARGIN,
) -> Row:  # fmt: skip
    """Time the contenders, the first of which is ours. The row claims that ours is cheap next to SDPA."""
    found = {name: asdict(times) for name, times in compare(contenders, draw, bench.effort, bench.watch).items()}
    mine = found.pop("ours")
    text = f"{section}, {what}, n = {n}: at most {SHARE:g} × SDPA" + f", or {1e3 * margin:g} µs more" * (margin > 0)
    is_met = is_cheap(mine["median"], found["SDPA"]["median"], margin)
    return Row(section, what, n, path, mine, found, {text: is_met})


def exact_rows(bench: Bench) -> list[Row]:
    """Measure scores of a trained model, for which exact attention is chosen."""
    rows = []
    for kind in KINDS:
        is_causal, with_backward = kind.startswith("causal"), kind.endswith("backward")
        for n in bench.sizes.exact:

            def draw(factor: float, n: int = n, with_backward: bool = with_backward) -> Call:
                return trained_scores(bench.place, n, factor, with_backward)

            path = path_of(draw(1.0), is_causal)
            contenders = [ours(is_causal), sdpa(is_causal), sdpa_again(is_causal)]
            rows.append(measured(bench, "exact", kind, n, path, contenders, draw))
            print(rows[-1].line(), flush=True)
    return rows


def decoding_rows(bench: Bench) -> list[Row]:
    """Measure one query on a growing number of keys: contiguous keys, and a slice of a longer cache."""
    rows, batch, place = [], bench.sizes.batch, bench.place
    for what, is_sliced in (("one query, contiguous keys", False), ("one query, slice of a cache", True)):
        m = bench.sizes.decoding

        def draw(factor: float, is_sliced: bool = is_sliced) -> Call:
            nonlocal m
            m += 1
            call = trained_scores(place, 1, factor, m=m + 64 if is_sliced else m, batch=batch)
            call = call._replace(k=call.k[:, :, :m], v=call.v[:, :, :m])
            F.scaled_dot_product_attention(call.q, call.k, call.v)  # cuDNN prepares a plan for these shapes, untimed
            return call

        contenders = [ours(False), sdpa(False), sdpa_again(False)]
        path = path_of(draw(1.0), False)
        rows.append(measured(bench, "decoding", what, bench.sizes.decoding, path, contenders, draw))
        print(rows[-1].line(), flush=True)
    return rows


def regime_rows(bench: Bench) -> list[Row]:
    """Measure small scores. The speed-up counts against the fastest exact kernel."""
    rows = []
    for kind in KINDS:
        is_causal, with_backward = kind.startswith("causal"), kind.endswith("backward")
        bound = bench.sizes.gradient_bound if with_backward else bench.sizes.bound
        for n in bench.sizes.regime:

            def draw(factor: float, n: int = n, bound: float = bound, with_backward: bool = with_backward) -> Call:
                return small_scores(bench.place, n, bound, factor, with_backward)

            path = path_of(draw(1 + VARIATION), is_causal)
            peers = exact_peers(is_causal) if bench.place.device.type == "cuda" else []
            contenders = [ours(is_causal), sdpa(is_causal), *peers]
            row = measured(bench, "regime", kind, n, path, contenders, draw, margin=0.0)
            fastest = min(times["median"] for times in row.peers.values())
            wanted = AT_LARGEST[kind] if n == LARGEST else FROM_THERE if (kind, n) == ("forward", CROSSOVER) else None
            if wanted is not None:
                text = f"regime, {kind}, n = {n}: at least {wanted:g} times as fast as the fastest exact kernel"
                row = replace(row, claims=row.claims | {text: fastest / row.ours["median"] >= wanted})
            rows.append(row)
            print(row.line(), flush=True)
    return rows


def host_times(bench: Bench, attend: Callable[..., Any], calls: list[Call]) -> dict[str, float]:
    """Return the median milliseconds that the Python calls of a forward and a backward pass take.

    The device is idle before a call and is not waited for afterwards. What the call itself waits for is included.
    """
    forward, backward, both = [], [], []
    for call in calls:
        if bench.place.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        out = attend(call.q, call.k, call.v)
        between = time.perf_counter()
        gradients = torch.autograd.grad(out, (call.q, call.k, call.v), call.up)
        ended = time.perf_counter()
        del gradients
        for times, seconds in ((forward, between - started), (backward, ended - between), (both, ended - started)):
            times.append(1e3 * seconds)
    names = ("forward", "backward", "median")
    warm = len(calls) // 4
    found = dict(zip(names, (statistics.median(times[warm:]) for times in (forward, backward, both)), strict=True))
    return found | {"mean": statistics.fmean(both[warm:]), "first": both[0], "repeated": float("nan")}


def host_rows(bench: Bench) -> list[Row]:
    """Measure the host cost of calls with gradients on the polynomial path."""
    rows, n = [], bench.sizes.host
    for is_causal in (False, True):
        count = max(8, bench.effort.calls)
        calls = [small_scores(bench.place, n, bench.sizes.gradient_bound, factor, True) for factor in factors(count)]
        mine = host_times(bench, polynomial(is_causal), calls)
        stock = partial(F.scaled_dot_product_attention, is_causal=is_causal)
        found = {"SDPA": host_times(bench, stock, calls)}
        what = "causal " * is_causal + "forward and backward, polynomial"
        text = f"host, {what}, n = {n}: at most {HOST_MS:g} ms"
        row = Row("host", what, n, "polynomial", mine, found, {text: mine["median"] <= HOST_MS})
        rows.append(row)
        print(f"{row.line()}   (forward {mine['forward']:.3f}, backward {mine['backward']:.3f})", flush=True)
    return rows


def model_rows(bench: Bench) -> list[Row]:
    """Measure the forward pass of an encoder with our attention and with stock SDPA, on new token ids at every call."""
    stock, rows = encoder(bench.model_path), []
    for dtype in bench.sizes.model_dtypes:
        pair = EncoderPair(stock, getattr(torch, dtype), bench.place.device, TOLERANCE)
        for (batch, n), is_padded in itertools.product(bench.sizes.model, (False, True)):

            def draw(_: float, batch: int = batch, n: int = n, is_padded: bool = is_padded) -> Call:
                return pair.draw(batch, n, is_padded)  # noqa: B023

            what = f"{batch} × {n} {dtype}" + ", padded" * is_padded
            if not (gap := pair.gap(draw(1.0), is_padded)) < MODEL_GAP:
                raise ValueError(f"the outputs of the two models differ by {gap:.1%} in Frobenius norm ({what})")
            row = measured(bench, "model", what, n, "-", pair.contenders(is_padded), draw)
            met = row.ours["median"] <= MODEL_SHARE * row.peers["SDPA"]["median"]
            rows.append(replace(row, claims={f"model, {what}: at most {MODEL_SHARE:g} × SDPA": met}))
            print(rows[-1].line(), flush=True)
    return rows


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "regime": regime_rows, "exact": exact_rows, "decoding": decoding_rows, "host": host_rows, "model": model_rows,
}  # fmt: skip
"""Sections in the order in which they run. After exact calls, calls of the same shapes are exact for a while."""


def failed_checks(bench: Bench) -> list[str]:
    """Return a description of every failed check."""
    place, sizes = bench.place, bench.sizes
    found = [check_trained(place, n, is_causal) for n in sizes.checked for is_causal in (False, True)]
    found.append(check_trained(place, 1, False, m=sizes.decoding, batch=2))
    for n in sizes.regime:
        found += [check_small(place, n, sizes.bound, is_causal, None) for is_causal in (False, True)]
    found += [
        check_gradients(place, sizes.host, sizes.host, sizes.gradient_bound, is_causal) for is_causal in (False, True)
    ]
    return [problem for problem in found if problem is not None]


def write(target: Path, bench: Bench, rows: list[Row], is_quick: bool) -> None:
    """Write all rows so far, so that an interrupted run leaves what it measured. Missing numbers are null."""
    is_gpu = bench.place.device.type == "cuda"
    record = {
        "met": {text: is_met for row in rows for text, is_met in row.claims.items()},
        "rows": [asdict(row) for row in rows], "quick": is_quick, "heads": HEADS, "width": WIDTH,
        "tolerance": TOLERANCE, "variation": VARIATION, "sizes": asdict(bench.sizes), "effort": asdict(bench.effort),
        "device": torch.cuda.get_device_name() if is_gpu else platform.machine(), "torch": torch.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2).replace(": NaN", ": null")
    target.write_text(text + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print and save. Return 1 if a check fails or a claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--checkpoint", help="a checkpoint for the model section; random weights if not given")
    parser.add_argument("--calls", type=int, default=120, help="the largest number of fresh tensors of a measurement")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for every measurement")
    parser.add_argument("--quick", action="store_true", help="few sizes and calls; claims are shown, not judged")
    parser.add_argument("--out", type=Path, default=Path("results/attention_dropin.json"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU is available: nothing was measured")
        return 0
    torch.manual_seed(0)
    place = Place(torch.device("cuda", torch.cuda.current_device()))
    effort = Effort(calls=12, seconds=0.5) if options.quick else Effort(options.calls, seconds=options.seconds)
    bench = Bench(place, effort, Stopwatch(place.device), QUICK if options.quick else Sizes(), options.checkpoint)
    return run(bench, options.sections, options.out, options.quick)


def run(bench: Bench, sections: list[str], target: Path, is_quick: bool) -> int:
    """Check, measure the sections, print and save. Return 1 if a check fails or a claim is not met."""
    if wrong := failed_checks(bench):
        print("not measured, because a check failed:", *wrong, sep="\n")
        return 1
    print(f"torch {torch.__version__}, {bench.place.dtype}, {bench.place.heads} heads of {bench.place.width}")
    print("outputs and gradients agree with float64 within their bounds; milliseconds, medians over fresh tensors")
    print(HEADER, flush=True)
    rows: list[Row] = []
    for name in sections:
        rows += SECTIONS[name](bench)
        write(target, bench, rows, is_quick)
    missed = [text for row in rows for text, is_met in row.claims.items() if not is_met]
    count = sum(len(row.claims) for row in rows)
    for text in missed:
        print(f"NOT MET: {text}")
    print(f"{count - len(missed)} of {count} targets met" + (" (quick run: not judged)" if is_quick else ""))
    return 1 if missed and not is_quick else 0


if __name__ == "__main__":
    sys.exit(main())
