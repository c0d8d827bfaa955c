"""Adam: its steps are those of the closed formula, and every entry of a batch is optimised on its own."""

import math

import torch

from depthgauge.theory.linalg.small_matrices import Adam


def test_steps_follow_the_formula():
    """m_t = (1 − β₁)Σ_i β₁^{t−i} g_i and v_t likewise with g²; x moves by rate · m̂/(√v̂ + ε)."""
    gradients, rates, betas = [0.3, -2.0, 0.01, 5.0], [0.1, 0.2, 0.05, 0.1], (0.8, 0.9)
    adam, x, expected = Adam(betas, epsilon=1e-3), torch.zeros(1, dtype=torch.float64), 0.0
    for t in range(1, 5):
        (x,) = adam.step([x], [torch.tensor([gradients[t - 1]], dtype=torch.float64)], rates[t - 1])
        mean, size = (
            (1 - beta) * sum(beta ** (t - i) * gradients[i - 1] ** power for i in range(1, t + 1)) / (1 - beta**t)
            for beta, power in zip(betas, (1, 2), strict=True)
        )
        expected -= rates[t - 1] * mean / (math.sqrt(size) + 1e-3)
        torch.testing.assert_close(x.item(), expected, rtol=1e-12, atol=0.0)


def test_a_batch_is_a_set_of_separate_problems():
    scales = torch.tensor([[1.0], [100.0]], dtype=torch.float64)

    def run(which):
        adam, x = Adam(), torch.ones(len(which), 2, dtype=torch.float64)
        for _ in range(20):
            (x,) = adam.step([x], [scales[which] * x], rate=0.05)
        return x

    torch.testing.assert_close(run([0, 1]), torch.cat([run([0]), run([1])]))
