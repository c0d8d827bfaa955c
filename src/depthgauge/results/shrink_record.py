"""What `shrink` is asked to do and its result, as records; `depthgauge.json` next to a shrunk model holds one."""

import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from depthgauge.base.errors import InputError, require_positive, require_seed, unknown_name
from depthgauge.base.format import counted, number
from depthgauge.base.frames import frame
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.results.gauge_record import NONE, STACKS, HubModel, ModelOptions, check_common, path_list
from depthgauge.results.labels import GIVEN
from depthgauge.results.record import (
    RARE,
    Count,
    Measured,
    Number,
    Record,
    ResultError,
    combine_options,
    load_document,
    read,
)
from depthgauge.results.recover_record import AUTO, OFF, MeasuredText, RecoveryRecord, amount_of

EFFORTS = ("quick", "default", "high")
SIZE, TEXT = "size", "text"

HOW_MUCH = ("remove", "remove_layers", "max_bytes", "max_increase")
"""Options of which exactly one says how much to remove."""
WAYS = tuple(f"--{name.replace('_', '-')}" for name in HOW_MUCH)
UNKNOWN = 10**9
"""The number of layers before the configuration of a model is read; no number of blocks in an option is larger."""


_ANY, _SIZE, _TEXT = (Meta(extra={"only": panel}) for panel in (None, SIZE, TEXT))


