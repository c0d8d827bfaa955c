"""Sharp constants: no random case exceeds a bound, and an explicit case attains each bound."""

import math
from collections.abc import Callable

import pytest
import sharp_constants as sharp
import torch
from drawn import floats, matrices, probability, vectors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.theory.linalg import norms as sm
from depthgauge.theory.linalg.norms import column_norm, max_norm, residual

SCORES = st.one_of(st.floats(-30, 30), st.floats(-1, 1), st.sampled_from([0.0, 1.0, -5.0, 200.0]))
ROUNDING = 1 + 1e-9


def spread(x: Tensor) -> float:
    return (x.max() - x.min()).item()


@given(x=vectors(floats(-700, 700)))
def test_softmax_by_its_definition(x: Tensor) -> None:
    largest = max(x.tolist())
    weights = [math.exp(v - largest) for v in x.tolist()]
    expected = torch.tensor([w / math.fsum(weights) for w in weights], dtype=torch.float64)
    assert torch.allclose(sm.softm(x), expected, rtol=1e-12, atol=0)
    assert sm.softm(x).sum().item() == pytest.approx(1, abs=1e-12)
    assert sharp.alpha(x).item() == pytest.approx(math.fsum(map(math.exp, x.tolist())), rel=1e-12)


@given(E=matrices(), theta=st.floats(0, 20))
def test_ranges_and_balance_by_their_definition(E: Tensor, theta: float) -> None:
    by_hand = [max(abs(a - b) for a in row for b in row) for row in E.tolist()]
    assert sharp.row_ranges(E).tolist() == by_hand
    assert bool(sharp.is_balanced(E, theta)) == (max(by_hand) <= theta)
    assert bool(sharp.is_balanced(E, max(by_hand)))


@given(p=vectors(st.floats(0, 1), 3, 3), q=vectors(st.floats(0, 1), 3, 3))
def test_total_variation_is_the_largest_difference_of_any_event(p: Tensor, q: Tensor) -> None:
    p, q = probability(p), probability(q)
    events = [[(code >> j) & 1 for j in range(3)] for code in range(8)]
    largest = max(
        math.fsum(e * (a - b) for e, a, b in zip(event, p.tolist(), q.tolist(), strict=True)) for event in events
    )
    assert sm.total_variation(p, q).item() == pytest.approx(largest, abs=1e-15)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    n = draw(st.integers(1, 12))
    return draw(vectors(SCORES, n, n)), draw(vectors(SCORES, n, n)) * draw(st.sampled_from([1e-3, 0.1, 1.0]))


@given(pair=pairs())
def test_shifted_scores_move_softmax_by_at_most_tanh_of_a_quarter(pair: tuple[Tensor, Tensor]) -> None:
    a, b = pair
    before, after = sm.softm(a), sm.softm(a + b)
    tv = sm.total_variation(after, before).item()
    assert tv <= sharp.shift_tv_bound(spread(b)) * ROUNDING + 1e-14
    largest = (after - before).abs().max().item()
    assert largest <= sharp.shift_max_bound(b.abs().max().item()) * ROUNDING + 1e-14
    printed = 2 * math.expm1(b.abs().max().item())
    assert sharp.shift_max_bound(b.abs().max().item()) <= printed / 4 + 1e-15


@given(a=vectors(SCORES, 1, 40))
def test_softmax_is_near_uniform_where_scores_are_close(a: Tensor) -> None:
    uniform = torch.full_like(a, 1 / len(a))
    assert sm.total_variation(sm.softm(a), uniform).item() <= sharp.uniform_tv_bound(spread(a)) * ROUNDING + 1e-14


@given(p=vectors(st.floats(0, 1), 6, 6), q=vectors(st.floats(0, 1), 6, 6), z=vectors(st.floats(-100, 100), 6, 6))
def test_averages_differ_by_at_most_tv_times_range(p: Tensor, q: Tensor, z: Tensor) -> None:
    p, q = probability(p), probability(q)
    gap = abs(((p - q) * z).sum().item())
    assert gap <= sharp.average_gap_bound(sm.total_variation(p, q).item(), spread(z)) * ROUNDING + 1e-12


@given(
    X=matrices(st.integers(1, 6), st.just(3), st.floats(-2, 2)),
    W=matrices(st.just(3), st.just(3), st.floats(-3, 3)),
    V=matrices(st.just(3), st.just(3), st.floats(-2, 2)),
    offset=st.floats(-5, 5),
)
def test_attention_contracts_by_at_most_the_corrected_lemma(X: Tensor, W: Tensor, V: Tensor, offset: float) -> None:
    X = X + offset
    out = sm.softm(X @ W @ X.mT) @ X @ V
    E = residual(X) @ W @ residual(X).mT
    theta = sharp.row_ranges(E).amax()
    bound = sm.contraction_bound(theta, column_norm(V)) * max_norm(residual(X))
    assert max_norm(residual(out)) <= bound * ROUNDING + 1e-10


def linear_remainder(s: Tensor) -> float:
    return sm.total_variation(sm.softm(s), (1 + s - s.mean()) / len(s)).item()


@given(s=vectors(st.one_of(st.floats(-3, 3), st.sampled_from([0.0, 1.0])), 1, 40), size=st.sampled_from([1, 0.1, 10]))
def test_softmax_is_linear_up_to_the_sharp_remainder(s: Tensor, size: float) -> None:
    s = s * size
    assert linear_remainder(s) <= sharp.linearization_bound(spread(s)) * ROUNDING + 1e-14


