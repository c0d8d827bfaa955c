"""A campaign of random `attention` calls: every output and gradient is compared with float64.

    python tests/support/attacked_calls.py --calls 200 --seed 3 --device cuda

The last line is a summary. The exit status is 1 at the first violation, and the output names the command that
reproduces it. scripts/attention_campaign.py runs many such pieces, each in a process of its own.
"""

import argparse
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from attacked_references import Reference, own_copy, reference, torch_attention
from drawn_calls import EXTREME, ODD_WIDTHS, WIDTHS, Drawn, Limits, draw_call, draw_kind
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.fast_attention import plan as plan_module
from depthgauge.fast_attention.attention import attention, attention_plan
from depthgauge.fast_attention.call import Rates, kept_validated
from depthgauge.fast_attention.plan import AttentionPlan, prepared_for
from depthgauge.fast_attention.triton_backend import TritonBackend

UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18, torch.float64: 2.0**-44}
"""The unit to which products and results of a dtype are rounded; float32 operands are products of TF32 parts."""
GRADIENT_ROUNDING = 16
"""How many roundings the gradients may differ by, relative to the sum of the absolute values of their terms."""


class ViolationError(AssertionError):
    """An output or a gradient is further from float64 than it may be."""


@dataclass
class Tally:
    """What a campaign has seen. `beyond_plan` counts calls beyond the error of the plan but within the tolerance."""

    kinds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    closest: float = 0.0

    def line(self) -> str:
        """Return a summary in one line."""
        c = self.counts
        return (
            f"{c['calls']} calls of {self.kinds} kinds, {c['polynomial']} polynomial, {c['mixed']} mixed, "
            f"{c['exact']} exact, {c['refused']} refused, {c['gradients']} with gradients, {c['unforced']} unforced; "
            f"largest error {self.closest:.2f} of what is allowed, {c['beyond plan']} beyond their plan"
        )


def per_query_head(drawn: Drawn, values: Sequence[float]) -> Tensor:
    """Return one number per key head as [batch, query heads, 1, 1] in float64."""
    kind = drawn.kind
    found = torch.tensor(values, dtype=torch.float64, device=drawn.q.device).view(kind.batch, kind.heads, 1, 1)
    return found.repeat_interleave(kind.groups, dim=1)


def largest(x: Tensor) -> Tensor:
    """Return the largest finite |x| of every head: [batch, heads, 1, 1]."""
    return x.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=(-2, -1), keepdim=True)


def value_range(drawn: Drawn) -> Tensor:
    """Return max − min of every value column over the keys that are not padding: [batch, query heads, 1, e]."""
    v = drawn.v.detach().double()
    low = high = v
    if drawn.padding is not None:
        at_padding = drawn.padding[:, None, :, None]
        low, high = v.masked_fill(at_padding, math.inf), v.masked_fill(at_padding, -math.inf)
    width = high.amax(-2, keepdim=True) - low.amin(-2, keepdim=True)
    return width.repeat_interleave(drawn.kind.groups, dim=1)


def score_rounding(drawn: Drawn) -> Tensor:
    """Return how far rounded scores can move an output, as a share of range(v): [batch, query heads, 1, 1].

    A sum of d products differs from q·k by at most (d + 3) units of ‖q‖ ‖k‖, in float32 or float64. If scores differ by
    δ, every weight has a relative error of at most e^{2δ} − 1, and no output leaves the range.
    """
    kind = drawn.kind
    unit = 2.0**-53 if kind.dtype == torch.float64 else 2.0**-24
    q, k = (x.detach().double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).amax(-1) for x in (drawn.q, drawn.k))
    error = abs(kind.used_scale) * (kind.d + 3) * unit * q * k.repeat_interleave(kind.groups, dim=1)
    return torch.expm1(2 * error).clamp(max=1.0)[..., None, None]


def is_clean(drawn: Drawn) -> Tensor:
    """Return whether all entries of a head are finite: [batch, query heads, 1, 1]."""
    groups = drawn.kind.groups
    clean = [torch.isfinite(x).all(dim=-1).all(dim=-1) for x in (drawn.q, drawn.k, drawn.v)]
    by_key = clean[0].unflatten(1, (drawn.kind.heads, groups)).all(dim=2) & clean[1] & clean[2]
    return by_key.repeat_interleave(groups, dim=1)[..., None, None]


