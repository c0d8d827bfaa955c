"""`verify`: a second proof of an upper bound, in arb interval arithmetic (python-flint).

The first proof uses float64 with outward rounding. This one is separate code, written from docs/math.md §3. It uses the
networks, the set of inputs and the number to be proved. From the first proof it takes only what needs no trust:
scalings and multipliers, which are sound whatever they are, and the claims own_ℓ and err_ℓ, which it proves in turn.
"""

import math

from flint import arb

from depthgauge.base.errors import VerificationError, require_count
from depthgauge.theory.certificates.arb_values import precision
from depthgauge.theory.certificates.ball import BallBounds
from depthgauge.theory.certificates.box import BoxBounds
from depthgauge.theory.certificates.causal_proof import CausalProof, OneToken
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.deletion import Deletion
from depthgauge.theory.certificates.parallel_blocks import ParallelProof
from depthgauge.theory.certificates.proof import ExpansionProof, UpperBound
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.certificates.verify.arb_vectors import Vector, add, column_lengths, smaller, times
from depthgauge.theory.certificates.verify.ball import BallLayers
from depthgauge.theory.certificates.verify.box import BoxLayers, unproved
from depthgauge.theory.certificates.verify.causal import causal_bound, one_token_bound
from depthgauge.theory.certificates.verify.deletion import ArbDeletion
from depthgauge.theory.certificates.verify.difference import ArbBoxDifference
from depthgauge.theory.certificates.verify.expansion import ArbExpansion, check_matches, negated
from depthgauge.theory.certificates.verify.lead import Lead
from depthgauge.theory.certificates.verify.parallel_blocks import ArbParallel
from depthgauge.theory.certificates.verify.tokens import token_bound
from depthgauge.theory.surrogates.expansion import match_heads


def verify(comparison: Comparison, bound: UpperBound, bits: int = 128) -> bool:
    """Prove sup ‖S(X) − S'(X)‖max ≤ `bound.upper` again; raise VerificationError, which names the step that failed.

    A failure is tried once more with twice as many bits, so that it is not due to precision.
    """
    require_count("bits", bits, "the precision of the interval arithmetic", least=64)
    if bound.upper is None or not math.isfinite(bound.upper):
        raise VerificationError("there is no finite upper bound to prove")
    try:
        with precision(bits):
            _check(_proved(comparison, bound, arb(bound.upper)), arb(bound.upper))
    except VerificationError:
        with precision(2 * bits):
            _check(_proved(comparison, bound, arb(bound.upper)), arb(bound.upper))
    return True


def _proved(comparison: Comparison, bound: UpperBound, upper: arb) -> Vector:
    """Bound |S − S'| by the method of the first proof."""
    network, surrogate, proof = comparison.network, comparison.surrogate, bound.proof
    if proof is None:
        raise VerificationError("the certificate does not contain its proof")
    if network.skip != surrogate.skip or network.dim != surrogate.dim:
        raise VerificationError("the networks differ in width or skip connections")
    if isinstance(proof, OneToken):
        return one_token_bound(comparison)
    if isinstance(comparison.inputs, Tokens) and isinstance(proof, ParallelProof):
        return ArbParallel(network, surrogate, comparison.inputs.points()).bound()
    if isinstance(proof, CausalProof):
        if not (network.causal and surrogate.causal):
            raise VerificationError("the proof is for causal networks, and these are not causal")
        return causal_bound(comparison, proof, upper)
    if isinstance(comparison.inputs, Tokens):
        return token_bound(ArbExpansion(network), ArbExpansion(surrogate), comparison.inputs, upper)
    kind, radius = comparison.inputs.kind, arb(comparison.inputs.radius)
    if isinstance(proof, Deletion):
        # ‖x_i‖₂ ≤ r implies |x_ic| ≤ r, so the bound on the box of radius r covers both sets.
        return ArbDeletion(network, surrogate, proof.norms.record, radius).bound()
    if not isinstance(proof, ExpansionProof):
        raise VerificationError("the certificate is for a box or a ball, its proof is for tokens")
    X, Y = ArbExpansion(network), ArbExpansion(surrogate)
    return (_box_bound if kind == "box" else _ball_bound)(comparison, proof, X, Y, upper)


