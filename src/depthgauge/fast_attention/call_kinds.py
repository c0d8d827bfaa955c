"""What is kept between calls of one kind: the chooser of polynomials, and how many calls are exact without a decision.

Exact attention is always correct, so it needs no proof. A decision costs a pass over q and k and a transfer to the
host. After a kind of call was decided for exact attention r times in a row, the next 2^(r−1) calls of this kind, at
most `LONGEST_WAIT`, are computed exactly without a decision.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from depthgauge.fast_attention.decide.chooser import Chooser
from depthgauge.fast_attention.exact_path import Direct
from depthgauge.fast_attention.problem import Kind, Outline

LONGEST_WAIT = 1024


@dataclass(slots=True)
class ExactCalls:
    """How many calls of one kind are exact without a decision.

    `left` calls remain, of `wait` after the last decision; none remain after a decision for a polynomial. `is_new` is
    True until the first such call. `direct` is how such calls can be passed to torch; the second call sets it.
    """

    left: float = 0.0
    wait: float = 0.5
    is_new: bool = True
    direct: Direct | None = None


class CallKinds:
    """What is kept by kind of call: the choosers, and in `exact` how many calls need no decision."""

    _MOST_KINDS = 4096

    def __init__(self) -> None:
        self.exact: dict[Outline, ExactCalls] = {}
        self._choosers: dict[Kind, Chooser] = {}

    def forget(self) -> None:
        """Forget all calls."""
        self.exact.clear()
        self._choosers.clear()

    def refused(self, outline: Outline, is_final: bool = False) -> ExactCalls:
        """Record that exact attention was chosen; with `is_final`, no later call of this kind is decided."""
        calls = self._record(outline)
        calls.wait = math.inf if is_final else min(LONGEST_WAIT, 2 * calls.wait)
        calls.left = calls.wait
        return calls

    def accepted(self, outline: Outline) -> None:
        """Record that the polynomial path was chosen for at least one head: the next call is decided."""
        calls = self._record(outline)
        calls.left, calls.wait = 0.0, 0.5

    def _record(self, outline: Outline) -> ExactCalls:
        if outline not in self.exact and len(self.exact) >= self._MOST_KINDS:
            self.exact.clear()
        return self.exact.setdefault(outline, ExactCalls())

    def chooser(self, kind: Kind, make: Callable[[], Chooser]) -> Chooser:
        """Return the chooser of this kind of call, created on first use."""
        found = self._choosers.get(kind)
        if found is None:
            if len(self._choosers) >= self._MOST_KINDS:
                self._choosers.clear()
            found = self._choosers[kind] = make()
        return found
