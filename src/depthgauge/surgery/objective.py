"""What a shrunk model is judged by: one number per window, smaller is better."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.load import measured_part
from depthgauge.errors import unknown_name
from depthgauge.surgery.block_runner import BlockRunner

_ENTRIES = 2**24
"""Largest number of logits converted to float32 at once (64 MB)."""


class Objective:
    """The objective on fixed windows.

    - `loss`: mean over tokens of −log p(next token), in nats
    - `kl`: mean over tokens of KL(dense ‖ shrunk), in nats
    - `states`: ‖output − dense output‖F / ‖dense output‖F, for models without a head
    """

    def __init__(
        self,
        runner: BlockRunner,
        ids: Int[Tensor, "windows n"],
        dense: Float[Tensor, "windows n d"],
        kind: str,
    ) -> None:
        """Prepare the objective.

        Args:
            runner: the model's blocks; its output head is used.
            ids: token ids.
            dense: X_L, the states of the dense model after its last block, on the same windows.
            kind: `loss`, `kl` or `states`.
        """
        if kind not in _MEASURES:
            raise unknown_name("objective", kind, _MEASURES)
        self.runner, self.ids, self.dense, self.kind = runner, ids, dense, kind

    @torch.no_grad()
    def __call__(self, states: Float[Tensor, "windows n d"], windows: slice = slice(None)) -> Float[Tensor, " windows"]:
        """Return the objective of every window.

        Args:
            states: the states after the last block.
            windows: the windows that `states` holds.
        """
        found = []
        ids, dense = self.ids[windows], self.dense[windows]
        for start, part in self.runner.batches(states):
            stop = start + len(part)
            output = self.runner.output(part)
            target = ids[start:stop].to(output.device)
            reference = self.runner.output(dense[start:stop].to(part)) if self.kind != "loss" else output
            found.append(_MEASURES[self.kind](output, reference, target).cpu())
        return torch.cat(found)

    @torch.no_grad()
    def of_model(self, model: Any) -> float:
        """Return the mean objective of a complete model on the same windows.

        Args:
            model: a transformers model; it returns logits unless the objective is `states`.
        """
        found = []
        for start in range(0, len(self.ids), self.runner.batch):
            ids = self.ids[start : start + self.runner.batch].to(self.runner.device)
            dense = self.dense[start : start + len(ids)].to(self.runner.device, self.runner.checkpoint.model.dtype)
            reference = self.runner.output(dense) if self.kind != "loss" else None
            made = measured_part(model, self.kind != "states")(input_ids=ids)
            output = made.last_hidden_state if self.kind == "states" else made.logits
            measure = _MEASURES[self.kind]
            found.append(measure(output, output if reference is None else reference, ids.to(output.device)).cpu())
        return float(torch.cat(found).mean())


def token_losses(
    logits: Float[Tensor, "batch n vocabulary"], ids: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch n-1"]:
    """Return −log p(next token) for every token but the first, in nats."""
    return _by_rows(logits[:, :-1], lambda rows, index: _cross_entropy(rows, ids[:, 1:].flatten()[index]))


def _cross_entropy(rows: Float[Tensor, "rows vocabulary"], targets: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    return F.cross_entropy(rows, targets, reduction="none")


def _by_rows(
    logits: Float[Tensor, "batch n vocabulary"], measure: Callable[[Tensor, slice], Tensor]
) -> Float[Tensor, "batch n"]:
    """Apply `measure` to the logits as float32, a few rows at a time, so that they are never copied as a whole."""
    flat = logits.reshape(-1, logits.shape[-1])
    count = max(1, _ENTRIES // logits.shape[-1])
    parts = [
        measure(flat[start : start + count].float(), slice(start, start + count))
        for start in range(0, len(flat), count)
    ]
    return torch.cat(parts).reshape(logits.shape[:2])


def _loss(output: Tensor, reference: Tensor, ids: Tensor) -> Tensor:
    return token_losses(output, ids).double().mean(dim=1)


def _divergence(output: Tensor, reference: Tensor, ids: Tensor) -> Tensor:
    other = reference[:, :-1].reshape(-1, reference.shape[-1])

    def measure(rows: Tensor, index: slice) -> Tensor:
        log_p = other[index].float().log_softmax(-1)
        return (log_p.exp() * (log_p - rows.log_softmax(-1))).sum(-1)

    return _by_rows(output[:, :-1], measure).double().mean(dim=1)


def _distance(output: Tensor, reference: Tensor, ids: Tensor) -> Tensor:
    apart = (output.double() - reference.double()).flatten(1).norm(dim=1)
    ratio: Tensor = apart / reference.double().flatten(1).norm(dim=1)
    return ratio


_MEASURES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "loss": _loss,
    "kl": _divergence,
    "states": _distance,
}
