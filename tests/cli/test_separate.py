"""The command `depthgauge separate`."""

import json
from collections.abc import Callable
from functools import partial

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(typed: Run) -> Run:
    """Run `depthgauge separate` with these words."""
    return partial(typed, "separate")


def test_json_has_exactly_these_keys(run: Run) -> None:
    words = (
        "--kind self --x identity --n 200 --d 22 --m 15 --a0 0.01 --a1 1.2 --b 0.2 --c 0.8 --models 500 --seed 3 --json"
    )
    code, out, err = run(*words.split())
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert list(document) == ["exact", "exact_parts", "ratio", "interval", "parts", "models"]
    assert document["models"] == 500
    assert len(document["exact_parts"]) == len(document["parts"]) == 4
    low, high = document["interval"]
    assert low < document["ratio"] < high
    assert 0.7 < document["exact"] < 0.8
    assert run(*words.split())[1] == out


def test_regression_has_no_exact_value(run: Run) -> None:
    code, out, _ = run("--kind", "regression", "--n", "100", "--m", "5", "--models", "20", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["exact"] is None
    assert document["exact_parts"] is None


def test_tied_b_follows_c(run: Run) -> None:
    tied = run("--c", "0.7", "--b", "tied", "--models", "9", "--json")[1]
    assert tied == run("--c", "0.7", "--b", "0.3", "--models", "9", "--json")[1]
    assert tied != run("--c", "0.7", "--models", "9", "--json")[1]


def test_a_polynomial_of_low_degree_does_not_separate(run: Run) -> None:
    for degree, least, most in ((1, 0, 0), (40, 0.9, 1)):
        _, out, _ = run(*f"--kind cross --attention poly:{degree} --models 9 --json".split())
        assert least <= json.loads(out)["exact"] <= most


def test_without_json_a_small_table(run: Run) -> None:
    code, out, _ = run("--models", "10")
    assert code == 0
    assert len(out.splitlines()) == 7
    assert "sampled (10 networks)" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--n 205", "n must be a multiple of d − 2 = 20, got n = 205"),
        ("--kind cross --d 12", "n must be a multiple of d − 1 = 11, got n = 200"),
        ("--m 0", "m must be a whole number of at least 1, got 0"),
        ("--a0 nan", "a0 must be a finite number"),
        ("--a1 inf", "a1 must be a finite number"),
        ("--b inf", "b must be a finite number"),
        ("--b much", "b must be a number or the word tied"),
        ("--kind cross --b 0.2", "b is not used by kind cross"),
        ("--kind cross --c 0.2", "c is not used by kind cross"),
        ("--kind regression --a1 1", "a1 is not used by kind regression"),
        ("--kind regression --x ones", "x is not used by kind regression"),
        ("--kind both", "kind must be one of self, cross, regression"),
        ("--x zeros", "x must be one of identity, ones"),
        ("--attention poly", "attention must be one of exp, lin, poly:G"),
        ("--models 0", "models must be a whole number of at least 1"),
        ("--seed -1", "seed must be a whole number from 0 to 2^63 - 1"),
        ("--n ten", "'--n'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(run: Run, words: str, sentence: str) -> None:
    code, out, err = run(*words.split(), "--json")
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_values_outside_the_definition_of_the_paper_run(run: Run) -> None:
    code, out, _ = run("--kind", "cross", "--a0", "0.9", "--models", "10", "--json")
    assert code == 0
    assert 0.4 < json.loads(out)["exact"] < 0.6
