"""Claim: on an H200 (bf16, 16 heads of 64, degree 2) `attention` is 40 times the fastest exact kernel at n = 131072.

Causal attention is 15 times as fast, forward and backward 15 times (causal 8 times), and the forward pass is faster
from n = 8192 on. The peers are torch's exact backends (flash, cuDNN) and our torch backend, an unfused polynomial. A
time is the median of repeated calls on the same tensors and includes the proof of B. All calls but the first repeat the
decision of the first. Before anything is timed, outputs are compared with exact attention in float64 on some rows and
with the guarantee of the plan.
"""

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from depthgauge.fast_attention.attention import attention, attention_plan, decide, make_spec
from depthgauge.fast_attention.backends import TORCH_GPU
from depthgauge.fast_attention.naive import softmax_attention
from depthgauge.fast_attention.problem import Options, checked

HEADS, WIDTH = 16, 64
CLAIMS = {"forward": 40.0, "causal": 15.0, "forward and backward": 15.0, "causal forward and backward": 8.0}
CROSSOVER = 8192
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
FEATURES = 10 * 256
"""The features that the kernels compute: ten pairs of tiles of 16 coordinates, 256 products each."""


def draw(n: int, bound: float, requires_grad: bool = False) -> list[Tensor]:
    """Draw bf16 q, k, v whose proved score bound is just below `bound`."""
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, device="cuda") for _ in range(3))
    longest = (0.97 * bound * math.sqrt(WIDTH)) ** 0.5
    q, k = (x * (longest / x.norm(dim=-1).amax(dim=-1)[..., None, None]) for x in (q, k))
    return [x.bfloat16().requires_grad_(requires_grad) for x in (q, k, v)]


def milliseconds(run: Callable[[], object], seconds: float) -> float:
    """Return the median time of repeated runs between two events, after a warm-up. Waiting for the host is included."""
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


def check(n: int, bound: float, is_causal: bool) -> str | None:
    """Compare the output with float64 on 64 rows of every head. Return a description of the error, or None."""
    q, k, v = draw(n, bound)
    plan = attention_plan(q, k, v, is_causal=is_causal, force="polynomial")
    if any(head.degree != 2 or head.backend != "triton" or head.exact_rows for head in plan.heads):
        return f"not degree 2 in Triton:\n{plan}"
    out = attention(q, k, v, is_causal=is_causal, force="polynomial")
    assert isinstance(out, Tensor)
    rows = torch.randint(0, n, (64,), device="cuda")
    for h in range(HEADS):
        mine = (x[0, h].double() for x in (q, k, v))
        qh, kh, vh = mine
        scores = (qh[rows] @ kh.T / math.sqrt(WIDTH)).masked_fill(
            (torch.arange(n, device="cuda") > rows[:, None]) & is_causal, -math.inf
        )
        exact = scores.softmax(-1) @ vh
        allowed = (plan.guarantee + plan.rounding) * (vh.amax(0) - vh.amin(0)) + plan.output_unit * exact.abs()
        if not bool(((out[0, h, rows].double() - exact).abs() <= allowed).all()):
            return f"head {h} at n = {n}, causal {is_causal}, exceeds its guarantee"
    return None


def check_kinds(is_short: bool) -> Iterator[str]:
    """Compare every entry with float64 and the guarantee, for several dtypes, widths and kinds of calls."""
    dtypes, widths = (torch.bfloat16, torch.float16, torch.float32), ((64, 64), (16, 32), (128, 64))
    dtypes, widths = (dtypes[:1], widths[:1]) if is_short else (dtypes, widths)
    for dtype, (d, e), is_causal, kind in itertools.product(dtypes, widths, (False, True), ("", "shifted", "shared")):
        groups, m = (2 if kind == "shared" else 1), 1500
        factor = (0.35 / 2 / d) ** 0.5
        shift = (
            0.0 if kind != "shifted" else 0.2 if dtype == torch.float16 else 0.5
        )  # the range of weights is small in float16
        q = factor * torch.randn(1, 2 * groups, 1300, d, device="cuda") + shift
        k, v = factor * torch.randn(1, 2, m, d, device="cuda"), torch.randn(1, 2, m, e, device="cuda") + 3
        q, k, v = (x.to(dtype) for x in (q, k, v))
        padding = (torch.arange(m, device="cuda") % 7 == 5)[None] if kind == "shared" else None
        given = {
            "is_causal": is_causal, "tolerance": 5e-3, "scale": 1.0, "key_padding": padding,
            "enable_gqa": groups > 1, "force": "polynomial",
        }  # fmt: skip
        plan = attention_plan(q, k, v, **given)  # type: ignore[arg-type]
        out = attention(q, k, v, **given)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        wide = [x.double().repeat_interleave(groups, dim=1) for x in (k, v)]
        exact = softmax_attention(
            q.double(), *wide, 1.0, is_causal, None if padding is None else ~padding[:, None, :]
        )  # fmt: skip
        seen = wide[1] if padding is None else wide[1][:, :, ~padding[0]]
        allowed = (plan.guarantee + plan.rounding) * (seen.amax(-2, keepdim=True) - seen.amin(-2, keepdim=True))
        is_fast = all(head.backend == "triton" and head.path == "polynomial" for head in plan.heads)
        if not is_fast or not bool(((out.double() - exact).abs() <= allowed + plan.output_unit * exact.abs()).all()):
            yield f"{dtype}, {d} by {e}, causal {is_causal}, {kind or 'plain'}:\n{plan}"


