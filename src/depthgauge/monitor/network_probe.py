"""Measure a `SelfAttentionNetwork` on a probe batch of input states."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.circuits import layer_sizes
from depthgauge.checkpoints.interface import AttentionCall, attention_call
from depthgauge.checkpoints.model_output import relative_distance
from depthgauge.monitor.measurement import Measurement, layers_left, state_measures, token_sizes, update_shares
from depthgauge.monitor.processes import Processes, ranks
from depthgauge.monitor.row_watch import RowWatch
from depthgauge.monitor.undisturbed import undisturbed
from depthgauge.results.monitor_record import MonitoredModel
from depthgauge.theory.network.layer import softmax_attention
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.network.trace import LayerTrace


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

    def measure(self, weights: bool, skip: bool, depth: float | None, processes: Processes) -> Measurement:
        """Measure the network on the inputs; the arguments are those of `ModelProbe.measure`."""
        with undisturbed(self.model):
            x = self.inputs = self.inputs.to(self.device)
            traces, heads = list(self.model.trace(x)), RowWatch()
            states = [x, *(trace.after for trace in traces)]
            layers = state_measures(states, None) | self._sublayers(traces)
            for trace in traces:
                heads(_call(trace))
            by_head, layers["uniform_entropy"] = heads.measures()
            if weights:
                eye = torch.eye(self.model.dim, dtype=x.dtype, device=x.device)
                maps = [(layer.query, layer.key, layer.value, eye.expand_as(layer.value)) for layer in self.model]
                sizes = [layer_sizes([(q[None], k[None], v[None], o[None])]) for q, k, v, o in maps]
                layers |= {name: torch.cat([vars(size)[name] for size in sizes]) for name in vars(sizes[0])}
            lost: tuple[float, ...] = ()
            left = None
            if skip:

                def costs(gone: frozenset[int]) -> dict[int, float]:
                    others = [layer for layer in range(len(self.model)) if layer not in gone]
                    return {layer: processes.mean(self._change(gone | {layer}, states)) for layer in others}

                lost = tuple(costs(frozenset()).values())
                left = None if depth is None else layers_left(lost, depth, costs)
        counts = tuple(layer.heads for layer in self.model)
        nothing = torch.full((), float("nan"), device=self.device)
        return Measurement(layers, by_head, counts, nothing, skip=lost, depth=left)

    def _sublayers(self, traces: list[LayerTrace]) -> dict[str, Tensor]:
        """Return the size of what attention and the MLP add, relative to what they read; NaN without an MLP."""
        network, attention, mlp = self.model, list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor] | None]()
        for trace in traces:
            x, layer = trace.before, network[trace.index]
            added = layer.attend(
                trace.attention_input, softmax_attention, is_causal=network.causal, scale=network.scale
            )
            attention.append((token_sizes(x), token_sizes(added)))
            if layer.mlp is None:
                mlp.append(None)
                continue
            y = x + added if network.skip else added
            y = network.normalize(trace.index, 0, y) if network.norm_place == "after" else y
            read = network.normalize(trace.index, 1, y) if network.norm_place == "before" else y
            inner = layer.mlp(read, network.activation)
            mlp.append((token_sizes(y), token_sizes(inner)))
        return {"attention_update": update_shares(attention, None), "mlp_update": update_shares(mlp, None)}

    def _change(self, removed: frozenset[int], states: list[Tensor]) -> float:
        """Return the relative change of the output without some layers."""
        first = min(removed)
        x, intact = states[first], states[-1]
        for layer in range(first, len(self.model)):
            x = x if layer in removed else self.model.step(layer, x)
        return float(relative_distance(x[None], intact[None]))


def make_inputs(network: SelfAttentionNetwork, probe: object, sequences: int, tokens: int) -> Tensor:
    """Cut input states to a few short sequences, `[batch, n, d]`.

    Raises:
        InputError: The probe is no tensor, is empty or not finite, or does not fit the network.
    """
    if not isinstance(probe, Tensor):
        raise InputError(
            f"probe must be a tensor of input states [..., tokens, {network.dim}] for a SelfAttentionNetwork, got "
            f"{type(probe).__name__}"
        )
    network.check_input(probe)
    if 0 in probe.shape or probe.shape[-2] < 2 or not bool(probe.isfinite().all()):
        raise InputError(
            f"probe must have at least one sequence of at least 2 tokens with finite entries, got shape "
            f"{list(probe.shape)}{'' if bool(probe.isfinite().all()) else ' with entries that are not finite'}; take "
            "inputs that the network is trained on"
        )
    return probe.detach().reshape(-1, *probe.shape[-2:])[:sequences, :tokens].clone()


def _call(trace: LayerTrace) -> AttentionCall:
    """Return the attention of a layer as a call, with the tokens as the values of all heads."""
    n, heads = trace.key.shape[-2], trace.key.shape[-3]
    mask = torch.ones(1, 1, n, n, dtype=torch.bool, device=trace.key.device).tril() if trace.causal else None
    value = trace.attention_input.unsqueeze(1).expand(-1, heads, -1, -1)
    return attention_call(trace.query, trace.key, value, mask, trace.scale, None)
