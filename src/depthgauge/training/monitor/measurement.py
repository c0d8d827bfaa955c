"""What one probe measures, as tensors; reduced over the processes of a distributed run; as a record."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from depthgauge.measures.residuals import residual_size
from depthgauge.measures.summary import finite
from depthgauge.results.monitor_record import Probe, ProbedHeads, ProbedLayer

HEADS = ("score_range", "entropy", "tv_mean", "first_mass")
LARGEST = ("score_range",)
"""Measures that are combined over processes by their maximum; all others by their mean."""


@dataclass(frozen=True)
class Measurement:
    """The measures of one probe.

    - `layers`: name → one value per layer
    - `heads`: name → one value per layer and head, NaN where a layer has fewer heads; empty without observation
    - `counts`: number of heads of every layer
    - `loss`: loss on the probe, NaN if the model has none
    - `skip`: cost of skipping each block, empty if it was not measured
    - `depth`: measured effective depth, or None
    """

    layers: Mapping[str, Float[Tensor, " layers"]]
    heads: Mapping[str, Float[Tensor, "layers heads"]]
    counts: tuple[int, ...]
    loss: Float[Tensor, ""]
    skip: tuple[float, ...] = ()
    depth: int | None = None

    def record(self, step: int, segment: int, loss: float | None, seconds: float) -> Probe:
        """Return the record of the probe; values that are not finite become None."""
        layers = {name: values.tolist() for name, values in self.layers.items()}
        heads = {name: values.tolist() for name, values in self.heads.items()}
        made = []
        for index, count in enumerate(self.counts):
            own = {name: tuple(finite(value) for value in rows[index][:count]) for name, rows in heads.items()}
            made.append(
                ProbedLayer(
                    index=index,
                    **{name: finite(values[index]) for name, values in layers.items()},
                    skip_loss=finite(self.skip[index]) if self.skip else None,
                    heads=ProbedHeads(**own) if own else None,
                )
            )
        return Probe(
            step=step,
            segment=segment,
            loss=loss,
            probe_loss=finite(self.loss),
            depth=self.depth,
            seconds=seconds,
            layers=tuple(made),
        )


def ranks() -> int:
    """Return the number of processes that train the model together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the index of this process; 0 without a process group."""
    return dist.get_rank() if ranks() > 1 else 0


def reduced(found: Measurement, device: torch.device) -> Measurement:
    """Combine the measurements of all processes and move them to the CPU; every process returns the same.

    Args:
        found: the measurement of this process.
        device: where the processes exchange tensors.
    """
    parts = {**found.layers, **found.heads, "loss": found.loss}
    flat = {name: value.detach().to(device, torch.float64).reshape(-1) for name, value in parts.items()}
    means = torch.cat([value for name, value in flat.items() if name not in LARGEST])
    largest = torch.cat([torch.zeros(1, dtype=torch.float64, device=device), *(flat[n] for n in LARGEST if n in flat)])
    if (count := ranks()) > 1:
        dist.all_reduce(means)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        means = means / count
    values = {"means": means.cpu(), "largest": largest[1:].cpu()}
    whole, places = {}, {"means": 0, "largest": 0}
    for name, value in parts.items():
        kind = "largest" if name in LARGEST else "means"
        start = places[kind]
        places[kind] = start + value.numel()
        whole[name] = values[kind][start : places[kind]].reshape(value.shape)
    return replace(
        found,
        layers={name: whole[name] for name in found.layers},
        heads={name: whole[name] for name in found.heads},
        loss=whole["loss"],
    )


def mean_over_ranks(value: float | None, device: torch.device) -> float | None:
    """Return the mean of the training loss over all processes, or None if it is unknown or not finite in one."""
    if ranks() == 1:
        return value
    whole = torch.tensor([float("nan") if value is None else value], dtype=torch.float64, device=device)
    dist.all_reduce(whole)
    return finite(whole / ranks())


def state_ratios(state: Float[Tensor, "batch n d"], real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the residual ratio and the direction ratio of a state, mean over the sequences.

    Both are ‖Res(X)‖F/‖X‖F about the mean token. For the direction ratio every token is scaled to length 1 first, so
    that one token with huge entries, such as an attention sink, does not hide that the others are equal.

    Args:
        state: X, one state per sequence.
        real: which tokens count, `[batch, n]`; None counts all.
    """
    state = state.float() if state.dtype.itemsize < 4 else state
    tokens = [state] if real is None else [state[k : k + 1, real[k]] for k in range(len(state))]
    units = [X / X.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(X.dtype).tiny) for X in tokens]
    ratios = [torch.cat([residual_size(X, "frobenius", "mean").ratio for X in kind]).mean() for kind in (tokens, units)]
    return ratios[0], ratios[1]


def update_share(before: Float[Tensor, "*batch d"], added: Float[Tensor, "*batch d"]) -> Tensor:
    """Return the mean over tokens of ‖f(y)‖/‖y‖, the size of an update relative to what it is added to.

    Args:
        before: y, the tokens that are read.
        added: f(y), what is added to them.
    """
    wide = torch.promote_types(before.dtype, torch.float32)
    sizes = before.to(added.device, wide).norm(dim=-1).clamp(min=torch.finfo(wide).tiny)
    share: Tensor = (added.to(wide).norm(dim=-1) / sizes).mean()
    return share


T = TypeVar("T")


def shared(value: T, device: torch.device) -> T:
    """Return the value of process 0 in every process."""
    if ranks() == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0, device=device)
    return holder[0]
