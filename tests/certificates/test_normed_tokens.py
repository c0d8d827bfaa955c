"""Certificates of the wide block over all sequences of tokens: LayerNorm before the sublayers, MLPs, causal or not."""

import json
import math
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import depthgauge as dg
from depthgauge.certificates.activations import CURVATURE, THIRD, activation_and_slope
from depthgauge.certificates.compared_networks import Comparison
from depthgauge.certificates.deletion import STEEPEST
from depthgauge.certificates.evaluate import precision
from depthgauge.certificates.parallel_blocks import Movements, largest_affine, parallel_proof, weighted_products
from depthgauge.certificates.read_tokens import ReadTokens, diameter
from depthgauge.certificates.token_set import Tokens
from depthgauge.cli.main import main
from depthgauge.errors import InputError, VerificationError
from depthgauge.linalg.enclosures import Enclosure
from depthgauge.linalg.softmax import softm
from depthgauge.network.network import NORM_EPSILON, SelfAttentionNetwork

SLACK = 1 + 1e-9


def drawn(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gpt(seed: int = 0, eta: float = 0.05, *, biases: bool = True, **settings: Any) -> SelfAttentionNetwork:
    """Draw a network as GPT-2 is built: pre-norm, causal, attention and MLP, gains near 1, and biases."""
    kind = {"layers": 2, "heads": 2, "dim": 4, "mlp": 6, "activation": "gelu", "norm": "pre", "causal": True}
    net = dg.random_network(**kind | settings, eta=eta, mlp_skip=True, seed=seed)
    for k, layer in enumerate(net if biases else []):
        if layer.norm_weight is not None and layer.norm_bias is not None:
            layer.norm_weight.data += drawn(*layer.norm_weight.shape, seed=seed + k, size=0.1)
            layer.norm_bias.data += drawn(*layer.norm_bias.shape, seed=seed + k + 50, size=eta)
        layer.query_bias = nn.Parameter(drawn(layer.heads, layer.key_dim, seed=seed + k + 100, size=eta))
        layer.output_bias = nn.Parameter(drawn(net.dim, seed=seed + k + 150, size=eta))
    return net


KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "relu": {"activation": "relu"},
    "bidirectional": {"causal": False, "layers": 3},
    "attention": {"mlp": None, "layers": 3},
    "unbiased": {"biases": False},
    "unnormed": {"norm": "none"},
    "unnormed-relu": {"norm": "none", "activation": "relu", "causal": False},
    "unnormed-attention": {"norm": "none", "mlp": None, "causal": False},
    "deep": {"layers": 5, "heads": 1},
}


def difference(one: SelfAttentionNetwork, other: SelfAttentionNetwork, x: Tensor) -> float:
    with torch.no_grad():
        return float((one(x) - other(x)).abs().max())


def upper(net: SelfAttentionNetwork, small: SelfAttentionNetwork, tokens: Tokens) -> float:
    return float(parallel_proof(Comparison(net, small, tokens)).value.max())


# --- the wide block ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_wide_block_adds_all_sublayers(kind: str) -> None:
    net = gpt(3, 0.3, **KINDS[kind])
    x = drawn(5, 4, seed=9)
    small = dg.collapse(net, method="parallel")
    assert (len(small), small.norm, small.causal, small.activation) == (1, net.norm, net.causal, net.activation)
    with torch.no_grad():
        y = x + sum(_attention(net, k, x) for k in range(len(net)))
        out = y + sum(_mlp(net, k, y) for k in range(len(net)))
        assert torch.allclose(small(x), out, rtol=1e-12, atol=1e-13)


def _attention(net: SelfAttentionNetwork, k: int, x: Tensor) -> Tensor:
    """The attention of a layer, written out: gain and bias are applied, not folded."""
    layer, read, made = net[k], net.attention_input(k, x), torch.zeros_like(x)
    for h in range(layer.heads):
        bias = 0.0 if layer.query_bias is None else layer.query_bias[h]
        scores = net.scale * (read @ layer.query[h] + bias) @ (read @ layer.key[h]).mT
        hidden = torch.ones_like(scores).triu(1).bool() if net.causal else torch.zeros_like(scores).bool()
        made = made + softm(scores.masked_fill(hidden, -math.inf)) @ read @ layer.value[h]
    return made if layer.output_bias is None else made + layer.output_bias


