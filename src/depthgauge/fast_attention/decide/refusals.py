"""How often an `Attention` object looks at numbers, after exact attention was chosen for calls of the same shapes.

Exact attention needs no proof. A survey costs a pass over q, k and v and a transfer to the host. After exact attention
was chosen r times in a row for calls of one kind, the next 2^(r−1) calls of this kind, at most LONGEST_WAIT, are exact
without a survey.
"""

from dataclasses import dataclass

from depthgauge.fast_attention.decide.chooser import CallKind

LONGEST_WAIT = 1024
MOST_KINDS = 4096


@dataclass
class Wait:
    """`left` calls are exact without a survey, of `length` after the last one."""

    left: int = 0
    length: int = 0


class Refusals:
    """The waits of one `Attention` object, by kind of call."""

    def __init__(self) -> None:
        self._waits: dict[CallKind, Wait] = {}

    def is_waiting(self, kind: CallKind) -> bool:
        """Return whether a call is exact without a survey, and count it."""
        wait = self._waits.get(kind)
        if wait is None or wait.left == 0:
            return False
        wait.left -= 1
        return True

    def record(self, kind: CallKind, is_refused: bool) -> None:
        """Record a survey: exact attention was chosen for all heads (`is_refused`), or a polynomial for some."""
        if not is_refused:
            self._waits.pop(kind, None)
            return
        if len(self._waits) >= MOST_KINDS:
            self._waits.clear()
        wait = self._waits.setdefault(kind, Wait())
        wait.left = wait.length = min(LONGEST_WAIT, max(1, 2 * wait.length))

    def clear(self) -> None:
        """Forget all waits: the next call of every kind is surveyed."""
        self._waits.clear()
