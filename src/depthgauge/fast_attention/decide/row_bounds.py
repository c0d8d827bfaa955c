"""Bounds of computed rows: for every row the smaller of the a-priori bound and the moment certificate."""

import torch
from torch import Tensor

from depthgauge.fast_attention.decide.decision import Decision
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Spec, centred, weights
from depthgauge.fast_attention.theory.bounds import moment_certificate, moment_terms
from depthgauge.fast_attention.theory.minimax import output_error

CAUSAL_STEP = 256
"""Causal moments are accumulated in steps of this many keys.

The step divides the exact diagonal block of every backend. Row i therefore sums over all keys that it meets through the
polynomial, and possibly more; the terms are nonnegative, so the sum over more keys is still an upper bound.
"""


def row_certificate(problem: Problem, spec: Spec, decision: Decision, members: list[int], z: Tensor) -> Tensor:
    """Return an upper bound on |out′ − out| / range(v) for every row, rounding included: [N, G, n]."""
    second, total = second_moments(problem, spec)
    bounds = []
    for at, head in enumerate(members):
        choice = decision.choices[head]
        assert choice.polynomial is not None
        slack = decision.rounding(head)
        normaliser = z[at].double() * (1 - min(slack, 0.5))
        rows = decision.row_bounds(head, choice.centring).double().clamp(max=choice.bound)
        terms = moment_terms(choice.polynomial, not problem.causal)
        # The tokens are centred and rounded: the relative error of a second moment is below 2⁻¹⁶ in any working dtype.
        after = moment_certificate(terms, rows, total[at], second[at] * (1 + 2.0**-16), normaliser)
        bounds.append(after.clamp(max=output_error(choice.polynomial.error)) + slack)
    bound = torch.stack(bounds)
    return bound if spec.exact_rows is None else bound.masked_fill(spec.exact_rows, 0)


def second_moments(problem: Problem, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return Σ_j w_j t_ij² and Σ_j w_j over the keys that row i meets through the polynomial: two [N, G, n] float64."""
    qt, k = (x.double() for x in centred(spec, slice(None), problem.q, problem.k))
    q = qt.permute(0, 3, 1, 2)
    weight_of = weights(spec, slice(None), problem.k)
    w = k.new_ones(k.shape[:2]) if weight_of is None else weight_of.double()
    if not problem.causal:
        second = _second(q, (w[..., None] * k).transpose(1, 2) @ k)
        return second, w.sum(1)[:, None, None].expand_as(second)
    second, total = torch.zeros_like(q[:, 0]), torch.zeros_like(q[:, 0])
    moment, weight = k.new_zeros(k.shape[0], k.shape[2], k.shape[2]), k.new_zeros(k.shape[0])
    for start in range(0, q.shape[-1], CAUSAL_STEP):
        rows = slice(start, start + CAUSAL_STEP)
        second[..., rows], total[..., rows] = _second(q[..., rows], moment), weight[:, None, None]
        here, part = k[:, rows], w[:, rows]
        moment = moment + (part[..., None] * here).transpose(1, 2) @ here
        weight = weight + part.sum(1)
    return second, total


def _second(q: Tensor, moment: Tensor) -> Tensor:
    """Return q_iᵀ M q_i: [N, d, G, n] and [N, d, d] → [N, G, n]."""
    return (q * torch.einsum("hde,hegi->hdgi", moment, q)).sum(1)
