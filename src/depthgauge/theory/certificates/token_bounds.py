"""Layer-by-layer bounds of a network on all sequences of tokens from a finite set 𝒫 (docs/math.md §3.11).

The token-dependent part of X_k is X + O with |O| ≤ own_k per coordinate, because all other terms of the expansion are
equal for all tokens, and (P − U)1 = 0. With z = xM for x ∈ 𝒫 and R(M) = range_𝒫(xM) per coordinate,

    |(P_h − U) X_k M| ≤ tanh(θ_h/4)·(R(M) + 2 own_k|M|).

θ_h bounds the range of a row of scores y W x + e over the keys: y = x_i + mean(X) Z_{0:k} is linear in a token and in
the mean, which lies in the convex hull of 𝒫, so the largest range is attained at points of 𝒫. `moved` bounds the range
of e, the part of the scores that the errors cause.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.box import (
    RHO,
    HeadVectors,
    PerHead,
    Vector,
    drift_in_query,
    drift_of_output,
    head_tensor,
    total,
    weighted_per_head,
)
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.enclosures import Enclosure, frobenius_norm_up
from depthgauge.theory.linalg.rounding import (
    TINY,
    add_up,
    div_up,
    gamma,
    mul_up,
    no_bound,
    nonnegative_matmul_up,
    nonnegative_sum_up,
    sub_up,
    tanh_up,
)
from depthgauge.theory.surrogates.expansion import Expansion

BLOCK = 2**22
"""Entries of an array that are computed at a time (32 MB)."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenLayer(ArrayRecord):
    """Bounds at the input of one layer: own and err per coordinate; per head θ, the range of e, TV(row, uniform)."""

    own: Vector
    err: Vector
    theta: PerHead
    moved: PerHead
    uneven: PerHead


class TokenBounds:
    """Bounds of every layer of a network with skip connections, over all sequences of points."""

    def __init__(self, expansion: Expansion, inputs: Tokens, progress: Step = silent) -> None:
        self.expansion, self.points, self.unevenness = expansion, inputs.points(), inputs.unevenness
        self.layers: list[TokenLayer] = []
        for index in range(expansion.depth):
            progress(index, expansion.depth, "proving")
            self.layers.append(self._layer(index))

    def _layer(self, k: int) -> TokenLayer:
        own, err = self._own_and_err(k)
        W, Z = self.expansion.W[k], self.expansion.drift(0, k)
        drifting = Z @ W
        query = total(
            largest(self.points, W), largest(self.points, drifting), weighted_per_head(err.expand(W.shape[0], -1), W)
        )
        from_query = nonnegative_sum_up(mul_up(err, ranges(self.points, W.mT)), -1)
        moved = add_up(from_query, 2.0 * nonnegative_sum_up(mul_up(query, own), -1))
        theta = total(widest_row(self.points, W), widest_row(self.points, drifting), moved)
        return TokenLayer(own, err, theta, moved, tanh_up(theta / 4.0).clamp(max=self.unevenness))

    def _own_and_err(self, end: int) -> tuple[Vector, Vector]:
        zero = torch.zeros(self.expansion.dim, dtype=torch.float64)
        own = total(zero, *(nonnegative_sum_up(self.gap(k, self.expansion.V[k]), 0) for k in range(end)))
        carried = (nonnegative_sum_up(self.gap(k, self.expansion.carried(k, end)), 0) for k in range(end))
        return own, total(own, *carried)

    def gap(self, k: int, M: Enclosure) -> HeadVectors:
        """Bound |(P_h − U) X_k M_h| for every head h of layer k."""
        layer = self.layers[k]
        return mul_up(layer.uneven[:, None], add_up(ranges(self.points, M), self._own_range(k, M)))

    def rest(self, k: int, M: Enclosure) -> HeadVectors:
        """Bound |(P_h − U) X_k M_h − Cov(y W x, x M)|, the part beyond the leading term, for every head of layer k.

        The softmax differs from its linear part by at most ρθ² in total variation, and |Cov(e, z)| ≤ ¼ range(e)
        range(z).
        """
        layer = self.layers[k]
        curved = add_up(mul_up(mul_up(RHO, layer.theta), layer.theta), 0.25 * layer.moved)
        owned = mul_up(layer.uneven[:, None], self._own_range(k, M))
        return add_up(mul_up(curved[:, None], ranges(self.points, M)), owned)

    def _own_range(self, k: int, M: Enclosure) -> HeadVectors:
        return 2.0 * weighted_per_head(self.layers[k].own.expand(M.shape[0], -1), M)

    def added(self, part: str, readout: Enclosure | None = None) -> Iterator[HeadVectors]:
        """Yield, layer by layer, what every head adds to the output at most; `part` is `gap` or `rest`.

        With a readout R it is about the output times R.
        """
        X = self.expansion
        bound = self.gap if part == "gap" else self.rest
        for k in range(X.depth):
            both = (read(M, readout) for M in (X.V[k], X.carried(k, X.depth)))
            yield total(*(bound(k, M) for M in both))

    def tensors(self, readout: Enclosure | None = None) -> tuple[Rank1Sum, Rank1Sum]:
        """Return T and Tᵐ of the leading term, of the output times R with a readout R."""
        X = self.expansion
        every = range(X.depth)
        late = [drift_of_output(X, k, X.depth) for k in every]
        found = head_tensor(X, every), Rank1Sum.join(*(drift_in_query(X, k) for k in every), *late)
        T, Tm = (Rank1Sum(terms.left, read(terms.right, readout)) for terms in found)
        return T, Tm


