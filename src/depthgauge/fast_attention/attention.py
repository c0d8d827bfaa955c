"""`attention`, `attention_plan` and `Attention`: torch's attention with a guaranteed error, fast for small scores."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from depthgauge.base.errors import InputError, require_positive, require_type
from depthgauge.fast_attention import exact_path as exact
from depthgauge.fast_attention.bounds import Survey
from depthgauge.fast_attention.call import (
    Call,
    Flags,
    Tensors,
    arguments_of,
    autocast_tensors,
    call_of,
    filled,
    is_autocast,
    is_capturing,
    is_watched,
    left_out,
    with_tokens,
    without_autocast,
)
from depthgauge.fast_attention.plan import (
    AttentionPlan,
    PreparedCall,
    backend_for,
    decide,
    decided,
    exact_plan,
    prepared_for,
    shapes_of,
)
from depthgauge.fast_attention.polynomial_path import Batch

MOST_CALLS = 4096
"""The most kinds of calls that an `Attention` object remembers. With more, it forgets all."""
Output = Tensor | tuple[Tensor, Tensor]
Prepared = dict[tuple[Call, tuple[Any, ...]], PreparedCall]
"""What an object remembers, by call and `left_out`."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    tolerance: float = 1e-3,
    scale: float | None = None,
    key_padding: Tensor | None = None,
    enable_gqa: bool = False,
    force: str | None = None,
    return_bound: bool = False,
    plan: AttentionPlan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softm(s q kᵀ) v with a guaranteed error, by a polynomial where the scores are small.

    Every entry is within `tolerance` × range(v) of exact attention in real arithmetic, where range(v) is max − min of
    the head's value column over its keys. Rounding adds the allowance that `attention_plan` reports, which for bfloat16
    can be larger than the tolerance. If q or k require gradients, the tolerance holds for the gradients as well,
    relative to their largest possible size (docs/tasks/fast-attention.md). Heads with large scores are exact.

    The same arguments always take the same path. Where a polynomial cannot pay for the numbers of tokens, a call is
    exact and its numbers are not examined; otherwise one pass over q, k and v bounds the scores, and the path is chosen
    from them. `Attention` is an object that saves this pass where it did not help before. Inside torch.compile and
    CUDA graph capture, calls are exact unless a plan is given. Under torch.utils.checkpoint, calls with gradients are
    exact unless a plan or `force` is given.

    Args:
        q: Queries [..., heads, n, d].
        k: Keys [..., heads, m, d]. Axes before the last two are broadcast as in torch's attention, for example one key
            head for all query heads.
        v: Values [..., heads, m, e].
        attn_mask: A mask as in `torch.nn.functional.scaled_dot_product_attention`. It selects the exact path.
        dropout_p: The dropout probability. A positive probability selects the exact path.
        is_causal: Whether row i attends to keys j ≤ i only.
        tolerance: The largest error of an output entry, as a fraction of the range of its values.
        scale: The factor s of q·k; 1/√d if None.
        key_padding: Bool tensor [..., m], True at padding keys, which no row attends to.
        enable_gqa: Whether q may have more heads than k and v; consecutive query heads then share a key head.
        force: `exact` or `polynomial` to force a path; None chooses by predicted cost.
        return_bound: Whether to return a bound for every row as well.
        plan: A plan of tensors with the same shapes and options. Its decision is used without looking at the numbers;
            the device checks that it holds, and `plan.check()` raises an error later if it did not.

    Returns:
        The output [..., heads, n, e]. With `return_bound`, the output and a tensor [..., heads, n]: row i differs from
        exact attention by at most bound[i] × range(v), rounding included, plus the error of storing the result in its
        dtype. The bound is 0 for rows that are computed exactly.

    Raises:
        InputError: An argument is invalid, the polynomial path is forced where it does not exist, or the plan was made
            for other arguments.
        GuaranteeError: The polynomial path is forced where it cannot meet the tolerance.

    >>> q = k = v = torch.eye(4)
    >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> bool((attention(q, k, v) - exact).abs().max() < 1e-3)
    True
    """
    flags = dropout_p, is_causal, tolerance, scale, enable_gqa, force
    return attend(Tensors(q, k, v, key_padding, attn_mask), flags, return_bound, plan)


def attention_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    tolerance: float = 1e-3,
    scale: float | None = None,
    key_padding: Tensor | None = None,
    enable_gqa: bool = False,
    force: str | None = None,
) -> AttentionPlan:
    """Return what `attention` would do with the same arguments, and why.

    The plan lists for every key head the proved bound B on the scores, the degree, the path and the predicted costs.

    Args:
        q: Queries [..., heads, n, d].
        k: Keys [..., heads, m, d].
        v: Values [..., heads, m, e].
        attn_mask: As in `attention`.
        dropout_p: As in `attention`.
        is_causal: As in `attention`.
        tolerance: The largest error of an output entry, as a fraction of the range of its values.
        scale: The factor s of q·k; 1/√d if None.
        key_padding: Bool tensor [..., m], True at padding keys.
        enable_gqa: As in `attention`.
        force: `exact` or `polynomial` to force a path; None chooses by predicted cost.

    Returns:
        A `AttentionPlan`. Printing it shows a table.

    Raises:
        InputError: An argument is invalid, or the polynomial path is forced where it does not exist.
        GuaranteeError: The polynomial path is forced where it cannot meet the tolerance.
    """
    given = _as_cast(Tensors(q, k, v, key_padding, attn_mask))
    given, call = call_of(given, (dropout_p, is_causal, tolerance, scale, enable_gqa, force))
    reason = exact.why_exact(call, given)
    if reason is not None:
        return exact_plan(call, given, reason)
    with on_device(q), without_autocast(q):
        return decide(call, given.flat(call)).plan(given)


class Attention:
    """Attention with a guaranteed error that remembers decisions by shape. It is called like `attention`.

    A call whose numbers of tokens are too small for a polynomial to pay is exact, and its numbers are not examined. Any
    other call is examined as in `attention`, and a polynomial is used only where the numbers prove the tolerance. If
    exact attention was chosen for all heads, the next calls with the same shapes, dtype and options are exact without
    being examined: 1 call, and twice as many after every further such choice, up to 1,024; `reset` ends this.

    Args:
        tolerance: The largest error of an output entry, as a fraction of the range of its values.

    Raises:
        InputError: The tolerance is not a positive number.

    >>> import torch
    >>> attend = Attention(tolerance=1e-3)
    >>> q = k = v = torch.eye(4)
    >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> bool((attend(q, k, v) - exact).abs().max() < 1e-3)
    True
    """

    def __init__(self, tolerance: float = 1e-3) -> None:
        self.tolerance = require_positive(
            "tolerance", tolerance, "the largest error of an output entry, as a fraction of the range of its values"
        )
        self._calls: Prepared = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        key_padding: Tensor | None = None,
        enable_gqa: bool = False,
        force: str | None = None,
        return_bound: bool = False,
        plan: AttentionPlan | None = None,
    ) -> Output:
        """Compute softm(s q kᵀ) v within the tolerance. The arguments and errors are those of `attention`."""
        flags = dropout_p, is_causal, self.tolerance, scale, enable_gqa, force
        return attend(Tensors(q, k, v, key_padding, attn_mask), flags, return_bound, plan, self._calls)

    def reset(self) -> None:
        """Forget all decisions: the next call of every shape is examined again."""
        self._calls.clear()

    def __repr__(self) -> str:
        return f"Attention(tolerance={self.tolerance:g})"


# --- how a call travels -----------------------------------------------------------------------------------------------


def attend(
    given: Tensors, flags: Flags, return_bound: bool, plan: AttentionPlan | None, calls: Prepared | None = None
) -> Output:
    """Compute `attention`. `calls` is what an object remembers: it looks less often after refusals."""
    if isinstance(given.q, Tensor) and is_autocast(given.q):
        given = _as_cast(given)
        with without_autocast(given.q):
            return _attend(*arguments_of(given, flags), return_bound, plan, calls)
    return _attend(*arguments_of(given, flags), return_bound, plan, calls)


def _as_cast(given: Tensors) -> Tensors:
    """Return the tensors as torch's attention gets them under autocast."""
    return Tensors(*autocast_tensors(*given)) if isinstance(given.q, Tensor) and is_autocast(given.q) else given


