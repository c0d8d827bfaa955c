"""`verify`: the upper bound of a certificate proved a second time, in ball arithmetic.

The first proof is float64 with outward rounding; this one is python-flint's balls, written apart from it after
docs/math.md §3. It takes the networks, the set and the number `upper`, and of the first proof only what needs no trust:
scalings and multipliers (any are sound), and the claims own_ℓ, err_ℓ, each proved from those of the layers before.
"""

import math

from flint import arb

from depthgauge.certificates.ball import BallBounds
from depthgauge.certificates.box import BoxBounds
from depthgauge.certificates.certificate import Certificate
from depthgauge.certificates.evaluate import precision
from depthgauge.certificates.proof import Proof
from depthgauge.certificates.verify.arb_vectors import Vector, add, column_lengths, column_sums, smaller, times
from depthgauge.certificates.verify.ball import BallLayers
from depthgauge.certificates.verify.box import BoxLayers, refuse
from depthgauge.certificates.verify.deletion import Deletion
from depthgauge.certificates.verify.difference import BoxDifference
from depthgauge.certificates.verify.expansion import Expansion, check_matches, negated
from depthgauge.certificates.verify.lead import Lead
from depthgauge.errors import VerificationError, require_count
from depthgauge.surrogates.matching import match_heads


def verify(certificate: Certificate, bits: int = 128) -> bool:
    """Prove ‖S(X) − S'(X)‖max ≤ `certificate.upper` again; True when it is done, VerificationError when it is not.

    `bits` is the precision of the balls; what fails is tried once more with twice as many, so that a refusal is never
    for want of precision.
    """
    require_count("bits", bits, "the precision of ball arithmetic", least=64)
    if certificate.upper is None or not math.isfinite(certificate.upper):
        raise VerificationError("there is no finite upper bound to prove")
    try:
        with precision(bits):
            _prove(certificate, arb(certificate.upper))
    except VerificationError:
        with precision(2 * bits):
            _prove(certificate, arb(certificate.upper))
    return True


def _prove(certificate: Certificate, upper: arb) -> None:
    network, surrogate = certificate.network, certificate.surrogate
    kind, radius = certificate.set.kind, arb(certificate.set.radius)
    if certificate.deletion is not None:
        # A token of length at most r lies in the box of radius r, so this covers both sets.
        record = certificate.deletion.norms.record
        _check(Deletion(network, surrogate, record, radius).bound(), upper)
        return
    proof = certificate.proof
    if proof is None:
        raise VerificationError("the certificate does not keep its proof")
    if network.skip != surrogate.skip or network.dim != surrogate.dim:
        raise VerificationError("the networks differ in width or skip connections")
    X, Y = Expansion(network), Expansion(surrogate)
    if certificate.tokens == 1:
        _check(_linear(X, Y, radius, kind), upper)
    elif kind == "box":
        _prove_on_box(certificate, proof, X, Y, radius, upper)
    else:
        _prove_on_ball(certificate, proof, X, Y, radius, upper)


def _linear(X: Expansion, Y: Expansion, radius: arb, kind: str) -> Vector:
    """|m(Z_{0:L} − Z'_{0:L'})|, all there is for one token: its attention is the identity."""
    M = X.drift(0, X.depth) - Y.drift(0, Y.depth)
    return times(radius, column_sums(M) if kind == "box" else column_lengths(M))


def _prove_on_box(certificate: Certificate, proof: Proof, X: Expansion, Y: Expansion, radius: arb, upper: arb) -> None:
    if not isinstance(proof.bounds, BoxBounds) or not isinstance(proof.other, BoxBounds):
        raise VerificationError("the certificate is for a box, the proof it keeps is not")
    # Without skips the states a head sees in the two networks are unrelated, and nothing is matched.
    matches = match_heads(certificate.network, certificate.surrogate) if X.skip else []
    check_matches(certificate.network, certificate.surrogate, matches)
    layers, other = BoxLayers("network", X, proof.bounds, radius), BoxLayers("surrogate", Y, proof.other, radius)
    difference = BoxDifference(layers, other, matches, proof.matched.record)
    plain = difference.plain()
    if layers.joint and not all(value <= upper for value in plain):
        lead, beyond = difference.joint()
        plain = _lowered(proof, lead, beyond, plain, upper)
    _check(plain, upper)


def _prove_on_ball(certificate: Certificate, proof: Proof, X: Expansion, Y: Expansion, radius: arb, upper: arb) -> None:
    if not isinstance(proof.bounds, BallBounds) or not isinstance(proof.other, BallBounds):
        raise VerificationError("the certificate is for a ball, the proof it keeps is not")
    layers, other = BallLayers("network", X, proof.bounds, radius), BallLayers("surrogate", Y, proof.other, radius)
    linear = _linear(X, Y, radius, "ball")
    plain = add(linear, layers.added(layers.gaps()), other.added(other.gaps()))
    if proof.joint is not None and not all(value <= upper for value in plain):
        # A surrogate of one layer has not drifted: 2ρθ² is all there is beyond its leading term.
        rest = other.added(other.curvatures() if Y.depth == 1 else other.rests())
        lead = _ball_lead(certificate, X, Y, radius)
        plain = _lowered(proof, lead, add(linear, layers.added(layers.rests()), rest), plain, upper)
    _check(plain, upper)


def _ball_lead(certificate: Certificate, X: Expansion, Y: Expansion, radius: arb) -> Lead:
    """T − T' and Tᵐ − Tᵐ' of the two networks; heads of a one-layer surrogate that stand in both are left out."""
    mine = [(k, h) for k in range(X.depth) for h in X.heads(k)]
    theirs = [(k, h) for k in range(Y.depth) for h in Y.heads(k)]
    free, free_other = mine, theirs
    if Y.depth == 1:
        matches = match_heads(certificate.network, certificate.surrogate)
        check_matches(certificate.network, certificate.surrogate, matches)
        free = [head for head in mine if head not in {(m.k, h) for m in matches for h in m.heads}]
        free_other = [head for head in theirs if head not in {(m.other, h) for m in matches for h in m.others}]
    T = [term for k, h in free for term in X.plain_terms(k, [h])]
    T += negated([term for k, h in free_other for term in Y.plain_terms(k, [h])])
    Tm = [term for k, h in mine for term in X.drift_terms(k, [h]) + X.output_terms(k, X.depth, [h])]
    Tm += negated([term for k, h in theirs for term in Y.drift_terms(k, [h]) + Y.output_terms(k, Y.depth, [h])])
    return Lead(T, Tm, X.dim, radius, "ball")


def _lowered(proof: Proof, lead: Lead, beyond: Vector, plain: Vector, upper: arb) -> Vector:
    """lead + beyond where the plain bound does not reach, and by sums of squares where that does not either."""
    values = []
    for a, value in enumerate(plain):
        if not value <= upper:
            for bound in lead.bounds("output", a, proof.lead, proof.multipliers.get(a)):
                value = smaller(value, (bound + beyond[a]).upper())
                if value <= upper:
                    break
        values.append(value)
    return values


def _check(values: Vector, upper: arb) -> None:
    for a, value in enumerate(values):
        if not value <= upper:
            raise refuse("output", a, value, upper)