def _mlp(net: SelfAttentionNetwork, k: int, y: Tensor) -> Tensor:
    layer = net[k]
    if layer.mlp is None:
        return torch.zeros_like(y)
    made: Tensor = layer.mlp(layer.normalize(y, 1) if net.norm == "pre" else y, net.activation)
    return made


@pytest.mark.parametrize("kind", ["gpt", "bidirectional", "unnormed"])
def test_the_error_is_of_second_order(kind: str) -> None:
    x, errors = drawn(6, 4, seed=2), []
    for eta in (0.02, 0.01):
        net = gpt(1, eta, **KINDS[kind])
        for layer in net:
            if layer.norm_weight is not None:
                layer.norm_weight.data.fill_(1.0)
        errors.append(difference(net, dg.collapse(net, method="parallel"), x))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2.0, abs=0.2)


# --- soundness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_exceeds_the_bound(kind: str) -> None:
    for seed, eta in product(range(2), (0.01, 0.1, 0.5)):
        net = gpt(seed, eta, **KINDS[kind])
        small = dg.collapse(net, method="parallel")
        for tokens in (Tokens(drawn(3, 4, seed=seed), length=3), Tokens(drawn(3, 4), drawn(3, 4, seed=7, size=0.5))):
            bound, places = upper(net, small, tokens), tokens.at_positions()
            for n in (1, 2, 3):
                chosen = torch.tensor(list(product(range(3), repeat=n)))
                x = places[0][chosen] if len(places) == 1 else places[torch.arange(n), chosen]
                assert difference(net, small, x) <= bound * SLACK


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(list(KINDS)), st.floats(0.001, 1.0), st.floats(0.01, 5.0))
def test_no_random_sequence_exceeds_the_bound(seed: int, kind: str, eta: float, size: float) -> None:
    _attacked(seed, kind, eta, size)


@pytest.mark.soak
@settings(max_examples=100_000, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(list(KINDS)), st.floats(0.0001, 2.0), st.floats(0.001, 100.0))
def test_no_random_sequence_exceeds_the_bound_in_a_campaign(seed: int, kind: str, eta: float, size: float) -> None:
    _attacked(seed, kind, eta, size)


def _attacked(seed: int, kind: str, eta: float, size: float) -> None:
    net = gpt(seed, eta, **{**KINDS[kind], "layers": 2 + (seed % 10 == 0), "dim": 2 + seed % 3})
    small = dg.collapse(net, method="parallel")
    tokens = Tokens(drawn(2 + seed % 4, net.dim, seed=seed, size=size))
    bound = upper(net, small, tokens)
    generator = torch.Generator().manual_seed(seed)
    for n in (2, 9):
        x = tokens.embeddings[torch.randint(0, len(tokens.embeddings), (40, n), generator=generator)]
        with torch.no_grad():
            one, other = net(x), small(x)
        rounding = 256 * torch.finfo(torch.float64).eps * (1.0 + float(one.abs().max()))  # of the two evaluations
        assert float((one - other).abs().max()) <= bound * SLACK + rounding


def test_a_surrogate_with_other_weights_is_covered() -> None:
    """The proof allows for any difference of the weights, not for rounding alone."""
    net, tokens = gpt(0, 0.05), Tokens(drawn(3, 4), length=3)
    small = dg.collapse(net, method="parallel")
    before = upper(net, small, tokens)
    for name, weight in small.named_parameters():
        other = small.copy()
        dict(other.named_parameters())[name].data += drawn(*weight.shape, seed=3, size=0.02)
        certificate = dg.certify(net, other, inputs=tokens)
        assert certificate.lower <= (certificate.upper or 0.0)
        assert (certificate.upper or 0.0) > before
        assert certificate.verify()


def test_ratios_of_small_weights() -> None:
    """Proved over attained, GPT-2-style networks with η = 0.01: the median is at most 6."""
    shapes = [(2, 8, "gelu"), (3, 16, "gelu"), (4, 16, "gelu"), (4, 16, "relu"), (2, 32, "gelu"), (3, 32, "relu")]
    ratios = []
    for seed, (layers, dim, activation) in enumerate(shapes):
        net = gpt(seed, 0.01, layers=layers, dim=dim, mlp=4 * dim, activation=activation)
        tokens = Tokens(drawn(6, dim, seed=seed), drawn(4, dim, seed=seed + 1, size=0.5))
        certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=tokens)
        assert certificate.methods == ("parallel",)
        assert sum(sum(heads) for heads in certificate.share) == pytest.approx(1.0)
        ratios.append(certificate.ratio or math.inf)
    assert median(ratios) <= 6
    assert max(ratios) <= 10


