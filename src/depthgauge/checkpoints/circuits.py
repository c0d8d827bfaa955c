"""Sizes of the query–key and value–output circuits of every head, from the weights alone.

A head computes scores β x Q Kᵀ yᵀ for tokens x, y (row vectors) with Q, K `[d, k]`, and writes x V with V = W_V W_O
`[d, d]`. The gain of the norm before attention is included in Q, K and V. Rotary embeddings rotate Q and K by an angle
that depends on the distance of two tokens; the sizes are those at distance 0. Biases, and norms of query and key inside
a head (Qwen 3, Gemma 3), are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge._records import ArrayRecord
from depthgauge.checkpoints.families import Family, Fused, Separate
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.linalg.norms import entry_sum_norm
from depthgauge.measures.weights import weight_sizes
from depthgauge.network.network import Layer


@dataclass(frozen=True, eq=False, repr=False)
class HeadWeights(ArrayRecord):
    """The weights of one head.

    - `query`, `key`: Q and K
    - `value`, `output`: W_V and W_O
    - `scale`: β, the factor of the scores
    """

    query: Float[Tensor, "d k"]
    key: Float[Tensor, "d k"]
    value: Float[Tensor, "d v"]
    output: Float[Tensor, "v d"]
    scale: float


@dataclass(frozen=True)
class CircuitSizes:
    """Sizes of one head's circuits.

    - `eta`: η, the largest |entry| of Q, K and V
    - `value_col`: ‖V‖col; ‖xV‖max ≤ ‖x‖max·‖V‖col
    - `dong_beta`: ‖QKᵀ‖col · ‖V‖₁,∞, the β of Dong et al.
    - `qk_norm`, `ov_norm`: spectral norms of QKᵀ and V
    - `qk_stable_rank`, `ov_stable_rank`: ‖·‖F²/‖·‖₂² of QKᵀ and V
    - `score_norm`: β·min(Σ|QKᵀ|, d·‖QKᵀ‖₂) ≥ |β x QKᵀ yᵀ| for all tokens with entries in [−1, 1]
    """

    eta: float
    value_col: float
    dong_beta: float
    qk_norm: float
    qk_stable_rank: float
    ov_norm: float
    ov_stable_rank: float
    score_norm: float


def circuit_sizes(head: HeadWeights) -> CircuitSizes:
    """Compute the sizes of one head's circuits."""
    qk = head.query @ head.key.mT
    sizes = weight_sizes(Layer(head.query[None], head.key[None], (head.value @ head.output)[None]))
    qk_values = product_singular_values(head.query, head.key.mT)
    ov_values = product_singular_values(head.value, head.output)
    bound = min(float(entry_sum_norm(qk)), len(qk) * float(qk_values[0]))
    return CircuitSizes(
        eta=float(sizes.eta[0]),
        value_col=float(sizes.value_col[0]),
        dong_beta=float(sizes.dong_beta[0]),
        qk_norm=float(qk_values[0]),
        qk_stable_rank=stable_rank(qk_values),
        ov_norm=float(ov_values[0]),
        ov_stable_rank=stable_rank(ov_values),
        score_norm=head.scale * bound,
    )


