"""`attention` and `attention_plan`: scaled_dot_product_attention with a guaranteed error, fast for small scores."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from depthgauge.errors import InputError, require_type
from depthgauge.fast_attention.autograd import is_autocast, without_autocast
from depthgauge.fast_attention.backends import notes, repeated, survey_of
from depthgauge.fast_attention.call_kinds import CallKinds, ExactCalls
from depthgauge.fast_attention.decide.chooser import Chooser, is_never_worth_it
from depthgauge.fast_attention.decide.decision import Decision
from depthgauge.fast_attention.exact_path import (
    READ_BYTES,
    WATCHED,
    capturable,
    direct,
    exact,
    exact_attention,
    exact_reason,
    have_addresses,
    have_even_strides,
    is_known,
)
from depthgauge.fast_attention.following import fixed, followed
from depthgauge.fast_attention.plan import AttentionPlan, exact_plan
from depthgauge.fast_attention.polynomial_path import run
from depthgauge.fast_attention.problem import (
    Kind,
    Options,
    Outline,
    Problem,
    Request,
    autocast_tensors,
    broadcast,
    checked,
    kind_of,
)
from depthgauge.fast_attention.shortcut import is_always_exact

Output = Tensor | tuple[Tensor, Tensor]


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
    the head's value column over its keys. Rounding adds the allowance that `attention_plan` reports. If q or k require
    gradients, the tolerance holds for the gradients as well. Heads with large scores are computed exactly.

    The path is chosen from the entries of q, k and v. If exact attention is chosen for all heads, the next calls with
    the same shapes, dtypes and options are exact without examining the entries: 1 call, and twice as many after every
    further such choice, up to 1,024. Decoding steps, with q [batch, heads, 1, d], count as equal shapes for any number
    of keys. Inside torch.compile and CUDA graph capture, calls are exact unless a plan is given. Under
    torch.utils.checkpoint, calls with gradients are exact unless a plan or `force` is given.

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
    outline = calls = kind = None
    is_plain = type(q) is type(k) is type(v) is Tensor
    if is_plain and plan is None and not return_bound and not is_dynamo_compiling():
        # Exact calls without a decision. This code calls no functions of its own: torch's attention of a short sequence
        # takes about 30 microseconds, so that every further function call would slow it down measurably.
        try:
            rows, keys, values = q.shape, k.shape, v.shape
            tokens: tuple[object, ...] = keys, values
            is_step = rows[-2] == 1 and len(rows) == 4
            if is_step:  # decoding: with usual widths, one query is never worth a polynomial, for any number of keys
                (key_batch, key_heads, m, d), (value_batch, value_heads, own_m, e) = keys, values
                tokens = key_batch, key_heads, d, value_batch, value_heads, e, m == own_m
            outline = (
                rows, tokens, None if attn_mask is None else attn_mask.shape,
                None if key_padding is None else key_padding.shape,
                q.dtype, q.is_cuda, is_grad_enabled() and (q.requires_grad or k.requires_grad),
                dropout_p, is_causal, tolerance, scale, enable_gqa, force,
            )  # fmt: skip
            calls = _exact_calls(outline)
        except (AttributeError, TypeError, IndexError, ValueError):  # an argument is wrong, which `checked` names
            outline = calls = None
        if calls is not None and calls.left > 0:
            calls.left -= 1  # infinity stays infinity
            known = calls.direct
            try:
                if attn_mask is not None:
                    if known is not None and is_known(q, k, v, attn_mask, known) and not is_autocast(q):
                        return torch_attention(q, k, v, attn_mask, **known.arguments)
                elif known is not None and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % READ_BYTES:
                    is_whole = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
                    if (
                        not is_step
                        and (known.is_contiguous if is_whole else (q.stride(), k.stride(), v.stride()) == known.strides)
                    ) or (
                        (is_whole or have_even_strides(q, k, v))
                        and not (q.is_cuda and torch.cuda.is_current_stream_capturing())  # cuDNN may not have seen it
                    ):
                        return torch_attention(q, k, v, **known.arguments)
            except RuntimeError:
                pass  # below, it is raised again or replaced by one that names the wrong argument
            return _by_torch(
                q, k, v, (attn_mask, dropout_p, is_causal, tolerance, scale, key_padding, enable_gqa, force), calls
            )
    # A plain tuple: creating the record would cost two microseconds.
    options = attn_mask, dropout_p, is_causal, tolerance, scale, key_padding, enable_gqa, force
    if (equal := broadcast(q, k, v, enable_gqa)) is not None:
        return attention(
            *equal[:3], attn_mask, dropout_p, is_causal, tolerance=tolerance, scale=scale, key_padding=key_padding,
            enable_gqa=equal[3], force=force, return_bound=return_bound, plan=plan,
        )  # fmt: skip
    if calls is None and outline is not None and is_always_exact(q, k, v, options):
        return _by_torch(q, k, v, options, _kinds.refused(outline, is_final=True))
    if plan is not None or (outline is None and torch.compiler.is_compiling()):
        return _undecided(checked(q, k, v, Options(*options)), plan, return_bound)
    if _is_autocast(q, k, v):
        q, k, v, mask = autocast_tensors(q, k, v, attn_mask)
        with without_autocast(q):
            return attention(
                q, k, v, mask, dropout_p, is_causal, tolerance=tolerance, scale=scale, key_padding=key_padding,
                enable_gqa=enable_gqa, force=force, return_bound=return_bound,
            )  # fmt: skip
    if outline is not None and attn_mask is None and key_padding is None and have_addresses(q, k, v):
        kind = kind_of(q, k, v, outline)
    with on_device(q):
        if kind is not None and not _is_capturing(q) and (out := repeated(kind, q, k, v)) is not None:
            return out
        return _decided(checked(q, k, v, Options(*options)), outline, kind, return_bound)


_kinds = CallKinds()
_exact_calls = _kinds.exact.get
"""Returns the record of an outline, or None; bound once, because looking it up at every call takes time."""


def _is_autocast(q: object, k: object, v: object) -> bool:
    """Return whether these are tensors that torch's attention would cast before it uses them."""
    return isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and is_autocast(q)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], calls: ExactCalls) -> Tensor:
    """Compute exact attention of arguments that were not all validated."""
    mask, dropout, is_causal, tolerance, scale, padding, is_grouped, force = options
    try:
        if (mask is not None or padding is not None) and _is_autocast(q, k, v):
            # Torch would cast the mask to memory that ends with its last key, see `paired`.
            q, k, v, mask = autocast_tensors(q, k, v, mask)
            options = mask, dropout, is_causal, tolerance, scale, padding, is_grouped, force
        if padding is not None:
            return exact(checked(q, k, v, Options(*options)))
        given = mask, float(dropout), bool(is_causal), None if scale is None else float(scale), bool(is_grouped)
        # cuDNN may not have seen a decoding step with this number of keys, or tensors with these strides.
        is_new, calls.is_new = calls.is_new, False
        is_first = is_new or calls.direct is not None or q.shape[-2] == 1
        if not is_new:  # many shapes occur once, for example those of masks for a growing cache
            calls.direct = direct(q, k, v, *given)
        with capturable(is_first and _is_capturing(q)):
            return exact_attention(q, k, v, *given, is_traced=False)
    except (RuntimeError, TypeError, AttributeError, IndexError):
        checked(q, k, v, Options(*options))  # a better message than torch's if an argument is invalid
        raise


