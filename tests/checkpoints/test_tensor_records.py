"""Records with tensor fields: equality without errors, pickling, short repr."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens

from depthgauge.base.array_record import ArrayRecord
from depthgauge.checkpoints.blocks.attention_calls import AttentionCall, attending
from depthgauge.checkpoints.blocks.block_runner import Pass, Stack
from depthgauge.checkpoints.blocks.circuits import HeadWeights
from depthgauge.checkpoints.blocks.window_observer import HeadStatistics, head_statistics
from depthgauge.checkpoints.inputs.windows import Windows
from depthgauge.checkpoints.weights.load import wrap


def call(seed: int = 0) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 5, 3, generator=generator) for _ in range(3))
    return AttentionCall(0, q, k, v, None, 0.5)


def records() -> dict[str, ArrayRecord]:
    model = tiny_model("llama")
    with attending(model) as session:
        whole = Stack(wrap(model), session).full(tokens(batch=1))
    matrix = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    return {
        "AttentionCall": call(),
        "RowBlock": next(call().blocks()),
        "HeadStatistics": head_statistics(call())[1],
        "HeadWeights": HeadWeights(matrix, 2 * matrix, 3 * matrix, 4 * matrix, 0.5),
        "Pass": whole,
        "Windows": Windows(tokens(), "corpus.txt", "00"),
    }


@pytest.mark.parametrize("name", ["AttentionCall", "RowBlock", "HeadStatistics", "HeadWeights", "Pass", "Windows"])
def test_records_compare_pickle_and_print(name: str) -> None:
    record: Any = records()[name]
    assert type(record).__name__ == name
    for same in (copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert same is not record
        assert same == record
    assert record != "another type"
    assert record not in [None, 1.0]
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            flipped = ~value if value.dtype == torch.bool else value + 1
            assert replace(record, **{field.name: flipped}) != record
    shown = repr(record)
    assert shown.startswith(f"{name}(")
    assert len(shown) < 300
    assert "tensor" not in shown
    with pytest.raises(TypeError, match="unhashable"):
        hash(record)
    with pytest.raises(FrozenInstanceError):
        setattr(record, fields(record)[0].name, None)


def test_repr_shows_shapes() -> None:
    assert repr(call()) == (
        "AttentionCall(layer=0, query=float32[1, 2, 5, 3], key=float32[1, 2, 5, 3], value=float32[1, 2, 5, 3], "
        "mask=None, scale=0.5, softcap=None)"
    )
    x = torch.zeros(1, 4, 8)
    assert repr(Pass((x, x, x), x)) == "Pass(states=3 × float32[1, 4, 8], output=float32[1, 4, 8])"


@dataclass(frozen=True, eq=False, repr=False)
class Holder(ArrayRecord):
    value: Any


@pytest.mark.parametrize(
    "other",
    [torch.zeros(3, 1), torch.zeros(3, dtype=torch.float64), torch.zeros(3, device="meta"), torch.ones(3), None, 0, ()],
)
def test_shape_dtype_device_entries_and_type_all_count(other: Any) -> None:
    assert Holder(torch.zeros(3)) == Holder(torch.zeros(3))
    assert Holder(torch.zeros(3)) != Holder(other)
    assert Holder(other) != Holder(torch.zeros(3))


def test_tuples_of_tensors_are_compared() -> None:
    x, y = torch.zeros(1, 4, 8), torch.ones(1, 4, 8)
    assert Pass((x, y), y) == Pass((x.clone(), y.clone()), y.clone())
    assert Pass((x, y), y) != Pass((y, y), y)
    assert Pass((x, y), y) != Pass((x,), y)


def test_a_checkpoint_has_a_short_repr_and_pickles() -> None:
    checkpoint = wrap(tiny_model("llama"), "tiny")
    assert repr(checkpoint) == "Checkpoint('tiny', LlamaForCausalLM, 3 layers, 'loss')"
    assert checkpoint == replace(checkpoint)
    assert checkpoint != replace(checkpoint, name="other")
    again = pickle.loads(pickle.dumps(checkpoint))
    with torch.no_grad():
        assert torch.equal(again.model(tokens()).logits, checkpoint.model(tokens()).logits)


def test_statistics_are_equal_only_if_all_fields_are() -> None:
    first, second = (head_statistics(call(seed))[1] for seed in (0, 1))
    assert isinstance(first, HeadStatistics)
    assert first != second
    assert replace(first, energy=first.energy + 1e-12) != first
