"""The proof of a certificate: which bounds were combined, and everything needed to check them again."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.certificates.ball import BallBounds, column_lengths
from depthgauge.certificates.box import JOINT_LIMIT, BoxBounds, Norms, PartsByLayer, Vector, total
from depthgauge.certificates.difference import BoxDifference
from depthgauge.certificates.lead import LeadBound, Rank1Sum, lead_bound
from depthgauge.certificates.squares import Multipliers, sharpen
from depthgauge.errors import InputError
from depthgauge.linalg.rounding import add_up, mul_up, nonnegative_sum_up
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.surrogates.expansion import Expansion
from depthgauge.surrogates.matching import match_heads

WORTHWHILE = 0.03
"""The part of a bound beyond its leading term from which on it pays to bound the states on the way jointly."""


@dataclass(frozen=True)
class Proof:
    """An upper bound per output coordinate and what it rests on.

    `plain` and `joint` are the two bounds (the smaller counts, coordinate by coordinate); `lead` holds the scalings
    of the joint one, `multipliers` those of the coordinates that sums of squares sharpened, and `matched` those of the
    norms for heads that stand in both networks. `bounds` may be shared between proofs.
    """

    network: SelfAttentionNetwork
    surrogate: SelfAttentionNetwork
    kind: str
    radius: float
    tokens: int | None
    value: Vector
    plain: Vector
    joint: Vector | None
    beyond: Vector | None
    lead: LeadBound | None
    multipliers: dict[int, Multipliers]
    head_parts: PartsByLayer
    notes: tuple[str, ...]
    bounds: BoxBounds | BallBounds
    other: BoxBounds | BallBounds
    tensors: tuple[Rank1Sum, Rank1Sum] | None
    linear: Vector
    matched: Norms

    @property
    def coordinate(self) -> int:
        """The output coordinate with the largest bound."""
        return int(self.value.argmax())

    @property
    def upper(self) -> float:
        """The bound over all coordinates."""
        return float(self.value[self.coordinate])

    @property
    def lost_at(self) -> int | None:
        """The layer that hands on the first state without a finite bound; the last, if only the output has none."""
        if math.isfinite(self.upper):
            return None
        states = [bool(layer.state.isfinite().all()) for layer in self.bounds.layers]
        first = states.index(False) if False in states else len(self.network)
        return max(first - 1, 0)

    @property
    def methods(self) -> tuple[str, ...]:
        """How the bound at the worst coordinate was reached."""
        a = self.coordinate
        if self.joint is not None and bool(self.joint[a] < self.plain[a]):
            return ("joint", "squares") if a in self.multipliers else ("joint",)
        return ("plain",)

    def lead_tensors(self, most: int = 8) -> Float[Tensor, "a d d d"] | None:
        """T_a of the coordinates with the largest bounds, for the attack to start from."""
        if self.tensors is None or len(self.tensors[0].left.mid) == 0:
            return None
        return self.tensors[0].slices(self.value.argsort(descending=True)[:most])

    def linear_matrix(self) -> Float[Tensor, "d d"]:
        """Z_{0:L} − Z'_{0:L'}: how S − S' depends on the mean when all tokens are equal."""
        mine, theirs = self.bounds.expansion, self.other.expansion
        return (mine.drift(0, mine.depth) - theirs.drift(0, theirs.depth)).mid


def box_proof(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    radius: float,
    tokens: int | None,
    effort: str,
    bounds: BoxBounds | None = None,
) -> Proof:
    """The bound on the box: plain and joint, the smaller of the two in every coordinate.

    `bounds` are those of the network from an earlier proof on the same box (others are refused). Where more than
    `WORTHWHILE` of the joint bound lies beyond its leading and linear terms, the bounds of the states on the way are
    made joint too.
    """
    joint = network.skip and network.dim <= JOINT_LIMIT and tokens != 1
    expansion = Expansion(network)
    if bounds is not None and not (bounds.radius == radius and bounds.expansion.equals(expansion)):
        raise InputError("the bounds given are of another network or another box; leave them out")
    S = bounds or BoxBounds(expansion, radius, joint=joint)
    proof = _box_proof(network, surrogate, S, tokens, effort)
    if proof.beyond is None or S.prefixes:
        return proof
    assert proof.joint is not None
    a = proof.coordinate
    avoidable = float(proof.beyond[a] - proof.linear[a])
    promising = float(proof.joint[a] - avoidable) < float(proof.plain[a])
    if not (promising and avoidable > WORTHWHILE * float(proof.value[a])):
        return proof
    sharper = BoxBounds(S.expansion, radius, joint=True, prefixes=True)
    refined = _box_proof(network, surrogate, sharper, tokens, effort)
    return refined if refined.upper < proof.upper else proof


