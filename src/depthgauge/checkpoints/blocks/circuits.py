"""Sizes of the query–key and value–output circuits of every head, from the weights alone.

A head computes scores β x Q Kᵀ yᵀ for tokens x, y (row vectors) with Q, K `[d, k]`, and writes x V with V = W_V W_O
`[d, d]`. The gain of the norm before attention is included in Q, K and V. Rotary embeddings rotate Q and K by an angle
that depends on the distance of two tokens; the sizes are those at distance 0. Biases, and norms of query and key inside
a head (Qwen 3, Gemma 3), are left out.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.base.array_record import ArrayRecord
from depthgauge.checkpoints.weights.families import Family, Separate
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.results.gauge_record import RegimeDistance
from depthgauge.theory.linalg.norms import entry_sum_norm
from depthgauge.theory.measures.printed import log_C, log_epsilon, log_final_bound
from depthgauge.theory.measures.quantities import weight_sizes
from depthgauge.theory.network.network import Layer


@dataclass(frozen=True, eq=False, repr=False)
class HeadWeights(ArrayRecord):
    """The weights of one head: Q, K, W_V, W_O, and β, the factor of the scores."""

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


_SQUARINGS = 10


def largest_from_grams(a: Gram, b: Gram) -> Float[Tensor, "*heads"]:
    """Return ‖AB‖₂ per head from the Gram matrices of the columns of A and of the rows of B.

    It needs products of small matrices only, which is fast on a GPU. The eigenvalues of C = (AᵀA)(BBᵀ) are the squares
    of the singular values of AB. A column of C^(2^s), s: `_SQUARINGS`, is close to the leading eigenvector v, and its
    Rayleigh quotient in the inner product of BBᵀ,

        λ = (BBᵀv)ᵀ AᵀA (BBᵀv) / vᵀ BBᵀ v,

    is at most ‖AB‖₂² and smaller by a relative error of about log(k)/2^(s+1) at most. NaN if an entry is not finite.
    """
    tiny = torch.finfo(a.matrix.dtype).tiny
    power = a.matrix @ b.matrix
    for _ in range(_SQUARINGS):
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
    query, key, value, output = projections(block, family, heads)
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


def projections(block: nn.Module, family: Family, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, key, value `[d, width]` and output `[width, d]`, with heads in consecutive columns (rows)."""
    paths = family.projections
    assert paths is not None
    assert family.out is not None
    output = _matrix(block.get_submodule(family.out))
    if isinstance(paths, Separate):
        query, key, value = (_matrix(block.get_submodule(path)) for path in (paths.query, paths.key, paths.value))
        return query, key, value, output
    fused = _matrix(block.get_submodule(paths.all))
    if paths.order == "thirds":  # the columns are q|k|v
        query, key, value = fused.chunk(3, dim=1)
    else:  # the columns are q|k|v of each head
        d, width = fused.shape
        query, key, value = fused.reshape(d, heads, 3, -1).permute(2, 0, 1, 3).reshape(3, d, width // 3)
    return query, key, value, output


def _matrix(module: Any) -> Tensor:
    """Return W of the map x ↦ xW; `nn.Linear` stores Wᵀ, transformers' `Conv1D` stores W.

    W has single precision, or double precision if the weight has it, so that it is not rounded.
    """
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


def layer_sizes(layers: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> LayerSizes:
    """Compute the sizes of the circuits of layers; they stay on the device of the first layer.

    The weights of some layers are reduced to Gram matrices before those of the next ones are read.

    Args:
        layers: for some layers at a time Q `[layers, heads, d, k]`, K `[layers, kv_heads, d, k]`, W_V
            `[layers, kv_heads, d, v]` and W_O `[layers, heads, v, d]`. A shared key–value head belongs to
            heads/kv_heads consecutive heads.
    """
    eta, qk, ov = [], list[tuple[Gram, Gram]](), list[tuple[Gram, Gram]]()
    for query, key, value, output in layers:
        groups, d = query.shape[1] // key.shape[1], query.shape[2]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        q, k = gram(query), gram(key)
        values, outputs, together = value.flatten(0, 1), output.flatten(0, 1), max(1, _PRODUCT_ENTRIES // (d * d))
        products = [
            _largest_entry(values[h : h + together] @ outputs[h : h + together])
            for h in range(0, len(values), together)
        ]
        largest = torch.stack([q.largest, k.largest, torch.cat(products).reshape(q.largest.shape)])
        eta.append(largest.amax(dim=(0, 2)))
        qk.append((q, k))
        ov.append((gram(value), gram(output.mT)))
    device = eta[0].device

    def norms(pairs: list[tuple[Gram, Gram]]) -> Float[Tensor, " layers"]:
        left, right = (
            Gram(*(torch.cat([getattr(one, name).to(device) for one in side]) for name in ("matrix", "largest")))
            for side in zip(*pairs, strict=True)
        )
        return largest_from_grams(left, right).amax(dim=1)

    return LayerSizes(torch.cat([one.to(device) for one in eta]), norms(qk), norms(ov))


_PRODUCT_ENTRIES = 2**23
"""Largest number of entries of the products W_V W_O in memory at once (32 MB in float32)."""
_WEIGHT_ENTRIES = 2**21
"""Largest number of entries of the query weights of the layers that are reduced together (8 MB in float32)."""


@torch.no_grad()
def block_sizes(checkpoint: Checkpoint, blocks: Sequence[nn.Module]) -> LayerSizes:
    """Compute the sizes of the circuits of blocks: the largest over the heads of what `circuit_sizes` gives for one."""
    family, heads, kv_heads = checkpoint.family, checkpoint.heads, checkpoint.kv_heads
    assert family is not None

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        waiting = list[tuple[Tensor, ...]]()
        for block in blocks:
            read = projections(block, family, heads)
            weights = (*read, _gain(block, family, read[0]))
            pairs = zip(waiting[0] if waiting else weights, weights, strict=True)
            alike = all(a.shape == b.shape and a.device == b.device for a, b in pairs)
            if waiting and (not alike or (len(waiting) + 1) * weights[0].numel() > _WEIGHT_ENTRIES):
                yield by_head(waiting)
                waiting = []
            waiting.append(weights)
        yield by_head(waiting)

    def by_head(some: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, key, value, output, gain = (torch.stack(kind) for kind in zip(*some, strict=True))
        read = ((query, heads), (key, kv_heads), (value, kv_heads))
        q, k, v = ((gain * w).reshape(*w.shape[:2], count, -1).transpose(1, 2) for w, count in read)
        return q, k, v, output.reshape(len(output), heads, -1, output.shape[-1])

    return layer_sizes(batches())


def _whole(weight: Tensor) -> Tensor:
    """Return a weight as one tensor; a sharded weight is gathered from all processes, which must all ask for it."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


# --- Distance of a model from the small-weight regime, in orders of magnitude ----------------------------------------
# Both bounds concern the attention layers with their skip connections, on tokens x with |x_i| ≤ 1. Norms scale tokens
# to about that size. MLPs are left out, so the distance of the whole model can only be larger.

TOLERANCE = 0.1
_LEAST = -300.0


def regime(layers: Sequence[Sequence[CircuitSizes]]) -> RegimeDistance:
    """Compute the distance of a model from the sizes of every head of every layer.

    `printed_*` is the explicit bound of Theorem D.1 with its conditions; `corrected_*` is `corrected_bound`.
    """
    eta = max(head.eta for heads in layers for head in heads)
    heads = max(len(heads) for heads in layers)
    printed = _orders(lambda scale: _printed_holds(scale * eta, heads, len(layers)))
    corrected = _orders(lambda scale: corrected_bound(layers, scale) <= TOLERANCE)
    return RegimeDistance(
        tolerance=TOLERANCE,
        eta=eta,
        printed_orders=printed,
        printed_eta=eta * 10**-printed,
        corrected_orders=corrected,
        corrected_eta=eta * 10**-corrected,
    )


def corrected_bound(layers: Sequence[Sequence[CircuitSizes]], scale: float) -> float:
    """Bound ‖S(X) − S'(X)‖max over ‖X‖max ≤ 1, where S' is the mean-field layer and Q, K, V are multiplied by `scale`.

    This is the certificate of docs/math.md with vectors replaced by their largest entries and matrices by column norms:

        own_ℓ = Σ_{k<ℓ,h} G_kh v_kh,   err_ℓ = Σ_{k<ℓ,h} G_kh v_kh Π_{k<j<ℓ}(1 + Σ_h v_jh),   v = ‖V‖col
        θ_ℓh = 2w_ℓh (Π_{j<ℓ}(1 + Σ_h v_jh) + err_ℓ)(1 + own_ℓ),   G_ℓh = 2 tanh(θ_ℓh/4)(1 + own_ℓ).
    """
    own = error = 0.0
    growth = 1.0
    for heads in layers:
        state, spread = growth + error, 1.0 + own
        step = 0.0
        for head in heads:
            theta = 2.0 * scale**2 * head.score_norm * state * spread
            step += 2.0 * math.tanh(theta / 4.0) * spread * scale * head.value_col
        value = 1.0 + scale * sum(head.value_col for head in heads)
        own, error, growth = own + step, error * value + step, growth * value
    return error


def _printed_holds(eta: float, heads: int, layers: int) -> bool:
    """Return whether the conditions of Theorem D.1 hold for ‖X‖max ≤ 1 and its bound is at most `TOLERANCE`."""
    conditions = (
        eta <= 1.0,
        math.log(2.0 * heads) + log_epsilon(eta, 1.0, heads, layers) < math.log(0.5),
        log_C(eta, 1.0, heads, layers) < math.log(0.5),
    )
    return all(conditions) and log_final_bound(eta, 1.0, heads, layers) <= math.log(TOLERANCE)


def _orders(holds: Callable[[float], bool]) -> float:
    """Return the smallest s ≥ 0 for which `holds(10^−s)` is true, to three decimals."""
    if holds(1.0):
        return 0.0
    low, high = _LEAST, 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(10.0**middle) else (low, middle)
    return round(-low, 3)
