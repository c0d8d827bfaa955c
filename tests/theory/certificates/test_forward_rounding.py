"""Bounds on the rounding of forward passes: no computed output exceeds them, also if every operation rounds badly."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpt_networks import drawn, gpt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import depthgauge as dg
from depthgauge.base.errors import InputError, VerificationError
from depthgauge.theory.certificates import forward_rounding
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.certificates.forward_rounding import Computed, ForwardPass
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.linalg.enclosures import OutwardUpper
from depthgauge.theory.network.network import NORM_EPSILON, Layer, SelfAttentionNetwork

A = Outward()
COARSE, FINE = 2.0**-14, 2.0**-20
"""The rounding unit of emulated passes: so large that float64 adds little. Norms need the smaller one."""
NOISE = 1 + 1e-6
"""What float64 may add to the share of a bound that an emulated pass attains."""


def forward_pass(net: SelfAttentionNetwork, inputs: InputSet | Tokens, n: int) -> ForwardPass:
    rows = None if isinstance(inputs, Tokens) else n
    return ForwardPass(A, net, Comparison(net, net, inputs, rows, torch.float32))


# --- computed outputs -------------------------------------------------------------------------------------------------


def computed_difference(net: SelfAttentionNetwork, small: SelfAttentionNetwork, x: Tensor) -> float:
    """Return the largest exact difference of two outputs that are computed in float32."""
    with torch.no_grad():
        one, other = (made.copy().to(torch.float32)(x.to(torch.float32)) for made in (net, small))
    return float((one.double() - other.double()).abs().max())


@pytest.mark.parametrize("kind", [{"radius": 1.0}, {"ball": 1.0}])
def test_computed_outputs_exceed_the_exact_bound_and_not_that_with_rounding(kind: dict[str, float]) -> None:
    net = dg.random_network(layers=3, heads=2, dim=4, eta=0.001, seed=0)
    small = dg.collapse(net, "corrected")
    exact, computed = (
        dg.certify(net, small, **kind, tokens=8, starts=1, steps=1, evaluated_in=dtype)
        for dtype in (None, torch.float32)
    )
    assert exact.upper is not None
    assert computed.upper is not None
    found = computed_difference(net, small, torch.rand(200, 8, 4) * 0.5 + (0.5 if "radius" in kind else 0.0) * 0.5)
    assert exact.upper < found <= computed.upper < 16 * found
    assert computed.lower <= exact.upper
    assert "rounding of both networks in float32" in computed.notes[-1]
    assert computed.verify()
    with pytest.raises(VerificationError, match="output coordinate"):
        replace(computed, upper=computed.upper * (1 - 1e-9)).verify()
    finer = dg.certify(net, small, **kind, tokens=8, starts=1, steps=1, evaluated_in=torch.float64)
    assert exact.upper < (finer.upper or 0.0) < exact.upper + 1e-13


KINDS: dict[str, Callable[[int, float], SelfAttentionNetwork]] = {
    "skips": lambda seed, eta: dg.random_network(layers=3, heads=2, dim=4, eta=eta, seed=seed),
    "no skips": lambda seed, eta: dg.random_network(layers=2, heads=2, dim=4, eta=eta, seed=seed, skip=False),
    "relu": lambda seed, eta: dg.random_network(layers=2, heads=2, dim=4, eta=eta, seed=seed, mlp=5, causal=True),
    "gelu": lambda seed, eta: gpt(seed, eta, norm="none"),
    "LayerNorm": gpt,
    "RMSNorm": lambda seed, eta: gpt(seed, eta, norm="pre-rms", causal=False),
    "positions": lambda seed, eta: dg.collapse(
        dg.random_network(layers=3, heads=2, dim=4, eta=eta, seed=seed, causal=True), "corrected", length=40
    ),
}


@settings(max_examples=14)
@example(kind="skips", seed=0, log_eta=-1.0, size=1.0, n=600)  # more keys than a block of torch's kernel
@given(
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 10**6),
    log_eta=st.floats(-4, 0),
    size=st.sampled_from([0.1, 1.0, 30.0]),
    n=st.sampled_from([1, 2, 7, 40]),
)
def test_no_output_in_float32_is_further_from_the_exact_one(
    kind: str, seed: int, log_eta: float, size: float, n: int
) -> None:
    net, x = KINDS[kind](seed, 10**log_eta), drawn(max(2, 60 // n), n, 4, seed=seed, size=size).to(torch.float32)
    inputs = Tokens(x.reshape(-1, 4).double(), length=n)
    bound = forward_pass(net, inputs, n).error().floats()
    with torch.no_grad():
        held = net.copy().to(torch.float32)
        apart = (held(x).double() - net(x.double())).abs().amax((0, 1))
    exact = forward_pass(net, inputs, n)
    exact.unit, exact.tiny = 2.0**-53, 2.0**-1022  # the reference is computed too
    assert bool((apart <= bound + exact.error().floats()).all())


# --- operations that round as badly as they may ---------------------------------------------------------------------


class Emulated:
    """A forward pass in which every operation has a relative error u of a chosen sign, and exp one of 40u."""

    def __init__(self, sign: Callable[[Tensor], Tensor], unit: float = COARSE, keys: int = 16) -> None:
        self.sign, self.unit, self.keys = sign, unit, keys

    def off(self, x: Tensor, units: float = 1.0) -> Tensor:
        return x * (1 + units * self.unit * self.sign(x))

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a b, summed one product after the other."""
        terms = [self.off(a[..., :, j, None] * b[..., None, j, :]) for j in range(a.shape[-1])]
        found = terms[0]
        for term in terms[1:]:
            found = self.off(found + term)
        return found

    def softmax(self, scores: Tensor, x: Tensor) -> Tensor:
        """Return softm(scores) x by blocks of keys, whose weights are rescaled when the maximum may have grown."""
        top, whole, mixed = scores[..., :1] * 0.0 - math.inf, 0.0, 0.0
        for keys, values in zip(scores.split(self.keys, -1), x.split(self.keys, -2), strict=True):
            before, top = top, torch.maximum(top, keys.amax(-1, keepdim=True))
            kept = self.off(torch.exp(self.off(before - top).nan_to_num(neginf=-math.inf)), 40)
            weights = self.off(torch.exp(self.off(keys - top)), 40)
            added, part = self.dot(weights, torch.ones_like(values[..., :1])), self.dot(weights, values)
            whole = added if before.isinf().all() else self.off(self.off(whole * kept) + added)
            mixed = part if before.isinf().all() else self.off(self.off(mixed * kept) + part)
        return self.off(mixed / whole)

    def norm(self, net: SelfAttentionNetwork, layer: Layer, sublayer: int, x: Tensor) -> Tensor:
        ones = torch.ones(net.dim, 1, dtype=x.dtype)
        mean = self.off(self.dot(x, ones) / net.dim) if net.norm_centers else x[..., :1] * 0.0
        square = self.off(self.dot(self.off(x * x), ones) / net.dim)
        variance = self.off(square - self.off(mean * mean))
        scale = self.off(1 / self.off(self.off(variance + NORM_EPSILON).sqrt()))
        gain, bias = layer.norm_weight[sublayer], layer.norm_bias[sublayer]  # type: ignore[index]
        return self.off(self.off(self.off(self.off(x - mean) * scale) * gain) + bias)

    def __call__(self, net: SelfAttentionNetwork, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in net:
                x = self.layer(net, layer, x)
        return x

    def layer(self, net: SelfAttentionNetwork, layer: Layer, x: Tensor) -> Tensor:
        read, n = self.norm(net, layer, 0, x) if net.norm != "none" else x, x.shape[-2]
        heads = []
        for h in range(layer.heads):
            q, k = self.dot(read, layer.query[h]), self.dot(read, layer.key[h])
            q = q if layer.query_bias is None else self.off(q + layer.query_bias[h])
            scores = self.off(self.dot(q, k.mT) * self.off(torch.full((1,), net.scale, dtype=x.dtype)))
            if net.causal:
                scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
            heads.append(self.softmax(scores, read))
        y = self.dot(torch.cat(heads, -1), layer.value.flatten(0, 1))
        y = y if layer.output_bias is None else self.off(y + layer.output_bias)
        y = self.off(x + y) if net.skip else y
        if layer.mlp is None:
            return y
        z = self.norm(net, layer, 1, y) if net.norm != "none" else y
        z = self.off(self.dot(z, layer.mlp.w_in) + layer.mlp.b_in)
        if net.activation == "relu":
            z = z.relu()
        else:
            erf = self.off(torch.erf(self.off(z * self.off(torch.full((1,), math.sqrt(0.5), dtype=x.dtype)))), 40)
            z = self.off(self.off(z * 0.5) * self.off(1 + erf))
        z = self.off(self.dot(z, layer.mlp.w_out) + layer.mlp.b_out)
        return self.off(y + z) if net.mlp_skip else z


def random_sign(seed: int) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda x: torch.randint(0, 2, x.shape, generator=generator) * 2.0 - 1.0


def alternating(x: Tensor) -> Tensor:
    return 1.0 - 2.0 * (torch.arange(x.shape[-1]) % 2).expand(x.shape)


SIGNS: list[Callable[[Tensor], Tensor]] = [
    torch.ones_like,
    lambda x: -torch.ones_like(x),
    alternating,
    lambda x: -alternating(x),
    random_sign(0),
]


def share(net: SelfAttentionNetwork, points: Tensor, chosen: list[list[int]]) -> float:
    """Return the largest error of an emulated pass over the bound, for sequences of some points."""
    x, unit = points[torch.tensor(chosen)], COARSE if net.norm == "none" else FINE
    one = forward_pass(net, Tokens(points, length=x.shape[1]), x.shape[1])
    one.unit = unit
    bound = one.error().floats()
    with torch.no_grad():
        exact = net(x)
    made = (Emulated(sign, unit, keys)(net, x) for sign in SIGNS for keys in (16, 10**6))
    return max(float(((found - exact).abs().amax((0, 1)) / bound).max()) for found in made)


def norm_share(norm: str) -> float:
    """Return the largest error of an emulated norm over its bound."""
    net, points = gpt(0, 0.01, norm=norm), drawn(4, 4)
    one = forward_pass(net, Tokens(points, length=4), 4)
    one.unit = FINE
    bound = one._normalize(net[0], 0, one.x).error.floats()
    with torch.no_grad():
        exact = net.normalize(0, 0, points)
        made = [Emulated(sign, FINE).norm(net, net[0], 0, points) for sign in SIGNS]
    return max(float(((found - exact).abs().amax(0) / bound).max()) for found in made)


def halves(d: int, size: float = 1.0) -> Tensor:
    """Return two opposite points."""
    return size * torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, d).clone()


