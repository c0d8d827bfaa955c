"""The result of `shrink` as records; `depthgauge.json` next to a shrunk model holds one."""

import json
from pathlib import Path
from typing import Any

from depthgauge.errors import InputError
from depthgauge.results.record import Count, Measured, Number, Record, ResultError, read
from depthgauge.results.shrink_options import ShrinkOptions

SHRINK_SCHEMA = "depthgauge.shrink/1"
PLAN_SCHEMA = "depthgauge.plan/1"


class SearchStep(Record, frozen=True, kw_only=True):
    """One removal of the search.

    - `layer`: the block, counted from 0 in the source model
    - `step`: step length of the repair of the block before it; 0 if it was not repaired
    - `unrepaired`, `objective`: the objective on the selection windows before and after that repair
    """

    layer: Count
    step: Number
    unrepaired: Number
    objective: Number


class RepairStep(Record, frozen=True, kw_only=True):
    """The repair of one kept block: the step length that the selection windows chose, and the objective after it."""

    layer: Count
    step: Number
    objective: Number


class SourceRecord(Record, frozen=True, kw_only=True):
    """One source of calibration windows: `text`, `sampled` or `built-in`, and its windows in each part."""

    kind: str
    name: str
    sha256: str
    fit: Count
    select: Count
    certify: Count


class CalibrationRecord(Record, frozen=True, kw_only=True):
    """The windows: their length, special tokens, sources, and the SHA-256 of all token ids."""

    window: Count
    bos: bool | None
    bos_reason: str
    sources: tuple[SourceRecord, ...]
    sha256: str


class PlanRecord(Record, frozen=True, kw_only=True):
    """Which blocks to remove and how they were chosen: with the same source it reproduces the shrunk model.

    - `model`: path of the source model; `files`: SHA-256 of its weight files
    - `removed`: the blocks, counted from 0 in the source model
    - `search`, `swaps`: the steps of the search; each swap is [block put back, block removed instead]
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
    swaps: tuple[tuple[Count, Count], ...] = ()
    settings: ShrinkOptions
    calibration: CalibrationRecord


class LossRecord(Record, frozen=True, kw_only=True):
    """The objective of the dense and the shrunk model on the certify windows of the user's text (or the samples).

    `low` and `high` are the ends of the 95 % bootstrap interval of `shrunk`.
    """

    dense: Measured
    shrunk: Measured
    low: Measured
    high: Measured


class TextRecord(Record, frozen=True, kw_only=True):
    """The objective on one kind of text, on windows that nothing was fitted or selected on.

    `low` and `high` are the ends of the 95 % bootstrap interval of `increase`.
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


class MeanRecord(Record, frozen=True, kw_only=True):
    """The mean loss of predictions mixed with the uniform distribution grows by at most `increase`."""

    increase: Measured
    confidence: Number
    method: str
    windows: Count


class TestedSize(Record, frozen=True, kw_only=True):
    """One size that `--max-increase` tested: how many blocks were removed, its bound, and whether it passed."""

    removed: Count
    bound: Measured
    passed: bool


class GuaranteeRecord(Record, frozen=True, kw_only=True):
    """The statistical guarantee on the certify windows, what text it is about, and the assumption it needs."""

    quantile: QuantileRecord
    mean: MeanRecord | None
    about: str
    assumption: str
    limit: Measured = None
    tested: tuple[TestedSize, ...] = ()


class SpeedRecord(Record, frozen=True, kw_only=True):
    """Speed after ÷ before (time ratios below 1 are faster), with the seconds measured in alternating runs."""

    prefill: Measured
    decode: Measured
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


class HealRecord(Record, frozen=True, kw_only=True):
    """Training after the repair: the objective on the selection windows before and after; `kept` if it is lower."""

    steps: Count
    before: Number
    after: Number
    kept: bool


class ReloadRecord(Record, frozen=True, kw_only=True):
    """The check in a fresh process without depthgauge: the largest relative difference of outputs, and generation."""

    difference: Number
    layers: Count
    generation: str


class ShrinkRecord(Record, frozen=True, kw_only=True):
    """The result of `shrink`. Layers are counted from 0 in the source model."""

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
    guarantee: GuaranteeRecord | None
    speed: SpeedRecord | None
    parameters: BeforeAfter
    bytes: BeforeAfter
    memory: BeforeAfter | None
    curve: tuple[CurvePoint, ...]
    repair: tuple[RepairStep, ...]
    heal: HealRecord | None
    reload: ReloadRecord | None
    plan: PlanRecord
    notes: tuple[str, ...]
    versions: dict[str, str]
    seconds: Number
    out: str | None


_ADVICE = "give a file that `depthgauge shrink --plan-only` or `depthgauge shrink --out` wrote"


def read_shrink(path: str | Path) -> ShrinkRecord:
    """Read `depthgauge.json` of a shrunk model, or a document that `depthgauge shrink --json` printed."""
    return read(_document(path), ShrinkRecord, str(path), _ADVICE)


def read_plan(path: str | Path) -> PlanRecord:
    """Read a plan: a file that `--plan-only` wrote, or the `depthgauge.json` of a shrunk model."""
    document = _document(path)
    if isinstance(document, dict) and document.get("schema") == SHRINK_SCHEMA:
        return read(document, ShrinkRecord, str(path), _ADVICE).plan
    if not isinstance(document, dict) or document.get("schema") != PLAN_SCHEMA:
        raise ResultError(f"{path} is not a plan of `shrink`; {_ADVICE}")
    return read(document, PlanRecord, str(path), _ADVICE)


def _document(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; {_ADVICE}") from error
    except ValueError as error:
        raise ResultError(f"{path} is not JSON: {error}; {_ADVICE}") from error
