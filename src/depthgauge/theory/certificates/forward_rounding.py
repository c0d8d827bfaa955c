"""Bounds on the rounding errors of forward passes in floating point (docs/math.md §3.16).

A computed number x̂ is described by two bounds, on the exact number and on the error:

    |x| ≤ size,     |x̂ − x| ≤ error,     hence |x̂| ≤ reach = size + error.

Every operation of `SelfAttentionNetwork.forward` has a rule. u is the relative error of a rounding, γ_n = nu/(1 − nu)
that of n roundings, and a result that underflows is off by at most the smallest normal number. Bounds are per
coordinate and hold for all tokens.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.base.format import number
from depthgauge.theory.certificates.attack import Hints
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.method import Bound, Method
from depthgauge.theory.certificates.read_tokens import Moved, ReadTokens
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import STEEPEST, BoundArithmetic, Upper, through, total
from depthgauge.theory.linalg.rounding import gamma
from depthgauge.theory.network.network import NORM_EPSILON, Layer, SelfAttentionNetwork

LIBRARY = 40
"""The relative error of exp and erf in units of u: 20 units in the last place, which torch's fast exp may have."""
KEYS = 16
"""The fewest keys between two changes of the maximum that attention subtracts: fused kernels read keys in blocks."""
SCALING = 16
"""Roundings of a score beside those of its product: the factor β, the bias divided by it, the subtracted maxima."""


class Computed(NamedTuple):
    """Bounds on exact numbers and on the errors of the computed ones."""

    size: Upper
    error: Upper

    @property
    def reach(self) -> Upper:
        """The bound on the computed numbers."""
        return self.size + self.error


