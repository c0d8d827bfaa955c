"""The cheap scores people remove layers by, computed right, and how far each can be trusted on a model.

States are those before the final norm, layer 0 included. A score is one number a layer: large says that the layer does
much.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.layers import changed, hidden_in

SCORES: Mapping[str, str] = {
    "block_influence": "block",
    "angular_distance": "block",
    "attention_cosine": "attention",
    "mlp_cosine": "mlp",
}
"""Score → the what-if it stands for."""


def block_influence(before: Float[Tensor, "1 n d"], after: Float[Tensor, "1 n d"]) -> float:
    """1 − mean over tokens of cos(x_ℓ, x_{ℓ+1}): ShortGPT's score of a block."""
    return float(1 - _cosine(before, after).mean())


def angular_distance(before: Float[Tensor, "1 n d"], after: Float[Tensor, "1 n d"]) -> float:
    """arccos(cos(x_ℓ, x_{ℓ+1}))/π at the last token: UIDL's score, for a run of one block."""
    return float(_cosine(before[:, -1:], after[:, -1:]).clamp(-1, 1).arccos().mean() / math.pi)


def added_influence(before: Float[Tensor, "1 n d"], added: Float[Tensor, "1 n d"]) -> float:
    """1 − mean over tokens of cos(y, y + f(y)): LLM-Drop's score of a sublayer f."""
    return float(1 - _cosine(before, before + added).mean())


def _cosine(x: Float[Tensor, "1 n d"], y: Float[Tensor, "1 n d"]) -> Float[Tensor, "1 n"]:
    return F.cosine_similarity(x.double(), y.to(x.device).double(), dim=-1)


class SublayerScores:
    """Listens to the sublayers of every block during a pass, and scores what each adds to the stream it reads."""

    def __init__(self, blocks: Sequence[nn.Module], family: Family) -> None:
        self.blocks, self.family = blocks, family
        self.attention: list[float] = [math.nan] * len(blocks)
        self.mlp: list[float] = [math.nan] * len(blocks)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this lasts, every pass is scored."""
        with ExitStack() as hooks:
            for layer, block in enumerate(self.blocks):
                self._listen(hooks, layer, block)
            yield

    def _listen(self, hooks: ExitStack, layer: int, block: nn.Module) -> None:
        read: list[Tensor] = []  # what the attention reads, then what the MLP reads

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read[:] = [hidden_in(args, kwargs)]

        def attention(added: Tensor) -> Tensor:
            read[0] = read[0].to(added.device)  # a block of a model that is spread may read from another device
            self.attention[layer] = added_influence(read[0], added)
            read.append(read[0] if self.family.order == "parallel" else read[0] + added)
            return added

        def between(normed: Tensor) -> Tensor:
            read[1] = normed
            return normed

        def mlp(added: Tensor) -> Tensor:
            self.mlp[layer] = added_influence(read[1], added)
            read.clear()
            return added

        handle = block.register_forward_pre_hook(before, with_kwargs=True)
        hooks.callback(handle.remove)
        hooks.enter_context(changed(block.get_submodule(self.family.attention), attention))
        if self.family.between is not None:
            hooks.enter_context(changed(block.get_submodule(self.family.between), between))
        hooks.enter_context(changed(block.get_submodule(self.family.mlp), mlp))


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The rank correlation of two lists, ties sharing their mean rank; None where one is constant or too short."""
    if len(x) < 3:
        return None
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    size = a.norm() * b.norm()
    return None if size == 0 else float((a @ b) / size)


def _ranks(values: Sequence[float]) -> Float[Tensor, " n"]:
    v = torch.tensor(list(values), dtype=torch.float64)
    below, at_most = (v[:, None] > v).sum(dim=1), (v[:, None] >= v).sum(dim=1)
    return (below + at_most - 1).double() / 2
