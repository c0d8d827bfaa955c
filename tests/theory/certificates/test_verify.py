"""The second computation of a bound, in arb: it accepts every correct certificate, and rejects each kind of damage."""

import math
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
from depthgauge.theory.certificates.attack import AttackOptions
from depthgauge.theory.certificates.compared_networks import InputSet
from depthgauge.theory.certificates.lead import cubic_maximum
from depthgauge.theory.certificates.parallel_blocks import Movements
from depthgauge.theory.certificates.read_tokens import column_lengths, lengths
from depthgauge.theory.certificates.squares import quadratic_form
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.depth.certificate import Certificate, certificate_of, certify
from depthgauge.theory.linalg.arb_arithmetic import ArbArithmetic, ArbArray, largest_eigenvalue
from depthgauge.theory.linalg.bound_arithmetic import STEEPEST, Outward, precision
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.network.random_networks import random_network
from depthgauge.theory.surrogates.closed_forms import closed_form, fold, without_attention


def certified(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, **request: Any) -> Certificate:
    return certify(network, surrogate, starts=1, steps=0, **request)


def of_method(method: str = "mean-field", *, eta: float = 0.02, dim: int = 4, **request: Any) -> Certificate:
    network = random_network(layers=2, heads=2, dim=dim, eta=eta, seed=dim)
    return certified(network, closed_form(network, method), **({"radius": 1.0} | request))


def changed(c: Certificate, *, upper: float | None = None, **comparison: Any) -> Certificate:
    """The certificate with another upper bound, or other fields of the comparison."""
    if upper is not None:
        c = replace(c, upper=upper)
    return replace(c, comparison=replace(c.comparison, **comparison))


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
    c.method.arithmetic.record.pop()
    with pytest.raises(VerificationError, match="nothing was recorded"):
        c.verify()


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
        (12, 2, 1, "mean-field"),
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
    with pytest.raises(VerificationError, match=f"output coordinate {c.coordinate}"):
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
        near = ArbArray([[arb(0, 1e-40)] * 2] * 2)
        assert all(0 < size < 1e-39 for size in lengths(near).x)
        assert column_lengths(near).x[0] < 1e-39


def test_proofs_share_the_layer_bounds_of_a_network() -> None:
    network = random_network(layers=2, heads=1, dim=11, eta=0.05)
    first = certified(network, fold(network, [0]), radius=1.0)
    comparison = replace(first.comparison, surrogate=fold(first.network, [1]))
    second = certificate_of(comparison, "default", AttackOptions(starts=1, steps=0), S=first.method.S)  # type: ignore[attr-defined]
    assert second.method.S is first.method.S  # type: ignore[attr-defined]
    assert first.verify()
    assert second.verify()


# --- rejected certificates ----------------------------------------------------------------------------------------


def test_incomplete_certificates_and_too_few_bits_are_rejected() -> None:
    c = of_method()
    with pytest.raises(VerificationError, match="no finite upper bound"):
        replace(c, upper=None).verify()
    with pytest.raises(InputError, match="bits"):
        c.verify(bits=8)


@pytest.mark.parametrize("method", ["identity", "parallel", "mean-field", "corrected"])
@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"radius": None, "ball": 1.0}], ids=["box", "ball"])
def test_a_reduced_upper_bound_is_rejected(method: str, request_: dict[str, Any]) -> None:
    c = of_method(method, **request_)
    assert c.upper is not None
    for shrink in (1e-3, 1e-9):
        with pytest.raises(VerificationError, match=f"output coordinate {c.coordinate}"):
            changed(c, upper=c.upper * (1 - shrink)).verify()


def test_a_larger_set_is_rejected() -> None:
    c = of_method()
    with pytest.raises(VerificationError):
        changed(c, inputs=InputSet("box", c.inputs.radius * (1 + 1e-6))).verify()


