"""A method of proof: one function over an arithmetic that bounds |S − S'|, run once to prove and once to check."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import InputError, VerificationError, require_count
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.attack import Hints
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.linalg.arb_arithmetic import ArbArithmetic, ArbArray
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Outward, Upper, precision
from depthgauge.theory.linalg.rounding import no_bound

Vector = Float[Tensor, " d"]
PartsByLayer = tuple[Float[Tensor, "_ d"], ...]
"""One vector per head for each layer; the number of heads may differ between layers."""
BITS = 200
"""The precision of a check, which is tried once more with twice as many bits."""
HINTED = 8
"""Coordinates whose leading terms start the attack."""


class Bound(NamedTuple):
    """What a method finds in one arithmetic.

    Attributes:
        value: the bound on |S − S'| per output coordinate.
        parts: for each layer of S, the bound on the contribution of each of its heads alone, [heads, d].
        names: what the proof is called at the coordinate with the largest bound.
        notes: remarks on the bound.
    """

    value: Upper
    parts: Sequence[Upper]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Method(ABC):
    """A proof of sup |S(X) − S'(X)| ≤ `value` per output coordinate, +∞ where there is no bound.

    `value`, `parts`, `names` and `notes` are those of `Bound`, in float64. `T`, the leading term, and `drift`, the
    linear part of S − S' in mean(X), start the attack where a proof has them.
    """

    T: Rank1Sum | None = None
    drift: Float[Tensor, "d d"] | None = None

    def __init__(self, comparison: Comparison, progress: Step = silent) -> None:
        self.arithmetic, self.progress = Outward(), progress
        found = self.bound(comparison, self.arithmetic)
        self.progress = silent  # a certificate can be pickled
        self.value: Vector = no_bound(found.value.floats())
        self.parts: PartsByLayer = tuple(part.floats() for part in found.parts)
        self.names, self.notes = found.names, found.notes

    @abstractmethod
    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """Bound |S − S'| in an arithmetic."""

    @property
    def coordinate(self) -> int:
        """The output coordinate with the largest bound."""
        return int(self.value.argmax())

    @property
    def upper(self) -> float | None:
        """The largest bound, or None if it is not finite."""
        value = float(self.value[self.coordinate])
        return value if math.isfinite(value) else None

    @property
    def lost_at(self) -> int:
        """The first layer without a finite bound, or the last layer."""
        finite = [bool(part.isfinite().all()) for part in self.parts]
        return finite.index(False) if False in finite else len(finite) - 1

    @property
    def shares(self) -> tuple[tuple[float, ...], ...]:
        """The parts at the coordinate with the largest bound, divided by their sum; zeros if it is not finite."""
        parts = [part[:, self.coordinate] for part in self.parts]
        whole = float(sum(part.sum() for part in parts))
        usable = math.isfinite(whole) and whole > 0
        return tuple(tuple(float(value) / whole if usable else 0.0 for value in part) for part in parts)

    def hints(self) -> Hints:
        """Return starting points for the attack: T_a of the worst coordinates, and the drift."""
        if self.T is None or not self.T.terms:
            return Hints(drift=self.drift)
        return Hints(self.T.slices(self.value.argsort(descending=True)[:HINTED]), self.drift)

    def verify(self, comparison: Comparison, upper: float | None, bits: int = BITS) -> bool:
        """Prove sup |S − S'| ≤ `upper` again, by the same function in arb; raise VerificationError if that fails.

        A failure is tried once more with twice as many bits, so that it is not due to precision.
        """
        require_count("bits", bits, "the precision of the interval arithmetic", least=64)
        if upper is None or not math.isfinite(upper):
            raise VerificationError("there is no finite upper bound to prove")
        try:
            self._check(comparison, upper, bits)
        except VerificationError:
            self._check(comparison, upper, 2 * bits)
        return True

    def again(self, comparison: Comparison) -> ArbArray:
        """Bound |S − S'| per coordinate in arb, at the precision in force."""
        found = self.bound(comparison, ArbArithmetic(self.arithmetic.record)).value
        assert isinstance(found, ArbArray)
        return found

    def _check(self, comparison: Comparison, upper: float, bits: int) -> None:
        try:
            with precision(bits):
                check_bounds(self.again(comparison), upper)
        except (InputError, ValueError, IndexError) as error:  # of networks to which the method does not apply
            raise VerificationError(f"the bound could not be computed again: {error}") from error


def check_bounds(found: ArbArray, upper: float) -> None:
    """Raise VerificationError unless all bounds are at most `upper`; none is, if it is NaN."""
    for a, value in enumerate(found.top().x):
        if not value <= upper:
            proved = value.str(17, radius=False)
            raise VerificationError(f"output coordinate {a}: {upper} is claimed, but only {proved} is proved")
