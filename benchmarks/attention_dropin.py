"""Claim: on an H200, attention with a guarantee can replace scaled_dot_product_attention: the targets below are met.

bf16, 16 heads of 64, tolerance 1e-3. The path is chosen by the call itself, once by the function `dg.attention`, which
decides from its arguments alone, and once by an object `dg.Attention`, which remembers. Every time is the median over
calls that all have new tensors, with score sizes that differ by up to 30 %, in turns with torch's attention in the same
run (see fresh_tensors.py). The column `noise` shows how much a second measurement of torch's attention differs, and
`allowance` the rounding that the plan adds to the tolerance, as a fraction of range(v). The sections:

- regime: small scores. At 131,072 tokens a call must be 44 times as fast as the fastest exact kernel (causal 15, with
  backward 45, causal with backward 14), and at 8,192 tokens 1.6 times as fast forward.
- exact: scores of a trained model, 1 to 16,384 tokens, where exact attention is chosen.
- decoding: one query on 4,096 keys and more, one key more at every call, batch 8. cuDNN prepares a plan for every new
  length, which takes tens of milliseconds; this is done before the timed calls, because both sides would pay it.
- model: a BERT encoder with the sizes of MiniLM and `dg.register_attention`, which uses objects.

A call may take 1.05 times as long as torch's attention, or 20 µs more (the object 15), whether it looks at numbers or
not. At 6,144 tokens it does not look: degree 2 does not pay there. Before anything is timed, outputs and gradients are
compared with float64.
"""

import argparse
import itertools
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

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
    of,
    sdpa,
    sdpa_again,
    small_scores,
    trained_scores,
)

import depthgauge as dg

SHARE, MARGINS = 1.05, {"function": 0.020, "object": 0.015}
"""A call may take this many times as long as torch's attention, or as many milliseconds more."""
LARGEST, CROSSOVER, FROM_THERE = 131072, 8192, 1.6
AT_LARGEST = {"forward": 44.0, "causal": 15.0, "forward and backward": 45.0, "causal forward and backward": 14.0}
KINDS = tuple(AT_LARGEST)
MODEL_GAP = 0.01
"""The largest relative difference of the outputs of the two models, in Frobenius norm."""
TOLERANCE = 1e-3
WHO = ("function", "object")


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    exact: tuple[int, ...] = (1, 16, 256, 1024, 4096, 6144, 8192, 16384)
    decoding: int = 4096
    batch: int = 8
    regime: tuple[int, ...] = (4096, 6144, CROSSOVER, 16384, LARGEST)
    gradients: int = 4096
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
    """One line of the table. `ours` and `peers` are `Times` as dicts; `claims` maps each claim to whether it is met.

    `who` is the function or the object. `allowance` is the rounding allowance of the plan.
    """

    section: str
    what: str
    n: int
    who: str
    path: str
    allowance: float
    ours: dict[str, float]
    peers: dict[str, dict[str, float]]
    claims: dict[str, bool]

    def line(self) -> str:
        """Return the row as text. The ratio is ours ÷ SDPA, or SDPA ÷ ours with × where ours is faster."""
        theirs, mine, own = self.peers["SDPA"]["median"], self.ours["median"], self.ours
        times = f"{mine / theirs:8.2f}" if mine >= theirs else f"{theirs / mine:7.1f}×"
        return (
            f"{self.section:9}{self.what:28}{self.n:7d} {self.who:9}{self.path:11}{theirs:9.3f}{mine:9.3f}{times:>9}"
            f"{1e3 * (mine - theirs):+10.1f}{self.noise():>8}{self.allowance:11.1e}{own['mean']:9.3f}"
            f"{own['first']:9.1f}" + ("" if all(self.claims.values()) else "   NOT MET")
        )

    def noise(self) -> str:
        """Return the difference of two measurements of torch's attention in microseconds, or a dash."""
        if AGAIN not in self.peers:
            return "-"
        return f"{1e3 * (self.peers[AGAIN]['median'] - self.peers['SDPA']['median']):+.1f}"


HEADER = (
    f"{'section':9}{'what':28}{'n':>7} {'who':9}{'path':11}{'SDPA':>9}{'ours':>9}{'ratio':>9}{'µs more':>10}"
    f"{'noise':>8}{'allowance':>11}{'mean':>9}{'first':>9}"
)


