"""What `recover` is asked to do, and what a recovery did: how long, how fast, and how the losses fell."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from depthgauge.base.errors import InputError, require_seed
from depthgauge.base.format import number
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.results.gauge_record import NONE, ModelOptions, check_common, path_list
from depthgauge.results.labels import GIVEN, TEXTS
from depthgauge.results.record import RARE, Count, Measured, Number, Record, combine_options, read

TRAINING = "training"
AUTO, OFF = "auto", "off"
AUTO_TOKENS, AUTO_SECONDS = 2_000_000, 600.0
"""The most that `auto` trains."""
SHORT_TOKENS = 100_000
"""Tokens after which sets of blocks are compared. Three to five sets of SmolLM2-135M and of Gemma-3-270m had the same
order after 40,000, 200,000 and 400,000 tokens."""
_TRAINING = Meta(extra={"only": TRAINING})
_UNITS = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
_SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Amount:
    """How long to train: until one of the limits, or, if `stops`, until the selection windows gain no more."""

    tokens: int | None = None
    seconds: float | None = None
    stops: bool = False

    @property
    def short(self) -> "Amount":
        """A tenth of it, and at most `SHORT_TOKENS`: enough to compare models before one is chosen."""
        tokens = SHORT_TOKENS if self.tokens is None else min(SHORT_TOKENS, max(1, self.tokens // 10))
        return Amount(tokens, None if self.seconds is None else self.seconds / 10)


def amount_of(text: str, name: str = "recover") -> Amount | None:
    """Return what `2M`, `10min` or `auto` stands for; None for `off` and `none`.

    >>> amount_of("1.5M"), amount_of("10 min"), amount_of("none")
    (Amount(tokens=1500000, seconds=None, stops=False), Amount(tokens=None, seconds=600.0, stops=False), None)
    """
    if text in (AUTO, OFF, NONE):
        return Amount(AUTO_TOKENS, AUTO_SECONDS, stops=True) if text == AUTO else None
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h|k|K|M|G|)\s*", text)
    value = 0.0 if match is None else float(match[1])
    if match is None or value <= 0:
        raise InputError(
            f"{name} must be a number of tokens such as 2M, a time such as 10min, {AUTO}, {OFF} or {NONE}, got {text!r}"
        )
    if match[2] in _SECONDS:
        return Amount(seconds=value * _SECONDS[match[2]])
    return Amount(tokens=max(1, round(value * _UNITS[match[2].replace("K", "k")])))


class RecoverOptions(ModelOptions, frozen=True, kw_only=True):
    """What `recover` is asked to do. `depthgauge recover --help` shows the same text.

    The options about loading a model are those of `ModelOptions`.

    Attributes:
        teacher: The model that SMALL was made from. A directory, a GGUF file, or a name on the hub.
        text: Text to train on. FILE or FILE.jsonl:FIELD; repeat it for several. Windows that decide or measure are not
            trained on.
        general: Text that keeps the model general. It is the second half of the training windows: a text file, a data
            set on the hub, ORG/NAME@REVISION or ORG/NAME@REVISION:FIELD, or none  [default: what the teacher writes
            after the beginnings of passages of your text and of the built-in one].
        tokens: How many tokens to train on: 2M.  [default: 2M, unless there is --minutes].
        minutes: How long to train.
        evaluate: Also run these tasks, before and after. They are run on the teacher too: depthgauge_cloze, or names of
            lm-eval tasks with commas between them; 500 items of each  [default: depthgauge_cloze on a GPU, if lm-eval
            is installed].
        window: Tokens per window  [default: 512, or the model's context if that is shorter].
        seed: Seed of everything random  [default: 0].
    """

    teacher: Annotated[str | None, _TRAINING] = None
    text: Annotated[tuple[str, ...], _TRAINING] = ()
    general: Annotated[str | None, _TRAINING] = None
    tokens: Annotated[str | None, _TRAINING] = None
    minutes: Annotated[float | None, _TRAINING] = None
    evaluate: Annotated[str | None, _TRAINING] = None
    window: Annotated[int | None, _TRAINING, RARE] = None
    seed: Annotated[int, _TRAINING, RARE] = 0

    @property
    def amount(self) -> Amount:
        """How long to train."""
        seconds = None if self.minutes is None else 60 * float(self.minutes)
        tokens = "2M" if self.tokens is None and seconds is None else self.tokens
        found = Amount() if tokens is None else amount_of(tokens, "tokens")
        if found is None or found.stops or found.seconds is not None:
            raise InputError(f"tokens must be a number of tokens, such as 2M, got {tokens!r}; --minutes is for a time")
        return Amount(found.tokens, seconds)

    def check(self) -> None:
        """Raise for options that are missing or out of range."""
        if self.teacher is None:
            raise InputError("--teacher is missing; give the model that the smaller one was made from")
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise InputError(f"minutes must be a positive number, got {self.minutes!r}; it is how long to train")
        _ = self.amount
        check_common(self)
        if self.is_streamed or self.is_spread:
            raise InputError(f"recover trains the model on one device, got --device {self.device}; give a device")
        require_seed(self.seed)


def make_recover_options(options: RecoverOptions | None, fields: dict[str, Any]) -> RecoverOptions:
    """Combine an options record with single options given by keyword; check the types of both."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, Path | int) else value

    normal = {"text": path_list, "tokens": plain, **dict.fromkeys(("teacher", "general", "tokenizer"), plain)}
    return combine_options(RecoverOptions, "recover", options, fields, normal)


# --- The result -------------------------------------------------------------------------------------------------------

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


class MeasuredText(Record, frozen=True, kw_only=True):
    """Windows of one kind of text that nothing was fitted, trained or chosen on."""

    kind: str
    name: str
    windows: Count

    @property
    def label(self) -> str:
        """What the text is: `your text (corpus.txt)`."""
        kind = TEXTS.get(self.kind, self.kind)
        return f"{kind} ({self.name})" if self.kind in GIVEN and self.name else kind


class RecoveredText(MeasuredText, frozen=True, kw_only=True):
    """The objective on one text, on windows that nothing was trained on or chosen by.

    - `teacher`, `before`, `after`: the objective of the teacher, and of the smaller model before and after
    - `change`: after − before, with the 95 % confidence interval from `low` to `high`; None with fewer than 4 windows
    """

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


def check_recover(document: Any, name: str = "the result") -> RecoverRecord:
    """Return a parsed result document as a record; a ResultError names the place that does not fit."""
    return read(document, RecoverRecord, name, RECOVER_ADVICE)
