"""Attention by a plan that was made before: no number is copied to the host, so it can be captured in a CUDA graph.

The plan fixes one polynomial for all heads. The device checks that the scores of every call stay within the largest
bound that the polynomial covers, and counts the calls that do not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.fast_attention.arguments import checked
from depthgauge.fast_attention.autograd import PolynomialAttention, without_autocast
from depthgauge.fast_attention.backends import backend_for
from depthgauge.fast_attention.decide.chooser import LARGEST_ROUNDING
from depthgauge.fast_attention.decide.decision import Decision
from depthgauge.fast_attention.plan import AttentionPlan, Fixed
from depthgauge.fast_attention.problem import Options, Problem, Request, is_capturing
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.theory.bounds import Survey
from depthgauge.fast_attention.theory.minimax import grid_index


def fixed(decision: Decision, request: Request) -> Fixed | str:
    """Return what later calls need to follow a decision, or why they cannot."""
    if decision.problem.keep is not None:
        return "it has padding keys"
    if any(choice.polynomial is None for choice in decision.choices):
        return "some of its heads are exact"
    chooser, survey, options = decision.chooser, decision.survey, request.options
    largest_score = max(decision.bounds(head)[0] for head in range(decision.problem.heads))
    shared = chooser.alike(grid_index(largest_score))
    if shared is None or not chooser.allowance(shared, 0.0) <= LARGEST_ROUNDING:
        return f"no polynomial covers its scores, up to {largest_score:.3g}, without centring or exact rows"
    largest = chooser.largest(shared.degree()) or shared
    assert largest.polynomial is not None
    return Fixed(
        shapes=(tuple(request.q.shape), tuple(request.k.shape), tuple(request.v.shape)),
        dtype=request.q.dtype,
        options=(options.is_causal, options.tolerance, request.rules.scale, options.enable_gqa),
        coefficients=largest.polynomial.coefficients,
        bound=largest.polynomial.bound,
        query=tuple(survey.query),
        key=tuple(survey.key),
        has_gradients=chooser.gradients,
        violations=torch.zeros((), dtype=torch.int64, device=request.q.device),
    )


def followed(request: Request, plan: AttentionPlan) -> Tensor:
    """Compute attention by a plan whose heads are all polynomial.

    Raises:
        InputError: The plan cannot be followed, or was made for other arguments.
    """
    own = plan.fixed
    if isinstance(own, str):
        raise InputError(f"the plan cannot be followed: {own}; call attention without plan")
    given = tuple(tuple(x.shape) for x in (request.q, request.k, request.v))
    if given != own.shapes or request.q.dtype != own.dtype:
        raise InputError(
            f"the plan was made for q, k, v of shapes {_listed(own.shapes)} in {own.dtype}, got {_listed(given)} in "
            f"{request.q.dtype}; make a plan for these tensors with attention_plan"
        )
    options = request.options
    if own.options != (options.is_causal, options.tolerance, request.rules.scale, options.enable_gqa):
        raise InputError(
            "the plan was made with (is_causal, tolerance, scale, enable_gqa) = "
            f"{own.options}, got {(options.is_causal, options.tolerance, request.rules.scale, options.enable_gqa)}; "
            "make a plan with the same options"
        )
    wanted = [x.requires_grad and torch.is_grad_enabled() for x in (request.q, request.k, request.v)]
    if any(wanted[:2]) and not own.has_gradients:
        raise InputError(
            "the plan was made for tensors that require no gradients; make it with tensors that require them, or call "
            "attention under torch.no_grad()"
        )
    numbers = own.violations, own.coefficients, own.bound, own.query, own.key
    if torch.compiler.is_compiling():
        if any(wanted):
            raise InputError("a plan has no gradients inside torch.compile; call attention without plan there")
        out: Tensor = planned_attention(
            request.q, request.k, request.v, *numbers, request.rules.scale, options.is_causal, options.enable_gqa
        )
        return out
    return _computed(request, *numbers)


def _listed(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _computed(
    request: Request,
    violations: Tensor,
    coefficients: Sequence[float],
    bound: float,
    query: Sequence[float],
    key: Sequence[float],
) -> Tensor:
    """Compute attention by one polynomial and add 1 to `violations` if the scores may exceed `bound`."""
    problem = request.flat()
    with without_autocast(problem.q):
        with torch.no_grad():
            detached = problem.detach()
            spec = _spec(detached, tuple(coefficients), list(query), list(key))
            backend = backend_for(problem, spec.degree)
            if is_capturing(problem.q) and not backend.is_capturable(detached):
                raise InputError(
                    "this plan cannot be followed in a CUDA graph: only bfloat16 tensors of widths that the Triton "
                    'kernels support can; use force="exact" inside the graph'
                )
            violations += backend.is_outside(detached, bound)
        given = problem.q, problem.k, problem.v
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            flat, _ = PolynomialAttention.apply(*given, spec, backend)  # type: ignore[no-untyped-call]
        else:
            flat, _, _ = backend.forward(spec, *given, False)
    return request.shaped(flat)


def _spec(problem: Problem, coefficients: tuple[float, ...], query: list[float], key: list[float]) -> Spec:
    """Describe one polynomial for all heads. The norms of q and k only balance the two before they are summed."""
    heads, d = problem.heads, problem.q.shape[-1]
    survey = Survey(problem)
    survey.query, survey.key = query, key
    survey.query_centre = survey.key_centre = problem.q.new_zeros(heads, d, dtype=problem.working)
    return Spec(
        degree=len(coefficients) - 1,
        coefficients=(coefficients,) * heads,
        members=tuple(range(heads)),
        centrings=(0,) * heads,
        exact_rows=None,
        survey=survey,
        problem=problem,
        keep=None,
    )


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
    options = Options(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    with torch.no_grad():
        return _computed(checked(q, k, v, options), violations, coefficients, bound, query, key)


@planned_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_others: object) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
