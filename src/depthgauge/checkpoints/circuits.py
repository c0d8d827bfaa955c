"""Sizes of the query–key and value–output circuits of every head, from the weights alone.

A head computes scores β x Q Kᵀ yᵀ for tokens x, y (row vectors) with Q, K `[d, k]`, and writes x V with V = W_V W_O
`[d, d]`. The gain of the norm before attention is included in Q, K and V. Rotary embeddings rotate Q and K by an angle
that depends on the distance of two tokens; the sizes are those at distance 0. Biases, and norms of query and key inside
a head (Qwen 3, Gemma 3), are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.checkpoints.families import Family, Fused, Separate
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.tensor_record import TensorRecord
from depthgauge.linalg.norms import entry_sum_norm
from depthgauge.measures.weights import weight_sizes
from depthgauge.network.network import Layer


@dataclass(frozen=True, eq=False, repr=False)
class HeadWeights(TensorRecord):
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

    def to_json(self) -> dict[str, float]:
        """Return the result JSON; it leaves out `score_norm`, which only `regime` needs."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "score_norm"}


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


def largest_singular_value(
    A: Float[Tensor, "heads d k"], B: Float[Tensor, "heads k e"], squarings: int = 10
) -> Float[Tensor, " heads"]:
    """Return ‖AB‖₂ per head, computed with products of small matrices only, which is fast on a GPU.

    The eigenvalues of C = (AᵀA)(BBᵀ) are the squares of the singular values of AB. A column of C^(2^s), s: `squarings`,
    is close to the leading eigenvector v, and its Rayleigh quotient in the inner product of BBᵀ,

        λ = (BBᵀv)ᵀ AᵀA (BBᵀv) / vᵀ BBᵀ v,

    is at most ‖AB‖₂² and smaller by a relative error of about log(k)/2^(s+1) at most. NaN if an entry is not finite.
    """
    sizes = [M.abs().amax(dim=(-2, -1), keepdim=True) for M in (A, B)]
    A, B = (M / size.clamp(min=torch.finfo(M.dtype).tiny) for M, size in zip((A, B), sizes, strict=True))
    gram_a, gram_b = A.mT @ A, B @ B.mT
    power = gram_a @ gram_b
    for _ in range(squarings):
        power = power / power.norm(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(A.dtype).tiny)
        power = power @ power
    column = power.norm(dim=-2).argmax(dim=-1)
    v = power.gather(-1, column[:, None, None].expand(-1, power.shape[-2], 1))
    w = gram_b @ v
    top, bottom = (w * (gram_a @ w)).sum(dim=(-2, -1)), (v * w).sum(dim=(-2, -1))
    found = torch.where(top == 0, torch.zeros_like(top), top / bottom).sqrt()
    return found * (sizes[0] * sizes[1])[:, 0, 0]


def stable_rank(singular_values: Float[Tensor, " k"]) -> float:
    """Return ‖A‖F²/‖A‖₂², which lies between 1 and rank A; 0 for A = 0."""
    largest = float(singular_values[0])
    return float((singular_values / largest).square().sum()) if largest > 0 else 0.0


@torch.no_grad()
def head_weights(checkpoint: Checkpoint, block: nn.Module) -> Iterator[HeadWeights]:
    """Yield the weights of every query head of a block; a shared key–value head is repeated for each of its heads."""
    family = checkpoint.family
    assert family is not None
    heads, kv_heads = checkpoint.heads, int(getattr(checkpoint.config, "num_key_value_heads", None) or checkpoint.heads)
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
    return (_whole(weight.detach()).to(like) + family.gain_offset)[:, None]


@dataclass(frozen=True, eq=False, repr=False)
class LayerSizes(TensorRecord):
    """Sizes of the circuits of one layer, over its heads.

    - `eta`: η, the largest |entry| of Q, K and V of any head
    - `qk_norm`, `ov_norm`: the largest spectral norms of QKᵀ and V over the heads
    """

    eta: Float[Tensor, ""]
    qk_norm: Float[Tensor, ""]
    ov_norm: Float[Tensor, ""]


def layer_sizes(
    query: Float[Tensor, "heads d k"],
    key: Float[Tensor, "heads d k"],
    value: Float[Tensor, "heads d v"],
    output: Float[Tensor, "heads v d"],
) -> LayerSizes:
    """Compute the sizes of a layer's circuits from the weights of all heads; they stay on the device."""
    heads, d = query.shape[0], query.shape[1]
    together = max(1, _PRODUCT_ENTRIES // (d * d))
    largest = [query.abs().amax(), key.abs().amax()]
    for start in range(0, heads, together):
        largest.append((value[start : start + together] @ output[start : start + together]).abs().amax())
    return LayerSizes(
        eta=torch.stack(largest).amax(),
        qk_norm=largest_singular_value(query, key.mT).amax(),
        ov_norm=largest_singular_value(value, output).amax(),
    )


_PRODUCT_ENTRIES = 2**23
"""Largest number of entries of the products W_V W_O in memory at once (32 MB in float32)."""


@torch.no_grad()
def block_sizes(checkpoint: Checkpoint, block: nn.Module) -> LayerSizes:
    """Compute the sizes of a block's circuits: the largest over its heads of what `circuit_sizes` gives for one."""
    family = checkpoint.family
    assert family is not None
    heads, kv_heads = checkpoint.heads, int(getattr(checkpoint.config, "num_key_value_heads", None) or checkpoint.heads)
    query, key, value, output = _projections(block, family, heads)
    gain = _gain(block, family, query)
    shared = torch.arange(heads, device=query.device) * kv_heads // heads

    def columns(weight: Tensor, count: int) -> Tensor:
        return (gain * weight).reshape(weight.shape[0], count, -1).transpose(0, 1)

    return layer_sizes(
        columns(query, heads),
        columns(key, kv_heads)[shared],
        columns(value, kv_heads)[shared],
        output.reshape(heads, -1, output.shape[1]),
    )


def _whole(weight: Tensor) -> Tensor:
    """Return a weight as one tensor; a sharded weight is gathered from all processes, which must all ask for it."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()
