"""Settings: validation, defaults and decimal parameters."""

import math
from fractions import Fraction

import pytest

from depthgauge.base.errors import InputError
from depthgauge.papers.separation.settings import (
    EXP,
    LIN,
    CrossAttention,
    Regression,
    ScoreMap,
    SelfAttention,
    build_setting,
    decimal,
    parse_attention,
)

GOOD = {"n": 200, "d": 22, "m": 15, "a0": 0.01, "a1": 1.2, "b": 0.2, "c": 0.8}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 205}, ["n must be a multiple of d − 2 = 20", "205"]),
        ({"n": 1}, ["n must be a whole number of at least 2"]),
        ({"d": 2}, ["d must be a whole number of at least 3"]),
        ({"m": 0}, ["m must be a whole number of at least 1", "0"]),
        ({"a0": math.nan}, ["a0 must be a finite number", "nan", "D₀"]),
        ({"a1": math.inf}, ["a1 must be a finite number", "inf", "D₁"]),
        ({"b": -0.1}, ["b must be a finite number of at least 0", "-0.1"]),
        ({"c": -math.inf}, ["c must be a finite number"]),
        ({"b": 0.0, "c": 0}, ["b and c must not both be 0"]),
        ({"x": "one"}, ["x must be one of identity, ones", "did you mean 'ones'"]),
        ({"attention": "poly:x"}, ["attention must be one of exp, lin, poly:G"]),
        ({"attention": "poly:0"}, ["at least 1"]),
    ],
)
def test_a_bad_self_attention_setting_names_the_condition(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        SelfAttention(**{**GOOD, **change})  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_bad_cross_and_regression_settings_name_the_condition() -> None:
    with pytest.raises(InputError, match="n must be a multiple of d − 1 = 11, got n = 200"):
        CrossAttention(200, 12, 10, 0.01, 3.0)
    with pytest.raises(InputError, match="d must be a whole number of at least 2"):
        CrossAttention(200, 1, 10, 0.01, 3.0)
    with pytest.raises(InputError, match="m must be a whole number"):
        Regression(100, 0)


def test_the_papers_out_of_range_values_are_accepted() -> None:
    assert SelfAttention(**{**GOOD, "a0": 0.9, "a1": 0.1, "c": 0.9}).threshold == 1
    assert CrossAttention(200, 11, 10, 0.9, 0.1).threshold == Fraction(9, 10)


def test_the_thresholds_are_the_papers() -> None:
    assert SelfAttention(**GOOD).threshold == Fraction(9, 10)
    assert SelfAttention(**{**GOOD, "c": 0.55}).threshold == Fraction(65, 100)
    assert Regression(100, 5).threshold == Fraction(1, 4)


def test_a_parameter_is_the_decimal_it_was_written_as() -> None:
    assert decimal(0.2) == Fraction(1, 5) != Fraction(0.2)
    assert decimal(3) == 3
    assert decimal(1e-7) == Fraction(1, 10**7)


def test_the_widths_are_rounded_up() -> None:
    assert [build_setting("regression", n=n).m for n in (100, 1000, 2000)] == [5, 7, 8]
    assert [build_setting("cross", n=n).m for n in (200, 1000)] == [10, 12]  # log 20 000 = 9.9, log 100 000 = 11.5
    assert [build_setting("self", n=n).m for n in (200, 10**6)] == [15, 19]  # 15 is the least; log 10⁸ = 18.4


def test_omitted_parameters_take_the_values_of_the_paper() -> None:
    assert build_setting("self") == SelfAttention(200, 22, 15, 0.01, 1.2, 0.2, 0.8)
    assert build_setting("cross", x="ones", n=400) == CrossAttention(400, 11, 11, 0.01, 3.0, "ones")
    assert build_setting("regression", attention="poly:3") == Regression(1000, 7, "poly:3")


def test_tied_b_is_one_minus_c_in_decimals() -> None:
    setting = build_setting("self", b="tied", c=0.7)
    assert isinstance(setting, SelfAttention)
    assert setting.b == 0.3  # in floating point 1 − 0.7 is 0.30000000000000004
    assert build_setting("self", b="0.35").b == 0.35  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "cross", "b": 0.2}, "b is not used by kind cross"),
        ({"kind": "cross", "c": 0.2}, "c is not used by kind cross"),
        ({"kind": "regression", "d": 12}, "d is not used by kind regression"),
        ({"kind": "regression", "x": "ones"}, "x is not used by kind regression"),
        ({"kind": "regression", "a0": 0.0}, "a0 is not used by kind regression"),
        ({"kind": "selv"}, "did you mean 'self'"),
        ({"kind": "self", "b": "loose"}, "b must be a number or the word tied, got 'loose'"),
        ({"kind": "self", "b": "tied", "c": 1.5}, "c must be between 0 and 1 when b is tied"),
        ({"kind": "self", "b": "nan"}, "b must be a finite number"),
        ({"kind": "self", "n": 0}, "n must be a whole number of at least 2"),
        ({"kind": "cross", "n": -5}, "n must be a whole number of at least 2"),
    ],
)
def test_invalid_parameters_are_rejected(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_setting(**arguments)  # type: ignore[arg-type]


def test_names_of_attention() -> None:
    names = ("exp", "lin", "poly:1", "poly:17")
    assert [parse_attention(name) for name in names] == [EXP, LIN, ScoreMap("poly", 1), ScoreMap("poly", 17)]
