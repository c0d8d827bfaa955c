"""The dense, structured and batched implementations make the same decisions, including exact ties at τ."""

import random
from fractions import Fraction

import dense_separation as naive
import numpy as np
import pytest
import torch
from dense_separation import inputs, rational_inputs, threshold
from hypothesis import given
from hypothesis import strategies as st

from depthgauge.base.errors import InputError
from depthgauge.papers.separation import decisions
from depthgauge.papers.separation.decisions import (
    AttentionDraws,
    decision_table,
    draw_attention,
    draw_regression,
    rows,
    unpack,
)
from depthgauge.papers.separation.settings import (
    EXP,
    LIN,
    AttentionSetting,
    CrossAttention,
    Regression,
    ScoreMap,
    SelfAttention,
    strong,
)

KINDS = ("exp", "exp", "lin", "poly:1", "poly:2", "poly:6")
# Values that make exact ties likely: zero, multiples of 0.1, and equal values.
TIE_PRONE = (0.0, 0.01, 0.1, 0.2, 0.3, 0.5, 1.0, 1.2)


def a_setting(rng: random.Random) -> AttentionSetting | None:
    """Return a random small setting, or None if the drawn parameters are invalid."""
    classes, repeats = rng.randint(1, 9), rng.randint(1, 5)
    x, attention, m = rng.choice(["identity", "ones"]), rng.choice(KINDS), rng.randint(1, 6)

    def size() -> float:
        return rng.choice(TIE_PRONE) if rng.random() < 0.7 else round(3 * rng.random(), 3)

    try:
        if rng.random() < 0.5:
            return CrossAttention(classes * repeats, classes + 1, m, size(), size(), x, attention)
        return SelfAttention(classes * repeats, classes + 2, m, size(), size(), size(), size(), x, attention)
    except InputError:
        return None