# --- cases that attain the bounds ------------------------------------------------------------------------------------


def two_levels(n: int, high: int, height: float) -> Tensor:
    """Return n scores, of which `high` are `height` and the others are 0."""
    return torch.tensor([height] * high + [0.0] * (n - high), dtype=torch.float64)


def shift_tv(r: float) -> tuple[float, float]:
    a, b = torch.tensor([-r / 2, 0.0], dtype=torch.float64), torch.tensor([r, 0.0], dtype=torch.float64)
    return sm.total_variation(sm.softm(a + b), sm.softm(a)).item(), sharp.shift_tv_bound(r)


def shift_max(epsilon: float) -> tuple[float, float]:
    a = torch.tensor([-epsilon, 0.0], dtype=torch.float64)
    b = torch.tensor([epsilon, -epsilon], dtype=torch.float64)
    return (sm.softm(a + b) - sm.softm(a)).abs().max().item(), sharp.shift_max_bound(epsilon)


def uniform_tv(k_of_n: tuple[int, int]) -> tuple[float, float]:
    """The bound is attained if e^{range/2} = (n − k)/k."""
    k, n = k_of_n
    r = 2 * math.log((n - k) / k)
    a = two_levels(n, k, r)
    return sm.total_variation(sm.softm(a), torch.full_like(a, 1 / n)).item(), sharp.uniform_tv_bound(r)


def average_gap(tv: float) -> tuple[float, float]:
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([tv, 0.0, 1 - tv], [0.0, tv, 1 - tv]))
    z = torch.tensor([5.0, -2.0, 1.0], dtype=torch.float64)
    return ((p - q) * z).sum().item(), sharp.average_gap_bound(sm.total_variation(p, q).item(), spread(z))


def contraction(d_and_eta: tuple[int, float]) -> tuple[float, float]:
    """Two tokens X = ±1ᵀ and constant Q, K, V attain the bound."""
    d, eta = d_and_eta
    X = torch.stack([torch.ones(d, dtype=torch.float64), -torch.ones(d, dtype=torch.float64)])
    weight = torch.full((d, d), eta, dtype=torch.float64)
    E = residual(X) @ weight @ weight.mT @ residual(X).mT
    theta = sharp.row_ranges(E).amax()
    out = sm.softm(X @ weight @ weight.mT @ X.mT) @ X @ weight
    value = (max_norm(residual(out)) / max_norm(residual(X))).item()
    return value, sm.contraction_bound(theta, column_norm(weight)).item()


def linearization(theta: float) -> tuple[float, float]:
    """A fraction (1 − 1/√3)/2 of the scores is θ, the others are 0. The bound is attained as θ → 0 and n → ∞."""
    n = 10_000
    s = two_levels(n, round(n * (1 - 1 / math.sqrt(3)) / 2), theta)
    return linear_remainder(s), sharp.linearization_bound(theta)


ATTAINED: list[tuple[Callable[..., tuple[float, float]], object, float]] = [
    *[(shift_tv, r, 1e-9) for r in (1e-3, 0.1, 1.0, 4.0, 20.0)],
    *[(shift_max, epsilon, 1e-9) for epsilon in (1e-3, 0.1, 1.0, 10.0)],
    *[(uniform_tv, k_of_n, 1e-9) for k_of_n in ((1, 3), (2, 5), (3, 7), (1, 50), (490, 1000))],
    *[(average_gap, tv, 1e-9) for tv in (0.01, 0.5, 1.0)],
    *[(contraction, case, 1e-9) for case in ((1, 0.3), (2, 0.2), (3, 0.1), (8, 0.05), (64, 0.01))],
    *[(linearization, theta, 1e-3) for theta in (1e-2, 1e-3)],
]


@pytest.mark.parametrize(("case", "argument", "distance"), ATTAINED)
def test_each_constant_is_attained_so_a_smaller_one_is_refuted(
    case: Callable[..., tuple[float, float]], argument: object, distance: float
) -> None:
    value, bound = case(argument)
    # The sum of 10,000 terms in `linearization` has an absolute rounding error of about 1e-14.
    allowance = 1e-13 if "linearization" in case.__name__ else 0.0
    assert value <= bound * ROUNDING + allowance
    assert value >= bound * (1 - distance)
    assert value > 0.97 * bound  # this case violates a constant that is 3 % smaller


def test_the_printed_contraction_fails_from_three_dimensions_on() -> None:
    """The printed bound (e^θ − 1)·‖V‖max is exceeded by two tokens X = ±1ᵀ at d = 3; they satisfy it at d = 2."""
    for d, fails in ((2, False), (3, True), (8, True)):
        eta = 0.01
        value, bound = contraction((d, eta))
        theta = 2 * math.atanh(bound / (d * eta))
        assert (value > math.expm1(theta) * eta) == fails


def test_the_linear_remainder_is_the_named_constant() -> None:
    assert pytest.approx(1 / (12 * 3**0.5), rel=1e-15) == sm.LINEAR_REMAINDER
    assert sharp.linearization_bound(2.0) == pytest.approx(4 * sm.LINEAR_REMAINDER)
