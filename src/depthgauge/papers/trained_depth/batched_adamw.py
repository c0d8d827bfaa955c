"""AdamW for a batch of models, each with its own learning rates."""

import torch

from depthgauge.papers.trained_depth.bounded_models import Weights


class BatchedAdamW:
    """AdamW (Loshchilov and Hutter, 2019) with one learning rate for each model and weight; in place.

    All operations are entrywise, so models of a batch do not influence each other. `linalg.adam.Adam` has one rate and
    no state that can be saved, and torch's AdamW cannot take a tensor of rates per parameter.
    """

    def __init__(self, weights: Weights, betas: tuple[float, float] = (0.9, 0.98), epsilon: float = 1e-8) -> None:
        self.betas, self.epsilon, self.steps = betas, epsilon, 0
        self.first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def step(self, weights: Weights, gradients: Weights, rates: Weights, decay: float) -> None:
        """Move the weights: w ← w − r·(m̂/(√v̂ + ε) + λw)."""
        self.steps += 1
        one, two = self.betas
        for name, gradient in gradients.items():
            first, second, weight = self.first[name], self.second[name], weights[name]
            first.mul_(one).add_(gradient, alpha=1 - one)
            second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
            size = (second / (1 - two**self.steps)).sqrt_().add_(self.epsilon)
            move = (first / (1 - one**self.steps)).div_(size)
            if decay:
                move.add_(weight, alpha=decay)
            weight.sub_(move.mul_(rates[name]))
