"""The function that layer 0 of a checkpoint applies to a token: embedding, position, norm, query and key.

Weights are taken as they are stored, and constants (ε, the scale of embeddings, rotary frequencies) as the model holds
them. All maps are enclosed: the results contain the exact queries and keys.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge._records import ArrayRecord
from depthgauge.checkpoints.circuits import projection_biases, projections
from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.interface import AttentionCall, attending
from depthgauge.checkpoints.layers import Stack, find_blocks
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import Checkpoint, context_length
from depthgauge.linalg.enclosures import Enclosure
from depthgauge.linalg.rounding import TINY, UNIT, add_up, gamma, mul_up, nonnegative_sum_up, sqrt_up

BLOCK = 2**21
"""Entries of an array that are computed at a time (16 MB)."""


class NotBoundedError(CheckpointError):
    """Layer 0 has a part that is not covered; the message is the reason."""


@dataclass(frozen=True, eq=False, repr=False)
class Projection(ArrayRecord):
    """The queries or the keys of all heads: x ↦ norm(x W + b), with the gain and the bias of the norm before in W and b.

    - `weight`, `bias`: W `[d, heads·k]` and b `[heads·k]`
    - `heads`: the number of heads
    - `gain`, `eps`: of the norm inside a head (Qwen 3); None if there is none
    """

    weight: Enclosure
    bias: Enclosure
    heads: int
    gain: Enclosure | None = None
    eps: float = 0.0

    def __call__(self, x: Enclosure) -> Enclosure:
        """Return the vectors `[n, heads, k]` of normalized states x `[n, d]`."""
        flat = product(x, self.weight) + self.bias
        vectors = Enclosure(*(part.reshape(len(part), self.heads, -1) for part in (flat.mid, flat.rad)))
        return vectors if self.gain is None else normalized(vectors, self.eps) * self.gain


@dataclass(frozen=True, eq=False, repr=False)
class FirstLayer(ArrayRecord):
    """Layer 0 of a checkpoint.

    - `vocabulary`: the embeddings of all tokens `[v, d]`, in the dtype of the model
    - `scale`: their factor
    - `positions`: the vectors that are added to them `[p, d]`, one for each position and type of token; None if none are
    - `first`: the index of the position of the first token of a text
    - `centred`: whether the norm subtracts the mean (LayerNorm)
    - `eps`: ε of the norm
    - `query`, `key`: the projections
    - `frequencies`: ω of the rotary planes `[planes]`; coordinate j of a head is in a plane with coordinate j + planes
    - `stretch`: the factor of rotary cosines and sines
    - `span`: the largest minus the smallest distance of a query and a key; None if it is not limited
    """

    vocabulary: Tensor
    scale: float
    positions: Enclosure | None
    first: int
    centred: bool
    eps: float
    query: Projection
    key: Projection
    frequencies: Float[Tensor, " planes"]
    stretch: float
    span: int | None

    def blocks(self) -> Iterator[Int[Tensor, " n"]]:
        """Yield the ids of all tokens, some at a time."""
        widest = max(self.query.weight.shape[1], *self.vocabulary.shape[1:])
        yield from torch.arange(len(self.vocabulary)).split(max(1, BLOCK // widest))

    def rows(self, ids: Int[Tensor, " n"]) -> Enclosure:
        """Return the embeddings of tokens `[n, d]`, scaled, and centred if the norm does it."""
        found = self.vocabulary[ids.to(self.vocabulary.device)].cpu().double()
        x = Enclosure.exact(found) if self.scale == 1.0 else Enclosure.exact(found) * self.scale
        return self.centre(x)

    def centre(self, x: Enclosure) -> Enclosure:
        """Subtract the mean of every row if the norm does it."""
        return x - _mean(x) if self.centred else x

    def states(self, ids: Int[Tensor, " n"]) -> Enclosure:
        """Return the normalized states of tokens without absolute positions; gain and bias are in the projections."""
        return normalized(self.rows(ids), self.eps)


def product(x: Enclosure, W: Enclosure) -> Enclosure:
    """Return an enclosure of x W `[n, m]` that costs one matrix product.

    The error of a computed entry is at most (γ_d|mid x| + rad x)|W_c| + |mid x| rad W_c, which is at most
    ‖γ_d|mid x| + rad x‖₂ ‖W_c‖₂ + ‖mid x‖₂ ‖rad W_c‖₂.
    """
    d = x.shape[-1]
    off = norm_up(add_up(mul_up(gamma(d), x.mid.abs()), x.rad), -1)[:, None]
    rad = mul_up(off, norm_up(W.abs_up(), 0))
    if bool((W.rad != 0).any()):
        rad = add_up(rad, mul_up(norm_up(x.mid.abs(), -1)[:, None], norm_up(W.rad, 0)))
    return Enclosure(x.mid @ W.mid, add_up(rad, d * TINY))


def norm_up(x: Tensor, dim: int) -> Tensor:
    """Return an upper bound on the Euclidean norm of x ≥ 0 along a dimension."""
    return sqrt_up(nonnegative_sum_up(mul_up(x, x), dim))


def normalized(x: Enclosure, eps: float) -> Enclosure:
    """Return x/√(mean(x²) + ε) for every row."""
    return x * (_mean(x * x) + eps).reciprocal_root()


def _mean(x: Enclosure) -> Enclosure:
    """Return the mean of every row, as a column."""
    total, share = x.sum(-1), 1.0 / x.shape[-1]
    width = torch.tensor(share, dtype=torch.float64)
    return Enclosure(total.mid[..., None], total.rad[..., None]) * Enclosure(width, mul_up(width, 2 * UNIT))


class _Seen(Exception):  # noqa: N818
    """Ends a forward pass after the attention call of layer 0."""


def first_call(checkpoint: Checkpoint, ids: Int[Tensor, "batch n"]) -> AttentionCall:
    """Return the arguments of layer 0's attention in the model's own forward pass."""
    found: list[AttentionCall] = []

    def watch(call: AttentionCall) -> Tensor:
        found.append(call)
        raise _Seen

    with attending(checkpoint.model) as session, suppress(_Seen):
        Stack(checkpoint, session).run(ids, watch=watch)
    if not found:
        raise NotBoundedError("the model does not call transformers' attention interface")
    return found[0]


@torch.no_grad()
def read_first_layer(checkpoint: Checkpoint, window: int | None) -> FirstLayer:
    """Read layer 0 of a checkpoint. `window` is the number of keys a query can see, None if it is not limited.

    Raises:
        NotBoundedError: a part of the layer is not covered.
    """
    family, model = checkpoint.family, checkpoint.model
    blocks = find_blocks(model, checkpoint.layers)
    if family is None or not blocks:
        raise NotBoundedError(f"the architecture {checkpoint.config.model_type!r} is not known to depthgauge")
    block, embedding = blocks[0], model.get_input_embeddings()
    if embedding.weight.is_meta:
        raise NotBoundedError("the weights are offloaded")
    if embedding.weight.shape[1] != checkpoint.config.hidden_size:
        raise NotBoundedError("the embeddings are projected to the width of the model")
    norm = _norm(block, model.base_model, family)
    attention = next((module for module in block.modules() if hasattr(module, "is_causal")), block)
    frequencies, stretch = _rotary(model.base_model, attention)
    positions = _positions(model.base_model, family)
    if positions is not None and (len(frequencies) or family.head_norms):
        raise NotBoundedError("absolute positions together with rotary ones or with norms inside the heads")
    query, key = _projections(checkpoint, block, norm)
    sides = 1 if getattr(attention, "is_causal", False) else 2
    context = context_length(checkpoint.config)
    table = 0 if positions is None else model.base_model.get_submodule(str(family.embeddings.positions)).num_embeddings
    return FirstLayer(
        vocabulary=embedding.weight.detach(),
        scale=float(checkpoint.config.hidden_size) ** 0.5 if family.embeddings.scaled else 1.0,
        positions=positions,
        first=max(0, table - (context or table)),
        centred=isinstance(norm, nn.LayerNorm),
        eps=_eps(norm),
        query=query,
        key=key,
        frequencies=frequencies,
        stretch=stretch,
        span=None if window is None else sides * (window - 1),
    )


def _norm(block: nn.Module, base: Any, family: Family) -> Any:
    """Return the only norm between the embeddings and the projections."""
    found = [
        root.get_submodule(path) for root, path in ((base, family.embeddings.norm), (block, family.gain)) if path
    ]
    if len(found) != 1:
        raise NotBoundedError(f"{len(found)} norms before the first attention; exactly one is covered")
    return found[0]


def _eps(norm: Any) -> float:
    for name in ("eps", "variance_epsilon"):
        if (eps := getattr(norm, name, None)) is not None:
            return float(eps)
    raise NotBoundedError(f"the norm {type(norm).__name__} has no ε")


def _positions(base: Any, family: Family) -> Enclosure | None:
    """Return the sum of every position with every type of token, in this order; None without positions."""
    paths = (family.embeddings.positions, family.embeddings.types)
    position, kind = (None if path is None else _exact(base.get_submodule(path).weight) for path in paths)
    if position is None:
        return None
    if kind is None:
        return Enclosure.exact(position)
    if len(kind) * len(position) > 2**14:
        raise NotBoundedError(f"{len(kind)} types of tokens at {len(position)} positions are too many")
    both = Enclosure.exact(kind[:, None, :]) + position
    return Enclosure(both.mid.flatten(0, 1), both.rad.flatten(0, 1))


def _rotary(base: Any, attention: Any) -> tuple[Float[Tensor, " planes"], float]:
    """Return the frequencies of the rotary planes and the factor of cosine and sine; no planes without rotary positions."""
    named = (module for name, module in base.named_modules() if name.rpartition(".")[2] == "rotary_emb")
    rotary = next(named, None)
    if rotary is None or not getattr(attention, "use_rope", True):
        return torch.zeros(0, dtype=torch.float64), 1.0
    layer_type = getattr(attention, "layer_type", None)
    kind, prefix = rotary.rope_type, ""
    if isinstance(kind, dict):
        kind, prefix = kind[layer_type], f"{layer_type}_"
    if "dynamic" in kind or kind == "longrope":
        raise NotBoundedError(f"rotary positions of the type {kind!r} depend on the length of the text")
    frequencies, stretch = (getattr(rotary, f"{prefix}{name}") for name in ("inv_freq", "attention_scaling"))
    return _exact(frequencies), float(stretch)


def _projections(checkpoint: Checkpoint, block: nn.Module, norm: Any) -> tuple[Projection, Projection]:
    """Return the maps to queries and keys. With the gain g and the bias c before W and b they are gW and cW + b."""
    family = checkpoint.family
    assert family is not None
    weights = projections(block, family, checkpoint.heads)[:2]
    biases = projection_biases(block, family, checkpoint.heads)[:2]
    gain = _gain(norm, family.gain_offset if family.gain else 0.0)
    shift = getattr(norm, "bias", None)
    made = []
    for index, heads in enumerate((checkpoint.heads, checkpoint.kv_heads)):
        W, bias = _exact(weights[index]), Enclosure.exact(_exact(biases[index]))
        if shift is not None:
            bias = bias + product(Enclosure.exact(_exact(shift)[None]), Enclosure.exact(W))
        inner = None if family.head_norms is None else block.get_submodule(family.head_norms[index])
        made.append(
            Projection(
                weight=Enclosure(gain.mid[:, None], gain.rad[:, None]) * W,
                bias=Enclosure(bias.mid[0], bias.rad[0]),
                heads=heads,
                gain=None if inner is None else _gain(inner, family.gain_offset),
                eps=0.0 if inner is None else _eps(inner),
            )
        )
    return made[0], made[1]


def _gain(norm: Any, offset: float) -> Enclosure:
    gain = Enclosure.exact(_exact(norm.weight))
    return gain + offset if offset else gain


def _exact(weight: Tensor) -> Tensor:
    return weight.detach().cpu().double()