# --- the second proof -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_proved_again(kind: str) -> None:
    for eta in (0.02, 0.4):
        net = gpt(5, eta, **KINDS[kind])
        certificate = dg.certify(
            net, dg.collapse(net, method="parallel"), inputs=Tokens(drawn(3, 4), drawn(2, 4, seed=8, size=0.5))
        )
        assert certificate.exhaustive
        assert certificate.upper is not None
        assert certificate.lower <= certificate.upper
        assert certificate.verify()
        with pytest.raises(VerificationError, match="could be proved"):
            replace(certificate, upper=certificate.upper * (1 - 2e-3)).verify()


def test_another_network_is_not_proved() -> None:
    net, tokens = gpt(), Tokens(drawn(3, 4), length=2)
    certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=tokens)
    for other in (gpt(layers=3), gpt(causal=False), gpt(activation="relu")):
        wrong = replace(certificate, comparison=replace(certificate.comparison, surrogate=other))
        with pytest.raises(VerificationError, match="wide block"):
            wrong.verify()


# --- the inequalities: LayerNorm --------------------------------------------------------------------------------------


def normed(x: Tensor) -> Tensor:
    c: Tensor = x - x.mean(-1, keepdim=True)
    return c / ((c * c).mean(-1, keepdim=True) + NORM_EPSILON).sqrt()


def in_ball(count: int, d: int, radius: float, seed: int) -> Tensor:
    direction = drawn(count, d, seed=seed)
    direction = direction / direction.norm(dim=1, keepdim=True)
    return radius * direction * torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_what_is_read_encloses_layer_norm() -> None:
    points = torch.cat([drawn(5, 6), drawn(3, 6, seed=1, size=1e-4), torch.full((1, 6), 2.0, dtype=torch.float64)])
    read = ReadTokens.of(points, is_normed=True)
    assert bool(((read.u.mid - normed(points)).abs() <= read.u.rad + 1e-15).all())
    exact = torch.func.vmap(torch.func.jacrev(normed))(points)
    derivative = read.derivative(slice(None))
    assert torch.allclose(derivative.mid, exact, rtol=1e-9, atol=1e-9)
    assert bool((derivative.rad <= 1e-11 * (1 + exact.abs())).all())
    assert bool((torch.linalg.matrix_norm(exact, 2) <= read.steep * SLACK).all())


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.floats(0.001, 3.0), st.floats(0.01, 3.0), st.integers(2, 6))
def test_no_movement_exceeds_the_bounds_of_layer_norm(seed: int, rho: float, size: float, d: int) -> None:
    t = drawn(1, d, seed=seed, size=size).expand(60, d)
    read = ReadTokens.of(t, is_normed=True)
    x, other = t + in_ball(60, d, rho, seed), t + in_ball(60, d, rho, seed + 1)
    ends = [(x - other).norm(dim=1), (x - t).norm(dim=1), (other - t).norm(dim=1)]
    assert bool(((normed(x) - normed(t)).norm(dim=1) <= read.shift(ends[1]) * SLACK + 1e-14).all())
    moved = normed(x) - normed(other)
    assert bool((moved.norm(dim=1) <= read.shift_between(*ends) * SLACK + 1e-14).all())
    bent = moved - (x - other) @ read.derivative(slice(1)).mid[0]
    assert bool((bent.norm(dim=1) <= read.bend(*ends) * SLACK + 1e-13).all())