@pytest.mark.parametrize(
    ("side", "change", "why"),
    [
        (0, lambda scale: scale[:, :-1], "do not have the shape"),
        (1, lambda scale: scale[:, :1], "do not have the shape"),
        (1, lambda scale: scale[:0], "do not have the shape"),
        (0, lambda scale: 0 * scale, "output coordinate"),
        (1, lambda scale: scale / 0, "output coordinate"),
        # Any scalings are sound, but these prove only a larger bound.
        (1, lambda scale: scale.flip(1) ** 3, "output coordinate"),
    ],
)
def test_wrong_scalings_of_the_leading_term_are_rejected(
    side: int, change: Callable[[Tensor], Tensor], why: str
) -> None:
    c = of_method()
    assert c.methods == ("joint",)
    record = c.method.arithmetic.record
    place = next(i for i, (what, _) in enumerate(record) if what == "scalings of a lead")
    damaged = list(record[place][1])
    damaged[side] = change(damaged[side])
    record[place] = "scalings of a lead", tuple(damaged)
    with pytest.raises(VerificationError, match=why):
        c.verify()


def test_wrong_scalings_of_a_sign_norm_are_rejected() -> None:
    c = of_method("parallel", dim=11)
    record = c.method.S.A.record  # type: ignore[attr-defined]
    what, (rows, columns) = record[0]
    for damaged in ((rows[:, 1:], columns), (rows, columns[:, :1]), (None, None)):
        record[0] = what, damaged
        with pytest.raises(VerificationError, match="the recorded scalings are not those of 11 rows"):
            c.verify()


@pytest.mark.parametrize("which", ["network", "surrogate"])
@pytest.mark.parametrize("request_", [{"radius": 1.0}, {"radius": None, "ball": 1.0}], ids=["box", "ball"])
def test_changed_weights_are_rejected(which: str, request_: dict[str, Any]) -> None:
    c = of_method("parallel", **request_)
    with torch.no_grad():
        getattr(c, which)[0].value.mul_(1.5)
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
    with pytest.raises(VerificationError, match="output coordinate"):
        changed(c, upper=c.upper * (1 - 1e-9)).verify()
    damaged = c.surrogate.copy()
    with torch.no_grad():
        damaged[2].value[0, 0, 0] += 1e-3
    with pytest.raises(VerificationError, match="certified only against itself"):
        changed(c, surrogate=damaged).verify()
    assert damaged[1].mlp is not None
    with torch.no_grad():
        damaged[1].mlp.b_in[0] += 1e-3
    with pytest.raises(VerificationError, match="certified only against itself"):
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
        A = ArbArithmetic([])
        bound = float((A.spectral_norm(A.exact(M) * size) / size).x.item())
    truth = torch.linalg.matrix_norm(M, 2).item()
    assert truth * (1 - 1e-13) <= bound <= truth * (1 + 1e-12)


def test_nan_is_never_a_bound() -> None:
    A, one, nan = ArbArithmetic([("a point", torch.zeros(1))] * 3), ArbArray([arb(1)]), ArbArray([arb.nan()])
    assert ArbArray([arb(1), arb.nan(), arb(2)]).amax(0).x.item().is_nan()
    assert largest_eigenvalue(arb_mat([[arb.nan(), 0], [0, 1]])).is_nan()
    assert nan.least(one).x[0] == one.least(nan).x[0] == 1
    assert nan.most(one).x[0].is_nan()
    assert one.most(nan).x[0].is_nan()
    assert cubic_maximum(A, nan, one, 1.0).x[0].is_nan()
    assert cubic_maximum(A, one, nan, 1.0).x[0].is_nan()
    assert cubic_maximum(A, one * 0.0, one * 0.0, 1.0).x[0] == 0
    assert largest_eigenvalue(arb_mat([[0, 0], [0, 0]])) == 0
    assert largest_eigenvalue(arb_mat([[-1, 0], [0, -2]])) == 0


def test_a_hidden_unit_of_unknown_sign_and_size_may_bend_anywhere() -> None:
    network = random_network(layers=2, heads=1, dim=3, eta=0.1, mlp=4, mlp_skip=True)
    c = certified(network, closed_form(network, "parallel"), inputs=Tokens(torch.eye(3, dtype=torch.float64)))
    A = ArbArithmetic([])
    found, near = Movements(c.comparison, A), A.upper(torch.full((3, 4), 1e-9, dtype=torch.float64))
    size = found.layers[0].w_out.size()
    known = found._kink(0, near, near, near) @ size
    found.hidden[0].x[0, 2] = arb.nan()
    unknown = found._kink(0, near, near, near) @ size
    assert all(a < b for a, b in zip(known.x[0], unknown.x[0], strict=True))


