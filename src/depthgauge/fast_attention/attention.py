"""`attention` and `attention_plan`: scaled_dot_product_attention with a guaranteed error, fast for small scores."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from depthgauge.base.errors import InputError, require_type
from depthgauge.fast_attention import exact_path as exact
from depthgauge.fast_attention.arguments import broadcast, check_tokens, checked, rules_for
from depthgauge.fast_attention.autograd import is_autocast, is_watched, without_autocast
from depthgauge.fast_attention.backends import notes
from depthgauge.fast_attention.decide.chooser import CallKind, chooser_for
from depthgauge.fast_attention.decide.decision import Decision, decide, decided
from depthgauge.fast_attention.decide.prepared import prepared_for
from depthgauge.fast_attention.decide.refusals import Refusals
from depthgauge.fast_attention.following import fixed, followed
from depthgauge.fast_attention.plan import AttentionPlan, exact_plan
from depthgauge.fast_attention.polynomial_path import run
from depthgauge.fast_attention.problem import Options, Problem, Request, autocast_tensors, is_capturing, is_dual

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
    options = Options(attn_mask, dropout_p, is_causal, tolerance, scale, key_padding, enable_gqa, force)
    return attend(q, k, v, options, return_bound, plan)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    return_bound: bool = False,
    plan: AttentionPlan | None = None,
    refusals: Refusals | None = None,
) -> Output:
    """Compute `attention`. Calls that `refusals` lets wait are exact without a survey."""
    if isinstance(q, Tensor) and is_autocast(q):
        q, k, v, mask = autocast_tensors(q, k, v, options.attn_mask)
        with without_autocast(q):
            return attend(q, k, v, options._replace(attn_mask=mask), return_bound, plan, refusals)
    is_compiling = torch.compiler.is_compiling()
    rules = rules_for(q, k, v, options, is_compiling)
    if rules is None:
        q, k, v, is_grouped = broadcast(q, k, v, options.enable_gqa)
        return attend(q, k, v, options._replace(enable_gqa=is_grouped), return_bound, plan, refusals)
    (n, m), padding, force = (q.shape[-2], k.shape[-2]), options.key_padding, rules.force
    if padding is not None or m != v.shape[-2]:
        check_tokens(k, v, padding)
    if plan is not None or is_compiling:
        return _undecided(Request(q, k, v, options, rules), plan, return_bound)
    is_exact, kind = rules.is_exact or n * m <= rules.most_pairs, None
    if not is_exact:
        kind = rules, n, m, torch.is_grad_enabled() and (q.requires_grad or k.requires_grad), padding is not None
        # Where no polynomial pays, numbers need not be read; in the capture of a CUDA graph they cannot be read.
        is_exact = force is None and (chooser_for(*kind).largest_bound == 0 or is_capturing(q))
        is_exact = is_exact or (refusals is not None and force is None and refusals.is_waiting(kind))
    is_plain = padding is None and not return_bound
    if kind is not None and not is_exact and is_plain and _is_usual(q, k, v, options):
        is_trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        with on_device(q):
            result = prepared_for(rules, n, m, kind[3], is_trained)(q, k, v)
        if refusals is not None and force is None and result is not False:
            refusals.record(kind, is_refused=result is True)
        if isinstance(result, Tensor):
            return result
        is_exact = result
    if is_exact and is_plain:
        return exact.sdpa(q, k, v, options.attn_mask, rules.named)
    request, found = Request(q, k, v, options, rules), None
    with on_device(q):
        if kind is not None and not is_exact:
            found = _decision(request, kind)
            if refusals is not None and force is None:
                refusals.record(kind, found is None)
        if found is None:
            out = exact.call(request)
            return (out, out.new_zeros(out.shape[:-1])) if return_bound else out
        flat, bound = run(*found, return_bound)
    return request.shaped(flat) if bound is None else (request.shaped(flat), request.shaped(bound))


def _is_usual(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Return whether q, k and v are contiguous on a GPU, without a mask, dropout, hooks on gradients and a capture."""
    if not q.is_cuda or options.attn_mask is not None or options.dropout_p > 0:
        return False
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()) or is_dual(q, k, v) or is_watched(q, k, v):
        return False
    return exact.have_addresses(q, k, v) and not torch.cuda.is_current_stream_capturing()


def _decision(request: Request, kind: CallKind) -> tuple[Problem, Decision] | None:
    """Return the problem and a decision in which some head has a polynomial, or None if the call is exact."""
    if exact.why_exact(request) is not None:
        return None
    problem = request.flat()
    decision = decided(problem, chooser_for(*kind))
    return None if decision is None else (problem, decision)


def _undecided(request: Request, plan: AttentionPlan | None, return_bound: bool) -> Output:
    """Compute `attention` without looking at numbers: by a plan, or exactly in code compiled by torch.compile."""
    options = request.options
    if plan is None:
        if options.force == "polynomial":
            raise InputError(
                'force="polynomial" is not possible inside torch.compile: the decision depends on numbers; make a plan '
                "with attention_plan before and pass it as plan"
            )
        out = exact.call(request)
        return (out, out.new_zeros(out.shape[:-1], dtype=torch.float64)) if return_bound else out
    require_type("plan", plan, AttentionPlan, "what attention_plan returns, or None")
    if return_bound or options.force is not None:
        raise InputError("plan cannot be combined with force or return_bound; a plan has its own guarantee")
    if options.attn_mask is not None or options.dropout_p > 0 or options.key_padding is not None:
        raise InputError("plan cannot be combined with a mask, dropout or padding; call attention without plan")
    return exact.call(request) if plan.path == "exact" else followed(request, plan)


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
    if isinstance(q, Tensor) and is_autocast(q):
        q, k, v, attn_mask = autocast_tensors(q, k, v, attn_mask)
    options = Options(attn_mask, dropout_p, is_causal, tolerance, scale, key_padding, enable_gqa, force)
    request = checked(q, k, v, options)
    reason = exact.why_exact(request)
    if reason is not None:
        return exact_plan(request, reason)
    problem = request.flat()
    with on_device(q), without_autocast(problem.q):
        decision = decide(request, problem)
        return decision.plan(request, notes(problem.q.device), fixed(decision, request))
