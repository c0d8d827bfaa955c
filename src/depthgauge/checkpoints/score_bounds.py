"""Bounds on the scores of layer 0 over all tokens of the vocabulary and all positions (docs/math.md §6.2).

The range over the keys of the scores of one query is bounded from the sizes of queries and of centred keys. Two classes
have the same methods: `RotaryScores` for models whose keys do not depend on a position except for a rotation, or not at
all, and `PlacedScores` for models that add absolute positions to their embeddings.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.first_layer import UNDERFLOW, FirstLayer, Projection, Rows, root_error
from depthgauge.theory.linalg.rounding import add_up, div_up, gamma, mul_up, nonnegative_matmul_up, norm_up, sqrt_up

_SAMPLE = 1024
"""Tokens from which centres and weights are chosen; every choice gives a bound."""


Scorer = Callable[[Int[Tensor, " m"]], Float[Tensor, "heads c n m"]]
"""A function of token ids that returns the scores of some queries per head with these tokens at n positions."""


def _sample(layer: FirstLayer) -> Int[Tensor, " m"]:
    v = len(layer.vocabulary)
    return torch.linspace(0, v - 1, min(v, _SAMPLE), dtype=torch.float64).long()


def _middle(x: Float[Tensor, "m ..."]) -> Tensor:
    return x.amax(0) / 2 + x.amin(0) / 2


def _balance(query: Float[Tensor, "m heads g"], key: Float[Tensor, "m kv_heads g"]) -> Float[Tensor, "kv_heads g"]:
    """Return weights s for which s times the queries and the keys divided by s have the same size."""
    wanted = query.square().mean(0).reshape(*key.shape[1:2], -1, key.shape[2]).mean(1)
    ratio = (key.square().mean(0) / wanted) ** 0.25
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)


def _dot_up(a: Float[Tensor, "n heads g"], b: Float[Tensor, "heads g"]) -> Float[Tensor, "n heads"]:
    """Bound Σ_g a_g b_g for every head, for a, b ≥ 0."""
    return nonnegative_matmul_up(a.transpose(0, 1), b[..., None])[..., 0].mT


class RotaryScores:
    """Scores of keys that do not depend on an absolute position."""

    def __init__(self, layer: FirstLayer) -> None:
        self.layer, self.groups = layer, layer.query.heads // layer.key.heads
        sample = layer.states(_sample(layer))
        query, key = layer.query(sample), layer.key(sample)
        self.centre = _middle(key.mid)
        self.weights = _balance(self.sizes(query), self.sizes(key, self.centre))

    def sizes(self, x: Rows, centre: Tensor | float = 0.0) -> Float[Tensor, "*n g"]:
        """Bound |x_g − centre_g| for the rotary planes and the other coordinates g.

        A computed size takes at most 4 roundings. The exact x differs by at most `off` in every plane.
        """
        planes, apart = len(self.layer.frequencies), x.mid - centre
        turned = (apart[..., :planes].square() + apart[..., planes : 2 * planes].square()).sqrt()
        size = torch.cat([turned, apart[..., 2 * planes :].abs()], dim=-1)
        return mul_up(size + add_up(x.off, 2.0**-450)[..., None], 1.0 + 2.0**-48)  # √UNDERFLOW, and more than γ_6

    def bound(self, last: int) -> tuple[Float[Tensor, " heads"], Float[Tensor, "v heads"]]:
        """Bound the range of a row of scores over all queries and keys, before the factor β and the soft cap.

        The second result ranks the tokens as queries at the position `last` of a text.
        """
        layer, planes = self.layer, len(self.layer.frequencies)
        radius, reach = torch.zeros_like(self.weights), torch.zeros(layer.key.heads, dtype=torch.float64)
        for ids in layer.blocks():
            apart = self.sizes(layer.key(layer.states(ids)), self.centre)
            radius = torch.maximum(radius, apart.amax(0))
            reach = torch.maximum(reach, norm_up(div_up(apart, self.weights)).amax(0))
        # cos(Δω + φ) over distances Δ of the given span has a range of at most 2 and of at most ω times the span.
        turning = torch.zeros_like(radius)
        turning[:, :planes] = 2.0
        if layer.span is not None:
            turning[:, :planes] = mul_up(layer.frequencies.abs(), float(layer.span)).clamp(max=2.0)
        turning = mul_up(turning, self.sizes(Rows(self.centre, torch.zeros_like(reach))))
        stretch = torch.ones_like(radius[0])
        stretch[:planes] = mul_up(layer.stretch, layer.stretch)
        turning, radius, weights = (mul_up(part, stretch) for part in (turning, radius, self.weights))
        turning, radius, weights, reach = (
            part.repeat_interleave(self.groups, 0) for part in (turning, radius, weights, reach)
        )
        rows = []
        for ids in layer.blocks():
            size = self.sizes(layer.query(layer.states(ids)))
            apart = torch.minimum(_dot_up(size, radius), mul_up(norm_up(mul_up(size, weights)), reach))
            rows.append(add_up(_dot_up(size, turning), 2.0 * apart))
        every = torch.cat(rows).nan_to_num(nan=torch.inf)
        return every.amax(0), every

    def scorer(self, queries: Int[Tensor, "heads c"], n: int) -> Scorer:
        """Return the function that computes the scores of tokens as keys, in floating point.

        The queries of every head are at position n − 1, and the keys at each of the positions 0 … n − 1.
        """
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

    def __init__(self, layer: FirstLayer, positions: Float[Tensor, "p d"]) -> None:
        self.layer, self.groups = layer, layer.query.heads // layer.key.heads
        self.places = layer.centre(positions)
        tokens, some = layer.rows(_sample(layer)), torch.arange(0, len(positions), max(1, len(positions) // 16))
        query, key = (self._vectors(projection, tokens, some) for projection in (layer.query, layer.key))
        self.centre = _middle(key)
        # Powers of two scale the weights without rounding.
        self.weights = torch.exp2(_balance(query, key - self.centre).log2().round())

    def _vectors(self, projection: Projection, tokens: Rows, places: Int[Tensor, " p"]) -> Float[Tensor, "n heads k"]:
        """Return the vectors of all tokens at all places, in floating point."""
        roots, W = self._roots(tokens)[0][:, places], projection.weight.flatten(1)
        A, B = (torch.unflatten(x @ W, -1, (projection.heads, -1)) for x in (tokens.mid, self.places.mid[places]))
        return (roots[..., None, None] * (A[:, None] + B) + projection.bias).flatten(0, 1)

    def _roots(self, tokens: Rows) -> tuple[Float[Tensor, "t p"], Tensor]:
        """Return r_tp = 1/√(‖e_t + π_p‖²/d + ε) and a bound on their relative errors."""
        d, eps, e, p = tokens.mid.shape[-1], self.layer.eps, tokens.mid, self.places.mid
        variance = (e.square().sum(-1)[:, None] + 2.0 * (e @ p.mT) + p.square().sum(-1)) / d + eps
        size = add_up(norm_up(e).amax(), norm_up(p).amax())
        off = add_up(tokens.off.amax(), self.places.off.amax())
        return 1.0 / variance.sqrt(), root_error(variance.amin(), size, off, d, eps)

    def bound(self, last: int) -> tuple[Float[Tensor, " heads"], Float[Tensor, "v heads"]]:
        """Bound the range of a row of scores, and rank the tokens, as `RotaryScores.bound`."""
        layer, weights = self.layer, self.weights.repeat_interleave(self.groups, 0)
        query, ranks = self._largest(layer.query.scaled(weights, torch.zeros_like(weights)), layer.first + last)
        key, _ = self._largest(layer.key.scaled(1.0 / self.weights, self.centre), layer.first + last)
        return 2.0 * mul_up(query, key.repeat_interleave(self.groups, 0)), ranks

    def _largest(self, projection: Projection, place: int) -> tuple[Float[Tensor, " heads"], Float[Tensor, "v heads"]]:
        """Bound the norms of r(A + B) + c over all tokens and places; the second result has their squares at one place.

        Let S = r(|A| + |B|) + |c|. The computed square is off by at most γ_(k+12) S², because S² is at least the sum of
        the absolute products. The errors ρ of r, δA, δB and δc move the vector by at most
        ρr(|A| + |B|) + r(1 + ρ)(|δA| + |δB|) + |δc|.
        """
        layer, c = self.layer, projection.bias
        B, heads, k = projection.linear(self.places), *c.shape
        c_size, B_size, B_off = norm_up(c), norm_up(B.mid).amax(0), B.off.amax(0)
        found, ranks = torch.zeros(heads, dtype=torch.float64), list[Tensor]()
        for ids in layer.blocks(len(self.places.mid)):
            tokens = layer.rows(ids)
            root, rho = self._roots(tokens)
            A, most = projection.linear(tokens), torch.zeros(heads, dtype=torch.float64)
            ranks.append(torch.zeros(len(ids), heads, dtype=torch.float64))
            for h in range(heads):
                a, b = A.mid[:, h], B.mid[:, h]
                square = a.square().sum(-1)[:, None] + 2.0 * (a @ b.mT) + b.square().sum(-1)
                square = root * (root * square + 2.0 * ((a @ c[h])[:, None] + b @ c[h])) + c[h].square().sum()
                most[h], ranks[-1][:, h] = square.amax(), square[:, place]
            reach = mul_up(root.amax(), add_up(norm_up(A.mid).amax(0), B_size))
            size = add_up(reach, c_size)
            rounded = add_up(mul_up(gamma(k + 12), mul_up(size, size)), UNDERFLOW)
            moved = mul_up(mul_up(root.amax(), add_up(1.0, rho)), add_up(A.off.amax(0), B_off))
            off = add_up(add_up(mul_up(rho, reach), moved), projection.bias_off)
            found = torch.maximum(found, add_up(sqrt_up(add_up(most.clamp(min=0.0), rounded)), off))
        return found.nan_to_num(nan=torch.inf), torch.cat(ranks)

    def scorer(self, queries: Int[Tensor, "heads c"], n: int) -> Scorer:
        """Return the function that computes scores, as `RotaryScores.scorer`."""
        layer = self.layer
        places = torch.arange(layer.first, layer.first + n)
        q = _own_head(self._vectors(layer.query, layer.rows(queries.flatten()), places[-1:]), len(queries))
        W = layer.key.weight.repeat_interleave(self.groups, 1).transpose(0, 1)  # [heads, d, k]
        bias = layer.key.bias.repeat_interleave(self.groups, 0)
        on_place, on_bias = q @ (self.places.mid[places] @ W).mT, q @ bias[..., None]

        def scores(ids: Int[Tensor, " m"]) -> Float[Tensor, "heads c n m"]:
            tokens = layer.rows(ids)
            root = self._roots(tokens)[0][:, places].mT
            on_token = q @ (tokens.mid @ W).mT
            return root * (on_token[:, :, None] + on_place[..., None]) + on_bias[..., None]

        return scores


def _own_head(made: Float[Tensor, "n heads k"], heads: int) -> Float[Tensor, "heads c k"]:
    """Select, from the vectors of c tokens per head in all heads, those in their own head."""
    return torch.unflatten(made, 0, (heads, -1)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


Scores = RotaryScores | PlacedScores
"""The scores of layer 0."""
