"""A short look before the long work: is every layer seen, is what is seen exact, can blocks be run one by one?"""

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._format import number
from depthgauge.checkpoints.interface import Session, attending
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.library import CheckpointError, quiet
from depthgauge.checkpoints.load import Checkpoint

TOKENS = 32
"""Tokens a probe looks at."""


def probe(checkpoint: Checkpoint, ids: Int[Tensor, "1 n"]) -> str | None:
    """Raise if the attention of a checkpoint cannot be observed; return why its blocks cannot be rerun, or None.

    The output under our attention is held against the stock one, so that an argument of a new architecture that we
    do not know of is found here and not believed.
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
                f"{name} bypasses transformers' attention interface: {seen} of its {checkpoint.layers} layers were "
                "seen there, so that it cannot be observed"
            )
        off = _difference(ours.output, stock)
        if seen > checkpoint.layers or off > _tolerance(stock.dtype):
            raise CheckpointError(
                f"{name} attends in a way that is not understood: {seen} attention calls in {checkpoint.layers} "
                f"layers, and outputs off by {number(off, 1)} of their size"
            )
        if not len(stack):
            return "its blocks are not kept in one list"
        middle = len(stack) // 2
        again = stack.run(ids, start=middle, state=ours.states[middle])
        if _difference(again, ours.output) > _tolerance(stock.dtype):
            return "its blocks need more than the state before them"
    return None


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((a.float() - b.float()).abs().amax() / b.float().abs().amax().clamp(min=1e-30))


def _tolerance(dtype: torch.dtype) -> float:
    """What rounding may account for over many layers."""
    return 1000 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** (1 if dtype.itemsize > 2 else 0.8)
