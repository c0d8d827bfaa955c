"""Published scores that predict, from one forward pass, how much a layer matters.

A score is one number per layer; a larger score means that the layer changes its input more. All scores use the states
before the final norm, the input of layer 0 included. Their names and the what-if that each predicts are in
`results.labels.SCORES`.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.hooks import Change, changed, hidden_in


def block_influence(before: Float[Tensor, "batch n d"], after: Float[Tensor, "batch n d"]) -> float:
    """Return 1 − mean over tokens of cos(x_ℓ, x_{ℓ+1}), ShortGPT's score of a block."""
    return float(1 - _cosine(before, after).mean())


def angular_distance(before: Float[Tensor, "batch n d"], after: Float[Tensor, "batch n d"]) -> float:
    """Return arccos(cos(x_ℓ, x_{ℓ+1}))/π at the last token, UIDL's score of a single block."""
    return float(_cosine(before[:, -1:], after[:, -1:]).clamp(-1, 1).arccos().mean() / math.pi)


def added_influence(before: Float[Tensor, "batch n d"], added: Float[Tensor, "batch n d"]) -> float:
    """Return 1 − mean over tokens of cos(y, y + f(y)), LLM-Drop's score of a sublayer f that reads y and adds f(y)."""
    return float(1 - _cosine(before, before + added).mean())


def _cosine(x: Float[Tensor, "batch n d"], y: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n"]:
    return F.cosine_similarity(x.double(), y.to(x.device).double(), dim=-1)


class SublayerScores:
    """A score of the attention and of the MLP of every block, recorded with hooks during a forward pass.

    A block has NaN if its family is not known, if it has one sublayer, whose scores are those of the block, or more
    than two.

    `measure` maps y, the stream that a sublayer reads, and f(y), what it adds, to the score. The default is LLM-Drop's.
    f(y) is the output of the sublayer times `Family.multiplier`.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        families: Sequence[Family | None],
        measure: Callable[[Tensor, Tensor], Any] = added_influence,
    ) -> None:
        self.blocks, self.families, self.measure = blocks, families, measure
        self.attention: list[Any] = [math.nan] * len(blocks)
        self.mlp: list[Any] = [math.nan] * len(blocks)

    @contextmanager
    def listening(self, layers: Iterable[int] | None = None) -> Iterator[None]:
        """Score every forward pass of some layers within this context; the scores of the last pass are kept."""
        with ExitStack() as hooks:
            for layer in range(len(self.blocks)) if layers is None else layers:
                family = self.families[layer]
                if family is not None and len(family.sublayers) == 2:
                    self._listen(hooks, layer, self.blocks[layer], family)
            yield

    def _listen(self, hooks: ExitStack, layer: int, block: nn.Module, family: Family) -> None:
        read: list[Tensor] = []  # [y of the attention, y of the MLP]

        def multiplied(output: Tensor, stream: Tensor) -> Tensor:
            output = output.reshape(stream.shape)  # some blocks flatten batch and tokens in between (OPT)
            return output if family.multiplier == 1.0 else family.multiplier * output

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read[:] = [hidden_in(args, kwargs)]

        def attention(output: Tensor) -> Tensor:
            read[0] = read[0].to(output.device)  # with a device map, blocks may be on different devices
            added = multiplied(output, read[0])
            self.attention[layer] = self.measure(read[0], added)
            read.append(read[0] if family.order == "parallel" else read[0] + added)
            return output

        def between(normed: Tensor) -> Tensor:
            read[1] = normed
            return normed

        def mlp(output: Tensor) -> Tensor:
            self.mlp[layer] = self.measure(read[1], multiplied(output, read[1]))
            read.clear()
            return output

        hooks.enter_context(block.register_forward_pre_hook(before, with_kwargs=True))
        listeners: dict[str | None, Change] = {family.attention: attention, family.mlp: mlp}
        if family.order == "post":
            listeners[family.attention_norm] = between
        for path, listener in listeners.items():
            if path is not None:
                hooks.enter_context(changed(block.get_submodule(path), listener))


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation of two lists; None for a constant list, a NaN, or fewer than 3 entries."""
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1 or any(map(math.isnan, (*x, *y))):
        return None
    # Importing scipy.stats takes more time than gauging a tiny model.
    ranks = [[sum(w < v for w in values) + (values.count(v) + 1) / 2 for v in values] for values in (x, y)]
    return statistics.correlation(*ranks)
