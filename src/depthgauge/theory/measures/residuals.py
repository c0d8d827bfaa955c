"""The size of the residual: the distance of a state from equal tokens, in three norms and about two centers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.results.network_subject import Residual, ResidualNorms, ResidualSize
from depthgauge.results.record import finite
from depthgauge.theory.linalg.norms import CENTERS, Center, composite_norm, frobenius_norm, max_norm, residual

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
