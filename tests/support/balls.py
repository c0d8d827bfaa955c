"""The real numbers to compare with: python-flint's balls, at 200 bits."""

import functools
import math
from collections.abc import Callable
from typing import Any

from flint import acb_mat, arb, arb_mat, ctx
from torch import Tensor

BITS = 200


def at_200_bits(f: Callable[[], Any]) -> Any:
    """Evaluate with 200 bits, whatever the precision was."""
    before, ctx.prec = ctx.prec, BITS
    try:
        return f()
    finally:
        ctx.prec = before


def is_upper(bound: float, exact: arb) -> bool:
    """Whether `bound` is certainly at least the real number in the ball; NaN proves nothing and so is no bound."""
    return bound == math.inf or bool(at_200_bits(lambda: arb(bound) >= exact))


def is_lower(bound: float, exact: arb) -> bool:
    """Whether `bound` is certainly at most the real number in the ball."""
    return bound == -math.inf or bool(at_200_bits(lambda: arb(bound) <= exact))


def to_arb_mat(A: Tensor) -> arb_mat:
    """A float64 matrix as an exact matrix of balls."""
    return arb_mat([[arb(x) for x in row] for row in A.tolist()])


def largest_eigenvalue(S: arb_mat) -> arb:
    """A ball that holds λ_max of a symmetric matrix, however clustered: flint's own enclosure of all eigenvalues."""
    return at_200_bits(lambda: functools.reduce(arb.max, [root.real for root in acb_mat(S).eig(multiple=True)]))


def spectral_norm(M: Tensor) -> arb:
    """A ball that holds ‖M‖₂ = √λ_max(MᵀM)."""

    def norm() -> arb:
        exact = to_arb_mat(M)
        gram = exact.transpose() * exact if M.shape[0] >= M.shape[1] else exact * exact.transpose()
        return arb.max(largest_eigenvalue(gram), arb(0)).sqrt()

    return at_200_bits(norm)
