"""Measures of attention heads: the distance of the attention from uniform, and the contraction of the tokens.

Scores are computed in blocks of rows, so no n×n matrix is stored.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge._records import ArrayRecord
from depthgauge.linalg.norms import column_norm, max_norm, residual
from depthgauge.linalg.softmax import contraction_bound, softm, total_variation
from depthgauge.network.layer import Layer
from depthgauge.network.trace import LayerTrace, ScoreBlock


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

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the measures."""
        return [field.name for field in fields(cls)]


def uniform_tv(p: Float[Tensor, "samples heads rows n"], block: ScoreBlock) -> Float[Tensor, "samples heads rows"]:
    """Return TV(p_i, uniform) for each attention row p_i, with the uniform distribution over the visible tokens."""
    uniform = 1.0 / block.visible_counts()[:, None]
    if block.visible is None:
        return total_variation(p, uniform.expand(-1, p.shape[-1]))
    return total_variation(p, uniform * block.visible)


def entropy(p: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Return −Σ_j p_j log p_j in nats, with 0 log 0 = 0."""
    return -torch.xlogy(p, p).sum(dim=-1)


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
    score_range, tv_max, tv_sum, entropy_sum, low, high = [], [], [], [], [], []
    for block in trace.score_blocks():
        p = softm(block.scores)
        tv = uniform_tv(p, block)
        out = (p @ x.unsqueeze(-3)) @ layer.value
        score_range.append(block.row_ranges().amax(dim=-1))
        tv_max.append(tv.amax(dim=-1))
        tv_sum.append(tv.sum(dim=-1))
        entropy_sum.append(entropy(p).sum(dim=-1))
        low.append(out.amin(dim=-2))
        high.append(out.amax(dim=-2))
    n = x.shape[-2]
    theta_balance = balance(trace, layer)
    # ‖Res‖max about the mid-range is half the largest column range.
    widest = (torch.stack(high).amax(dim=0) - torch.stack(low).amin(dim=0)).amax(dim=-1)
    bound = contraction_bound(theta_balance, column_norm(layer.value))
    return HeadMeasures(
        score_range=torch.stack(score_range).amax(dim=0),
        balance=theta_balance,
        tv_mean=torch.stack(tv_sum).sum(dim=0) / n,
        tv_max=torch.stack(tv_max).amax(dim=0),
        entropy=torch.stack(entropy_sum).sum(dim=0) / n,
        contraction=widest / 2 / max_norm(residual(x))[:, None],
        contraction_bound=torch.full_like(bound, float("nan")) if trace.causal else bound,
    )
