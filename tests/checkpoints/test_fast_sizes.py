"""The quick measures of the monitor agree with singular value decompositions and with the statistics of the gauge."""

import pytest
import torch
from tiny_models import tiny_model

from depthgauge.checkpoints.circuits import block_sizes, circuit_sizes, head_weights, largest_singular_value
from depthgauge.checkpoints.head_statistics import head_statistics, row_measures
from depthgauge.checkpoints.interface import AttentionCall
from depthgauge.checkpoints.load import wrap

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
    found = largest_singular_value(A, B)
    expected = torch.linalg.svdvals(A.double() @ B.double())[:, 0]
    assert found.double().tolist() == pytest.approx(expected.tolist(), rel=2e-3)
    assert bool((found.double() <= expected * (1 + 1e-5)).all())


def test_a_weight_that_is_not_finite_has_no_size() -> None:
    A = normal(2, 6, 3)
    A[1, 0, 0] = float("nan")
    found = largest_singular_value(A, normal(2, 3, 6))
    assert found.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "gpt_neox", "bert", "qwen3"])
def test_the_sizes_of_a_block_are_the_largest_of_its_heads(name: str) -> None:
    checkpoint = wrap(tiny_model(name))
    block = next(m for m in checkpoint.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)[1]
    heads = [circuit_sizes(head) for head in head_weights(checkpoint, block)]
    found = block_sizes(checkpoint, block)
    for size in ("eta", "qk_norm", "ov_norm"):
        assert float(getattr(found, size)) == pytest.approx(max(getattr(head, size) for head in heads), rel=2e-3)


def test_row_measures_are_part_of_the_head_statistics() -> None:
    query, key, value = normal(2, 3, 7, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 4)
    mask = torch.zeros(7, 7).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), torch.finfo(torch.float32).min)
    call = AttentionCall(0, query, key, value, mask[None, None], 0.5)
    rows = torch.ones(2, 7, dtype=torch.bool)
    rows[1, 5:] = False
    output, statistics = head_statistics(call, rows)
    same, found = row_measures(call, rows)
    assert torch.equal(output, same)
    for name in ("score_range", "tv_mean", "first_mass", "entropy"):
        assert torch.equal(getattr(found, name), getattr(statistics, name))
    counts = torch.tensor([*range(1, 8), *range(1, 6)], dtype=torch.float64)
    assert float(found.uniform_entropy) == pytest.approx(float(counts.log().mean()))
