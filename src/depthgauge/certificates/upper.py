"""The proved side of a certificate: one number, how it was obtained, and the proof."""

import math
import time
from dataclasses import dataclass

from torch import Tensor

from depthgauge._format import number
from depthgauge.certificates.attack import NO_HINTS, Hints
from depthgauge.certificates.box import BoxBounds
from depthgauge.certificates.compared_networks import Comparison
from depthgauge.certificates.deletion import Deletion, deletion_bound
from depthgauge.certificates.proof import ExpansionProof, ball_proof, box_proof

BALL_AS_BOX = "tokens of bounded length were taken as a box of the same radius"


@dataclass(frozen=True, eq=False, repr=False)
class UpperBound:
    """A proved bound: sup ‖S(X) − S'(X)‖max ≤ upper.

    Attributes:
        upper: the bound, rounding errors included; None if no finite bound was found.
        coordinate: the output coordinate with the largest bound; None without a finite bound.
        methods: how the bound was obtained: "plain", "joint", "squares" or "deletion".
        notes: remarks, for example that the network was too wide for the joint bound.
        share: share[k][h] is the part of head h of layer k in the bound at `coordinate`; all parts add up to 1.
        lost_at: the layer at which the bounds overflowed; None if the bound is finite.
        seconds: the time the proof took.
        proof: the data that `verify` needs to prove the bound again.
    """

    upper: float | None
    coordinate: int | None
    methods: tuple[str, ...]
    notes: tuple[str, ...]
    share: tuple[tuple[float, ...], ...]
    lost_at: int | None
    seconds: float
    proof: ExpansionProof | Deletion | None

    def __repr__(self) -> str:
        return f"UpperBound({number(self.upper)}, {' + '.join(self.methods)})"

    def hints(self) -> Hints:
        """Return starting points for the attack."""
        return self.proof.hints() if isinstance(self.proof, ExpansionProof) else NO_HINTS


def prove_upper(comparison: Comparison, effort: str, bounds: BoxBounds | None = None) -> UpperBound:
    """Prove an upper bound with the methods that apply to the two networks.

    Args:
        comparison: the two networks and the set of inputs.
        effort: "default" or "high".
        bounds: the layer bounds of the network from an earlier proof on the same box.
    """
    begun = time.perf_counter()
    notes: tuple[str, ...] = ()
    proof: ExpansionProof | Deletion
    if not comparison.expands:
        # ‖x_i‖₂ ≤ r implies |x_ic| ≤ r, so the bound on the box of radius r covers the ball.
        notes = (BALL_AS_BOX,) if comparison.inputs.kind == "ball" else ()
        proof = deletion_bound(comparison.network, comparison.surrogate, comparison.inputs.radius)
    elif comparison.inputs.kind == "box":
        proof = box_proof(comparison, effort, bounds)
        notes = proof.notes
    else:
        proof = ball_proof(comparison, effort)
        notes = proof.notes
    coordinate = proof.coordinate
    value = float(proof.value[coordinate])
    finite = math.isfinite(value)
    return UpperBound(
        upper=value if finite else None,
        coordinate=coordinate if finite else None,
        methods=proof.methods,
        notes=notes,
        share=_shares([part[:, coordinate] for part in proof.head_parts]),
        lost_at=None if finite else proof.lost_at,
        seconds=time.perf_counter() - begun,
        proof=proof,
    )


def _shares(parts: list[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Divide the parts by their sum; return zeros if the sum is zero or not finite."""
    whole = float(sum(part.sum() for part in parts))
    usable = math.isfinite(whole) and whole > 0
    return tuple(tuple(float(value) / whole if usable else 0.0 for value in part) for part in parts)
