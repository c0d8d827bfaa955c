"""Layer-by-layer bounds of a network over a region (docs/math.md §3.2–3.4, §3.8 and §3.11).

The lengths, in the sense of the region, hold for every token and for any number of tokens:

    own_ℓ     Σ_{k<ℓ} E_k, the token-dependent part of the error of the expansion
    err_ℓ     Σ_{k<ℓ} E_k + 1·mean(E_k)·Z_{k+1:ℓ}, the whole error
    state_ℓ   the tokens of X_ℓ
    spread_ℓ  half the range over the tokens of X_ℓ

With R(M) the range over the tokens of the part of x_j M that depends on the token,

    |(P_h − U) X_k M| ≤ tanh(θ_h/4)·R(M),

where θ_h bounds the range of a row of scores (§2.2, §2.3).
"""

from typing import NamedTuple

from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.regions import PointRegion, Region, States
from depthgauge.theory.linalg.bound_arithmetic import Enclosed, Upper, total
from depthgauge.theory.surrogates.expansion import Expansion

PREFIX_STEPS = 10
"""Optimisation steps for the scalings of the joint bound of an intermediate state."""


class HeadScores(NamedTuple):
    """Per head: θ, min(tanh(θ/4), 1 − 1/n), and the range of the part of the scores that errors cause."""

    theta: Upper
    uneven: Upper
    moved: Upper | None


