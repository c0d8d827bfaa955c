"""`attention` and `attention_plan`: scaled_dot_product_attention with a guarantee, fast where the scores are small."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgauge.errors import InputError
from depthgauge.fast_attention.autograd import PolynomialAttention, without_autocast
from depthgauge.fast_attention.backends import notes, survey_of
from depthgauge.fast_attention.decide.decision import Decision, is_never_worth_it
from depthgauge.fast_attention.decide.row_bounds import row_certificate
from depthgauge.fast_attention.naive import visible
from depthgauge.fast_attention.plan import Plan, exact_plan
from depthgauge.fast_attention.problem import Problem, Request, checked
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton import route as triton_route
from depthgauge.fast_attention.triton.route import Kind

MASK_ENTRIES = 2**27
"""How large a mask is made at once."""


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
) -> Tensor | tuple[Tensor, Tensor]:
    """softm(s q kᵀ) v with every entry within tolerance × range(v) of it, in real arithmetic.

    Shapes and meaning of `torch.nn.functional.scaled_dot_product_attention`: q [..., heads, n, d],
    k [..., heads, m, d], v [..., heads, m, e]; range(v) is that of the head's value column, max − min over its keys.
    `key_padding` [..., m] is True where a key is padding. `force` is `exact` or `polynomial`.
    With `return_bound` also [..., heads, n]: row i is off by at most bound[i] × range(v), the fast path's rounding
    included, besides the storing of the result in its dtype; 0 where a row is computed exactly.
    Where q or k need gradients the tolerance holds for these too. `attention_plan` tells what is done, and why.

    >>> q = k = v = torch.eye(4)
    >>> bool((attention(q, k, v) - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-3)
    True
    """
    if torch.compiler.is_compiling():
        return outside_graphs()(
            q, k, v, attn_mask, dropout_p, is_causal, tolerance=tolerance, scale=scale, key_padding=key_padding,
            enable_gqa=enable_gqa, force=force, return_bound=return_bound,
        )  # fmt: skip
    options = attn_mask, dropout_p, is_causal, tolerance, scale, key_padding, enable_gqa, force
    with on_device(q):
        kind = None if return_bound else triton_route.kind_of(q, k, v, options)
        route = triton_route.find(kind)
        if route is not None and (quick := route(q, k, v)) is not None:
            return quick
        return _decided_anew(checked(q, k, v, *options), kind, return_bound)


def _decided_anew(request: Request, kind: Kind | None, return_bound: bool) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` from the start; what is decided is kept for calls of the same kind."""
    flat = bound = None
    if exact_reason(request) is None:
        problem = request.flat()
        if request.force == "polynomial" or not is_never_worth_it(problem, needs_gradients(request)):
            with without_autocast(problem.q.device):
                decision = decide(request, problem)
                if any(choice.polynomial is not None for choice in decision.choices):
                    if kind is not None and request.k.shape[-2] == problem.k.shape[1]:
                        decision.teach(kind)
                    flat, bound = run(problem, decision, return_bound)
    out = exact(request) if flat is None else request.shaped(flat)
    if not return_bound:
        return out
    return out, out.new_zeros(out.shape[:-1]) if bound is None else request.shaped(bound)


_outside_graphs: list[Callable[..., Tensor | tuple[Tensor, Tensor]]] = []


def outside_graphs() -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """`attention` for code that torch compiles: a decision depends on numbers, so it is made between two graphs."""
    if not _outside_graphs:  # made late, for it imports the compiler
        _outside_graphs.append(torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
    return _outside_graphs[0]


def on_device(tensor: object) -> AbstractContextManager[object]:
    """Where launches go to this tensor's GPU: the current one, unless there are several."""
    if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
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
) -> Plan:
    """What `attention` would do with the same arguments, and why: per key head the proved B, degree, path and costs."""
    request = checked(
        q, k, v, attn_mask, dropout_p, is_causal, tolerance, scale, key_padding, enable_gqa, force
    )  # fmt: skip
    reason = exact_reason(request)
    if reason is not None:
        return exact_plan(request, reason)
    problem = request.flat()
    with on_device(q), without_autocast(problem.q.device):
        return decide(request, problem).plan(request, notes(problem.q.device))


def exact_reason(request: Request) -> str | None:
    """Why only the exact path can do what is asked, or None."""
    reason = None
    if request.attn_mask is not None:
        reason = "a general mask has no polynomial path"
    elif request.dropout_p > 0:
        reason = "dropout has no polynomial path"
    elif request.key_padding is not None and bool(request.key_padding.all(dim=-1).any()):
        reason = "a batch has no key that is not padding"
    elif request.q.numel() == 0 or request.k.numel() == 0 or request.v.numel() == 0:
        reason = "there is nothing to compute"
    elif triton_route.is_dual(request.q, request.k, request.v):
        reason = "forward-mode derivatives have no polynomial path"
    elif request.is_causal and request.key_padding is not None and bool(request.key_padding[..., 0].any()):
        reason = "a first key that is padding leaves causal rows without any key"
    if reason is not None and request.force == "polynomial":
        raise InputError(f"the polynomial cannot be forced here: {reason}; leave force unset")
    return "asked for" if reason is None and request.force == "exact" else reason


def exact(request: Request) -> Tensor:
    """torch's own attention, with padding as a mask."""
    mask, is_causal = request.attn_mask, request.is_causal
    if request.key_padding is not None:
        keep = ~request.key_padding[..., None, None, :] if request.k.ndim > 2 else ~request.key_padding[None]
        if is_causal:
            keep = keep & visible(request.q.shape[-2], request.k.shape[-2], True, None, keep.device)
        if mask is not None:
            keep = keep & mask if mask.dtype == torch.bool else torch.where(keep, mask, -torch.inf)
        mask, is_causal = keep, False
    return F.scaled_dot_product_attention(
        request.q, request.k, request.v, mask, request.dropout_p, is_causal, scale=request.scale,
        enable_gqa=request.enable_gqa,
    )  # fmt: skip


def decide(request: Request, problem: Problem) -> Decision:
    """Survey the problem and choose for every head."""
    gradients = needs_gradients(request)  # asked before they are switched off
    with torch.no_grad():
        bare = problem.detach()
        return Decision(bare, survey_of(bare), request, gradients)


def needs_gradients(request: Request) -> bool:
    """Whether the tolerance must hold for the gradients of q and k too."""
    return torch.is_grad_enabled() and (request.q.requires_grad or request.k.requires_grad)


def run(problem: Problem, decision: Decision, return_bound: bool) -> tuple[Tensor, Tensor | None]:
    """out [N, G, n, e] and, if asked for, the rows' bounds [N, G, n].

    Heads of one degree are done together, those that are taken as they come apart from those that are changed first.
    """
    sorts = [c.sort() for c in decision.choices]
    kinds = sorted(set(sorts))
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for kind in kinds:
        members = [head for head, sort in enumerate(sorts) if sort == kind]
        degree, _ = kind
        if len(kinds) == 1 and degree >= 0:
            return polynomial_heads(problem, decision, members, degree, return_bound)
        at = torch.tensor(members, device=problem.q.device)
        part = problem.select(at)
        if degree < 0:
            out = exact_heads(part)
            parts.append((at, out, out.new_zeros(out.shape[:-1], dtype=torch.float64)))
        else:
            parts.append((at, *polynomial_heads(part, decision, members, degree, return_bound)))
    order = torch.cat([at for at, _, _ in parts]).argsort()
    out = torch.cat([part for _, part, _ in parts])[order]
    bounds = [bound for _, _, bound in parts if bound is not None]
    return out, torch.cat(bounds)[order] if return_bound else None


def exact_heads(problem: Problem) -> Tensor:
    """Exact attention of a Problem: [N, G, n, e]."""
    groups, n = problem.q.shape[1:3]
    k, v = (x.unsqueeze(1).expand(-1, groups, -1, -1) for x in (problem.k, problem.v))
    if problem.keep is None:
        return F.scaled_dot_product_attention(problem.q, k, v, is_causal=problem.causal, scale=problem.scale)
    positions = torch.arange(n, device=k.device).repeat(problem.heads, groups)
    return exactly(problem, problem.q.flatten(1, 2), positions).view(problem.heads, groups, n, -1)


def exactly(problem: Problem, q: Tensor, positions: Tensor) -> Tensor:
    """Exact attention of some rows of every head, q [N, R, d] at positions [N, R]: [N, R, e].

    Masks are made for a block of rows at a time.
    """
    k, v, m = problem.k[:, None], problem.v[:, None], problem.k.shape[1]
    is_masked = problem.causal or problem.keep is not None
    size = max(1, MASK_ENTRIES // (problem.heads * m)) if is_masked else q.shape[1]
    parts = []
    for start in range(0, q.shape[1], size):
        rows, at = q[:, None, start : start + size], positions[:, start : start + size, None]
        seen = torch.arange(m, device=q.device) <= at if problem.causal else None
        if problem.keep is not None:
            seen = problem.keep[:, None] if seen is None else seen & problem.keep[:, None]
        mask = None if seen is None else seen[:, None]
        parts.append(F.scaled_dot_product_attention(rows, k, v, mask, scale=problem.scale)[:, 0])
    return torch.cat(parts, dim=1)


def exact_rows(problem: Problem, out: Tensor, rows: Tensor) -> Tensor:
    """`out` with the rows marked in [N, G, n] replaced by exact attention, all heads in one call."""
    flat, n = rows.flatten(1), problem.q.shape[2]
    most = int(flat.sum(dim=1).max())
    chosen = flat.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]  # the marked ones come first
    heads = torch.arange(problem.heads, device=out.device)[:, None]
    found = exactly(problem, problem.q.flatten(1, 2)[heads, chosen], chosen % n)
    kept = flat[heads, chosen].nonzero(as_tuple=True)
    places = kept[0], chosen[kept]
    return out.flatten(1, 2).index_put(places, found[kept]).view_as(out)


def polynomial_heads(
    problem: Problem, decision: Decision, members: list[int], degree: int, return_bound: bool
) -> tuple[Tensor, Tensor | None]:
    """The fast path for heads of one degree, and the rows' bounds where they are asked for."""
    backend = decision.backend(degree)
    with torch.no_grad():
        spec = make_spec(problem, decision, members, degree)
    given = problem.q, problem.k, problem.v
    normaliser: Tensor | None
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        out, normaliser = PolynomialAttention.apply(*given, spec, backend)  # type: ignore[no-untyped-call]
    else:
        out, normaliser, _ = backend.forward(spec, *given, return_bound)
    if spec.exact_rows is not None:
        out = exact_rows(problem, out, spec.exact_rows)
    if not return_bound or normaliser is None:
        return out, None
    with torch.no_grad():
        return out, row_certificate(problem.detach(), spec, decision, members, normaliser)


def make_spec(problem: Problem, decision: Decision, members: list[int], degree: int) -> Spec:
    """What a backend is told about heads of one degree."""
    choices = [decision.choices[head] for head in members]
    polynomials = [choice.polynomial for choice in choices if choice.polynomial is not None]
    rows = None
    if any(choice.exact_rows for choice in choices):
        none = torch.zeros(problem.q.shape[1:3], dtype=torch.bool, device=problem.q.device)
        rows = torch.stack([
            ~(decision.row_bounds(head, choice.centring) <= choice.bound) if choice.exact_rows else none
            for head, choice in zip(members, choices, strict=True)
        ])  # fmt: skip
    return Spec(
        degree=degree,
        coefficients=tuple(p.coefficients for p in polynomials),
        members=tuple(members),
        centrings=tuple(choice.centring for choice in choices),
        scale=problem.scale,
        causal=problem.causal,
        keep=problem.keep,
        exact_rows=rows,
        survey=decision.survey,
        problem=decision.problem,
    )
