"""What a shrunk model is judged by: one number per window, smaller is better."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.checkpoints.model_output import model_output, relative_distance, token_losses


class Objective:
    """The objective on fixed windows.

    - a causal language model: the mean over tokens of −log p(next token), in nats
    - other models: ‖output − dense output‖F / ‖dense output‖F of the final states
    """

    def __init__(self, runner: BlockRunner, ids: Int[Tensor, "windows n"], dense: Float[Tensor, "windows n d"]) -> None:
        """Prepare the objective.

        Args:
            runner: the model's blocks; its output head is used.
            ids: token ids.
            dense: X_L, the states of the dense model after its last block, on the same windows.
        """
        self.runner, self.ids, self.dense = runner, ids, dense
        self.is_loss = runner.checkpoint.objective == "loss"

    @torch.no_grad()
    def __call__(self, states: Float[Tensor, "windows n d"], windows: slice = slice(None)) -> Float[Tensor, " windows"]:
        """Return the objective of every window.

        Args:
            states: the states after the last block.
            windows: the windows that `states` holds.
        """
        ids, dense = self.ids[windows], self.dense[windows]
        return torch.cat(
            [
                self._measure(
                    self.runner.output(part), ids[start : start + len(part)], dense[start : start + len(part)]
                )
                for start, part in self.runner.batches(states)
            ]
        )

    @torch.no_grad()
    def of_model(self, model: Any) -> float:
        """Return the mean objective of a complete transformers model on the same windows."""
        batch = self.runner.batch
        batches = zip(torch.split(self.ids, batch), torch.split(self.dense, batch), strict=True)
        found = [
            self._measure(model_output(model, ids.to(self.runner.device), self.is_loss), ids, dense)
            for ids, dense in batches
        ]
        return float(torch.cat(found).mean())

    def _measure(self, output: Tensor, ids: Tensor, dense: Tensor) -> Float[Tensor, " batch"]:
        if self.is_loss:
            return token_losses(output, ids).double().mean(dim=1).cpu()
        reference = self.runner.output(dense.to(self.runner.device, output.dtype))
        return relative_distance(output, reference).cpu()
