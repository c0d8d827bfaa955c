"""The second proof: it accepts every correct certificate, and rejects each kind of damage at the step concerned."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flint import arb, arb_mat
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.base.errors import InputError, VerificationError
from depthgauge.theory.certificates.arb_values import precision, to_arb
from depthgauge.theory.certificates.box import BoxBounds
from depthgauge.theory.certificates.certificate import Certificate, certify
from depthgauge.theory.certificates.compared_networks import InputSet
from depthgauge.theory.certificates.deletion import STEEPEST as FIRST_STEEPEST
from depthgauge.theory.certificates.proof import ExpansionProof
from depthgauge.theory.certificates.verify.arb_vectors import (
    column_lengths,
    largest,
    largest_eigenvalue,
    length,
    smaller,
    spectral_norm,
)
from depthgauge.theory.certificates.verify.deletion import STEEPEST
from depthgauge.theory.certificates.verify.lead import cubic_maximum, quadratic_form
from depthgauge.theory.certificates.verify.parallel_blocks import ArbParallel
from depthgauge.theory.certificates.verify.tokens import PairLead
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.network.random_networks import random_network
from depthgauge.theory.surrogates.closed_forms import closed_form, fold, without_attention


def certified(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, **request: Any) -> Certificate:
    return certify(network, surrogate, starts=1, steps=0, **request)


def of_method(method: str = "mean-field", *, eta: float = 0.02, dim: int = 4, **request: Any) -> Certificate:
    network = random_network(layers=3, heads=2, dim=dim, eta=eta, seed=dim)
    return certified(network, closed_form(network, method), **({"radius": 1.0} | request))


def changed(c: Certificate, *, upper: float | None = None, proof: Any = ..., **comparison: Any) -> Certificate:
    """The certificate with another upper bound, another proof, or other fields of the comparison."""
    if upper is not None:
        c = replace(c, upper=upper)
    if proof is not ...:
        c = replace(c, proof=proof)
    return replace(c, comparison=replace(c.comparison, **comparison))


def expansion_proof(c: Certificate) -> ExpansionProof:
    assert isinstance(c.proof, ExpansionProof)
    return c.proof


# --- accepted certificates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["identity", "last-layer", "parallel", "mean-field", "corrected"])
@pytest.mark.parametrize("request_", [{"radius": 0.7}, {"radius": None, "ball": 1.3}], ids=["box", "ball"])
@pytest.mark.parametrize("eta", [1e-3, 0.3])
def test_certificates_of_every_method_are_proved_again(method: str, request_: dict[str, Any], eta: float) -> None:
    assert of_method(method, eta=eta, dim=3, **request_).verify()


@pytest.mark.parametrize("kept", [[], [1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"ball": 1.0}], ids=["box", "ball"])
def test_folded_networks_are_proved_again(kept: list[int], request_: dict[str, float]) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.05)
    assert certified(network, fold(network, kept), **request_).verify()


@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"radius": None, "ball": 1.0}], ids=["box", "ball"])
def test_a_sharpened_bound_needs_its_sums_of_squares(request_: dict[str, Any]) -> None:
    c = of_method(eta=0.01, effort="high", **request_)
    assert c.methods == ("joint", "squares")
    assert c.verify()
    proof = expansion_proof(c)
    assert proof.joint is not None
    without = replace(proof, joint=replace(proof.joint, multipliers={}))
    with pytest.raises(VerificationError, match="output, coordinate"):
        changed(c, proof=without).verify()


@pytest.mark.parametrize("method", ["last-layer", "mean-field"])
def test_networks_without_skips(method: str) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.3, skip=False)
    assert certified(network, closed_form(network, method), radius=1.0).verify()
    assert certified(network, fold(network, [1]), radius=1.0).verify()


@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"ball": 1.0}], ids=["box", "ball"])
def test_one_token(request_: dict[str, float]) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.3)
    c = certified(network, closed_form(network, "identity"), tokens=1, **request_)
    assert c.verify()
    # For one token |S − S'| is the linear part alone, so the same number is too small for more tokens.
    with pytest.raises(VerificationError):
        changed(c, rows=None).verify()


@pytest.mark.parametrize("method", ["identity", "last-layer", "parallel"])
@pytest.mark.parametrize("kind", ["radius", "ball"])
def test_causal_networks(method: str, kind: str) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.2, causal=True)
    c = certified(network, closed_form(network, method), **{kind: 1.0})
    assert c.methods in {("deletion",), ("joint",), ("plain",)}
    assert c.verify()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("switches", [{}, {"mlp_skip": True}, {"skip": False}, {"causal": True}], ids=str)
@pytest.mark.parametrize("deleted", [[0], [1, 2]])
def test_networks_with_mlps(activation: str, switches: dict[str, bool], deleted: list[int]) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.5, mlp=4, activation=activation, **switches)  # type: ignore[arg-type]
    assert certified(network, without_attention(network, deleted, "test"), radius=1.0).verify()


def test_scalings_prove_sign_norms_that_are_too_wide_to_enumerate() -> None:
    c = of_method("parallel", dim=11, eta=0.05)
    assert c.verify()
    network = random_network(layers=2, heads=2, dim=11, eta=0.2, causal=True)
    assert certified(network, closed_form(network, "last-layer"), radius=1.0).verify()


@pytest.mark.parametrize(
    ("dim", "layers", "heads", "method"),
    [
        (16, 2, 1, "mean-field"),
        pytest.param(32, 2, 1, "mean-field", marks=pytest.mark.soak),
        pytest.param(32, 4, 2, "mean-field", marks=pytest.mark.soak),
        pytest.param(32, 4, 2, "corrected", marks=pytest.mark.soak),
    ],
)
def test_wide_networks(dim: int, layers: int, heads: int, method: str) -> None:
    """The bound is proved up to the width of the figures in the guide, and a bound smaller by 1e-6 is rejected."""
    network = random_network(layers=layers, heads=heads, dim=dim, eta=0.01, seed=0)
    c = certified(network, closed_form(network, method), radius=1.0)
    assert c.upper is not None
    assert c.methods == ("joint",)
    assert c.verify()
    with pytest.raises(VerificationError, match=f"output, coordinate {c.coordinate}"):
        changed(c, upper=c.upper * (1 - 1e-6)).verify()


@pytest.mark.parametrize("method", ["identity", "last-layer", "parallel", "mean-field", "corrected"])
@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"radius": None, "ball": 1.0}], ids=["box", "ball"])
def test_weights_far_below_the_precision_are_proved_again(method: str, request_: dict[str, Any]) -> None:
    """Even at 256 bits (I + V) − I is known to 1e-77 only; here V is about 1e-100."""
    c = of_method(method, eta=1e-100, **request_)
    assert c.upper is not None
    assert 0 < c.lower <= c.upper < 1e-98
    assert c.verify()


def test_a_last_layer_without_values_is_a_deleted_one() -> None:
    """All values are 0, so no scalings were needed or recorded for these networks of width 12."""
    network = random_network(layers=2, heads=2, dim=12, eta=0.02, distribution="sign", causal=True)
    with torch.no_grad():
        for layer in network:
            layer.value.zero_()
    c = certified(network, closed_form(network, "last-layer"), radius=1.0)
    assert c.methods == ("deletion",)
    assert c.verify()


def test_a_matrix_around_zero_has_a_length() -> None:
    with precision(128):
        near = arb_mat([[arb(0, 1e-40)] * 2] * 2)
        assert 0 < length(near.entries()) < 1e-39
        assert column_lengths(near)[0] < 1e-39
        assert PairLead([], arb_mat([[1, 2], [3, 4]]), arb(1))._centred(near) < 1e-30


def test_proofs_that_share_layer_bounds_have_separate_scalings() -> None:
    network = random_network(layers=3, heads=1, dim=11, eta=0.05)
    first = certified(network, fold(network, [0, 1]), radius=1.0)
    bounds = expansion_proof(first).bounds
    assert isinstance(bounds, BoxBounds)
    second = certified(network, fold(network, [1, 2]), radius=1.0, bounds=bounds)
    assert first.verify()
    assert second.verify()


def test_bounds_of_another_network_or_box_are_rejected_before_the_proof() -> None:
    network, other = (random_network(layers=2, heads=1, dim=3, eta=0.05, seed=seed) for seed in (0, 1))
    c = certified(network, fold(network, [0]), radius=1.0)
    for net, radius in ((other, 1.0), (network, 2.0)):
        with pytest.raises(InputError, match="another network or another box"):
            certified(net, fold(net, [0]), radius=radius, bounds=expansion_proof(c).bounds)


# --- rejected certificates ----------------------------------------------------------------------------------------


def test_incomplete_certificates_and_too_few_bits_are_rejected() -> None:
    c = of_method()
    with pytest.raises(VerificationError, match="no finite upper bound"):
        replace(c, upper=None).verify()
    with pytest.raises(VerificationError, match="does not contain its proof"):
        changed(c, proof=None).verify()
    with pytest.raises(InputError, match="bits"):
        c.verify(bits=8)


@pytest.mark.parametrize("method", ["identity", "parallel", "mean-field", "corrected"])
@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"radius": None, "ball": 1.0}], ids=["box", "ball"])
def test_a_reduced_upper_bound_is_rejected(method: str, request_: dict[str, Any]) -> None:
    c = of_method(method, **request_)
    assert c.upper is not None
    for shrink in (1e-3, 1e-9):
        with pytest.raises(VerificationError, match=f"output, coordinate {c.coordinate}"):
            changed(c, upper=c.upper * (1 - shrink)).verify()


def test_a_larger_or_another_set_is_rejected() -> None:
    c = of_method()
    with pytest.raises(VerificationError):
        changed(c, inputs=InputSet("box", c.inputs.radius * (1 + 1e-6))).verify()
    with pytest.raises(VerificationError, match="is for a ball"):
        changed(c, inputs=InputSet("ball", c.inputs.radius)).verify()


@pytest.mark.parametrize("name", ["own", "err"])
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("who", ["network", "surrogate"])
@pytest.mark.parametrize("eta", [0.02, 0.5], ids=["joint", "plain"])
def test_a_reduced_claim_is_rejected_at_its_layer(name: str, layer: int, who: str, eta: float) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=eta)
    c = certified(network, fold(network, [0, 1, 2]), radius=1.0)
    proof = expansion_proof(c)
    bounds = proof.bounds if who == "network" else proof.other
    assert isinstance(bounds, BoxBounds)
    claim = getattr(bounds.layers[layer], name).clone()
    claim[1] *= 1 - 1e-6
    bounds.layers[layer] = replace(bounds.layers[layer], **{name: claim})
    with pytest.raises(VerificationError, match=f"{who}, {name} at layer {layer}, coordinate 1"):
        c.verify()


@pytest.mark.parametrize("name", ["own", "err"])
def test_a_reduced_claim_on_the_ball_is_rejected(name: str) -> None:
    c = of_method(radius=None, ball=1.0)
    layers = expansion_proof(c).bounds.layers
    layers[2] = replace(layers[2], **{name: getattr(layers[2], name) * (1 - 1e-6)})  # type: ignore[type-var, assignment]
    with pytest.raises(VerificationError, match=f"network, {name} at layer 2"):
        c.verify()


@pytest.mark.parametrize("claim", [[0.1] * 3, [0.1] * 5, [-0.1] * 4, [float("nan")] * 4], ids=str)
def test_claims_that_are_not_nonnegative_vectors_are_rejected(claim: list[float]) -> None:
    c = of_method()
    bounds = expansion_proof(c).bounds
    assert isinstance(bounds, BoxBounds)
    object.__setattr__(bounds.layers[1], "own", torch.tensor(claim, dtype=torch.float64))
    with pytest.raises(VerificationError, match="own is not 4 nonnegative numbers"):
        c.verify()


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("row_scale", lambda scale: scale[:, :-1], "not 4 positive numbers"),
        ("column_scale", lambda scale: scale[:, :-1], "not 4 positive numbers"),
        ("column_scale", lambda scale: scale[:0], "no scalings were recorded"),
        ("row_scale", lambda scale: -scale, "not 4 positive numbers"),
        ("row_scale", lambda scale: 0 * scale, "not 4 positive numbers"),
        ("column_scale", lambda scale: scale / 0, "not 4 positive numbers"),
        # Any positive scalings are sound, but these prove only a larger bound.
        ("column_scale", lambda scale: scale.flip(1) ** 3, "output, coordinate"),
    ],
)
def test_wrong_scalings_of_the_leading_term_are_rejected(
    name: str, change: Callable[[Tensor], Tensor], why: str
) -> None:
    c = of_method()
    assert c.methods == ("joint",)
    joint = expansion_proof(c).joint
    assert joint is not None
    # Setting the attribute directly bypasses the shape check of the constructor.
    object.__setattr__(joint.lead, name, change(getattr(joint.lead, name)))
    with pytest.raises(VerificationError, match=why):
        c.verify()


@pytest.mark.parametrize("name", ["0.theta", "1.e1", "2.lin_own"])
def test_wrong_scalings_of_a_sign_norm_are_rejected(name: str) -> None:
    c = of_method("parallel", dim=11)
    bounds = expansion_proof(c).bounds
    assert isinstance(bounds, BoxBounds)
    record = bounds.norms.record
    kept = record[name]
    assert kept.row_scale is not None
    record[name] = replace(kept, row_scale=kept.row_scale[:, 1:])
    with pytest.raises(VerificationError, match=f"{name}: the recorded scalings"):
        c.verify()
    del record[name]
    with pytest.raises(VerificationError, match=f"{name}: no scalings"):
        c.verify()


@pytest.mark.parametrize("which", ["network", "surrogate"])
@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"radius": None, "ball": 1.0}], ids=["box", "ball"])
def test_changed_weights_are_rejected(which: str, request_: dict[str, Any]) -> None:
    c = of_method("parallel", **request_)
    with torch.no_grad():
        getattr(c, which)[0].value.mul_(1.001)
    with pytest.raises(VerificationError):
        c.verify()


@pytest.mark.parametrize("switches", [{}, {"causal": True}, {"mlp": 3}], ids=str)
@pytest.mark.parametrize("name", ["output_bias", "query_bias"])
def test_a_bias_in_the_attention_is_rejected(name: str, switches: dict[str, Any]) -> None:
    network = random_network(layers=2, heads=1, dim=3, eta=0.2, **switches)
    c = certified(network, closed_form(network, "last-layer"), radius=1.0)
    damaged = c.network.copy()
    bias = torch.ones(damaged[0].query.shape[::2] if name == "query_bias" else (3,), dtype=torch.float64)
    setattr(damaged[0], name, torch.nn.Parameter(bias))
    with pytest.raises(VerificationError, match="biases"):
        changed(c, network=damaged).verify()


def test_a_reduced_deletion_bound_and_changed_surrogates_are_rejected() -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.2, mlp=3)
    c = certified(network, closed_form(network, "last-layer"), radius=1.0)
    assert c.upper is not None
    with pytest.raises(VerificationError, match="output, coordinate"):
        changed(c, upper=c.upper * (1 - 1e-9)).verify()
    damaged = c.surrogate.copy()
    with torch.no_grad():
        damaged[2].value[0, 0, 0] += 1e-3
    with pytest.raises(VerificationError, match="layer 2: the surrogate's attention"):
        changed(c, surrogate=damaged).verify()
    assert damaged[1].mlp is not None
    with torch.no_grad():
        damaged[1].mlp.b_in[0] += 1e-3
    with pytest.raises(VerificationError, match="layer 1: the MLPs differ"):
        changed(c, surrogate=damaged).verify()


def test_a_surrogate_with_its_own_mlp_is_not_a_deletion() -> None:
    """The networks differ by more than 1; a bound of 0.06 that ignored the surrogate's MLP would be wrong."""
    network = random_network(layers=2, heads=1, dim=2, eta=0.1, causal=True)
    other = random_network(layers=1, heads=1, dim=2, eta=1.0, causal=True, mlp=3)
    surrogate = without_attention(other, [0], "test")
    with pytest.raises(InputError, match="certified only against itself"):
        certify(network, surrogate, radius=1.0)