def _attend(
    given: Tensors, call: Call, return_bound: bool, plan: AttentionPlan | None, calls: Prepared | None
) -> Output:
    """Compute a call by a plan, by polynomials, or exactly. The call has no tokens yet: see `arguments_of`."""
    if plan is not None:
        require_type("plan", plan, AttentionPlan, "what attention_plan returns, or None")
        if return_bound or call.force is not None:
            raise InputError("plan cannot be combined with force or return_bound; a plan has its own guarantee")
        if given.mask is not None or "dropout_p" in dict(call.named) or given.padding is not None:
            raise InputError("plan cannot be combined with a mask, dropout or padding; call attention without plan")
        if plan.path != "exact":
            return followed(with_tokens(call, given), given, plan)
    elif not torch.compiler.is_compiling():
        found = polynomial(call, given, return_bound, calls)
        if found is not None:
            return found
    elif call.force == "polynomial":
        raise InputError(
            'force="polynomial" is not possible inside torch.compile: the decision depends on numbers; make a plan '
            "with attention_plan before and pass it as plan"
        )
    return _exact(call, given, return_bound)


def _exact(call: Call, given: Tensors, return_bound: bool) -> Output:
    out = exact.call_torch(call, given)
    return (out, out.new_zeros(out.shape[:-1])) if return_bound else out


