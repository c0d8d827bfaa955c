"""Layer scores against their definitions, and rank correlation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import MODELS, tiny_model, tokens

from depthgauge.checkpoints.blocks.attention_calls import attending
from depthgauge.checkpoints.blocks.block_runner import Stack
from depthgauge.checkpoints.blocks.window_observer import SublayerScores, angular_distance, block_influence, spearman
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.checkpoints.weights.load import wrap


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
        scores = SublayerScores(stack.blocks, checkpoint.families)
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