def test_gelu_of_wide_intervals_is_enclosed_and_no_wider_than_in_float64() -> None:
    A, outward = ArbArithmetic([]), Outward()
    middle = torch.linspace(-9, 9, 37, dtype=torch.float64)
    for radius in (1e-12, 0.1, 7.0, 40.0):
        ends = [torch.full_like(middle, radius) + sign * middle for sign in (1, -1)]
        found = [
            arithmetic.activation(arithmetic.between(*map(arithmetic.upper, ends)), "gelu")
            for arithmetic in (A, outward)
        ]
        points = middle[:, None] + radius * torch.linspace(-1, 1, 41, dtype=torch.float64)
        density = (-points * points / 2).exp() / math.sqrt(2 * math.pi)
        share = torch.special.ndtr(points)
        for truth, arb_, float_ in zip((points * share, share + points * density), *found, strict=True):
            for side in (1.0, -1.0):
                top = (arb_ * side).top().floats()
                assert bool(((truth * side).amax(1) <= top + 1e-12).all())
                wider = (1 + radius) * 2.0**-26  # the radius of an arb interval has 30 bits
                assert bool((top <= (float_ * side).top().floats() + wider).all())


@given(p=st.floats(0, 10), q=st.floats(0, 10), radius=st.floats(0.1, 3), share=st.floats(0, 1))
def test_the_cubic_maximum_is_an_upper_bound(p: float, q: float, radius: float, share: float) -> None:
    mu, outward = share * radius, Outward()
    both = [torch.tensor([x], dtype=torch.float64) for x in (p, q)]
    float_top = cubic_maximum(outward, *map(outward.upper, both), radius).floats().item()
    with precision(128):
        A = ArbArithmetic(outward.record)
        top = cubic_maximum(A, *map(A.upper, both), radius).top().x[0]
        for point in (arb(mu), arb(float(outward.record[0][1]))):
            assert top * (1 + arb(2) ** -100) >= (arb(p) + arb(q) * point) * (arb(radius) ** 2 - point**2)
        grid = [(p + q * m) * (radius**2 - m**2) for m in torch.linspace(0, radius, 400, dtype=torch.float64).tolist()]
        assert float(top) <= float_top <= max(grid) * (1 + 1e-4) + 1e-12


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), d=st.integers(1, 4), alpha=st.floats(-1, 2), nu=st.floats(-1, 1))
def test_the_quadratic_form_agrees_with_its_definition(seed: int, d: int, alpha: float, nu: float) -> None:
    """It has the defined value at a random symmetric Y, and the value Σ_b (zᵀT_b z)² at Y = zzᵀ for all α and ν."""
    generator = torch.Generator().manual_seed(seed)
    T = torch.randn(d, d, d, generator=generator, dtype=torch.float64)
    T = (T + T.mT) / 2
    j, k = torch.triu_indices(d, d)
    weight = torch.where(j == k, torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64).sqrt())
    A, outward = ArbArithmetic([]), Outward()
    forms = [quadratic_form(one.exact(T), alpha, nu, one.root(2.0)).floats() for one in (A, outward)]
    symmetric = torch.randn(d, d, generator=generator, dtype=torch.float64)
    z = torch.randn(d, generator=generator, dtype=torch.float64)
    for Y in (symmetric + symmetric.T, torch.outer(z, z)):
        inner, crossed = (T * Y).sum((1, 2)).square().sum(), torch.einsum("bij,jk,bkl,li->", T, Y, T, Y)
        wanted = alpha * inner + (1 - alpha) * crossed - nu * (Y.trace() ** 2 - Y.square().sum())
        y = Y[j, k] * weight
        for form in forms:
            assert (y @ form @ y).item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-9)
    value = ((T @ z) @ z).square().sum().item()
    y = torch.outer(z, z)[j, k] * weight
    assert (y @ forms[0] @ y).item() == pytest.approx(value, rel=1e-9, abs=1e-9)


def test_the_slope_of_gelu_is_below_the_bound_used() -> None:
    """Φ(z) + zφ(z) has derivative (2 − z²)φ(z), so its extrema are at ±√2; its limits are 0 and 1."""
    with precision(128):
        for z in (arb(2).sqrt(), -arb(2).sqrt()):
            phi = (-z * z / 2).exp() / (2 * arb.pi()).sqrt()
            slope = (1 + (z / arb(2).sqrt()).erf()) / 2 + z * phi
            assert abs(slope) <= arb(STEEPEST["gelu"])
