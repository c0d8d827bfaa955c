"""The polynomial path of `attention`: heads of the same degree are computed together by a backend."""

import torch
from torch import Tensor

from depthgauge.fast_attention import exact_path as exact
from depthgauge.fast_attention.autograd import PolynomialAttention
from depthgauge.fast_attention.decide.decision import Decision
from depthgauge.fast_attention.decide.row_bounds import row_certificate
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Spec


def run(problem: Problem, decision: Decision, return_bound: bool) -> tuple[Tensor, Tensor | None]:
    """Return out [N, G, n, e] and, with `return_bound`, the bounds of the rows [N, G, n].

    Heads of the same degree are computed together, except that heads whose q or k are changed first form a batch of
    their own.
    """
    batches = [c.batch() for c in decision.choices]
    distinct = sorted(set(batches))
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for batch in distinct:
        members = [head for head, own in enumerate(batches) if own == batch]
        degree, _ = batch
        if len(distinct) == 1 and degree >= 0:
            return polynomial_heads(problem, decision, members, degree, return_bound)
        at = torch.tensor(members, device=problem.q.device)
        part = problem.select(at)
        if degree < 0:
            out = exact.heads(part)
            parts.append((at, out, out.new_zeros(out.shape[:-1], dtype=torch.float64)))
        else:
            parts.append((at, *polynomial_heads(part, decision, members, degree, return_bound)))
    order = torch.cat([at for at, _, _ in parts]).argsort()
    out = torch.cat([part for _, part, _ in parts])[order]
    bounds = [bound for _, _, bound in parts if bound is not None]
    return out, torch.cat(bounds)[order] if return_bound else None


def polynomial_heads(
    problem: Problem, decision: Decision, members: list[int], degree: int, return_bound: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the polynomial path for heads of one degree, and the bounds of their rows if requested."""
    backend = decision.backend(degree)
    spec = make_spec(problem, decision, members, degree)
    q, k, v = problem.q, problem.k, problem.v
    normaliser: Tensor | None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, normaliser = PolynomialAttention.apply(q, k, v, spec, backend)  # type: ignore[no-untyped-call]
    else:
        out, normaliser, _ = backend.forward(spec, q, k, v, return_bound)
    if spec.exact_rows is not None:
        out = exact.replaced(problem, out, spec.exact_rows)
    if not return_bound or normaliser is None:
        return out, None
    with torch.no_grad():
        return out, row_certificate(problem.detach(), spec, decision, members, normaliser)


def make_spec(problem: Problem, decision: Decision, members: list[int], degree: int) -> Spec:
    """Return the description of the polynomial path for heads of one degree."""
    choices, rows = [decision.choices[head] for head in members], None
    if any(choice.exact_rows for choice in choices):
        none = torch.zeros(problem.q.shape[1:3], dtype=torch.bool, device=problem.q.device)
        rows = torch.stack([
            ~(decision.row_bounds(head, choice.centring) <= choice.bound) if choice.exact_rows else none
            for head, choice in zip(members, choices, strict=True)
        ])  # fmt: skip
    return Spec(
        degree=degree,
        coefficients=tuple([c.polynomial.coefficients for c in choices if c.polynomial is not None]),
        members=tuple(members),
        centrings=tuple([choice.centring for choice in choices]),
        exact_rows=rows,
        survey=decision.survey,
        problem=decision.problem,
        keep=problem.keep,
    )
