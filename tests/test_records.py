"""Records with tensors compare without raising, pickle, and have a short repr."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dense_separation import inputs

from depthgauge import random_network
from depthgauge.base.array_record import ArrayRecord
from depthgauge.papers.separation.decisions import draw_attention, draw_regression
from depthgauge.papers.separation.settings import CrossAttention, Regression
from depthgauge.theory.linalg.enclosures import Enclosure, sign_norm_up


def matrix(seed: int, size: int = 12) -> torch.Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trace(seed: int) -> Any:
    return next(random_network(1, 2, 3, 0.5, seed=1, causal=True).trace(matrix(seed, 3)))


MAKERS: dict[str, Callable[[int], Any]] = {
    "Enclosure": lambda seed: Enclosure(matrix(seed), matrix(seed).abs()),
    "SignBound": lambda seed: sign_norm_up(matrix(seed)),
    "LayerTrace": trace,
    "ScoreBlock": lambda seed: next(trace(seed).score_blocks()),
    "AttentionDraws": lambda seed: draw_attention(CrossAttention(6, 4, 2, 0.1, 2.0), seed, 0, 3),
    "RegressionDraws": lambda seed: draw_regression(Regression(6, 2), seed, 0, 3),
    "Inputs": lambda seed: inputs(CrossAttention(6, 4, 2, 0.1, 2.0), 1, torch.tensor([seed]), torch.tensor([2])),
}


@pytest.mark.parametrize("name", MAKERS)
def test_records_compare_pickle_and_print(name: str) -> None:
    record, same, other = (MAKERS[name](seed) for seed in (0, 0, 1))
    assert type(record).__name__ == name
    assert record == same
    assert record != other
    assert record != name
    assert pickle.loads(pickle.dumps(record)) == record
    assert repr(record).startswith(f"{name}(")
    assert len(repr(record)) < 250
    with pytest.raises(TypeError, match="unhashable"):
        hash(record)


def test_the_repr_shows_scalars_and_the_shapes_of_arrays() -> None:
    assert repr(Enclosure(torch.tensor(0.5), torch.zeros(2, 3))) == "Enclosure(mid=0.5, rad=float32[2, 3])"


def test_nan_equals_nan_and_dtypes_and_shapes_matter() -> None:
    def enclosure(*values: float, dtype: torch.dtype = torch.float64) -> Enclosure:
        return Enclosure(torch.tensor(values, dtype=dtype), torch.zeros(len(values), dtype=dtype))

    nan = float("nan")
    assert enclosure(1.0, nan) == enclosure(1.0, nan)
    assert enclosure(1.0, nan) != enclosure(nan, 1.0)
    assert enclosure(1.0) != enclosure(1.0, dtype=torch.float32)
    assert enclosure(1.0) != enclosure(1.0, 1.0)


def test_arrays_and_other_values_do_not_compare_equal() -> None:
    draws = draw_regression(Regression(6, 2), 0, 0, 3)
    assert isinstance(draws, ArrayRecord)
    changed = type(draws)(draws.uniform, np.array([0, 0, 0]), draws.words)
    assert draws != changed
    bound = sign_norm_up(matrix(0, 3))
    assert bound.row_scale is None
    assert bound != sign_norm_up(matrix(0))
