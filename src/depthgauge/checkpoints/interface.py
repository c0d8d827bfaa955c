"""Attention as transformers calls it, computed here: exactly, in blocks of rows, and open to a watcher.

A model calls the function registered under its `_attn_implementation`. The registry alone is half of it: without a mask
function under the same name the library hands over no mask at all, and padded or windowed models come out wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from depthgauge.checkpoints.library import CheckpointError, quiet, transformers

NAME = "depthgauge-observed"
BLOCK_ENTRIES = 2**22
"""Scores held at once, all heads together (16 MB in float32)."""


@dataclass(frozen=True)
class RowBlock:
    """Rows `start` to `stop` of one layer's attention, all heads.

    `scores` are those softmax sees where `visible`; `p` is softmax of them. `visible` is None where every row sees
    all, and one of it serves all heads.
    """

    start: int
    stop: int
    scores: Float[Tensor, "batch heads rows keys"]
    visible: Bool[Tensor, "batch masks rows keys"] | None
    p: Float[Tensor, "batch heads rows keys"]


@dataclass(frozen=True)
class AttentionCall:
    """What one attention layer was called with: softm(cap(β q kᵀ) + mask) v, with cap(s) = c·tanh(s/c) if there is one.

    `key` and `value` have as many heads as `query` (shared ones are repeated); `mask` is added to the scores, 0 where a
    row sees a key and the least number of its type where it does not.
    """

    layer: int
    query: Float[Tensor, "batch heads n k"]
    key: Float[Tensor, "batch heads keys k"]
    value: Float[Tensor, "batch heads keys v"]
    mask: Float[Tensor, "#batch #heads n keys"] | None
    scale: float
    softcap: float | None = None

    def blocks(self, entries: int | None = None) -> Iterator[RowBlock]:
        """The attention of all heads, a block of rows at a time, at most about `entries` numbers each."""
        entries = BLOCK_ENTRIES if entries is None else entries
        batch, heads, n, _ = self.query.shape
        keys = self.key.shape[-2]
        rows = max(1, entries // max(1, batch * heads * keys))
        wide = torch.promote_types(self.query.dtype, torch.float32)
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            scores = (self.query[..., start:stop, :] @ self.key.mT) * self.scale
            if self.softcap is not None:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            visible = None
            if self.mask is not None:
                mask = self.mask[..., start:stop, :keys]
                visible = (mask > torch.finfo(mask.dtype).min / 2).expand(batch, -1, -1, -1)
                scores = scores + mask
            yield RowBlock(start, stop, scores, visible, torch.softmax(scores, dim=-1, dtype=wide).to(self.query.dtype))

    def output(self) -> Float[Tensor, "batch heads n v"]:
        """P v, by torch's fused attention where nothing stands against it."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(self.query, self.key, self.value, self.mask, scale=self.scale)
        return torch.cat([block.p @ self.value for block in self.blocks()], dim=-2)

    def uniform(self) -> "AttentionCall":
        """The same layer with every score zero: plain averaging of what each row sees."""
        return replace(self, query=torch.zeros_like(self.query))


Watch = Callable[[AttentionCall], Tensor]
"""Sees a call and returns its output P v `[batch, heads, n, v]`."""


@dataclass
class Session:
    """What happens at the attention of a model just now.

    Layers are told apart by the order of their calls, since some modules carry no index and some serve several layers.
    """

    watch: Watch | None = None
    uniform: int | None = None
    calls: int = 0

    def begin(self, *, first: int = 0, watch: Watch | None = None, uniform: int | None = None) -> None:
        """Make ready for a forward pass whose first attention is that of layer `first`."""
        self.calls, self.watch, self.uniform = first, watch, uniform

    def attend(self, call: AttentionCall) -> Tensor:
        """The output of one call."""
        call = replace(call, layer=self.calls)
        self.calls += 1
        if call.layer == self.uniform:
            call = call.uniform()
        return call.output() if self.watch is None else self.watch(call)


@dataclass
class _Stack:
    sessions: list[Session] = field(default_factory=list)


_ACTIVE = _Stack()


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> AttentionCall:
    """The arguments of transformers' attention interface, made plain: heads repeated, mask additive, scale a number."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if mask is not None and mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, hidden)
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
    """The attention function registered with transformers; returns P v as `[batch, n, heads, v]`."""
    if module.training and others.get("dropout"):
        raise CheckpointError("attention is observed without dropout; call model.eval() first")
    call = attention_call(query, key, value, attention_mask, scaling, softcap)
    out = _ACTIVE.sessions[-1].attend(call) if _ACTIVE.sessions else call.output()
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make our attention, and the additive masks it needs, known to transformers under our name."""
    library = transformers()
    from transformers.masking_utils import eager_mask

    library.AttentionInterface.register(NAME, observed_attention)
    library.AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def attending(model: Any) -> Iterator[Session]:
    """Let `model` attend through us; its own implementation is put back afterwards."""
    register()
    own, session = model.config._attn_implementation, Session()
    with quiet():
        model.set_attn_implementation(NAME)
    _ACTIVE.sessions.append(session)
    try:
        yield session
    finally:
        _ACTIVE.sessions.remove(session)
        with quiet():
            model.set_attn_implementation(own)
