"""What one probe measures, as tensors; combined over the processes of a distributed run; as a record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from depthgauge.results.monitor_record import Probe, ProbedHeads, ProbedLayer
from depthgauge.results.record import finite

LARGEST = ("score_range",)
"""Measures that are combined over processes by their maximum; all others by their mean."""


@dataclass(frozen=True)
class Measurement:
    """The measures of one probe.

    - `layers`: name → one value per layer
    - `heads`: name → one value per layer and head, NaN where a layer has fewer heads; empty without observation
    - `counts`: number of heads of every layer
    - `loss`: loss on the probe, NaN if the model has none
    - `training_loss`: loss of the training step, NaN if it is unknown
    - `skip`: cost of skipping each block, empty if it was not measured
    - `depth`: measured effective depth, or None
    """

    layers: Mapping[str, Float[Tensor, " layers"]]
    heads: Mapping[str, Float[Tensor, "layers heads"]]
    counts: tuple[int, ...]
    loss: Float[Tensor, ""]
    training_loss: Float[Tensor, ""] | None = None
    skip: tuple[float, ...] = ()
    depth: int | None = None

    def values(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        losses = {"loss": self.loss} | ({} if self.training_loss is None else {"training_loss": self.training_loss})
        return {**self.layers, **self.heads, **losses}

    def with_values(self, values: Mapping[str, Tensor]) -> "Measurement":
        """Return the measurement with other tensors under the same names."""
        return replace(
            self,
            layers={name: values[name] for name in self.layers},
            heads={name: values[name] for name in self.heads},
            loss=values["loss"],
            training_loss=values.get("training_loss"),
        )

    def record(self, step: int, segment: int, seconds: float) -> Probe:
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
            loss=None if self.training_loss is None else finite(*self.training_loss.reshape(1).tolist()),
            probe_loss=finite(*self.loss.reshape(1).tolist()),
            depth=self.depth,
            seconds=seconds,
            layers=tuple(made),
        )


def moved(found: Measurement, training_loss: float | Tensor | None, device: torch.device) -> Measurement:
    """Return a measurement on the CPU, with the training loss of this process, NaN if it is unknown.

    All values are collected on `device` and moved in one transfer, because each transfer waits for the GPU.
    """
    if isinstance(training_loss, Tensor):
        loss = training_loss.detach().float().mean()  # without a wait for the GPU
    else:
        plain = float("nan") if training_loss is None else float(training_loss)
        loss = torch.full((), plain, dtype=torch.float64, device=device)
    parts = replace(found, training_loss=loss).values()
    flat = torch.cat([value.detach().to(device, torch.float64).reshape(-1) for value in parts.values()]).cpu()
    pieces = torch.split(flat, [value.numel() for value in parts.values()])
    return found.with_values({k: piece.reshape(v.shape) for (k, v), piece in zip(parts.items(), pieces, strict=True)})


def combined(parts: Sequence[Measurement]) -> Measurement:
    """Combine the measurements of all processes: score ranges by their maximum, all others by their mean."""
    if len(parts) == 1:
        return parts[0]
    stacks = {name: torch.stack([part.values()[name] for part in parts]) for name in parts[0].values()}
    return parts[0].with_values(
        {name: stack.amax(dim=0) if name in LARGEST else stack.mean(dim=0) for name, stack in stacks.items()}
    )


_ENTRIES = 2**21
"""Largest number of entries of the states that are measured together (8 MB in float32)."""


def state_measures(states: Sequence[Float[Tensor, "batch n d"]], real: Tensor | None) -> dict[str, Tensor]:
    """Return the measures of every layer that the states X_0 … X_L alone determine, each `[layers]`.

    - `residual_ratio`: ‖Res(X)‖F/‖X‖F about the mean token, mean over the sequences
    - `direction_ratio`: the same after every token is scaled to length 1, so that one token with huge entries, such as
      an attention sink, does not hide that the others are equal
    - `update`: mean over tokens of ‖x_{ℓ+1} − x_ℓ‖/‖x_ℓ‖
    - `block_influence`: 1 − mean over tokens of cos(x_ℓ, x_{ℓ+1})

    `real` says which tokens count, `[batch, n]`; None counts all.
    """
    device, together = states[0].device, max(1, _ENTRIES // states[0].numel())
    found = [
        _some_layers(torch.stack([state.to(device) for state in states[first : first + together + 1]]), real)
        for first in range(0, len(states) - 1, together)
    ]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def _some_layers(states: Float[Tensor, "states batch n d"], real: Tensor | None) -> dict[str, Tensor]:
    """Return the measures of consecutive layers."""
    X = states.to(torch.promote_types(states.dtype, torch.float32))
    if real is not None:
        X = X.masked_fill(~real.to(X.device)[..., None], 0.0)
    sizes = torch.linalg.vector_norm(X, dim=-1).clamp(min=torch.finfo(X.dtype).tiny)
    cosines = F.cosine_similarity(X[:-1].double(), X[1:].double(), dim=-1)
    return {
        "residual_ratio": _residual_ratio(X[1:], real),
        "direction_ratio": _residual_ratio(X[1:] / sizes[1:, ..., None], real),
        "update": token_mean(torch.linalg.vector_norm(X[1:] - X[:-1], dim=-1) / sizes[:-1], real),
        "block_influence": 1 - token_mean(cosines, real),
    }


def _residual_ratio(X: Float[Tensor, "layers batch n d"], real: Tensor | None) -> Float[Tensor, " layers"]:
    """Return ‖Res(X)‖F/‖X‖F about the mean token, mean over the sequences; tokens that do not count must be 0."""
    if real is None:
        residual = X - X.mean(dim=-2, keepdim=True)
    else:
        counted = real.to(X.device)[..., None]
        residual = (X - X.sum(dim=-2, keepdim=True) / counted.sum(dim=-2, keepdim=True)) * counted
    ratio: Tensor = torch.linalg.vector_norm(residual, dim=(-2, -1)) / torch.linalg.vector_norm(X, dim=(-2, -1))
    return ratio.mean(dim=-1)


def token_mean(values: Float[Tensor, "layers ..."], real: Tensor | None) -> Float[Tensor, " layers"]:
    """Return the mean over the tokens that count, of all sequences."""
    if real is None:
        return values.flatten(1).mean(dim=1)
    counted = real.to(values.device)
    return values.masked_fill(~counted, 0.0).sum(dim=(1, 2)) / counted.sum()


def token_sizes(state: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Return ‖x‖ of every token, in at least single precision."""
    wide = torch.promote_types(state.dtype, torch.float32)
    sizes: Tensor = torch.linalg.vector_norm(state, dim=-1, dtype=wide)
    return sizes