def only(net: SelfAttentionNetwork, **weights: Tensor) -> SelfAttentionNetwork:
    """Set the given weights of all layers, and let the other attention weights be 0."""
    with torch.no_grad():
        for layer in net:
            for name in ("query", "key", "value"):
                getattr(layer, name).copy_(weights.get(name, torch.zeros(1, dtype=torch.float64)))
    return net


def network(d: int = 3, **settings: Any) -> SelfAttentionNetwork:
    return dg.random_network(**{"layers": 1, "heads": 1, "dim": d, "eta": 0.05} | settings)


EYE = torch.eye(3, dtype=torch.float64)
SCENARIOS: dict[str, Callable[[], float]] = {
    "sums": lambda: share(only(network(layers=6), query=0 * EYE), halves(3), [[0, 1]]),
    "exp": lambda: share(only(network(skip=False), value=EYE), halves(3), [[0, 1]]),
    "long sums": lambda: share(only(network(skip=False), value=EYE), halves(3), [[0] * 200]),
    "blocks": lambda: share(only(network(skip=False), query=EYE, key=EYE, value=EYE), halves(3), [[0] * 16 + [1] * 16]),
    "passed on": lambda: share(only(network(layers=4), value=EYE), halves(3), [[0, 1]]),
    "relu": lambda: share(mlp_network("relu"), halves(3), [[0, 1]]),
    "gelu": lambda: share(mlp_network("gelu"), halves(3), [[0, 1]]),
    "LayerNorm": lambda: norm_share("pre"),
    "RMSNorm": lambda: norm_share("pre-rms"),
    "GPT": lambda: share(gpt(0, 0.01), drawn(4, 4), [[0, 1, 2, 3]]),
}


