"""The what-ifs of all layers and windows are one pass over the blocks, and equal complete passes of edited models."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens
from tiny_pairs import paired_model
from torch import Tensor, nn

from depthgauge.base.progress import silent
from depthgauge.checkpoints.blocks import what_if
from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.blocks.model_output import model_output, window_losses
from depthgauge.checkpoints.blocks.probe import derived
from depthgauge.checkpoints.blocks.what_if import DenseStates, Edit, Objective, edited_losses, encoded, layers_of
from depthgauge.checkpoints.inputs.windows import Inputs, Samples
from depthgauge.checkpoints.weights.load import Checkpoint, with_stack, wrap
from depthgauge.workflows.gauge_checkpoint import what_if_losses

KINDS = ("block", "attention", "mlp", "parallel")
CASES = ["llama", "gpt2", "bert", "t5 encoder", "t5 decoder", "bart both"]


def case(name: str) -> tuple[Checkpoint, Inputs]:
    """Return a tiny model and five windows; sources of pairs have different lengths."""
    if " " not in name:
        ids = tokens(9, batch=5)
        return derived(wrap(tiny_model(name)), ids), ids
    kind, stack = name.split()
    mask = (torch.arange(9) < torch.tensor([[9], [7], [5], [8], [6]])).long()
    read, targets = tokens(6, batch=5, seed=1), tokens(6, batch=5, seed=2)
    inputs = {"input_ids": tokens(9, batch=5) * mask, "attention_mask": mask, "decoder_input_ids": read}
    samples = Samples(inputs, targets)
    return derived(with_stack(wrap(paired_model(kind)), stack), samples), samples


def returning(module: nn.Module, change: Any) -> Any:
    """Replace the first output of a module by `change(its input, its output)`."""

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        read = args[0] if args else kwargs.get("hidden_states")
        made = change(read, out[0] if isinstance(out, tuple) else out)
        return (made, *out[1:]) if isinstance(out, tuple) else made

    return module.register_forward_hook(after, with_kwargs=True)


@torch.no_grad()
def naive(checkpoint: Checkpoint, blocks: Sequence[nn.Module], window: Inputs, kind: str, layer: int) -> Tensor:
    """Return the output of one complete pass of the edited model on one window."""
    gained = list[Tensor]()
    with ExitStack() as hooks:
        if kind in ("attention", "mlp"):
            path = getattr(checkpoint.families[layer], kind)
            hooks.enter_context(returning(blocks[layer].get_submodule(path), lambda x, y: 0 * y))
        else:
            hooks.enter_context(returning(blocks[layer], lambda x, y: (gained.append(y - x), x)[1]))
        if kind == "parallel":
            hooks.enter_context(returning(blocks[layer + 1], lambda x, y: y + gained[-1]))
        return model_output(checkpoint, window)


@pytest.mark.parametrize("name", CASES)
def test_all_layers_and_windows_at_once_equal_complete_passes(name: str) -> None:
    checkpoint, inputs = case(name)
    runner = BlockRunner(checkpoint, encoded(checkpoint, inputs)[:1])
    runner.batches.size = 3
    dense = DenseStates(runner, encoded(checkpoint, inputs))
    measured = {kind: layers_of(kind, checkpoint.families) for kind in KINDS}
    if name == "bart both":  # the encoder and the decoder are not adjacent
        measured["parallel"] = [layer for layer in measured["parallel"] if layer != checkpoint.spans[0][-1]]
    assert all(measured.values())
    for kind, on in measured.items():
        found = what_if_losses(dense, kind, on, silent)
        for place, losses in enumerate(found):
            window = inputs[place : place + 1]
            with torch.no_grad():
                intact = model_output(checkpoint, window)
            own = window_losses(checkpoint.objective, intact, window, intact)
            for layer, loss in zip(on, losses, strict=True):
                edited = naive(checkpoint, runner.blocks, window, kind, layer)
                expected = float(window_losses(checkpoint.objective, edited, window, intact) - own)
                assert loss == pytest.approx(expected, rel=1e-3, abs=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_used_in_order_whatever_the_number_of_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are read from a disk are read once, also for several batches of windows."""
    checkpoint, applied, apply = wrap(tiny_model("llama")), list[int](), BlockRunner.block
    runner = BlockRunner(checkpoint, tokens(batch=1))
    runner.batches.size = 2
    dense = DenseStates(runner, tokens(batch=5))
    monkeypatch.setattr(
        BlockRunner, "block", lambda self, layer, *rest: (applied.append(layer), apply(self, layer, *rest))[1]
    )
    what_if_losses(dense, kind, layers_of(kind, checkpoint.families), silent)
    assert applied == sorted(applied)
    assert len(applied) > 3


def test_models_that_do_not_fit_into_memory_are_measured_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(batch=4)
    runner = BlockRunner(wrap(tiny_model("gpt2")), ids[:1])
    dense = DenseStates(runner, ids)
    objective, models = Objective(runner, ids, dense.final), [(Edit(layer, "mlp"),) for layer in range(3)]
    (whole,) = edited_losses(objective, dense, models)
    room = int(2.5 * 3 * dense.final.numel() * dense.final.itemsize / what_if.STATES_SHARE)
    monkeypatch.setattr(what_if, "free_memory", lambda _: room)
    first, second = edited_losses(objective, dense, models)
    assert (len(first), len(second)) == (2, 1)
    assert all(torch.allclose(losses, whole[edits]) for edits, losses in {**first, **second}.items())


def test_arguments_that_depend_on_the_window_are_those_of_the_window() -> None:
    """Blocks that read the embeddings of their own tokens, as those of Gemma 3n and 4 do."""
    model, ids = tiny_model("llama"), tokens(batch=3)
    given: list[Tensor] = []

    class Reading(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden_states: Tensor, extra: Tensor, **others: Any) -> Tensor:
            return self.block(hidden_states, **others) + extra

    for layer, block in enumerate(model.model.layers):
        model.model.layers[layer] = Reading(block)

    def embedded(module: nn.Module, args: Any, out: Tensor) -> None:
        given[:] = [out.flip(-1)]

    def reading(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {"extra": given[0], **kwargs}  # a runner gives its own

    model.model.embed_tokens.register_forward_hook(embedded)
    for block in model.model.layers:
        block.register_forward_pre_hook(reading, with_kwargs=True)
    runner = BlockRunner(wrap(model), ids[:1])
    assert runner.needs_inputs
    assert not BlockRunner(wrap(tiny_model("llama")), ids[:1]).needs_inputs
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        made = runner.output(DenseStates(runner, ids).final, ids)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
