"""What a recovery did: how long, how fast, and how the losses fell."""

from depthgauge.results.record import Record

TOKENS_DONE, TIME_OVER, NO_GAIN = "all tokens", "time", "no further gain"


class RecoveryPoint(Record, frozen=True, kw_only=True):
    """The losses after a number of training tokens.

    Attributes:
        tokens: training tokens so far.
        train: mean divergence from the teacher since the last point, in nats per token; None at the start.
        select: objective of the student on the selection windows.
        apart: objective on windows of a text that nothing is trained on or chosen by; None if there is none.
    """

    tokens: int
    train: float | None
    select: float | None
    apart: float | None


class RecoveryRecord(Record, frozen=True, kw_only=True):
    """How a smaller model was distilled towards its source.

    Attributes:
        tokens: training tokens.
        steps: optimizer steps.
        rate: largest learning rate.
        seconds: seconds of training, measurements included.
        memory: largest GPU memory in bytes; None on a CPU.
        how: what was done to fit into memory, or after a loss that was not finite.
        data: what it was trained on: a description and its number of tokens.
        before: objective on the selection windows before it.
        after: objective after it.
        error: standard error of the difference.
        kept: whether the gain is larger than its standard error; if not, the weights from before it are used.
        ended: why it ended: all tokens, time, or no further gain.
        curve: the losses on the way.
    """

    tokens: int
    steps: int
    rate: float
    seconds: float
    memory: int | None
    how: tuple[str, ...]
    data: dict[str, int]
    before: float | None
    after: float | None
    error: float | None
    kept: bool
    ended: str
    curve: tuple[RecoveryPoint, ...]
