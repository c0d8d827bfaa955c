"""The bounds of causal networks in arb interval arithmetic (docs/math.md §3.12)."""

from collections.abc import Sequence
from dataclasses import dataclass

from flint import arb, arb_mat
from torch import Tensor

from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates.arb_values import to_arb
from depthgauge.theory.certificates.causal_proof import CausalProof
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.lead import LeadBound
from depthgauge.theory.certificates.regions import ConvexLead
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.certificates.verify.arb_vectors import (
    Vector,
    absolute,
    add,
    column_lengths,
    column_sums,
    identity,
    largest,
    sign_norms,
    smaller,
    spectral_norm,
    through,
    times,
)
from depthgauge.theory.certificates.verify.box import rho
from depthgauge.theory.certificates.verify.expansion import ArbExpansion, negated, scores, zeros
from depthgauge.theory.certificates.verify.lead import Lead, Terms
from depthgauge.theory.certificates.verify.tokens import PairLead, PointRanges
from depthgauge.theory.linalg.enclosures import SignBound
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork


class ArbPoints(PointRanges):
    """A finite set of points."""

    def widest_row(self, name: str, W: arb_mat) -> arb:
        """Bound the largest range over y of x W yᵀ."""
        return self.widest(W)

    def lead(self, terms: Terms, a: int, kept: LeadBound | None) -> arb:
        """Bound the leading term for coordinate a."""
        return PairLead(terms, self.points, self.unevenness).bound(a)


class ArbConvex:
    """The box or the ball of a radius; the scalings of the sign norms on the box were recorded by name."""

    def __init__(self, kind: str, radius: arb, record: dict[str, SignBound]) -> None:
        self.kind, self.radius, self.record, self.unevenness = kind, radius, record, arb(1)

    def largest(self, M: arb_mat) -> Vector:
        """Bound |x M| per coordinate."""
        return times(self.radius, column_sums(M) if self.kind == "box" else column_lengths(M))

    def ranges(self, M: arb_mat) -> Vector:
        """Bound max − min of x M per coordinate."""
        return times(arb(2), self.largest(M))

    def widest_row(self, name: str, W: arb_mat) -> arb:
        """Bound the largest range over y of x W yᵀ; `name` is that of the layer, with the number of the head."""
        if self.kind == "ball":
            return (2 * self.radius**2 * spectral_norm(W)).upper()
        where, head = name.rsplit(":", 1)
        phi = [self.radius] * W.nrows()
        return (2 * sign_norms(self.record, where, phi, [W], phi, first=int(head))[0]).upper()

    def lead(self, terms: Terms, a: int, kept: LeadBound | None) -> arb:
        """Bound the leading term for coordinate a."""
        d = terms[0][0].nrows()
        found = arb("inf")
        for bound in Lead(terms, [], d, self.radius, self.kind).bounds("output", a, kept):
            found = smaller(found, bound)
        return found


@dataclass(frozen=True)
class ArbCausalLayer:
    """One layer: e_1 and err, and for every head θ and the ranges of two parts of its scores."""

    drift: arb_mat
    err: Vector
    theta: list[arb]
    turned: list[arb]
    moved: list[arb]