def polynomial(call: Call, given: Tensors, return_bound: bool, calls: Prepared | None) -> Output | None:
    """Compute a call in which a polynomial may be chosen for some head. Return None if the call is exact.

    No other function decides this. A call is exact without a look at its numbers if its options, its sizes or the modes
    of torch allow nothing else, or if `calls` lets it wait. A GPU computes exact attention while the host waits for the
    first look. This output is returned if no polynomial is chosen, and lost where one is found for the first time.
    """
    q, k, v, _, _ = given
    if call.is_exact or q.shape[-2] * k.shape[-2] <= call.most_pairs:
        return None
    prepared = _prepared(call, given, calls)
    call = prepared.call
    # Where no polynomial pays, numbers need not be read; in the capture of a CUDA graph they cannot be read.
    if call.force is None and (not prepared.is_examined or is_capturing(q) or (calls and prepared.is_waiting())):
        return None
    if exact.why_exact(call, given) is not None:
        return None
    is_usual = not return_bound and prepared.kernels is not None and _is_usual(call, given)
    with on_device(q):
        flat, whole = given if is_usual else given.flat(call), None
        if (look := prepared.look(flat)) is not None:
            whole = _exact(call, given, return_bound) if q.is_cuda else None
            if look():
                prepared.record(is_refused=True)
                return whole
        found = prepared.usual(q, k, v) if is_usual else prepared.backend(2).survey(call, flat.detach())
        if isinstance(found, Tensor):
            prepared.record(is_refused=False)
            return found
        flat = given.flat(call) if is_usual else flat
        decision = decided(prepared, flat, found)
        prepared.record(is_refused=decision is None)
        if decision is None:
            return whole
        out, bound = decision.run(flat, return_bound)
    shape = q.shape[:-1]
    out = out.reshape(*shape, call.e)
    return out if bound is None else (out, bound.reshape(shape))


def _prepared(call: Call, given: Tensors, calls: Prepared | None) -> PreparedCall:
    """Return what was prepared for a call without tokens, by an object if `calls` is given."""
    tokens = left_out(given)
    if calls is None:
        return prepared_for(call, *tokens)
    prepared = calls.get((call, tokens))
    if prepared is None:
        if len(calls) >= MOST_CALLS:
            calls.clear()
        prepared = calls[call, tokens] = PreparedCall(filled(call, *tokens))
    return prepared


def _is_usual(call: Call, given: Tensors) -> bool:
    """Return whether q, k and v are contiguous on a GPU, all keys count, and no mode of torch needs another path."""
    q, k, v, padding, _ = given
    if not q.is_cuda or padding is not None or k.shape[-2] != call.m:
        return False
    is_laid_out = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    return is_laid_out and not is_watched(q, k, v) and not torch.cuda.is_current_stream_capturing()


