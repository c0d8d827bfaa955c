"""The proved side of a certificate: the plain and the joint bound of networks with the exact expansion."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.base.format import number
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.attack import NO_HINTS, Hints
from depthgauge.theory.certificates.ball import BallBounds, column_lengths
from depthgauge.theory.certificates.box import JOINT_LIMIT, BoxBounds, Norms, PartsByLayer, Vector, total
from depthgauge.theory.certificates.causal_proof import CausalProof, OneToken, causal_proof, one_token_proof
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.certificates.deletion import Deletion, deletion_applies, deletion_bound
from depthgauge.theory.certificates.difference import BoxDifference, JointParts
from depthgauge.theory.certificates.lead import LeadBound, Rank1Sum, lead_bound
from depthgauge.theory.certificates.parallel_blocks import ParallelProof, parallel_proof
from depthgauge.theory.certificates.squares import Multipliers, sharpen
from depthgauge.theory.certificates.token_proof import TokenProof, token_proof
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.rounding import add_up, mul_up, no_bound, nonnegative_sum_up
from depthgauge.theory.surrogates.expansion import Expansion, match_heads

WORTHWHILE = 0.03
"""The share of a bound beyond its leading and linear terms above which intermediate states are bounded jointly too."""


@dataclass(frozen=True, eq=False, repr=False)
class JointBound:
    """The joint bound lead(T, Tᵐ) + beyond per output coordinate, +∞ where there is none, and what proves it.

    `lead` is None if T and Tᵐ have no terms. `multipliers` are those of the sums of squares, by coordinate.
    """

    value: Vector
    parts: JointParts
    lead: LeadBound | None
    multipliers: Mapping[int, Multipliers]


@dataclass(frozen=True, eq=False, repr=False)
class ExpansionProof:
    """An upper bound on |S − S'| per output coordinate, and what proves it.

    `bounds` and `other` are the layer bounds of S, which several proofs may share, and of S'. `linear` bounds
    1·mean(X)·(Z_{0:L} − Z'_{0:L'}). `plain` bounds every head separately, +∞ where there is no bound; `joint` bounds
    all heads together. `head_parts` has the plain bound of each head of S alone, per layer. `matched` has the sign
    norms of heads that occur in both networks, with the scalings that prove them.
    """

    bounds: BoxBounds | BallBounds
    other: BoxBounds | BallBounds
    linear: Vector
    plain: Vector
    joint: JointBound | None
    head_parts: PartsByLayer
    matched: Norms = field(default_factory=Norms)
    notes: tuple[str, ...] = ()

    @cached_property
    def value(self) -> Vector:
        """The smaller of the plain and the joint bound, per coordinate."""
        return self.plain if self.joint is None else torch.fmin(self.plain, self.joint.value)

    @property
    def coordinate(self) -> int:
        """The output coordinate with the largest bound."""
        return int(self.value.argmax())

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods that give the bound at the worst coordinate."""
        a = self.coordinate
        if self.joint is not None and bool(self.joint.value[a] < self.plain[a]):
            return ("joint", "squares") if a in self.joint.multipliers else ("joint",)
        return ("plain",)

    @property
    def lost_at(self) -> int:
        """The first layer whose output has no finite bound; the last layer if all states have one."""
        states = [bool(layer.state.isfinite().all()) for layer in self.bounds.layers]
        first = states.index(False) if False in states else self.bounds.expansion.depth
        return max(first - 1, 0)

    def hints(self, most: int = 8) -> Hints:
        """Return starting points for the attack: T_a of the `most` worst coordinates, and the linear part of S − S'."""
        mine, theirs = self.bounds.expansion, self.other.expansion
        drift = (mine.drift(0, mine.depth) - theirs.drift(0, theirs.depth)).mid
        if self.joint is None or self.joint.parts.T.terms == 0:
            return Hints(drift=drift)
        return Hints(self.joint.parts.T.slices(self.value.argsort(descending=True)[:most]), drift)


