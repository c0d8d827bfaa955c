"""Verified evaluation of a network at an input, with every operation in arb interval arithmetic (python-flint)."""

import torch
from flint import arb, arb_mat
from jaxtyping import Float
from torch import Tensor

from depthgauge.theory.linalg.bound_arithmetic import float_below, precision
from depthgauge.theory.network.network import NORM_EPSILON, Layer, SelfAttentionNetwork

PRECISION, MOST_PRECISION = 160, 5120
"""Bits of precision at the start and at most; deep networks with large weights magnify the intervals."""
ENOUGH = 1e-9
"""The relative width of the result at which the precision is no longer increased."""


def to_arb(matrix: Float[Tensor, "n d"]) -> arb_mat:
    """Convert a matrix of floating-point numbers to arb without rounding."""
    return arb_mat([[arb(value) for value in row] for row in matrix.detach().cpu().to(torch.float64).tolist()])


def distinct_tokens(x: Float[Tensor, "n d"], is_ordered: bool) -> tuple[Tensor, list[int]]:
    """Return the distinct rows of x and their multiplicities; all rows if their order matters."""
    if is_ordered:
        return x, [1] * len(x)
    rows, counts = torch.unique(x, dim=0, return_counts=True)
    return rows, counts.tolist()


def difference_below(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, x: Float[Tensor, "n d"]) -> float:
    """Return a number in [0, ‖S(X) − S'(X)‖max], close to the upper end: a proved lower bound at the input X = x.

    For an entry g of S(X) − S'(X) and its interval [a, b], |g| ≥ a if a > 0 and |g| ≥ −b if b < 0. The precision is
    doubled until the widest interval is at most `ENOUGH` times the result.
    """
    is_ordered = any(net.causal or net.length is not None for net in (network, surrogate))
    rows, counts = distinct_tokens(x, is_ordered)
    bits, best = PRECISION, 0.0
    while True:
        with precision(bits):
            start = to_arb(rows)
            gap = (_run(network, start, counts) - _run(surrogate, start, counts)).entries()
            best = max([best, *(float_below(abs(entry)) for entry in gap if abs(entry) > 0)])
            widest = max(float(entry.rad()) for entry in gap)
        if widest <= ENOUGH * best or widest == 0.0 or bits >= MOST_PRECISION:
            return best
        bits *= 2


def _run(network: SelfAttentionNetwork, x: arb_mat, counts: list[int]) -> arb_mat:
    for layer in network:
        x = _layer(network, layer, x, counts)
    return x


def _layer(network: SelfAttentionNetwork, layer: Layer, x: arb_mat, counts: list[int]) -> arb_mat:
    """Compute X_{ℓ+1} = layer_ℓ(X_ℓ), as `SelfAttentionNetwork.step` does."""
    before, after = network.norm_place == "before", network.norm_place == "after"
    read = _normalized(network, layer, x, 0) if before else x
    y = _attention(network, layer, read, counts)
    y = x + y if network.skip else y
    y = _normalized(network, layer, y, 0) if after else y
    if layer.mlp is None:
        return y
    z = _mlp(network, layer, _normalized(network, layer, y, 1) if before else y)
    z = y + z if network.mlp_skip else z
    return _normalized(network, layer, z, 1) if after else z


def _attention(network: SelfAttentionNetwork, layer: Layer, x: arb_mat, counts: list[int]) -> arb_mat:
    """Compute Σ_h P_h X V_h, every distinct token weighted by its multiplicity."""
    total = arb_mat(x.nrows(), x.ncols())
    for h in range(layer.heads):
        queries, keys = x * to_arb(layer.query[h]), x * to_arb(layer.key[h])
        if layer.query_bias is not None:
            queries = _add_row(queries, layer.query_bias[h])
        scores = queries * keys.transpose() * arb(network.scale)
        if layer.position_bias is not None:
            scores = scores + to_arb(layer.position_bias[h, : x.nrows(), : x.nrows()])
        weights = _softmax_rows(scores, counts, network.causal)
        total = total + weights * x * to_arb(layer.value[h])
    return total if layer.output_bias is None else _add_row(total, layer.output_bias)


def _softmax_rows(scores: arb_mat, counts: list[int], causal: bool) -> arb_mat:
    rows = []
    for i, row in enumerate(scores.tolist()):
        seen = row[: i + 1] if causal else row
        shift = max(float(s.mid()) for s in seen)
        masses = [count * (s - arb(shift)).exp() for s, count in zip(seen, counts, strict=False)]
        whole = sum(masses, arb(0))
        rows.append([mass / whole for mass in masses] + [arb(0)] * (len(row) - len(seen)))
    return arb_mat(rows)


def _mlp(network: SelfAttentionNetwork, layer: Layer, x: arb_mat) -> arb_mat:
    mlp = layer.mlp
    assert mlp is not None
    hidden = _add_row(x * to_arb(mlp.w_in), mlp.b_in)
    gelu, root = network.activation == "gelu", arb(2).sqrt()
    hidden = arb_mat(
        [[z * (1 + (z / root).erf()) / 2 if gelu else z.max(arb(0)) for z in row] for row in hidden.tolist()]
    )
    return _add_row(hidden * to_arb(mlp.w_out), mlp.b_out)


def _add_row(x: arb_mat, row: Tensor) -> arb_mat:
    values = [arb(value) for value in row.detach().cpu().to(torch.float64).tolist()]
    return arb_mat([[entry + value for entry, value in zip(entries, values, strict=True)] for entries in x.tolist()])


def _normalized(network: SelfAttentionNetwork, layer: Layer, x: arb_mat, sublayer: int) -> arb_mat:
    assert layer.norm_weight is not None
    assert layer.norm_bias is not None
    weight, bias = layer.norm_weight[sublayer].tolist(), layer.norm_bias[sublayer].tolist()
    rows = []
    for row in x.tolist():
        mean = sum(row, arb(0)) / len(row) if network.norm_centers else arb(0)
        variance = sum(((entry - mean) ** 2 for entry in row), arb(0)) / len(row)
        scale = (variance + arb(NORM_EPSILON)).sqrt()
        rows.append([(e - mean) / scale * arb(w) + arb(b) for e, w, b in zip(row, weight, bias, strict=True)])
    return arb_mat(rows)