def _box_bound(comparison: Comparison, proof: ExpansionProof, X: ArbExpansion, Y: ArbExpansion, upper: arb) -> Vector:
    """Bound |S − S'| on the box, jointly where the plain bound exceeds `upper`."""
    if not isinstance(proof.bounds, BoxBounds) or not isinstance(proof.other, BoxBounds):
        raise VerificationError("the certificate is for a box, its proof is for a ball")
    radius = arb(comparison.inputs.radius)
    # Without skips the inputs of a head in the two networks are unrelated, and no heads are matched.
    matches = match_heads(comparison.network, comparison.surrogate) if X.skip else []
    check_matches(comparison.network, comparison.surrogate, matches)
    layers, other = BoxLayers("network", X, proof.bounds, radius), BoxLayers("surrogate", Y, proof.other, radius)
    difference = ArbBoxDifference(layers, other, matches, proof.matched.record)
    plain = difference.plain()
    if not layers.joint or all(value <= upper for value in plain):
        return plain
    lead, beyond = difference.joint()
    return _lowered(proof, lead, beyond, plain, upper)


def _ball_bound(comparison: Comparison, proof: ExpansionProof, X: ArbExpansion, Y: ArbExpansion, upper: arb) -> Vector:
    """Bound |S − S'| on the ball, jointly where the plain bound exceeds `upper`."""
    if not isinstance(proof.bounds, BallBounds) or not isinstance(proof.other, BallBounds):
        raise VerificationError("the certificate is for a ball, its proof is for a box")
    radius = arb(comparison.inputs.radius)
    layers, other = BallLayers("network", X, proof.bounds, radius), BallLayers("surrogate", Y, proof.other, radius)
    linear = times(radius, column_lengths(X.drift(0, X.depth) - Y.drift(0, Y.depth)))
    plain = add(linear, layers.added("gap"), other.added("gap"))
    if proof.joint is None or all(value <= upper for value in plain):
        return plain
    # For a surrogate of one layer err = own = 0 and Z = 0: beyond its leading term there is only 2ρθ²·spread.
    rest = other.added("curved" if Y.depth == 1 else "rest")
    lead = _ball_lead(comparison, X, Y, radius)
    return _lowered(proof, lead, add(linear, layers.added("rest"), rest), plain, upper)


def _ball_lead(comparison: Comparison, X: ArbExpansion, Y: ArbExpansion, radius: arb) -> Lead:
    """Return the leading term of T − T' and Tᵐ − Tᵐ'; matched heads of a one-layer surrogate cancel in T − T'."""
    mine = [(k, h) for k in range(X.depth) for h in X.heads(k)]
    theirs = [(k, h) for k in range(Y.depth) for h in Y.heads(k)]
    free, free_other = mine, theirs
    if Y.depth == 1:
        matches = match_heads(comparison.network, comparison.surrogate)
        check_matches(comparison.network, comparison.surrogate, matches)
        free = [head for head in mine if head not in {(m.k, h) for m in matches for h in m.heads}]
        free_other = [head for head in theirs if head not in {(m.other, h) for m in matches for h in m.others}]
    T = [term for k, h in free for term in X.plain_terms(k, [h])]
    T += negated([term for k, h in free_other for term in Y.plain_terms(k, [h])])
    Tm = [term for k, h in mine for term in X.drift_terms(k, [h]) + X.output_terms(k, X.depth, [h])]
    Tm += negated([term for k, h in theirs for term in Y.drift_terms(k, [h]) + Y.output_terms(k, Y.depth, [h])])
    return Lead(T, Tm, X.dim, radius, "ball")


def _lowered(proof: ExpansionProof, lead: Lead, beyond: Vector, plain: Vector, upper: arb) -> Vector:
    """Replace entries of the plain bound above `upper` by lead + beyond, with sums of squares where recorded."""
    kept = None if proof.joint is None else proof.joint.lead
    multipliers = {} if proof.joint is None else proof.joint.multipliers
    values = []
    for a, value in enumerate(plain):
        if not value <= upper:
            for bound in lead.bounds("output", a, kept, multipliers.get(a)):
                value = smaller(value, (bound + beyond[a]).upper())
                if value <= upper:
                    break
        values.append(value)
    return values


def _check(values: Vector, upper: arb) -> None:
    for a, value in enumerate(values):
        if not value <= upper:
            raise unproved("output", a, value, upper)