def is_cheap(ours: float, theirs: float, share: float, margin: float) -> bool:
    """Return whether a call costs at most `share` times as much as torch's attention, or `margin` ms more.

    >>> is_cheap(0.029, 0.02, 1.05, 0.01), is_cheap(0.031, 0.02, 1.05, 0.01), is_cheap(1.04, 1.0, 1.05, 0.01)
    (True, False, True)
    """
    return ours <= max(share * theirs, theirs + margin)


def ours(is_causal: bool) -> list[Contender]:
    """Return the function and an object, with the path that they choose."""
    attend = dg.Attention(TOLERANCE)
    return [
        Contender("function", of(lambda q, k, v: dg.attention(q, k, v, is_causal=is_causal, tolerance=TOLERANCE))),
        Contender("object", of(lambda q, k, v: attend(q, k, v, is_causal=is_causal))),
    ]


def path_of(call: Call, is_causal: bool) -> tuple[str, float]:
    """Return the path that the full analysis chooses, and its rounding allowance."""
    plan = dg.attention_plan(call.q, call.k, call.v, is_causal=is_causal, tolerance=TOLERANCE)
    return plan.path, plan.rounding if plan.path != "exact" else 0.0


def measured(
    bench: Bench, section: str, what: str, n: int, path: tuple[str, float], contenders: list[Contender],
    draw: Callable[[float], Call], calls: int = 1,
) -> list[Row]:  # fmt: skip
    """Time the contenders and return a row for each of ours, which claims that it is cheap next to SDPA.

    `calls` is the number of attention calls in what is timed.
    """
    found = {name: asdict(times) for name, times in compare(contenders, draw, bench.effort, bench.watch).items()}
    mine = {who: found.pop(who) for who in WHO if who in found}
    rows = []
    for who, times in mine.items():
        margin = MARGINS[who] * calls
        text = f"{section}, {what}, n = {n}, {who}: at most {SHARE:g} × SDPA, or {1e3 * margin:g} µs more"
        is_met = is_cheap(times["median"], found["SDPA"]["median"], SHARE, margin)
        rows.append(Row(section, what, n, who, *path, times, found, {text: is_met}))
    return rows


def printed(rows: list[Row]) -> list[Row]:
    """Print the rows and return them."""
    for row in rows:
        print(row.line(), flush=True)
    return rows


def exact_rows(bench: Bench) -> list[Row]:
    """Measure scores of a trained model, for which exact attention is chosen."""
    rows: list[Row] = []
    for kind in KINDS:
        is_causal, with_backward = kind.startswith("causal"), kind.endswith("backward")
        for n in bench.sizes.exact:

            def draw(factor: float, n: int = n, with_backward: bool = with_backward) -> Call:
                return trained_scores(bench.place, n, factor, with_backward)

            path = path_of(draw(1.0), is_causal)
            contenders = [*ours(is_causal), sdpa(is_causal), sdpa_again(is_causal)]
            rows += printed(measured(bench, "exact", kind, n, path, contenders, draw))
    return rows


def decoding_rows(bench: Bench) -> list[Row]:
    """Measure one query on a growing number of keys: contiguous keys, and a slice of a longer cache."""
    rows: list[Row] = []
    batch, place = bench.sizes.batch, bench.place
    for what, is_sliced in (("one query, whole keys", False), ("one query, slice", True)):
        m = bench.sizes.decoding

        def draw(factor: float, is_sliced: bool = is_sliced) -> Call:
            nonlocal m
            m += 1
            call = trained_scores(place, 1, factor, m=m + 64 if is_sliced else m, batch=batch)
            call = call._replace(k=call.k[:, :, :m], v=call.v[:, :, :m])
            F.scaled_dot_product_attention(call.q, call.k, call.v)  # cuDNN prepares a plan for these shapes, untimed
            return call

        contenders = [*ours(False), sdpa(False), sdpa_again(False)]
        path = path_of(draw(1.0), False)
        rows += printed(measured(bench, "decoding", what, bench.sizes.decoding, path, contenders, draw))
    return rows


def regime_rows(bench: Bench) -> list[Row]:
    """Measure small scores. The speed-up counts against the fastest exact kernel."""
    rows: list[Row] = []
    for kind in KINDS:
        is_causal, with_backward = kind.startswith("causal"), kind.endswith("backward")
        bound = bench.sizes.gradient_bound if with_backward else bench.sizes.bound
        for n in bench.sizes.regime:

            def draw(factor: float, n: int = n, bound: float = bound, with_backward: bool = with_backward) -> Call:
                return small_scores(bench.place, n, bound, factor, with_backward)

            path = path_of(draw(1 + VARIATION), is_causal)
            peers = exact_peers(is_causal) if bench.place.device.type == "cuda" else []
            found = measured(bench, "regime", kind, n, path, [*ours(is_causal), sdpa(is_causal), *peers], draw)
            rows += printed([with_speed(row) for row in found])
    return rows


