"""Times of attention over fresh tensors, in turns with peers. The attention benchmarks import this file.

A model calls attention with tensors that it has just computed. Every timed call therefore has tensors of its own, and
the sizes of the scores differ by up to 30 % from call to call. The tensors are created before anything is timed. Before
every timed call the device is idle and its L2 cache is overwritten, so neither side profits from the call before it.

Contenders alternate call by call, or in turns of TURN calls if a call of one of them takes longer than LONG_MS. Exact
attention of 131,072 tokens takes the GPU to its power limit, and the lower clock that it leaves behind made the next
call of another contender about 10 % slower. Short calls do not do this, and the time of the host changes between turns.
The longest calls have one turn, in which the first contender follows the warm-up of all others.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, WIDTH = 16, 64
VARIATION = 0.3
"""Score sizes are between 1 − VARIATION and 1 + VARIATION times a middle size."""
WARM_UP = 3
LEAST_CALLS = TURN = 10
LONG_MS = 5.0
L2_BYTES = 256 * 2**20
"""The memory that is overwritten before every timed call: several times the L2 cache of any GPU so far."""
AGAIN = "SDPA again"
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


class Call(NamedTuple):
    """The tensors of one call. `up` is the gradient of the output in calls with a backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    up: Tensor | None = None

    def size(self) -> int:
        """Return the bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self if x is not None)


@dataclass(frozen=True)
class Place:
    """Where and how tensors are created."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    heads: int = HEADS
    width: int = WIDTH

    def normal(self, *shape: int) -> Tensor:
        """Return normal numbers in float32."""
        return torch.randn(*shape, device=self.device)

    def call(self, q: Tensor, k: Tensor, v: Tensor, with_backward: bool) -> Call:
        """Return the tensors in the dtype of this place, with a gradient of the output for a backward pass."""
        q, k, v = (x.to(self.dtype).requires_grad_(with_backward) for x in (q, k, v))
        up = self.normal(*q.shape[:-1], v.shape[-1]).to(self.dtype) if with_backward else None
        return Call(q, k, v, up)


def small_scores(place: Place, n: int, bound: float, factor: float, with_backward: bool = False) -> Call:
    """Draw q, k, v whose proved score bound is just below factor/(1 + VARIATION) × `bound` in every head."""
    q, k, v = (place.normal(1, place.heads, n, place.width) for _ in range(3))
    longest = (0.97 * bound * factor / (1 + VARIATION) * math.sqrt(place.width)) ** 0.5
    q, k = (x * (longest / x.norm(dim=-1).amax(dim=-1)[..., None, None]) for x in (q, k))
    return place.call(q, k, v, with_backward)


def trained_scores(
    place: Place, n: int, factor: float, with_backward: bool = False, m: int | None = None, batch: int = 1
) -> Call:
    """Draw q, k, v whose scores are as large as in a trained model: their standard deviation is 2 × factor.

    The first key is 4 times as long as the others, and so is one row in 64.
    """
    m = n if m is None else m
    q, k, v = (place.normal(batch, place.heads, tokens, place.width) for tokens in (n, m, m))
    q[:, :, 63::64] *= 4
    k[:, :, 0] *= 4
    return place.call(2 * factor * q, k, v, with_backward)


def factors(count: int) -> list[float]:
    """Return `count` factors that fill [1 − VARIATION, 1 + VARIATION] evenly, in random order."""
    spread = [1 + VARIATION * (2 * (i + 0.5) / count - 1) for i in range(count)]
    random.Random(0).shuffle(spread)
    return spread


Run = Callable[[Call], object]


@dataclass(frozen=True)
class Contender:
    """A function to be timed. `context` is entered around every call, outside of the timed region."""

    name: str
    run: Run
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def of(attend: Callable[..., object]) -> Run:
    """Return a function that computes attend(q, k, v), and the three gradients if the call has a backward pass."""

    def run(call: Call) -> object:
        out = attend(call.q, call.k, call.v)
        if call.up is None:
            return out
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, (call.q, call.k, call.v), call.up)

    return run


def sdpa(is_causal: bool) -> Contender:
    """Return torch's attention with the backend that torch chooses."""
    return Contender("SDPA", of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)))


def sdpa_again(is_causal: bool) -> Contender:
    """Return torch's attention once more: the difference of its two times shows how exact a measurement is."""
    return replace(sdpa(is_causal), name=AGAIN)


