"""Combine what was measured of a checkpoint, window by window, into its record."""

from collections.abc import Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from depthgauge.checkpoints.blocks.circuits import CircuitSizes, regime
from depthgauge.checkpoints.blocks.window_observer import STATIC, combine, spearman
from depthgauge.checkpoints.tasks.confidence import mean_interval
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.results.gauge_record import (
    CheckpointHead,
    CheckpointLayer,
    CheckpointState,
    CheckpointSubject,
    ExpertLoss,
    FastPlan,
    Interval,
    Residual,
    ScoreTrust,
    TextWindows,
    checkpoint_verdict,
)
from depthgauge.results.labels import EXPERT, SCORES
from depthgauge.results.record import finite
from depthgauge.theory.measures.quantities import SampleResiduals, residual_record

_ON_TEXT = ("score_range", "tv_mean", "tv_max", "first_mass", "entropy")
"""The statistics of a head that are copied to its record."""


def subject_record(
    checkpoint: Checkpoint,
    weights: Sequence[Sequence[CircuitSizes]],
    notes: Sequence[str],
    text: TextWindows | None = None,
    found: Sequence[dict[str, Any]] = (),
    measured: Mapping[str, Sequence[int]] = MappingProxyType({}),
    unobserved: str | None = None,
) -> CheckpointSubject:
    """Combine what was found window by window into the record of one checkpoint.

    `weights` has the circuit sizes by layer and head, empty where the family is not known; `found` is the result of
    `measure_windows` for the layers `measured` of each what-if. `unobserved` says why the
    attention was not observed.
    """
    L, observed = checkpoint.layers, [window["observed"] for window in found]
    what_ifs = {
        kind: {layer: mean_interval([window[kind][place] for window in found]) for place, layer in enumerate(on)}
        for kind, on in measured.items()
        if kind != EXPERT
    }
    scores = {
        name: torch.tensor([seen["scores"][name] for seen in observed], dtype=torch.float64).mean(dim=0).tolist()
        for name in (observed[0]["scores"] if observed else ())
    }
    trust = _trust(scores, what_ifs)
    has_loss = bool(observed) and observed[0]["loss"] is not None
    return CheckpointSubject(
        name=checkpoint.name,
        verdict=checkpoint_verdict(L, checkpoint.objective, what_ifs.get("block", {}), trust, measured=bool(observed)),
        model=checkpoint.describe(),
        text=text,
        regime=regime(weights) if weights else None,
        baseline=mean_interval([seen["loss"] for seen in observed]) if has_loss else None,
        accuracy=mean(seen["accuracy"] for seen in observed) if observed and "accuracy" in observed[0] else None,
        input=CheckpointState(residual=_residual(observed, 0)),
        layers=tuple(
            CheckpointLayer(
                index=layer,
                residual=_residual(observed, layer + 1),
                heads=_heads(checkpoint, observed, weights, layer),
                scores={name: finite(values[layer]) for name, values in scores.items() if values},
                fast=msgspec.convert(observed[0]["fast"][layer], FastPlan) if observed and unobserved is None else None,
                what_if={kind: by_layer[layer] for kind, by_layer in what_ifs.items() if layer in by_layer},
                experts=_experts(found, measured.get(EXPERT, ()), layer),
            )
            for layer in range(L)
        ),
        scores=tuple(trust),
        notes=tuple(notes),
        unobserved=unobserved,
    )


def _experts(found: Sequence[dict[str, Any]], on: Sequence[int], layer: int) -> tuple[ExpertLoss, ...]:
    """Return the experts of a layer; `on` has the layer of every expert that was measured on the windows."""
    by_expert = [[window[EXPERT][place] for window in found] for place, other in enumerate(on) if other == layer]
    return tuple(
        ExpertLoss(
            index=index,
            what_if=mean_interval([loss for loss, _ in windows]),
            share=sum(share for _, share in windows) / len(windows),
        )
        for index, windows in enumerate(by_expert)
    )


def _trust(scores: dict[str, list[float]], what_ifs: dict[str, dict[int, Interval]]) -> list[ScoreTrust]:
    """Return the rank correlation of each layer score with the what-if it predicts."""
    rows = []
    for score, values in scores.items():
        lost = what_ifs.get(SCORES[score].what_if, {})
        if lost and values:
            correlation = spearman([values[layer] for layer in lost], [one.loss for one in lost.values()])
            rows.append(ScoreTrust(score=score, what_if=SCORES[score].what_if, spearman=correlation, layers=len(lost)))
    return rows


def _residual(observed: Sequence[dict[str, Any]], state: int) -> Residual | None:
    """Return the residual of X_ℓ, mean and spread over windows; None where the states were not observed."""
    if not observed or not observed[0]["residuals"]:
        return None
    windows = [seen["residuals"][state] for seen in observed]
    return residual_record(
        {
            center: {
                norm: SampleResiduals(*torch.tensor([w[center][norm] for w in windows], dtype=torch.float64).unbind(1))
                for norm in norms
            }
            for center, norms in windows[0].items()
        }
    )


def _heads(
    checkpoint: Checkpoint,
    observed: Sequence[dict[str, Any]],
    weights: Sequence[Sequence[CircuitSizes]],
    layer: int,
) -> tuple[CheckpointHead, ...]:
    entries: list[dict[str, Any]] = [{"index": head} for head in range(checkpoint.heads)]
    if observed and observed[0]["heads"]:
        seen = combine([window["heads"][layer] for window in observed])
        errors = seen.static_errors()
        for head, entry in enumerate(entries):
            entry |= {name: finite(getattr(seen, name)[head]) for name in _ON_TEXT}
            entry["static"] = {name: finite(errors[i, head]) for i, name in enumerate(STATIC)}
            entry["static_best"] = STATIC[int(errors[:, head].nan_to_num(nan=torch.inf).argmin())]
    if weights:
        for entry, sizes in zip(entries, weights[layer], strict=True):
            entry |= {name: finite(size) for name, size in vars(sizes).items() if name != "score_norm"}
    return tuple(CheckpointHead(**entry) for entry in entries)