def box_proof(comparison: Comparison, effort: str, bounds: BoxBounds | None = None) -> ExpansionProof:
    """Prove an upper bound on the box.

    The bounds of the intermediate states are plain at first. If more than `WORTHWHILE` of the joint bound lies beyond
    its leading and linear terms, the proof is repeated with joint bounds of all states, and the smaller result is kept.
    """
    network, radius = comparison.network, comparison.inputs.radius
    joint = network.skip and network.dim <= JOINT_LIMIT
    expansion = Expansion(network)
    if bounds is not None and not (bounds.radius == radius and bounds.expansion.equals(expansion)):
        raise InputError("the bounds given are of another network or another box; leave them out")
    S = bounds or BoxBounds(expansion, radius, joint=joint)
    proof = _box_proof(comparison, effort, S)
    if proof.joint is None or S.prefixes:
        return proof
    a = proof.coordinate
    avoidable = float(proof.joint.parts.beyond[a] - proof.linear[a])
    promising = float(proof.joint.value[a] - avoidable) < float(proof.plain[a])
    if not (promising and avoidable > WORTHWHILE * float(proof.value[a])):
        return proof
    refined = _box_proof(comparison, effort, BoxBounds(S.expansion, radius, joint=True, prefixes=True))
    return refined if bool(refined.value.amax() < proof.value.amax()) else proof


def _box_proof(comparison: Comparison, effort: str, S: BoxBounds) -> ExpansionProof:
    network, surrogate = comparison.network, comparison.surrogate
    other = BoxBounds(Expansion(surrogate), S.radius, joint=False)
    # Without skips the inputs of a head in S and in S' are unrelated, so matching heads gives nothing.
    difference = BoxDifference(S, other, match_heads(network, surrogate) if network.skip else [])
    plain = difference.plain()
    joint, notes = None, []
    if S.joint:
        joint = _joint(difference.joint(), comparison.region, effort, no_bound(plain.value))
    elif network.dim > JOINT_LIMIT:
        notes.append(
            f"width {network.dim} is above {JOINT_LIMIT}: heads were bounded one by one, not jointly, "
            "which is often several times larger"
        )
    return ExpansionProof(
        bounds=S,
        other=other,
        linear=difference.linear,
        plain=no_bound(plain.value),
        joint=joint,
        head_parts=plain.head_parts,
        matched=difference.norms,
        notes=tuple(notes),
    )


def ball_proof(comparison: Comparison, effort: str) -> ExpansionProof:
    """Prove an upper bound for tokens of length at most r."""
    network, surrogate, radius = comparison.network, comparison.surrogate, comparison.inputs.radius
    S, other = BallBounds(Expansion(network), radius), BallBounds(Expansion(surrogate), radius)
    mine, theirs = S.expansion, other.expansion
    linear = mul_up(column_lengths(mine.drift(0, mine.depth) - theirs.drift(0, theirs.depth)), radius)
    parts, parts_other = S.plain(), other.plain()
    head_parts = tuple(torch.split(parts, [layer.heads for layer in network]))
    plain = no_bound(total(linear, nonnegative_sum_up(parts, 0), nonnegative_sum_up(parts_other, 0)))
    joint, notes = None, []
    if network.dim > JOINT_LIMIT:
        notes.append(f"width {network.dim} is above {JOINT_LIMIT}: heads were bounded one by one, not jointly")
    else:
        joint = _joint(_ball_parts(comparison, S, other, linear), comparison.region, effort, plain)
    return ExpansionProof(
        bounds=S, other=other, linear=linear, plain=plain, joint=joint, head_parts=head_parts, notes=tuple(notes)
    )


def _joint(parts: JointParts, inputs: InputSet, effort: str, plain: Vector) -> JointBound:
    """Compute lead(T, Tᵐ) + beyond; with effort "high", sharpen the coordinate with the largest bound, repeatedly."""
    T, Tm, beyond = parts.T, parts.Tm, parts.beyond
    if T.terms + Tm.terms == 0:
        return JointBound(no_bound(beyond), parts, None, {})
    lead = lead_bound(T, Tm, inputs.radius, inputs.kind)
    value = no_bound(add_up(lead.value, beyond))
    multipliers: dict[int, Multipliers] = {}
    start: Multipliers | None = None
    while effort == "high" and T.terms:
        worst = int(torch.fmin(value, plain).argmax())
        if worst in multipliers or bool(plain[worst] <= value[worst]) or not bool(value[worst].isfinite()):
            break
        sharper, start = sharpen(T, Tm, worst, inputs, lead, start)
        multipliers[worst] = start
        value[worst] = torch.fmin(value[worst], add_up(sharper, beyond[worst]))
    return JointBound(value, parts, lead, multipliers)