def product_singular_values(A: Float[Tensor, "d k"], B: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
    """Return the singular values of AB, k ≤ d: those of R_A R_Bᵀ `[k, k]`, with A = Q_A R_A and Bᵀ = Q_B R_B."""
    values: Tensor = torch.linalg.svdvals(torch.linalg.qr(A)[1] @ torch.linalg.qr(B.mT)[1].mT)
    return values


@dataclass(frozen=True)
class Gram:
    """AᵀA/m² and m, the largest |entry| of A; the division keeps the squares in the range of the dtype."""

    matrix: Float[Tensor, "*heads k k"]
    largest: Float[Tensor, "*heads"]


def gram(A: Float[Tensor, "*heads d k"]) -> Gram:
    """Return the Gram matrix of the columns of A, scaled."""
    largest = _largest_entry(A)
    A = A / largest.clamp(min=torch.finfo(A.dtype).tiny)[..., None, None]
    return Gram(A.mT @ A, largest)


def _largest_entry(A: Float[Tensor, "*heads d k"]) -> Float[Tensor, "*heads"]:
    largest: Tensor = torch.linalg.vector_norm(A, ord=float("inf"), dim=(-2, -1))
    return largest


def largest_from_grams(a: Gram, b: Gram, squarings: int = 10) -> Float[Tensor, "*heads"]:
    """Return ‖AB‖₂ per head from the Gram matrices of the columns of A and of the rows of B.

    It needs products of small matrices only, which is fast on a GPU. The eigenvalues of C = (AᵀA)(BBᵀ) are the squares
    of the singular values of AB. A column of C^(2^s), s: `squarings`, is close to the leading eigenvector v, and its
    Rayleigh quotient in the inner product of BBᵀ,

        λ = (BBᵀv)ᵀ AᵀA (BBᵀv) / vᵀ BBᵀ v,

    is at most ‖AB‖₂² and smaller by a relative error of about log(k)/2^(s+1) at most. NaN if an entry is not finite.
    """
    tiny = torch.finfo(a.matrix.dtype).tiny
    power = a.matrix @ b.matrix
    for _ in range(squarings):
        power = power / torch.linalg.vector_norm(power, dim=(-2, -1), keepdim=True).clamp(min=tiny)
        power = power @ power
    column = torch.linalg.vector_norm(power, dim=-2).argmax(dim=-1)
    v = power.gather(-1, column[..., None, None].expand(*power.shape[:-1], 1))
    w = b.matrix @ v
    top, bottom = (w * (a.matrix @ w)).sum(dim=(-2, -1)), (v * w).sum(dim=(-2, -1))
    found = torch.where(top == 0, torch.zeros_like(top), top / bottom).sqrt()
    return found * (a.largest * b.largest)


def stable_rank(singular_values: Float[Tensor, " k"]) -> float:
    """Return ‖A‖F²/‖A‖₂², which lies between 1 and rank A; 0 for A = 0."""
    largest = float(singular_values[0])
    return float((singular_values / largest).square().sum()) if largest > 0 else 0.0


@torch.no_grad()
def head_weights(checkpoint: Checkpoint, block: nn.Module) -> Iterator[HeadWeights]:
    """Yield the weights of every query head of a block; a shared key–value head is repeated for each of its heads."""
    family = checkpoint.family
    assert family is not None
    heads, kv_heads = checkpoint.heads, checkpoint.kv_heads
    query, key, value, output = _projections(block, family, heads)
    gain = _gain(block, family, query)
    k, v = query.shape[1] // heads, value.shape[1] // kv_heads
    attention = next((m for m in block.modules() if hasattr(m, "scaling")), None)
    scale = float(getattr(attention, "scaling", k**-0.5))
    for h in range(heads):
        shared = h * kv_heads // heads
        yield HeadWeights(
            query=gain * query[:, h * k : (h + 1) * k],
            key=gain * key[:, shared * k : (shared + 1) * k],
            value=gain * value[:, shared * v : (shared + 1) * v],
            output=output[h * v : (h + 1) * v],
            scale=scale,
        )


def _projections(block: nn.Module, family: Family, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, key, value `[d, width]` and output `[width, d]`, with heads in consecutive columns (rows)."""
    paths = family.projections
    if isinstance(paths, Separate):
        names = (paths.query, paths.key, paths.value, paths.output)
        query, key, value, output = (_matrix(block.get_submodule(name)) for name in names)
        return query, key, value, output
    together, output = _matrix(block.get_submodule(paths.all)), _matrix(block.get_submodule(paths.output))
    query, key, value = split_fused(together, paths, heads)
    return query, key, value, output


def split_fused(
    together: Float[Tensor, "d all"], paths: Fused, heads: int
) -> tuple[Float[Tensor, "d width"], Float[Tensor, "d width"], Float[Tensor, "d width"]]:
    """Split one map into query, key and value; the columns are q|k|v (`thirds`) or q|k|v per head (`heads`)."""
    d, width = together.shape
    if paths.order == "thirds":
        query, key, value = together.chunk(3, dim=1)
    else:
        parts = together.reshape(d, heads, 3, width // (3 * heads)).permute(2, 0, 1, 3).reshape(3, d, -1)
        query, key, value = parts
    return query, key, value


def _matrix(module: Any) -> Tensor:
    """Return W of the map x ↦ xW; `nn.Linear` stores Wᵀ, transformers' `Conv1D` stores W."""
    weight = _whole(module.weight.detach())
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return weight.mT if isinstance(module, nn.Linear) else weight


def _gain(block: nn.Module, family: Family, like: Tensor) -> Tensor:
    """Return the gain of the norm before attention as a column `[d, 1]`; ones if there is none."""
    if family.gain is None:
        return torch.ones(like.shape[0], 1, dtype=like.dtype, device=like.device)
    weight = block.get_submodule(family.gain).weight
    assert isinstance(weight, Tensor)
    gain = _whole(weight.detach()).to(like)
    return (gain + family.gain_offset if family.gain_offset else gain)[:, None]


@dataclass(frozen=True, eq=False, repr=False)
class LayerSizes(ArrayRecord):
    """Sizes of the circuits of some layers, over the heads of each.

    - `eta`: η, the largest |entry| of Q, K and V of any head
    - `qk_norm`, `ov_norm`: the largest spectral norms of QKᵀ and V over the heads
    """

    eta: Float[Tensor, " layers"]
    qk_norm: Float[Tensor, " layers"]
    ov_norm: Float[Tensor, " layers"]


def layer_sizes(
    query: Float[Tensor, "layers heads d k"],
    key: Float[Tensor, "layers kv_heads d k"],
    value: Float[Tensor, "layers kv_heads d v"],
    output: Float[Tensor, "layers heads v d"],
) -> LayerSizes:
    """Compute the sizes of the circuits of some layers from the weights of all heads; they stay on the device.

    A shared key–value head belongs to heads/kv_heads consecutive heads.
    """
    return _sizes_of([_grams(query, key, value, output)])


@dataclass(frozen=True)
class _Grams:
    """What the sizes of some layers need: the Gram matrices of Q, K, W_V and W_Oᵀ per head, and ‖V‖max per layer."""

    query: Gram
    key: Gram
    value: Gram
    output: Gram
    product: Float[Tensor, " layers"]


def _grams(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> _Grams:
    """Reduce the weights of some layers to Gram matrices; the arguments are those of `layer_sizes`."""
    layers, heads, d = query.shape[:3]
    shared = torch.arange(heads, device=query.device) * key.shape[1] // heads if key.shape[1] < heads else None

    def repeated(one: Gram) -> Gram:
        return one if shared is None else Gram(one.matrix[:, shared], one.largest[:, shared])

    together = max(1, _PRODUCT_ENTRIES // (d * d))
    values, outputs = (value if shared is None else value[:, shared]).flatten(0, 1), output.flatten(0, 1)
    largest = [
        _largest_entry(values[k : k + together] @ outputs[k : k + together]) for k in range(0, layers * heads, together)
    ]
    product = torch.cat(largest).reshape(layers, heads).amax(dim=1)
    return _Grams(gram(query), repeated(gram(key)), repeated(gram(value)), gram(output.mT), product)


def _sizes_of(parts: list[_Grams]) -> LayerSizes:
    """Compute the sizes of all layers together; a few small matrices per head are all that is left of the weights."""

    def joined(name: str) -> Gram:
        grams = [getattr(part, name) for part in parts]
        device = grams[0].matrix.device
        return Gram(
            torch.cat([one.matrix.to(device) for one in grams]),
            torch.cat([one.largest.to(device) for one in grams]),
        )

    query, key, value, output = (joined(name) for name in ("query", "key", "value", "output"))
    product = torch.cat([part.product.to(query.largest.device) for part in parts])
    eta = torch.stack([query.largest.amax(dim=1), key.largest.amax(dim=1), product]).amax(dim=0)
    if query.matrix.shape == value.matrix.shape:  # half as many operations
        left, right = (
            Gram(torch.stack([one.matrix, two.matrix]), torch.stack([one.largest, two.largest]))
            for one, two in ((query, value), (key, output))
        )
        norms = largest_from_grams(left, right).amax(dim=-1)
        return LayerSizes(eta, norms[0], norms[1])
    return LayerSizes(eta, largest_from_grams(query, key).amax(dim=1), largest_from_grams(value, output).amax(dim=1))


_PRODUCT_ENTRIES = 2**23
"""Largest number of entries of the products W_V W_O in memory at once (32 MB in float32)."""
_WEIGHT_ENTRIES = 2**21
"""Largest number of entries of the query weights of the layers that are reduced together (8 MB in float32)."""


@torch.no_grad()
def block_sizes(checkpoint: Checkpoint, blocks: Sequence[nn.Module]) -> LayerSizes:
    """Compute the sizes of the circuits of blocks: the largest over the heads of what `circuit_sizes` gives for one.

    Several blocks are reduced together as long as their weights are small.
    """
    family = checkpoint.family
    assert family is not None
    heads, kv_heads = checkpoint.heads, checkpoint.kv_heads
    parts, waiting = [], list[tuple[Tensor, ...]]()
    for block in blocks:
        projections = _projections(block, family, heads)
        weights = (*projections, _gain(block, family, projections[0]))
        if waiting and ((len(waiting) + 1) * weights[0].numel() > _WEIGHT_ENTRIES or _differ(waiting[0], weights)):
            parts.append(_grams_of(waiting, heads, kv_heads))
            waiting = []
        waiting.append(weights)
    return _sizes_of([*parts, _grams_of(waiting, heads, kv_heads)])


def _differ(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return any(a.shape != b.shape or a.device != b.device for a, b in zip(some, others, strict=True))


def _grams_of(weights: Sequence[Sequence[Tensor]], heads: int, kv_heads: int) -> _Grams:
    """Reduce query, key, value, output and gain of some layers to Gram matrices."""
    query, key, value, output, gain = (torch.stack(kind) for kind in zip(*weights, strict=True))

    def columns(weight: Tensor, count: int) -> Tensor:
        return (gain * weight).reshape(*weight.shape[:2], count, -1).transpose(1, 2)

    rows = output.reshape(len(output), heads, -1, output.shape[-1])
    return _grams(columns(query, heads), columns(key, kv_heads), columns(value, kv_heads), rows)


def _whole(weight: Tensor) -> Tensor:
    """Return a weight as one tensor; a sharded weight is gathered from all processes, which must all ask for it."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()
