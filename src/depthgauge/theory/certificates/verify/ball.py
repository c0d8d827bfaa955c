"""The recursion on the ball in arb interval arithmetic (docs/math.md §3.8); every bound is one number."""

from dataclasses import dataclass

from flint import arb
from torch import Tensor

from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates.ball import BallBounds
from depthgauge.theory.certificates.verify.arb_vectors import Vector, add, column_lengths, smaller, spectral_norm, times
from depthgauge.theory.certificates.verify.box import rho, unproved
from depthgauge.theory.certificates.verify.expansion import ArbExpansion, zeros


@dataclass(frozen=True)
class ArbBallLayer:
    """One layer: the bounds that follow from the proved claims own and err, per head; `curved` is 2ρθ²·spread."""

    state: arb
    gap: list[arb]
    rest: list[arb]
    curved: list[arb]


class BallLayers:
    """The layers of a network with skip connections, on tokens of length at most r."""

    def __init__(self, who: str, X: ArbExpansion, claims: BallBounds, radius: arb) -> None:
        if not X.skip:
            raise VerificationError(f"{who}: the recursion on the ball requires skip connections")
        if len(claims.layers) != X.depth:
            raise VerificationError(f"{who}: expected {X.depth} layers, the proof has {len(claims.layers)}")
        self.who, self.X, self.claims, self.radius = who, X, claims, radius
        self.layers: list[ArbBallLayer] = []
        for index in range(X.depth):
            self.layers.append(self._layer(index))

    def _layer(self, k: int) -> ArbBallLayer:
        X, r = self.X, self.radius
        own, err = self._proved(k, "own", self.claims.layers[k].own), self._proved(k, "err", self.claims.layers[k].err)
        state, spread = (r + r * spectral_norm(X.drift(0, k)) + err).upper(), (r + own).upper()
        if k:
            growth = sum((spectral_norm(V) for V in X.V[k - 1]), arb(1))
            state = smaller(state, (self.layers[k - 1].state * growth).upper())
        spread = smaller(spread, state)
        gaps, rest, curved = [], [], []
        for W in X.W[k]:
            size = spectral_norm(W)
            lin = (r * (size + spectral_norm(X.drift(0, k) * W))).upper()
            e1 = (err * size * spread).upper()
            theta = smaller((2 * state * size * spread).upper(), (2 * (lin * spread + e1)).upper())
            gaps.append((2 * (theta / 4).tanh() * spread).upper())
            curved.append((2 * rho() * theta**2 * spread).upper())
            rest.append((curved[-1] + e1 * spread + lin * r * own + lin * own * spread).upper())
        return ArbBallLayer(state, gaps, rest, curved)

    def _proved(self, end: int, name: str, claimed: Tensor) -> arb:
        """Prove the claim for own = Σ G‖V‖₂ or err = own + Σ G‖V Z‖₂ over the heads before layer `end`; return it."""
        total = arb(0)
        for k in range(end):
            for h, G in enumerate(self.layers[k].gap):
                total += G * spectral_norm(self.X.V[k][h])
                if name == "err":
                    total += G * spectral_norm(self.X.carried(k, end)[h])
        claim = arb(float(claimed))
        if not total.upper() <= claim:
            raise unproved(f"{self.who}, {name} at layer {end}", 0, total.upper(), claim)
        return claim

    def added(self, name: str) -> Vector:
        """Bound Σ_kh g_kh (‖V e_a‖₂ + ‖V Z_{k+1:L} e_a‖₂) for every a; g is the field `name` of the layers."""
        parts = [zeros(self.X.dim)]
        for k, layer in enumerate(self.layers):
            for h, g in enumerate(getattr(layer, name)):
                parts += [times(g, column_lengths(M)) for M in (self.X.V[k][h], self.X.carried(k, self.X.depth)[h])]
        return add(*parts)