def test_a_tangent_movement_attains_the_shift() -> None:
    """The lifted vector (c, √(dε)) moves orthogonally to the moved one: then sin(angle) = ρ/w."""
    t = torch.tensor([[300.0, -300.0, 0.0, 0.0]], dtype=torch.float64)  # ε is negligible
    read, w = ReadTokens.of(t, is_normed=True), float(t.norm())
    along, across = t[0] / w, torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64) / math.sqrt(2)
    for s in (0.01, 0.3, 0.9):
        moved = t[0] - w * s * s * along + w * s * math.sqrt(1 - s * s) * across
        rho = (moved - t[0]).norm()[None]
        assert float((normed(moved) - normed(t[0])).norm()) == pytest.approx(float(read.shift(rho)), rel=1e-6)
    assert float(read.shift(torch.tensor([2 * w]))) == pytest.approx(4.0)
    assert float((normed(-t) - normed(t)).norm()) == pytest.approx(4.0, rel=1e-6)
    # The largest second derivative: a third of the square along c, two thirds across it.
    s = 1e-4
    moved = t[0] + w * s * (along / math.sqrt(3) + across * math.sqrt(2 / 3))
    rho, nothing = (moved - t[0]).norm()[None], torch.zeros(1, dtype=torch.float64)
    bent = normed(moved) - normed(t[0]) - (moved - t[0]) @ read.derivative(slice(None)).mid[0]
    assert float(bent.norm()) == pytest.approx(float(read.bend(rho, rho, nothing)), rel=1e-3)
    # Two states on the ray of c, at distance ρ towards the origin: the slope there is 1/(1 − s).
    one, two = (t[0] * 0.5 + sign * 1e-6 * across for sign in (1, -1))
    ends = [(one - two).norm()[None], (one - t[0]).norm()[None], (two - t[0]).norm()[None]]
    assert float((normed(one) - normed(two)).norm()) == pytest.approx(float(read.shift_between(*ends)), rel=1e-6)


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_weights_that_differ_move_an_average_by_at_most_the_diameter(seed: int) -> None:
    n = 2 + seed % 5
    z, p, q = drawn(n, 3, seed=seed), *(softm(drawn(n, seed=seed + k, size=2.0)[None])[0] for k in (1, 2))
    variation = float((p - q).abs().sum() / 2)
    farthest = float(torch.cdist(z, z).max())
    assert float(((p - q) @ z).norm()) <= variation * farthest * SLACK
    assert farthest <= float(diameter(Enclosure.exact(z))) * SLACK
    ends = torch.stack([z[0], -z[0]])
    assert float(diameter(Enclosure.exact(ends))) == pytest.approx(2 * float(z[0].norm()))


# --- the inequalities: activations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_activations_are_enclosed(activation: str) -> None:
    z = torch.cat([drawn(300, size=3.0), torch.tensor([0.0, 1e-9, -1e-9, 7.9999, 8.0, -8.001, 40.0, -300.0]).double()])
    value, slope = activation_and_slope(Enclosure(z, torch.full_like(z, 1e-12)), activation)
    with precision(200):
        for k, x in enumerate(map(arb, z.tolist())):
            if activation == "relu":
                exact = x.max(arb(0)), arb(int(x > 0))
            else:
                Phi, phi = (1 + (x / arb(2).sqrt()).erf()) / 2, (-x * x / 2).exp() / (2 * arb.pi()).sqrt()
                exact = x * Phi, Phi + x * phi
            for made, wanted in zip((value, slope), exact, strict=True):
                assert abs(arb(float(made.mid[k])) - wanted) <= arb(float(made.rad[k]))
    assert float(value.rad.max()) < 1e-10
    assert float(slope.rad.max()) < 2e-7


def test_constants_of_gelu_are_attained() -> None:
    z = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    phi = (-z * z / 2).exp() / math.sqrt(2 * math.pi)
    Phi = (1 + torch.erf(z / math.sqrt(2))) / 2
    slopes = Phi + z * phi, phi * (2 - z * z), phi * (z**3 - 4 * z)
    for values, bound in zip(slopes, (STEEPEST["gelu"], CURVATURE, THIRD), strict=True):
        assert 0.995 * bound <= float(values.abs().max()) <= bound


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.sampled_from(["gelu", "relu"]), st.floats(0.01, 3.0))
def test_no_hidden_state_exceeds_the_kink(seed: int, activation: str, rho: float) -> None:
    """|act(h) − act(h') − act'(h_t)(h − h')| |W_out| over states n, n' within ρ of n(t)."""
    net = gpt(seed % 100, 0.5, layers=1, activation=activation)
    t = drawn(1, 4, seed=seed).expand(50, 4)
    found = Movements(net, dg.collapse(net, method="parallel"), ReadTokens.of(t, is_normed=True))
    layer, act = found.layers[0], torch.nn.functional.gelu if activation == "gelu" else torch.relu
    u, u_other = (normed(t) + in_ball(50, 4, rho, seed + k) for k in (1, 2))
    h, h_other = (z @ layer.w_in.mid + layer.b_in.mid for z in (u, u_other))
    error = (act(h) - act(h_other) - (h - h_other) * found.slopes[0].mid) @ layer.w_out.mid
    ends = [(a - b).norm(dim=1) for a, b in ((u, normed(t)), (u_other, normed(t)), (u, u_other))]
    assert bool((error.abs() <= found._kink(0, *ends) * SLACK + 1e-6).all())  # the slope of GELU is known to 1e-7


