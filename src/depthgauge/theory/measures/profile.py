"""The `Profile` of a network: all measurements on given inputs, layer by layer."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted, number
from depthgauge.base.frames import frame, html_table
from depthgauge.base.progress import Step, silent
from depthgauge.results.gauge_record import NetworkHead, NetworkLayer, NetworkState
from depthgauge.results.record import finite
from depthgauge.theory.measures.quantities import (
    HeadMeasures,
    Residuals,
    WeightSizes,
    measure_heads,
    residual_record,
    residual_sizes,
    weight_sizes,
)
from depthgauge.theory.network.network import SelfAttentionNetwork, require_network

_LARGEST = {"score_range", "balance", "tv_max", "contraction", "contraction_bound"}
"""Head measures reported as the maximum over inputs; the others are reported as the mean."""


@dataclass(frozen=True, repr=False)
class Profile:
    """The measurements of a network on a batch of inputs. `measure` returns it.

    Attributes:
        residuals: The residual of each state X_0 (the input) to X_L (the output): L + 1 mappings
            center → norm → `SampleResiduals`.
        heads: The head measures of each layer: L records of tensors of shape [samples, heads].
        weights: The weight norms of each layer: L records of tensors of shape [heads].
    """

    residuals: tuple[Residuals, ...]
    heads: tuple[HeadMeasures, ...]
    weights: tuple[WeightSizes, ...]

    def residual_ratio(self, norm: str = "max", center: str = "midrange") -> Float[Tensor, "samples states"]:
        """Return ‖Res(X_ℓ)‖/‖X_ℓ‖ for ℓ = 0, …, L. Rank collapse means that it tends to 0.

        Args:
            norm: `"max"`, `"frobenius"` or `"composite"`.
            center: The row that Res subtracts, `"midrange"` or `"mean"`.

        Returns:
            A tensor of shape [samples, L + 1].
        """
        return torch.stack([state[center][norm].ratio for state in self.residuals], dim=-1)

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with one row per layer and head.

        The columns are `layer`, `head`, the attributes of `HeadMeasures` and the attributes of `WeightSizes`.
        `score_range`, `balance`, `tv_max`, `contraction` and `contraction_bound` are the maximum over the samples;
        `tv_mean` and `entropy` are the mean.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows = [(layer.index, head.to_json()) for layer in self.layer_records() for head in layer.heads]
        return frame([{"layer": layer, "head": head.pop("index"), **head} for layer, head in rows])

    def input_record(self) -> NetworkState:
        """Return the residual of the input X_0 as a record of the result."""
        return NetworkState(residual=residual_record(self.residuals[0]))

    def layer_records(self) -> tuple[NetworkLayer, ...]:
        """Return one record per layer; its residual belongs to the output of the layer."""
        parts = zip(self.residuals[1:], self.heads, self.weights, strict=True)
        return tuple(
            NetworkLayer(index=index, residual=residual_record(after), heads=_heads(heads, weights))
            for index, (after, heads, weights) in enumerate(parts)
        )

    def __repr__(self) -> str:
        return f"Profile({self._title()})"

    def _repr_html_(self) -> str:
        ratios = self.residual_ratio().mean(dim=0)[1:].tolist()
        rows = [
            {
                "layer": index,
                "heads": heads.entropy.shape[1],
                "residual ratio after": finite(ratio),
                "largest score range": finite(heads.score_range.amax()),
                "mean entropy": finite(heads.entropy.mean()),
                "largest contraction": finite(heads.contraction.amax()),
            }
            for index, (heads, ratio) in enumerate(zip(self.heads, ratios, strict=True))
        ]
        return html_table(f"Profile: {self._title()}", rows)

    def _title(self) -> str:
        first, *_, last = self.residual_ratio().mean(dim=0).tolist()
        theta = max(float(heads.score_range.amax()) for heads in self.heads)
        return (
            f"{counted(len(self.heads), 'layer')}, {counted(len(self.residual_ratio()), 'sample')}, residual ratio "
            f"{number(first)} → {number(last)}, largest score range {number(theta)}"
        )


@torch.no_grad()
def measure(network: SelfAttentionNetwork, x: Float[Tensor, "*batch n d"], *, progress: Step = silent) -> Profile:
    """Measure the residuals, heads and weights of a network on inputs, layer by layer.

    Args:
        network: The network, with L layers of width d.
        x: The inputs X, of shape [n, d] or [..., n, d], in the dtype of the network. Leading dimensions are samples.
        progress: A callback `(done, total, label)`, called before each layer and at the end.

    Returns:
        The profile.

    Raises:
        InputError: The shape or dtype of x does not fit the network, or x is empty.

    >>> from depthgauge import random_network
    >>> network = random_network(layers=2, heads=1, dim=4, eta=0.01)
    >>> profile = measure(network, torch.eye(4, dtype=torch.float64))
    >>> profile.residual_ratio().shape
    torch.Size([1, 3])
    """
    require_network(network)
    network.check_input(x)
    if x.numel() == 0:
        raise InputError(f"the input has shape {list(x.shape)} and no entries to measure; give at least one sample")
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


def _heads(heads: HeadMeasures, weights: WeightSizes) -> tuple[NetworkHead, ...]:
    """Return the records of the heads of one layer, summarized over the inputs."""
    records = []
    for h in range(len(weights.eta)):
        values = {name: finite(sizes[h]) for name, sizes in vars(weights).items()}
        for name, measure in vars(heads).items():
            values[name] = finite(measure[:, h].amax() if name in _LARGEST else measure[:, h].mean())
        records.append(NetworkHead(index=h, **values))
    return tuple(records)