def check_output(
    drawn: Drawn, plan: AttentionPlan, out: Tensor, ref: Reference, peer: Tensor, bound: Tensor | None
) -> float:
    """Compare the output with float64. Return the largest error as a fraction of the allowed error of the plan.

    On the polynomial path the error is at most (guarantee + rounding) × range(v) plus the error of storing the result.
    Exact attention may have twice the error of torch's own call, 8 units of the values, and the error that rounded
    scores cause in any kernel. A head may take either path if the call is not forced, or if some of its rows are exact.
    Beyond the plan, the tolerance decides.
    """
    kind = drawn.kind
    wanted, mine = ref.out, out.detach()[..., ref.rows, :].double()
    theirs = peer.detach()[..., ref.rows, :].double()
    clean, width = is_clean(drawn), value_range(drawn)
    lost = 2.0**-48 * (1 + abs(kind.used_scale) * kind.d * float(largest(drawn.q).max() * largest(drawn.k).max()))
    stored = plan.output_unit * wanted.abs() + plan.output_floor
    rounding = per_query_head(drawn, [h.rounding for h in plan.heads])
    share = per_query_head(drawn, [h.guarantee for h in plan.heads]) + rounding
    agreed = kind.tolerance + 2 * rounding
    if bound is not None:
        share = bound.detach()[..., ref.rows, None].double()
    sizes = largest(drawn.v).repeat_interleave(kind.groups, dim=1)
    by_torch = 2 * largest(theirs - wanted) + 8 * UNITS[kind.dtype] * sizes + plan.output_floor
    by_torch = by_torch + (score_rounding(drawn) * width).nan_to_num(0.0, 0.0, 0.0)  # heads that are not clean
    may_be_exact = per_query_head(
        drawn, [float(h.path == "exact" or h.exact_rows > 0 or drawn.force != "polynomial") for h in plan.heads]
    )
    exactly = torch.where(may_be_exact > 0, by_torch, 0.0)
    error = (mine - wanted).abs()
    by_plan = torch.maximum((share + lost) * width + stored, exactly)
    by_tolerance = by_plan if bound is not None else torch.maximum((agreed + lost) * width + stored, exactly)
    # Heads with NaN or infinite entries: a number is within the error of exact attention, or it is not finite.
    is_number = torch.isfinite(mine)
    may_be_any = torch.isfinite(theirs) | ~ref.has_nan
    is_right = torch.where(ref.is_spoilt, may_be_any, error <= torch.maximum(by_torch, stored))
    if not bool(torch.where(clean, error <= by_tolerance, is_right | ~is_number).all()):
        worst = float(torch.where(clean, error - by_tolerance, -math.inf).nan_to_num(math.inf).max())
        raise ViolationError(f"the output is off by {worst:.3g} more than allowed:\n{plan}")
    ratio = torch.where(clean, error / by_plan.clamp(min=1e-300), 0.0)
    return float(ratio.max())