class ExpansionLayers:
    """Bounds of every layer of a network; `states[k]` are those at the input of layer k, `states[L]` of the output.

    With `joint`, `rest` is bounded for every head, which a joint bound of the output needs. With `prefixes`, own_ℓ and
    err_ℓ are bounded jointly as well, and the smaller bound is used at every ℓ. This costs two leading terms per layer
    and sharpens only what is beyond the leading one.
    """

    def __init__(
        self, X: Expansion, region: Region, *, joint: bool, prefixes: bool = False, progress: Step = silent
    ) -> None:
        self.X, self.region, self.A, self.prefixes = X, region, X.A, prefixes
        self.joint = joint and X.skip
        self.states: list[States] = []
        self.heads: list[HeadScores] = []
        self._gaps: dict[tuple[int, int | None], Upper] = {}
        for k in range(X.depth):
            progress(k, X.depth, "proving")
            self.states.append(self._states(k))
            W = X.W[k]
            theta, moved = self._scores(k, W, X.drift(0, k) @ W)
            self.heads.append(HeadScores(theta, (theta / 4.0).tanh().least(region.unevenness), moved))
        self.states.append(self._states(X.depth))

    def _scores(self, k: int, W: Enclosed, drifting: Enclosed) -> tuple[Upper, Upper | None]:
        """Bound θ and the range of the part of a row of scores that errors cause, as `Region.scores`."""
        states, region = self.states[k], self.region
        if not (self.joint and isinstance(region, PointRegion)):
            return region.scores(states, W, drifting, joint=self.joint)
        query = total(region.largest(W), region.largest(drifting))
        by_query = (region.ranges(W.mT) * states.err).sum(-1)
        by_key = (query * states.own).sum(-1) * 2.0
        if k:
            ends = (None, k)
            by_query = by_query.least(total(*(self._query_moved(j, end, W) for j in range(k) for end in ends)))
            by_key = by_key.least(total(*(self._key_moved(j, W, drifting, query) for j in range(k))) * 2.0)
        moved = total(by_query, by_key, (region.through(states.err, W) * states.own).sum(-1) * 2.0)
        return total(region.widest_row(W), region.widest_row(drifting), moved), moved

    def _query_moved(self, j: int, end: int | None, W: Enclosed) -> Upper:
        """Bound the range over tokens y of e W_h yᵀ for e = (P − U) X_j V, or e = mean((P − U) X_j) V Z, of layer j."""
        region, uneven = self.region, self.heads[j].uneven
        made = (self.X.V[j] if end is None else self.X.carried(j, end))[:, None] @ W[None]
        flat = made.reshape(-1, *W.shape[-2:])
        reach = region.widest_row(flat.mT, centred=True) + (region.ranges(flat.mT) * self.states[j].own).sum(-1)
        return (reach.reshape(*made.shape[:2]) * uneven[:, None]).sum(0) * 2.0

    def _key_moved(self, j: int, W: Enclosed, drifting: Enclosed, query: Upper) -> Upper:
        """Bound |y W_h oᵀ| for y = x + m Z and a row o of (P − U) X_j V of layer j."""
        region, uneven, V = self.region, self.heads[j].uneven, self.X.V[j]
        made = [(matrix[None] @ V.mT[:, None]).reshape(-1, *W.shape[-2:]) for matrix in (W, drifting)]
        reach = total(*(region.widest_row(flat) for flat in made)).reshape(V.shape[0], W.shape[0])
        late = (region.through(self.states[j].own, V)[:, None] * query).sum(-1) * 2.0
        return ((reach + late) * uneven[:, None]).sum(0)

    def _states(self, k: int) -> States:
        """Bound state = min(φ + |x Z_{0:ℓ}| + err, grown), spread = min(φ + own, state); without skips no φ."""
        X, start = self.X, self.region.start
        own, err = self._own_and_err(k)
        if k == 0:
            return States(own, err, start, start)
        drift = self.region.length(X.drift(0, k))
        state, spread = (total(start, drift, err), start + own) if X.skip else (drift + err, own)
        # |X_k| ≤ state_{k−1} + Σ_h state_{k−1} |V_h| for every attention, without the first term where there is no skip
        before = self.states[k - 1].state
        grown = self.region.through(before, X.V[k - 1]).sum(0)
        state = state.least(before + grown if X.skip else grown)
        return States(own, err, state, spread.least(state))

    def _own_and_err(self, end: int) -> tuple[Upper, Upper]:
        X, zero = self.X, self.A.zeros(self.region.start.shape[0])
        if end == 0:
            return zero, zero
        # Without skips X_ℓ = 1·m·N_{0:ℓ} + E_{ℓ−1} + Σ_{k<ℓ−1} 1·mean(E_k)·N_{k+1:ℓ}: E_{ℓ−1} depends on the token.
        own = total(*(self.inner(k, None).sum(0) for k in (range(end) if X.skip else [end - 1])))
        err = total(own, *(self.inner(k, end).sum(0) for k in range(end if X.skip else end - 1)))
        if not (self.joint and self.prefixes):
            return own, err
        # Both bounds hold, so their minimum does: |Σ E_k| ≤ min(Σ G|V|, lead(T, Tᵐ) + Σ rest|V|), and likewise for err.
        rest_own = total(*(self.rest(k, X.V[k]).sum(0) for k in range(end)))
        rest_err = total(rest_own, *(self.rest(k, X.carried(k, end)).sum(0) for k in range(end)))
        T = [self.terms(k) for k in range(end)]
        early, both = ([terms for k in range(end) for terms in self.drifts(k, last or k + 1)] for last in (0, end))
        for_own, for_err = (self._led(T, Tm) for Tm in (early, both))
        return own.least(rest_own + for_own), err.least(rest_err + for_err)

    def _led(self, T: list[Rank1Sum], Tm: list[Rank1Sum]) -> Upper:
        both = (Rank1Sum.join(self.A, self.X.dim, parts) for parts in (T, Tm))
        return total(*(lead.value for lead in self.region.lead(*both, steps=PREFIX_STEPS)))

    def inner(self, k: int, end: int | None) -> Upper:
        """Bound the length of (P_h − U) X_k V_h, or of (P_h − U) X_k V_h Z_{k+1:ℓ}, for every head h of layer k."""
        if (k, end) not in self._gaps:
            M = self.X.V[k] if end is None else self.X.carried(k, end)
            self._gaps[k, end] = self.heads[k].uneven[:, None] * self.region.spread_length(self.states[k], M)
        return self._gaps[k, end]

    def gap(self, k: int, M: Enclosed) -> Upper:
        """Bound |(P_h − U) X_k M_h| for every head h of layer k."""
        return self.heads[k].uneven[:, None] * self.region.spread_range(self.states[k], M)

    def rest(self, k: int, M: Enclosed) -> Upper:
        """Bound |(P_h − U) X_k M_h − Cov(y W x, x M)|, the part beyond the leading term, for every head of layer k.

        The softmax differs from its linear part by at most ρθ² in total variation, and |Cov(e, z)| ≤ ¼ range(e)
        range(z).
        """
        theta, uneven, moved = self.heads[k]
        assert moved is not None
        curved = theta * theta * self.A.rho + moved * 0.25
        return curved[:, None] * self.region.ranges(M) + uneven[:, None] * self._own_read(k, M) * 2.0

    def _own_read(self, k: int, M: Enclosed) -> Upper:
        """Bound |(o M_h)_c| for the rows o of Σ_{j<k} E_j; on points by products V M before the bound over points."""
        read = self.region.read(self.states[k].own, M)
        if not k or not isinstance(self.region, PointRegion):
            return read
        heads, _, m = M.shape
        found = []
        for j in range(k):
            made = (self.X.V[j][:, None] @ M[None]).reshape(-1, self.X.dim, m)
            reach = self.region.spread_range(self.states[j], made).reshape(-1, heads, m)
            found.append((reach * self.heads[j].uneven[:, None, None]).sum(0))
        return read.least(total(*found))

    def added(self, k: int, readout: Enclosed | None = None) -> Upper:
        """Bound what every head of layer k adds to the output, or to the output times R with a readout R.

        Without skips E_k enters the output once: as it is for the last layer, else carried on.
        """
        X = self.X
        ends = [None, X.depth] if X.skip else [None if k == X.depth - 1 else X.depth]
        if readout is None and self.region.by_coordinate:
            return total(*(self.inner(k, end) for end in ends))
        parts = (X.V[k] if end is None else X.carried(k, end) for end in ends)
        return total(*(self.gap(k, M if readout is None else M @ readout) for M in parts))

    def beyond(self, k: int, readout: Enclosed | None = None) -> Upper:
        """Bound what every head of layer k adds beyond the leading term."""
        parts = (self.X.V[k], self.X.carried(k, self.X.depth))
        return total(*(self.rest(k, M if readout is None else M @ readout) for M in parts))

    def terms(self, k: int) -> Rank1Sum:
        """Return the terms W_h[b, c] V_h[e, a] of T of the heads of layer k."""
        return Rank1Sum(self.A, self.X.W[k], self.X.V[k])

    def drifts(self, k: int, end: int | None = None) -> list[Rank1Sum]:
        """Return the terms of Tᵐ of layer k; `end` is ℓ, by default L.

        They are (Z_{0:k} W_h)[b, c] V_h[e, a] from the drift m Z_{0:k} of the queries, and
        (N_{0:k} W_h)[b, c] (V_h Z_{k+1:ℓ})[e, a] from mean(E_k), carried on by later layers. The first are zero for
        k = 0, the second for k = ℓ − 1.
        """
        W, V, drifting = self.X.W[k], self.X.V[k], self.X.drift(0, k) @ self.X.W[k]
        end = self.X.depth if end is None else end
        early = [Rank1Sum(self.A, drifting, V)] if k else []
        return early + ([Rank1Sum(self.A, W + drifting, self.X.carried(k, end))] if k < end - 1 else [])
