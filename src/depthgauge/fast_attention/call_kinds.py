"""What is kept between calls of one kind: how polynomials are chosen, and how long exact attention needs no decision.

Exact attention is always correct, so it needs no proof. A decision costs a pass over q and k and a transfer to the
host. After a kind of call was decided for exact attention r times in a row, the next 2^(r−1) calls of this kind, at
most `LONGEST_WAIT`, are computed exactly without a decision.
"""

import math
from collections.abc import Callable

from depthgauge.fast_attention.decide.chooser import Chooser
from depthgauge.fast_attention.problem import Kind, Outline

LONGEST_WAIT = 1024


class CallKinds:
    """The choosers, and the numbers of calls that remain exact without a decision, by kind of call."""

    _MOST_KINDS = 4096

    def __init__(self) -> None:
        self._waits: dict[Outline, list[float]] = {}
        self._choosers: dict[Kind, Chooser] = {}

    def is_exact(self, outline: Outline) -> bool:
        """Return whether this call is exact without a decision, and count it."""
        wait = self._waits.get(outline)
        if wait is None or wait[0] <= 0:
            return False
        wait[0] -= 1  # infinity stays infinity
        return True

    def refused(self, outline: Outline, is_final: bool = False) -> None:
        """Record that exact attention was chosen; with `is_final`, no later call of this kind is decided."""
        if outline not in self._waits and len(self._waits) >= self._MOST_KINDS:
            self._waits.clear()
        wait = self._waits.setdefault(outline, [0, 0.5])
        wait[1] = math.inf if is_final else min(LONGEST_WAIT, 2 * wait[1])
        wait[0] = wait[1]

    def accepted(self, outline: Outline) -> None:
        """Record that the polynomial path was chosen for at least one head."""
        self._waits.pop(outline, None)

    def chooser(self, kind: Kind, make: Callable[[], Chooser]) -> Chooser:
        """Return the chooser of this kind of call, created on first use."""
        found = self._choosers.get(kind)
        if found is None:
            if len(self._choosers) >= self._MOST_KINDS:
                self._choosers.clear()
            found = self._choosers[kind] = make()
        return found
