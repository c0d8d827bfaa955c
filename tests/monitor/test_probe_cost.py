"""A probe costs few operations per layer, and waits for the device once.

On a GPU the time of a probe is that of launching operations and of waiting for results. Both can be counted on a CPU.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import depthgauge as dg

TOKENS = 9
READS = {"cpu", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"}
"""Methods of a tensor that wait for its device."""
SHAPED_BY_VALUES = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
"""Operations that wait for the device, because they return a number or a tensor whose shape depends on the values."""


class Operations(TorchDispatchMode):
    """Counts the operations, and those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func.name().split(".")[0]
        by_mask = name == "aten::index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.waits += name in SHAPED_BY_VALUES or by_mask
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts the calls of methods that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in READS:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], object]) -> tuple[Operations, Reads]:
    with Reads() as reads, Operations() as operations:
        work()
    return operations, reads


def costs(log: Path, name: str, layers: int, padded: bool) -> tuple[tuple[Operations, Reads], ...]:
    """Return what a probe and a plain forward pass of the same batch cost."""
    model, mask = tiny_model(name, layers=layers), torch.ones(2, TOKENS, dtype=torch.long)
    if padded:
        mask[1, 6:] = 0
    batch = {"input_ids": tokens(TOKENS), "attention_mask": mask}
    monitor = dg.Monitor(model, batch, 1, log / f"{layers}", action="log")
    monitor.step(0)  # the first probe also checks that the attention can be observed
    loss = torch.tensor(2.0)
    labels = {"labels": batch["input_ids"]} if name == "llama" else {}

    def forward() -> None:
        with torch.no_grad():
            model(**batch, **labels)

    return counted(lambda: monitor.step(1, loss)), counted(forward)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_probe_waits_for_the_device_once(tmp_path: Path, name: str, padded: bool) -> None:
    (operations, reads), (plain, plain_reads) = costs(tmp_path, name, 3, padded)
    assert operations.waits <= plain.waits
    assert reads.count - plain_reads.count == Counter({"cpu": 1})


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_layer_costs_few_operations_more_than_in_a_forward_pass(tmp_path: Path, name: str) -> None:
    few, many = costs(tmp_path, name, 2, False), costs(tmp_path, name, 8, False)
    probe, plain = ((many[k][0].count - few[k][0].count) / 6 for k in (0, 1))
    assert probe - plain <= 60, f"{probe} operations per layer in a probe, {plain} in a forward pass"
    assert few[0][0].count - few[1][0].count <= 700  # with what does not depend on the number of layers