def on_device(tensor: object) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on the GPU of this tensor."""
    if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


# --- calls that follow a plan -----------------------------------------------------------------------------------------


def followed(call: Call, given: Tensors, plan: AttentionPlan) -> Tensor:
    """Compute attention by a plan with one polynomial for all heads: no number is copied to the host.

    The device checks that the scores of every call stay within the largest bound that the polynomial covers, and counts
    the calls that do not. Such calls can be captured in a CUDA graph.

    Raises:
        InputError: The plan cannot be followed, or was made for other arguments.
    """
    own, shapes = plan.fixed, shapes_of(given)
    if isinstance(own, str) or plan.violations is None:
        raise InputError(f"the plan cannot be followed: {own}; call attention without plan")
    if shapes != plan.shapes or call.dtype != plan.dtype:
        raise InputError(
            f"the plan was made for q, k, v of shapes {_listed(plan.shapes)} in {plan.dtype}, got {_listed(shapes)} in "
            f"{call.dtype}; make a plan for these tensors with attention_plan"
        )
    if _options(call) != _options(plan.call):
        raise InputError(
            f"the plan was made with (is_causal, tolerance, scale, enable_gqa) = {_options(plan.call)}, got "
            f"{_options(call)}; make a plan with the same options"
        )
    wanted = [x.requires_grad and torch.is_grad_enabled() for x in given[:3]]
    if any(wanted[:2]) and not plan.call.gradients:
        raise InputError(
            "the plan was made for tensors that require no gradients; make it with tensors that require them, or call "
            "attention under torch.no_grad()"
        )
    numbers = plan.violations, own.coefficients, own.bound, *plan.norms
    if torch.compiler.is_compiling():
        if any(wanted):
            raise InputError("a plan has no gradients inside torch.compile; call attention without plan there")
        causal, _, scale, is_grouped = _options(call)
        out: Tensor = planned_attention(*given[:3], *numbers, scale, causal, is_grouped)
        return out
    return _followed(call, given, *numbers)


def _options(call: Call) -> tuple[bool, float, float, bool]:
    """Return is_causal, tolerance, scale and enable_gqa."""
    return call.causal, call.tolerance, call.scale, "enable_gqa" in dict(call.named)


def _listed(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _followed(
    call: Call,
    given: Tensors,
    violations: Tensor,
    coefficients: Sequence[float],
    bound: float,
    query: Sequence[float],
    key: Sequence[float],
) -> Tensor:
    """Compute attention by one polynomial and add 1 to `violations` if the scores may exceed `bound`.

    The norms of q and k, `query` and `key`, only balance the two before they are summed.
    """
    flat, survey = given.flat(call), Survey(call)
    survey.query, survey.key = list(query), list(key)
    with without_autocast(flat.q):
        with torch.no_grad():
            tensors = flat.detach()
            survey.query_centre = survey.key_centre = flat.q.new_zeros(call.heads, call.d, dtype=call.working)
            batch = Batch(call, (tuple(coefficients),) * call.heads, (0,) * call.heads, survey, tensors)
            backend = backend_for(call, batch.degree)
            if is_capturing(flat.q) and not backend.is_capturable(call):
                raise InputError(
                    "this plan cannot be followed in a CUDA graph: only bfloat16 tensors of widths that the Triton "
                    'kernels support can; use force="exact" inside the graph'
                )
            violations += backend.is_outside(call, tensors, bound)
        out, _ = backend.compute(batch, *flat[:3], False)
    return out.reshape(*given.q.shape[:-1], call.e)


@torch.library.custom_op("depthgauge::planned_attention", mutates_args=("violations",))
def planned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    violations: Tensor,
    coefficients: Sequence[float],
    bound: float,
    query: Sequence[float],
    key: Sequence[float],
    scale: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Tensor:
    """Attention by a plan, as one operation of a compiled graph."""
    given, call = call_of(Tensors(q, k, v), (0.0, is_causal, 1.0, scale, enable_gqa, None))
    with torch.no_grad():
        return _followed(call, given, violations, coefficients, bound, query, key)


@planned_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_others: object) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
