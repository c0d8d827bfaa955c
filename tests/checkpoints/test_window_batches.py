"""Where memory runs out, windows are computed in smaller batches, once, with the same results."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from refit_problems import LAYER, Problem
from tiny_checkpoints import text_of
from tiny_shrinks import quick, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from depthgauge.checkpoints.blocks.model_output import WindowBatches
from depthgauge.surgery.repair import refit


def fail() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@contextmanager
def room_for(module: nn.Module, windows: int, backward: bool = False) -> Iterator[list[int]]:
    """Let a module fail for more windows than these, or its backward pass; return the numbers that it was given."""
    seen: list[int] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        seen.append(len(states))
        if len(states) > windows and backward and states.requires_grad:
            states.register_hook(lambda _: fail())
        elif len(states) > windows and not backward:
            fail()

    with module.register_forward_pre_hook(look, with_kwargs=True):
        yield seen


def test_a_failed_batch_is_computed_again_in_smaller_ones() -> None:
    batches, asked = WindowBatches(8), list[int]()

    def compute(these: slice) -> range:
        asked.append(these.stop - these.start)
        if asked[-1] > 3:
            fail()
        return range(20)[these]

    found = batches.map(compute, 20)
    assert [one for part in found for one in part] == list(range(20))
    assert asked == [8, *[2] * 10]
    assert batches.size == 2


@pytest.mark.parametrize(
    ("size", "windows", "error", "calls"),
    [
        (8, 20, torch.OutOfMemoryError("no memory"), 2),  # also with smaller batches
        (1, 20, torch.OutOfMemoryError("no memory"), 1),
        (8, 1, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 1),
        (8, 20, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 2),
        (8, 20, RuntimeError("shapes do not match"), 1),
    ],
)
def test_what_smaller_batches_do_not_help_is_raised(size: int, windows: int, error: Exception, calls: int) -> None:
    asked: list[slice] = []

    def compute(these: slice) -> None:
        asked.append(these)
        raise error

    with pytest.raises(type(error), match=str(error)):
        WindowBatches(size).map(compute, windows)
    assert len(asked) == calls


def test_the_smaller_size_is_kept() -> None:
    batches = WindowBatches(8)
    batches.map(lambda these: fail() if these.stop - these.start > 2 else None, 8)
    assert batches.map(lambda these: these.stop - these.start, 5) == [2, 2, 1]


def test_a_refit_is_the_same() -> None:
    made = []
    for windows in (12, 1):
        problem = Problem("llama")
        targets, maps = problem.unreachable(), [problem.attention, problem.mlp]
        with room_for(problem.runner.blocks[LAYER], windows) as seen:
            made.append([delta for _, delta in refit(problem.runner, LAYER, maps, problem.states, targets, 0.1)])
    assert seen == [5, *[1] * 12]
    for left, right in zip(*made, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(text_of(6000))
    return save(tmp_path / "model", "llama")


def test_shrink_ends_with_the_same_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for windows in (1000, 32):
        model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
        with room_for(model.model.layers[1], windows) as seen:
            text = folder.parent / "text.txt"
            made.append(quick(model, text, tokenizer=tokenizer, remove=1, sampled=0.0, allow="unread"))
    assert sum(count > 32 for count in seen) == 2  # of the search and repair, and of the certify windows
    ours, theirs = (result.record for result in made)
    assert ours.removed == theirs.removed
    assert [stage.kept for stage in ours.stages] == [stage.kept for stage in theirs.stages]
    assert ours.loss.shrunk == pytest.approx(theirs.loss.shrunk, rel=1e-5)
    for left, right in zip(*(result.model.parameters() for result in made), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)
