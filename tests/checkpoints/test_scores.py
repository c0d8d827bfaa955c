"""Cheap scores against their definitions, rank correlation, and intervals from few windows."""

import math

import pytest
import torch
from tiny_models import MODELS, tiny_model, tokens

from depthgauge.checkpoints.bootstrap import bootstrap, student_cdf, student_quantile
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
            # With the MLP silent a block gives x + attention (or its norm, after which an MLP that adds nothing
            # leaves another norm): what the attention adds is seen from outside.
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
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)  # ties share their mean rank
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2], [1, 2]) is None


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (30, 2.042272)]
)
def test_student_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=1e-6)
    assert student_cdf(0.0, freedom) == 0.5


def test_intervals_cover_as_often_as_they_say() -> None:
    """Means of eight normal values: plain percentiles would cover about 0.88."""
    values = torch.randn(400, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = [bootstrap(row.tolist(), seed=i) for i, row in enumerate(values)]
    covered = sum(one.low <= 0 <= one.high for one in found) / 400  # type: ignore[operator]
    assert 0.92 <= covered <= 0.99
    assert all(one.low <= one.mean <= one.high for one in found)  # type: ignore[operator]


def test_intervals_repeat_and_one_window_has_none() -> None:
    assert bootstrap([1.0, 2.0, 4.0], seed=3) == bootstrap([1.0, 2.0, 4.0], seed=3)
    alone = bootstrap([2.5])
    assert (alone.mean, alone.low, alone.high) == (2.5, None, None)
    pair = bootstrap([1.0, 2.0])
    assert (pair.low, pair.high) == (1.0, 2.0)