def update_shares(sizes: Sequence[tuple[Tensor, Tensor] | None], real: Tensor | None) -> Float[Tensor, " layers"]:
    """Return the mean over tokens of ‖f(y)‖/‖y‖ per layer, the size of an update relative to what it is added to.

    `sizes` has ‖y‖ of the tokens that a sublayer reads and ‖f(y)‖ of what it adds; None for a layer without the
    sublayer, which gives NaN.
    """
    known = [pair for pair in sizes if pair is not None]
    if not known:
        return torch.full((len(sizes),), float("nan"))
    device = known[0][0].device
    missing = torch.full_like(known[0][0], float("nan"))
    read = torch.stack([missing if pair is None else pair[0].to(device) for pair in sizes])
    added = torch.stack([missing if pair is None else pair[1].to(device) for pair in sizes])
    return token_mean(added / read.clamp(min=torch.finfo(read.dtype).tiny), real)


def layers_left(skip: Sequence[float], increase: float, costs: Callable[[frozenset[int]], Mapping[int, float]]) -> int:
    """Return how many layers are left when the cheapest one is removed again and again, at a cost within `increase`.

    `skip` has the cost of removing each layer alone, and `costs` maps the removed layers to the cost of removing each
    other layer as well.
    """
    gone = frozenset[int]()
    while len(gone) < len(skip) - 1:
        found = costs(gone) if gone else dict(enumerate(skip))
        layer = min(found, key=found.__getitem__)
        if not found[layer] <= increase:  # also if the cost is NaN
            break
        gone |= {layer}
    return len(skip) - len(gone)
