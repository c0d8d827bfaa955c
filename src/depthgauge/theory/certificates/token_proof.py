"""Upper bounds on |S − S'| over all sequences of tokens (docs/math.md §3.11).

Subtracting the exact expansions of both networks gives, with m = mean(X) in the convex hull of the points,

    S(X) − S'(X) = 1·m·(Z_{0:L} − Z'_{0:L'}) + (terms of the heads of S) − (terms of the heads of S').

`plain` bounds every head alone. `joint` bounds the leading terms of all heads of both networks together, over pairs of
points, and only what is beyond them head by head; heads that occur in both networks cancel in the leading term.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.box import HeadVectors, PartsByLayer, Vector, total
from depthgauge.theory.certificates.causal_bounds import CausalBounds
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.regions import ConvexLead
from depthgauge.theory.certificates.token_bounds import PairLead, TokenBounds, can_pair, largest, read
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.rounding import no_bound, nonnegative_sum_up
from depthgauge.theory.surrogates.expansion import Expansion


class PlainOrJoint:
    """An upper bound on |S − S'| per output coordinate: the smaller of a plain and a joint bound."""

    bounds: TokenBounds | CausalBounds
    plain: Vector
    joint: Vector | None

    @cached_property
    def value(self) -> Vector:
        """The smaller of the plain and the joint bound, per coordinate."""
        found = self.plain if self.joint is None else torch.fmin(self.plain, self.joint)
        return no_bound(found)

    @property
    def coordinate(self) -> int:
        """The output coordinate with the largest bound."""
        return int(self.value.argmax())

    @property
    def is_joint(self) -> bool:
        """Whether the joint bound gives the bound at the worst coordinate."""
        a = self.coordinate
        return self.joint is not None and bool(self.joint[a] < self.plain[a])

    @property
    def lost_at(self) -> int:
        """The first layer whose scores have no finite bound; the last layer if all have one."""
        finite = [bool(layer.theta.isfinite().all()) for layer in self.bounds.layers]
        return finite.index(False) if False in finite else len(finite) - 1


@dataclass(frozen=True, eq=False, repr=False)
class TokenProof(PlainOrJoint):
    """An upper bound on |S − S'| per output coordinate, and the layer bounds of both networks that prove it.

    `joint` is None if there are too many points for pairs; `head_parts` has the plain bound of each head of S alone.
    """

    bounds: TokenBounds
    other: TokenBounds
    plain: Vector
    joint: Vector | None
    head_parts: PartsByLayer

    @property
    def methods(self) -> tuple[str, ...]:
        """The name of the method that gives the bound at the worst coordinate."""
        return ("pairs",) if self.is_joint else ("plain",)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the bound."""
        if self.joint is not None:
            return ()
        return (f"{len(self.bounds.points):,} vectors are too many for pairs, so every head is bounded alone",)


def token_proof(
    comparison: Comparison,
    bounds: TokenBounds | None = None,
    readout: Enclosure | None = None,
    progress: Step = silent,
) -> TokenProof:
    """Prove an upper bound over all sequences of the tokens; `bounds` are those of S, from an earlier proof.

    With a readout R, [d, m], the bound is on |(S − S') R| in the last row alone, for sequences that fill all positions.
    """
    tokens = comparison.inputs
    assert isinstance(tokens, Tokens)
    points = tokens.points()
    S = TokenBounds(Expansion(comparison.network), tokens, progress) if bounds is None else bounds
    other = TokenBounds(Expansion(comparison.surrogate), tokens)
    linear = token_linear(S, other, readout)
    parts = tuple(S.added("gap", readout))
    plain = total(linear, _sum(parts), _sum(other.added("gap", readout)))
    joint = None
    if can_pair(points):
        (T, Tm), (T_other, Tm_other) = S.tensors(readout), other.tensors(readout)
        last, places, share = None, 1, tokens.unevenness
        if readout is not None:
            last, places, share = tokens.at_positions()[-1], len(tokens.at_positions()), 1.0
        leads = [
            PairLead(Rank1Sum.join(T, T_other.negated()), points, last, places, share),
            PairLead(Rank1Sum.join(Tm, Tm_other.negated()), points, None, places, share),
        ]
        beyond = total(linear, _sum(S.added("rest", readout)), _sum(other.added("rest", readout)))
        joint = largest_first(leads, beyond, plain)
    return TokenProof(S, other, plain, joint, parts)


def largest_first(leads: Sequence[PairLead | ConvexLead], beyond: Vector, plain: Vector) -> Vector:
    """Return the joint bound, sharpened where it is the largest of all coordinates, until that is sharp."""
    joint = total(beyond, *(lead.pairs for lead in leads))
    done: set[int] = set()
    while (worst := int(torch.fmin(joint, plain).argmax())) not in done and bool(joint[worst].isfinite()):
        sharper = total(beyond[worst], *(lead.sharper(worst) for lead in leads))
        joint[worst] = torch.fmin(joint[worst], sharper)
        done.add(worst)
    return joint


def token_linear(S: TokenBounds, other: TokenBounds, readout: Enclosure | None = None) -> Vector:
    """Bound |m (Z_{0:L} − Z'_{0:L'})| for every m in the convex hull of the points; times R with a readout R."""
    X, Y = S.expansion, other.expansion
    apart = read(X.drift(0, X.depth) - Y.drift(0, Y.depth), readout)
    return largest(S.points, Enclosure(apart.mid[None], apart.rad[None]))[0]


def _sum(parts: Iterable[HeadVectors]) -> Vector:
    """Bound the sum over all layers and heads."""
    return total(*(nonnegative_sum_up(part, 0) for part in parts))
