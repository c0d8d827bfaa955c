"""Distance of a model from the small-weight regime, in orders of magnitude.

Both bounds concern the attention layers with their skip connections, on tokens x with |x_i| ≤ 1. Norms scale tokens to
about that size. MLPs are left out, so the distance of the whole model can only be larger.
"""

import math
from collections.abc import Callable, Sequence

from depthgauge.checkpoints.circuits import CircuitSizes
from depthgauge.results.checkpoint_subject import RegimeDistance
from depthgauge.theory.certificates.printed import log_C, log_epsilon, log_final_bound

TOLERANCE = 0.1
_LEAST = -300.0


def regime(layers: Sequence[Sequence[CircuitSizes]], tolerance: float = TOLERANCE) -> RegimeDistance:
    """Compute the distance of a model from the sizes of every head of every layer.

    `printed_*` is the explicit bound of Theorem D.1 with its conditions; `corrected_*` is `corrected_bound`.
    """
    eta = max(head.eta for heads in layers for head in heads)
    heads = max(len(heads) for heads in layers)
    printed = _orders(lambda scale: _printed_holds(scale * eta, heads, len(layers), tolerance))
    corrected = _orders(lambda scale: corrected_bound(layers, scale) <= tolerance)
    return RegimeDistance(
        tolerance=tolerance,
        eta=eta,
        printed_orders=printed,
        printed_eta=eta * 10**-printed,
        corrected_orders=corrected,
        corrected_eta=eta * 10**-corrected,
    )


def corrected_bound(layers: Sequence[Sequence[CircuitSizes]], scale: float) -> float:
    """Bound ‖S(X) − S'(X)‖max over ‖X‖max ≤ 1, where S' is the mean-field layer and Q, K, V are multiplied by `scale`.

    This is the certificate of docs/math.md with vectors replaced by their largest entries and matrices by column norms:

        own_ℓ = Σ_{k<ℓ,h} G_kh v_kh,   err_ℓ = Σ_{k<ℓ,h} G_kh v_kh Π_{k<j<ℓ}(1 + Σ_h v_jh),   v = ‖V‖col
        θ_ℓh = 2w_ℓh (Π_{j<ℓ}(1 + Σ_h v_jh) + err_ℓ)(1 + own_ℓ),   G_ℓh = 2 tanh(θ_ℓh/4)(1 + own_ℓ).
    """
    own = error = 0.0
    growth = 1.0
    for heads in layers:
        state, spread = growth + error, 1.0 + own
        step = 0.0
        for head in heads:
            theta = 2.0 * scale**2 * head.score_norm * state * spread
            step += 2.0 * math.tanh(theta / 4.0) * spread * scale * head.value_col
        value = 1.0 + scale * sum(head.value_col for head in heads)
        own, error, growth = own + step, error * value + step, growth * value
    return error


def _printed_holds(eta: float, heads: int, layers: int, tolerance: float) -> bool:
    """Return whether the conditions of Theorem D.1 hold for ‖X‖max ≤ 1 and its bound is at most the tolerance."""
    conditions = (
        eta <= 1.0,
        math.log(2.0 * heads) + log_epsilon(eta, 1.0, heads, layers) < math.log(0.5),
        log_C(eta, 1.0, heads, layers) < math.log(0.5),
    )
    return all(conditions) and log_final_bound(eta, 1.0, heads, layers) <= math.log(tolerance)


def _orders(holds: Callable[[float], bool]) -> float:
    """Return the smallest s ≥ 0 for which `holds(10^−s)` is true, to three decimals."""
    if holds(1.0):
        return 0.0
    low, high = _LEAST, 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(10.0**middle) else (low, middle)
    return round(-low, 3)
