"""The second proof: it accepts every honest certificate, and refuses each kind of damage at the step it touches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flint import arb, arb_mat
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.certificates.box import BoxBounds
from depthgauge.certificates.certificate import Certificate, certify
from depthgauge.certificates.deletion import STEEPEST as FIRST_STEEPEST
from depthgauge.certificates.evaluate import precision, to_arb
from depthgauge.certificates.verify.arb_vectors import largest, largest_eigenvalue, smaller, spectral_norm
from depthgauge.certificates.verify.check import verify
from depthgauge.certificates.verify.deletion import STEEPEST
from depthgauge.certificates.verify.lead import cubic_maximum, quadratic_form
from depthgauge.errors import InputError, VerificationError
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.network.random_networks import random_network
from depthgauge.surrogates.closed_forms import closed_form, fold, without_attention


def certified(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, **request: Any) -> Certificate:
    return certify(network, surrogate, starts=1, steps=0, **request)


def of_method(method: str = "mean-field", *, eta: float = 0.02, dim: int = 4, **request: Any) -> Certificate:
    network = random_network(layers=3, heads=2, dim=dim, eta=eta, seed=dim)
    return certified(network, closed_form(network, method), **({"radius": 1.0} | request))


# --- what is accepted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["identity", "last-layer", "parallel", "mean-field", "corrected"])
@pytest.mark.parametrize("request_", [{"radius": 0.7}, {"radius": None, "ball": 1.3}], ids=["box", "ball"])
@pytest.mark.parametrize("eta", [1e-3, 0.3])
def test_certificates_of_every_method_are_proved_again(method: str, request_: dict[str, Any], eta: float) -> None:
    assert of_method(method, eta=eta, dim=3, **request_).verify()


@pytest.mark.parametrize("kept", [[], [1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"ball": 1.0}], ids=["box", "ball"])
def test_folded_networks(kept: list[int], request_: dict[str, float]) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.05)
    assert certified(network, fold(network, kept), **request_).verify()


@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"radius": None, "ball": 1.0}], ids=["box", "ball"])
def test_sums_of_squares_are_what_proves_a_sharpened_bound(request_: dict[str, Any]) -> None:
    c = of_method(eta=0.01, effort="high", **request_)
    assert c.methods == ("joint", "squares")
    assert c.verify()
    assert c.proof is not None
    with pytest.raises(VerificationError, match="output, coordinate"):
        verify(replace(c, proof=replace(c.proof, multipliers={})))


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
    # For one token only the linear part is there, so the same number fails for any number of them.
    with pytest.raises(VerificationError):
        verify(replace(c, tokens=None))


@pytest.mark.parametrize("method", ["identity", "last-layer", "parallel"])
@pytest.mark.parametrize("kind", ["radius", "ball"])
def test_causal_networks(method: str, kind: str) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.2, causal=True)
    c = certified(network, closed_form(network, method), **{kind: 1.0})
    assert c.methods == ("deletion",)
    assert c.verify()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("switches", [{}, {"mlp_skip": True}, {"skip": False}, {"causal": True}], ids=str)
@pytest.mark.parametrize("deleted", [[0], [1, 2]])
def test_networks_with_mlps(activation: str, switches: dict[str, bool], deleted: list[int]) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.5, mlp=4, activation=activation, **switches)  # type: ignore[arg-type]
    assert certified(network, without_attention(network, deleted, "test"), radius=1.0).verify()


def test_scalings_prove_what_is_too_wide_to_enumerate() -> None:
    c = of_method("parallel", dim=11, eta=0.05)
    assert c.verify()
    network = random_network(layers=2, heads=2, dim=11, eta=0.2, causal=True)
    assert certified(network, closed_form(network, "last-layer"), radius=1.0).verify()


@pytest.mark.parametrize(
    ("layers", "heads", "method"),
    [
        (2, 1, "mean-field"),
        pytest.param(4, 2, "mean-field", marks=pytest.mark.soak),
        pytest.param(4, 2, "corrected", marks=pytest.mark.soak),
    ],
)
def test_width_32(layers: int, heads: int, method: str) -> None:
    """As wide as the guide's figures; what is proved is the bound that was claimed, and not a millionth less."""
    network = random_network(layers=layers, heads=heads, dim=32, eta=0.01, seed=0)
    c = certified(network, closed_form(network, method), radius=1.0)
    assert c.upper is not None
    assert c.methods == ("joint",)
    assert c.verify()
    with pytest.raises(VerificationError, match=f"output, coordinate {c.coordinate}"):
        verify(replace(c, upper=c.upper * (1 - 1e-6)))


def test_proofs_that_share_the_bounds_of_a_network_keep_scalings_of_their_own() -> None:
    network = random_network(layers=3, heads=1, dim=11, eta=0.05)
    first = certified(network, fold(network, [0, 1]), radius=1.0)
    assert first.proof is not None
    assert isinstance(first.proof.bounds, BoxBounds)
    second = certified(network, fold(network, [1, 2]), radius=1.0, bounds=first.proof.bounds)
    assert first.verify()
    assert second.verify()