def test_a_unit_that_changes_sign_attains_the_kink() -> None:
    net = gpt(0, 0.5, layers=1, activation="relu", mlp=1)
    t = drawn(1, 4, seed=4)
    found = Movements(net, dg.collapse(net, method="parallel"), ReadTokens.of(t, is_normed=True))
    layer = found.layers[0]
    w, hidden = layer.w_in.mid[:, 0], float(found.hidden[0].mid[0, 0])
    far = 2 * abs(hidden) / float(w.norm())
    moved = normed(t)[0] - math.copysign(far, hidden) * w / w.norm()
    ends = [torch.tensor([far], dtype=torch.float64), torch.zeros(1).double(), torch.tensor([far], dtype=torch.float64)]
    h = float(moved @ w + layer.b_in.mid[0, 0])
    error = max(h, 0.0) - max(hidden, 0.0) - (h - hidden) * float(hidden > 0)
    assert torch.allclose(found._kink(0, *ends)[0], abs(error) * layer.w_out.mid[0].abs())


# --- the inequalities: leading terms ----------------------------------------------------------------------------------


def test_affine_functions_and_products_are_enclosed() -> None:
    u, G, f = drawn(5, 3), drawn(4, 3, 3, seed=1), drawn(4, 1, 3, seed=2)
    made = u @ G + f
    found = largest_affine(Enclosure.exact(u), Enclosure.exact(G), Enclosure.exact(f))
    assert bool((found >= torch.stack([made.amax(1), -made.amin(1)])).all())
    assert torch.allclose(found, torch.stack([made.amax(1), -made.amin(1)]), rtol=1e-12)
    wide = Enclosure(G, torch.full_like(G, 0.1))
    off = 0.1 * torch.sign(drawn(4, 3, 3, seed=5))
    assert bool((largest_affine(Enclosure.exact(u), wide, Enclosure.exact(f))[0] >= (u @ (G + off) + f).amax(1)).all())
    left, right, weights = drawn(3, 6), drawn(6, 3, seed=3), drawn(4, 6, seed=4)
    exact = left * weights[:, None] @ right
    a, w, b = (Enclosure.exact(m) for m in (left, weights, right))
    product_ = weighted_products(a, w, b, slice(None))
    assert bool(((product_.mid - exact).abs() <= product_.rad).all())
    a, w, b = (Enclosure(m, torch.full_like(m, 1e-3)) for m in (left, weights, right))
    moved = [m + 1e-3 * torch.sign(drawn(*m.shape, seed=6)) for m in (left, weights, right)]
    product_ = weighted_products(a, w, b, slice(1, 3))
    assert bool(((moved[0] * moved[1][1:3, None] @ moved[2] - product_.mid).abs() <= product_.rad).all())


@pytest.mark.parametrize("causal", [False, True])
def test_the_leading_terms_are_the_second_order(causal: bool) -> None:
    """The rests vanish against the leading terms, which the attained difference stays within ten of."""
    previous = math.inf
    for eta in (1e-2, 1e-3, 1e-4):
        net = gpt(2, eta, layers=3, causal=causal, biases=False)
        small, tokens = dg.collapse(net, method="parallel"), Tokens(drawn(4, 4), length=6)
        found = Movements(net, small, ReadTokens.of(tokens.points(), is_normed=True))
        rest = max(float(found.attention.max()), float(found.mlp.max()), float(found.flat.max()))
        whole = upper(net, small, tokens)
        assert rest / whole < previous / 5
        previous = rest / whole
        x = tokens.embeddings[torch.randint(0, 4, (400, 6), generator=torch.Generator().manual_seed(0))]
        assert 0.1 * whole < difference(net, small, x) <= whole