def test_structured_is_naive_on_hundreds_of_settings() -> None:
    rng = random.Random(20231018)
    naive._settled.cache_clear()
    checked, seen = 0, np.zeros(4, dtype=np.int64)
    while checked < 400:
        setting = a_setting(rng)
        if setting is None:
            continue
        draws = draw_attention(setting, seed=1, first=0, models=8)
        expected = naive.conditions(setting, draws)
        np.testing.assert_array_equal(decisions.conditions(setting, draws), expected, err_msg=repr(setting))
        checked += 1
        seen += expected.sum(axis=0)
    # Each condition is often True and often False, and many decisions are within the rounding error.
    assert (seen > 8 * checked // 50).all()
    assert (seen < 8 * checked - 8 * checked // 50).all()
    assert naive._settled.cache_info().misses > 30


@pytest.mark.parametrize(
    "setting",
    [
        SelfAttention(200, 22, 15, 0.01, 1.2, 0.2, 0.8),
        SelfAttention(200, 22, 15, 0.0, 1.2, 0.2, 0.8, "ones"),
        SelfAttention(130, 67, 15, 0.5, 2.0, 0.3, 0.7),
        CrossAttention(200, 11, 10, 0.9, 1.0),
        CrossAttention(128, 65, 5, 0.3, 2.0, "ones", "poly:9"),
    ],
)
def test_structured_is_naive_at_the_papers_sizes(setting: AttentionSetting) -> None:
    draws = draw_attention(setting, seed=3, first=5, models=30)
    np.testing.assert_array_equal(decisions.conditions(setting, draws), naive.conditions(setting, draws))


@pytest.mark.parametrize("attention", ["exp", "lin", "poly:2", "poly:11"])
@pytest.mark.parametrize(("n", "m"), [(2, 3), (3, 1), (16, 6), (64, 5), (65, 5), (300, 6)])
def test_batched_regression_is_naive(n: int, m: int, attention: str) -> None:
    setting = Regression(n, m, attention)
    draws = draw_regression(setting, seed=2, first=0, models=150)
    np.testing.assert_array_equal(
        decisions.regression_conditions(setting, draws),
        naive.regression_conditions(setting, draws),
        err_msg=repr(setting),
    )


def test_a_regression_decision_within_single_precision_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a very large rounding bound, all decisions are made exactly. The results must not change."""
    setting = Regression(40, 4)
    draws = draw_regression(setting, seed=0, first=0, models=30)
    expected = decisions.regression_conditions(setting, draws)
    calls = []
    sign_of_sum = decisions.sign_of_sum
    monkeypatch.setattr(decisions, "_rounding", lambda *_: 10.0)
    monkeypatch.setattr(decisions, "sign_of_sum", lambda *given: calls.append(1) or sign_of_sum(*given))
    np.testing.assert_array_equal(decisions.regression_conditions(setting, draws), expected)
    assert len(calls) == 30 * 4 * 4


SMALL_SETTINGS = [
    SelfAttention(12, 6, 3, 0.3, 1.2, 0.3, 0.4),
    SelfAttention(12, 6, 3, 0.1, 2.0, 0.9, 0.0, "identity", "poly:3"),
    SelfAttention(12, 6, 3, 0.1, 0.9, 0.3, 0.8, "ones", "lin"),
    CrossAttention(12, 5, 3, 0.4, 1.5),
    CrossAttention(12, 5, 3, 0.4, 1.5, "ones", "poly:2"),
]


@pytest.mark.parametrize("setting", SMALL_SETTINGS, ids=repr)
def test_deciding_everything_exactly_changes_nothing(
    setting: AttentionSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions in floating point agree with exact decisions, in the tables and in the dense network."""
    kind = strong(setting)
    expected = [decision_table(setting, dataset, kind) for dataset in (0, 1)]
    draws = draw_attention(setting, seed=0, first=0, models=25)
    dense = naive.conditions(setting, draws)
    monkeypatch.setattr(decisions, "_ROUNDING", 1e9)
    monkeypatch.setattr(naive, "rounding", lambda *_: 1e9)
    naive._settled.cache_clear()
    for dataset in (0, 1):
        np.testing.assert_array_equal(decision_table(setting, dataset, kind), expected[dataset])
    np.testing.assert_array_equal(naive.conditions(setting, draws), dense)
    assert naive._settled.cache_info().misses > 100


def test_an_exact_tie_at_the_threshold_is_zero() -> None:
    """K = 20, b = 0.2, X = 1, a₀ = 0, 15 of 20 classes +: ⟨c, y⟩ = b·10/20 + c = c + 0.1 = τ, and φ_τ(τ) = 0.

    Floating point cannot decide this. Any a₀ > 0 moves the sum to the side of y₁.
    """
    tie, above = (decision_table(SelfAttention(200, 22, 1, a0, 1.2, 0.2, 0.8, "ones"), 0, EXP) for a0 in (0.0, 1e-17))
    assert not tie[1, 1, 1, 14]  # y_d = y_κ = + and 14 more +
    assert tie[1, 1, 1, 15]
    assert above[1, 1, 1, 14]
    assert not above[0, 1, 1, 14]
    assert not above[1, 1, 1, 13]


def test_floating_point_gets_some_ties_wrong() -> None:
    """Some exact ties are positive in plain floating point, so exact decisions are necessary."""
    wrong = 0
    for b, classes in ((0.3, 3), (0.3, 9), (0.7, 7), (0.6, 6), (0.9, 9), (0.2, 20)):
        for plus in range(classes + 1):
            total = 2 * plus - classes
            exactly = Fraction(str(b)) * total / classes
            if exactly == Fraction(1, 10):
                c = np.full(classes, b * 2 / (2 * classes))
                y = np.array([1.0] * plus + [-1.0] * (classes - plus))
                wrong += float(c @ y + 0.8) > 0.8 + 0.1
                setting = SelfAttention(2 * classes, classes + 2, 1, 0.0, 0.0, b, 0.8, "ones")
                assert not decision_table(setting, 0, EXP)[1, 1, 1, plus - 1]
    assert wrong > 0


@given(data=st.data())
def test_the_rows_are_those_of_the_dense_output(data: st.DataObject) -> None:
    """Every dense row c_{j₀} has the coefficients of one of the structured rows."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    setting = a_setting(rng)
    if setting is None:
        return
    kind = data.draw(st.sampled_from([EXP, LIN, ScoreMap("poly", 3)]))
    dataset = data.draw(st.sampled_from([0, 1]))
    j2, j3 = rng.randrange(setting.n), rng.randrange(setting.n)
    dense = naive.output(setting, kind, dataset, torch.tensor([j2]), torch.tensor([j3]))[0].numpy()
    unit = threshold(setting) / float(setting.threshold)
    own, cross = j3 % setting.classes, isinstance(setting, CrossAttention)
    expected = []
    for row in rows(setting, dataset):
        first, mine, others, turn, last = (unit * float(v.mid()) for v in row.coefficients(kind, setting.n))
        for other in range(setting.classes) if turn else [None]:
            c = np.full(setting.d, others)
            c[0], c[1 + own] = first, mine
            if not cross:
                c[-1] = last
            if other is not None and other != own:
                c[1 + other] += turn
            elif other is not None:
                continue
            expected.append(c)
    distance = np.abs(dense[:, None, :] - np.array(expected)[None]).max(axis=2)
    assert distance.min(axis=1).max() < 1e-11  # every dense row is one of the structured rows
    assert distance.min(axis=0).max() < 1e-11  # and every structured row occurs


@given(data=st.data())
def test_fact_a1_the_kronecker_form(data: st.DataObject) -> None:
    n, d = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    a1, a2 = (torch.randn(n, d, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.randn(d, d, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(naive.scores_kronecker(a1, x, a2), naive.scores(a1, x, a2))


def test_the_dense_inputs_are_the_definitions() -> None:
    self_setting = SelfAttention(4, 4, 1, 0.5, 2.0, 0.25, 0.75)
    root = float(np.sqrt(np.log(4)))
    given_self = inputs(self_setting, 1, torch.tensor([0]), torch.tensor([2]))
    expected = [[0, 0.25, 0, 0.75], [0, 0, 0.25, 0.75], [2, 0.25, 0, 0.75], [0, 0, 0.25, 0.75]]
    torch.testing.assert_close(given_self.a1[0], root * torch.tensor(expected, dtype=torch.float64))
    assert given_self.a1 is given_self.a2
    cross = inputs(CrossAttention(4, 3, 1, 0.5, 2.0), 0, torch.tensor([1]), torch.tensor([3]))
    log4 = float(np.log(4))
    first = [[0, 1, 1], [0.5, 1, 1], [0, 1, 1], [0, 1, 1]]
    second = [[0, 1, 0], [0, 0, 1], [0, 1, 0], [1, 0, 1]]
    torch.testing.assert_close(cross.a1[0], log4 * torch.tensor(first, dtype=torch.float64))
    torch.testing.assert_close(cross.a2[0], torch.tensor(second, dtype=torch.float64))


@pytest.mark.parametrize("setting", [SelfAttention(6, 5, 1, 0.1, 2.0, 0.2, 0.7), CrossAttention(6, 4, 1, 0.1, 2.0)])
def test_the_rational_inputs_are_the_dense_ones(setting: AttentionSetting) -> None:
    log_n = float(np.log(setting.n))
    units = (log_n**0.5, log_n**0.5) if isinstance(setting, SelfAttention) else (log_n, 1.0)
    dense = inputs(setting, 1, torch.tensor([4]), torch.tensor([2]))
    for matrix, rational, unit in zip((dense.a1, dense.a2), rational_inputs(setting, 1, 4, 2), units, strict=True):
        np.testing.assert_allclose(matrix[0], unit * np.array(rational, dtype=float), rtol=1e-14)


def test_the_network_adds_what_exceeds_the_threshold() -> None:
    c = torch.tensor([[[1.0, 2.0], [0.5, -1.0]]], dtype=torch.float64)
    y = torch.tensor([[[1.0, -1.0], [1.0, 1.0]]], dtype=torch.float64)
    # ⟨c, y⟩: 3, 1 in the first row; −0.5, −1.5 in the second
    assert naive.network(c, y, 0.75).item() == 2.25 + 0.25
    assert naive.network(c, y, 3.0).item() == 0


def test_the_kinds_of_attention_are_their_formulas() -> None:
    u = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(naive.attend(LIN, u), torch.tensor([0, 1 / 3, 2 / 3], dtype=torch.float64))
    torch.testing.assert_close(naive.attend(EXP, u), u.exp() / u.exp().sum())
    p3 = 1 + u + u**2 / 2 + u**3 / 6
    torch.testing.assert_close(naive.attend(ScoreMap("poly", 3), u), p3 / p3.sum())


def test_sign_vectors_are_the_drawn_bits() -> None:
    words = np.array([[[5, 1]]], dtype=np.uint64)  # bits 0, 2 and 64
    draws = AttentionDraws(np.zeros((1, 2), np.int64), np.zeros((1, 2), np.int64), words)
    bits = unpack(words, 66)[0, 0]
    assert np.flatnonzero(bits).tolist() == [0, 2, 64]
    assert torch.nonzero(naive.signs(draws, 66)[0, :, 0] > 0).flatten().tolist() == [0, 2, 64]