def _box_proof(
    network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, S: BoxBounds, tokens: int | None, effort: str
) -> Proof:
    radius = S.radius
    other = BoxBounds(Expansion(surrogate), radius, joint=False)
    # Without skips the states a head sees in S and in S' are unrelated, so nothing is gained by matching.
    difference = BoxDifference(S, other, match_heads(network, surrogate) if network.skip else [])
    plain = difference.plain()
    value, joint_value, lead, parts = _finite(plain.value), None, None, None
    multipliers: dict[int, Multipliers] = {}
    head_parts, notes = plain.head_parts, []
    if tokens == 1:
        # One token attends to itself alone: only the linear part is left.
        value, head_parts = difference.linear, tuple(torch.zeros_like(part) for part in head_parts)
        notes.append("one token: attention is the identity")
    elif S.joint:
        parts = difference.joint()
        joint_value, lead, multipliers = _joint((parts.T, parts.Tm), parts.beyond, radius, "box", effort, value)
        value = torch.fmin(value, joint_value)
    elif network.dim > JOINT_LIMIT:
        notes.append(
            f"width {network.dim} is above {JOINT_LIMIT}: heads were bounded one by one, not jointly, "
            "which is often several times larger"
        )
    return Proof(
        network,
        surrogate,
        "box",
        radius,
        tokens,
        value,
        value if tokens == 1 else plain.value,
        joint_value,
        None if parts is None else parts.beyond,
        lead,
        multipliers,
        head_parts,
        tuple(notes),
        S,
        other,
        None if parts is None else (parts.T, parts.Tm),
        difference.linear,
        difference.norms,
    )


def _joint(
    tensors: tuple[Rank1Sum, Rank1Sum], beyond: Vector, radius: float, kind: str, effort: str, plain: Vector
) -> tuple[Vector, LeadBound | None, dict[int, Multipliers]]:
    """lead(T, Tᵐ) + beyond; with high effort, sharpened where the maximum over coordinates stands."""
    T, Tm = tensors
    if len(T.left.mid) + len(Tm.left.mid) == 0:
        return _finite(beyond), None, {}
    lead = lead_bound(T, Tm, radius, kind)
    value = _finite(add_up(lead.value, beyond))
    multipliers: dict[int, Multipliers] = {}
    start: Multipliers | None = None
    while effort == "high" and len(T.left.mid):
        worst = int(torch.fmin(value, plain).argmax())
        if worst in multipliers or bool(plain[worst] <= value[worst]) or not bool(value[worst].isfinite()):
            break
        sharper, start = sharpen(T, Tm, worst, radius, kind, lead, start)
        multipliers[worst] = start
        value[worst] = torch.fmin(value[worst], add_up(sharper, beyond[worst]))
    return value, lead, multipliers


def ball_proof(
    network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, radius: float, tokens: int | None, effort: str
) -> Proof:
    """The bound for tokens of length at most r; `radius` is r."""
    S, other = BallBounds(Expansion(network), radius), BallBounds(Expansion(surrogate), radius)
    mine, theirs = S.expansion, other.expansion
    linear = mul_up(column_lengths(mine.drift(0, mine.depth) - theirs.drift(0, theirs.depth)), radius)
    parts, parts_other = S.plain(), other.plain()
    head_parts = tuple(torch.split(parts, [layer.heads for layer in network]))
    plain = total(linear, nonnegative_sum_up(parts, 0), nonnegative_sum_up(parts_other, 0))
    notes: list[str] = []
    value, joint_value, beyond, lead, tensors = _finite(plain), None, None, None, None
    multipliers: dict[int, Multipliers] = {}
    if tokens == 1:
        value = linear
        head_parts = tuple(torch.zeros_like(part) for part in head_parts)
        notes.append("one token: attention is the identity")
    elif network.dim > JOINT_LIMIT:
        notes.append(f"width {network.dim} is above {JOINT_LIMIT}: heads were bounded one by one, not jointly")
    else:
        tensors, beyond = _ball_tensors(network, surrogate, S, other, linear)
        joint_value, lead, multipliers = _joint(tensors, beyond, radius, "ball", effort, value)
        value = torch.fmin(value, joint_value)
    return Proof(network, surrogate, "ball", radius, tokens, value, plain, joint_value, beyond, lead, multipliers,
                 head_parts, tuple(notes), S, other, tensors, linear, Norms())  # fmt: skip


def _ball_tensors(
    network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, S: BallBounds, other: BallBounds, linear: Vector
) -> tuple[tuple[Rank1Sum, Rank1Sum], Vector]:
    """T, Tᵐ and what is beyond them: a one-layer surrogate's heads are subtracted in T, a deeper one's are added."""
    (T, Tm), (T_other, Tm_other) = S.tensors(), other.tensors()
    if len(surrogate) > 1:
        return (Rank1Sum.join(T, T_other.negated()), Rank1Sum.join(Tm, Tm_other.negated())), total(
            linear, S.rest(), other.rest()
        )
    offsets = [0]
    for layer in network:
        offsets.append(offsets[-1] + layer.heads)
    matches = match_heads(network, surrogate)
    taken = {offsets[m.k] + h for m in matches for h in m.heads}
    taken_other = {h for m in matches for h in m.others}
    mine = [h for h in range(offsets[-1]) if h not in taken]
    theirs = [h for h in range(surrogate[0].heads) if h not in taken_other]
    return (Rank1Sum.join(T.heads(mine), T_other.heads(theirs).negated()), Tm), total(
        linear, S.rest(), other.second_order()
    )


def _finite(value: Vector) -> Vector:
    """A bound that is not a number is no bound."""
    return torch.where(value.isnan(), math.inf, value)
