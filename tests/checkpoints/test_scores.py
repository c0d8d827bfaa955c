"""Layer scores against their definitions, rank correlation, and bootstrap intervals from few windows."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import MODELS, tiny_model, tokens

from depthgauge.checkpoints.bootstrap import LEVEL, RESAMPLES, bootstrap
from depthgauge.checkpoints.interface import attending
from depthgauge.checkpoints.layers import Stack, find_blocks
from depthgauge.checkpoints.load import wrap
from depthgauge.checkpoints.scores import SublayerScores, angular_distance, block_influence, spearman


def influence(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - ((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))).mean())


@pytest.mark.parametrize("name", MODELS)
def test_sublayer_scores_are_their_definitions(name: str) -> None:
    model, ids = tiny_model(name), tokens(batch=1)
    checkpoint = wrap(model)
    assert checkpoint.family is not None
    with attending(model) as session:
        stack = Stack(checkpoint, session)
        scores = SublayerScores(stack.blocks, checkpoint.family)
        with scores.listening():
            base = stack.full(ids)
        for layer in range(3):
            x, after = base.states[layer], base.states[layer + 1]
            # What each sublayer adds is recorded by independent hooks on the modules.
            added: dict[str, torch.Tensor] = {}
            modules = {
                kind: find_blocks(model, 3)[layer].get_submodule(path)
                for kind, path in (("attention", checkpoint.family.attention), ("mlp", checkpoint.family.mlp))
            }
            handles = [
                module.register_forward_hook(
                    lambda m, a, out, k=kind, to=added: to.update({k: out[0] if isinstance(out, tuple) else out})
                )
                for kind, module in modules.items()
            ]
            stack.run(ids, start=layer, state=x)
            for handle in handles:
                handle.remove()
            assert scores.attention[layer] == pytest.approx(influence(x, x + added["attention"]), abs=1e-6)
            if checkpoint.family.order == "pre":
                assert torch.allclose(x + added["attention"] + added["mlp"], after, atol=1e-4)
                expected = influence(x + added["attention"], after)
            elif checkpoint.family.order == "parallel":
                assert torch.allclose(x + added["attention"] + added["mlp"], after, atol=1e-4)
                expected = influence(x, x + added["mlp"])
            else:
                block = find_blocks(model, 3)[layer]
                norm = block.sa_layer_norm if name == "distilbert" else block.attention.output.LayerNorm
                with torch.no_grad():
                    between = norm(x + added["attention"])
                expected = influence(between, between + added["mlp"])
            assert scores.mlp[layer] == pytest.approx(expected, abs=1e-6)


def test_block_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 5, 8, generator=generator) for _ in range(2))
    assert block_influence(x, y) == pytest.approx(influence(x, y))
    assert block_influence(x, 3 * x) == pytest.approx(0.0, abs=1e-12)
    last = float((x[0, -1] @ y[0, -1]) / (x[0, -1].norm() * y[0, -1].norm()))
    assert angular_distance(x, y) == pytest.approx(math.acos(last) / math.pi, rel=1e-5)
    assert angular_distance(x, -x) == pytest.approx(1.0)


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # Ranks (1, 2.5, 2.5, 4) and (1, 2, 3, 4): the two 2s share the mean of ranks 2 and 3.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2, 3], [0.5, 0.5, 0.5]) is None
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 2, math.nan], [1, 2, 3]) is None


@given(pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=20))
def test_rank_correlation_is_its_definition(pairs: list[tuple[int, int]]) -> None:
    """Pearson's correlation of the ranks, where the rank of x is #{y < x} + (#{y = x} + 1)/2."""
    x, y = zip(*pairs, strict=True)
    found = spearman(x, y)
    a, b = ([sum(w < v for w in values) + (values.count(v) + 1) / 2 for v in values] for values in (x, y))
    mean = (len(x) + 1) / 2
    covariance = sum((r - mean) * (s - mean) for r, s in zip(a, b, strict=True))
    variance = math.prod(sum((r - mean) ** 2 for r in ranks) for ranks in (a, b))
    if variance == 0:
        assert found is None
    else:
        assert found == pytest.approx(covariance / math.sqrt(variance), abs=1e-12)


def integral(density: Callable[[float], float], low: float, high: float, steps: int = 2000) -> float:
    """Integrate by Simpson's rule."""
    width = (high - low) / steps
    inner = sum((4 if i % 2 else 2) * density(low + i * width) for i in range(1, steps))
    return (density(low) + inner + density(high)) * width / 3


def student_cdf(t: float, freedom: int) -> float:
    """P(T ≤ t), by integrating the density of Student's t from 0 to t."""
    log_factor = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    return 0.5 + integral(lambda x: math.exp(log_factor - (freedom + 1) / 2 * math.log1p(x**2 / freedom)), 0.0, t)


def student_quantile(probability: float, freedom: int) -> float:
    """Invert `student_cdf` by bisection."""
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return low


def test_the_oracle_agrees_with_printed_tables() -> None:
    tables = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 30: 2.042272}
    for freedom, quantile in tables.items():
        assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=1e-6)


@pytest.mark.parametrize("m", [2, 3, 5, 8, 31])
def test_interval_ends_are_the_corrected_percentiles(m: int) -> None:
    """The tail probability is Φ(−√(m/(m−1))·t), with Φ and t computed independently of scipy."""
    values = torch.randn(m, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
    found = bootstrap(values.tolist(), seed=4)
    z = math.sqrt(m / (m - 1)) * student_quantile((1 + LEVEL) / 2, m - 1)
    tail = math.erfc(z / math.sqrt(2)) / 2
    draws = torch.randint(m, (RESAMPLES, m), generator=torch.Generator().manual_seed(4))
    means = sorted(values[draws].mean(dim=1).tolist())
    for end, place in ((found.low, tail * (RESAMPLES - 1)), (found.high, (1 - tail) * (RESAMPLES - 1))):
        below = math.floor(place)
        above = min(below + 1, RESAMPLES - 1)
        expected = means[below] + (place - below) * (means[above] - means[below])
        assert end == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_intervals_cover_as_often_as_stated() -> None:
    """Means of eight normal values; plain percentile intervals would cover about 88 %."""
    values = torch.randn(400, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = [bootstrap(row.tolist(), seed=i) for i, row in enumerate(values)]
    covered = sum(one.low <= 0 <= one.high for one in found) / 400  # type: ignore[operator]
    assert 0.92 <= covered <= 0.99
    assert all(one.low <= one.mean <= one.high for one in found)  # type: ignore[operator]


def test_intervals_are_reproducible_and_one_window_has_none() -> None:
    assert bootstrap([1.0, 2.0, 4.0], seed=3) == bootstrap([1.0, 2.0, 4.0], seed=3)
    alone = bootstrap([2.5])
    assert (alone.mean, alone.low, alone.high) == (2.5, None, None)
    pair = bootstrap([1.0, 2.0])
    assert (pair.low, pair.high) == (1.0, 2.0)
