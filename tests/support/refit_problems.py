"""Refits with known answers: a block, inputs, and targets that the same block computes with other weights."""

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from layered_models import layered_model
from torch import Tensor, nn

from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.blocks.probe import derived
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.surgery.repair import output_maps

LAYER = 1


class Problem:
    """A block of a tiny model, its inputs, and methods to make targets and to measure errors."""

    def __init__(self, name: str, windows: int = 12, length: int = 16, dtype: torch.dtype = torch.float64) -> None:
        self.model = layered_model(name, dtype=dtype)
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(3, 40, (windows, length), generator=generator)
        self.checkpoint = derived(wrap(self.model, name), self.ids)
        self.runner = BlockRunner(self.checkpoint, self.ids[:1])
        self.runner.batches.size = 5  # not a divisor of the number of windows
        self.states = self.runner.through([0], self.runner.embed(self.ids))
        assert self.checkpoint.family is not None
        self.family = self.checkpoint.family
        self.attention, self.mlp = output_maps(self.runner.blocks[LAYER], self.family)

    def output(self) -> Tensor:
        return self.runner.through([LAYER], self.states)

    def targets(self, modules: Iterable[nn.Module], size: float = 0.1) -> Tensor:
        """Return the outputs of the block after noise was added to the parameters of modules; they are restored."""
        generator = torch.Generator().manual_seed(6)
        parameters = [p for module in modules for p in module.parameters()]
        with torch.no_grad(), restored(parameters):
            for p in parameters:
                p += size * torch.randn(p.shape, generator=generator).to(p)
            return self.output()

    def unreachable(self) -> Tensor:
        """Return targets that no weights reach: the states two blocks further, plus noise."""
        states = self.runner.through([LAYER, LAYER + 1], self.states)
        noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(7)).to(states)
        return states + 0.3 * states.std() * noise

    def error(self, targets: Tensor) -> float:
        """Σ_t ‖T_t − y_t‖² / ‖T_t‖², in plain form."""
        apart = (targets.double() - self.output().double()).square().sum(-1)
        return float((apart / targets.double().square().sum(-1)).sum())

    def features(self, maps: Sequence[nn.Module]) -> Tensor:
        """The inputs of maps, stacked for all tokens, with a 1 for every bias."""
        found: dict[nn.Module, Tensor] = {}
        handles = [m.register_forward_hook(lambda m, args, out: found.update({m: args[0]})) for m in maps]
        with torch.no_grad():
            self.runner.block(LAYER, self.states.to(self.model.dtype))
        for handle in handles:
            handle.remove()
        columns = []
        for m in maps:
            columns.append(found[m].double())
            if m.bias is not None:
                columns.append(torch.ones(*found[m].shape[:2], 1, dtype=torch.float64))
        return torch.cat(columns, dim=-1).flatten(0, 1)


@contextmanager
def restored(parameters: Iterable[nn.Parameter]) -> Any:
    """Restore the values of parameters afterwards."""
    kept = [(p, p.detach().clone()) for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in kept:
                p.copy_(value)


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, right, strict=True))


def copies(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [p.detach().clone() for p in model.parameters()]
