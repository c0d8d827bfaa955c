"""Rank collapse below the floating-point floor: states split into a common row and a residual with its own scale.

With X = 1yᵀ + R, the scores of row i are β(yᵀ + R_i)W R_jᵀ up to a constant in each row, so

    attention(X) = 1·p(yᵀ + R)V + (P − 1p)RV,   p = softm(β yᵀ W Rᵀ),   P_ij ∝ p_j exp(β R_i W R_jᵀ).

P − 1p is computed without subtracting nearly equal numbers, and R = e^s·R̂ with ‖R̂‖max = 1. A residual of 1e-300 000
therefore keeps its relative accuracy, although the rows of X itself agree to the last bit from 1e-16 on.
See docs/math.md, section 5.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.theory.linalg.enclosures import sign_norm_up
from depthgauge.theory.linalg.norms import Center, center_row, composite_norm, max_norm
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork


@dataclass(frozen=True)
class SplitState:
    """A state X = 1·common + e^log_size · shape with ‖shape‖max = 1; if log_size is −∞, all tokens are equal."""

    common: Float[Tensor, " d"]
    shape: Float[Tensor, "n d"]
    log_size: float

    @classmethod
    def of(cls, X: Float[Tensor, "n d"]) -> "SplitState":
        """Split a state X [n, d] about its mid-range."""
        return _split(torch.zeros_like(X[0]), X, 0.0)

    def joined(self) -> Float[Tensor, "n d"]:
        """Return X [n, d], rounded to floating point."""
        return self.common + math.exp(self.log_size) * self.shape

    def log_residual(self, norm: str, center: Center) -> float:
        """Return log ‖Res(X)‖ in the `max` or `composite` norm."""
        measure = {"max": max_norm, "composite": composite_norm}[norm]
        return self.log_size + _log(float(measure(self.shape - center_row(self.shape, center))))


def _split(common: Tensor, R: Tensor, log_size: float) -> SplitState:
    """Return the state 1·common + e^log_size·R, with the mid-range of R moved into the common row."""
    row = center_row(R)
    size = float(max_norm(R - row))
    common = common + math.exp(log_size) * row[0]
    if size == 0.0 or log_size == -math.inf:
        return SplitState(common, torch.zeros_like(R), -math.inf)
    return SplitState(common, (R - row) / size, log_size + math.log(size))


@torch.no_grad()
def split_step(network: SelfAttentionNetwork, layer: Layer, state: SplitState) -> SplitState:
    """Return layer(X) as a split state."""
    size = math.exp(state.log_size)
    query, key = state.shape @ layer.query, state.shape @ layer.key
    pull = network.scale * size * (state.common[None] @ layer.query) @ key.mT  # β yᵀ W Rᵀ, [h, 1, n]
    gap = _gap(pull, network.scale * query @ key.mT, size * size)
    values = state.shape @ layer.value  # R̂ V, [h, n, d]
    averaged = size * torch.softmax(pull, dim=-1) @ values
    common = (state.common[None] @ layer.value + averaged).sum(0)[0]
    moved = (gap @ values).sum(0)  # (P − 1p)RV = e^{3 log_size}·moved
    if network.skip:
        return _split(state.common + common, state.shape + size * size * moved, state.log_size)
    return _split(common, moved, 3 * state.log_size)


def _gap(pull: Float[Tensor, "h 1 n"], E: Float[Tensor, "h n n"], square: float) -> Float[Tensor, "h n n"]:
    """Return (P − 1p)/square for P_ij ∝ p_j exp(square·E_ij) and p = softm(pull).

    The entries are p_j (e_ij − ē_i)/(1 + square·ē_i) with e = (exp(square·E) − 1)/square and ē = Σ_j p_j e_j. As
    square·E → 0, e → E.
    """
    p, scaled = torch.softmax(pull, dim=-1), square * E
    if float(scaled.abs().amax()) > 1.0:  # no cancellation here, and expm1 might overflow
        return (torch.softmax(pull + scaled, dim=-1) - p) / square
    e = torch.where(scaled.abs() < 1e-8, E * (1 + scaled / 2), torch.expm1(scaled) / max(square, 1e-300))
    mean = (p * e).sum(dim=-1, keepdim=True)
    return p * (e - mean) / (1 + square * mean)


def split_states(network: SelfAttentionNetwork, X: Float[Tensor, "n d"]) -> list[SplitState]:
    """Return the split states X_0, …, X_L of a network without MLPs and LayerNorm, for an input X [n, d]."""
    states = [SplitState.of(X)]
    for layer in network:
        states.append(split_step(network, layer, states[-1]))
    return states


def log_contraction_bounds(network: SelfAttentionNetwork, log_residual: float) -> list[float]:
    """Return log r_ℓ for ℓ = 0 … L, where ‖Res(X_ℓ)‖max ≤ r_ℓ and r_0 = ‖Res(X_0)‖max.

    r_{ℓ+1} = r_ℓ (s + Σ_h tanh(θ_ℓh/2)‖V_ℓh‖col) with s = 1 if the network has skips and 0 otherwise. Every row of
    β Res(X_ℓ) W Res(X_ℓ)ᵀ has range at most θ_ℓh = 2β‖W_ℓh‖_{∞→1} r_ℓ², because |Res(X_ℓ)| ≤ r_ℓ. This iterates the
    corrected Lemma 5.1 (docs/math.md, 2.6 and 5.2).
    """
    bounds = [log_residual]
    for layer in network:
        query, key, value = (w.detach() for w in (layer.query, layer.key, layer.value))
        log_sizes = [_log(float(v)) for v in network.scale * sign_norm_up(query @ key.mT).value]
        columns = [_log(float(v)) for v in value.abs().sum(dim=-2).amax(dim=-1)]
        log_r = bounds[-1]
        parts = [_log_tanh(log_w + 2 * log_r) + log_v for log_w, log_v in zip(log_sizes, columns, strict=True)]
        bounds.append(log_r + _log_sum([0.0, *parts] if network.skip else parts))
    return bounds


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _log_tanh(log_x: float) -> float:
    """Return log tanh(x) from log x. For x < e^−18 it returns log x, and tanh(x) ≤ x keeps the bound valid."""
    return log_x if log_x < -18 else _log(math.tanh(math.exp(min(log_x, 700.0))))


def _log_sum(logs: list[float]) -> float:
    top = max(logs)
    return top if math.isinf(top) else top + math.log(sum(math.exp(x - top) for x in logs))
