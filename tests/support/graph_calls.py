"""`attention` inside CUDA graphs and torch.compile, one check per process.

    python tests/support/graph_calls.py graph_planned

A process of its own is needed: a failed capture leaves the device in an unusable state, and torch.compile cannot trace
the checks of annotations that the test suite installs.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import depthgauge as dg

TOLERANCE = 1e-2
HEADS, WIDTH = 4, 64


def draw(seed: int, n: int = 1000, bound: float = 0.3, device: str = "cuda") -> list[Tensor]:
    """Draw bf16 tensors whose largest score is just below `bound`."""
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, generator=generator, device=device) for _ in range(3))
    longest = (0.97 * bound * math.sqrt(WIDTH)) ** 0.5
    q, k = (x * (longest / x.norm(dim=-1).amax(dim=-1)[..., None, None]) for x in (q, k))
    return [x.bfloat16() for x in (q, k, v)]


def error_share(out: Tensor, given: Sequence[Tensor], is_causal: bool) -> float:
    """Return the largest error against float64 as a fraction of what is allowed: tolerance, rounding, storage."""
    q, k, v = (x.detach().double() for x in given)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    low, high = v.aminmax(dim=-2, keepdim=True)
    allowed = (TOLERANCE + 0.02) * (high - low) + 2.0**-6 * exact.abs()
    return float(((out.detach().double() - exact).abs() / allowed).max())


def captured(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """Return a graph of the call and its result, after a warm-up on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def fill(static: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
    """Copy fresh numbers into the tensors of a graph."""
    with torch.no_grad():
        for one, other in zip(static, fresh, strict=True):
            one.copy_(other)


def graph_exact() -> None:
    """Capture calls without a plan: they are exact, whatever the scores were before the capture."""
    for is_causal in (False, True):
        for bound in (0.3, 200.0):  # for small scores, calls outside of the graph choose the polynomial
            static = draw(0, 16000, bound)
            graph, out = captured(lambda: dg.attention(*static, is_causal=is_causal))  # noqa: B023
            for seed in (1, 2):
                fill(static, draw(seed, 16000, bound))
                graph.replay()
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # cuDNN rounds otherwise
                    wanted = F.scaled_dot_product_attention(*static, is_causal=is_causal)
                torch.testing.assert_close(out, wanted, rtol=0.02, atol=1e-3)


def graph_exact_training() -> None:
    """Capture an exact forward and backward pass."""
    static = [x.requires_grad_() for x in draw(0, bound=200.0)]
    up = torch.randn_like(static[0])

    def step(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*static, is_causal=True), static, up)

    graph, gradients = captured(lambda: step(dg.attention))  # type: ignore[arg-type]
    fill(static, draw(1, bound=200.0))
    graph.replay()
    for one, other in zip(gradients, step(F.scaled_dot_product_attention), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def graph_planned() -> None:
    """Capture a polynomial by a plan: replays keep the guarantee, and `check` raises an error for larger scores."""
    for is_causal in (False, True):
        static = draw(0)
        plan = dg.attention_plan(*static, is_causal=is_causal, tolerance=TOLERANCE, force="polynomial")
        assert plan.path == "polynomial", str(plan)
        graph, out = captured(
            lambda: dg.attention(*static, is_causal=is_causal, tolerance=TOLERANCE, plan=plan)  # noqa: B023
        )
        assert isinstance(out, Tensor)
        plan.check()
        for seed, bound in ((1, 0.3), (2, 0.2), (3, 0.01)):
            fill(static, draw(seed, bound=bound))
            graph.replay()
            assert error_share(out, static, is_causal) < 1
            plan.check()
        fill(static, draw(4, bound=60.0))
        graph.replay()
        must_raise(plan)
        fill(static, draw(5))
        static[1][0, 2, 7, 3] = math.nan
        graph.replay()
        must_raise(plan)
        fill(static, draw(6))
        graph.replay()
        assert error_share(out, static, is_causal) < 1
        plan.check()


def graph_planned_training() -> None:
    """Capture forward and backward of a plan for tensors that require gradients, or get a refusal in one sentence."""
    static = [x.requires_grad_() for x in draw(0, bound=0.045)]
    plan = dg.attention_plan(*static, tolerance=TOLERANCE, force="polynomial")
    up = torch.randn_like(static[0])

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(dg.attention(*static, tolerance=TOLERANCE, plan=plan), static, up)  # type: ignore[arg-type]

    try:
        graph, gradients = captured(step)
    except dg.InputError as error:
        say(f"refused: {error}")
        return
    fill(static, draw(1, bound=0.045))
    graph.replay()
    exact = [x.detach().double().requires_grad_() for x in static]
    true = torch.autograd.grad(F.scaled_dot_product_attention(*exact), exact, up.double())
    for one, other in zip(gradients, true, strict=True):  # type: ignore[call-overload]
        assert float((one.double() - other).norm() / other.norm()) < 0.03
    plan.check()


def graph_forced() -> None:
    """Capture a forced polynomial without a plan: one sentence says that a plan is needed."""
    static = draw(0)
    try:
        captured(lambda: dg.attention(*static, tolerance=TOLERANCE, force="polynomial"))
    except dg.InputError as error:
        say(f"refused: {error}")
        return
    raise AssertionError("a forced polynomial was captured without a plan")


def compiled_exact(device: str = "cuda", backend: str = "inductor") -> None:
    """Compile exact calls into one graph, with gradients."""
    for is_causal in (False, True):
        compiled = torch.compile(
            lambda q, k, v: 2 * dg.attention(q, k, v, is_causal=is_causal),  # noqa: B023
            fullgraph=True,
            backend=backend,
        )
        for seed, bound in ((0, 200.0), (1, 0.3)):
            given = [x.requires_grad_() for x in draw(seed, 300, bound, device)]
            found, wanted = compiled(*given), 2 * F.scaled_dot_product_attention(*given, is_causal=is_causal)
            torch.testing.assert_close(found, wanted)
            up = torch.randn_like(wanted)
            mine, theirs = (torch.autograd.grad(x, given, up) for x in (found, wanted))
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def compiled_planned(device: str = "cuda", backend: str = "inductor") -> None:
    """Compile calls by a plan into one graph; `check` raises an error for larger scores."""
    plan = dg.attention_plan(*draw(0, 300, device=device), tolerance=TOLERANCE, force="polynomial")
    compiled = torch.compile(
        lambda q, k, v: dg.attention(q, k, v, tolerance=TOLERANCE, plan=plan) + 0, fullgraph=True, backend=backend
    )
    for seed in (1, 2):
        given = draw(seed, 300, device=device)
        out = compiled(*given)
        torch.testing.assert_close(out, dg.attention(*given, tolerance=TOLERANCE, plan=plan), rtol=0, atol=0)
        assert error_share(out, given, False) < 1
        plan.check()
    compiled(*draw(3, 300, 60.0, device))
    must_raise(plan)
    plan.check()


def compiled_with_graphs() -> None:
    """Compile exact calls with mode="reduce-overhead", which captures them in CUDA graphs."""
    compiled = torch.compile(lambda q, k, v: dg.attention(q, k, v) * 2, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(5):
            given = draw(seed, 300, 200.0)
            wanted = 2 * F.scaled_dot_product_attention(*given)
            torch.testing.assert_close(compiled(*given).clone(), wanted)


def must_raise(plan: Any) -> None:
    """Check that `plan.check()` raises a GuaranteeError."""
    raised = ""
    try:
        plan.check()
    except dg.InputError as error:
        raised = type(error).__name__
    assert raised == "GuaranteeError", f"plan.check() did not report scores beyond the plan: {raised}"


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        graph_exact, graph_exact_training, graph_planned, graph_planned_training, graph_forced, compiled_exact,
        compiled_planned, compiled_with_graphs,
    )
}  # fmt: skip

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
    say("done")
