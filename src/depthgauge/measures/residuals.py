"""How far a state is from all tokens being equal: the residual, in three norms and about two centres."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from depthgauge.linalg.norms import CENTERS, Center, composite_norm, frobenius_norm, max_norm, residual

NORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "max": max_norm,
    "frobenius": frobenius_norm,
    "composite": composite_norm,
}


@dataclass(frozen=True)
class ResidualSize:
    """‖Res(X)‖ and its ratio to ‖X‖, per sample; the ratio of a zero state is not a number."""

    value: Float[Tensor, " samples"]
    ratio: Float[Tensor, " samples"]


Residuals = Mapping[str, Mapping[str, ResidualSize]]
"""Centre → norm → size."""


def residual_size(X: Float[Tensor, "samples n d"], norm: str, center: Center) -> ResidualSize:
    """‖Res(X)‖ and ‖Res(X)‖/‖X‖ in one norm; a ratio of 0 says that all tokens are equal.

    About 1 says that they share next to nothing. The ratio cannot exceed 1 where the centre is the best one for the
    norm (`max` about the mid-range, `frobenius` about the mean), and can exceed it slightly elsewhere.
    """
    measure = NORMS[norm]
    value = measure(residual(X, center))
    return ResidualSize(value, value / measure(X))


def residual_sizes(X: Float[Tensor, "samples n d"]) -> Residuals:
    """Every norm and centre at once."""
    return {center: {norm: residual_size(X, norm, center) for norm in NORMS} for center in CENTERS}
