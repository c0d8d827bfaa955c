"""The function that layer 0 of a checkpoint applies to a token: embedding, position, norm, query and key.

Weights are taken as they are stored, and constants (ε, the scale of embeddings, rotary frequencies) as the model holds
them. All maps are enclosed: the results contain the exact queries and keys.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge.base.array_record import ArrayRecord
from depthgauge.checkpoints.circuits import projection_biases, projections
from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.find_blocks import find_blocks
from depthgauge.checkpoints.interface import AttentionCall, attending
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import Checkpoint, context_length
from depthgauge.theory.linalg.rounding import UNIT, add_up, div_up, gamma, mul_down, mul_up, norm_up

BLOCK = 2**20
"""Entries of an array that are computed at a time (8 MB)."""


UNDERFLOW = 2.0**-900
"""At least what underflows contribute to a vector: 2⁻¹⁰⁷⁴ for each of at most 2⁶⁰ products with factors up to 2¹⁰⁰."""


class NotBoundedError(CheckpointError):
    """Layer 0 has a part that is not covered; the message is the reason."""


@dataclass(frozen=True, eq=False, repr=False)
class Rows(ArrayRecord):
    """Vectors that are known up to rounding: the exact ones are within the Euclidean distance `off` of `mid`."""

    mid: Float[Tensor, "*n d"]
    off: Float[Tensor, "*n"]

    def normalized(self, eps: float) -> "Rows":
        """Return x/√(|x|²/d + ε) for every row x.

        The computed root r has a relative error of at most ρ (`root_error`), so the result is off by at most
        r((1 + ρ)·off + ρ|mid x|).
        """
        d, size = self.mid.shape[-1], norm_up(self.mid)
        variance = self.mid.square().sum(-1) / d + eps
        rho = root_error(variance, size, self.off, d, eps)
        root = 1.0 / variance.sqrt()
        off = mul_up(root, add_up(mul_up(add_up(1.0, rho), self.off), mul_up(rho, size)))
        return Rows(self.mid * root[..., None], add_up(off, UNDERFLOW))


def root_error(variance: Tensor, size: Tensor, off: Tensor, d: int, eps: float) -> Tensor:
    """Bound the relative error of fl(1/√variance), where variance = |x|²/d + ε of an x within `off` of mid, and of a
    product with it; +∞ if the bound exceeds ½.

    With |mid x| ≤ `size`, d·variance is off by at most E = γ_(d+16)(size² + dε) + off(2·size + off). For
    η = E/(d·variance) ≤ 0.6 both 1/√(1 + η) and 1/√(1 − η) are within η of 1. Root, quotient and product are rounded.
    """
    moved = mul_up(off, add_up(2.0 * size, off))
    error = add_up(mul_up(gamma(d + 16), add_up(mul_up(size, size), mul_up(float(d), eps))), UNDERFLOW)
    rho = add_up(div_up(add_up(error, moved), mul_down(float(d), variance)), 8.0 * UNIT)
    return torch.where((rho <= 0.5) & (variance > 0), rho, torch.inf)


@dataclass(frozen=True, eq=False, repr=False)
class Projection(ArrayRecord):
    """The queries or the keys of all heads, x ↦ norm(x W + b). Gain and bias of the norm before are in W and b.

    - `weight`, `bias`: W `[d, heads, k]` and b `[heads, k]`, computed
    - `bias_off`: the distance of the exact b of every head; W has a relative error of at most γ_3 per entry
    - `gain`, `eps`: of the norm inside a head (Qwen 3), or None; the gain has a relative error of one rounding
    """

    weight: Float[Tensor, "d heads k"]
    bias: Float[Tensor, "heads k"]
    bias_off: Float[Tensor, " heads"]
    gain: Float[Tensor, " k"] | None = None
    eps: float = 0.0

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.weight.shape[1]

    def scaled(self, factors: Float[Tensor, "heads k"], centre: Float[Tensor, "heads k"]) -> "Projection":
        """Subtract a centre from the vectors and multiply them by powers of two, which is exact."""
        bias = self.bias - centre
        off = add_up(self.bias_off, mul_up(UNIT, norm_up(bias)))
        return Projection(self.weight * factors, bias * factors, mul_up(off, factors.amax(-1)))

    def linear(self, x: Rows) -> Rows:
        """Return x W `[n, heads, k]`.

        With F = ‖W_h‖_F, a computed vector is off by at most (γ_(d+1) + γ_3)|mid x|F + off(1 + γ_3)F, entry by entry
        by Cauchy–Schwarz.
        """
        d, heads, _ = self.weight.shape
        mid = torch.unflatten(x.mid @ self.weight.flatten(1), -1, (heads, -1))
        F = mul_up(norm_up(self.weight.permute(1, 0, 2).flatten(1)), 1.0 + 2.0**-40)  # exceeds 1 + γ_3
        off = mul_up(add_up(mul_up(gamma(d + 6), norm_up(x.mid)), x.off)[:, None], F)
        return Rows(mid, add_up(off, UNDERFLOW))

    def __call__(self, x: Rows) -> Rows:
        """Return the vectors `[n, heads, k]` of normalized states x `[n, d]`."""
        product = self.linear(x)
        mid = product.mid + self.bias
        made = Rows(mid, add_up(add_up(product.off, self.bias_off), mul_up(UNIT, norm_up(mid))))
        if self.gain is None:
            return made
        made = made.normalized(self.eps)
        mid = made.mid * self.gain
        off = add_up(mul_up(made.off, mul_up(self.gain.abs().amax(), 1.0 + 2.0**-40)), mul_up(gamma(3), norm_up(mid)))
        return Rows(mid, add_up(off, UNDERFLOW))


@dataclass(frozen=True, eq=False, repr=False)
class FirstLayer(ArrayRecord):
    """Layer 0 of a checkpoint.

    - `vocabulary`: the embeddings of all tokens `[v, d]`, in the dtype of the model
    - `scale`: their factor
    - `positions`: the vectors that are added to them `[p, d]`, one for each position and type of token, or None
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
    positions: Float[Tensor, "p d"] | None
    first: int
    centred: bool
    eps: float
    query: Projection
    key: Projection
    frequencies: Float[Tensor, " planes"]
    stretch: float
    span: int | None

    def blocks(self, width: int = 0) -> tuple[Int[Tensor, " n"], ...]:
        """Return the ids of all tokens, as many at a time as suits arrays of `width` columns, by default of queries."""
        width = width or self.query.weight[0].numel()
        return torch.split(torch.arange(len(self.vocabulary)), max(1, BLOCK // width))

    def rows(self, ids: Int[Tensor, " n"]) -> Rows:
        """Return the embeddings of tokens `[n, d]`, scaled, and centred if the norm does it."""
        return self.centre(self.vocabulary[ids.to(self.vocabulary.device)].cpu().double() * self.scale)

    def centre(self, x: Float[Tensor, "n d"]) -> Rows:
        """Subtract the mean of every row if the norm does it. The rows may have a relative error of one rounding.

        A mean is off by at most γ_(d+1)|x|/√d, which moves the row by γ_(d+1)|x|; the projection does not increase
        earlier errors, and the difference is rounded.
        """
        off = add_up(mul_up(gamma(x.shape[-1] + 8), norm_up(x)), UNDERFLOW)
        return Rows(x - x.mean(-1, keepdim=True) if self.centred else x, off)

    def states(self, ids: Int[Tensor, " n"]) -> Rows:
        """Return the normalized states of tokens without absolute positions; gain and bias are in the projections."""
        return self.rows(ids).normalized(self.eps)


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
    assert family is not None
    (block, *_), embedding = find_blocks(model, checkpoint.layers), model.get_input_embeddings()
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
    found = [root.get_submodule(path) for root, path in ((base, family.embeddings.norm), (block, family.gain)) if path]
    if len(found) != 1:
        raise NotBoundedError(f"{len(found)} norms before the first attention; exactly one is covered")
    return found[0]


def _eps(norm: Any) -> float:
    for name in ("eps", "variance_epsilon"):
        if (eps := getattr(norm, name, None)) is not None:
            return float(eps)
    raise NotBoundedError(f"the norm {type(norm).__name__} has no ε")


def _positions(base: Any, family: Family) -> Float[Tensor, "p d"] | None:
    """Return the sum of every position with every type of token, in this order; None without positions."""
    paths = (family.embeddings.positions, family.embeddings.types)
    position, kind = (None if path is None else _exact(base.get_submodule(path).weight) for path in paths)
    if position is None or kind is None:
        return position
    if len(kind) * len(position) > 2**14:
        raise NotBoundedError(f"{len(kind)} types of tokens at {len(position)} positions are too many")
    return (kind[:, None, :] + position).flatten(0, 1)  # one rounding per entry, which `centre` takes into account


def _rotary(base: Any, attention: Any) -> tuple[Float[Tensor, " planes"], float]:
    """Return the frequencies of the rotary planes, none without rotary positions, and the factor of cosine and sine."""
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
        W = torch.unflatten(_exact(weights[index]), -1, (heads, -1))
        bias = torch.unflatten(_exact(biases[index])[0], -1, (heads, -1))
        off = torch.zeros(heads, dtype=torch.float64)
        if shift is not None:
            c, d = _exact(shift), len(W)
            size = add_up(mul_up(norm_up(c), norm_up(W.permute(1, 0, 2).flatten(1))), norm_up(bias))
            bias = torch.unflatten(c @ W.flatten(1), -1, (heads, -1)) + bias
            off = add_up(mul_up(gamma(d + 2), size), UNDERFLOW)
        inner = None if family.head_norms is None else block.get_submodule(family.head_norms[index])
        made.append(
            Projection(
                weight=gain[:, None, None] * W,
                bias=bias,
                bias_off=off,
                gain=None if inner is None else _gain(inner, family.gain_offset),
                eps=0.0 if inner is None else _eps(inner),
            )
        )
    return made[0], made[1]


def _gain(norm: Any, offset: float) -> Float[Tensor, " d"]:
    return _exact(norm.weight) + offset


def _exact(weight: Tensor) -> Tensor:
    return weight.detach().cpu().double()
