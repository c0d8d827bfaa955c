"""The recursion on the box in arb interval arithmetic (docs/math.md §3.2–3.3).

The claims own_ℓ and err_ℓ of the first proof are proved one after another, each from the claims before it.
"""

from dataclasses import dataclass

from flint import arb, arb_mat
from torch import Tensor

from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates.box import BoxBounds
from depthgauge.theory.certificates.verify.arb_vectors import (
    Vector,
    add,
    column_sums,
    exact,
    sign_norms,
    smaller,
    smaller_of,
    through,
    times,
)
from depthgauge.theory.certificates.verify.expansion import ArbExpansion, zeros
from depthgauge.theory.certificates.verify.lead import Lead


def rho() -> arb:
    """Bound ρ = 1/(12√3), the constant of the linearised softmax (§2.7)."""
    return (1 / (12 * arb(3).sqrt())).upper()


def gap(theta: arb, spread: Vector) -> Vector:
    """Bound G = 2 tanh(θ/4)·spread."""
    return times((2 * (theta / 4).tanh()).upper(), spread)


def unproved(step: str, coordinate: int, value: arb, claim: arb) -> VerificationError:
    """Return the error for a claim smaller than the bound that could be proved."""
    claimed, proved = claim.str(17, radius=False), value.str(17, radius=False)
    return VerificationError(
        f"{step}, coordinate {coordinate}: the claim is {claimed}, but only {proved} could be proved"
    )


@dataclass(frozen=True)
class BoxLayer:
    """One layer: the proved claims own and err, and the bounds that follow from them, per head."""

    own: Vector
    err: Vector
    state: Vector
    spread: Vector
    theta: list[arb]
    gap: list[Vector]
    rest: list[Vector]


