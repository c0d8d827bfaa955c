"""Heads that occur in two networks, bounded on the box by the difference of their terms (docs/math.md §3.6).

X_k are the states of S and Y_k' those of S'. A head that occurs in both contributes only the difference of its two
terms. All vectors are per coordinate, for the box.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from depthgauge.theory.certificates.expansion_layers import ExpansionLayers
from depthgauge.theory.certificates.regions import ConvexRegion, Region
from depthgauge.theory.linalg.bound_arithmetic import Upper, total
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.surrogates.expansion import LayerMatch


def free_heads(network: SelfAttentionNetwork, k: int, matches: Sequence[LayerMatch], side: int) -> list[int]:
    """Return the heads of layer k that are not matched; `side` is 0 for S and 1 for S'."""
    taken = {h for m in matches if (m.k, m.other)[side] == k for h in (m.heads, m.others)[side]}
    return [h for h in range(network[k].heads) if h not in taken]


class MatchedHeads:
    """Bounds on the difference of the terms of matched heads, which are `matches`."""

    def __init__(
        self, region: Region, S: ExpansionLayers, other: ExpansionLayers, matches: Sequence[LayerMatch]
    ) -> None:
        self.region, self.S, self.other, self.matches = region, S, other, matches
        self._gaps: dict[tuple[int, int], Upper] = {}
        for match in matches:
            self._gaps[match.k, match.other] = self._gap(match)

    def _gap(self, match: LayerMatch) -> Upper:
        """Compute g ≥ |(P(X) − U) X − (P(Y) − U) Y| for the heads of a match.

        g = min(2 tanh(δθ/4)·spread_X + 2 tanh(θ_Y/4)·dOwn, G_X + G_Y),
        δθ = 2(‖diag(dErr) W diag(spread_X)‖ + ‖diag(state_Y) W diag(dOwn)‖), β in W.
        """
        X, Y = self.S.states[match.k], self.other.states[match.other]
        assert isinstance(self.region, ConvexRegion)
        pairing = self.region.pairing(self.S.X.W[match.k][list(match.heads)])
        d_own, d_err = self._apart(match)
        d_theta = (pairing(d_err, X.spread) + pairing(Y.state, d_own)) * 2.0
        theta = self.other.heads[match.other].theta[list(match.others)]
        turned: Upper = (d_theta / 4.0).tanh()[:, None] * X.spread + (theta / 4.0).tanh()[:, None] * d_own
        return (turned * 2.0).least(self._own_gap(self.S, match.k, match.heads) + self._other_gap(match))

    def _own_gap(self, layers: ExpansionLayers, k: int, heads: Sequence[int]) -> Upper:
        """Return G = 2 tanh(θ/4)·spread of some heads."""
        return layers.heads[k].uneven[list(heads)][:, None] * layers.states[k].spread * 2.0

    def _other_gap(self, match: LayerMatch) -> Upper:
        return self._own_gap(self.other, match.other, match.others)

    def _apart(self, match: LayerMatch) -> tuple[Upper, Upper]:
        """Bound X_k − Y_k': its token-dependent part by dOwn, the whole by dErr.

        A head matched before both states contributes its g, every other head before them its G.
        """
        k, other = match.k, match.other
        drift = self.region.length(self.S.X.drift(0, k) - self.other.X.drift(0, other))
        own, err = self.S.A.zeros(drift.shape[0]), drift
        for side, (layers, end, before) in enumerate(((self.S, k, other), (self.other, other, k))):
            for j in range(end):
                mask = self.mask(side, j, before)
                by_token = (layers.inner(j, None) * mask).sum(0)
                own, err = own + by_token, total(err, by_token, (layers.inner(j, end) * mask).sum(0))
        for earlier in self.matches:
            if earlier.k < k and earlier.other < other:
                added = self.by_token(earlier).sum(0)
                own, err = own + added, total(err, added, self._in_common(earlier, k, other))
        X, Y = self.S.states[k], self.other.states[other]
        return own.least(X.own + Y.own), err.least(total(drift, X.err, Y.err))

    def mask(self, side: int, k: int, before: float = math.inf) -> Tensor:
        """Return 0 for heads of layer k of S (`side` 0) or S' that are matched to a layer before `before`, else 1."""
        layers = (self.S, self.other)[side]
        found = torch.ones(layers.X.V[k].shape[0], 1, dtype=torch.float64)
        for m in self.matches:
            if (m.k, m.other)[side] == k and (m.other, m.k)[side] < before:
                found[list((m.heads, m.others)[side])] = 0.0
        return found

    def by_token(self, match: LayerMatch) -> Upper:
        """Bound the difference of the token-dependent parts of the heads of a match, g|V|."""
        return self.region.through(self._gaps[match.k, match.other], self.S.X.V[match.k][list(match.heads)])

    def spread_out(self, match: LayerMatch) -> Upper:
        """Return `by_token` with a row of zeros for every other head of the layer."""
        heads = self.S.X.V[match.k].shape[0]
        rows = torch.eye(heads, dtype=torch.float64)[:, list(match.heads)]
        return self.S.A.upper(rows) @ self.by_token(match)

    def _in_common(self, match: LayerMatch, end: int, end_other: int) -> Upper:
        """Bound the difference of the common parts of matched heads in X_end and Y_end'.

        min(g|V Z| + G_Y|V(Z − Z')|, G_X|V Z| + G_Y|V Z'|).
        """
        through = self.region.through
        mine = self.S.X.carried(match.k, end)[list(match.heads)]
        theirs = self.other.X.carried(match.other, end_other)[list(match.others)]
        G = self._other_gap(match)
        together = through(self._gaps[match.k, match.other], mine).sum(0) + through(G, mine - theirs).sum(0)
        own = self._own_gap(self.S, match.k, match.heads)
        return together.least(through(own, mine).sum(0) + through(G, theirs).sum(0))

    def added(self, match: LayerMatch) -> Upper:
        """Bound what the heads of a match add to the output."""
        return self.by_token(match).sum(0) + self._in_common(match, self.S.X.depth, self.other.X.depth)
