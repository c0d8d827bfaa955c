"""Combine what was found about a checkpoint, window by window, into the record of the result.

Every statistic of the result, intervals and rank correlations included, is computed here and only here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from depthgauge.checkpoints.circuits import CircuitSizes
from depthgauge.checkpoints.head_statistics import STATIC, HeadStatistics, combine
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.mean_interval import mean_interval
from depthgauge.checkpoints.regime import regime
from depthgauge.checkpoints.removal import MeasuredDepth
from depthgauge.checkpoints.scores import spearman
from depthgauge.checkpoints.start_token import Start
from depthgauge.checkpoints.windows import Windows
from depthgauge.measures.summary import finite
from depthgauge.results.checkpoint_subject import (
    CheckpointDescription,
    CheckpointHead,
    CheckpointLayer,
    CheckpointState,
    CheckpointSubject,
    FastPlan,
    Interval,
    MeasuredRemoval,
    RegimeDistance,
    RemovalStep,
    ScoreTrust,
    TextWindows,
)
from depthgauge.results.labels import SCORES
from depthgauge.results.network_subject import Residual, ResidualNorms, ResidualSize
from depthgauge.results.verdicts import checkpoint_verdict

_ON_TEXT = ("score_range", "tv_mean", "tv_max", "first_mass", "entropy")


@dataclass(frozen=True)
class Findings:
    """What was found about a checkpoint.

    - `weights`: circuit sizes by layer and head; empty where the family is not known
    - `notes`: what could not be measured, and why
    - `found`: one dictionary per window, as saved in the partial result
    - `kinds`: the what-ifs that were measured
    - `measured`: greedy removal, if requested
    """

    checkpoint: Checkpoint
    weights: Sequence[Sequence[CircuitSizes]]
    notes: Sequence[str] = field(default_factory=list)
    windows: Windows | None = None
    start: Start | None = None
    found: Sequence[dict[str, Any]] = ()
    kinds: tuple[str, ...] = ()
    measured: MeasuredDepth | None = None


def subject_record(findings: Findings) -> CheckpointSubject:
    """Return the record of one checkpoint."""
    checkpoint, L = findings.checkpoint, findings.checkpoint.layers
    what_ifs = {kind: _what_ifs(findings, kind) for kind in findings.kinds}
    scores = _scores(findings)
    trust = _trust(scores, what_ifs, L)
    removal = None if findings.measured is None else _removal(findings.measured)
    distance = None
    if findings.weights:
        distance = msgspec.convert(regime(findings.weights).to_json(), RegimeDistance)
    return CheckpointSubject(
        name=checkpoint.name,
        verdict=checkpoint_verdict(L, checkpoint.objective, what_ifs.get("block", {}), trust, removal, distance),
        model=msgspec.convert(checkpoint.describe(), CheckpointDescription),
        text=_text(findings),
        regime=distance,
        baseline=_baseline(findings),
        input=CheckpointState(residual=_residual(findings, 0)),
        layers=tuple(_layer(findings, layer, what_ifs, scores) for layer in range(L)),
        scores=tuple(trust),
        depth=() if removal is None else (removal,),
        notes=tuple(findings.notes),
    )


def _text(findings: Findings) -> TextWindows | None:
    if findings.windows is None or findings.start is None:
        return None
    start = findings.start
    document = {**findings.windows.to_json(), "bos": start.bos, "bos_reason": start.reason}
    return msgspec.convert(document, TextWindows)


def _baseline(findings: Findings) -> Interval | None:
    """Return the loss of the intact model; an encoder has none."""
    losses = [window["observed"]["loss"] for window in findings.found]
    return None if not losses or losses[0] is None else mean_interval(losses)


def _what_ifs(findings: Findings, kind: str) -> dict[int, Interval]:
    """Return the cost of one what-if by layer."""
    layers = len(findings.found[0][kind])
    return {layer: mean_interval([window[kind][layer] for window in findings.found]) for layer in range(layers)}


def _scores(findings: Findings) -> dict[str, list[float]]:
    """Return the layer scores by name and layer, means over windows."""
    names = findings.found[0]["observed"]["scores"] if findings.found else {}
    return {
        name: torch.tensor([window["observed"]["scores"][name] for window in findings.found], dtype=torch.float64)
        .mean(dim=0)
        .tolist()
        for name in names
    }


def _trust(scores: dict[str, list[float]], what_ifs: dict[str, dict[int, Interval]], layers: int) -> list[ScoreTrust]:
    """Return the rank correlation of each layer score with the what-if it predicts."""
    rows = []
    for score, values in scores.items():
        kind = SCORES[score].what_if
        if kind in what_ifs and len(values) == layers:
            correlation = spearman(values, [what_ifs[kind][layer].loss for layer in range(layers)])
            rows.append(ScoreTrust(score=score, what_if=kind, spearman=correlation, layers=layers))
    return rows


def _removal(measured: MeasuredDepth) -> MeasuredRemoval:
    steps = []
    for step in measured.steps:
        found = mean_interval(step.losses)
        steps.append(RemovalStep(removed=step.layer, loss=found.loss, low=found.low, high=found.high))
    last = {"loss": steps[-1].loss, "low": steps[-1].low, "high": steps[-1].high} if steps else {}
    return MeasuredRemoval(
        increase=measured.increase,
        layers=measured.layers,
        removed=tuple(step.layer for step in measured.steps),
        steps=tuple(steps),
        stopped=measured.stopped,
        **last,  # type: ignore[arg-type]
    )


def _layer(
    findings: Findings, layer: int, what_ifs: dict[str, dict[int, Interval]], scores: dict[str, list[float]]
) -> CheckpointLayer:
    fast = findings.found[0]["observed"]["fast"][layer] if findings.found else None
    return CheckpointLayer(
        index=layer,
        residual=_residual(findings, layer + 1),
        heads=_heads(findings, layer),
        scores={name: finite(values[layer]) for name, values in scores.items() if values},
        fast=None if fast is None else msgspec.convert(fast, FastPlan),
        what_if={kind: by_layer[layer] for kind, by_layer in what_ifs.items() if layer in by_layer},
    )


def _residual(findings: Findings, state: int) -> Residual | None:
    """Return the residual of X_ℓ, mean and spread over windows; None where the states were not observed."""
    if not findings.found or not findings.found[0]["observed"]["residuals"]:
        return None
    windows = [window["observed"]["residuals"][state] for window in findings.found]
    centers: dict[str, Any] = {
        center: ResidualNorms(**{norm: _spread([window[center][norm] for window in windows]) for norm in norms})
        for center, norms in windows[0].items()
    }
    return Residual(**centers)


def _spread(pairs: Sequence[Sequence[float]]) -> ResidualSize:
    value, ratio = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    return ResidualSize(
        value=finite(value.mean()), ratio=finite(ratio.mean()), ratio_std=finite(ratio.std(correction=0))
    )


def _heads(findings: Findings, layer: int) -> tuple[CheckpointHead, ...]:
    entries: list[dict[str, Any]] = [{"index": head} for head in range(findings.checkpoint.heads)]
    if findings.found:
        seen = combine([HeadStatistics.from_json(window["observed"]["heads"][layer]) for window in findings.found])
        errors = seen.static_errors()
        for head, entry in enumerate(entries):
            entry |= {name: finite(getattr(seen, name)[head]) for name in _ON_TEXT}
            entry["static"] = {name: finite(errors[i, head]) for i, name in enumerate(STATIC)}
            entry["static_best"] = STATIC[int(errors[:, head].nan_to_num(nan=torch.inf).argmin())]
    if findings.weights:
        for entry, sizes in zip(entries, findings.weights[layer], strict=True):
            entry |= {name: finite(value) for name, value in sizes.to_json().items()}
    return tuple(CheckpointHead(**entry) for entry in entries)
