"""A quick check before a long computation: can attention be observed exactly, and can blocks be rerun?"""

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._format import counted, number
from depthgauge.checkpoints.interface import Session, attending
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.library import CheckpointError, quiet
from depthgauge.checkpoints.load import Checkpoint

TOKENS = 32
"""Number of tokens used."""


def probe(checkpoint: Checkpoint, ids: Int[Tensor, "1 n"]) -> str | None:
    """Check that the attention of a checkpoint can be observed and its blocks rerun.

    The output with observed attention is compared with the output of stock eager attention, on `TOKENS` tokens. An
    architecture that passes an unknown argument to its attention is thereby detected and refused.

    Returns:
        The reason why blocks cannot be rerun, or None if they can.
    """
    ids, model, name = ids[:, :TOKENS], checkpoint.model, type(checkpoint.model).__name__
    own = model.config._attn_implementation
    with quiet():
        model.set_attn_implementation("eager")
        stock = Stack(checkpoint, Session()).run(ids)
        model.set_attn_implementation(own)
    with attending(model) as session:
        stack = Stack(checkpoint, session)
        ours = stack.full(ids)
        seen = session.calls
        if seen < checkpoint.layers:
            raise CheckpointError(
                f"{name} bypasses transformers' attention interface: {seen} of its "
                f"{counted(checkpoint.layers, 'layer')} call it, so its attention cannot be observed and it cannot "
                "be gauged on text"
            )
        off = relative_difference(ours.output, stock)
        if seen > checkpoint.layers or off > rounding_tolerance(stock.dtype):
            raise CheckpointError(
                f"{name} uses an unsupported form of attention: expected {checkpoint.layers} attention calls that "
                f"reproduce the stock output, got {seen} calls and a relative error of {number(off, 1)}"
                + ("; --weights-only works without observing the attention" if checkpoint.family else "")
            )
        if not len(stack):
            return "its blocks are not kept in one list"
        middle = len(stack) // 2
        again = stack.run(ids, start=middle, state=ours.states[middle])
        if relative_difference(again, ours.output) > rounding_tolerance(stock.dtype):
            return "its blocks need other inputs than the hidden states before them"
    return None


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return max|a − b| / max|b|."""
    return float((a.float() - b.float()).abs().amax() / b.float().abs().amax().clamp(min=1e-30))


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding can cause over many layers."""
    return 1000 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** (1 if dtype.itemsize > 2 else 0.8)
