"""Averages over the tokens that a row of attention sees (docs/math.md §3.13).

A row sees all tokens, or those up to its own. With positions, token k is in a set P_k, so the average of a function of
tokens is at most the mean over the visible positions of its largest value on P_k. One of them is the position of the
row's own token t, which contributes the value at t. Without positions a row of at most n tokens sees t with a weight of
at least 1/n, so the average is at most p/n + (1 − 1/n)q for the value p at t and the largest value q ≥ p.
"""

import math

import torch
from jaxtyping import Int64
from torch import Tensor

from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Upper


class VisibleRows:
    """The tokens that the row of a token t sees, for t in 𝒫, in the order of `Tokens.points`.

    Args:
        A: the arithmetic.
        tokens: the tokens at each position.
        causal: whether a row sees only the tokens up to its own.
        is_read: whether only the last row of sequences that fill all positions matters.
    """

    def __init__(self, A: BoundArithmetic, tokens: Tokens, *, causal: bool, is_read: bool) -> None:
        places, each, _ = tokens.at_positions().shape
        self.A, self.causal, self.is_read = A, causal, is_read
        self.places = places if tokens.positions is not None else None
        self.length = tokens.length
        self.place = torch.arange(places).repeat_interleave(each)
        own = torch.arange(places) == self.place[:, None]
        self.elsewhere = torch.where(own, 0.0, math.inf).to(torch.float64)  # [v, places]

    def average(self, pairs: Upper, rows: slice = slice(None)) -> Upper:
        """Bound the average over u of the row of each token t, from bounds for t and u: [b, v, …] to [b, …]."""
        chosen = torch.arange(len(self.place))[rows]
        some = torch.arange(len(chosen))
        count = 1 if self.places is None else self.places
        tops = pairs.reshape(pairs.shape[0], count, -1, *pairs.shape[2:]).amax(2)
        return self._average(tops, pairs[some, chosen], chosen)

    def of_tokens(self, x: Upper) -> Upper:
        """Bound the same average of a function of u alone: [v, …] to [v, …]."""
        count = 1 if self.places is None else self.places
        tops = x.reshape(count, -1, *x.shape[1:]).amax(1)
        return self._average(tops[None].expand(x.shape[0], *tops.shape), x, torch.arange(len(self.place)))

    def _average(self, tops: Upper, own: Upper, rows: Int64[Tensor, " b"]) -> Upper:
        """Bound the averages from the largest values at each place, [b, places, …], and those at u = t, [b, …]."""
        if self.places is None:
            top = tops[:, 0]
            return top if self.length is None else top.least((own + top * (self.length - 1.0)) / float(self.length))
        outside = self.elsewhere[rows].reshape(len(rows), self.places, *(1 for _ in own.shape[1:]))
        each = tops.least(own[:, None] + outside)
        sum_, means = each[:, 0], [each[:, 0]]
        for k in range(1, self.places):
            sum_ = sum_ + each[:, k]
            means.append(sum_ / (k + 1.0))
        if self.is_read and not self.causal:
            return means[-1]
        if not self.causal:  # any length from the own position on
            for k in range(self.places - 2, -1, -1):
                means[k] = means[k].most(means[k + 1])
        found: Upper = self.A.cat([mean[None] for mean in means])[self.place[rows], torch.arange(len(rows))]
        return found

    def largest(self, x: Upper) -> Upper:
        """Bound a function of the row's own token, [v, …], over all rows, or over the last one if `is_read`."""
        last = self.place == self.place[-1]
        return (x[last.nonzero()[:, 0]] if self.is_read else x).amax(0)
