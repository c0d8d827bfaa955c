"""The measured quantities: the size of the residual of a state, and measures of attention heads.

The residual is the distance of a state from equal tokens, in three norms and about two centers. A head has a distance
from uniform attention, a contraction of the tokens, and the sizes of its weights. Scores are computed in blocks of
rows, so no n×n matrix is stored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.results.gauge_record import Residual, ResidualNorms, ResidualSize
from depthgauge.results.record import finite
from depthgauge.theory.linalg.norms import (
    CENTERS,
    Center,
    column_norm,
    composite_norm,
    contraction_bound,
    entry_sum_norm,
    frobenius_norm,
    max_norm,
    residual,
    softm,
    total_variation,
)
from depthgauge.theory.network.network import Layer, LayerTrace

NORMS: Mapping[str, Callable[[Tensor], Tensor]]
NORMS = {"max": max_norm, "frobenius": frobenius_norm, "composite": composite_norm}


@dataclass(frozen=True, eq=False, repr=False)
class SampleResiduals(ArrayRecord):
    """The residual of a state in one norm, per sample: ‖Res(X)‖, and ‖Res(X)‖/‖X‖, which is NaN if X = 0."""

    value: Float[Tensor, " samples"]
    ratio: Float[Tensor, " samples"]


Residuals = Mapping[str, Mapping[str, SampleResiduals]]
"""Center → norm → residual per sample."""


def residual_size(X: Float[Tensor, "samples n d"], norm: str, center: Center) -> SampleResiduals:
    """Return ‖Res(X)‖ and ‖Res(X)‖/‖X‖ in one norm.

    A ratio of 0 means that all tokens are equal. A ratio near 1 means that the tokens have almost no common part. The
    ratio is at most 1 if the center minimises the norm of the residual (`max` with `midrange`, `frobenius` with
    `mean`). With other combinations it can be slightly larger than 1.
    """
    measure = NORMS[norm]
    value = measure(residual(X, center))
    return SampleResiduals(value, value / measure(X))


def residual_sizes(X: Float[Tensor, "samples n d"]) -> Residuals:
    """Return the residual sizes for all centers and norms."""
    return {center: {norm: residual_size(X, norm, center) for norm in NORMS} for center in CENTERS}


def residual_record(state: Residuals) -> Residual:
    """Return the record of one state: mean and spread over the samples."""

    def size(of: SampleResiduals) -> ResidualSize:
        spread = of.ratio.std(correction=0)
        return ResidualSize(value=finite(of.value.mean()), ratio=finite(of.ratio.mean()), ratio_std=finite(spread))

    sizes: Any = {center: {norm: size(of) for norm, of in norms.items()} for center, norms in state.items()}
    return Residual(**{center: ResidualNorms(**norms) for center, norms in sizes.items()})


@dataclass(frozen=True, eq=False, repr=False)
class HeadMeasures(ArrayRecord):
    """Measures of the heads of one layer, per sample and head.

    In causal networks, the visible tokens of row i are the tokens 0 to i.

    Attributes:
        score_range: θ, the largest row range of the scores β X W Xᵀ, where W = Q Kᵀ.
        balance: The largest row range of E = β Res(X) W Res(X)ᵀ.
        tv_mean: The mean over rows of the total variation distance between the attention row and the uniform
            distribution over the visible tokens.
        tv_max: The largest of these distances.
        entropy: The mean over rows of −Σ_j p_j log p_j, in nats.
        contraction: ‖Res(attention_h(X))‖max / ‖Res(X)‖max. NaN if all tokens are equal.
        contraction_bound: tanh(balance/2) · ‖V‖col, an upper bound on `contraction`. NaN in causal networks, where the
            rows of the attention have different supports and the bound does not apply.
    """

    score_range: Float[Tensor, "samples heads"]
    balance: Float[Tensor, "samples heads"]
    tv_mean: Float[Tensor, "samples heads"]
    tv_max: Float[Tensor, "samples heads"]
    entropy: Float[Tensor, "samples heads"]
    contraction: Float[Tensor, "samples heads"]
    contraction_bound: Float[Tensor, "samples heads"]


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that each row of a block of attention can attend to, equal for all heads.

    Attributes:
        hidden: Whether a row cannot attend to a key; None if every row attends to every key.
        uniform: The weights of uniform attention over the visible keys.
        first: The index of the first visible key.
        counted: Whether the row enters the measures: it sees at least one key and is not padding.
        log_count: The logarithm of the number of visible keys, which is the entropy of uniform attention.
    """

    hidden: Bool[Tensor, "#batch 1 rows keys"] | None
    uniform: Float[Tensor, "#batch 1 rows keys"]
    first: Int[Tensor, "#batch 1 rows 1"]
    counted: Bool[Tensor, "#batch 1 rows"]
    log_count: Float[Tensor, "#batch 1 rows"]

    @classmethod
    def of(
        cls,
        visible: Bool[Tensor, "#batch 1 rows keys"],
        dtype: torch.dtype,
        counted: Bool[Tensor, "#batch rows"] | None = None,
        masked: bool = True,
    ) -> "VisibleKeys":
        """Describe the visible keys of a block of scores; the weights have at least single precision.

        `counted` are the rows that are not padding; None means all. `masked` is False if all of `visible` is true.
        """
        count = visible.sum(dim=-1)
        some = count.clamp(min=1).to(torch.promote_types(dtype, torch.float32))
        enters = count > 0 if counted is None else (count > 0) & counted[:, None]
        first = visible.to(torch.uint8).argmax(dim=-1)[..., None]
        return cls(~visible if masked else None, visible / some[..., None], first, enters, some.log())


