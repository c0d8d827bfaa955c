"""Exact suprema over prompts: the enclosures hold everywhere, are as narrow as asked, and survive every stop."""

import pickle
from collections.abc import Callable
from itertools import combinations_with_replacement, product
from typing import Any

import pytest
import torch
from example_counts import few
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import InputError, VerificationError
from depthgauge.theory.depth.certificate import Certificate, certify
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.suprema.exact_supremum import Enumeration, Shares
from depthgauge.theory.suprema.interpolation import Interpolated
from depthgauge.theory.suprema.network_on_shares import NetworkOnShares

A = Outward()
BLOCK = {"mlp": 6, "mlp_skip": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no skip": {"skip": False},
    "mlp": {"mlp": 6},
    "pre": {**BLOCK, "norm": "pre"},
    "pre-rms gelu": {**BLOCK, "norm": "pre-rms", "activation": "gelu"},
    "post": {**BLOCK, "norm": "post"},
    "post-rms no skip": {"norm": "post-rms", "skip": False, "mlp": 6},
    "pre gelu": {**BLOCK, "norm": "pre", "activation": "gelu"},
}


def drawn(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pair(kind: str, eta: float, seed: int = 0, **sizes: int) -> tuple[SelfAttentionNetwork, SelfAttentionNetwork]:
    """Return a network with attention biases, and its last layer as the surrogate."""
    network = dg.random_network(**{"layers": 3, "heads": 2, "dim": 3} | sizes, eta=eta, seed=seed, **KINDS[kind])
    for k, layer in enumerate(network):
        if layer.norm_weight is not None and layer.norm_bias is not None:
            layer.norm_weight.data += drawn(*layer.norm_weight.shape, seed=seed + k, size=0.2)
            layer.norm_bias.data += drawn(*layer.norm_bias.shape, seed=seed + k + 9, size=0.2)
    last = network[len(network) - 1].copy()
    settings = {name: getattr(network, name) for name in ("skip", "norm", "activation", "mlp_skip", "scale")}
    return network, SelfAttentionNetwork([last], **settings)


def on_shares(network: SelfAttentionNetwork, E: Tensor, p: Tensor) -> Tensor:
    """Return S in floating point for any shares [..., v], by masses in the softmax: an independent plain loop."""
    x = E.expand(*p.shape[:-1], *E.shape)

    def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        scores = scale * query @ key.mT
        masses = p[..., None, None, :] * (scores - scores.amax(-1, keepdim=True)).exp()
        return masses / masses.sum(-1, keepdim=True) @ value

    with torch.no_grad():
        return network(x, attention)


def simplices(v: int, K: int, many: int, seed: int, size: float) -> tuple[Tensor, Tensor]:
    """Return simplices of shares, multiples of 2⁻²⁰, and points in them as weights of the vertices."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.distributions.Exponential(1.0).sample(shape).to(torch.float64)  # noqa: E731
    torch.manual_seed(seed)
    centre, away = draw(many, 1, v), draw(many, K, v)
    V = (1 - size) * centre / centre.sum(-1, keepdim=True) + size * away / away.sum(-1, keepdim=True)
    V = (V * 2**20).round() / 2**20
    V[..., -1] = 1 - V[..., :-1].sum(-1)
    weights = draw(many, 30, K) ** (1 + torch.randint(0, 3, (1,), generator=generator))
    return V.clamp(min=0.0), weights / weights.sum(-1, keepdim=True)


def holds(x: Interpolated, truth: Tensor, weights: Tensor) -> tuple[bool, bool]:
    """Return whether an enclosure holds at points of the simplices, and whether its interpolation alone would."""
    flat = x.at.mid.flatten(2)
    linear, truth = weights @ flat, truth.flatten(2)
    low, high = (linear + end.flatten(2) for end in (x.rest.lower(), x.rest.upper()))
    slack = 1e-10 * (1 + truth.abs().amax())
    inside = bool(((low - slack <= truth) & (truth <= high + slack)).all())
    return inside, bool(((linear - truth).abs() <= slack).all())


FUNCTIONS: dict[str, tuple[Callable[[Interpolated], Interpolated], Callable[[Tensor], Tensor]]] = {
    "exp": (lambda x: x.exp(), torch.exp),
    "inverse": (
        lambda x: x.times(x).plus(0.5).inverse(lambda: (A.upper(1e9), A.upper(-0.5))),
        lambda x: 1 / (x * x + 0.5),
    ),
    "root": (lambda x: x.times(x).plus(0.1).inverse_root(A.exact(0.1)), lambda x: (x * x + 0.1).rsqrt()),
    "relu": (lambda x: x.activation("relu"), torch.relu),
    "gelu": (lambda x: x.activation("gelu"), torch.nn.functional.gelu),
    "relu of a product": (lambda x: x.times(x).plus(-0.3).activation("relu"), lambda x: torch.relu(x * x - 0.3)),
    "gelu of exp": (lambda x: x.exp().plus(-1.5).activation("gelu"), lambda x: torch.nn.functional.gelu(x.exp() - 1.5)),
    "product": (lambda x: x.times(x, lambda a, b: a @ b.mT), lambda x: x @ x.mT),
    "known": (lambda x: x.times(x).within(lambda: (A.upper(4.0), A.upper(0.0))), lambda x: x * x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("v", "K"), [(2, 2), (3, 3), (4, 4), (3, 1)])
def test_every_rule_encloses_the_function_on_the_whole_simplex(name: str, v: int, K: int) -> None:
    enclosed, exact = FUNCTIONS[name]
    for size in (1.0, 0.1):
        V, weights = simplices(v, K, 20, v, size)
        M = drawn(v, 6, seed=K)  # |M| ≤ 2 for "known"
        M = (M / M.abs().max() * 2).reshape(v, 6)
        values = lambda p: (p @ M).reshape(*p.shape[:-1], 2, 3)  # noqa: B023, E731
        found = enclosed(Interpolated.linear(A, A.exact(values(V))))
        is_inside, is_linear = holds(found, exact(values(weights @ V)), weights)
        assert is_inside
        assert is_linear == (K == 1)  # the rest is needed wherever there is more than a point


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_rule_carries_the_noise(name: str) -> None:
    enclosed, exact = FUNCTIONS[name]
    V, weights = simplices(3, 3, 20, 0, 0.3)
    M, noise = drawn(3, 6, seed=1).clamp(-1.5, 1.5), drawn(20, 5, 2, 3, seed=2, size=0.05).clamp(-0.1, 0.1)
    at = (V @ M).reshape(20, 3, 2, 3)
    found = enclosed(Interpolated(A, A.exact(at), A.exact(torch.zeros(20, 1, 2, 3).to(at)), A.exact(noise)))
    for seed in range(20):
        signs = drawn(20, 30, 5, seed=seed).tanh() if seed else torch.ones(20, 30, 5, dtype=torch.float64)
        x = (weights @ at.flatten(2) + signs @ noise.flatten(2)).reshape(20, 30, 2, 3)
        assert found.noise is not None
        moved = signs @ found.noise.mid.flatten(2)
        linear = weights @ found.at.mid.flatten(2) + moved
        low, high = (linear + e.flatten(2) for e in (found.rest.lower(), found.rest.upper()))
        truth = exact(x).flatten(2)
        assert bool(((low - 1e-10 <= truth) & (truth <= high + 1e-10)).all())
        assert name == "known" or float(found.noise.mid.abs().max()) > 0


def test_errors_of_one_cause_cancel() -> None:
    at, size = drawn(1, 2, 3), torch.full((1, 1, 3), 1e-3, dtype=torch.float64)
    x = Interpolated(A, A.exact(at * 1e-3), A.between(A.upper(size), A.upper(size)))
    widths = []
    for y in (x, x.renewed()):
        nothing = (y.exp() - y.exp()).settled() + (y.times(y.exp()) - y.times(y.exp())).settled()
        widths.append(float(nothing.rest.rad.max()))
    assert widths[1] < 0.01 * widths[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slopes_are_those_between_the_function_and_its_interpolation(name: str) -> None:
    enclosed, exact = FUNCTIONS[name]
    a = drawn(4, 1, 2, 3, seed=4).clamp(-1, 1)
    for shift in (-0.9, 0.9):  # the rest is one number, far from the interpolation
        found = enclosed(Interpolated(A, A.exact(a), A.exact(torch.full_like(a, shift))))
        low, high = (found.at.mid + end for end in (found.rest.lower(), found.rest.upper()))
        truth = exact(a + shift)
        assert bool(((low - 1e-10 <= truth) & (truth <= high + 1e-10)).all())


def test_the_rest_is_of_second_order() -> None:
    network, _ = pair("pre gelu", 0.5)
    rests = []
    for size in (2.0**-8, 2.0**-9):
        V = torch.tensor([[[0.5, 0.5], [0.5 - size, 0.5 + size]]], dtype=torch.float64)
        p, x = (Interpolated.linear(A, A.exact(e)) for e in (V[:, :, None], drawn(2, 3)[None, None].expand(1, 2, 2, 3)))
        rests.append(float(NetworkOnShares(network, A)(x, p).rest.abs_up().max()))
    assert 3.5 < rests[0] / rests[1] < 4.5


@given(
    st.integers(0, 10**6), st.sampled_from(list(KINDS)), st.floats(0.05, 3.0), st.floats(1e-3, 1.0), st.integers(2, 4)
)
@few(12)
def test_networks_are_enclosed_on_simplices(seed: int, kind: str, eta: float, size: float, v: int) -> None:
    network, _ = pair(kind, eta, seed)
    E, (V, weights) = drawn(v, 3, seed=seed), simplices(v, v, 3, seed, size)
    network[1].query_bias = torch.nn.Parameter(drawn(2, 3, seed=seed))
    network[1].output_bias = torch.nn.Parameter(drawn(3, seed=seed))
    x = Interpolated.linear(A, A.exact(E.expand(len(V), v, v, 3)))
    found = NetworkOnShares(network, A)(x, Interpolated.linear(A, A.exact(V[:, :, None])))
    truth = on_shares(network, E, weights @ V)
    assert holds(found, truth, weights)[0] or not bool(found.rest.rad.isfinite().all())


def attacked(certificate: Certificate, E: Tensor, seed: int) -> float:
    """Return the largest difference that an independent attack on shares finds, by hill climbing from many points."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.cat([torch.eye(len(E), dtype=torch.float64), torch.rand(300, len(E), generator=generator).to(E)])
    p, best = p / p.sum(-1, keepdim=True), torch.zeros(len(p))
    for step in range(25):
        tried = p if step == 0 else (p + torch.randn(p.shape, generator=generator).to(E) * 0.7**step * 0.3).clamp(min=0)
        tried = tried / tried.sum(-1, keepdim=True).clamp(min=1e-9)
        one, other = (on_shares(net, E, tried) for net in (certificate.network, certificate.surrogate))
        found = (one - other).abs().amax((1, 2)).nan_to_num(0.0)
        better = found > best if step else torch.ones_like(found, dtype=torch.bool)
        p, best = torch.where(better[:, None], tried, p), torch.where(better, found, best.to(found))
    return float(best.max())


@pytest.mark.parametrize(
    ("kind", "eta", "v"), [("plain", 0.5, 2), ("no skip", 0.5, 3), ("post", 0.3, 2), ("pre", 0.3, 2)]
)
def test_the_supremum_is_known_within_the_tolerance(kind: str, eta: float, v: int) -> None:
    network, surrogate = pair(kind, eta)
    E = drawn(v, 3, seed=1)
    c = certify(network, surrogate, inputs=dg.Tokens(E), effort="exact", seconds=600)
    assert c.upper is not None
    assert c.upper <= 1.0205 * c.method.attained  # type: ignore[attr-defined]
    assert c.upper <= 1.025 * c.lower
    assert c.methods == ("shares",)
    best = attacked(c, E, 0)
    assert 0.999 * c.upper / 1.0205 <= best <= c.upper * (1 + 1e-9)
    with torch.no_grad():
        at_witness = float((network(c.witness) - surrogate(c.witness)).abs().max())
    assert c.lower == pytest.approx(at_witness, rel=1e-9)
    assert all(any(torch.equal(row, token) for token in E) for row in c.witness)


@pytest.mark.parametrize("kind", ["plain", "pre gelu"])
def test_the_supremum_is_proved_again_in_arb(kind: str) -> None:
    network, surrogate = pair(kind, 0.2, layers=2)
    c = certify(
        network, surrogate, inputs=dg.Tokens(drawn(2, 3)), effort="exact", tolerance=0.1, progress=lambda *_: None
    )
    assert c.verify()
    assert c.upper is not None
    assert pickle.loads(pickle.dumps(c)).upper == c.upper
    with pytest.raises(VerificationError):
        c.method.verify(c.comparison, c.upper * 0.99)


def test_a_small_tolerance_is_reached() -> None:
    network, surrogate = pair("plain", 0.3, layers=2)
    c = certify(network, surrogate, inputs=dg.Tokens(drawn(2, 3)), effort="exact", tolerance=1e-4)
    assert c.upper is not None
    assert c.upper <= (1 + 1.1e-4) * c.method.attained  # type: ignore[attr-defined]


def test_a_stop_at_any_moment_keeps_a_proved_enclosure() -> None:
    network, surrogate = pair("plain", 1.0)
    E, bounds = drawn(3, 3), []
    truth = 0.0
    for steps in range(4):
        calls: list[str] = []

        def stop(done: int, total: int, label: str, calls: list[str] = calls, steps: int = steps) -> None:
            calls.append(label)
            if label.startswith("supremum") and sum(one.startswith("supremum") for one in calls) > steps:
                raise KeyboardInterrupt

        c = certify(network, surrogate, inputs=dg.Tokens(E), effort="exact", progress=stop)
        truth = truth or attacked(c, E, 1)
        assert "stopped by the user" in c.notes[0]
        assert c.upper is not None
        assert truth <= c.upper
        bounds.append(c.upper)
    assert bounds[-1] < bounds[0]


def test_a_limit_in_time_keeps_a_proved_enclosure() -> None:
    network, surrogate = pair("plain", 1.0)
    c = certify(network, surrogate, inputs=dg.Tokens(drawn(5, 3)), effort="exact", seconds=1e-3)
    assert "stopped after 0.001 seconds" in c.notes[0]
    assert "wider than the tolerance 0.02" in c.notes[0]
    assert c.upper is not None
    assert attacked(c, drawn(5, 3), 1) <= c.upper


@pytest.mark.parametrize("kind", ["plain", "causal", "positions", "causal post", "counts"])
def test_few_sequences_are_all_evaluated(kind: str) -> None:
    causal = "causal" in kind
    extra = {**BLOCK, "norm": "post", "activation": "gelu"} if "post" in kind else {}
    network = dg.random_network(layers=2, heads=2, dim=3, eta=0.8, causal=causal, **extra)
    other = dg.random_network(layers=1, heads=1, dim=3, eta=0.8, causal=causal, seed=5, **extra)
    n, v = (6, 2) if kind == "counts" else (3, 2)
    P = drawn(n, 3, seed=3) if kind == "positions" else None
    tokens = dg.Tokens(drawn(v, 3), P, length=n)
    c = certify(network, other, inputs=tokens, effort="exact")
    best, number = 0.0, 0
    for m in range(1, n + 1):
        ordered = causal or P is not None
        for chosen in product(range(v), repeat=m) if ordered else combinations_with_replacement(range(v), m):
            x = tokens.embeddings[list(chosen)] + (0.0 if P is None else P[:m])
            with torch.no_grad():
                best = max(best, float((network(x) - other(x)).abs().max()))
            number += 1
    assert c.upper is not None
    loose = 1e-5 if extra else 1e-9  # GELU is enclosed to 1e-11, and the norms magnify it
    assert best * (1 - 1e-9) <= c.upper <= best * (1 + loose)
    assert c.lower == pytest.approx(best, rel=loose)
    assert (c.exhaustive, c.methods, c.notes) == (True, ("enumeration",), (f"the maximum over {number} sequences",))
    assert c.verify()


def test_refusals_say_why() -> None:
    network, surrogate = pair("plain", 0.5)
    E = drawn(2, 3)
    for request, words in (
        ({"radius": 1.0}, "it is for prompts, and this set is a box; give the tokens"),
        ({"inputs": dg.Tokens(E), "tolerance": 0.0}, "tolerance must be a positive number"),
        ({"inputs": dg.Tokens(E), "seconds": -1.0}, "seconds must be a positive number"),
        ({"inputs": dg.Tokens(drawn(500, 3))}, "500 tokens are too many to divide their shares"),
        ({"inputs": dg.Tokens(E, drawn(40, 3))}, "the order of the tokens matters"),
    ):
        with pytest.raises(InputError, match=words):
            certify(network, surrogate, effort="exact", **request)
    causal = dg.random_network(layers=2, heads=1, dim=3, eta=0.5, causal=True)
    with pytest.raises(InputError, match="the order of the tokens matters"):
        certify(causal, causal, inputs=dg.Tokens(E), effort="exact")
    normed, one = pair("pre", 0.5)
    with pytest.raises(InputError, match="token 1 is at the singularity of the norm"):
        certify(normed, one, inputs=dg.Tokens(torch.stack([E[0], torch.ones(3).to(E)])), effort="exact")
    rms, one = pair("pre-rms gelu", 0.5)
    with pytest.raises(InputError, match="token 0 is at the singularity of the norm"):
        certify(rms, one, inputs=dg.Tokens(torch.stack([torch.zeros(3).to(E), E[0]])), effort="exact")


def test_one_token_alone_is_exact() -> None:
    network, surrogate = pair("post", 2.0)
    c = certify(network, surrogate, inputs=dg.Tokens(drawn(1, 3)), effort="exact")
    assert c.ratio == pytest.approx(1.0, abs=1e-5)
    assert (len(c.witness), isinstance(c.method, Shares), isinstance(c.method, Enumeration)) == (1, True, False)


@pytest.mark.soak
@settings(max_examples=4000, deadline=None)
@given(
    st.integers(0, 10**9), st.sampled_from(list(KINDS)), st.floats(0.01, 3.0), st.floats(0.01, 10.0), st.integers(2, 4)
)
def test_no_prompt_exceeds_the_supremum_in_a_campaign(seed: int, kind: str, eta: float, size: float, v: int) -> None:
    network, surrogate = pair(kind, eta, seed, layers=2 + seed % 2, dim=2 + seed % 3)
    E = drawn(v, network.dim, seed=seed, size=size)
    c = certify(network, surrogate, inputs=dg.Tokens(E), effort="exact", seconds=0.5, tolerance=0.05)
    found = attacked(c, E, seed)
    assert c.upper is None or found <= c.upper * (1 + 1e-9) + 1e-11
    assert c.lower <= (c.upper or float("inf"))