def with_speed(row: Row) -> Row:
    """Return a row with the claim of how many times as fast as the fastest exact kernel it is, if there is one."""
    is_crossover = (row.what, row.n) == ("forward", CROSSOVER)
    wanted = AT_LARGEST[row.what] if row.n == LARGEST else FROM_THERE if is_crossover else None
    if wanted is None:
        return row
    text = f"regime, {row.what}, n = {row.n}, {row.who}: at least {wanted:g} times as fast as the fastest exact kernel"
    fastest = min(times["median"] for times in row.peers.values())
    return replace(row, claims=row.claims | {text: fastest / row.ours["median"] >= wanted})


def model_rows(bench: Bench) -> list[Row]:
    """Measure the forward pass of an encoder with our attention and with stock SDPA, on new token ids at every call."""
    stock, rows = encoder(bench.model_path), list[Row]()
    for dtype in bench.sizes.model_dtypes:
        pair = EncoderPair(stock, getattr(torch, dtype), bench.place.device, TOLERANCE)
        for (batch, n), is_padded in itertools.product(bench.sizes.model, (False, True)):

            def draw(_: float, batch: int = batch, n: int = n, is_padded: bool = is_padded) -> Call:
                return pair.draw(batch, n, is_padded)  # noqa: B023

            what = f"{batch} × {n} {dtype}" + ", padded" * is_padded
            if not (gap := pair.gap(draw(1.0), is_padded)) < MODEL_GAP:
                raise ValueError(f"the outputs of the two models differ by {gap:.1%} in Frobenius norm ({what})")
            layers = stock.config.num_hidden_layers
            rows += printed(measured(bench, "model", what, n, ("-", 0.0), pair.contenders(is_padded), draw, layers))
    return rows


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "regime": regime_rows, "exact": exact_rows, "decoding": decoding_rows, "model": model_rows,
}  # fmt: skip


def failed_checks(bench: Bench) -> list[str]:
    """Return a description of every failed check."""
    place, sizes = bench.place, bench.sizes
    found = [check_trained(place, n, is_causal) for n in sizes.checked for is_causal in (False, True)]
    found.append(check_trained(place, 1, False, m=sizes.decoding, batch=2))
    for n in sizes.regime:
        found += [check_small(place, n, sizes.bound, is_causal, None) for is_causal in (False, True)]
    found += [
        check_gradients(place, sizes.gradients, sizes.gradients, sizes.gradient_bound, is_causal)
        for is_causal in (False, True)
    ]
    return [problem for problem in found if problem is not None]


def processor_name() -> str:
    """Return the name of the host's processor, or the kind of machine where the name is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write(target: Path, bench: Bench, rows: list[Row], is_quick: bool) -> None:
    """Write all rows so far, so that an interrupted run leaves what it measured. Missing numbers are null."""
    is_gpu = bench.place.device.type == "cuda"
    record = {
        "met": {text: is_met for row in rows for text, is_met in row.claims.items()},
        "rows": [asdict(row) for row in rows], "quick": is_quick, "heads": HEADS, "width": WIDTH,
        "tolerance": TOLERANCE, "variation": VARIATION, "sizes": asdict(bench.sizes), "effort": asdict(bench.effort),
        "device": torch.cuda.get_device_name() if is_gpu else platform.machine(), "torch": torch.__version__,
        "python": platform.python_version(), "host": processor_name(),
        "triton": version("triton") if is_gpu else None, "depthgauge": dg.__version__,
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
    parser.add_argument("--tokens", nargs="*", type=int, help="these numbers of tokens only, in regime and exact")
    parser.add_argument("--quick", action="store_true", help="few sizes and calls; claims are shown, not judged")
    parser.add_argument("--out", type=Path, default=Path("results/attention_dropin.json"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU is available: nothing was measured")
        return 0
    torch.manual_seed(0)
    place = Place(torch.device("cuda", torch.cuda.current_device()))
    effort = Effort(calls=12, seconds=0.5) if options.quick else Effort(options.calls, seconds=options.seconds)
    sizes = QUICK if options.quick else Sizes()
    if options.tokens:
        sizes = replace(sizes, exact=tuple(options.tokens), regime=tuple(options.tokens))
    bench = Bench(place, effort, Stopwatch(place.device), sizes, options.checkpoint)
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