def exact_peers(is_causal: bool) -> list[Contender]:
    """Return torch's attention with each of the fast exact backends."""
    return [
        Contender(name, sdpa(is_causal).run, lambda backend=backend: sdpa_kernel(backend))  # type: ignore[misc]
        for name, backend in PEERS.items()
    ]


@dataclass
class Stopwatch:
    """Milliseconds from an idle device with a cold cache to the end of the work, host included."""

    device: torch.device
    _cache: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._cache = torch.empty(L2_BYTES if self.device.type == "cuda" else 1, dtype=torch.uint8, device=self.device)

    def __call__(self, contender: Contender, call: Call) -> float:
        """Return the time of one call."""
        with contender.context():
            if self.device.type != "cuda":
                started = time.perf_counter()
                kept = contender.run(call)
                taken = 1e3 * (time.perf_counter() - started)
                del kept
                return taken
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._cache.zero_()
            torch.cuda.synchronize(self.device)
            start.record()
            kept = contender.run(call)
            end.record()
            end.synchronize()
            del kept
            return start.elapsed_time(end)


@dataclass(frozen=True)
class Times:
    """Milliseconds of one contender.

    `first` is the first call of all, with compilation. `median` and `mean` are taken over `calls` fresh tensors;
    `repeated` is the median of calls on the same tensors, for the first contender only.
    """

    first: float
    median: float
    mean: float
    repeated: float
    calls: int


@dataclass(frozen=True)
class Effort:
    """How much is measured: at most `calls` fresh tensors, at most `memory` bytes of them, about `seconds` of calls.

    At least LEAST_CALLS fresh tensors are measured even if this takes longer.
    """

    calls: int = 60
    memory: int = 24 * 2**30
    seconds: float = 3.0
    repeats: int = 20

    def affordable(self, size: int) -> int:
        """Return the number of timed calls whose tensors have `size` bytes each."""
        return min(self.calls, max(LEAST_CALLS, self.memory // max(1, size) - WARM_UP - 1))


def compare(
    contenders: Sequence[Contender], draw: Callable[[float], Call], effort: Effort, watch: Stopwatch
) -> dict[str, Times]:
    """Time all contenders on the same fresh tensors, in turns of random order after the first one.

    A call finds the code of the one before it in the caches, so no contender may always follow the same one. Contenders
    other than the first that cannot compute the call are left out. `draw` takes the factor of the scores.
    """
    count = effort.affordable(draw(1.0).size()) + WARM_UP + 1
    pool = [draw(factor) for factor in factors(count)]
    first = dict(_first_times(contenders, pool[0], watch))
    able = [c for c in contenders if c.name in first]
    longest = max(watch(contender, call) for call in pool[1 : WARM_UP + 1] for contender in able)
    size = TURN if longest > LONG_MS else 1
    times: dict[str, list[float]] = {c.name: [] for c in able}
    until = time.perf_counter() + effort.seconds
    timed, order = pool[WARM_UP + 1 :], random.Random(0)
    for start in range(0, len(timed), size):
        if start >= LEAST_CALLS and time.perf_counter() > until:
            break
        for contender in able if start == 0 else order.sample(able, len(able)):
            times[contender.name] += [watch(contender, call) for call in timed[start : start + size]]
    return {
        c.name: Times(
            first=first[c.name],
            median=statistics.median(times[c.name]),
            mean=statistics.fmean(times[c.name]),
            repeated=_repeated(c, pool[-1], effort, watch) if c is able[0] else math.nan,
            calls=len(times[c.name]),
        )
        for c in able
    }


def _first_times(contenders: Sequence[Contender], call: Call, watch: Stopwatch) -> Iterator[tuple[str, float]]:
    for at, contender in enumerate(contenders):
        try:
            yield contender.name, watch(contender, call)
        except RuntimeError as error:
            if at == 0 or contender.name not in PEERS:
                raise
            print(f"{contender.name} is not available: {str(error).splitlines()[0]}", flush=True)


def _repeated(contender: Contender, call: Call, effort: Effort, watch: Stopwatch) -> float:
    """Return the median time of calls on the same tensors, after one that is not counted."""
    watch(contender, call)
    times: list[float] = []
    until = time.perf_counter() + effort.seconds / 4
    while len(times) < 3 or (len(times) < effort.repeats and time.perf_counter() < until):
        times.append(watch(contender, call))
    return statistics.median(times)