def test_bounds_of_another_network_or_box_are_refused_before_anything_is_proved() -> None:
    network, other = (random_network(layers=2, heads=1, dim=3, eta=0.05, seed=seed) for seed in (0, 1))
    c = certified(network, fold(network, [0]), radius=1.0)
    assert c.proof is not None
    for net, radius in ((other, 1.0), (network, 2.0)):
        with pytest.raises(InputError, match="another network or another box"):
            certified(net, fold(net, [0]), radius=radius, bounds=c.proof.bounds)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_no_finite_bound_is_nothing_to_prove() -> None:
    with pytest.raises(VerificationError, match="no finite upper bound"):
        verify(replace(of_method(), upper=None))
    with pytest.raises(VerificationError, match="does not keep its proof"):
        verify(replace(of_method(), proof=None))
    with pytest.raises(InputError, match="bits"):
        verify(of_method(), bits=8)


@pytest.mark.parametrize("method", ["identity", "parallel", "mean-field", "corrected"])
@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"radius": None, "ball": 1.0}], ids=["box", "ball"])
def test_an_upper_bound_made_smaller_is_refused(method: str, request_: dict[str, Any]) -> None:
    c = of_method(method, **request_)
    assert c.upper is not None
    for shrink in (1e-3, 1e-9):
        with pytest.raises(VerificationError, match=f"output, coordinate {c.coordinate}"):
            verify(replace(c, upper=c.upper * (1 - shrink)))


def test_a_larger_set_is_refused() -> None:
    c = of_method()
    with pytest.raises(VerificationError):
        verify(replace(c, set=replace(c.set, radius=c.set.radius * (1 + 1e-6))))
    with pytest.raises(VerificationError, match="for a ball"):
        verify(replace(c, set=replace(c.set, kind="ball")))


@pytest.mark.parametrize("name", ["own", "err"])
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("who", ["network", "surrogate"])
@pytest.mark.parametrize("eta", [0.02, 0.5], ids=["joint", "plain"])
def test_a_claim_made_smaller_is_refused_where_it_stands(name: str, layer: int, who: str, eta: float) -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=eta)
    c = certified(network, fold(network, [0, 1, 2]), radius=1.0)
    assert c.proof is not None
    bounds = c.proof.bounds if who == "network" else c.proof.other
    assert isinstance(bounds, BoxBounds)
    claim = getattr(bounds.layers[layer], name).clone()
    claim[1] *= 1 - 1e-6
    bounds.layers[layer] = replace(bounds.layers[layer], **{name: claim})
    with pytest.raises(VerificationError, match=f"{who}, {name} at layer {layer}, coordinate 1"):
        verify(c)


@pytest.mark.parametrize("name", ["own", "err"])
def test_a_claim_on_the_ball_made_smaller_is_refused(name: str) -> None:
    c = of_method(radius=None, ball=1.0)
    assert c.proof is not None
    layers = c.proof.bounds.layers
    layers[2] = replace(layers[2], **{name: getattr(layers[2], name) * (1 - 1e-6)})  # type: ignore[type-var, assignment]
    with pytest.raises(VerificationError, match=f"network, {name} at layer 2"):
        verify(c)


@pytest.mark.parametrize("claim", [[0.1] * 3, [0.1] * 5, [-0.1] * 4, [float("nan")] * 4], ids=str)
def test_claims_that_are_no_bounds_are_refused(claim: list[float]) -> None:
    c = of_method()
    assert c.proof is not None
    assert isinstance(c.proof.bounds, BoxBounds)
    object.__setattr__(c.proof.bounds.layers[1], "own", torch.tensor(claim, dtype=torch.float64))
    with pytest.raises(VerificationError, match="own is not 4 numbers"):
        verify(c)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("row_scale", lambda scale: scale[:, :-1], "not 4 positive numbers"),
        ("column_scale", lambda scale: scale[:, :-1], "not 4 positive numbers"),
        ("column_scale", lambda scale: scale[:0], "no scalings were kept"),
        ("row_scale", lambda scale: -scale, "not 4 positive numbers"),
        ("row_scale", lambda scale: 0 * scale, "not 4 positive numbers"),
        ("column_scale", lambda scale: scale / 0, "not 4 positive numbers"),
        # Scalings that are fine in themselves but not those of this bound prove only a larger one.
        ("column_scale", lambda scale: scale.flip(1) ** 3, "output, coordinate"),
    ],
)
def test_wrong_scalings_of_the_leading_term_are_refused(
    name: str, change: Callable[[Tensor], Tensor], why: str
) -> None:
    c = of_method()
    assert c.methods == ("joint",)
    assert c.proof is not None
    assert c.proof.lead is not None
    # Past the check of shapes, as a file or a careless caller would come.
    object.__setattr__(c.proof.lead, name, change(getattr(c.proof.lead, name)))
    with pytest.raises(VerificationError, match=why):
        verify(c)


