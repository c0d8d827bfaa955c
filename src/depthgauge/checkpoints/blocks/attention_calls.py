"""Attention functions that transformers calls: one that is observed, and `dg.attention`.

A transformers model calls the attention function that is registered under the name `config._attn_implementation`. A
mask function must be registered under the same name. Without one, transformers passes `None` as the mask, and the
outputs of padded or windowed models are wrong.

- The observed one is exact, and is computed in blocks of rows.
- `dg.attention` has the name `depthgauge`. In layers with full or causal attention, every head whose scores are proved
  to be small is computed by a polynomial. Padding masks, sliding windows and capped scores are computed exactly.
  `layer_plan` lists the polynomial heads.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.format import number
from depthgauge.checkpoints.source.library import CheckpointError, quiet, transformers
from depthgauge.fast_attention.attention import Attention, attention_plan
from depthgauge.results.gauge_record import FastPlan
from depthgauge.results.record import finite

# --- An observable attention implementation for transformers: exact, computed in blocks of rows ----------------------

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


# --- `dg.attention` as an attention implementation of transformers, named `depthgauge` -------------------------------

FAST_NAME = "depthgauge"
TOLERANCE = 1e-3
_UNSUPPORTED = ("head_mask", "position_bias", "s_aux")


def register_attention(tolerance: float = TOLERANCE) -> None:
    """Register `attention` with transformers as the attention implementation `depthgauge`.

    Call `model.set_attn_implementation("depthgauge")` afterwards to use it. Every attention output of the model is then
    within `tolerance` × range(v) of exact attention, plus rounding. Every attention layer has an `Attention` object of
    its own: layers of a model have the same shapes, and one object would let a layer with large scores make the next
    layers exact. Registering again replaces the tolerance for all models that use the implementation.

    Args:
        tolerance: The largest error of an output entry, as a fraction of the range of its values.

    Raises:
        InputError: The tolerance is not a positive number.
        CheckpointError: transformers is not installed, or, when a model runs, a layer passes an argument that the
            implementation does not support.
    """
    unremembered = Attention(tolerance)  # code compiled by torch.compile is exact, so that nothing is remembered
    objects: WeakKeyDictionary[nn.Module, Attention] = WeakKeyDictionary()
    library = transformers()
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for name in _UNSUPPORTED:
            if others.get(name) is not None:
                raise CheckpointError(
                    f"the attention implementation {FAST_NAME!r} does not support {name}, which a layer of this model "
                    'uses; choose another implementation, for example model.set_attn_implementation("eager")'
                )
        # As in transformers' own sdpa implementation: without a mask, the module decides between causal and full.
        is_causal_module = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(is_causal_module) and attention_mask is None and query.shape[2] > 1
        if softcap is not None:  # a capped score is not a polynomial of q·k
            n, m = query.shape[2], key.shape[2]
            visible = torch.ones(1, 1, n, m, dtype=torch.bool, device=query.device).tril() if causal else attention_mask
            out = attention_call(query, key, value, visible, scaling, softcap).output()
        else:
            attend = unremembered if torch.compiler.is_compiling() else objects.get(module)
            if attend is None:
                attend = objects[module] = Attention(tolerance)
            is_grouped = query.shape[1] != key.shape[1]
            found = attend(query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=is_grouped)
            assert isinstance(found, Tensor)
            out = found
        return out.transpose(1, 2).contiguous(), None

    library.AttentionInterface.register(FAST_NAME, forward)
    library.AttentionMaskInterface.register(FAST_NAME, sdpa_mask)


def layer_plan(call: AttentionCall) -> FastPlan:
    """Return the polynomial heads of a layer for the first sequence of the batch, and the proved bounds on all scores.

    The line names the most frequent reason why the other heads are computed exactly.
    """
    causal = call.mask is not None and _is_causal(call.mask)
    fast: tuple[int, ...] = ()
    bounds: tuple[float, ...] = ()
    if call.softcap is not None:
        why = "its scores are capped"
    elif call.mask is not None and not causal:
        why = "its mask is neither causal nor empty"
    else:
        q, k, v = (x[0].contiguous() for x in (call.query, call.key, call.value))
        heads = attention_plan(q, k, v, None, 0.0, causal, tolerance=TOLERANCE, scale=call.scale).heads
        fast = tuple(h for h, head in enumerate(heads) if head.path == "polynomial")
        bounds = tuple(head.bound_after for head in heads)
        reasons = Counter(head.why for head in heads if head.path != "polynomial").most_common(1)
        why = reasons[0][0] if reasons else ""
    which = f"heads {', '.join(map(str, fast))}" if fast else "no head"
    sizes = f"B from {number(min(bounds))} to {number(max(bounds))}" if bounds else ""
    others = "; ".join(part for part in (sizes, why) if part)
    line = f"layer {call.layer}: {which} of {call.query.shape[1]}" + (f" ({others})" if others else "")
    return FastPlan(heads=fast, bounds=tuple(map(finite, bounds)), line=line)


def _is_causal(mask: Tensor) -> bool:
    n, m = mask.shape[-2:]
    allowed = mask > torch.finfo(mask.dtype).min / 2
    return n == m and bool((allowed == torch.ones(n, m, dtype=torch.bool, device=mask.device).tril()).all())