class ArbCausal:
    """The layers of a causal network with skip connections."""

    def __init__(self, name: str, network: SelfAttentionNetwork, region: ArbPoints | ArbConvex) -> None:
        if network.norm != "none" or any(layer.mlp is not None for layer in network) or not network.skip:
            raise VerificationError(f"{name}: the bounds require skip connections, and neither MLP nor LayerNorm")
        if any(one is not None for layer in network for one in (layer.query_bias, layer.output_bias)):
            raise VerificationError(f"{name}: the bounds do not cover biases of queries and outputs")
        self.name, self.region, self.d = name, region, network.dim
        self.W = [scores(network, layer) for layer in network]
        self.V = [[to_arb(value) for value in layer.value] for layer in network]
        self.layers: list[ArbCausalLayer] = []
        for k in range(len(self.V)):
            self.layers.append(self._layer(k))

    def orders(self, k: int, end: int) -> list[arb_mat]:
        """Return e_0, e_1, … over the layers from k to before `end`: the coefficients of Π (1 + t V_ℓ)."""
        found = [identity(self.d)]
        for heads in self.V[k:end]:
            V = sum(heads[1:], heads[0])
            longer = [*(e * V for e in found)]
            found = [found[0], *(a + b for a, b in zip(found[1:], longer[:-1], strict=True)), longer[-1]]
        return found

    def _layer(self, k: int) -> ArbCausalLayer:
        R, orders = self.region, self.orders(0, k)
        D = orders[1] if k else arb_mat(self.d, self.d)
        err = add(zeros(self.d), *(R.largest(e) for e in orders[2:]))
        for j in range(k):
            for e in self.orders(j + 1, k):
                err = add(err, *(self.gap(j, h, V * e) for h, V in enumerate(self.V[j])))
        theta, turned, moved = [], [], []
        for h, W in enumerate(self.W[k]):

            def widest(part: str, M: arb_mat, h: int = h) -> arb:
                return R.widest_row(f"{self.name}.{k}.{part}:{h}", M)

            query = add(R.largest(W), R.largest(D * W), through(err, absolute(W)))
            key = add(R.ranges(W.transpose()), R.ranges(D * W.transpose()), times(arb(2), query))
            errors = sum((e * s for e, s in zip(err, key, strict=True)), arb(0))
            WD = W * D.transpose()
            moved.append((widest("keys", WD) + widest("both", D * WD) + errors).upper())
            turned.append(widest("turned", D * W))
            theta.append((widest("theta", W) + turned[-1] + moved[-1]).upper())
        return ArbCausalLayer(D, err, theta, turned, moved)

    def _beyond(self, k: int, M: arb_mat) -> Vector:
        layer = self.layers[k]
        return add(self.region.ranges(layer.drift * M), times(arb(2), through(layer.err, absolute(M))))

    def _uneven(self, k: int, h: int) -> arb:
        return smaller((self.layers[k].theta[h] / 4).tanh().upper(), self.region.unevenness)

    def gap(self, k: int, h: int, M: arb_mat) -> Vector:
        """Bound |(P_h − C) X_k M|."""
        return times(self._uneven(k, h), add(self.region.ranges(M), self._beyond(k, M)))

    def rest(self, k: int, h: int, M: arb_mat, order: int) -> Vector:
        """Bound what is beyond the leading terms of |(P_h − C) X_k M|, which enters the output with C^order."""
        layer = self.layers[k]
        if order >= 2:
            return self.gap(k, h, M)
        loose = layer.moved[h] if order == 0 else layer.moved[h] + layer.turned[h]
        curved = rho() * layer.theta[h] ** 2 + loose / 4
        return add(times(curved, self.region.ranges(M)), times(self._uneven(k, h), self._beyond(k, M)))

    def added(self, *, is_led: bool) -> Vector:
        """Bound what all heads add to the output, or what is beyond the leading terms of it."""
        found = [zeros(self.d)]
        for k, heads in enumerate(self.V):
            for order, e in enumerate(self.orders(k + 1, len(self.V))):
                for h, V in enumerate(heads):
                    found.append(self.rest(k, h, V * e, order) if is_led else self.gap(k, h, V * e))
        return add(*found)

    def terms(self) -> tuple[Terms, Terms, Terms]:
        """Return the leading terms: of order 0, by the drift of queries, and of order 1 in the output."""
        pairs = [(k, W, V) for k in range(len(self.V)) for W, V in zip(self.W[k], self.V[k], strict=True)]
        last = len(self.V) - 1
        late = [(W, V * self.orders(k + 1, last + 1)[1]) for k, W, V in pairs if k < last]
        return [(W, V) for _, W, V in pairs], [(self.layers[k].drift * W, V) for k, W, V in pairs], late


def region_of(comparison: Comparison, record: dict[str, SignBound]) -> ArbPoints | ArbConvex:
    """Return the set that the tokens of the inputs are taken from."""
    inputs = comparison.inputs
    return ArbPoints(inputs) if isinstance(inputs, Tokens) else ArbConvex(inputs.kind, arb(inputs.radius), record)