@dataclass(frozen=True)
class RowMeasures:
    """Measures of each row p of the attention matrices of every head, over the visible keys.

    `score_range` is max − min of the scores, `tv` is TV(p, uniform), `first_mass` is the attention on the first key.
    """

    score_range: Float[Tensor, "*batch heads rows"]
    tv: Float[Tensor, "*batch heads rows"]
    first_mass: Float[Tensor, "*batch heads rows"]
    entropy: Float[Tensor, "*batch heads rows"]


def row_measures(
    scores: Float[Tensor, "*batch heads rows keys"], p: Float[Tensor, "*batch heads rows keys"], keys: VisibleKeys
) -> RowMeasures:
    """Measure a block of rows of the attention p = softm(scores), for networks, checkpoints and training runs alike.

    p and the uniform weights are 0 at hidden keys, which therefore add nothing to the distance and to the entropy.
    """
    low = high = scores
    if keys.hidden is not None:
        low, high = scores.masked_fill(keys.hidden, torch.inf), scores.masked_fill(keys.hidden, -torch.inf)
    tv = total_variation(p, keys.uniform.expand(p.shape))
    first = p.gather(-1, keys.first.expand(*p.shape[:-1], 1))[..., 0]
    return RowMeasures(high.amax(dim=-1) - low.amin(dim=-1), tv, first.to(tv.dtype), entropy(p).to(tv.dtype))


def entropy(p: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Return −Σ_j p_j log p_j in nats, with 0 log 0 = 0."""
    found: Tensor = torch.special.entr(p).sum(dim=-1)
    return found


def balance(trace: LayerTrace, layer: Layer) -> Float[Tensor, "samples heads"]:
    """Return the largest row range of E = β Res(X) W Res(X)ᵀ.

    The row ranges of β Res(X) W Xᵀ are the same, because subtracting 1yᵀ from the keys changes row i by a constant.
    """
    centred_query = residual(trace.attention_input).unsqueeze(-3) @ layer.query
    ranges = [block.row_ranges().amax(dim=-1) for block in trace.score_blocks(centred_query)]
    return torch.stack(ranges).amax(dim=0)


def measure_heads(trace: LayerTrace, layer: Layer) -> HeadMeasures:
    """Compute all head measures of one layer, for states of shape [samples, n, d]."""
    x = trace.attention_input
    n, whole = x.shape[-2], torch.ones(1, x.shape[-2], dtype=torch.bool, device=x.device)
    blocks = []
    for block in trace.score_blocks():
        visible = whole.expand(block.stop - block.start, n) if block.visible is None else block.visible
        p = softm(block.scores)
        rows = row_measures(block.scores, p, VisibleKeys.of(visible[None, None], p.dtype, masked=trace.causal))
        out = (p @ x.unsqueeze(-3)) @ layer.value
        largest = (rows.score_range.amax(dim=-1), rows.tv.amax(dim=-1))
        blocks.append((*largest, rows.tv.sum(dim=-1), rows.entropy.sum(dim=-1), out.amin(dim=-2), out.amax(dim=-2)))
    parts = (torch.stack(part) for part in zip(*blocks, strict=True))
    score_range, tv_max, tv_sum, entropy_sum, low, high = parts
    theta_balance = balance(trace, layer)
    # ‖Res‖max about the mid-range is half the largest column range.
    widest = (high.amax(dim=0) - low.amin(dim=0)).amax(dim=-1)
    bound = contraction_bound(theta_balance, column_norm(layer.value))
    return HeadMeasures(
        score_range=score_range.amax(dim=0),
        balance=theta_balance,
        tv_mean=tv_sum.sum(dim=0) / n,
        tv_max=tv_max.amax(dim=0),
        entropy=entropy_sum.sum(dim=0) / n,
        contraction=widest / 2 / max_norm(residual(x))[:, None],
        contraction_bound=torch.full_like(bound, float("nan")) if trace.causal or layer.has_attention_bias else bound,
    )


@dataclass(frozen=True, eq=False, repr=False)
class WeightSizes(ArrayRecord):
    """Norms of the weights of one layer, per head, as used in the theorems.

    Attributes:
        eta: η, the largest absolute entry of Q, K and V (paper A).
        value_col: ‖V‖col, the largest factor by which the values can grow.
        l1: max(‖Q‖₁, ‖K‖₁, ‖V‖₁), sums of all absolute entries (β in equation 1 of paper A).
        dong_beta: ‖QKᵀ‖col · ‖V‖₁,∞, the product in the rate of Dong et al. (2021).
    """

    eta: Float[Tensor, " heads"]
    value_col: Float[Tensor, " heads"]
    l1: Float[Tensor, " heads"]
    dong_beta: Float[Tensor, " heads"]


def weight_sizes(layer: Layer) -> WeightSizes:
    """Compute the sizes of the weights of one layer."""
    weights = [w.detach() for w in (layer.query, layer.key, layer.value)]
    query, key, value = weights
    return WeightSizes(
        eta=torch.stack([max_norm(w) for w in weights]).amax(dim=0),
        value_col=column_norm(value),
        l1=torch.stack([entry_sum_norm(w) for w in weights]).amax(dim=0),
        dong_beta=column_norm(query @ key.mT) * composite_norm(value),
    )
