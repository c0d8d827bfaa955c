"""One layer is not enough in every dimension: Theorems 1.2 and D.1 and Remark D.2 of paper A (docs/math.md §3.14).

An input has the two tokens x·1ᵀ and y·1ᵀ, and a share q of its tokens is y·1ᵀ. At a token x·1ᵀ, every coordinate of a
one-layer network is S' = x + V·mean + (x − y)·H_q(t), with t = x(x − y), a number V and a function H of the network,
H_q(0) = 0 and H_q(−t) = −H_{1−q}(t). Multipliers λ that cancel V and every value of H give Σλ_k S'(X_k) = Σλ_k x_k for
every such network, so max_k |S − S'|(X_k) ≥ |Σλ_k (S(X_k) − x_k)| / Σ|λ_k|.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from depthgauge.base.errors import InputError
from depthgauge.base.format import number
from depthgauge.papers.ledger.arithmetic import EXACT, Arithmetic, Value, precise
from depthgauge.papers.ledger.claim import Claim, Computation, Observed, Witness
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork

WEIGHT = 16
"""1ᵀWβ1 of the last layer of the deep network; its first layer has zero scores."""
DIMS = (16, 64, 256)
"""The widths at which the deep network is evaluated. All its weights are at most η = 1/d for d ≥ 16."""


def layer_on_two(ar: Arithmetic, x: Value, y: Value, share: Value, gain: Value, weight: Value) -> tuple[Value, Value]:
    """Return both tokens after a layer with V = (gain/d)·11ᵀ and β1ᵀW1 = weight; the attention sees x + (y − x)·a."""
    odds = ar.log(share / (1 - share))

    def seen(own: Value) -> Value:
        return x + (y - x) * (1 + ar.tanh((weight * own * (y - x) + odds) / 2)) / 2

    return x + gain * seen(x), y + gain * seen(y)


def deep_output(ar: Arithmetic, x: Value, y: Value, share: Value, layers: Sequence[tuple[Value, Value]]) -> Value:
    """Return a coordinate of the output at a token x·1ᵀ, for layers given as (gain, weight)."""
    for gain, weight in layers:
        x, y = layer_on_two(ar, x, y, share, gain, weight)
    return x


@dataclass(frozen=True)
class Annihilator:
    """Inputs and multipliers λ with Σλ_k S'(X_k) = Σλ_k x_k for every one-layer network S'.

    Raises:
        InputError: If the multipliers leave V or a value of H, or an input is outside of the box.
    """

    x: tuple[Fraction, ...]
    y: tuple[Fraction, ...]
    share: Fraction
    multipliers: tuple[Fraction, ...]

    def __post_init__(self) -> None:
        left: dict[object, Fraction] = defaultdict(Fraction)
        for x, y, multiplier in zip(self.x, self.y, self.multipliers, strict=True):
            t, q = x * (x - y), self.share
            left["V"] += multiplier * ((1 - q) * x + q * y)
            if t:
                left[abs(t), q if t > 0 else 1 - q] += multiplier * (x - y) * (1 if t > 0 else -1)
        if any(left.values()) or not any(self.multipliers):
            raise InputError(f"the multipliers must cancel V and every value of H, what is left is {dict(left)}")
        if max(map(abs, (*self.x, *self.y))) > 1:
            raise InputError(f"the entries of the inputs must be at most 1, got x = {self.x}, y = {self.y}")

    def distance(self, outputs: Sequence[Value], to: Callable[[Fraction], Value]) -> Value:
        """Return |Σλ_k (S(X_k) − x_k)| / Σ|λ_k| from the outputs of S; `to` converts fractions to their arithmetic."""
        terms = zip(self.multipliers, outputs, self.x, strict=True)
        return abs(sum(to(m) * (out - to(x)) for m, out, x in terms)) / to(sum(map(abs, self.multipliers), Fraction()))

    def enclosed(self) -> Value:
        """Return an arb enclosure of the distance for the deep network, the same for every width d."""
        to = EXACT.number
        pairs, layers = zip(self.x, self.y, strict=True), [(to(1), to(0)), (to(1), to(WEIGHT))]
        return self.distance([deep_output(EXACT, to(x), to(y), to(self.share), layers) for x, y in pairs], to)

    def text(self) -> str:
        """Return x, y, λ and q of every input."""
        inputs = zip(self.x, self.y, self.multipliers, strict=True)
        return "; ".join(", ".join(map(str, (*values, self.share))) for values in inputs)

    def measured(self, d: int) -> float:
        """Return the distance in float64, from the outputs of the deep network of width d itself."""
        network, n, many = deep_network(d), self.share.denominator, self.share.numerator
        columns = [[float(x)] * (n - many) + [float(y)] * many for x, y in zip(self.x, self.y, strict=True)]
        with torch.no_grad():
            found = network(torch.tensor(columns, dtype=torch.float64)[..., None].expand(-1, n, d))
        return float(self.distance(found[:, 0, 0].tolist(), float))


TWO = Annihilator((Fraction(1), Fraction(0)), (Fraction(1), Fraction(1)), Fraction(1, 4), (Fraction(1), Fraction(-4)))
"""4 S'(0, 0, 0, 1) = S'(1, 1, 1, 1) − 1."""
_X, _Y = (Fraction(-1, 3), Fraction(-1), Fraction(-9, 35)), (Fraction(59, 93), Fraction(-21, 31), Fraction(9739, 9765))
_APART = tuple(x - y for x, y in zip(_X, _Y, strict=True))
THREE = Annihilator(
    _X, _Y, Fraction(1, 2), tuple(_Y[i - 2] * _APART[i - 1] - _Y[i - 1] * _APART[i - 2] for i in range(3))
)
"""Three inputs of two tokens with equal t; λ is the cross product of y and x − y."""


def deep_network(d: int) -> SelfAttentionNetwork:
    """Return S of width d: two layers with one head, V = 11ᵀ/d, zero scores in the first, β = 1."""

    def layer(weight: float) -> Layer:
        query = torch.full((1, d, d), (weight / d**3) ** 0.5, dtype=torch.float64)
        return Layer(query, query.clone(), torch.full_like(query, 1 / d))

    return SelfAttentionNetwork([layer(0.0), layer(WEIGHT)], scale=1.0)


def decide() -> Observed:
    """Bound the distance of the deep network from every one-layer network, for growing d and η = 1/d."""
    with precise():
        proved = [(one, one.enclosed()) for one in (TWO, THREE)]
    steps = [
        ("S", f"L = 2, H = 1, β = 1, V = 11ᵀ/d, Q = K = 0 and then Q = K = ({WEIGHT}/d³)^½ 11ᵀ, η = 1/d for d ≥ 16")
    ]
    for one, value in proved:
        steps += [(f"x, y, λ, share of y, input by input ({len(one.x)} inputs)", one.text())]
        steps += [("|Σλ(S(X) − x)| / Σ|λ|, for every d ≥ 16", value.str(7))]
        steps += [(f"the same from the network of width {d}, in float64", number(one.measured(d), 7)) for d in DIMS]
    distance, d = proved[0][1], DIMS[-1]
    names = {"x": TWO.x, "y": TWO.y, "λ": TWO.multipliers, "share of y": TWO.share, "d": d, "1ᵀW1": WEIGHT}
    witness = Witness(names, distance.str(7, radius=False), f"η = 1/{d}", float(distance.mid()) * d, tuple(steps))
    fails = all(bool(value > 0) for _, value in proved)
    return Observed("fails" if fails else "undecided", witness.ratio, len(DIMS) * len(proved), _READINGS, witness)


_READINGS = (
    "The O(·) hides a constant. If it may depend on d, H, L and φ₀, then S' = identity satisfies the statement: "
    "‖S(X) − X‖∞ ≤ φ₀((1 + Hdη)^L − 1).",
    "If it may not depend on d, the statement fails for every one-layer S', with any heads and any weights: "
    "a network with two layers and η = 1/d stays 0.558 away from all of them, for every d ≥ 16 "
    "(docs/math.md 3.14).",
)
_ONE_COORDINATE = (
    "The constant must also depend on L and φ₀: for d = 1 and η = 1/L = 1/φ₀ the distance grows like φ₀ "
    "(docs/math.md 3.14)."
)
_WITH_MLP = "With f(x) = x the remark is Theorem D.1, so it has the same readings. S' has the f of S."
_BLOCKS = (
    "For blocks with MLPs, docs/math.md 3.9 and 3.13 prove bounds with explicit constants: ours.mlp-deletion has the "
    "Lipschitz constant of f, and ours.wide-block is of second order in the weights."
)
SETTING = "every weight has absolute value at most η, H heads, L layers, η ≤ A·min{1/(HL), 1/φ₀} ≤ 1, ‖X‖∞ ≤ φ₀"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "A.1.2", "Theorem 1.2 (informal)",
        "there is a one-layer S' with ‖S(X) − S'(X)‖∞ ≤ O(η) for every ‖X‖∞ ≤ O(1)",
        Computation(decide), "every weight has absolute value at most η", "ours.one-layer-error",
    ),
    Claim(
        "A.D.1.exists", "Theorem D.1, as an existence statement",
        "there is a one-layer S' with ‖S(X) − S'(X)‖∞ ≤ O(A/L)",
        Computation(decide), SETTING, "ours.one-layer-error", note=_ONE_COORDINATE,
    ),
    Claim(
        "A.D.2", "Remark D.2",
        "the proof generalises to layers with an MLP f, with the Lipschitz constant of f in the bound",
        Computation(decide), "X_ℓ = f(B_ℓ)", "ours.wide-block", note=f"{_WITH_MLP} {_BLOCKS}",
    ),
)  # fmt: skip
