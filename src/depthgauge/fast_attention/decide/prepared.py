"""Calls in which all heads share one polynomial, with little work on the host.

At 8,192 tokens the kernels take 0.26 ms. To describe a call and to decide for every head takes the host as long again
(row `regime, forward, n = 8192` of benchmarks/attention_dropin.py). A `PreparedCall` has everything that does not
depend on numbers. It leaves every call that is not the usual one to `Decision`, and never decides otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import cast

import torch
from torch import Tensor

from depthgauge.fast_attention.autograd import PolynomialAttention
from depthgauge.fast_attention.decide.chooser import LARGEST_ROUNDING, Chooser, chooser_for
from depthgauge.fast_attention.problem import Rules
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.theory.bounds import Survey, value_range
from depthgauge.fast_attention.theory.minimax import grid_index
from depthgauge.fast_attention.triton.backend import TritonBackend
from depthgauge.fast_attention.triton.forward import ForwardLaunches, PassSizes, launched, scaled_coefficients
from depthgauge.fast_attention.triton.gradient import backward
from depthgauge.fast_attention.triton.survey import outward, survey_launch


@dataclass(frozen=True)
class PreparedPass:
    """The launches of a forward pass for one polynomial, and what its backward pass needs besides tensors."""

    launches: ForwardLaunches
    coefficients: tuple[float, ...]
    spec: Spec

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return out, Z and the two parts of the states."""
        return launched(self.launches, self.spec.scale, q, k, v, None, None, self.coefficients)


class PreparedGradient:
    """Computes gradients of a prepared pass that has run, for tensors of any shape with the same order of entries."""

    def __init__(self, sizes: PassSizes, computed: tuple[Tensor, ...]) -> None:
        self.sizes, self._computed = sizes, computed

    def forward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Return what was computed, and drop it here: the output must not refer to itself through its gradient."""
        computed, self._computed = self._computed, ()
        return computed[0], computed[1], computed

    def backward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        return backward(self.sizes, spec, q, k, v, saved, grad)


@lru_cache(maxsize=1024)
def prepared_for(
    rules: Rules, n: int, m: int, gradients: bool, is_trained: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor | bool]:
    """Return the prepared call of these arguments; if only `Decision` supports them, a function that returns False.

    With `gradients`, the tolerance holds for those of q and k; with `is_trained`, some gradient is needed.
    """
    chooser = chooser_for(rules, n, m, gradients, is_padded=False)
    backend, is_whole = chooser.backend(2), chooser.sizes.m == m
    if is_whole and isinstance(backend, TritonBackend) and backend.is_capturable(chooser.problem):
        return PreparedCall(chooser, backend, is_trained)
    return lambda q, k, v: False


class PreparedCall:
    """One kind of call in which q, k and v are contiguous, without padding, and values are centred after the sums."""

    def __init__(self, chooser: Chooser, backend: TritonBackend, is_trained: bool) -> None:
        self.chooser, self.backend, self.is_trained, s = chooser, backend, is_trained, chooser.sizes
        self.heads, self.scale = s.heads, abs(s.scale)
        self.survey = survey_launch(s.heads, s.groups * s.n, s.m, s.d, s.e, s.device)
        self.room, (self.up, self.lost) = s.heads * (8 + 2 * s.d), outward(s.d)
        smallest, largest = value_range(chooser.problem)
        self.smallest, self.largest = max(smallest, 2.0**-40), min(largest, 2.0**40)
        self.is_held = 2.0**-20 <= self.scale <= 2.0**20
        self._passes: dict[tuple[int, int], PreparedPass | None] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | bool:
        """Return the output, True if the call is exact, or False if `Decision` has to decide."""
        found, h = q.new_zeros(self.room, dtype=torch.float32), self.heads
        self.survey((q, k, v, found))
        return self.decided(found[: 8 * h].tolist(), q, k, v)

    def decided(self, numbers: list[float], q: Tensor, k: Tensor, v: Tensor) -> Tensor | bool:
        """Return the result of a call for the numbers of its survey: see `surveyed`.

        B is the largest of all heads, as in `Decision`. With a = √max ‖q‖² and b = √max ‖k‖² of a head, the outward
        rounded product satisfies (up a + lost)(up b + lost) ≤ up² a b + lost (up (max a + max b) + lost).
        """
        h = self.heads
        query, key, values = numbers[:h], numbers[h : 2 * h], numbers[4 * h : 5 * h]
        short_q, short_k = min(numbers[2 * h : 3 * h]), min(numbers[3 * h : 4 * h])  # centred
        long_q, long_k, least_q, least_k = max(query), max(key), min(query), min(key)
        short_q, short_k = min(short_q, least_q), min(short_k, least_k)
        if self.chooser.force is None and self.chooser.is_beyond(math.sqrt(short_k / max(numbers[6 * h :]))):
            return True
        is_inside = max(long_q, long_k) <= 2.0**40 and min(least_q, least_k) >= 2.0**-40  # as in `holds`
        is_inside = is_inside and self.smallest <= min(values) and max(values) <= self.largest
        if not (is_inside and self.is_held and math.isfinite(sum(numbers))):
            return False
        longest = self.lost * (self.up * (math.sqrt(long_q) + math.sqrt(long_k)) + self.lost)
        bound = self.up * self.up * math.sqrt(max(map(mul, query, key))) + longest
        # With centring, no head may have scores for which a lower degree is enough.
        lowest = grid_index(self.scale * math.sqrt(short_q * short_k))
        prepared = self._prepared(grid_index(self.scale * bound * (1 + 2.0**-50)), lowest)
        if prepared is None:
            return False
        computed = prepared.run(q, k, v)
        if not self.is_trained:
            return computed[0]
        gradient = PreparedGradient(prepared.launches.sizes, computed)
        out, _ = PolynomialAttention.apply(q, k, v, prepared.spec, gradient)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)

    def _prepared(self, index: int, lowest: int) -> PreparedPass | None:
        """Return the pass for B with this grid index, or None if there is none."""
        if (index, lowest) not in self._passes:
            self._passes[index, lowest] = self._pass(index, lowest)
        return self._passes[index, lowest]

    def _pass(self, index: int, lowest: int) -> PreparedPass | None:
        choice, chooser, h = self.chooser.alike(index, lowest), self.chooser, self.heads
        if choice is None or choice.polynomial is None or not chooser.is_worth_it(choice):
            return None
        if not chooser.allowance(choice, 0.0) <= LARGEST_ROUNDING or choice.degree() not in (1, 2):
            return None
        p, problem = choice.polynomial, chooser.problem
        spec = Spec(p.degree, (p.coefficients,) * h, tuple(range(h)), (0,) * h, None, Survey(problem), problem, None)
        (own,) = scaled_coefficients([p.coefficients], problem.scale)
        return PreparedPass(self.backend.plain_launches(chooser.sizes, p.degree, self.is_trained), own, spec)