def mlp_network(activation: str) -> SelfAttentionNetwork:
    net = only(network(mlp=3, activation=activation, skip=False), value=EYE)
    mlp = net[0].mlp
    assert mlp is not None
    mlp.w_in, mlp.w_out = (nn.Parameter(EYE.clone()) for _ in range(2))
    mlp.b_in, mlp.b_out = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    return net


@pytest.mark.parametrize("name", SCENARIOS)
def test_operations_that_round_badly_stay_within_the_bound(name: str) -> None:
    assert 0.01 < SCENARIOS[name]() <= NOISE


@settings(max_examples=10)
@given(kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 10**6), eta=st.sampled_from([0.01, 0.3, 1.0]))
def test_drawn_networks_that_round_badly_stay_within_the_bound(kind: str, seed: int, eta: float) -> None:
    if kind != "positions":
        assert share(KINDS[kind](seed, eta), drawn(4, 4, seed=seed), [[0, 1, 2, 3] * 5, [0] * 19 + [1]]) <= NOISE


def test_a_product_and_a_sum_attain_their_bounds() -> None:
    one = forward_pass(network(), InputSet("box", 1.0), 2)
    one.unit = COARSE
    x = Computed(A.upper(torch.ones(3, dtype=torch.float64)), A.zeros(3))
    weight = torch.tensor([[[1.0], [0.0], [0.0]]], dtype=torch.float64)
    rounded_up = Emulated(torch.ones_like).dot(torch.ones(1, 3, dtype=torch.float64), weight[0])
    assert float(rounded_up - 1) <= float(one._product(x, weight).error.floats()) <= float(rounded_up - 1) * (1 + 1e-3)
    assert float(one._add(x, x).error.floats().max()) == pytest.approx(2 * COARSE, rel=1e-9)