def test_blocks_of_tokens_give_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    net, tokens, steps = gpt(), Tokens(drawn(7, 4)), []
    small = dg.collapse(net, method="parallel")
    whole = parallel_proof(Comparison(net, small, tokens)).value
    monkeypatch.setattr("depthgauge.certificates.parallel_blocks.ENTRIES", 3 * 4 * 7)
    parts = parallel_proof(Comparison(net, small, tokens), lambda *report: steps.append(report))
    assert torch.allclose(parts.value, whole, rtol=1e-12)
    assert steps == [(0, 7, "proving"), (3, 7, "proving"), (6, 7, "proving")]


# --- bad input and the command line -----------------------------------------------------------------------------------


def test_tokens_with_equal_entries_are_covered_and_named() -> None:
    """LayerNorm maps them to 0 and is 316 times as steep there, but never reads more than √d."""
    net = gpt(1, 0.05)
    embeddings = torch.cat([drawn(2, 4), torch.zeros(1, 4, dtype=torch.float64)])
    certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=Tokens(embeddings, length=3))
    assert "may move further than the entries" in certificate.notes[0]
    assert certificate.lower <= (certificate.upper or 0.0) < 100.0
    assert certificate.verify()


def test_huge_weights_give_no_number_that_is_no_bound() -> None:
    net = gpt(0, 1e200)
    certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=Tokens(drawn(2, 4), length=2))
    assert certificate.upper is None
    with pytest.raises(VerificationError, match="no finite upper bound"):
        certificate.verify()


def test_requests_that_are_not_covered_are_refused() -> None:
    net, tokens = gpt(), Tokens(drawn(3, 4), length=3)
    small = dg.collapse(net, method="parallel")
    given_: dict[str, dict[str, Any]] = {"a box": {"radius": 1.0}, "a ball": {"ball": 1.0}}
    for word, inputs in given_.items():
        with pytest.raises(InputError, match=f"{word} contains tokens whose entries are all equal.*316 times as steep"):
            dg.certify(net, small, **inputs)
    post = gpt(norm="post")
    with pytest.raises(InputError, match=r"after each sublayer \(post\).*do not stay near the input"):
        dg.collapse(post, method="parallel")
    with pytest.raises(InputError, match="do not stay near the input"):
        dg.certify(post, post, inputs=tokens)
    with pytest.raises(InputError, match="only parallel covers"):
        dg.collapse(net, method="mean-field")
    plain = dg.random_network(2, 1, 4, 0.1, mlp=3, norm="pre")  # no skip around the MLP
    with pytest.raises(InputError, match="no skip connections around each sublayer"):
        dg.collapse(plain, method="parallel")
    for wrong in (net, dg.collapse(gpt(heads=1), method="parallel"), dg.collapse(gpt(mlp=5), method="parallel")):
        with pytest.raises(InputError, match="only against its wide block"):
            dg.certify(net, wrong, inputs=tokens)
    with pytest.raises(InputError, match="norm=pre, the surrogate norm=none"):
        dg.certify(net, dg.collapse(gpt(norm="none"), method="parallel"), inputs=tokens)
    biased = gpt()
    biased[0].position_bias = nn.Parameter(torch.zeros(2, 3, 3, dtype=torch.float64))
    with pytest.raises(InputError, match="position biases"):
        dg.collapse(biased, method="parallel")


def test_the_command_collapses_such_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["depthgauge", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    net, tokens, out = (str(tmp_path / name) for name in ("net.safetensors", "tokens.safetensors", "one.safetensors"))
    kind = ("--layers", "2", "--heads", "2", "--dim", "4", "--norm", "pre", "--mlp", "6", "--mlp-skip", "--causal")
    assert run("random", *kind, "--activation", "gelu", "--out", net) == 0
    save_file({"embeddings": drawn(3, 4), "positions": drawn(3, 4, seed=1)}, tokens)
    command = ("collapse", net, "--method", "parallel")
    assert run(*command, "--tokens", tokens, "--length", "2", "--json", "--out", out) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["methods"] == ["parallel"]
    assert 0 < found["lower"] <= found["upper"] < 6 * found["lower"]
    assert len(dg.load_network(out)) == 1
    assert run(*command) == 2
    assert "entries are all equal" in capsys.readouterr().err
