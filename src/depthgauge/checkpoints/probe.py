"""A quick check before a long computation: can attention be observed exactly, and can blocks be rerun?"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgauge.base.format import counted, number
from depthgauge.checkpoints.block_runner import BlockRunner
from depthgauge.checkpoints.hooks import Change, changed
from depthgauge.checkpoints.interface import Session, attending
from depthgauge.checkpoints.layers import Stack, unusual_states
from depthgauge.checkpoints.library import CheckpointError, quiet, short
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.model_output import require_output
from depthgauge.checkpoints.samples import Inputs, few_windows, shortened

TOKENS = 32
"""Number of tokens used."""


@dataclass(frozen=True)
class Probed:
    """What cannot be measured of a checkpoint, and why; None means that it can.

    - `attention`: why the attention weights cannot be observed
    - `blocks`: why blocks cannot be rerun
    """

    attention: str | None
    blocks: str | None


def probe(checkpoint: Checkpoint, inputs: Inputs) -> Probed:
    """Check whether the attention of a checkpoint can be observed and its blocks rerun, on a few tokens.

    The output with observed attention is compared with the output of stock eager attention. An architecture that
    bypasses transformers' attention interface, or passes an unknown argument to it, is thereby detected. Its blocks are
    then rerun with its own attention.

    Raises:
        CheckpointError: neither is possible.
    """
    inputs, model, name = shortened(inputs, TOKENS), checkpoint.model, type(checkpoint.model).__name__
    if not checkpoint.heads:
        attention: str | None = f"{name} has no attention heads"
    else:
        own = model.config._attn_implementation
        try:
            with quiet():
                model.set_attn_implementation("eager")
                require_output(checkpoint, inputs)  # eager attention may fail where the model's own does not
                stock = Stack(checkpoint, Session()).run(inputs)
                model.set_attn_implementation(own)
        except ValueError as error:  # a part of the model does not have the implementation that the whole has
            raise CheckpointError(f"the attention of a {name} cannot be exchanged: {short(error)}") from error
        with attending(model) as session:
            stack = Stack(checkpoint, session)
            attention = _unobserved(stack, inputs, stock)
            if attention is None:
                return Probed(None, _not_rerun(stack, inputs))
    found = Probed(attention, _not_rerun(Stack(checkpoint, Session()), inputs))
    if found.blocks is not None:
        raise CheckpointError(
            f"{name} cannot be gauged: its attention weights are not observable ({attention}), and its blocks "
            f"cannot be rerun ({found.blocks})"
            + ("; use --weights-only" if checkpoint.family and checkpoint.family.projections else "")
        )
    return found


def _unobserved(stack: Stack, inputs: Inputs, stock: Tensor) -> str | None:
    """Return why observed attention differs from that of the model, whose output is `stock`, or None."""
    checkpoint, session = stack.checkpoint, stack.session
    name, layers = type(checkpoint.model).__name__, checkpoint.layers
    off = relative_difference(stack.run(inputs), stock)
    if checkpoint.stack is not None and session.calls != layers:
        return f"both stacks of a {name} call the attention interface, and their calls are not told apart"
    if session.calls < layers:
        return (
            f"{name} bypasses transformers' attention interface: {session.calls} of its {counted(layers, 'layer')} "
            "call it"
        )
    if session.calls > layers or off > rounding_tolerance(stock.dtype):
        return (
            f"{name} uses another form of attention: expected {layers} attention calls that reproduce the stock "
            f"output, got {session.calls} calls and a relative error of {number(off, 1)}"
        )
    return None


@torch.no_grad()
def _not_rerun(stack: Stack, inputs: Inputs) -> str | None:
    """Return why blocks cannot be rerun from a state in the middle, or None."""
    if not len(stack):
        return "its blocks are not kept in one list"
    outputs: dict[int, Tensor] = {}

    def keeping(layer: int) -> Change:
        return lambda out: outputs.setdefault(layer, out)

    try:
        with ExitStack() as hooks:
            for layer, block in enumerate(stack.blocks):
                hooks.enter_context(changed(block, keeping(layer)))
            intact, middle = stack.full(inputs), len(stack) // 2
        if (reason := unusual_states(intact.states, inputs)) is not None:
            return reason
        for layer, state in enumerate(intact.states[1:-1]):  # RWKV halves the states after some blocks
            if relative_difference(state, outputs[layer].to(state.device)) > rounding_tolerance(state.dtype):
                return f"the model changes the states between the blocks {layer} and {layer + 1}"
        runner = BlockRunner(stack.checkpoint, inputs, stack.session)
        others = few_windows(inputs, intact.states[0].shape[1])[0 if stack.checkpoint.batched else 1 :]
        intact = runner.full(others)
        again = runner.output(runner.through(range(middle, len(stack)), intact.states[middle], others), others)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # as with Reformer
        return f"its blocks do not return hidden states alone: {short(error)}"
    if relative_difference(again, intact.output) > rounding_tolerance(again.dtype):
        return "its blocks need other inputs than the hidden states before them"
    return None


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return max|a − b| / max|b|."""
    return float((a.float() - b.float()).abs().amax() / b.float().abs().amax().clamp(min=1e-30))


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding can cause over many layers."""
    return 1000 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** (1 if dtype.itemsize > 2 else 0.8)
