"""The result of `shrink` as records; `depthgauge.json` next to a shrunk model holds one."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from depthgauge.base.errors import unknown_name
from depthgauge.base.format import counted, number
from depthgauge.base.frames import frame
from depthgauge.results.checkpoint_subject import HubModel
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.results.gauge_options import STACKS
from depthgauge.results.record import Count, Measured, Number, Record, ResultError, check_schema, load_document, read
from depthgauge.results.recover_record import RecoveryRecord
from depthgauge.results.shrink_options import ShrinkOptions

SHRINK_SCHEMA = "depthgauge.shrink/1"
PLAN_SCHEMA = "depthgauge.plan/1"
LLAMA = "llama.cpp"
"""The program that checks GGUF files."""
GIVEN = ("text", "texts", "images", "pairs", "recordings")
"""Kinds of windows that the user gave: windows of a text, and what was given one by one."""
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


class TextRecord(Record, frozen=True, kw_only=True):
    """The objective on one kind of text, on windows that nothing was fitted or selected on.

    `low` and `high` are the ends of the 95 % confidence interval of `increase`; None with fewer than 4 windows.
    """

    kind: str
    name: str
    windows: Count
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
    check_schema(document, SHRINK_SCHEMA, name, advice)
    record = read(document, ShrinkRecord, name, advice)
    _refuse(_problems(record), name, advice)
    return record


def read_plan(path: str | Path) -> PlanRecord:
    """Read a plan: a file that `shrink --out plan.json` wrote, or the `depthgauge.json` of a shrunk model."""
    document, name = load_document(path, PLAN_ADVICE), str(path)
    if isinstance(document, dict) and document.get("schema") == SHRINK_SCHEMA:
        return check_shrink(document, name, PLAN_ADVICE).plan
    check_schema(document, PLAN_SCHEMA, name, PLAN_ADVICE)
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
