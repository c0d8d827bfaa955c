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

from collections.abc import Callable
from typing import NamedTuple

from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.pair_lead import BLOCK
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


class EarlierHeads(NamedTuple):
    """Bounds with a row for each head of the first layers.

    These are own_k and spread_k of its layer, `uneven`, the length of (P_h − U) X_k V_h, and ρθ² + moved/4.
    """

    own: Upper
    spread: Upper
    uneven: Upper
    by_token: Upper
    curved: Upper


def blocks(count: int, entries: int) -> list[slice]:
    """Cut `count` matrices with so many entries each into parts of at most `BLOCK` entries."""
    many = max(1, BLOCK // entries)
    return [slice(start, start + many) for start in range(0, count, many)]


class ExpansionLayers:
    """Bounds of every layer of a network; `states[k]` are those at the input of layer k, `states[L]` of the output.

    With `joint`, `rest` is bounded for every head, which a joint bound of the output needs. With `prefixes`, own_ℓ and
    err_ℓ are bounded jointly as well, and the smaller bound is used at every ℓ. This costs two leading terms per layer
    and sharpens only what is beyond the leading one.

    The heads of all layers before one are bounded together, in arrays with a row for each head.
    """

    def __init__(
        self, X: Expansion, region: Region, *, joint: bool, prefixes: bool = False, progress: Step = silent
    ) -> None:
        self.X, self.region, self.A, self.prefixes = X, region, X.A, prefixes
        self.joint = joint and X.skip
        self.states: list[States] = []
        self.heads: list[HeadScores] = []
        self._gaps: dict[int, Upper] = {}
        self._every: list[Upper] = []
        for k in range(X.depth):
            progress(k, X.depth, "proving")
            self.states.append(self._states(k))
            W = X.W[k]
            theta, moved = self._scores(k, W, X.drift(0, k) @ W)
            uneven = (theta / 4.0).tanh().least(region.unevenness)
            self.heads.append(HeadScores(theta, uneven, moved))
            own, err, state, spread = (length.expand(W.shape[0], *length.shape) for length in self.states[k])
            by_token = uneven[:, None] * region.spread_length(States(own, err, state, spread), X.V[k])
            curved = theta if moved is None else theta * theta * self.A.rho + moved * 0.25
            found = [own, spread, uneven[:, None], by_token, curved[:, None]]
            self._every = [self.A.cat(list(pair)) for pair in zip(self._every, found, strict=True)] if k else found
        self.states.append(self._states(X.depth))

    def _earlier(self, end: int) -> "EarlierHeads":
        """Return the bounds of the heads of all layers before `end`."""
        return EarlierHeads(*(one[: self.X.first[end]] for one in self._every))

    def _scores(self, k: int, W: Enclosed, drifting: Enclosed) -> tuple[Upper, Upper | None]:
        """Bound θ and the range of the part of a row of scores that errors cause, as `Region.scores`."""
        states, region = self.states[k], self.region
        if not (self.joint and isinstance(region, PointRegion)):
            return region.scores(states, W, drifting, joint=self.joint)
        both, heads = self.A.cat([W, drifting]), W.shape[0]
        largest, rows = region.largest(both), region.widest_row(both)
        query = largest[:heads] + largest[heads:]
        by_query = (region.ranges(W.mT) * states.err).sum(-1)
        by_key = (query * states.own).sum(-1) * 2.0
        if k:
            by_query, by_key = by_query.least(self._query_moved(k, W)), by_key.least(self._key_moved(k, both, query))
        moved = total(by_query, by_key, (region.through(states.err, W) * states.own).sum(-1) * 2.0)
        return total(rows[:heads], rows[heads:], moved), moved

    def _query_moved(self, k: int, W: Enclosed) -> Upper:
        """Bound the range over tokens y of e W_h yᵀ for rows e of the whole error, (P − U) X_j V and carried on."""
        region, X, early = self.region, self.X, self._earlier(k)
        chosen = [*range(X.first[k]), *range(X.first[k - 1])]  # layer k − 1 is not carried on
        made = self.A.cat([X.every_V[: X.first[k]], X.every_carried(k)[: X.first[k - 1]]])
        own, uneven = early.own[chosen], early.uneven[chosen]
        moved = self.A.zeros(W.shape[0])
        for some in blocks(len(chosen), W.shape[0] * X.dim**2):
            each = (made[some, None] @ W[None]).reshape(-1, X.dim, X.dim).mT
            reach = region.widest_row(each, centred=True).reshape(-1, W.shape[0])
            late = (region.ranges(each).reshape(-1, W.shape[0], X.dim) * own[some, None]).sum(-1)
            moved = moved + ((reach + late) * uneven[some]).sum(0)
        return moved * 2.0

    def _key_moved(self, k: int, both: Enclosed, query: Upper) -> Upper:
        """Bound the range of y W_h oᵀ for y = x + m Z and rows o of (P − U) X_j V; `both` are W and Z W."""
        region, X, early, heads = self.region, self.X, self._earlier(k), query.shape[0]
        moved = self.A.zeros(heads)
        for some in blocks(X.first[k], 2 * heads * X.dim**2):
            V = X.every_V[: X.first[k]][some]
            each = (both[None] @ V.mT[:, None]).reshape(-1, X.dim, X.dim)
            reach = region.widest_row(each).reshape(-1, 2, heads).sum(1)
            late = (region.through(early.own[some], V)[:, None] * query).sum(-1) * 2.0
            moved = moved + ((reach + late) * early.uneven[some]).sum(0)
        return moved * 2.0

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
        own = (self._earlier(end).by_token if X.skip else self.inner(end - 1, None)).sum(0)
        err = own + self.carried_on(end)[: X.first[end - 1]].sum(0) if end > 1 else own
        if not (self.joint and self.prefixes):
            return own, err
        # Both bounds hold, so their minimum does: |Σ E_k| ≤ min(Σ G|V|, lead(T, Tᵐ) + Σ rest|V|), and likewise for err.
        rest_own = self.rest(X.every_V[: X.first[end]]).sum(0)
        rest_err = rest_own + self.rest(X.every_carried(end)).sum(0)
        T = [self.terms(k) for k in range(end)]
        early, both = ([terms for k in range(end) for terms in self.drifts(k, last or k + 1)] for last in (0, end))
        for_own, for_err = (self._led(T, Tm) for Tm in (early, both))
        return own.least(rest_own + for_own), err.least(rest_err + for_err)

    def _led(self, T: list[Rank1Sum], Tm: list[Rank1Sum]) -> Upper:
        both = (Rank1Sum.join(self.A, self.X.dim, parts) for parts in (T, Tm))
        return total(*(lead.value for lead in self.region.lead(*both, steps=PREFIX_STEPS)))

    def inner(self, k: int, end: int | None) -> Upper:
        """Bound the length of (P_h − U) X_k V_h, or of (P_h − U) X_k V_h Z_{k+1:ℓ}, for every head h of layer k."""
        every = self._earlier(k + 1).by_token if end is None else self.carried_on(end)
        return every[self.X.heads_of(k)]

    def carried_on(self, end: int) -> Upper:
        """Bound the length of (P_h − U) X_k V_h Z_{k+1:ℓ} for every head before layer ℓ."""
        if end not in self._gaps:
            self._gaps[end] = self.gap(self.X.every_carried(end), self.region.spread_length)
        return self._gaps[end]

    def gap(self, M: Enclosed, spread: Callable[[States, Enclosed], Upper]) -> Upper:
        """Bound |(P_h − U) X_k M_h| for the heads h of the first layers, by the `spread` of X_k."""
        own, widest, uneven, *_ = (one[: M.shape[0]] for one in self._every)
        return uneven * spread(States(own, own, widest, widest), M)

    def rest(self, M: Enclosed) -> Upper:
        """Bound |(P_h − U) X_k M_h − Cov(y W x, x M)|, the part beyond the leading term, for heads of the first layers.

        The softmax differs from its linear part by at most ρθ² in total variation, and |Cov(e, z)| ≤ ¼ range(e)
        range(z).
        """
        assert self.joint
        own, _, uneven, _, curved = (one[: M.shape[0]] for one in self._every)
        read = self.region.read(own, M)
        if isinstance(self.region, PointRegion):
            later = [k for k in range(1, self.X.depth) if self.X.first[k] < M.shape[0]]
            first = read[: self.X.first[1]]
            products = self.A.cat([first, *(self._own_read(k, M[self.X.heads_of(k)]) for k in later)])
            read = read.least(products)
        return curved * self.region.ranges(M) + uneven * read * 2.0

    def _own_read(self, k: int, M: Enclosed) -> Upper:
        """Bound |(o M_h)_c| for the rows o of Σ_{j<k} E_j, by products V M before the bound over points."""
        region, X, early, (heads, _, m) = self.region, self.X, self._earlier(k), M.shape
        found = self.A.zeros(heads, m)
        for some in blocks(X.first[k], heads * X.dim * m):
            made = X.every_V[: X.first[k]][some, None] @ M[None]
            own = early.own[some, None].expand(made.shape[0], heads, X.dim).reshape(-1, X.dim)
            flat = made.reshape(-1, X.dim, m)
            reach = (region.ranges(flat) + region.through(own, flat) * 2.0).reshape(-1, heads, m)
            found = found + (reach * early.uneven[some, None]).sum(0)
        return found

    def added(self, readout: Enclosed | None = None) -> list[Upper]:
        """Bound what every head adds to the output, or to the output times R with a readout R, by layer.

        Without skips E_k enters the output once: as it is for the last layer, else carried on.
        """
        X = self.X
        if readout is None and self.region.by_coordinate:
            carried = self.carried_on(X.depth)
            return self._by_layer(self._earlier(X.depth).by_token + carried if X.skip else carried)
        return self._by_layer(self._of_both(lambda M: self.gap(M, self.region.spread_range), readout))

    def beyond(self, readout: Enclosed | None = None) -> list[Upper]:
        """Bound what every head adds beyond the leading term, by layer."""
        return self._by_layer(self._of_both(self.rest, readout))

    def _of_both(self, bound: Callable[[Enclosed], Upper], readout: Enclosed | None) -> Upper:
        """Bound what E_k adds as it is and carried on, by a bound for columns."""
        X = self.X
        parts = [*([X.every_V] if X.skip else []), X.every_carried(X.depth)]
        columns = [M if readout is None else M @ readout for M in parts]
        found, m = bound(self.A.cat(columns, -1)), columns[0].shape[-1]
        return found if len(parts) == 1 else found[:, :m] + found[:, m:]

    def _by_layer(self, every: Upper) -> list[Upper]:
        return [every[self.X.heads_of(k)] for k in range(self.X.depth)]

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
