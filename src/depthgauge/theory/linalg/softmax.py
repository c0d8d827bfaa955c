"""Softmax, and bounds on it as plain floating-point formulas; certificates use outward-rounded versions of them."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

LINEAR_REMAINDER = 1.0 / (12.0 * math.sqrt(3.0))
"""ρ = 1/(12√3): TV(softm(s), (1 + s − s̄)/n) ≤ ρθ² with θ = range(s) and s̄ the mean of s. The constant is sharp."""


def softm(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return softm(x) = exp(x)/α(x) along the last dimension, computed without overflow.

    >>> softm(torch.tensor([1000.0, 1000.0])).tolist()
    [0.5, 0.5]
    """
    return torch.softmax(x, dim=-1)


def total_variation(p: Float[Tensor, "*batch n"], q: Float[Tensor, "*#batch n"]) -> Float[Tensor, "*batch"]:
    """Return the total variation distance TV(p, q) = ½ Σ_j |p_j − q_j|."""
    return (p - q).abs().sum(dim=-1) / 2


def contraction_bound(theta: Float[Tensor, "*batch"], v_col: Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch"]:
    """Return tanh(θ/2) · ‖V‖col, the bound on ‖Res(attention(X))‖max / ‖Res(X)‖max.

    θ bounds the row ranges of E = β Res(X) W Res(X)ᵀ. This is Lemma 5.1 of paper A with a correct constant: the
    printed bound (e^θ − 1)‖V‖max fails for every d ≥ 3. Two tokens X = ±1ᵀ and constant Q, K, V attain the bound for
    every d.
    """
    return torch.tanh(theta / 2) * v_col
