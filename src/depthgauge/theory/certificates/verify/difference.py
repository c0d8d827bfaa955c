"""The difference of two networks on the box in arb interval arithmetic (docs/math.md §3.6)."""

from collections.abc import Sequence

from depthgauge.theory.certificates.verify.arb_vectors import (
    Vector,
    absolute,
    add,
    column_sums,
    sign_norms,
    smaller_of,
    through,
    times,
)
from depthgauge.theory.certificates.verify.box import BoxLayers, gap, rho
from depthgauge.theory.certificates.verify.expansion import negated, zeros
from depthgauge.theory.certificates.verify.lead import Lead, Terms
from depthgauge.theory.linalg.enclosures import SignBound
from depthgauge.theory.surrogates.expansion import LayerMatch

Head = tuple[int, int]


class ArbBoxDifference:
    """Upper bounds on |S − S'| over the box, per output coordinate; X refers to S and Y to S'."""

    def __init__(self, X: BoxLayers, Y: BoxLayers, matches: Sequence[LayerMatch], record: dict[str, SignBound]) -> None:
        self.X, self.Y, self.record = X, Y, record
        self.d, self.L, self.L_other = X.X.dim, X.X.depth, Y.X.depth
        self.partner: dict[Head, Head] = {}
        self.g: dict[Head, Vector] = {}
        self.linear = times(X.radius, column_sums(X.X.drift(0, self.L) - Y.X.drift(0, self.L_other)))
        for match in matches:
            pairs = zip(match.heads, match.others, strict=True)
            self.partner.update({(match.k, h): (match.other, other) for h, other in pairs})
        for match in matches:
            self._match(match)
        self.taken = set(self.partner.values())

    def _match(self, match: LayerMatch) -> None:
        """Compute g = min(2 tanh(δθ/4)·spread_X + 2 tanh(θ_Y/4)·dOwn, G_X + G_Y) for the heads of one match."""
        X, Y = self.X.layers[match.k], self.Y.layers[match.other]
        d_own, d_err = self._apart(match.k, match.other)
        W = [self.X.X.W[match.k][h] for h in match.heads]
        name = f"{match.k}~{match.other}"
        by_query = sign_norms(self.record, f"{name}.dErr", d_err, W, X.spread)
        by_key = sign_norms(self.record, f"{name}.dOwn", Y.state, W, d_own)
        for i, (h, other) in enumerate(zip(match.heads, match.others, strict=True)):
            d_theta = (2 * (by_query[i] + by_key[i])).upper()
            together = add(gap(d_theta, X.spread), gap(Y.theta[other], d_own))
            self.g[match.k, h] = smaller_of(together, add(X.gap[h], Y.gap[other]))

    def _apart(self, k: int, other: int) -> tuple[Vector, Vector]:
        """Bound X_k − Y_k' by dOwn and dErr; a head matched before both contributes g, any other head before them G."""
        drift = times(self.X.radius, column_sums(self.X.X.drift(0, k) - self.Y.X.drift(0, other)))
        own, whole = self._heads_apart(k, other)
        own = smaller_of(own, add(self.X.layers[k].own, self.Y.layers[other].own))
        return own, add(drift, smaller_of(whole, add(self.X.layers[k].err, self.Y.layers[other].err)))

    def _heads_apart(self, k: int, other: int) -> tuple[Vector, Vector]:
        """Bound the difference of the heads before X_k and Y_k': its token-dependent part, and the whole."""
        together = {h: p for h, p in self.partner.items() if h[0] < k and p[0] < other}
        theirs = set(together.values())
        own, common = [zeros(self.d)], [zeros(self.d)]
        for head, partner in together.items():
            own.append(through(self.g[head], self.X.X.V_size[head[0]][head[1]]))
            common.append(self._common_apart(head, partner, k, other))
        for layers, end, done in ((self.X, k, set(together)), (self.Y, other, theirs)):
            for j in range(end):
                for h in layers.X.heads(j):
                    if (j, h) not in done:
                        mine, carried = _added(layers, j, h, layers.layers[j].gap[h], end)
                        own.append(mine)
                        common.append(carried)
        return add(*own), add(*own, *common)

    def _common_apart(self, head: Head, partner: Head, end: int, end_other: int) -> Vector:
        """Bound the common parts of a matched head by min(g|V Z| + G_Y|V(Z − Z')|, G_X|V Z| + G_Y|V Z'|)."""
        (k, h), (j, i) = head, partner
        mine, theirs = self.X.X.carried(k, end)[h], self.Y.X.carried(j, end_other)[i]
        G_X, G_Y = self.X.layers[k].gap[h], self.Y.layers[j].gap[i]
        mine_size, theirs_size = self.X.X.carried_size(k, end)[h], self.Y.X.carried_size(j, end_other)[i]
        together = add(through(self.g[head], mine_size), through(G_Y, absolute(mine - theirs)))
        return smaller_of(together, add(through(G_X, mine_size), through(G_Y, theirs_size)))

    def plain(self) -> Vector:
        """Bound |S − S'| by the sum of the bounds of all heads, and by state_L + state'_L'."""
        _, heads = self._heads_apart(self.L, self.L_other)
        return smaller_of(add(self.linear, heads), add(self.X.layers[-1].state, self.Y.layers[-1].state))

    def joint(self) -> tuple[Lead, Vector]:
        """Return the leading term and the bound on everything beyond it."""
        if self.L_other == 1:
            return self._joint_with_one_layer()
        X = self.X.X
        free = {k: [h for h in X.heads(k) if (k, h) not in self.partner] for k in range(self.L)}
        beyond = [self.linear]
        for head, partner in self.partner.items():
            beyond.append(through(self.g[head], X.V_size[head[0]][head[1]]))
            beyond.append(self._common_apart(head, partner, self.L, self.L_other))
        for j in range(self.L_other):
            for i in self.Y.X.heads(j):
                if (j, i) not in self.taken:
                    beyond += _added(self.Y, j, i, self.Y.layers[j].gap[i], self.L_other)
        return self._lead_of(free, free, []), add(*beyond, self._rest(free))

    def _joint_with_one_layer(self) -> tuple[Lead, Vector]:
        """Do the same for S' of one layer: its leading term is subtracted in T, and its rest is at most 2ρθ'²φ1|V'|."""
        X, Y = self.X.X, self.Y.X
        everyone = {k: list(X.heads(k)) for k in range(self.L)}
        free = {k: [h for h in everyone[k] if (k, h) not in self.partner] for k in range(self.L)}
        theirs = [i for i in Y.heads(0) if (0, i) not in self.taken]
        start = self.Y.layers[0]
        curved = [times((2 * rho() * theta**2).upper(), start.spread) for theta in start.theta]
        beyond = [through(c, size) for c, size in zip(curved, Y.V_size[0], strict=True)]
        lead = self._lead_of(free, everyone, negated(Y.plain_terms(0, theirs)))
        return lead, add(self.linear, *beyond, self._rest(everyone))

    def _lead_of(self, free: dict[int, list[int]], drifting: dict[int, list[int]], subtracted: Terms) -> Lead:
        """Return the leading term with T of the heads `free` and Tᵐ of the heads `drifting`."""
        X, layers = self.X.X, range(self.L)
        T = [term for k in layers for term in X.plain_terms(k, free[k])] + subtracted
        Tm = [term for k in layers for term in X.drift_terms(k, drifting[k])]
        Tm += [term for k in layers for term in X.output_terms(k, self.L, drifting[k])]
        return Lead(T, Tm, self.d, self.X.radius, "box")

    def _rest(self, heads: dict[int, list[int]]) -> Vector:
        """Bound Σ rest(|V| + |V Z|) over the given heads of S."""
        parts = [zeros(self.d)]
        for k, chosen in heads.items():
            for h in chosen:
                parts += _added(self.X, k, h, self.X.layers[k].rest[h], self.L)
        return add(*parts)


def _added(layers: BoxLayers, k: int, h: int, g: Vector, end: int) -> tuple[Vector, Vector]:
    """Bound the contribution of a head with |(P − U)X| ≤ g to state ℓ: g|V| per token and g|V Z_{k+1:ℓ}| in common.

    Without skips the first is present for k = ℓ − 1 only, the second for k < ℓ − 1 only, with N in place of Z (§3.1).
    """
    X = layers.X
    nothing = zeros(X.dim)
    own = through(g, X.V_size[k][h]) if X.skip or k == end - 1 else nothing
    return own, through(g, X.carried_size(k, end)[h]) if X.skip or k < end - 1 else nothing