def _ball_parts(comparison: Comparison, S: BallBounds, other: BallBounds, linear: Vector) -> JointParts:
    """Return T − T' and Tᵐ − Tᵐ' of both networks, and the bound on everything beyond them.

    For a surrogate of one layer Tᵐ' = 0, matched heads are left out of T − T' because they cancel exactly, and the rest
    of S' is of second order only.
    """
    network, surrogate = comparison.network, comparison.surrogate
    (T, Tm), (T_other, Tm_other) = S.tensors(), other.tensors()
    if len(surrogate) > 1:
        T, Tm = Rank1Sum.join(T, T_other.negated()), Rank1Sum.join(Tm, Tm_other.negated())
        return JointParts(T, Tm, total(linear, S.rest(), other.rest()))
    offsets = [0, *accumulate(layer.heads for layer in network)]
    matches = match_heads(network, surrogate)
    taken = {offsets[m.k] + h for m in matches for h in m.heads}
    taken_other = {h for m in matches for h in m.others}
    mine = [h for h in range(offsets[-1]) if h not in taken]
    theirs = [h for h in range(surrogate[0].heads) if h not in taken_other]
    T = Rank1Sum.join(T.heads(mine), T_other.heads(theirs).negated())
    return JointParts(T, Tm, total(linear, S.rest(), other.second_order()))


@dataclass(frozen=True, eq=False, repr=False)
class UpperBound:
    """A proved bound sup ‖S(X) − S'(X)‖max ≤ upper; `Certificate` describes the fields."""

    upper: float | None
    coordinate: int | None
    methods: tuple[str, ...]
    notes: tuple[str, ...]
    share: tuple[tuple[float, ...], ...]
    lost_at: int | None
    seconds: float
    proof: ExpansionProof | OneToken | TokenProof | CausalProof | ParallelProof | Deletion | None

    def __repr__(self) -> str:
        return f"UpperBound({number(self.upper)}, {' + '.join(self.methods)})"

    def hints(self) -> Hints:
        """Return starting points for the attack."""
        return self.proof.hints() if isinstance(self.proof, ExpansionProof | OneToken | CausalProof) else NO_HINTS


def prove_upper(
    comparison: Comparison, effort: str, bounds: BoxBounds | None = None, progress: Step = silent
) -> UpperBound:
    """Prove an upper bound with the methods that apply to the two networks.

    `effort` is "default" or "high"; `bounds` are the layer bounds of the network from an earlier proof on the same box.
    """
    begun = time.perf_counter()
    is_box = comparison.inputs.kind == "box"
    proof: ExpansionProof | OneToken | TokenProof | CausalProof | ParallelProof | Deletion
    if comparison.is_one_token:
        proof = one_token_proof(comparison)
    elif comparison.is_wide_block:
        proof = parallel_proof(comparison, progress)
    elif comparison.network.causal and comparison.network.skip and not comparison.has_mlp:
        proof = _smaller_causal(comparison, progress)
    elif isinstance(comparison.inputs, Tokens):
        proof = token_proof(comparison, progress=progress)
    elif comparison.expands:
        proof = box_proof(comparison, effort, bounds) if is_box else ball_proof(comparison, effort)
    else:
        proof = deletion_bound(comparison.network, comparison.surrogate, comparison.inputs.radius)
    notes = proof.notes
    if isinstance(proof, Deletion) and not is_box:
        # ‖x_i‖₂ ≤ r implies |x_ic| ≤ r, so the bound on the box of radius r covers the ball.
        notes = ("tokens of bounded length were taken as a box of the same radius",)
    coordinate = int(no_bound(proof.value).argmax())
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


def _smaller_causal(comparison: Comparison, progress: Step) -> CausalProof | Deletion:
    """Return the proof by the expansion, or by deletion where that applies and gives the smaller bound."""
    proof, network, surrogate = causal_proof(comparison, progress), comparison.network, comparison.surrogate
    if isinstance(comparison.inputs, Tokens) or not deletion_applies(network, surrogate):
        return proof
    deleted = deletion_bound(network, surrogate, comparison.inputs.radius)
    return deleted if bool(deleted.value.max() < proof.value.max()) else proof


def _shares(parts: list[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Divide the parts by their sum; return zeros if the sum is zero or not finite."""
    whole = float(sum(part.sum() for part in parts))
    usable = math.isfinite(whole) and whole > 0
    return tuple(tuple(float(value) / whole if usable else 0.0 for value in part) for part in parts)