def _undecided(request: Request, plan: AttentionPlan | None, return_bound: bool) -> Output:
    """Compute `attention` without looking at numbers: by a plan, or exactly in code compiled by torch.compile."""
    options = request.options
    if plan is None:
        if options.force == "polynomial":
            raise InputError(
                'force="polynomial" is not possible inside torch.compile: the decision depends on numbers; make a plan '
                "with attention_plan before and pass it as plan"
            )
        out = exact(request)
        return (out, out.new_zeros(out.shape[:-1], dtype=torch.float64)) if return_bound else out
    require_type("plan", plan, AttentionPlan, "what attention_plan returns, or None")
    if return_bound or options.force is not None:
        raise InputError("plan cannot be combined with force or return_bound; a plan has its own guarantee")
    if options.attn_mask is not None or options.dropout_p > 0 or options.key_padding is not None:
        raise InputError("plan cannot be combined with a mask, dropout or padding; call attention without plan")
    return exact(request) if plan.path == "exact" else followed(request, plan)


def _decided(request: Request, outline: Outline | None, kind: Kind | None, return_bound: bool) -> Output:
    """Compute `attention` by a decision, and keep it for later calls of the same kind."""
    flat = bound = None
    is_forced = request.options.force == "polynomial"
    # In a capture, numbers cannot be read, not even those of the padding.
    can_decide = is_forced or not _is_capturing(request.q)
    reason = exact_reason(request) if can_decide else None
    if reason == WATCHED and outline is not None:
        _kinds.refused(outline)
    elif can_decide and reason is None:
        problem = request.flat()
        if not is_forced and is_never_worth_it(problem, needs_gradients(request)):
            if outline is not None:
                _kinds.refused(outline, is_final=True)
        else:
            decision = decide(request, problem, kind)
            if _keep(decision, request, outline, kind):
                flat, bound = run(problem, decision, return_bound)
    with capturable(_is_capturing(request.q)):
        out = exact(request) if flat is None else request.shaped(flat)
    if not return_bound:
        return out
    return out, out.new_zeros(out.shape[:-1]) if bound is None else request.shaped(bound)