class BoxLayers:
    """The layers of a network on the box of radius φ; the last entry is the output and has no heads."""

    def __init__(self, who: str, X: ArbExpansion, claims: BoxBounds, radius: arb) -> None:
        self.who, self.X, self.claims, self.radius = who, X, claims, radius
        self.joint = claims.joint and X.skip
        self.layers: list[BoxLayer] = []
        if len(claims.layers) != X.depth + 1:
            raise VerificationError(f"{who}: expected {X.depth + 1} layers, the proof has {len(claims.layers)}")
        for index in range(X.depth + 1):
            self.layers.append(self._layer(index))

    def _layer(self, index: int) -> BoxLayer:
        """Compute state = min(φ1 + φ1|Z_{0:ℓ}| + err, state_{ℓ−1}(I + Σ|V|)), spread = min(φ1 + own, state) (§3.2)."""
        own = self._claim(index, "own", self.claims.layers[index].own)
        err = self._claim(index, "err", self.claims.layers[index].err)
        self._prove(index, own, err)
        phi, drift = [self.radius] * self.X.dim, times(self.radius, column_sums(self.X.drift(0, index)))
        if index == 0:
            state, spread = phi, phi
        elif self.X.skip:
            state, spread = add(phi, drift, err), add(phi, own)
        else:
            state, spread = add(drift, err), own
        if index:
            state = smaller_of(state, self._grown(index - 1))
        spread = smaller_of(spread, state)
        if index == self.X.depth:
            return BoxLayer(own, err, state, spread, [], [], [])
        return self._heads(index, own, err, state, spread)

    def _grown(self, k: int) -> Vector:
        """Bound |X_{k+1}| ≤ state_k + Σ_h state_k|V_kh|, which holds for every attention."""
        before = self.layers[k].state
        mixed = add(*(through(before, size) for size in self.X.V_size[k]))
        return add(before, mixed) if self.X.skip else mixed

    def _heads(self, k: int, own: Vector, err: Vector, state: Vector, spread: Vector) -> BoxLayer:
        """Compute θ, G and, if heads are bounded jointly, the rest of (3.3)."""
        W, record = self.X.W[k], self.claims.norms.record
        theta = [(2 * t).upper() for t in sign_norms(record, f"{k}.theta", state, W, spread)]
        rest: list[Vector] = []
        if self.joint:
            lin = [arb_mat([*w.tolist(), *(self.X.drift(0, k) * w).tolist()]) for w in W]
            phi, phi2 = [self.radius] * self.X.dim, [self.radius] * (2 * self.X.dim)
            e1 = sign_norms(record, f"{k}.e1", err, W, spread)
            lin_spread = sign_norms(record, f"{k}.lin_spread", phi2, lin, spread)
            lin_phi = sign_norms(record, f"{k}.lin_phi", phi2, lin, phi)
            lin_own = sign_norms(record, f"{k}.lin_own", phi2, lin, own)
            theta = [smaller(t, (2 * (a + b)).upper()) for t, a, b in zip(theta, lin_spread, e1, strict=True)]
            for h in self.X.heads(k):
                curved = (2 * rho() * theta[h] ** 2 + e1[h] + lin_own[h]).upper()
                rest.append(add(times(curved, spread), times(lin_phi[h], own)))
        return BoxLayer(own, err, state, spread, theta, [gap(t, spread) for t in theta], rest)

    # --- claims ---------------------------------------------------------------------------------------------------

    def _claim(self, index: int, name: str, values: Tensor) -> Vector:
        claim = exact(values.tolist())
        if len(claim) != self.X.dim or not all(value >= 0 for value in claim):
            raise VerificationError(f"{self.who}, layer {index}: {name} is not {self.X.dim} nonnegative numbers")
        return claim

    def _prove(self, end: int, own: Vector, err: Vector) -> None:
        """Prove own_ℓ and err_ℓ from the layers before, by the plain or the joint bound; raise if neither suffices."""
        own_plain, err_plain = self.plain(end)
        for name, plain, claim in (("own", own_plain, own), ("err", err_plain, err)):
            open_ones = [a for a in range(self.X.dim) if not plain[a] <= claim[a]]
            if open_ones and self.joint and f"{end}.{name}" in self.claims.leads:
                open_ones = self._prove_jointly(end, name, open_ones, claim)
            if open_ones:
                a = open_ones[0]
                raise unproved(f"{self.who}, {name} at layer {end}", a, plain[a], claim[a])

    def plain(self, end: int) -> tuple[Vector, Vector]:
        """Bound own = Σ G|V| and err = own + Σ G|V Z_{k+1:ℓ}| over the heads before (§3.2, with and without skips)."""
        X, nothing = self.X, zeros(self.X.dim)
        if end == 0:
            return nothing, nothing
        own_layers = range(end) if X.skip else [end - 1]
        carried_layers = range(end) if X.skip else range(end - 1)
        own = add(nothing, *(self._sum(self.layers[k].gap, X.V_size[k]) for k in own_layers))
        return own, add(own, *(self._sum(self.layers[k].gap, X.carried_size(k, end)) for k in carried_layers))

    def _prove_jointly(self, end: int, name: str, coordinates: list[int], claim: Vector) -> list[int]:
        """Return the coordinates at which lead + Σ rest(|V| + |V Z|) exceeds the claim (own has no terms in Z)."""
        X, before = self.X, range(end)
        T = [term for k in before for term in X.plain_terms(k, X.heads(k))]
        Tm = [term for k in before for term in X.drift_terms(k, X.heads(k))]
        rest = add(zeros(X.dim), *(self._sum(self.layers[k].rest, X.V_size[k]) for k in before))
        if name == "err":
            Tm += [term for k in before for term in X.output_terms(k, end, X.heads(k))]
            rest = add(rest, *(self._sum(self.layers[k].rest, X.carried_size(k, end)) for k in before))
        lead, step = Lead(T, Tm, X.dim, self.radius, "box"), f"{end}.{name}"
        kept = self.claims.leads.get(step)
        return [
            a
            for a in coordinates
            if not any((bound + rest[a]).upper() <= claim[a] for bound in lead.bounds(step, a, kept))
        ]

    def _sum(self, per_head: list[Vector], sizes: list[arb_mat]) -> Vector:
        """Bound Σ_h g_h|M_h|."""
        return add(zeros(self.X.dim), *(through(g, size) for g, size in zip(per_head, sizes, strict=True)))