def check_gradients(
    n: int, m: int, bound: float, is_causal: bool, groups: int = 1, widths: tuple[int, int] = (WIDTH, WIDTH),
    dtype: torch.dtype = torch.bfloat16,
) -> str | None:  # fmt: skip
    """Compare the gradients with float64. Return a description of the error, or None."""
    d, e = widths
    q, k = (torch.randn(1, h, t, d, device="cuda") for h, t in ((HEADS, n), (HEADS // groups, m)))
    longest = (0.97 * bound * math.sqrt(d)) ** 0.5
    q, k = (x * (longest / x.norm(dim=-1).amax(dim=-1)[..., None, None]) for x in (q, k))
    v = torch.randn(1, HEADS // groups, m, e, device="cuda")
    given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    how = {"is_causal": is_causal, "enable_gqa": groups > 1, "force": "polynomial"}
    which = f"{dtype}, {d} by {e}, {n} by {m}, causal {is_causal}, {groups} query heads a key head"
    plan = attention_plan(*given, **how)  # type: ignore[arg-type]
    if any(head.degree != 2 or head.backend != "triton" for head in plan.heads):
        return f"gradients not at degree 2 in Triton ({which}):\n{plan}"
    out = attention(*given, **how)  # type: ignore[arg-type]
    up = torch.randn_like(out)  # type: ignore[arg-type]
    mine = torch.autograd.grad(out, given, up)  # type: ignore[arg-type]
    exact = [x.detach().double().requires_grad_() for x in given]
    shared = (x.repeat_interleave(groups, dim=1) for x in exact[1:])
    true = torch.autograd.grad(softmax_attention(exact[0], *shared, 1 / math.sqrt(d), is_causal), exact, up.double())
    for name, one, other in zip("qkv", mine, true, strict=True):
        gap = float((one.double() - other).norm() / other.norm())
        if not gap < 0.03:  # the unit roundoff of bf16 is 2⁻⁸
            return f"the gradient of {name} has a relative error of {gap:.1%} ({which})"
    return None


def check_all_gradients(bound: float, is_short: bool) -> Iterator[str]:
    """Compare the gradients with float64 for several shapes, widths and dtypes."""
    shapes = [(4000, 4000, False, 1), (4000, 4000, True, 1), (5000, 5000, True, 4), (3000, 2100, True, 1)]
    shapes += [(2100, 3000, True, 1), (700, 700, True, 1)]
    shapes_of_others = [(2100, 2100, True, 2), (2100, 2100, False, 2)]
    kinds: list[tuple[tuple[int, int], torch.dtype]] = [((WIDTH, WIDTH), torch.bfloat16)]
    if not is_short:
        others = itertools.product(((128, 64), (64, 128), (128, 128), (16, 32)), (torch.bfloat16, torch.float32))
        kinds += [*others, ((WIDTH, WIDTH), torch.float16), ((WIDTH, WIDTH), torch.float32)]
    for at, (widths, dtype) in enumerate(kinds):
        for n, m, is_causal, groups in shapes if at == 0 else shapes_of_others:
            if problem := check_gradients(n, m, bound, is_causal, groups, widths, dtype):
                yield problem


def exact_times(tensors: list[Tensor], is_causal: bool, seconds: float, with_backward: bool) -> dict[str, float]:
    """Return the time of every exact backend that supports these tensors."""
    found = {}
    for name, backend in PEERS.items():
        up = torch.randn_like(tensors[0])

        def run() -> object:
            out = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
            return torch.autograd.grad(out, tensors, up) if with_backward else out  # noqa: B023

        with sdpa_kernel(backend):
            try:
                found[name] = milliseconds(run, seconds)
            except RuntimeError as error:
                print(f"{name} is not available: {str(error).splitlines()[0]}")
    return found


def unfused(n: int, bound: float, seconds: float) -> float:
    """Return the time of the same polynomial in plain torch operations, without the decision."""
    q, k, v = draw(n, bound)
    request = checked(q, k, v, Options(force="polynomial"))
    problem = request.flat()
    spec = make_spec(problem, decide(request, problem), list(range(HEADS)), 2)
    return milliseconds(lambda: TORCH_GPU.forward(spec, problem.q, problem.k, problem.v), seconds)


def main() -> int:
    """Check, measure, print and save. Return 1 if a check fails or a claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 8192, 16384, 65536, 131072])
    parser.add_argument("--bound", type=float, default=0.3, help="B of the forward runs")
    parser.add_argument(
        "--gradient-bound", type=float, default=0.045, help="B of the runs with gradients, which meet 1e-3 at degree 2"
    )
    parser.add_argument("--seconds", type=float, default=0.4, help="time for every measurement")
    parser.add_argument("--short", action="store_true", help="check bf16 and width 64 only")
    parser.add_argument("--out", type=Path, default=Path("results/attention_gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU is available: nothing was measured")
        return 0
    torch.manual_seed(0)
    if wrong := list(check_kinds(options.short)):
        print("not measured, because a check failed:", *wrong, sep="\n")
        return 1
    for n, causal in ((3001, False), (5000, True), (131072, False), (131072, True)):
        if problem := check(n, options.bound, causal):
            print(f"not measured, because a check failed: {problem}")
            return 1
    if wrong := list(check_all_gradients(options.gradient_bound, options.short)):
        print("not measured, because a check failed:", *wrong, sep="\n")
        return 1
    big = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / milliseconds(lambda: big @ big, options.seconds) / 1e9
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, bf16, {HEADS} heads of {WIDTH}, degree 2, B = {options.bound}")
    print(f"matrix products reach {rate:.0f} TFLOP/s; outputs and gradients agree with float64 within their bounds")
    rows = []
    header = f"{'':28} {'n':>7} {'exact':>9} {'by':>6} {'ours':>9} {'times':>6} {'TFLOP/s':>8} {'share':>6}"
    print(header)
    for kind in CLAIMS:
        is_causal, with_backward = kind.startswith("causal"), kind.endswith("backward")
        for n in options.tokens:
            bound = options.gradient_bound if with_backward else options.bound
            tensors = draw(n, bound, requires_grad=with_backward)
            up = torch.randn_like(tensors[0])

            def run() -> object:
                out = attention(*tensors, is_causal=is_causal, force="polynomial")  # noqa: B023
                return torch.autograd.grad(out, tensors, up) if with_backward else out  # type: ignore[arg-type]  # noqa: B023

            theirs = exact_times(tensors, is_causal, options.seconds, with_backward)
            ours = milliseconds(run, options.seconds)
            peer = min(theirs, key=lambda p: theirs[p])
            # Forward: moments and rows. Backward: the moments again, ∂v, and all 4096 ordered pairs for ∂q and for ∂k.
            products = 2 * FEATURES + (2 * FEATURES + 2 * WIDTH**2 if with_backward else 0)
            flop = 2.0 * products * WIDTH * n * HEADS
            speed = flop / ours / 1e9
            row = {
                "kind": kind, "n": n, "exact_ms": theirs, "ours_ms": ours, "times": theirs[peer] / ours,
                "tflops": speed, "share_of_matrix_rate": speed / rate,
            }  # fmt: skip
            if kind == "forward" and n <= 131072:
                row["unfused_ms"] = unfused(n, options.bound, options.seconds)
            rows.append(row)
            print(
                f"{kind:28} {n:7d} {theirs[peer]:9.3f} {peer:>6} {ours:9.3f} {row['times']:6.1f} {speed:8.0f} "
                f"{speed / rate:6.0%}" + (f"   unfused torch {row['unfused_ms']:.2f}" if "unfused_ms" in row else "")
            )
    met = {}
    for kind, claim in CLAIMS.items():
        last = [row for row in rows if row["kind"] == kind][-1]
        met[f"{kind}: at least {claim:g} times as fast at {last['n']} tokens"] = last["times"] >= claim
    from_there = [row["times"] > 1 for row in rows if row["kind"] == "forward" and row["n"] >= CROSSOVER]
    met[f"faster than exact from {CROSSOVER} tokens"] = bool(from_there) and all(from_there)
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