def read(M: Enclosure, readout: Enclosure | None) -> Enclosure:
    """Return M R, or M without a readout."""
    return M if readout is None else M @ readout


def ranges(points: Float[Tensor, "v d"], M: Enclosure) -> HeadVectors:
    """Bound max − min over the points x of (x M_h)_c, for every head h and coordinate c."""
    high, low = _extremes(points, M)
    return sub_up(high, low)


def largest(points: Float[Tensor, "v d"], M: Enclosure) -> HeadVectors:
    """Bound the largest |(x M_h)_c| over the points x."""
    high, low = _extremes(points, M)
    return torch.maximum(high.abs(), low.abs())


def _extremes(points: Float[Tensor, "v d"], M: Enclosure) -> tuple[HeadVectors, HeadVectors]:
    """Bound the entries of x M_h over the points from above and from below, some points at a time."""
    heads = M.shape[0]
    high = torch.full((heads, M.shape[-1]), -torch.inf, dtype=torch.float64)
    low = -high
    for part in torch.split(points, max(1, BLOCK // (heads * M.shape[-1]))):
        made = Enclosure.exact(part) @ M
        high, low = torch.maximum(high, made.upper().amax(-2)), torch.minimum(low, made.lower().amin(-2))
    return high, low


def widest_row(points: Float[Tensor, "v d"], W: Enclosure) -> PerHead:
    """Bound the largest range over y of x W_h yᵀ, over the points x, for every head h.

    A computed score q·y is off by at most (γ_d|q| + rad(q))|y|, for every y at most as much as for max|y|.
    """
    heads, d, _ = W.shape
    found, most = torch.zeros(heads, dtype=torch.float64), points.abs().amax(0)[:, None]
    for part in torch.split(points, max(1, BLOCK // (heads * len(points)))):
        query = Enclosure.exact(part) @ W
        scores = query.mid @ points.mT
        off = nonnegative_matmul_up(add_up(mul_up(gamma(d), query.mid.abs()), query.rad), most)[..., 0]
        rows = add_up(sub_up(scores.amax(-1), scores.amin(-1)), 2.0 * add_up(off, d * TINY))
        found = torch.maximum(found, no_bound(rows).amax(-1))
    return found


PAIRED = 3e8
"""The most numbers v³d that the leading term over pairs of v points may take; beyond it, heads are bounded alone."""
TOGETHER = 8
"""Matrices that are bounded around a centre at a time."""


def can_pair(points: Float[Tensor, "v d"]) -> bool:
    """Return whether the leading term is computed over all pairs of points."""
    v, d = points.shape
    return v**3 * d <= PAIRED


class PairLead:
    """A bound on the leading term Σ_r Cov_j(x L_r x_j, x_j R_r) over all points x and all sequences of points x_j.

    For a fixed x and a it is tr(G C) with G = Σ_b x_b T_a[b] and C = cov(x_j). All terms are summed first. Two bounds
    hold. `pairs`: C = (1/2n²) Σ_jk δᵀδ with δ = x_j − x_k, so |tr(G C)| is at most ½ max |δ G δᵀ|, times
    `share` ≥ 1 − 1/n as δ = 0 for j = k. `sharper` uses the smaller one of this and of `centred` for each x, which
    takes longer.

    `queries` are the points x, by default all. With `places`, the points are those of n places in this order, and a
    sequence has one point of each place: then the mean of ½ |δ G δᵀ| over all pairs of places, with the largest value
    for each pair, replaces the maximum.
    """

    def __init__(
        self,
        terms: Rank1Sum,
        points: Float[Tensor, "v d"],
        queries: Float[Tensor, "x d"] | None = None,
        places: int = 1,
        share: float = 1.0,
    ) -> None:
        self.terms, self.points, self.places, self.share = terms, points, places, share
        self.queries = points if queries is None else queries
        self.slack = mul_up(0.5, pair_slack(terms, points))
        each = [self._each(a) for a in range(terms.right.shape[-1])]
        self.pairs = add_up(torch.stack([values.amax() for values in each]), self.slack)

    def _matrices(self, a: int) -> Float[Tensor, "x d d"]:
        d = self.points.shape[1]
        T = self.terms.slices(torch.tensor([a]))[0]  # [b, c, e]
        return (self.queries @ T.reshape(d, d * d)).reshape(-1, d, d)

    def _each(self, a: int) -> Float[Tensor, " x"]:
        """Return the bound of pairs for every x, times the share; `slack` bounds the error of pairs."""
        parts = torch.split(self._matrices(a), max(1, BLOCK // len(self.points) ** 2))
        return mul_up(torch.cat([_pairs(part, self.points, self.places) for part in parts]), self.share)

    def sharper(self, a: int) -> Tensor:
        """Return the bound for coordinate a, with the smaller one of both bounds for each x."""
        G, pairs = self._matrices(a), self._each(a)
        worst = torch.zeros((), dtype=torch.float64)
        for chosen in torch.split(pairs.argsort(descending=True), TOGETHER):
            if bool(pairs[chosen[0]] <= worst):  # so are the others
                break
            worst = torch.maximum(worst, torch.fmin(pairs[chosen], centred(G[chosen], self.points, self.places)).amax())
        return add_up(worst, self.slack[a])


def _pairs(G: Float[Tensor, "x d d"], points: Float[Tensor, "v d"], places: int) -> Float[Tensor, " x"]:
    """Return ½ max |δ G δᵀ| over the differences δ of two points, in floating point; `pair_slack` bounds the error.

    With several places it is the mean over all pairs of places of the largest value for each pair.
    """
    form = points @ G @ points.mT  # [x, t, u], symmetric in t and u
    own = form.diagonal(dim1=-2, dim2=-1)
    sizes = 0.5 * (own[:, :, None] + own[:, None, :] - 2.0 * form).abs()
    if places == 1:
        return sizes.amax((-2, -1))
    by_place = sizes.reshape(len(G), places, len(points) // places, places, -1).amax((2, 4))  # [x, place, place]
    apart = by_place - torch.diag_embed(by_place.diagonal(dim1=-2, dim2=-1))  # a place has one token, so δ = 0
    return div_up(nonnegative_sum_up(apart, (-2, -1)), float(places**2))


def centred(G: Float[Tensor, "x d d"], points: Float[Tensor, "v d"], places: int = 1) -> Float[Tensor, " x"]:
    """Bound |tr(G C)| over the covariances C of all sequences of points, for every matrix G.

    Let G = A Aᵀ − B Bᵀ + R, with A and B from the eigenvectors of G, so that R is of the size of rounding errors. Then
    tr(G C) ≤ tr(Aᵀ C A) + ‖R‖_F tr C, and a variance is at most the largest squared distance from any centre c:
    tr(Aᵀ C A) ≤ max_t ‖(x_t − c)A‖². The centre is the middle of the ranges. The lower side has B in place of A. With
    one point of each of several places, the mean over the places of the largest square replaces the largest one.
    """
    values, vectors = torch.linalg.eigh(G / 2 + G.mT / 2)
    sides = [vectors * (sign * values).clamp(min=0.0).sqrt()[:, None, :] for sign in (1.0, -1.0)]
    A, B = (Enclosure.exact(side) for side in sides)
    rest = frobenius_norm_up(Enclosure.exact(G) - A @ A.mT + B @ B.mT)
    reached = torch.stack([_largest_square(Enclosure.exact(points) @ side, places) for side in (A, B)]).amax(0)
    spread = _largest_square(Enclosure.exact(points[None]), 1)[0]
    return no_bound(add_up(reached, mul_up(rest, spread)))


def _largest_square(rows: Enclosure, places: int) -> Float[Tensor, " x"]:
    """Bound the largest ‖y − c‖² over the rows y, for the middle c of the ranges of their entries.

    The rows are those of several places; the mean over the places is bounded.
    """
    middle = rows.mid.amax(-2, keepdim=True) / 2 + rows.mid.amin(-2, keepdim=True) / 2
    apart = (rows - middle).abs_up()
    squares = nonnegative_sum_up(mul_up(apart, apart), -1)
    by_place = squares.reshape(len(squares), places, -1).amax(-1)
    return div_up(nonnegative_sum_up(by_place, -1), float(places))


def pair_slack(terms: Rank1Sum, points: Float[Tensor, "v d"]) -> Vector:
    """Bound the error of the computed δ G δᵀ, or of twice tr(G C): rounding, and the radii of the factors.

    An entry of the form takes at most r + 3d + 8 roundings on top of Σ_r |x||L_r||x_t| · |x_u||R_r|, and δ G δᵀ is a
    combination of four entries with coefficients of sum 4. Replacing factors by other members of their enclosures
    changes an entry by at most Σ_r rad(L_r) |R_r| + |L_r| rad(R_r), in the same form. Each of at most r + 4 products
    that contribute to one of the d³ entries of a contraction underflows by at most `TINY`, and is multiplied by at most
    three entries of points afterwards.
    """
    r, d, _ = terms.left.shape
    size = points.abs()
    whole_left, whole_right = _left_sizes(size, terms.left.abs_up()), _right_sizes(size, terms.right.abs_up())
    rad_left, rad_right = _left_sizes(size, terms.left.rad), _right_sizes(size, terms.right.rad)
    rounding = mul_up(gamma(r + 3 * d + 8), mul_up(whole_left[:, None], whole_right))
    enclosing = add_up(mul_up(rad_left[:, None], whole_right), mul_up(whole_left[:, None], rad_right))
    above = add_up(1.0, size.max())
    underflow = mul_up(16.0 * (r + 4) * d**3 * TINY, mul_up(above, mul_up(above, above)))
    return add_up(4.0 * nonnegative_sum_up(add_up(rounding, enclosing), 0), underflow)


def _left_sizes(size: Float[Tensor, "v d"], left: Float[Tensor, "r d d"]) -> Float[Tensor, " r"]:
    """Bound the largest |x||L_r||y|ᵀ over two points, by that of the point-wise largest entries."""
    most = size.amax(0)
    return nonnegative_matmul_up(nonnegative_matmul_up(most[None, None, :], left), most[:, None])[:, 0, 0]


def _right_sizes(size: Float[Tensor, "v d"], right: Float[Tensor, "r d a"]) -> Float[Tensor, "r a"]:
    return nonnegative_matmul_up(size.amax(0)[None, None, :], right)[:, 0, :]
