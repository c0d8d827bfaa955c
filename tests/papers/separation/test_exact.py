"""The closed form against enumeration of all signs and all pairs of special tokens."""

import itertools

import dense_separation as naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthgauge.papers.separation.decisions import AttentionDraws
from depthgauge.papers.separation.probability import exact
from depthgauge.papers.separation.settings import AttentionSetting, CrossAttention, SelfAttention, build_setting


def brute_force(setting: AttentionSetting) -> tuple[float, list[float]]:
    """Enumerate all 2^(d·m) signs and all special tokens of both data sets with the dense network."""
    tokens = range(setting.n)
    cross = isinstance(setting, CrossAttention)
    pairs = list(itertools.product(tokens, tokens))
    queries = [(0, 0), (setting.n - 1, 1)] if cross else [(0, 0)]  # j₂ has no effect, so two choices suffice
    success, parts, total = 0, np.zeros(4), 0
    words = np.array(list(itertools.product(range(2**setting.d), repeat=setting.m)), dtype=np.uint64)
    for j3, j2 in itertools.product(pairs, queries):
        models = len(words)
        draws = AttentionDraws(
            np.tile(np.array(j2), (models, 1)), np.tile(np.array(j3), (models, 1)), words[:, :, None]
        )
        met = naive.conditions(setting, draws)
        success += int(met.all(axis=1).sum())
        parts += met.sum(axis=0)
        total += models
    return success / total, list(parts / total)


CASES = [
    SelfAttention(4, 4, 2, 0.01, 1.2, 0.2, 0.8),
    SelfAttention(4, 4, 2, 0.5, 2.0, 0.3, 0.6, "ones"),
    SelfAttention(6, 5, 1, 0.1, 1.5, 0.4, 0.6),
    SelfAttention(6, 5, 2, 0.1, 1.5, 0.4, 0.6, "ones", "poly:2"),
    SelfAttention(3, 5, 2, 0.01, 2.5, 0.2, 0.8),  # each class has one token
    SelfAttention(8, 6, 1, 0.01, 1.2, 0.35, 0.65),
    SelfAttention(4, 3, 2, 0.01, 1.2, 0.08, 0.8),  # one class
    SelfAttention(8, 4, 2, 0.0, 1.0, 0.1, 0.5),  # ties
    CrossAttention(6, 4, 2, 0.01, 3.0),
    CrossAttention(8, 5, 1, 0.8, 2.0),
    CrossAttention(5, 6, 1, 0.9, 2.5, "ones"),
    CrossAttention(4, 5, 2, 0.3, 2.0, "identity", "poly:4"),
    CrossAttention(3, 2, 3, 0.01, 3.0),  # one class
]


@pytest.mark.parametrize("setting", CASES, ids=repr)
def test_exact_is_brute_force(setting: AttentionSetting) -> None:
    success, parts = brute_force(setting)
    found = exact(setting)
    assert found.success == pytest.approx(success, abs=1e-15)
    np.testing.assert_allclose(found.parts, parts, rtol=0, atol=1e-15)


def test_the_brute_force_cases_are_not_trivial() -> None:
    values = [exact(setting).success for setting in CASES]
    assert sum(0.01 < value < 0.99 for value in values) >= 6


def test_a_case_worked_by_hand() -> None:
    """Cross-attention, X = I, two classes, n = 2, m = 1, a₀ = 0, a₁ = 2.

    Where attention is uniform, c = (½, ½, ½). Then ⟨c, y⟩ = 1.5 > 0.9 if all signs are +, and ⟨c, y⟩ ≤ ½ otherwise.
    Linear attention on D₁ in row j₂ has f = (1 + a, 1)/(2 + a) with a = 2, so c = (¾, ¾, ¼), which exceeds 0.9 if
    y₁ = y_κ = +. So P(F_lin(D₁) = 0) = ¾ and P(F(D₀) = 0) = P(F_lin(D₀) = 0) = 7/8. Softmax on D₁ in row j₂ has
    f = (n², 1)/(n² + 1) = (4, 1)/5, so c = (4/5, 4/5, 1/5), which also exceeds 0.9 if y₁ = y_κ = +. Then linear
    attention is positive too, so success is impossible.
    """
    found = exact(CrossAttention(2, 3, 1, 0.0, 2.0))
    assert found.success == 0
    assert found.parts == (0.25, 0.75, 0.875, 0.875)


@given(
    classes=st.integers(1, 40),
    repeats=st.integers(1, 30),
    m=st.integers(1, 40),
    sizes=st.tuples(*[st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.8, 1.2, 2.5])] * 4),
    x=st.sampled_from(["identity", "ones"]),
    attention=st.sampled_from(["exp", "lin", "poly:3"]),
)
def test_success_satisfies_the_frechet_bounds(
    classes: int, repeats: int, m: int, sizes: tuple[float, ...], x: str, attention: str
) -> None:
    n = classes * repeats
    if n < 2 or (sizes[2] == 0 and sizes[3] == 0):
        return
    found = exact(SelfAttention(n, classes + 2, m, *sizes, x, attention))
    assert max(0.0, sum(found.parts) - 3) - 1e-12 <= found.success <= min(found.parts) + 1e-12
    if attention == "lin":
        assert found.success == 0  # linear attention cannot be both positive and zero
        assert found.parts[0] == pytest.approx(1 - found.parts[1], abs=1e-12)


def test_wide_networks_keep_their_digits() -> None:
    """1 − qᵐ and gᵐ − hᵐ are accurate where plain floating point would cancel or underflow."""
    few = [exact(build_setting("self", m=m)) for m in (10, 20)]
    quiet = [1 - e.parts[0] for e in few]
    assert quiet[1] == pytest.approx(quiet[0] ** 2, rel=1e-9)
    wide = exact(build_setting("self", m=20_000))
    assert 0 < wide.success < 1e-80
    assert wide.success == pytest.approx(exact(build_setting("self", m=10_000)).success ** 2, rel=1e-6)


def test_large_sizes_are_no_obstacle() -> None:
    found = exact(build_setting("self", n=10**6, d=1002))
    assert 0.99 < found.success < 1
    assert found.success == pytest.approx(found.parts[0], abs=1e-12)


def test_extreme_parameters_have_an_answer() -> None:
    """Nothing overflows. With a₁ = 10³⁰⁰, y₁ = + makes F(D₁) positive for softmax and for linear attention."""
    found = exact(SelfAttention(20, 12, 3, 0.0, 1e300, 0.2, 0.8))
    assert found.success == 0
    assert found.parts[0] >= 1 - 2.0**-3
    assert exact(SelfAttention(20, 12, 3, 1e-300, 1.2, 1e-300, 0.8)).parts[3] == 1


def test_a_high_degree_is_softmax() -> None:
    for kind, x in (("self", "identity"), ("self", "ones"), ("cross", "identity")):
        soft = exact(build_setting(kind, x=x))
        assert exact(build_setting(kind, x=x, attention="poly:60")) == soft
        assert exact(build_setting(kind, x=x, attention="poly:1")).success == 0
