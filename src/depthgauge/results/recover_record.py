"""What a recovery did: how long, how fast, and how the losses fell."""

from collections.abc import Mapping
from typing import Any

from depthgauge.base.format import number
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.results.record import Count, Measured, Number, Record, check_schema, read
from depthgauge.results.recover_options import RecoverOptions

RECOVER_SCHEMA = "depthgauge.recover/1"
RECOVER_ADVICE = "give the `depthgauge.json` in the directory that `depthgauge recover --out DIR` wrote"
TOKENS_DONE, TIME_OVER, NO_GAIN = "all tokens", "time", "no further gain"


class RecoveryPoint(Record, frozen=True, kw_only=True):
    """The losses after a number of training tokens.

    - `train`: mean divergence from the teacher since the last point, in nats per token; None at the start
    - `select`: objective of the student on the selection windows
    - `apart`: objective on windows of a text that nothing is trained on or chosen by; None if there is none
    """

    tokens: Count
    train: Measured
    select: Measured
    apart: Measured


class RecoveryRecord(Record, frozen=True, kw_only=True):
    """How a smaller model was distilled towards its source.

    - `tokens`, `steps`: training tokens, and optimizer steps
    - `rate`: largest learning rate
    - `seconds`: seconds of training, measurements included
    - `memory`: largest GPU memory in bytes; None on a CPU
    - `how`: what was done to fit into memory, or after a loss that was not finite
    - `data`: what it was trained on: a description and its number of tokens
    - `before`, `after`: objective on the selection windows; `error` is the standard error of the difference
    - `kept`: whether the gain is larger than its standard error; if not, the weights from before it are used
    - `ended`: why it ended: all tokens, time, or no further gain
    - `curve`: the losses on the way
    """

    tokens: Count
    steps: Count
    rate: Number
    seconds: Number
    memory: Count | None
    how: tuple[str, ...]
    data: dict[str, Count]
    before: Measured
    after: Measured
    error: Measured
    kept: bool
    ended: str
    curve: tuple[RecoveryPoint, ...]


class RecoveredText(Record, frozen=True, kw_only=True):
    """The objective on one text, on windows that nothing was trained on or chosen by.

    - `teacher`, `before`, `after`: the objective of the teacher, and of the smaller model before and after
    - `change`: after − before, with the 95 % confidence interval from `low` to `high`; None with fewer than 4 windows
    """

    kind: str
    name: str
    windows: Count
    teacher: Measured
    before: Measured
    after: Measured
    change: Measured
    low: Measured
    high: Measured


class RecoverRecord(Record, frozen=True, kw_only=True):
    """The result of `recover`.

    - `name`, `teacher`: the smaller model, and the model that it was made from
    - `layers`, `teacher_layers`: their numbers of blocks
    - `texts`: the objective on each text, on windows that nothing was trained on or chosen by
    - `recovery`: the training
    - `evaluation`: the teacher, the smaller model and the recovered one on the cloze task; None if it was not run
    - `check`: what a new process found that loaded the written model, as a sentence
    - `out`: the directory that was written; None if nothing was
    """

    schema: str = RECOVER_SCHEMA
    version: str
    name: str
    teacher: str
    objective: str
    layers: Count
    teacher_layers: Count
    window: Count
    texts: tuple[RecoveredText, ...]
    recovery: RecoveryRecord
    evaluation: EvaluateRecord | None = None
    settings: RecoverOptions
    check: str = ""
    notes: tuple[str, ...]
    versions: dict[str, str]
    seconds: Number
    out: str | None

    def summary(self) -> Mapping[str, str]:
        """Return the objective before and after, and the output directory."""
        before, after = self.recovery.before, self.recovery.after
        return {"name": repr(self.name), self.objective: f"{number(before)} → {number(after)}", "out": repr(self.out)}


def check_recover(document: Any, name: str = "the result", advice: str = RECOVER_ADVICE) -> RecoverRecord:
    """Return a parsed result document as a record; a ResultError names the place that does not fit."""
    check_schema(document, RECOVER_SCHEMA, name, advice)
    return read(document, RecoverRecord, name, advice)
