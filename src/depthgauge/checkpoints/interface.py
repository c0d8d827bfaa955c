"""An observable attention implementation for transformers: exact, computed in blocks of rows.

A transformers model calls the attention function that is registered under the name `config._attn_implementation`. A
mask function must be registered under the same name. Without one, transformers passes `None` as the mask, and the
outputs of padded or windowed models are wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from depthgauge.base.array_record import ArrayRecord
from depthgauge.checkpoints.library import CheckpointError, quiet, transformers

NAME = "depthgauge-observed"
BLOCK_ENTRIES = 2**22
"""Largest number of scores in memory at once, over all heads (16 MB in float32)."""
_SESSION = "_depthgauge_session"
"""Attribute of a model's modules that holds the session to which their attention calls go."""


@dataclass(frozen=True, eq=False, repr=False)
class RowBlock(ArrayRecord):
    """Rows `start` to `stop` (exclusive) of one layer's attention, for all heads.

    - `scores`: the input of softmax, mask included
    - `p`: softmax(scores)
    """

    start: int
    stop: int
    scores: Float[Tensor, "batch heads rows keys"]
    p: Float[Tensor, "batch heads rows keys"]


@dataclass(frozen=True, eq=False, repr=False)
class AttentionCall(ArrayRecord):
    """The arguments of one attention layer, which computes softmax(cap(β q kᵀ) + mask) v.

    - `layer`: index of the layer
    - `query`, `key`, `value`: q, k and v; shared key–value heads are repeated, so all have the same number of heads
    - `mask`: 0 where a row attends to a key, the smallest finite number of its dtype elsewhere; None attends everywhere
    - `scale`: β
    - `softcap`: c in cap(s) = c·tanh(s/c); None means cap(s) = s
    """

    layer: int
    query: Float[Tensor, "batch heads n k"]
    key: Float[Tensor, "batch heads keys k"]
    value: Float[Tensor, "batch heads keys v"]
    mask: Float[Tensor, "#batch #heads n keys"] | None
    scale: float
    softcap: float | None = None

    def ranges(self) -> list[tuple[int, int]]:
        """Return (start, stop) of blocks of rows, with at most max(BLOCK_ENTRIES, one row) scores of all heads each."""
        batch, heads, n, _ = self.query.shape
        rows = max(1, BLOCK_ENTRIES // max(1, batch * heads * self.key.shape[-2]))
        return [(start, min(start + rows, n)) for start in range(0, n, rows)]

    def scores(self, start: int, stop: int) -> Float[Tensor, "batch heads rows keys"]:
        """Return the input of softmax for the rows from `start` to `stop` (exclusive), mask included."""
        scores = (self.query[..., start:stop, :] @ self.key.mT) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores if self.mask is None else scores + self.mask[..., start:stop, : self.key.shape[-2]]

    def visible(self, start: int, stop: int) -> Bool[Tensor, "batch masks rows keys"] | None:
        """Return whether the mask lets the rows from `start` to `stop` attend to each key; None without a mask."""
        if self.mask is None:
            return None
        mask = self.mask[..., start:stop, : self.key.shape[-2]]
        return (mask > torch.finfo(mask.dtype).min / 2).expand(self.query.shape[0], -1, -1, -1)

    def weights(self, scores: Float[Tensor, "batch heads rows keys"]) -> Float[Tensor, "batch heads rows keys"]:
        """Return softmax(scores), computed in at least single precision."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        return torch.softmax(scores, dim=-1, dtype=wide).to(self.query.dtype)

    def blocks(self) -> Iterator[RowBlock]:
        """Yield the attention of all heads in blocks of rows."""
        for start, stop in self.ranges():
            scores = self.scores(start, stop)
            yield RowBlock(start, stop, scores, self.weights(scores))

    def output(self) -> Float[Tensor, "batch heads n v"]:
        """Return P v, computed by torch's fused attention unless the scores are capped."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(self.query, self.key, self.value, self.mask, scale=self.scale)
        return torch.cat([block.p @ self.value for block in self.blocks()], dim=-2)

    def uniform(self) -> "AttentionCall":
        """Return the same call with q = 0: every score is 0, so each row averages the values it attends to."""
        return replace(self, query=torch.zeros_like(self.query))


Watch = Callable[[AttentionCall], Tensor]
"""Observes a call and returns its output P v `[batch, heads, n, v]`."""


@dataclass
class Session:
    """What to do at each attention call of a model.

    Layers are counted in the order of their calls, because some modules have no layer index and some serve several
    layers.

    - `watch`: computes the output of each call; None computes it without observation
    - `uniform`: the layer whose attention is made uniform, or None
    - `calls`: index of the next layer to be called
    """

    watch: Watch | None = None
    uniform: int | None = None
    calls: int = 0

    def begin(self, *, first: int = 0, watch: Watch | None = None, uniform: int | None = None) -> None:
        """Prepare for a forward pass whose first attention call belongs to layer `first`."""
        self.calls, self.watch, self.uniform = first, watch, uniform

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the output of one call and advance to the next layer."""
        call = replace(call, layer=self.calls)
        self.calls += 1
        if call.layer == self.uniform:
            call = call.uniform()
        return call.output() if self.watch is None else self.watch(call)


def attention_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> AttentionCall:
    """Normalize the arguments of transformers' attention interface.

    Shared key–value heads are repeated, a boolean mask becomes an additive one, a mask with one row for all queries
    (LayoutLM) has that row for each, and a missing scale becomes 1/√k.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if mask is not None and mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, hidden)
    if mask is not None and mask.shape[-2] == 1:
        mask = mask.expand(*mask.shape[:-2], query.shape[-2], mask.shape[-1])
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return AttentionCall(0, query, key, value, mask, scale, None if softcap is None else float(softcap))


def observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute P v as `[batch, n, heads, v]` in the session of `module`; transformers calls this function."""
    if module.training and others.get("dropout"):
        raise CheckpointError("attention cannot be observed with dropout; call model.eval() first")
    call = attention_call(query, key, value, attention_mask, scaling, softcap)
    session: Session | None = getattr(module, _SESSION, None)
    out = call.output() if session is None else session.attend(call)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Register `observed_attention` and the additive masks it needs with transformers, under `NAME`."""
    library = transformers()
    from transformers.masking_utils import eager_mask

    library.AttentionInterface.register(NAME, observed_attention)
    library.AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def attending(model: Any) -> Iterator[Session]:
    """Send the attention calls of `model` to a new session; restore its own implementation afterwards.

    The session belongs to the model, so several models can be observed at the same time. Within nested contexts of one
    model, the innermost session receives the calls.
    """
    register()
    own, session = model.config._attn_implementation, Session()
    modules = list(model.modules())
    outer = [module.__dict__.get(_SESSION) for module in modules]
    with quiet():
        model.set_attn_implementation(NAME)
    for module in modules:
        module.__dict__[_SESSION] = session  # much faster than the `__setattr__` of a module
    try:
        yield session
    finally:
        for module, before in zip(modules, outer, strict=True):
            if before is None:
                del module.__dict__[_SESSION]
            else:
                module.__dict__[_SESSION] = before
        with quiet():
            model.set_attn_implementation(own)
