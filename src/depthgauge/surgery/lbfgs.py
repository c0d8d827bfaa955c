"""Preconditioned L-BFGS with a line search by backtracking."""

import math
from collections import deque
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

_PAIRS = 5
"""Number of stored steps; each takes the memory of two points."""
_SUFFICIENT = 1e-4
"""A step is accepted if f decreases by at least this share of what the slope predicts."""
_TRIALS = 8
"""Most step lengths that are tried per iteration."""

Evaluate = Callable[[Tensor], tuple[float, Tensor]]
"""Returns f and its gradient at a point."""


def minimize(
    evaluate: Evaluate,
    precondition: Callable[[Tensor], Tensor],
    start: Float[Tensor, " size"],
    iterations: int,
    tolerance: float = 1e-3,
) -> tuple[Float[Tensor, " size"], list[float]]:
    """Minimize a smooth function f ≥ 0; its value never increases.

    Iteration: x ← x − s H ∇f(x), where H is the L-BFGS matrix built on the preconditioner P ≈ (∇²f)⁻¹ and s ≤ 1 is the
    first step length that decreases f. The first step has H = P. The iteration stops when a step decreases f by less
    than the share `tolerance` of f.

    Returns:
        The last x, and f at every x in order; nothing is evaluated if `iterations` is 0.
    """
    point = start
    if iterations < 1:
        return point, []
    value, gradient = evaluate(point)
    values = [value]
    pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=_PAIRS)
    for _ in range(iterations):
        direction = -_multiply(pairs, precondition, gradient)
        slope = float(direction @ gradient)
        if slope >= 0.0:
            break
        found = _search(evaluate, point, direction, value, slope)
        if found is None:
            break
        new_point, new_value, new_gradient = found
        moved, turned = new_point - point, new_gradient - gradient
        if float(moved @ turned) > 0.0:
            pairs.append((moved, turned))
        decrease = value - new_value
        point, value, gradient = new_point, new_value, new_gradient
        values.append(value)
        if decrease < tolerance * (value + decrease):
            break
    return point, values


def _search(
    evaluate: Evaluate, point: Tensor, direction: Tensor, value: float, slope: float
) -> tuple[Tensor, float, Tensor] | None:
    """Return the first point x + s·d that decreases f sufficiently, with f and ∇f there; None if none was found.

    The step s starts at 1. A step that fails is replaced by the minimum of the parabola through what is known of f,
    between s/10 and s/2.
    """
    step = 1.0
    for _ in range(_TRIALS):
        trial = point + step * direction
        found, gradient = evaluate(trial)
        if found <= value + _SUFFICIENT * step * slope:
            return trial, found, gradient
        excess = found - value - step * slope
        best = -slope * step * step / (2 * excess) if math.isfinite(excess) and excess > 0.0 else 0.0
        step = min(max(best, step / 10), step / 2)
    return None


def _multiply(
    pairs: deque[tuple[Tensor, Tensor]], precondition: Callable[[Tensor], Tensor], vector: Float[Tensor, " size"]
) -> Float[Tensor, " size"]:
    """Return H v, by the two-loop recursion over the pairs (x' − x, ∇f(x') − ∇f(x))."""
    left = vector.clone()
    factors: list[float] = []
    for moved, turned in reversed(pairs):
        factor = float(moved @ left) / float(moved @ turned)
        left -= factor * turned
        factors.append(factor)
    made = precondition(left)
    if pairs:
        moved, turned = pairs[-1]
        made = made * (float(moved @ turned) / float(turned @ precondition(turned)))
    for (moved, turned), factor in zip(pairs, reversed(factors), strict=True):
        made = made + moved * (factor - float(turned @ made) / float(moved @ turned))
    return made