# --- parts of the proof -------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), m=st.integers(1, 5), n=st.integers(1, 5), size=st.sampled_from([1e-200, 1.0, 1e200]))
def test_norms_are_above_the_truth_and_close_to_it(seed: int, m: int, n: int, size: float) -> None:
    M = torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with precision(128):
        bound = float(spectral_norm(to_arb(M) * arb(size)) / arb(size))
    truth = torch.linalg.matrix_norm(M, 2).item()
    assert truth * (1 - 1e-13) <= bound <= truth * (1 + 1e-12)


def test_nan_is_never_a_bound() -> None:
    assert largest([arb(1), arb.nan(), arb(2)]).is_nan()
    assert largest_eigenvalue(arb_mat([[arb.nan(), 0], [0, 1]])).is_nan()
    assert smaller(arb.nan(), arb(1)) == 1
    assert smaller(arb(1), arb.nan()) == 1
    assert cubic_maximum(arb.nan(), arb(1), arb(1)).is_nan()
    assert cubic_maximum(arb(1), arb.nan(), arb(1)).is_nan()
    assert cubic_maximum(arb(0), arb(0), arb(1)) == 0
    assert largest_eigenvalue(arb_mat([[0, 0], [0, 0]])) == 0
    assert largest_eigenvalue(arb_mat([[-1, 0], [0, -2]])) == 0