class ShrinkOptions(ModelOptions, frozen=True, kw_only=True):
    """What `shrink` is asked to do. `depthgauge shrink --help` shows the same text.

    The options about loading a model are those of `ModelOptions`.

    In Python, `remove` may also be a whole number, a number between 0 and 1 as a share (`0.25` is `25%`), or a list.

    Attributes:
        remove: How many blocks to remove: 7, 25%, 2,4,6, or plan.json. A share is rounded down, and is at least 1
            block. Several make a model for each of them, from one search: OUT-2, OUT-4 and OUT-6. A plan that --out
            plan.json wrote, or depthgauge.json of a shrunk model, names the blocks, and has all other options.
        remove_layers: Remove exactly these blocks: 6,8-9. They are counted from 0, with both ends of a range.
        max_bytes: Remove as few blocks as make the weights fit this size on disk: 1.2GB or 800MB.
        max_increase: The most that the loss may grow: 0.1. As many blocks are removed as the guarantee allows, in
            nats per token.
        keep: Blocks that are never removed: 0,1,29.
        confidence: Confidence of the guarantee  [default: 0.95].
        effort: quick, default or high. More effort has more calibration windows, a wider search, and takes more time.
        recover: Train the kept blocks: 2M, 10min, auto, off, none. They are trained towards the dense model's
            predictions on all of your text: a number of tokens, or a time; auto: as long as it helps, at most 2M tokens
            and 10 minutes; off: a repair on the calibration windows alone; none: no weights are changed  [default:
            auto on a GPU, off on a CPU].
        general: The second half of what is trained on, which keeps the model general: a text file, a data set on the
            hub, ORG/NAME@REVISION or ORG/NAME@REVISION:FIELD, or none  [default: what the dense model writes after
            the beginnings of passages].
        evaluate: Also run these tasks on both models. Tasks are depthgauge_cloze, or names of lm-eval tasks with commas
            between them; 500 items of each, item by item.
        text: What to calibrate on. For a model of text, a text file, or FILE.jsonl:FIELD; repeat it for several. For a
            classifier, JSON lines or CSV with text and label. For an encoder–decoder model, JSON lines with source and
            target. For a model of images, a folder of them, and beside it, if it classifies, a file with file_name and
            label. For a model of speech, a folder with a.wav and its transcript a.txt  [default: text sampled from the
            model].
        stack: Stack of an encoder–decoder model: decoder  [default], encoder, or both. With both, all numbers count the
            blocks of both stacks, those of the encoder first, and the search divides what is removed.
        sampled: Share of calibration windows sampled from the model  [default: a third].
        window: Tokens per window  [default: 512, with --effort quick 256], or the most tokens of a labelled text, a
            source or a target  [default: 128].
        seed: Seed of everything random  [default: 0].
    """

    remove: Annotated[str | None, _SIZE] = None
    remove_layers: Annotated[str | None, _SIZE] = None
    max_bytes: Annotated[str | None, _SIZE, RARE] = None
    max_increase: Annotated[float | None, _SIZE] = None
    keep: Annotated[str | None, _SIZE, RARE] = None
    confidence: Annotated[float, _SIZE, RARE] = 0.95
    effort: Annotated[str, _ANY] = "default"
    recover: Annotated[str | None, _ANY] = None
    general: Annotated[str | None, _TEXT, RARE] = None
    evaluate: Annotated[str | None, _ANY] = None
    text: Annotated[tuple[str, ...], _TEXT] = ()
    stack: Annotated[str | None, _TEXT, RARE] = None
    sampled: Annotated[float | None, _TEXT, RARE] = None
    window: Annotated[int | None, _TEXT, RARE] = None
    seed: Annotated[int, _ANY, RARE] = 0

    @property
    def repairs(self) -> bool:
        """Whether the weights that are left are changed."""
        return self.recover != NONE

    def check(self) -> None:
        """Raise for options that contradict each other or are out of range."""
        check_common(self)
        if self.effort not in EFFORTS:
            raise unknown_name("effort", self.effort, EFFORTS)
        given = [f"--{name.replace('_', '-')}" for name in HOW_MUCH if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InputError(f"say how much to remove by exactly one of {', '.join(WAYS)}, got {found}")
        if self.max_increase is not None:
            require_positive("max-increase", self.max_increase, "the largest increase of the loss in nats per token")
        if self.keep is not None and self.remove_layers is not None:
            raise InputError("--remove-layers names the blocks to remove, so there is nothing for --keep; leave it out")
        trains = self.recover is not None and amount_of(self.recover) is not None
        if self.general is not None and self.recover is not None and not trains:
            raise InputError(f"--general is trained on, and --recover {self.recover} does not train; leave one out")
        if self.sampled is not None and not 0 <= self.sampled <= 1:
            raise InputError(f"sampled must be a share from 0 to 1, got {self.sampled!r}")
        require_seed(self.seed)
        if self.sampled not in (None, 1) and not self.text:
            words = "divides the windows between --text and the model"
            raise InputError(f"--sampled {self.sampled:g} {words}; give a text, or leave --sampled out")
        if self.is_streamed:
            self.check_streamed()
        if self.max_bytes is not None:
            self.byte_limit()
        self.check_layers()

    def check_streamed(self) -> None:
        """Raise for what streamed weights are too slow for, or cannot do."""
        other = "leave --device stream out" if self.is_streamed else "use a machine with more memory"
        for is_given, reason in (
            (not self.text, "does not sample text from the model; give --text"),
            (self.sampled, "does not sample text from the model; leave --sampled out"),
            (
                self.recover not in (None, OFF, NONE, AUTO),
                "does not train weights, which would have to be in memory; leave --recover out, and run `depthgauge "
                "recover` on the result where it fits",
            ),
        ):
            if is_given:
                raise InputError(f"a model whose weights are streamed {reason}, or {other}")

    def check_layers(self, layers: int = UNKNOWN, name: str = "the model") -> None:
        """Raise if the options name blocks, or a number of blocks, that the model `name` cannot lose."""
        self.layers_to_remove(layers, name)
        left = layers - len(self.protected(layers, name))
        most = 1 if self.remove is None else max(self.counts(layers, name))
        if most > left:
            blocks = counted(most, "block")
            raise InputError(f"{blocks} cannot be removed from {name}: --keep leaves {left} of {layers}")

    def check_model(self, objective: str, name: str) -> None:
        """Raise for options that do not apply to the model `name`; a decoder is measured by its `loss`."""
        decoder = objective == "loss"
        if not decoder and self.max_increase is not None and objective != "labels":
            raise InputError(
                f"--max-increase limits the loss of a language model, and {name} is none; use --remove, the result "
                "shows how far its output moves"
            )
        if not decoder and self.evaluate is not None:
            raise InputError(f"--evaluate needs a causal language model, and {name} is none; leave it out")
        if not decoder and self.sampled is not None:
            raise InputError(f"--sampled needs a causal language model, and {name} is none; leave it out")

    def layers_to_remove(self, layers: int, name: str) -> tuple[int, ...] | None:
        """Return the blocks of `remove_layers` in the model `name` with this many layers; None if not given.

        >>> ShrinkOptions(remove_layers="6,8-9").layers_to_remove(12, "model")
        (6, 8, 9)
        """
        if self.remove_layers is None:
            return None
        found = _layer_numbers("remove-layers", self.remove_layers, layers, name)
        if len(found) >= layers:
            raise InputError(f"remove-layers names all {counted(layers, 'block')} of {name}; at least one must stay")
        return found

    def protected(self, layers: int, name: str) -> tuple[int, ...]:
        """Return the blocks of `keep` in the model `name` with this many layers."""
        return () if self.keep is None else _layer_numbers("keep", self.keep, layers, name)

    @property
    def removals(self) -> tuple[str, ...]:
        """The numbers and shares of `remove`, as they are written; each makes a model."""
        return tuple(part.strip() for part in (self.remove or "").split(","))

    def counts(self, layers: int = UNKNOWN, name: str = "the model") -> dict[int, str]:
        """Return the numbers of blocks that `remove` stands for in a model, in increasing order, as they are written.

        >>> ShrinkOptions(remove="25%,4").counts(30, "model"), ShrinkOptions(remove="10%").counts(4, "model")
        ({4: '4', 7: '25%'}, {1: '10%'})
        """
        found: dict[int, str] = {}
        for part in self.removals:
            match = re.fullmatch(r"0*([1-9]\d{0,8})|(\d{1,2}(?:\.\d+)?)\s*%", part)
            if match is None or (match[2] and not float(match[2])):
                what = "a number of blocks from 1 on, or a share of them below 100%"
                raise InputError(f"remove must be {what}, such as 7 or 25%, or several: 2,4,6, got {self.remove!r}")
            # 33.3333333333% of 12 blocks are 4
            count = int(match[1] or 0) or max(1, math.floor(round(float(match[2]) * layers / 100, 6)))
            if count in found:
                raise InputError(f"remove: {found[count]} and {part} are {count} of {name}; leave one of them out")
            found[_below(count, layers, name)] = part
        return dict(sorted(found.items()))

    def byte_limit(self) -> int:
        """Return the bytes of `max_bytes`: kB, MB and GB are powers of 1,000, and KiB, MiB and GiB of 1,024.

        >>> ShrinkOptions(max_bytes="1.5GB").byte_limit(), ShrinkOptions(max_bytes="2 KiB").byte_limit()
        (1500000000, 2048)
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?\s*", self.max_bytes or "")
        if match is None or float(match[1]) <= 0:
            raise InputError(f"max-bytes must be a size such as 1.2GB or 800MiB, got {self.max_bytes!r}")
        power = " KMGT".index(match[2].upper() or " ")
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _below(count: int, layers: int, name: str) -> int:
    """Return a number of blocks to remove; raise unless the model `name` has more."""
    if layers == 1:
        raise InputError(f"{name} has one block, and at least one must stay, so no block can be removed")
    if count >= layers:
        raise InputError(
            f"remove must be from 1 to {counted(layers - 1, 'block')}, got {count}; {name} has {layers} blocks and "
            "at least one must stay"
        )
    return count


def make_shrink_options(options: ShrinkOptions | None, fields: dict[str, Any]) -> ShrinkOptions:
    """Combine an options record with single options given by keyword; check the types of both.

    A single text may be given as one path, and `remove` as a whole number, a number between 0 and 1, or a list. None
    keeps the option of the record.
    """
    known = ShrinkOptions.__struct_fields__
    given = {name: value for name, value in fields.items() if value is not None or name not in known}
    normal: dict[str, Callable[[Any], Any]] = {
        "remove": _remove_text,
        "text": path_list,
        **dict.fromkeys(("tokenizer", "general"), str),
    }
    normal |= dict.fromkeys(("remove_layers", "keep", "max_bytes", "recover"), _as_text)
    return combine_options(ShrinkOptions, "shrink", options, given, normal)


def _as_text(value: Any) -> Any:
    """Return a number, or a list of numbers, as the command line writes it.

    >>> _as_text(200), _as_text([2, 4]), _as_text("auto"), _as_text(False)
    ('200', '2,4', 'auto', False)
    """
    if isinstance(value, list | tuple | range):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _layer_numbers(option: str, text: str, layers: int, name: str) -> tuple[int, ...]:
    """Return the blocks that a text such as `0,2-4` names, in increasing order."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part)
        if match is None:
            raise InputError(f"{option} must name blocks, such as 12-18 or 6,8-9, got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < layers:
            known = "" if layers == UNKNOWN else f" of {name}, whose {layers} blocks are 0 to {layers - 1}"
            raise InputError(f"{option}: {part.strip()} is not a block or an increasing range{known}")
        found |= {*range(first, last + 1)}
    return tuple(sorted(found))


def _remove_text(remove: Any) -> Any:
    """Return a number of blocks, a share of all blocks between 0 and 1, or several, as the command line writes it.

    >>> _remove_text(7), _remove_text(0.25), _remove_text(1 / 3), _remove_text([2, 4])
    ('7', '25%', '33.3333333333%', '2,4')
    """
    if isinstance(remove, str | Path):
        return str(remove)
    if isinstance(remove, list | tuple | range):
        return ",".join(map(_remove_text, remove))
    if isinstance(remove, numbers.Integral) and not isinstance(remove, bool):
        return str(int(remove))
    if isinstance(remove, numbers.Real) and 0 < float(remove) < 1:
        return f"{100 * float(remove):.10f}".rstrip("0").rstrip(".") + "%"
    raise InputError(
        f"remove must be a number of blocks or a share of all blocks, got {remove!r}; write remove=7 for 7 blocks, and "
        "remove=0.25 or remove='25%' for a quarter of them"
    )


# --- The result -------------------------------------------------------------------------------------------------------

SHRINK_SCHEMA = "depthgauge.shrink/1"
PLAN_SCHEMA = "depthgauge.plan/1"
LLAMA = "llama.cpp"
"""The program that checks GGUF files."""
MOST_LAYERS = 10_000
"""A document with more layers than this is damaged; pages and tables draw every layer."""


class SearchStep(Record, frozen=True, kw_only=True):
    """One removal of the search: the block, counted from 0 in the source model, and the objective without it.

    The objective is the mean over the selection windows, without repair.
    """

    layer: Count
    objective: Number


class CandidateRecord(Record, frozen=True, kw_only=True):
    """One set of blocks, measured as a finished model on the selection windows.

    - `methods`: the methods that chose this set
    - `increase`, `error`: mean increase of the objective without repair, and its standard error
    - `repaired`, `repaired_error`: the same after repair; None if the set was not repaired
    - `chosen`: whether this set was removed
    """

    methods: tuple[str, ...]
    removed: tuple[Count, ...]
    increase: Measured
    error: Measured
    repaired: Measured
    repaired_error: Measured
    chosen: bool

    @property
    def best(self) -> float:
        """The smaller increase of the two."""
        return min(value for value in (self.increase, self.repaired, math.inf) if value is not None)


class RepairStage(Record, frozen=True, kw_only=True):
    """One stage of the repair: the objective on the selection windows before and after it.

    `error` is the standard error of the difference; the stage was `kept` if its gain is larger.
    """

    name: str
    before: Measured
    after: Measured
    error: Measured
    kept: bool


class SourceRecord(Record, frozen=True, kw_only=True):
    """One source of calibration windows, and its windows in each part.

    `kind` is one of `GIVEN`, `sampled` or `built-in`.
    """

    kind: str
    name: str
    sha256: str
    fit: Count
    select: Count
    certify: Count


class CalibrationRecord(Record, frozen=True, kw_only=True):
    """The windows: their length in tokens, special tokens, sources, and the SHA-256 of all of them."""

    window: Count
    bos: bool | None
    bos_reason: str
    sources: tuple[SourceRecord, ...]
    sha256: str

    @property
    def noun(self) -> str:
        """What one window is: a `window` of text, a whole `text`, an `image`, a `pair` or a `recording`."""
        kinds = [source.kind for source in self.sources if source.kind in GIVEN[1:]]
        return kinds[0].removesuffix("s") if kinds else "window"

    @property
    def windows(self) -> str:
        """What the windows are: `windows of 512 tokens`, or `images`."""
        return f"windows of {self.window} tokens" if self.noun == "window" else f"{self.noun}s"


class PlanRecord(Record, frozen=True, kw_only=True):
    """Which blocks to remove and how they were chosen: with the same source it reproduces the shrunk model.

    - `model`: path of the source model, or its name on the hub with the commit; `files`: SHA-256 of its weight files
    - `hub`: what the source model is on the hub; None if it was given as a path
    - `removed`: the blocks, counted from 0 in the source model
    - `search`: the steps of the search
    - `candidates`: the sets of blocks that were compared, the best first
    - `settings`: the options with their defaults filled in
    """

    schema: str = PLAN_SCHEMA
    version: str
    model: str
    family: str
    files: dict[str, str]
    layers: Count
    removed: tuple[Count, ...]
    search: tuple[SearchStep, ...] = ()
    candidates: tuple[CandidateRecord, ...] = ()
    settings: ShrinkOptions
    calibration: CalibrationRecord
    hub: HubModel | None = None

    def looks(self, tested: tuple["TestedSize", ...] = ()) -> int:
        """Return how many sizes may have been measured on the certify windows before this one was chosen.

        `tested` are those that were tested against a limit.
        """
        several = len(self.settings.removals)
        return max(several, len(tested) or (len(self.search) if self.settings.max_increase is not None else 0))

    @property
    def stack(self) -> str | None:
        """The stack of an encoder–decoder model that has the layers; None for other models."""
        has_two = any(source.kind in ("pairs", "recordings") for source in self.calibration.sources)
        return self.settings.stack or (STACKS[0] if has_two else None)

    def summary(self) -> Mapping[str, str]:
        """Return the model, its depth, and the blocks that the plan removes."""
        layers = f"{self.layers} → {self.layers - len(self.removed)}"
        return {"model": repr(self.model), "layers": layers, "removed": _listed(self.removed)}


class LossRecord(Record, frozen=True, kw_only=True):
    """The objective of the dense and the shrunk model on the certify windows of the user's text (or the samples).

    `low` and `high` are the ends of the 95 % confidence interval of `shrunk`; None with fewer than 4 windows.
    """

    dense: Measured
    shrunk: Measured
    low: Measured
    high: Measured


class LabelAccuracy(Record, frozen=True, kw_only=True):
    """The shares of the certify windows whose label the dense and the shrunk model predict."""

    dense: Number
    shrunk: Number
    windows: Count


class TextRecord(MeasuredText, frozen=True, kw_only=True):
    """The objective on one kind of text, on windows that nothing was fitted or selected on.

    `low` and `high` are the ends of the 95 % confidence interval of `increase`; None with fewer than 4 windows.
    """

    dense: Measured
    shrunk: Measured
    increase: Measured
    low: Measured
    high: Measured


class QuantileRecord(Record, frozen=True, kw_only=True):
    """On at least `share` of windows the loss grows by at most `increase`, with this confidence; null: too few."""

    increase: Measured
    share: Number
    confidence: Number
    windows: Count


class TestedSize(Record, frozen=True, kw_only=True):
    """One size that `--max-increase` tested: how many blocks were removed, its bound, and whether it passed."""

    removed: Count
    bound: Measured
    passed: bool


class GuaranteeRecord(Record, frozen=True, kw_only=True):
    """The statistical guarantee on the certify windows.

    - `quantile`: the bound; with a `limit`, it is the limit itself
    - `about`: what the guarantee is about, the `kind` of a source
    - `assumption`: the assumption that it needs, as a sentence
    - `limit`: the limit of `--max-increase`; `tested`: the sizes tested against it, from gentle to harsh
    """

    quantile: QuantileRecord
    about: str
    assumption: str
    limit: Measured = None
    tested: tuple[TestedSize, ...] = ()


class SpeedRecord(Record, frozen=True, kw_only=True):
    """Times of the two models, measured in pairs of runs; None where they did not settle, or were not measured.

    - `prefill`, `decode`: speed after ÷ speed before, of reading a prompt and per generated token; above 1 is faster
    - `prefill_low`, …, `decode_high`: the ends of their 95 % intervals
    - `prefill_before`, …, `decode_after`: the median seconds; `what`: a phrase for what was timed, how often and where
    """

    prefill: Measured
    decode: Measured
    prefill_low: Measured = None
    prefill_high: Measured = None
    decode_low: Measured = None
    decode_high: Measured = None
    prefill_before: Measured = None
    prefill_after: Measured = None
    decode_before: Measured = None
    decode_after: Measured = None
    what: str = ""


class BeforeAfter(Record, frozen=True, kw_only=True):
    """A count before and after."""

    before: Count | None
    after: Count | None


class CurvePoint(Record, frozen=True, kw_only=True):
    """Mean increase of the objective on the selection windows after removing `removed` blocks by one method."""

    method: str
    removed: Count
    increase: Measured


class ReloadRecord(Record, frozen=True, kw_only=True):
    """The check in a fresh process without depthgauge, which loaded the written model.

    - `difference`: the largest relative difference of its outputs from those of the model in memory
    - `layers`: the number of layers that it found
    - `generation`: whether generation with and without a cache is equal, as a phrase
    - `program`: `transformers`, or `llama.cpp` for a GGUF file. llama.cpp is compared with transformers: `difference`
      is that of the log-probabilities of the next tokens in nats, `source_difference` the same for the source model,
      and `generation` says whether both generate the same text
    """

    difference: Number
    layers: Count
    generation: str
    program: str = "transformers"
    source_difference: Measured = None


class ExampleRecord(Record, frozen=True, kw_only=True):
    """How the models continue the same beginning of a selection window, with the most likely token at each place.

    - `prompt`: the beginning
    - `dense`, `shrunk`: what the dense model and the smaller one write
    - `unrecovered`: what the smaller model wrote before its recovery; None without one
    """

    prompt: str
    dense: str
    shrunk: str
    unrecovered: str | None = None


class ShrinkRecord(Record, frozen=True, kw_only=True):
    """The result of `shrink`. Layers are counted from 0 in the source model.

    - `objective`: what `loss`, `texts` and the guarantee measure: `loss`; `labels`, the loss of labels;
      `logits`, the change of a classifier's output; `embedding`, that of an embedding; or `states` for other models
    - `removed`: the removed blocks; empty if no size stayed within the limit of `--max-increase`
    - `loss`, `texts`, `accuracy`, `guarantee`: on certify windows, which nothing was fitted or selected on
    - `parameters`, `bytes`, `memory`: before and after; `bytes` are the weight files on the disk
    - `curve`: loss against number of removed blocks, for this and for other ways to choose them
    - `stages`: the stages of the repair; `recovery`: the training after it, None without one
    - `durations`, `seconds`: the seconds of each part of the run, in order, and since its start; of several sizes, both
      include the sizes before this one
    - `evaluation`: both models on tasks, the dense one first; None if no tasks were asked for
    - `examples`: continuations by both models; empty if they are not causal language models, or nothing was written
    - `out`: the directory or the GGUF file of the shrunk model; None if nothing was written
    """

    schema: str = SHRINK_SCHEMA
    version: str
    name: str
    objective: str
    layers_before: Count
    layers_after: Count
    removed: tuple[Count, ...]
    repaired: bool
    loss: LossRecord
    texts: tuple[TextRecord, ...]
    accuracy: LabelAccuracy | None = None
    guarantee: GuaranteeRecord | None
    speed: SpeedRecord | None
    parameters: BeforeAfter
    bytes: BeforeAfter
    memory: BeforeAfter | None
    curve: tuple[CurvePoint, ...]
    stages: tuple[RepairStage, ...] = ()
    durations: dict[str, Number] = msgspec.field(default_factory=dict)
    recovery: RecoveryRecord | None = None
    reload: ReloadRecord | None
    evaluation: EvaluateRecord | None = None
    examples: tuple[ExampleRecord, ...] = ()
    plan: PlanRecord
    notes: tuple[str, ...]
    versions: dict[str, str]
    seconds: Number
    out: str | None

    def summary(self) -> Mapping[str, str]:
        """Return the depth, the removed blocks, the loss and the output directory."""
        return {
            "name": repr(self.name),
            "layers": f"{self.layers_before} → {self.layers_after}",
            "removed": _listed(self.removed),
            self.objective: f"{number(self.loss.dense)} → {number(self.loss.shrunk)}",
            "out": repr(self.out),
        }

    def to_frame(self, table: str = "texts") -> Any:
        """Return a `pandas.DataFrame`.

        Args:
            table: `texts` (one row per kind of text), `candidates` (per set of blocks), `curve` (per method and number
                of removed blocks), `search` (per removal), `stages` (per stage of the repair) or `tested` (per size
                that was tested against `--max-increase`).

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows: Mapping[str, tuple[Record, ...]] = {
            "texts": self.texts,
            "curve": self.curve,
            "search": self.plan.search,
            "candidates": self.plan.candidates,
            "stages": self.stages,
            "tested": () if self.guarantee is None else self.guarantee.tested,
        }
        if table not in rows:
            raise unknown_name("table", table, rows)
        return frame([row.to_json() for row in rows[table]])


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers)) or "none" if len(layers) <= 12 else counted(len(layers), "layer")


PLAN_ADVICE = "give a file that `depthgauge shrink --out plan.json` or `depthgauge shrink --out DIR` wrote"
SHRINK_ADVICE = "give the `depthgauge.json` in the directory that `depthgauge shrink --out DIR` wrote"


def check_shrink(document: Any, name: str = "the result", advice: str = SHRINK_ADVICE) -> ShrinkRecord:
    """Return a parsed result document as a record; keys that the schema does not know are ignored.

    A ResultError calls the document `name`, names the place that does not fit, and ends with `advice`.
    """
    record = read(document, ShrinkRecord, name, advice)
    _refuse(_problems(record), name, advice)
    return record


def read_plan(path: str | Path) -> PlanRecord:
    """Read a plan: a file that `shrink --out plan.json` wrote, or the `depthgauge.json` of a shrunk model."""
    document, name = load_document(path, PLAN_ADVICE), str(path)
    if isinstance(document, dict) and document.get("schema") == SHRINK_SCHEMA:
        return check_shrink(document, name, PLAN_ADVICE).plan
    plan = read(document, PlanRecord, name, PLAN_ADVICE)
    _refuse(_plan_problems(plan, ""), name, PLAN_ADVICE)
    return plan


def _refuse(problems: Iterator[str], name: str, advice: str) -> None:
    for problem in problems:
        raise ResultError(f"{name}: {problem}; {advice}")


def _problems(record: ShrinkRecord) -> Iterator[str]:
    yield from _plan_problems(record.plan, "plan.")
    before, after, removed = record.layers_before, record.layers_after, record.removed
    if record.plan.layers != before:
        yield f"layers_before: {before} is not plan.layers, {record.plan.layers}"
    yield from _removed_problems(removed, before, "removed")
    if after != before - len(removed):
        yield f"layers_after: {after} is not {before} less {counted(len(removed), 'removed layer')}"


def _plan_problems(plan: PlanRecord, place: str) -> Iterator[str]:
    if not 1 <= plan.layers <= MOST_LAYERS:
        yield f"{place}layers: expected from 1 to {MOST_LAYERS}, got {plan.layers}"
    yield from _removed_problems(plan.removed, plan.layers, f"{place}removed")
    yield from _layer_problems({f"{place}search[{k}].layer": s.layer for k, s in enumerate(plan.search)}, plan.layers)
    for k, candidate in enumerate(plan.candidates):
        yield from _removed_problems(candidate.removed, plan.layers, f"{place}candidates[{k}].removed")


def _removed_problems(removed: tuple[int, ...], count: int, place: str) -> Iterator[str]:
    """Yield what is wrong unless these are different layers of a model, and at least one of its layers is left."""
    for k, layer in enumerate(removed):
        yield from _layer_problems({f"{place}[{k}]": layer}, count)
        if layer in removed[:k]:
            yield f"{place}[{k}]: layer {layer} occurs twice"
    if len(removed) >= count:
        yield f"{place}: all {counted(count, 'layer')} are removed"


def _layer_problems(layers: Mapping[str, int], count: int) -> Iterator[str]:
    for place, layer in layers.items():
        if layer >= count:
            yield f"{place}: expected a layer from 0 to {count - 1}, got {layer}"
