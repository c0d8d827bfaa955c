"""A network measured on inputs: the Profile."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.errors import InputError
from depthgauge.measures.heads import HeadMeasures, measure_heads
from depthgauge.measures.residuals import Residuals, residual_sizes
from depthgauge.measures.weights import WeightSizes, weight_sizes
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.progress import Step, silent

_LARGEST = {"score_range", "balance", "tv_max", "contraction", "contraction_bound"}
"""Head measures of which the result shows the largest over samples; of the others it shows the mean."""


@dataclass(frozen=True)
class Profile:
    """What `measure` found, sample by sample.

    `residuals[ℓ]` belongs to the state X_ℓ, from the input (0) to the output (L); `heads[ℓ]` and `weights[ℓ]` to
    layer ℓ.
    """

    residuals: tuple[Residuals, ...]
    heads: tuple[HeadMeasures, ...]
    weights: tuple[WeightSizes, ...]

    def residual_ratio(self, norm: str = "max", center: str = "midrange") -> Float[Tensor, "samples states"]:
        """‖Res(X_ℓ)‖/‖X_ℓ‖ for ℓ = 0 … L, the curve of rank collapse."""
        return torch.stack([state[center][norm].ratio for state in self.residuals], dim=-1)

    def input_to_json(self) -> dict[str, Any]:
        """The residual of the input, as in the result JSON."""
        return {"residual": _residual_json(self.residuals[0])}

    def layers_to_json(self) -> list[dict[str, Any]]:
        """One entry a layer, as in the result JSON: `residual` is that of the state the layer hands on."""
        return [
            {"index": index, "residual": _residual_json(state), "heads": _heads_json(heads, weights)}
            for index, (state, heads, weights) in enumerate(
                zip(self.residuals[1:], self.heads, self.weights, strict=True)
            )
        ]


@torch.no_grad()
def measure(network: SelfAttentionNetwork, x: Float[Tensor, "*batch n d"], *, progress: Step = silent) -> Profile:
    """Measure a network on inputs x, `[n, d]` or `[..., n, d]`: residuals, heads and weights, layer by layer.

    >>> from depthgauge import random_network
    >>> network = random_network(layers=2, heads=1, dim=4, eta=0.01)
    >>> profile = measure(network, torch.eye(4, dtype=torch.float64))
    >>> profile.residual_ratio().shape
    torch.Size([1, 3])
    """
    network.check_input(x)
    if x.numel() == 0:
        raise InputError(f"there is nothing to measure in an input of shape {list(x.shape)}; give at least one sample")
    samples = x.reshape(-1, *x.shape[-2:])
    residuals, heads, weights = [residual_sizes(samples)], [], []
    for trace in network.trace(samples):
        progress(trace.index, len(network), f"layer {trace.index}")
        layer = network[trace.index]
        heads.append(measure_heads(trace, layer))
        weights.append(weight_sizes(layer))
        residuals.append(residual_sizes(trace.after))
    progress(len(network), len(network), "")
    return Profile(tuple(residuals), tuple(heads), tuple(weights))


def _residual_json(state: Residuals) -> dict[str, Any]:
    """Centre → norm → mean and spread over samples."""
    return {
        center: {
            norm: {
                "value": number(size.value.mean()),
                "ratio": number(size.ratio.mean()),
                "ratio_std": number(size.ratio.std(correction=0)),
            }
            for norm, size in sizes.items()
        }
        for center, sizes in state.items()
    }


def _heads_json(heads: HeadMeasures, weights: WeightSizes) -> list[dict[str, Any]]:
    entries = []
    for h in range(len(weights.eta)):
        entry: dict[str, Any] = {"index": h}
        for name in HeadMeasures.names():
            per_sample = getattr(heads, name)[:, h]
            entry[name] = number(per_sample.amax() if name in _LARGEST else per_sample.mean())
        entry |= {name: number(getattr(weights, name)[h]) for name in WeightSizes.names()}
        entries.append(entry)
    return entries


def number(value: Tensor | float) -> float | None:
    """A JSON number, or None for what is not a finite one."""
    plain = float(value)
    return plain if math.isfinite(plain) else None