@pytest.mark.parametrize("place", range(3))
def test_one_query_without_a_bound_leaves_no_bound_over_all(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [arb.nan() if x == place else arb(1) for x in range(3)]
    lead = PairLead([(arb_mat([[1]]), arb_mat([[1]]))], arb_mat([[0], [1], [2]]), arb(1))
    for name in ("_pairs", "_centred"):
        left = iter(sizes)
        monkeypatch.setattr(lead, name, lambda G, left=left: next(left))
    assert lead.bound(0).is_nan()


def test_a_hidden_unit_of_unknown_sign_and_size_may_bend_anywhere() -> None:
    network = random_network(layers=2, heads=1, dim=3, eta=0.1, mlp=4, mlp_skip=True)
    found = ArbParallel(network, closed_form(network, "parallel"), torch.eye(3, dtype=torch.float64))
    known = found._kink(0, 0, arb(1e-9), arb(1e-9), arb(1e-9))
    found.hidden[0][0, 2] = arb.nan()
    unknown = found._kink(0, 0, arb(1e-9), arb(1e-9), arb(1e-9))
    assert all(a < b for a, b in zip(known, unknown, strict=True))


@given(p=st.floats(0, 10), q=st.floats(0, 10), radius=st.floats(0.1, 3), share=st.floats(0, 1))
def test_the_cubic_maximum_is_an_upper_bound(p: float, q: float, radius: float, share: float) -> None:
    mu = share * radius
    with precision(128):
        top = cubic_maximum(arb(p), arb(q), arb(radius))
        assert top >= (arb(p) + arb(q) * arb(mu)) * (arb(radius) ** 2 - arb(mu) ** 2)
        grid = [(p + q * m) * (radius**2 - m**2) for m in torch.linspace(0, radius, 400, dtype=torch.float64).tolist()]
        assert float(top) <= max(grid) * (1 + 1e-4) + 1e-12


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), d=st.integers(1, 4), alpha=st.floats(-1, 2), nu=st.floats(-1, 1))
def test_the_quadratic_form_agrees_with_its_definition(seed: int, d: int, alpha: float, nu: float) -> None:
    """It has the defined value at a random symmetric Y, and the value Σ_b (zᵀT_b z)² at Y = zzᵀ for all α and ν."""
    generator = torch.Generator().manual_seed(seed)
    T = torch.randn(d, d, d, generator=generator, dtype=torch.float64)
    T = (T + T.mT) / 2
    pairs = [(c, e) for c in range(d) for e in range(c, d)]
    weight = torch.tensor([1.0 if c == e else 2.0**0.5 for c, e in pairs], dtype=torch.float64)
    index = torch.tensor(pairs).T
    S = T[:, index[0], index[1]] * weight
    form = torch.tensor(
        [[float(x) for x in row] for row in quadratic_form(to_arb(S), d, arb(alpha), arb(nu)).tolist()],
        dtype=torch.float64,
    )
    symmetric = torch.randn(d, d, generator=generator, dtype=torch.float64)
    z = torch.randn(d, generator=generator, dtype=torch.float64)
    for Y in (symmetric + symmetric.T, torch.outer(z, z)):
        inner, crossed = (T * Y).sum((1, 2)).square().sum(), torch.einsum("bij,jk,bkl,li->", T, Y, T, Y)
        wanted = alpha * inner + (1 - alpha) * crossed - nu * (Y.trace() ** 2 - Y.square().sum())
        y = Y[index[0], index[1]] * weight
        assert (y @ form @ y).item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-9)
    value = ((T @ z) @ z).square().sum().item()
    y = torch.outer(z, z)[index[0], index[1]] * weight
    assert (y @ form @ y).item() == pytest.approx(value, rel=1e-9, abs=1e-9)


def test_the_slope_of_gelu_is_below_the_bound_used() -> None:
    """Φ(z) + zφ(z) has derivative (2 − z²)φ(z), so its extrema are at ±√2; its limits are 0 and 1."""
    with precision(128):
        for z in (arb(2).sqrt(), -arb(2).sqrt()):
            phi = (-z * z / 2).exp() / (2 * arb.pi()).sqrt()
            slope = (1 + (z / arb(2).sqrt()).erf()) / 2 + z * phi
            assert abs(slope) <= arb(STEEPEST["gelu"])
            assert arb(STEEPEST["gelu"]) <= arb(FIRST_STEEPEST["gelu"])