def check_gradients(
    drawn: Drawn, plan: AttentionPlan, found: Sequence[Tensor], ref: Reference, peer: Sequence[Tensor]
) -> None:
    """Compare the gradients with float64.

    Relative to the sum of the absolute values of their terms they may differ by the tolerance and by some roundings,
    and by three times the largest error of torch's own gradient beside that.
    """
    kind, groups, s = drawn.kind, drawn.kind.groups, abs(drawn.kind.used_scale)
    assert ref.gradients is not None
    for name, one, like in zip("qkv", found, (drawn.q, drawn.k, drawn.v), strict=True):
        if one.shape != like.shape or one.dtype != like.dtype or one.device != like.device:
            raise ViolationError(f"the gradient of {name} is {one.dtype} {list(one.shape)} on {one.device}")
    if drawn.attack in EXTREME:
        return
    rounding = per_query_head(drawn, [h.rounding for h in plan.heads]) + UNITS[kind.dtype]
    up, floor = ref.up.double().abs(), 4 * plan.output_floor
    values = drawn.v.detach().double().abs().amax(-2, keepdim=True).repeat_interleave(groups, dim=1)
    reach = (up * value_range(drawn)).sum(-1, keepdim=True)  # the range of dO·v: [b, heads, rows, 1]
    size = (up * values).sum(-1, keepdim=True)
    share = (kind.tolerance * reach + GRADIENT_ROUNDING * rounding * size)[..., 0]
    keys = drawn.k.detach().double().norm(dim=-1).amax(-1).repeat_interleave(groups, dim=1)
    queries = drawn.q.detach().double().norm(dim=-1).amax(-1)
    by_query = 2 * s * keys[..., None] * share
    spread = (ref.weights * (3 * s * queries[..., None] * share)[..., None]).sum(-2)
    by_key = spread.unflatten(1, (kind.heads, groups)).sum(2)
    both = kind.tolerance + GRADIENT_ROUNDING * rounding
    by_value = (ref.weights.transpose(-1, -2) @ (both * up)).unflatten(1, (kind.heads, groups)).sum(2)
    mine = (found[0][..., ref.rows, :], found[1], found[2])
    theirs = (peer[0][..., ref.rows, :], peer[1], peer[2])
    for at, (name, allowed) in enumerate(zip("qkv", (by_query, by_key, by_value), strict=True)):
        wanted = ref.gradients[at]
        error, torch_error = ((x[at].detach().double() - wanted).abs() for x in (mine, theirs))
        if name != "v":
            error, torch_error = error.norm(dim=-1), torch_error.norm(dim=-1)
        least = 3 * torch_error.nan_to_num(math.inf).flatten(2).amax(-1)
        least = least.view(*least.shape, *[1] * (error.ndim - 2))
        if not bool((error <= allowed + least + floor).all()):
            worst = float((error / (allowed + least + floor)).nan_to_num(math.inf).max())
            raise ViolationError(f"the gradient of {name} is off by {worst:.3g} times the allowed error:\n{plan}")


def check_call(drawn: Drawn, tally: Tally, is_strict: bool, is_compared: bool = True) -> None:
    """Compute one call and, if `is_compared`, compare it with float64. Raise a ViolationError or count the call."""
    kind = drawn.kind
    given = [x.requires_grad_() if kind.gradients else x for x in (drawn.q, drawn.k, drawn.v)]
    how: dict[str, Any] = {
        "is_causal": kind.causal, "tolerance": kind.tolerance, "scale": kind.scale, "key_padding": drawn.padding,
        "enable_gqa": kind.groups > 1, "force": drawn.force,
    }  # fmt: skip
    tally.counts["calls"] += 1
    try:
        plan = attention_plan(*given, **how)
    except InputError:
        tally.counts["refused"] += 1
        try:
            attention(*given, **how)
        except InputError:
            # A call that may be exact: tensors in memory of their own.
            q, k, v = given = [own_copy(x).requires_grad_(kind.gradients) for x in given]
            drawn = replace(drawn, q=q, k=k, v=v, force=None)
            how["force"] = None
            plan = attention_plan(*given, **how)
        else:
            raise ViolationError("attention computed a call that attention_plan refuses") from None
    found = attention(*given, **how, return_bound=drawn.return_bound)
    out, bound = found if isinstance(found, tuple) else (found, None)
    if out.shape != (*drawn.q.shape[:-1], kind.e) or out.dtype != kind.dtype or out.device != drawn.q.device:
        raise ViolationError(f"the output is {out.dtype} {list(out.shape)} on {out.device}")
    tally.counts[plan.path] += 1
    tally.counts["unforced"] += drawn.force is None
    tally.counts["gradients"] += kind.gradients
    if not is_compared:
        if kind.gradients:
            torch.autograd.grad(out, given, torch.ones_like(out))
        return
    ref = reference(drawn)
    leaves = [own_copy(x).requires_grad_(kind.gradients) for x in given]
    peer = torch_attention(drawn, *leaves)
    ratio = check_output(drawn, plan, out, ref, peer, bound)
    if ratio > 1:
        tally.counts["beyond plan"] += 1
        if is_strict:
            raise ViolationError(
                f"the error is {ratio:.3g} times what the plan allows, but within the tolerance:\n{plan}"
            )
    if kind.gradients:
        up = torch.zeros_like(out)
        up[..., ref.rows, :] = ref.up
        # cuDNN keeps a plan for the layouts of q, k and v. A later gradient in another layout would be read wrongly.
        theirs = torch.autograd.grad(peer, leaves, torch.empty_like(peer).copy_(up))
        check_gradients(drawn, plan, torch.autograd.grad(out, given, up), ref, theirs)
    tally.closest = max(tally.closest, ratio)


