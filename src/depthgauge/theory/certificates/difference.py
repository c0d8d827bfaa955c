"""Upper bounds on |S − S'| over the box, from the layer bounds of both networks (docs/math.md §3.6).

Let X_k be the states of S and Y_k' those of S'. Subtracting the exact expansions of both gives

    S(X) − S'(X) = 1·mean(X)·(Z_{0:L} − Z'_{0:L'}) + Σ (terms of the heads of S) − Σ (terms of the heads of S').

A head that occurs in both networks contributes only the difference of its two terms.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from depthgauge.base.array_record import ArrayRecord
from depthgauge.theory.certificates.box import (
    RHO,
    BoxBounds,
    HeadVectors,
    Norms,
    PartsByLayer,
    Vector,
    column_sums,
    drift_in_query,
    drift_of_output,
    gap_of,
    total,
    weighted,
    weighted_per_head,
)
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.linalg.rounding import add_up, mul_up, nonnegative_sum_up, tanh_up
from depthgauge.theory.surrogates.expansion import LayerMatch


@dataclass(frozen=True, eq=False, repr=False)
class Bound:
    """An upper bound per output coordinate; `head_parts[k][h]` bounds the contribution of head h of layer k alone."""

    value: Vector
    head_parts: PartsByLayer


class BoxDifference:
    """Upper bounds on |S − S'| over the box, per output coordinate; X refers to S and Y to S'."""

    def __init__(self, S: BoxBounds, other: BoxBounds, matches: Sequence[LayerMatch]) -> None:
        self.S, self.other, self.matches, self.norms = S, other, matches, Norms()
        self.L, self.L_other = S.expansion.depth, other.expansion.depth
        self.linear = column_sums(S.expansion.drift(0, self.L) - other.expansion.drift(0, self.L_other), S.radius)
        self._gaps: dict[tuple[int, int], HeadVectors] = {}
        for match in matches:
            self._gaps[match.k, match.other] = self._matched_gap(match)

    # --- matched heads ------------------------------------------------------------------------------------------

    def _matched_gap(self, match: LayerMatch) -> HeadVectors:
        """Compute g ≥ |(P(X) − U) X − (P(Y) − U) Y| for the heads of a match.

        g = min(2 tanh(δθ/4)·spread_X + 2 tanh(θ_Y/4)·dOwn, G_X + G_Y),
        δθ = 2(‖diag(dErr) W diag(spread_X)‖ + ‖diag(state_Y) W diag(dOwn)‖), β in W.
        """
        X, Y = self.S.layers[match.k], self.other.layers[match.other]
        heads, others = list(match.heads), list(match.others)
        W = self.S.expansion.W[match.k].at(heads)
        d_own, d_err = self._apart(match)
        norms, name = self.norms, f"{match.k}~{match.other}"
        d_theta = 2.0 * add_up(norms(f"{name}.dErr", d_err, W, X.spread), norms(f"{name}.dOwn", Y.state, W, d_own))
        moved = mul_up(2.0 * tanh_up(Y.theta[others] / 4.0)[:, None], d_own)
        return torch.fmin(add_up(gap_of(d_theta, X.spread), moved), add_up(X.gap[heads], Y.gap[others]))

    def _apart(self, match: LayerMatch) -> tuple[Vector, Vector]:
        """Bound X_k − Y_k': its token-dependent part by dOwn, the whole by dErr.

        A head matched before both states contributes its g, every other head before them its G.
        """
        k, other = match.k, match.other
        X, Y = self.S.expansion, self.other.expansion
        drift = column_sums(X.drift(0, k) - Y.drift(0, other), self.S.radius)
        own, err = torch.zeros_like(drift), drift
        for expansion, end, before, of_other in ((X, k, other, False), (Y, other, k, True)):
            for j in range(end):
                gap = self._unmatched_gap(j, before, of_other=of_other)
                own = add_up(own, weighted(gap, expansion.V[j]))
                err = total(err, weighted(gap, expansion.V[j]), weighted(gap, expansion.carried(j, end)))
        for earlier in self.matches:
            if earlier.k < k and earlier.other < other:
                V = X.V[earlier.k].at(earlier.heads)
                added = weighted(self._gaps[earlier.k, earlier.other], V)
                own, err = add_up(own, added), total(err, added, self._carried_apart(earlier, k, other))
        own = torch.fmin(own, add_up(self.S.layers[k].own, self.other.layers[other].own))
        err = torch.fmin(err, total(drift, self.S.layers[k].err, self.other.layers[other].err))
        return own, err

    def _carried_apart(self, match: LayerMatch, end: int, end_other: int) -> Vector:
        """Bound the difference of the common parts of matched heads in X_end and Y_end'.

        min(g|V Z| + G_Y|V(Z − Z')|, G_X|V Z| + G_Y|V Z'|).
        """
        heads, others = list(match.heads), list(match.others)
        mine = self.S.expansion.carried(match.k, end).at(heads)
        theirs = self.other.expansion.carried(match.other, end_other).at(others)
        Y_gap = self.other.layers[match.other].gap[others]
        together = add_up(weighted(self._gaps[match.k, match.other], mine), weighted(Y_gap, mine - theirs))
        apart = add_up(weighted(self.S.layers[match.k].gap[heads], mine), weighted(Y_gap, theirs))
        return torch.fmin(together, apart)

    def _unmatched_gap(self, k: int, before: float = math.inf, *, of_other: bool = False) -> HeadVectors:
        """Return G of layer k of S (of S' if `of_other`).

        Heads that are matched to a layer of the other network before `before` have zeros.
        """
        gap = (self.other if of_other else self.S).layers[k].gap.clone()
        for match in self.matches:
            pairs = (match.k, match.heads), (match.other, match.others)
            (layer, heads), (partner, _) = reversed(pairs) if of_other else pairs
            if layer == k and partner < before:
                gap[list(heads)] = 0.0
        return gap

    # --- the bounds ---------------------------------------------------------------------------------------------

    def plain(self) -> Bound:
        """Bound |S − S'| by the sum of the bounds of all heads, and by state_L + state'_L'."""
        parts = [_added(self.S, k, self._unmatched_gap(k)) for k in range(self.L)]
        value = total(self.linear, nonnegative_sum_up(torch.cat(parts), 0), self._other_part())
        for match, own, added in self._matched_parts():
            value = add_up(value, added)
            parts[match.k][list(match.heads)] = own
        # |S(X)| ≤ state_L and |S'(X)| ≤ state'_L' hold for every attention, so |S − S'| ≤ state_L + state'_L'.
        return Bound(torch.fmin(value, add_up(self.S.output.state, self.other.output.state)), tuple(parts))

    def _matched_parts(self) -> Iterator[tuple[LayerMatch, HeadVectors, Vector]]:
        """Yield per match g|V| of each head, and the sum over its heads of g|V| and the common parts."""
        for match in self.matches:
            V = self.S.expansion.V[match.k].at(match.heads)
            own = weighted_per_head(self._gaps[match.k, match.other], V)
            carried = self._carried_apart(match, self.L, self.L_other)
            yield match, own, add_up(nonnegative_sum_up(own, 0), carried)

    def _other_part(self) -> Vector:
        """Bound the sum of the terms of the unmatched heads of S'."""
        parts = [torch.zeros_like(self.linear)]
        for other in range(self.L_other):
            parts.append(nonnegative_sum_up(_added(self.other, other, self._unmatched_gap(other, of_other=True)), 0))
        return total(*parts)

    def joint(self) -> "JointParts":
        """Split |S − S'| into the leading term of the unmatched heads of S and a bound on everything else.

        If S' has one layer, its input is X itself. Its heads then have a leading term in X as well, which is
        subtracted in T; matched heads cancel in T, and their parts in Tᵐ and `rest` remain.
        Otherwise matched heads are bounded by g and the other heads of S' by G.
        """
        X, Y = self.S.expansion, self.other.expansion
        free = [self._free_heads(k) for k in range(self.L)]
        T = [Rank1Sum(X.W[k], X.V[k]).heads(free[k]) for k in range(self.L)]
        if self.L_other == 1:
            drifting = [list(range(len(X.W[k].mid))) for k in range(self.L)]
            taken = {h for match in self.matches for h in match.others}
            theirs = [h for h in range(len(Y.W[0].mid)) if h not in taken]
            T.append(Rank1Sum(Y.W[0], Y.V[0]).heads(theirs).negated())
            theta = self.other.layers[0].theta
            second_order = mul_up(mul_up(mul_up(2.0 * RHO, theta), theta)[:, None], self.other.layers[0].spread)
            beyond = add_up(self.linear, weighted(second_order, Y.V[0]))
        else:
            drifting = free
            beyond = total(self.linear, *(vector for _, _, vector in self._matched_parts()), self._other_part())
        Tm = [drift_in_query(X, k).heads(drifting[k]) for k in range(self.L)]
        Tm += [drift_of_output(X, k, self.L).heads(drifting[k]) for k in range(self.L)]
        for k in range(self.L):
            rest = self.S.layers[k].rest
            assert rest is not None
            chosen = torch.zeros_like(rest)
            chosen[drifting[k]] = rest[drifting[k]]
            beyond = total(beyond, weighted(chosen, X.V[k]), weighted(chosen, X.carried(k, self.L)))
        return JointParts(Rank1Sum.join(*T), Rank1Sum.join(*Tm), beyond)

    def _free_heads(self, k: int) -> list[int]:
        taken = {h for match in self.matches if match.k == k for h in match.heads}
        return [h for h in range(len(self.S.expansion.W[k].mid)) if h not in taken]


def _added(bounds: BoxBounds, k: int, gap: HeadVectors) -> HeadVectors:
    """Bound the contribution to the output of heads with |(P − U) X| ≤ gap in layer k: gap|V| + gap|V Z_{k+1:L}|.

    Without skips it is gap|V| for the last layer and gap|V N_{k+1:L}| for the others (docs/math.md §3.1).
    """
    X = bounds.expansion
    if X.skip:
        return add_up(weighted_per_head(gap, X.V[k]), weighted_per_head(gap, X.carried(k, X.depth)))
    return weighted_per_head(gap, X.V[k] if k == X.depth - 1 else X.carried(k, X.depth))


@dataclass(frozen=True, eq=False, repr=False)
class JointParts(ArrayRecord):
    """The parts of a joint bound: |S − S'| ≤ lead(T, Tᵐ) + beyond, per output coordinate."""

    T: Rank1Sum
    Tm: Rank1Sum
    beyond: Vector
