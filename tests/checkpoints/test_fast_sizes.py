"""The quick measures of the monitor agree with singular value decompositions and with the statistics of the gauge."""

import pytest
import torch
from tiny_models import tiny_model

from depthgauge.checkpoints.blocks import attention_calls, circuits
from depthgauge.checkpoints.blocks.attention_calls import AttentionCall
from depthgauge.checkpoints.blocks.circuits import (
    HeadWeights,
    block_sizes,
    circuit_sizes,
    gram,
    head_weights,
    largest_from_grams,
    layer_sizes,
)
from depthgauge.checkpoints.blocks.window_observer import head_statistics
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.monitor import measurement
from depthgauge.monitor.measurement import RowWatch

DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


@pytest.mark.parametrize("kind", ["normal", "equal", "low rank", "tiny", "huge", "zero"])
def test_the_largest_singular_value_of_a_product(kind: str) -> None:
    A, B = normal(3, 12, 5), normal(3, 5, 9)
    if kind == "equal":  # all singular values are equal, the hardest case for powers of a matrix
        A, B = torch.linalg.qr(A)[0], torch.linalg.qr(B.mT)[0].mT
    if kind == "low rank":
        A[..., 1:] = A[..., :1]
    scale = {"tiny": 1e-12, "huge": 1e12, "zero": 0.0}.get(kind, 1.0)
    A = A * scale
    found = largest_from_grams(gram(A), gram(B.mT))
    expected = torch.linalg.svdvals(A.double() @ B.double())[:, 0]
    assert found.double().tolist() == pytest.approx(expected.tolist(), rel=2e-3)
    assert bool((found.double() <= expected * (1 + 1e-5)).all())


def test_a_weight_that_is_not_finite_has_no_size() -> None:
    A = normal(2, 6, 3)
    A[1, 0, 0] = float("nan")
    found = largest_from_grams(gram(A), gram(normal(2, 3, 6).mT))
    assert found.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "gpt_neox", "bert", "qwen3"])
def test_the_sizes_of_blocks_are_the_largest_of_their_heads(
    name: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not together:
        monkeypatch.setattr(circuits, "_WEIGHT_ENTRIES", 1)
        monkeypatch.setattr(circuits, "_PRODUCT_ENTRIES", 1)
    checkpoint = wrap(tiny_model(name))
    blocks = next(m for m in checkpoint.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
    found = block_sizes(checkpoint, list(blocks))
    for layer, block in enumerate(blocks):
        heads = [circuit_sizes(head) for head in head_weights(checkpoint, block)]
        for size in ("eta", "qk_norm", "ov_norm"):
            expected = max(getattr(head, size) for head in heads)
            assert float(getattr(found, size)[layer]) == pytest.approx(expected, rel=2e-3)


def test_the_sizes_of_values_wider_than_queries() -> None:
    query, key, value, output = normal(2, 4, 8, 3), normal(2, 2, 8, 3), normal(2, 2, 8, 5), normal(2, 4, 5, 8)
    found = layer_sizes([(query, key, value, output)])
    for layer in range(2):
        heads = [
            circuit_sizes(HeadWeights(query[layer, h], key[layer, h // 2], value[layer, h // 2], output[layer, h], 1.0))
            for h in range(4)
        ]
        for size in ("eta", "qk_norm", "ov_norm"):
            expected = max(getattr(head, size) for head in heads)
            assert float(getattr(found, size)[layer]) == pytest.approx(expected, rel=2e-3)


def causal(n: int, window: int) -> torch.Tensor:
    distance = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(n, n).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize("entries", [2**22, 2 * 3 * 7 * 7, 60])
@pytest.mark.parametrize("masks", ["none", "one", "two", "new", "changed"])
def test_row_measures_are_part_of_the_head_statistics(
    masks: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_calls, "BLOCK_ENTRIES", entries)
    monkeypatch.setattr(measurement, "BLOCK_ENTRIES", entries)
    rows = torch.ones(2, 7, dtype=torch.bool)
    rows[1, 5:] = False
    one, two = causal(7, 7), causal(7, 3)
    watch, expected = RowWatch(rows), []
    for layer in range(5):
        mask = {"none": None, "new": one.clone()}.get(masks, one if layer % 2 or masks != "two" else two)
        if masks == "changed" and mask is not None and layer == 3:
            mask.copy_(two)
        call = AttentionCall(layer, normal(2, 3, 7, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 4), mask, 0.5)
        output, statistics = head_statistics(call, rows)
        assert torch.equal(watch(call), output)
        expected.append(statistics)
    found, _ = watch.measures()
    for layer, statistics in enumerate(expected):
        for name in ("score_range", "tv_mean", "first_mass", "entropy"):
            values = found[name][layer].tolist()
            assert values == pytest.approx(getattr(statistics, name).tolist(), rel=1e-5)


def test_layers_may_have_different_numbers_of_heads() -> None:
    watch, expected = RowWatch(), []
    for heads in (2, 3):
        call = AttentionCall(0, normal(1, heads, 5, 4), normal(1, heads, 5, 4), normal(1, heads, 5, 4), None, 0.5)
        watch(call)
        expected.append(head_statistics(call)[1])
    found, uniform_entropy = watch.measures()
    assert found["entropy"][0, :2].tolist() == pytest.approx(expected[0].entropy.tolist())
    assert found["entropy"][0, 2].isnan()
    assert found["entropy"][1].tolist() == pytest.approx(expected[1].entropy.tolist())
    assert uniform_entropy.exp().tolist() == pytest.approx([5.0, 5.0])
