"""Measure a `SelfAttentionNetwork` on a probe batch of input states."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.checkpoints.circuits import layer_sizes
from depthgauge.checkpoints.head_statistics import RowMeasures, row_measures
from depthgauge.checkpoints.interface import AttentionCall
from depthgauge.checkpoints.removal import least_missed, measured_depth
from depthgauge.checkpoints.scores import block_influence
from depthgauge.errors import InputError
from depthgauge.network.layer import Layer, softmax_attention
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.network.trace import LayerTrace
from depthgauge.results.monitor_record import MonitoredModel
from depthgauge.training.monitor.measurement import HEADS, Measurement, ranks, state_ratios, update_share
from depthgauge.training.monitor.undisturbed import undisturbed


@dataclass
class NetworkProbe:
    """A network and the inputs X_0 `[batch, n, d]` that it is measured on; `notes` lists what cannot be measured."""

    model: SelfAttentionNetwork
    inputs: Tensor
    notes: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    def describe(self) -> MonitoredModel:
        """Return the description of the network in the log."""
        return MonitoredModel(
            name=self.model.name,
            architecture="SelfAttentionNetwork",
            objective="states",
            layers=len(self.model),
            heads=tuple(layer.heads for layer in self.model),
            parameters=sum(p.numel() for p in self.model.parameters()),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.device),
            sequences=self.inputs.shape[0],
            tokens=self.inputs.shape[1],
            ranks=ranks(),
        )

    def measure(self, weights: bool, skip: bool, depth: float | None) -> Measurement:
        """Measure the network on the inputs; the arguments are those of `ModelProbe.measure`."""
        with undisturbed(self.model):
            x = self.inputs = self.inputs.to(self.device)
            traces = list(self.model.trace(x))
            layers: dict[str, list[Any]] = {}
            heads = []
            for trace in traces:
                for name, value in self._layer(trace, weights).items():
                    layers.setdefault(name, []).append(value)
                heads.append(row_measures(_call(trace))[1])
                layers.setdefault("uniform_entropy", []).append(heads[-1].uniform_entropy)
            states = [x, *(trace.after for trace in traces)]
            lost = self._skip(states) if skip else ()
            left = self._depth(states, lost, depth) if skip and depth is not None else None
        by_layer = {name: torch.stack([torch.as_tensor(v).double().cpu() for v in vs]) for name, vs in layers.items()}
        counts = tuple(layer.heads for layer in self.model)
        by_head = {name: _padded(heads, name, max(counts)) for name in HEADS}
        return Measurement(by_layer, by_head, counts, torch.tensor(float("nan")), lost, left)

    def _layer(self, trace: LayerTrace, weights: bool) -> dict[str, Any]:
        """Return the measures of one layer."""
        x, y, layer = trace.before, trace.after, self.model[trace.index]
        ratio, direction = state_ratios(y, None)
        found: dict[str, Any] = {
            "residual_ratio": ratio,
            "direction_ratio": direction,
            "update": update_share(x, y - x),
            "block_influence": block_influence(x, y),
            **self._sublayers(layer, trace),
        }
        if weights:
            eye = torch.eye(self.model.dim, dtype=y.dtype, device=y.device).expand_as(layer.value)
            sizes = layer_sizes(layer.query, layer.key, layer.value, eye)
            found |= {"eta": sizes.eta, "qk_norm": sizes.qk_norm, "ov_norm": sizes.ov_norm}
        return found

    def _sublayers(self, layer: Layer, trace: LayerTrace) -> dict[str, Tensor]:
        """Return the size of what attention and the MLP add, relative to what they read; NaN without an MLP."""
        network, x = self.model, trace.before
        added = layer.attend(trace.attention_input, softmax_attention, is_causal=network.causal, scale=network.scale)
        found = {"attention_update": update_share(x, added), "mlp_update": torch.tensor(float("nan"))}
        if layer.mlp is not None:
            y = x + added if network.skip else added
            y = layer.normalize(y, 0) if network.norm == "post" else y
            inner = layer.mlp(layer.normalize(y, 1) if network.norm == "pre" else y, network.activation)
            found["mlp_update"] = update_share(y, inner)
        return found

    def _skip(self, states: list[Tensor]) -> tuple[float, ...]:
        """Return the relative change of the output when each layer returns its input."""
        return tuple(self._change(states[-1], frozenset({layer}), states) for layer in range(len(self.model)))

    def _change(self, intact: Tensor, removed: frozenset[int], states: list[Tensor]) -> float:
        first = min(removed)
        x = states[first]
        for layer in range(first, len(self.model)):
            x = x if layer in removed else self.model.step(layer, x)
        value = (x - intact).double().norm() / intact.double().norm()
        if (count := ranks()) > 1:
            torch.distributed.all_reduce(value)
            value = value / count
        return float(value)

    def _depth(self, states: list[Tensor], skip: tuple[float, ...], increase: float) -> int:
        """Return how many layers are left when the cheapest one is removed until the change exceeds `increase`."""
        L, tried = len(self.model), [least_missed({layer: [cost] for layer, cost in enumerate(skip)})]
        while tried[-1].losses[0] <= increase and len(tried) < L - 1:
            gone = frozenset(step.layer for step in tried)
            costs = {k: [self._change(states[-1], gone | {k}, states)] for k in range(L) if k not in gone}
            tried.append(least_missed(costs))
        return measured_depth(tried, L, increase).layers


def make_inputs(network: SelfAttentionNetwork, probe: object, sequences: int, tokens: int) -> Tensor:
    """Cut input states to a few short sequences, `[batch, n, d]`.

    Raises:
        InputError: The probe is no tensor, or does not fit the network.
    """
    if not isinstance(probe, Tensor):
        raise InputError(
            f"probe must be a tensor of input states [..., tokens, {network.dim}] for a SelfAttentionNetwork, got "
            f"{type(probe).__name__}"
        )
    network.check_input(probe)
    return probe.detach().reshape(-1, *probe.shape[-2:])[:sequences, :tokens].clone()


def _call(trace: LayerTrace) -> AttentionCall:
    """Return the attention of a layer as a call, with the tokens as the values of all heads."""
    n, heads = trace.key.shape[-2], trace.key.shape[-3]
    mask = None
    if trace.causal:
        visible = torch.ones(n, n, dtype=torch.bool, device=trace.key.device).tril()
        hidden = torch.finfo(trace.key.dtype).min
        mask = torch.zeros(n, n, dtype=trace.key.dtype, device=trace.key.device).masked_fill(~visible, hidden)[
            None, None
        ]
    value = trace.attention_input.unsqueeze(1).expand(-1, heads, -1, -1)
    return AttentionCall(trace.index, trace.query, trace.key, value, mask, trace.scale)


def _padded(heads: list[RowMeasures], name: str, most: int) -> Float[Tensor, "layers heads"]:
    """Return one measure of all layers, with NaN where a layer has fewer heads."""
    rows = [getattr(found, name).double().cpu() for found in heads]
    return torch.stack([torch.nn.functional.pad(row, (0, most - len(row)), value=float("nan")) for row in rows])
