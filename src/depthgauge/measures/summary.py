"""Summaries of measurements over the inputs, per layer and head, as records of the result."""

import math
from typing import Any

from torch import Tensor

from depthgauge.measures.heads import HeadMeasures
from depthgauge.measures.residuals import Residuals
from depthgauge.measures.weights import WeightSizes
from depthgauge.results.network_subject import (
    NetworkHead,
    NetworkLayer,
    NetworkState,
    Residual,
    ResidualNorms,
    ResidualSize,
)

_LARGEST = {"score_range", "balance", "tv_max", "contraction", "contraction_bound"}
"""Head measures reported as the maximum over inputs; the others are reported as the mean."""


def state_record(residuals: Residuals) -> NetworkState:
    """Return the residual of one state, mean and spread over inputs."""
    return NetworkState(residual=_residual(residuals))


def layer_record(index: int, after: Residuals, heads: HeadMeasures, weights: WeightSizes) -> NetworkLayer:
    """Return the record of one layer; `after` is the residual of the state it returns."""
    return NetworkLayer(index=index, residual=_residual(after), heads=_heads(heads, weights))


def _residual(state: Residuals) -> Residual:
    def size(value: Tensor, ratio: Tensor) -> ResidualSize:
        return ResidualSize(
            value=finite(value.mean()), ratio=finite(ratio.mean()), ratio_std=finite(ratio.std(correction=0))
        )

    centers: dict[str, Any] = {
        center: ResidualNorms(**{norm: size(found.value, found.ratio) for norm, found in sizes.items()})
        for center, sizes in state.items()
    }
    return Residual(**centers)


def _heads(heads: HeadMeasures, weights: WeightSizes) -> tuple[NetworkHead, ...]:
    records = []
    for h in range(len(weights.eta)):
        values = {name: finite(getattr(weights, name)[h]) for name in WeightSizes.names()}
        for name in HeadMeasures.names():
            per_sample = getattr(heads, name)[:, h]
            values[name] = finite(per_sample.amax() if name in _LARGEST else per_sample.mean())
        records.append(NetworkHead(index=h, **values))
    return tuple(records)


def finite(value: Tensor | float) -> float | None:
    """Return a JSON number, or None for infinities and NaN."""
    plain = float(value)
    return plain if math.isfinite(plain) else None