class ForwardPass:
    """The rounding errors of one network in floating point of type `dtype`, for inputs of at most `tokens` tokens."""

    def __init__(self, A: BoundArithmetic, network: SelfAttentionNetwork, comparison: Comparison) -> None:
        assert comparison.evaluated_in is not None
        assert comparison.tokens is not None
        info = torch.finfo(comparison.evaluated_in)
        self.A, self.network, self.dtype, self.tokens = A, network, comparison.evaluated_in, comparison.tokens
        self.unit, self.tiny, self.most = info.eps / 2, info.tiny, info.max
        self.largest: list[Upper] = []
        self.travelled = A.zeros(network.dim)  # |x_k − x_0| in exact arithmetic
        inputs = comparison.inputs
        if isinstance(inputs, Tokens):
            points = inputs.points()
            self.x, self.points = self._given(points, (0,)), A.exact(points).size()
            self.read = ReadTokens(A, points, network)
        else:
            self.x = Computed(A.zeros(network.dim) + inputs.radius, A.zeros(network.dim))

    def error(self) -> Upper:
        """Bound |Ŝ(X) − S(X)| per coordinate; +∞ if a number may overflow."""
        x = self.x
        for layer in self.network:
            x = self._layer(layer, x)
        self._watch(x.reach)
        is_in_range = self.tiny <= self.network.scale <= self.most
        is_finite = all(bool(found.floats() <= self.most / 4) for found in self.largest)
        nothing = torch.full((self.network.dim,), torch.inf, dtype=torch.float64)
        return x.error if is_in_range and is_finite else self.A.upper(nothing)

    def _layer(self, layer: Layer, x: Computed) -> Computed:
        network, is_normed = self.network, self.network.norm_place == "before"
        y = self._attend(layer, self._normalize(layer, 0, x) if is_normed else x)
        self.travelled = self.travelled + y.size
        y = self._add(x, y) if network.skip else y
        if layer.mlp is None:
            return y
        z = self._mlp(layer, self._normalize(layer, 1, y) if is_normed else y)
        self.travelled = self.travelled + z.size
        return self._add(y, z) if network.mlp_skip else z

    # --- single operations ---

    def _gamma(self, roundings: int) -> float:
        return gamma(roundings, self.unit)

    def _watch(self, x: Upper) -> None:
        """Remember numbers that must not overflow."""
        self.largest.append(x.reshape(-1).amax(0))

    def _given(self, w: Tensor, over: tuple[int, ...] = ()) -> Computed:
        """Return the rounding of given numbers, which is known; the largest ones along the dimensions `over`."""
        w = w.detach()
        held = w.to(self.dtype).to(torch.float64)
        found = Computed(self.A.exact(w).size(), (self.A.exact(held) - w).size())
        return Computed(found.size.amax(over), found.error.amax(over)) if over else found

    def _add(self, x: Computed, y: Computed) -> Computed:
        """x + y, with a relative error u."""
        self._watch(x.reach + y.reach)
        return Computed(x.size + y.size, total(x.error, y.error, (x.reach + y.reach) * self.unit) + self.tiny)

    def _times(self, x: Computed, w: Computed) -> Computed:
        """xw, entry by entry, with a relative error u."""
        inherited = x.error * w.reach + x.size * w.error
        return Computed(x.size * w.size, inherited + x.reach * w.reach * self.unit + self.tiny)

    def _product(self, x: Computed, weight: Tensor, terms: int | None = None) -> Computed:
        """x W_h for every h, sums of m products in any order: γ_m |x̂||Ŵ|; `terms` is m if sums go on over h.

        Each of the 2m operations may underflow, and later ones enlarge that by at most 2.
        """
        W, m = self._given(weight), weight.shape[-2] if terms is None else terms
        reach = through(x.reach, W.reach)
        self._watch(reach)
        inherited = through(x.error, W.reach) + through(x.size, W.error)
        return Computed(through(x.size, W.size), inherited + reach * self._gamma(m) + 4.0 * m * self.tiny)

    # --- parts of a layer ---

    def _attend(self, layer: Layer, x: Computed) -> Computed:
        """Σ_h P_h x V_h.

        Scores within Δ of the exact ones change a row of attention by at most tanh(Δ/2) in total variation (2.1, 2.2).
        An error of exp counts as one of a score. Numerator and denominator are sums of n terms, rescaled by blocks.
        """
        A, n, beta = self.A, self.tokens, self.network.scale
        q, k = (self._product(x, weight) for weight in (layer.query, layer.key))
        if layer.query_bias is not None:
            q = self._add(q, self._given(layer.query_bias))
        reach, apart = (q.reach * k.reach).sum(-1), (q.error * k.reach + q.size * k.error).sum(-1) * beta
        score = reach * beta
        if layer.position_bias is not None:
            bias = self._given(layer.position_bias[:, :n, :n], (-2, -1))
            score, apart, reach = score + bias.reach, apart + bias.error, reach + bias.reach / beta
        self._watch(reach + score)
        width, blocks = layer.key_dim, -(-n // KEYS)
        small = (A.upper(beta) + 1.0) * (8.0 * (width + 2) * self.tiny)
        lost = (q.reach.sum(-1) + k.reach.sum(-1) + 1.0) * small
        weights = A.upper(self._gamma(LIBRARY * blocks))
        delta = total(apart, score * self._gamma(width + 1 + SCALING), lost, weights)
        turned = (delta / 2.0).tanh()[:, None] * x.size * 2.0
        lost = (x.reach + 1.0) * (32.0 * n * (blocks + 3) * self.tiny)
        self._watch(x.reach * (2.0 * n))
        mixed = Computed(x.size, turned + total(x.error, x.reach * self._gamma(2 * (n + blocks) + 3), lost))
        each = self._product(mixed, layer.value, layer.heads * self.network.dim)
        out = Computed(each.size.sum(0), each.error.sum(0))
        return out if layer.output_bias is None else self._add(out, self._given(layer.output_bias))

    def _mlp(self, layer: Layer, x: Computed) -> Computed:
        """act(x W_in + b_in) W_out + b_out.

        ReLU is exact. gelu(z) = zΦ(z): Φ = (1 + erf)/2 is off by at most (LIBRARY + 10)u, hence gelu by that times |z|.
        """
        assert layer.mlp is not None
        w_in, b_in, w_out, b_out = layer.mlp.parameters()
        z = self._add(self._rows(self._product(x, w_in[None])), self._given(b_in))
        error = z.error
        if self.network.activation == "gelu":
            error = z.error * STEEPEST["gelu"] + z.reach * self._gamma(LIBRARY + 10) + self.tiny
        return self._add(self._rows(self._product(Computed(z.size, error), w_out[None])), self._given(b_out))

    @staticmethod
    def _rows(x: Computed) -> Computed:
        return Computed(x.size[0], x.error[0])

    def _normalize(self, layer: Layer, sublayer: int, x: Computed) -> Computed:
        """n(x) times its gain, plus its bias, of LayerNorm or RMSNorm; bounds for all tokens.

        With |v̂ − v| ≤ γ_{4(d+2)} mean(x̂²) for the variance v, v̂ + ε = (v + ε)(1 + t) with |t| ≤ r, and 1/√(1 + t) is
        within r/(1 − r) of 1. Mean, subtraction and products add γ_{d+12} (|x̂| + mean|x̂|)/σ.
        """
        A, d, read = self.A, self.network.dim, self.read
        assert layer.norm_weight is not None
        assert layer.norm_bias is not None
        rho, apart = _length(self.travelled), _length(x.error)
        far = rho + apart
        exact, computed = Moved(rho, rho, rho), Moved(far, far, far)
        size = (read.u.size().amax(0) + read.shift(exact).amax(0)).least(read.root.top())
        steepest = A.inverse_root(A.exact(NORM_EPSILON)).top()
        steep = read.steep.over_rest(read.relative(far)).least(steepest)[:, None]
        reach = self.points + (self.travelled + x.error)  # of every token, [v, d]
        square = (reach * reach).sum(-1)[:, None] / float(d) + 4.0 * NORM_EPSILON
        few = 4 * (d + 2)
        r = square * steep * steep * self._gamma(few) + A.upper(few * self.tiny) / NORM_EPSILON
        root = r.over_rest(r)
        wide = (reach + reach.sum(-1)[:, None] / float(d)) * steep
        local = wide * (root + (root + 1.0) * self._gamma(d + 12)) + (steep + 1.0) * (16.0 * self.tiny)
        self._watch(square * float(d))
        moved = read.shift_between(apart, exact, computed)
        found = Computed(size, moved.amax(0) + local.amax(0))
        gain, bias = (self._given(w[sublayer]) for w in (layer.norm_weight, layer.norm_bias))
        return self._add(self._times(found, gain), bias)


class EvaluatedIn(Method):
    """A proof for computed outputs: that of the exact ones, plus the rounding errors of both forward passes."""

    def __init__(self, proof: Method, comparison: Comparison) -> None:
        self.proof = proof
        super().__init__(comparison)

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class."""
        exact = A.upper(self.proof.value) if A is self.arithmetic else self.proof.again(comparison)
        passes = (ForwardPass(A, net, comparison) for net in (comparison.network, comparison.surrogate))
        rounding = total(*(one.error() for one in passes))
        name, largest = str(comparison.evaluated_in).removeprefix("torch."), float(rounding.floats().max())
        note = f"at most {number(largest)} of the bound is for the rounding of both networks in {name}"
        parts = [A.upper(part) for part in self.proof.parts]
        return Bound(exact + rounding, parts, self.proof.names, (*self.proof.notes, note))

    @property
    def lost_at(self) -> int:
        """As in the base class, for exact outputs."""
        return self.proof.lost_at

    def hints(self) -> Hints:
        """Return starting points for the attack, which is on exact outputs."""
        return self.proof.hints()


def require_evaluation(dtype: object, comparison: Comparison, effort: str) -> Comparison:
    """Return the comparison of outputs that are computed in `dtype`."""
    if dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"evaluated_in must be torch.float32 or torch.float64, got {dtype!r}; networks have these types"
        )
    if effort == "exact":
        raise InputError(
            "evaluated_in adds rounding to bounds of effort default and high; effort exact is about exact outputs"
        )
    if comparison.tokens is None:
        raise InputError(
            "evaluated_in needs the number of tokens, over which attention sums; give tokens=n or Tokens(…, length=n)"
        )
    assert isinstance(dtype, torch.dtype)
    return replace(comparison, evaluated_in=dtype)


def _length(x: Upper) -> Upper:
    return (x * x).sum(-1).sqrt().reshape(1)