# --- changed constants ------------------------------------------------------------------------------------------------


def without(name: str, factor: float) -> tuple[Any, str, Any]:
    """Return the rule `name` with only a part of the error that it adds."""
    before = getattr(ForwardPass, name)

    def changed(self: ForwardPass, *given: Any) -> Computed:
        found = before(self, *given)
        return Computed(found.size, found.error * factor)

    return ForwardPass, name, changed


PLANTED: dict[str, tuple[tuple[Any, str, Any], str]] = {
    "sums": (without("_add", 0.9), "sums"),
    "exact exp": ((forward_rounding, "LIBRARY", 0), "exp"),
    "total variation": ((OutwardUpper, "tanh", lambda x: OutwardUpper(torch.tanh(x.value) * 0.2)), "exp"),
    "sums of keys": (without("_attend", 0.15), "long sums"),
    "passed on": (without("_attend", 0.2), "passed on"),
    "relu": (without("_mlp", 0.2), "relu"),
    "gelu": (without("_mlp", 0.1), "gelu"),
    "LayerNorm": (without("_normalize", 0.005), "LayerNorm"),
    "RMSNorm": (without("_normalize", 0.005), "RMSNorm"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_rule_that_is_too_small_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (owner, attribute, value), scenario = PLANTED[name]
    monkeypatch.setattr(owner, attribute, value)
    assert SCENARIOS[scenario]() > NOISE


# --- requests ---------------------------------------------------------------------------------------------------------


def test_the_type_and_the_number_of_tokens_are_required() -> None:
    net = network(layers=2)
    small = dg.collapse(net)
    with pytest.raises(InputError, match=r"evaluated_in must be torch.float32 or torch.float64, got torch.bfloat16"):
        dg.certify(net, small, radius=1.0, tokens=4, evaluated_in=torch.bfloat16)
    inputs = Tokens(drawn(2, 3), length=2)
    with pytest.raises(InputError, match="effort exact is about exact outputs"):
        dg.certify(net, small, inputs=inputs, effort="exact", evaluated_in=torch.float32)
    with pytest.raises(InputError, match=r"needs the number of tokens.*give tokens=n"):
        dg.certify(net, small, radius=1.0, evaluated_in=torch.float32)
    with pytest.raises(InputError, match=r"a sum of .* terms is too long for a rounding bound"):
        dg.certify(net, small, radius=1.0, tokens=2**23, evaluated_in=torch.float32)


@pytest.mark.parametrize(
    "change", [{"value": 1e30 * EYE}, {"value": 1e39 * EYE}, {"query": 1e20 * EYE, "key": 1e20 * EYE}]
)
def test_numbers_that_may_overflow_have_no_bound(change: dict[str, Tensor]) -> None:
    net = only(network(layers=2), **change)
    assert float(forward_pass(net, InputSet("box", 1.0), 4).error().floats().max()) == math.inf