@pytest.mark.parametrize("name", ["0.theta", "1.e1", "2.lin_own"])
def test_wrong_scalings_of_a_sign_norm_are_refused(name: str) -> None:
    c = of_method("parallel", dim=11)
    assert c.proof is not None
    assert isinstance(c.proof.bounds, BoxBounds)
    record = c.proof.bounds.norms.record
    kept = record[name]
    assert kept.row_scale is not None
    record[name] = replace(kept, row_scale=kept.row_scale[:, 1:])
    with pytest.raises(VerificationError, match=f"{name}: the scalings kept"):
        verify(c)
    del record[name]
    with pytest.raises(VerificationError, match=f"{name}: no scalings"):
        verify(c)


@pytest.mark.parametrize("which", ["network", "surrogate"])
@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"radius": None, "ball": 1.0}], ids=["box", "ball"])
def test_changed_weights_are_refused(which: str, request_: dict[str, Any]) -> None:
    c = of_method("parallel", **request_)
    with torch.no_grad():
        getattr(c, which)[0].value.mul_(1.001)
    with pytest.raises(VerificationError):
        verify(c)


def test_a_deletion_bound_made_smaller_or_moved_is_refused() -> None:
    network = random_network(layers=3, heads=2, dim=3, eta=0.2, mlp=3)
    c = certified(network, closed_form(network, "last-layer"), radius=1.0)
    assert c.upper is not None
    with pytest.raises(VerificationError, match="output, coordinate"):
        verify(replace(c, upper=c.upper * (1 - 1e-9)))
    changed = c.surrogate.copy()
    with torch.no_grad():
        changed[2].value[0, 0, 0] += 1e-3
    with pytest.raises(VerificationError, match="layer 2: the surrogate's attention"):
        verify(replace(c, surrogate=changed))
    assert changed[1].mlp is not None
    with torch.no_grad():
        changed[1].mlp.b_in[0] += 1e-3
    with pytest.raises(VerificationError, match="layer 1: the MLPs differ"):
        verify(replace(c, surrogate=changed))


def test_a_surrogate_with_an_mlp_of_its_own_is_no_deletion() -> None:
    """Once certified at 0.06 where the two differ by more than 1: the surrogate's MLP was not looked at."""
    network = random_network(layers=2, heads=1, dim=2, eta=0.1, causal=True)
    other = random_network(layers=1, heads=1, dim=2, eta=1.0, causal=True, mlp=3)
    surrogate = without_attention(other, [0], "test")
    with pytest.raises(InputError, match="certified only against itself"):
        certify(network, surrogate, radius=1.0)


# --- its parts ----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), m=st.integers(1, 5), n=st.integers(1, 5), size=st.sampled_from([1e-200, 1.0, 1e200]))
def test_norms_are_above_the_truth_and_close_to_it(seed: int, m: int, n: int, size: float) -> None:
    M = torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with precision(128):
        bound = float(spectral_norm(to_arb(M) * arb(size)) / arb(size))
    truth = torch.linalg.matrix_norm(M, 2).item()
    assert truth * (1 - 1e-13) <= bound <= truth * (1 + 1e-12)


def test_an_eigenvalue_that_is_not_a_number_stays_one() -> None:
    assert largest([arb(1), arb.nan(), arb(2)]).is_nan()
    assert largest_eigenvalue(arb_mat([[arb.nan(), 0], [0, 1]])).is_nan()
    assert smaller(arb.nan(), arb(1)) == 1
    assert smaller(arb(1), arb.nan()) == 1
    assert largest_eigenvalue(arb_mat([[0, 0], [0, 0]])) == 0
    assert largest_eigenvalue(arb_mat([[-1, 0], [0, -2]])) == 0


@given(p=st.floats(0, 10), q=st.floats(0, 10), radius=st.floats(0.1, 3), share=st.floats(0, 1))
def test_the_cubic_lies_below_its_maximum(p: float, q: float, radius: float, share: float) -> None:
    mu = share * radius
    with precision(128):
        top = cubic_maximum(arb(p), arb(q), arb(radius))
        assert top >= (arb(p) + arb(q) * arb(mu)) * (arb(radius) ** 2 - arb(mu) ** 2)
        grid = [(p + q * m) * (radius**2 - m**2) for m in torch.linspace(0, radius, 400, dtype=torch.float64).tolist()]
        assert float(top) <= max(grid) * (1 + 1e-4) + 1e-12


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), d=st.integers(1, 4), alpha=st.floats(-1, 2), nu=st.floats(-1, 1))
def test_the_form_of_squares_is_what_it_says(seed: int, d: int, alpha: float, nu: float) -> None:
    """Against its definition at a random symmetric Y, and equal to Σ_b (zᵀT_b z)² at Y = zzᵀ whatever α and ν are."""
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
    """Φ(z) + zφ(z) has derivative (2 − z²)φ(z), so its extremes are at ±√2 and it tends to 0 and 1."""
    with precision(128):
        for z in (arb(2).sqrt(), -arb(2).sqrt()):
            phi = (-z * z / 2).exp() / (2 * arb.pi()).sqrt()
            slope = (1 + (z / arb(2).sqrt()).erf()) / 2 + z * phi
            assert abs(slope) <= arb(STEEPEST["gelu"])
            assert arb(STEEPEST["gelu"]) <= arb(FIRST_STEEPEST["gelu"])
