"""`dg.attention` as an attention implementation of transformers, named `depthgauge`.

In layers with full or causal attention, every head whose scores are proved to be small is computed by a polynomial.
Padding masks, sliding windows and capped scores are computed exactly. `layer_plan` lists the polynomial heads.
"""

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from depthgauge.base.format import number
from depthgauge.checkpoints.interface import AttentionCall, attention_call
from depthgauge.checkpoints.library import CheckpointError, transformers
from depthgauge.fast_attention.attention import attention_plan
from depthgauge.fast_attention.remembered import Attention
from depthgauge.results.checkpoint_subject import FastPlan
from depthgauge.results.record import finite

NAME = "depthgauge"
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
                    f"the attention implementation {NAME!r} does not support {name}, which a layer of this model "
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

    library.AttentionInterface.register(NAME, forward)
    library.AttentionMaskInterface.register(NAME, sdpa_mask)


def layer_plan(call: AttentionCall, tolerance: float = TOLERANCE) -> FastPlan:
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
        heads = attention_plan(q, k, v, None, 0.0, causal, tolerance=tolerance, scale=call.scale).heads
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