@contextmanager
def cheap_polynomials() -> Iterator[None]:
    """Predict that polynomials cost next to nothing, so that unforced calls of any size choose them where they can."""
    places: list[tuple[Any, str]] = [
        (b, "rates") for b in (TritonBackend, plan_module.TORCH_GPU, plan_module.TORCH_CPU)
    ]
    for module in [m for name, m in sys.modules.items() if name.startswith("depthgauge.fast_attention.")]:
        places += [(module, name) for name in ("GPU_TRITON", "CPU") if isinstance(getattr(module, name, None), Rates)]
    before = [getattr(*place) for place in places]
    for place, rates in zip(places, before, strict=True):
        cheap = replace(rates, product=1e-6, build=0.0, token=0.0, call=0.0)
        setattr(*place, cheap)
    forget()
    try:
        yield
    finally:
        for place, rates in zip(places, before, strict=True):
            setattr(*place, rates)
        forget()


def forget() -> None:
    """Forget what was computed with other rates."""
    kept_validated.cache_clear()  # type: ignore[attr-defined]
    prepared_for.cache_clear()


@dataclass(frozen=True)
class Piece:
    """A part of a campaign: `calls` calls from `seed`, `per_kind` of every kind. `trace` receives the current call."""

    seed: int
    calls: int
    per_kind: int
    limits: Limits
    device: torch.device
    is_strict: bool = False
    trace: Path | None = None
    is_compared: bool = True

    def run(self) -> Tally:
        """Make all calls. A ViolationError or an error of the device names the call."""
        tally = Tally()
        for at in range(self.calls):
            if at % self.per_kind == 0:
                kind = draw_kind(1_000_003 * self.seed + at // self.per_kind, self.limits)
                tally.kinds += 1
            drawn = draw_call(kind, 7_000_003 * self.seed + at, self.limits, self.device)
            what = f"call {at} of seed {self.seed}: {drawn}"
            if self.trace is not None:
                self.trace.write_text(what + "\n", encoding="utf-8")
            try:
                check_call(drawn, tally, self.is_strict, self.is_compared)
            except Exception as error:
                error.add_note(what)
                raise
        return tally


def is_uncached(device: torch.device) -> bool:
    """Return whether every tensor has an allocation of its own, so that a sanitizer sees where it ends."""
    if device.type != "cuda":
        return False
    tensor = torch.empty(1, device=device)
    return torch.cuda.memory_allocated(device) == 0 and tensor.numel() == 1


def say(*lines: str) -> None:
    """Print lines at once."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run one piece. Return 1 at the first violation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-kind", type=int, default=8, help="calls of every kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--largest", type=int, default=2100, help="the largest number of tokens of most calls")
    parser.add_argument("--long", type=int, default=0, help="the largest number of tokens of a few calls")
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS), help="the usual widths d and e")
    parser.add_argument("--attacked", action="store_true", help="draw adversarial numbers")
    parser.add_argument("--cheap", action="store_true", help="let unforced calls choose polynomials at any size")
    parser.add_argument("--strict", action="store_true", help="fail beyond the error of the plan, not of the tolerance")
    parser.add_argument("--not-compared", action="store_true", help="make the calls only; a sanitizer checks them")
    parser.add_argument("--trace", type=Path, help="a file that always names the current call")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    odd = ODD_WIDTHS if max(options.widths) > 32 else ()
    limits = Limits(options.largest, options.long, options.attacked, tuple(options.widths), odd)
    piece = Piece(
        options.seed, options.calls, options.per_kind, limits, device, options.strict, options.trace,
        not options.not_compared,
    )  # fmt: skip
    started = time.perf_counter()
    try:
        if options.cheap:
            with cheap_polynomials():
                tally = piece.run()
        else:
            tally = piece.run()
    except Exception as error:
        given = sys.argv[1:] if arguments is None else arguments
        say(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()))
        say("reproduce with: " + " ".join(["python", os.path.relpath(__file__), *given]))
        say(f"attention campaign: FAILED, seed {options.seed}")
        return 1
    remarks = ", not compared" * options.not_compared + ", one allocation per tensor" * is_uncached(device)
    seconds = time.perf_counter() - started
    say(f"attention campaign: seed {options.seed}, {tally.line()}{remarks}; {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