def _keep(decision: Decision, request: Request, outline: Outline | None, kind: Kind | None) -> bool:
    """Keep a decision for later calls of the same kind, and return whether any head has a polynomial."""
    is_fast = any(choice.polynomial is not None for choice in decision.choices)
    if outline is None:
        return is_fast
    if not is_fast:
        if request.options.force is None:  # a forced call is always decided, because it may have to raise an error
            _kinds.refused(outline)
        return False
    _kinds.accepted(outline)
    if kind is None:
        return True
    is_whole = request.k.shape[-2] == decision.problem.k.shape[1]
    if is_whole and (repeatable := decision.repeatable()) is not None:
        decision.backend(repeatable.degree).remember(kind, repeatable)
    return True


def _is_capturing(tensor: Tensor) -> bool:
    """Return whether work on the GPU of this tensor is being captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def on_device(tensor: object) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on the GPU of this tensor."""
    if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


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
    if _is_autocast(q, k, v):
        q, k, v, attn_mask = autocast_tensors(q, k, v, attn_mask)
    if (equal := broadcast(q, k, v, enable_gqa)) is not None:
        q, k, v, enable_gqa = equal
    options = Options(attn_mask, dropout_p, is_causal, tolerance, scale, key_padding, enable_gqa, force)
    request = checked(q, k, v, options)
    reason = exact_reason(request)
    if reason is not None:
        return exact_plan(request, reason)
    problem = request.flat()
    with on_device(q), without_autocast(problem.q):
        decision = decide(request, problem)
        return decision.plan(request, notes(problem.q.device), fixed(decision, request))


def decide(request: Request, problem: Problem, kind: Kind | None = None) -> Decision:
    """Survey the problem and choose a path for every head. Calls of the same kind share a chooser."""
    gradients = needs_gradients(request)  # before no_grad disables them

    def make() -> Chooser:
        return Chooser(problem, request.options.tolerance, gradients, request.options.force)

    with torch.no_grad():
        detached = problem.detach()
        return Decision(detached, survey_of(detached), make() if kind is None else _kinds.chooser(kind, make))


def needs_gradients(request: Request) -> bool:
    """Return whether the tolerance must hold for the gradients of q and k as well."""
    return torch.is_grad_enabled() and (request.q.requires_grad or request.k.requires_grad)
