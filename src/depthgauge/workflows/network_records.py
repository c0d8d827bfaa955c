"""Records of a network's profile: means and maxima over the inputs, per layer and head."""

import math
from typing import Any

from torch import Tensor

from depthgauge.measures.heads import HeadMeasures
from depthgauge.measures.profile import Profile
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


def state_record(profile: Profile) -> NetworkState:
    """Return the residual of the input X_0."""
    return NetworkState(residual=_residual(profile.residuals[0]))


def layer_records(profile: Profile) -> tuple[NetworkLayer, ...]:
    """Return one record per layer; its residual is that of the state the layer returns."""
    parts = zip(profile.residuals[1:], profile.heads, profile.weights, strict=True)
    return tuple(
        NetworkLayer(index=index, residual=_residual(state), heads=_heads(heads, weights))
        for index, (state, heads, weights) in enumerate(parts)
    )


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
