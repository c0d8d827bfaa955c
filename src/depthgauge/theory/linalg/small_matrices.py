"""Fast work with small matrices: the one optimiser of the project, and the number of threads.

`torch.optim.Adam` computes the same steps as `Adam`. It is not used because its constructor imports `torch._dynamo`,
which takes several seconds in a fresh process, longer than most certificates.

Certificates, attacks and claims consist of many products of small matrices. Splitting such a product over threads costs
more than the product, and on a loaded machine the threads wait for each other: a certificate of a network of width 16
took over 110 seconds with the default threads and 5 seconds with one thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Adam:
    """m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²,   x ← x − rate · m̂/(√v̂ + ε).

    m̂ = m/(1 − β₁ᵗ) and v̂ = v/(1 − β₂ᵗ) after t steps. All operations are entrywise, so a batch of problems may be
    stacked in one tensor.

    >>> adam, x = Adam(betas=(0.9, 0.99)), torch.tensor([3.0, -1.0])
    >>> for _ in range(200):
    ...     (x,) = adam.step([x], [2 * x], rate=0.1)
    >>> bool(x.abs().max() < 0.05)
    True
    """

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8) -> None:
        self.betas, self.epsilon = betas, epsilon
        self.steps = 0
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []

    def step(self, values: Sequence[Tensor], gradients: Sequence[Tensor], rate: float) -> list[Tensor]:
        """Return the values after one step; the tensors given are not changed."""
        if not self._first:
            self._first = [torch.zeros_like(gradient) for gradient in gradients]
            self._second = [torch.zeros_like(gradient) for gradient in gradients]
        self.steps += 1
        one, two = self.betas
        moved = []
        for i, (x, gradient) in enumerate(zip(values, gradients, strict=True)):
            self._first[i] = one * self._first[i] + (1 - one) * gradient
            self._second[i] = two * self._second[i] + (1 - two) * gradient**2
            mean = self._first[i] / (1 - one**self.steps)
            size = (self._second[i] / (1 - two**self.steps)).sqrt() + self.epsilon
            moved.append(x - rate * mean / size)
        return moved


SMALL = 128
"""Matrices up to this width are computed by one thread."""


@contextmanager
def threads_for(width: int) -> Iterator[None]:
    """Run the block with one torch thread if its matrices have at most `SMALL` columns, then restore the number."""
    before = torch.get_num_threads()
    if width > SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
