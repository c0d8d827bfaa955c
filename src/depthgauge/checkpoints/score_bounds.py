"""Bounds on the scores of layer 0 over all tokens of the vocabulary and all positions (docs/math.md §3.12).

The range over the keys of the scores of one query is bounded from the sizes of queries and of centred keys. Two classes
have the same methods: `RotaryScores` for models whose keys do not depend on a position except for a rotation, or not at
all, and `PlacedScores` for models that add absolute positions to their embeddings.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.first_layer import BLOCK, FirstLayer, Projection, norm_up, product
from depthgauge.linalg.enclosures import Enclosure
from depthgauge.linalg.rounding import (
    UNIT,
    add_up,
    div_up,
    gamma,
    mul_down,
    mul_up,
    nonnegative_sum_up,
    sqrt_up,
)

_SAMPLE = 1024
"""Tokens from which centres and weights are chosen; every choice gives a bound."""


class Scores(Protocol):
    """The scores of all heads of layer 0, before the factor β and the soft cap."""

    def bound(self, last: int) -> tuple[Float[Tensor, " heads"], Float[Tensor, "v heads"]]:
        """Bound the range of a row of scores over all queries and keys.

        The second result ranks the tokens as queries at the position `last` of a text.
        """

    def scorer(self, queries: Int[Tensor, "heads c"], n: int) -> "Scorer":
        """Return the function that computes the scores of tokens as keys, in floating point.

        The queries of every head are at position n − 1, and the keys at each of the positions 0 … n − 1.
        """


Scorer = Callable[[Int[Tensor, " m"]], Float[Tensor, "heads c n m"]]
"""A function of token ids."""


def scores_of(layer: FirstLayer) -> Scores:
    """Return the scores of a layer."""
    return RotaryScores(layer) if layer.positions is None else PlacedScores(layer, layer.positions)


def _sample(layer: FirstLayer) -> Int[Tensor, " m"]:
    v = len(layer.vocabulary)
    return torch.linspace(0, v - 1, min(v, _SAMPLE), dtype=torch.float64).long()


def _middle(x: Float[Tensor, "m ..."]) -> Tensor:
    return x.amax(0) / 2 + x.amin(0) / 2


def _balance(
    query: Float[Tensor, "m heads g"], key: Float[Tensor, "m kv_heads g"]
) -> Float[Tensor, "kv_heads g"]:
    """Return weights s for which s times the queries and the keys divided by s have the same size."""
    wanted = query.square().mean(0).reshape(*key.shape[1:2], -1, key.shape[2]).mean(1)
    ratio = (key.square().mean(0) / wanted) ** 0.25
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)


class RotaryScores:
    """Scores of keys that do not depend on an absolute position."""

    def __init__(self, layer: FirstLayer) -> None:
        self.layer, self.groups = layer, layer.query.heads // layer.key.heads
        sample = layer.states(_sample(layer))
        key = layer.key(sample).mid
        self.centre = _middle(key)
        self.weights = _balance(self.sizes(layer.query(sample).mid.abs()), self.sizes((key - self.centre).abs()))

    def sizes(self, x: Float[Tensor, "*n k"]) -> Float[Tensor, "*n g"]:
        """Bound the norms in the rotary planes and the sizes of the other coordinates, from absolute values."""
        planes = len(self.layer.frequencies)
        squares = mul_up(x[..., : 2 * planes], x[..., : 2 * planes])
        turned = sqrt_up(add_up(squares[..., :planes], squares[..., planes:]))
        return torch.cat([turned, x[..., 2 * planes :]], dim=-1)

    def bound(self, last: int) -> tuple[Float[Tensor, " heads"], Float[Tensor, "v heads"]]:
        layer, planes = self.layer, len(self.layer.frequencies)
        radius, reach = torch.zeros_like(self.weights), torch.zeros(layer.key.heads, dtype=torch.float64)
        for ids in layer.blocks():
            apart = self.sizes((layer.key(layer.states(ids)) - self.centre).abs_up())
            radius = torch.maximum(radius, apart.amax(0))
            reach = torch.maximum(reach, norm_up(div_up(apart, self.weights), -1).amax(0))
        # cos(Δω + φ) over distances Δ of the given span has a range of at most 2 and of at most ω times the span.
        turning = torch.zeros_like(radius)
        turning[:, :planes] = 2.0
        if layer.span is not None:
            turning[:, :planes] = mul_up(layer.frequencies.abs(), float(layer.span)).clamp(max=2.0)
        turning = mul_up(turning, self.sizes(self.centre.abs()))
        turning, radius, weights, reach = (
            part.repeat_interleave(self.groups, 0) for part in (turning, radius, self.weights, reach)
        )
        rows = []
        for ids in layer.blocks():
            size = self.sizes(layer.query(layer.states(ids)).abs_up())
            size[..., :planes] = mul_up(size[..., :planes], mul_up(layer.stretch, layer.stretch))
            apart = torch.minimum(
                nonnegative_sum_up(mul_up(size, radius), -1), mul_up(norm_up(mul_up(size, weights), -1), reach)
            )
            rows.append(add_up(nonnegative_sum_up(mul_up(size, turning), -1), 2.0 * apart))
        every = torch.cat(rows).nan_to_num(nan=torch.inf)
        return every.amax(0), every

    def scorer(self, queries: Int[Tensor, "heads c"], n: int) -> Scorer:
        layer, planes, (heads, c) = self.layer, len(self.layer.frequencies), queries.shape
        made = layer.query(layer.states(queries.flatten())).mid
        q = _own_head(made, heads)[:, :, None]
        angle = torch.arange(n - 1, -1, -1, dtype=torch.float64)[:, None] * layer.frequencies
        turn = torch.polar(torch.full_like(angle, layer.stretch**2), angle)
        plane = torch.complex(q[..., :planes], q[..., planes : 2 * planes]) * turn
        rest = q[..., 2 * planes :].expand(-1, -1, n, -1)
        turned = torch.cat([plane.real, plane.imag, rest], dim=-1).flatten(1, 2)

        def scores(ids: Int[Tensor, " m"]) -> Float[Tensor, "heads c n m"]:
            key = layer.key(layer.states(ids)).mid.repeat_interleave(self.groups, 1)
            return (turned @ key.permute(1, 2, 0)).reshape(heads, c, n, -1)

        return scores


class PlacedScores:
    """Scores of states e_t + π_p with absolute positions, after a norm: r_tp (A_t + B_p) + c with A, B linear in e, π.

    All pairs (t, p) are considered, but the vectors are not formed: ‖r(A + B) + c‖² = r²(|A|² + 2A·B + |B|²) +
    2r(A + B)·c + |c|².
    """

    def __init__(self, layer: FirstLayer, positions: Enclosure) -> None:
        self.layer, self.groups = layer, layer.query.heads // layer.key.heads
        self.positions = layer.centre(positions)
        self.reach = float(norm_up(self.positions.abs_up(), -1).amax())
        tokens, places = layer.rows(_sample(layer)), torch.arange(0, positions.shape[0], max(1, positions.shape[0] // 16))
        query, key = (self._vectors(projection, tokens, places) for projection in (layer.query, layer.key))
        self.centre = _middle(key)
        # Powers of two scale the weights without rounding.
        self.weights = torch.exp2(_balance(query, key - self.centre).log2().round())

    def _vectors(self, projection: Projection, tokens: Enclosure, places: Int[Tensor, " p"]) -> Tensor:
        """Return the vectors `[tokens·places, heads, k]` in floating point."""
        roots = self._roots(tokens)[0][:, places]
        A, B = (x @ projection.weight.mid for x in (tokens.mid, self.positions.mid[places]))
        made = roots[..., None] * (A[:, None] + B[None]) + projection.bias.mid
        return made.reshape(made.shape[0] * made.shape[1], projection.heads, -1)

    def _roots(self, tokens: Enclosure) -> tuple[Float[Tensor, "t p"], Tensor]:
        """Return r_tp = 1/√(‖e_t + π_p‖²/d + ε) and a bound on its relative errors.

        The computed variance is off by at most E/d, by d + 16 roundings and the radii of e and π. With
        η = E/(d min(variance)) ≤ ½, a root is off by a factor between 1 − η and 1 + η, and by three more roundings.
        """
        d, e, p = tokens.shape[-1], tokens.mid, self.positions.mid
        variance = (e.square().sum(-1)[:, None] + 2.0 * (e @ p.mT) + p.square().sum(-1)) / d + self.layer.eps
        size = add_up(norm_up(tokens.abs_up(), -1).amax(), self.reach)
        off = add_up(norm_up(tokens.rad, -1).amax(), norm_up(self.positions.rad, -1).amax())
        moved = mul_up(off, add_up(2.0 * size, off))
        error = mul_up(gamma(d + 16), add_up(mul_up(size, size), mul_up(float(d), self.layer.eps)))
        eta = div_up(add_up(error, moved), mul_down(float(d), variance.amin()))
        relative = add_up(eta, 8.0 * UNIT)
        return 1.0 / variance.sqrt(), torch.where(relative <= 0.5, relative, torch.inf)

    def bound(self, last: int) -> tuple[Float[Tensor, " heads"], Float[Tensor, "v heads"]]:
        layer = self.layer
        wide = self.weights.repeat_interleave(self.groups, 0)
        query, column = self._largest(layer.query, wide, torch.zeros_like(wide), layer.first + last)
        key, _ = self._largest(layer.key, 1.0 / self.weights, self.centre, layer.first + last)
        return 2.0 * mul_up(query, key.repeat_interleave(self.groups, 0)), column

    def _largest(
        self, projection: Projection, weights: Tensor, centre: Tensor, column: int
    ) -> tuple[Float[Tensor, " heads"], Float[Tensor, "v heads"]]:
        """Bound the norms of s(x − centre) over all tokens and places; also return them at one place, unrounded.

        Let S = r(|A| + |B|) + |c|. The computed square is off by at most γ_(k+12) S², because every product of norms in
        S² is at least the sum of absolute products that was rounded. The errors of r, A, B and c move the vector by at
        most ρr(|A| + |B|) + r(1 + ρ)(|δA| + |δB|) + |δc|.
        """
        layer, heads, flat = self.layer, projection.heads, weights.flatten()
        W = Enclosure(projection.weight.mid * flat, projection.weight.rad * flat)
        shift = projection.bias - centre.flatten()
        c, c_off = ((part * flat).reshape(heads, -1) for part in (shift.mid, shift.rad))
        B, B_off = _by_head(product(self.positions, W), heads)
        k = c.shape[-1]
        found, at_column = torch.zeros(heads, dtype=torch.float64), list[Tensor]()
        for ids in torch.arange(len(layer.vocabulary)).split(max(1, BLOCK // len(B))):
            tokens = layer.rows(ids)
            root, relative = self._roots(tokens)
            A, A_off = _by_head(product(tokens, W), heads)
            columns = list[Tensor]()
            for h in range(heads):
                a, b = A[:, h], B[:, h]
                square = a.square().sum(-1)[:, None] + 2.0 * (a @ b.mT) + b.square().sum(-1)
                square = root * (root * square + 2.0 * ((a @ c[h])[:, None] + b @ c[h])) + c[h].square().sum()
                columns.append(square[:, column])
                long = mul_up(root.amax(), add_up(norm_up(a.abs(), -1).amax(), norm_up(b.abs(), -1).amax()))
                size = add_up(long, norm_up(c[h].abs(), -1))
                off = mul_up(root.amax(), add_up(norm_up(A_off[:, h], -1).amax(), norm_up(B_off[:, h], -1).amax()))
                off = add_up(mul_up(add_up(1.0, relative), off), add_up(mul_up(relative, long), norm_up(c_off[h], -1)))
                # 2⁻⁹⁰⁰ exceeds all underflows: k + 12 of them, each multiplied by r² at most.
                rounded = add_up(mul_up(gamma(k + 12), mul_up(size, size)), 2.0**-900)
                found[h] = torch.maximum(found[h], add_up(sqrt_up(add_up(square.amax().clamp(min=0.0), rounded)), off))
            at_column.append(torch.stack(columns, -1))
        return found.nan_to_num(nan=torch.inf), torch.cat(at_column)

    def scorer(self, queries: Int[Tensor, "heads c"], n: int) -> Scorer:
        layer = self.layer
        places = torch.arange(layer.first, layer.first + n)
        q = _own_head(self._vectors(layer.query, layer.rows(queries.flatten()), places[-1:]), len(queries))
        W, bias = (_by_head(part, layer.key.heads)[0] for part in (layer.key.weight, layer.key.bias))
        W, bias = (part.repeat_interleave(self.groups, -2).movedim(-2, 0) for part in (W, bias))
        on_place, on_bias = q @ (self.positions.mid[places] @ W).mT, q @ bias[..., None]

        def scores(ids: Int[Tensor, " m"]) -> Float[Tensor, "heads c n m"]:
            tokens = layer.rows(ids)
            root = self._roots(tokens)[0][:, places].mT
            on_token = q @ (tokens.mid @ W).mT
            return root * (on_token[:, :, None] + on_place[..., None]) + on_bias[..., None]

        return scores


def _own_head(made: Float[Tensor, "n heads k"], heads: int) -> Float[Tensor, "heads c k"]:
    """Select, from the vectors of c tokens per head in all heads, those in their own head."""
    return made.unflatten(0, (heads, -1)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _by_head(x: Enclosure, heads: int) -> tuple[Float[Tensor, "*n heads k"], Float[Tensor, "*n heads k"]]:
    return x.mid.unflatten(-1, (heads, -1)), x.rad.unflatten(-1, (heads, -1))