def one_token_bound(comparison: Comparison) -> Vector:
    """Bound |x (Z_{0:L} − Z'_{0:L'})|, which equals |S − S'| for one token, since its attention is the identity."""
    if comparison.tokens != 1:
        raise VerificationError("the proof is for inputs of one token, and these may have more")
    X, Y = (ArbExpansion(net, one_token=True) for net in (comparison.network, comparison.surrogate))
    return region_of(comparison, {}).largest(X.drift(0, X.depth) - Y.drift(0, Y.depth))


def causal_bound(comparison: Comparison, proof: CausalProof, upper: arb) -> Vector:
    """Bound |S − S'|, jointly where the plain bound exceeds `upper`."""
    if comparison.network.length is not None:
        raise VerificationError("network: the bounds do not cover its position biases")
    region = region_of(comparison, proof.region.norms.record)
    S = ArbCausal("network", comparison.network, region)
    other = ArbCausal("surrogate", comparison.surrogate, region)
    linear = _linear(S, other, comparison.surrogate, comparison.tokens)
    values = add(linear, S.added(is_led=False), other.added(is_led=False))
    open_ones = [a for a, value in enumerate(values) if not value <= upper]
    if not open_ones or proof.joint is None:
        return values
    beyond = add(linear, S.added(is_led=True), other.added(is_led=True))
    leads = [mine + negated(theirs) for mine, theirs in zip(S.terms(), other.terms(), strict=True)]
    kept = [lead.kept if isinstance(lead, ConvexLead) else None for lead in proof.leads]
    for a in open_ones:
        led = [region.lead(terms, a, record) for terms, record in zip(leads, kept, strict=True) if terms]
        values[a] = smaller(values[a], (beyond[a] + sum(led, arb(0))).upper())
    return values


def _linear(S: ArbCausal, other: ArbCausal, surrogate: SelfAttentionNetwork, length: int | None) -> Vector:
    """Bound Σ_m |C^m X (e_m − e'_m)|, and how far position biases are from log C^m."""
    mine, theirs = S.orders(0, len(S.V)), other.orders(0, len(other.V))
    slipped = zeros(S.d)
    if surrogate.length is not None:
        if len(surrogate) > 1 or length is None or length > surrogate.length:
            raise VerificationError("surrogate: position biases require one layer and a length that they cover")
        none = arb_mat(S.d, S.d)
        theirs = [identity(S.d), *(none for _ in range(surrogate[0].heads + 1))]
        for V, (m, slip) in zip(other.V[0], _patterns(surrogate[0]), strict=True):
            theirs[m] = theirs[m] + V
            slipped = add(slipped, times((slip / 2).tanh(), other.region.ranges(V)))
    none = arb_mat(S.d, S.d)
    most = max(len(mine), len(theirs))
    padded = [[*orders, *(none for _ in range(most - len(orders)))] for orders in (mine, theirs)]
    apart = [S.region.largest(a - b) for a, b in zip(*padded, strict=True)]
    return add(slipped, *apart)


def _patterns(layer: Layer) -> Sequence[tuple[int, arb]]:
    """Return for every head m and a bound on |bias − log C^m|; m = 1 and 0 without a bias."""
    assert layer.position_bias is not None
    n, found = layer.position_bias.shape[-1], []
    C = arb_mat([[arb(1) / (i + 1) if j <= i else arb(0) for j in range(n)] for i in range(n)])
    powers = [C]
    for h in range(layer.heads):
        bias: Tensor = layer.position_bias[h].detach()
        if not bool(bias.any()):
            found.append((1, arb(0)))
            continue
        if not all(entry == 0 for entry in (to_arb(layer.query[h]) * to_arb(layer.key[h]).transpose()).entries()):
            raise VerificationError(f"surrogate: head {h} has scores and a position bias")
        B = to_arb(bias).tolist()
        for m in range(1, layer.heads + 2):
            if len(powers) < m:
                powers.append(powers[-1] * C)
            power = powers[m - 1].tolist()
            slip = largest([(B[i][j] - power[i][j].log()).abs_upper() for i in range(n) for j in range(i + 1)])
            if slip < arb(0.01):
                found.append((m, slip))
                break
        else:
            raise VerificationError(f"surrogate: the position bias of head {h} is not that of repeated averages")
    return found
