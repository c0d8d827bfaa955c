"""The bounds as printed in paper A and in Dong et al., with the names used there, as logarithms to avoid overflow.

They are for comparison with the certificates. Several are false as printed; the ledger says which.
"""

import math

import numpy as np

from depthgauge.base.errors import require_radius
from depthgauge.results.gauge_record import PrintedTheorem
from depthgauge.theory.network.network import SelfAttentionNetwork


def log_epsilon(eta: float, phi: float, heads: int, layer: int) -> float:
    """Return log ε_ℓ with ε_ℓ = 2ηφ₀(1 + Hη)^ℓ (Definition A.2)."""
    return math.log(2.0) + math.log(eta) + math.log(phi) + layer * math.log1p(heads * eta)


def log_g(log_eps: float) -> float:
    """Return log g(ε) with g(ε) = 2(e^ε − 1) (Definition A.3), given log ε."""
    return math.log(2.0) + _log_expm1(log_eps)


def log_delta(eta: float, phi: float, heads: int, layers: int) -> float:
    """Return log δ with δ = max_ℓ 2g(2Hε_ℓ), attained at ℓ = L (proof of Theorem D.1)."""
    return math.log(2.0) + log_g(math.log(2.0 * heads) + log_epsilon(eta, phi, heads, layers))


def log_C(eta: float, phi: float, heads: int, layers: int) -> float:
    """Return log C with C = max_ℓ 3η(ε_ℓ² + 1) (proof of Theorem D.1)."""
    return math.log(3.0 * eta) + float(np.logaddexp(2.0 * log_epsilon(eta, phi, heads, layers), 0.0))


def log_final_bound(eta: float, phi: float, heads: int, layers: int) -> float:
    """Return the logarithm of (C^L + … + C + 1)δ, the explicit bound at the end of the proof of Theorem D.1."""
    log_c = log_C(eta, phi, heads, layers)
    powers = -math.inf
    for power in range(layers + 1):
        powers = float(np.logaddexp(powers, power * log_c))
    return powers + log_delta(eta, phi, heads, layers)


def log_dong_rate(beta: float, heads: int, key_dim: int, layers: int, log_residual: float) -> float:
    """Return the logarithm of (4βH/√d_qk)^{(3^L − 1)/2}·‖res X‖^{3^L}, the rate of rank collapse of Dong et al.

    `beta` is their ℓ₁ bound β and `log_residual` is log ‖res X‖₁,∞ in the composite norm. Equation (1) of paper A,
    O(β)^{(3^L − 1)/2}, omits the constant and the residual.
    """
    base = math.log(4.0 * beta * heads) - math.log(key_dim) / 2
    return _times_power(base, (3**layers - 1) // 2) + _times_power(log_residual, 3**layers)


def printed_bound(network: SelfAttentionNetwork, radius: float) -> PrintedTheorem:
    """Evaluate the explicit bound of Theorem D.1 with η, H and L of the network; `radius` is φ₀.

    The bound is None where it overflows float64.
    """
    require_radius(radius)
    heads, layers, eta = max(layer.heads for layer in network), len(network), network.eta
    conditions = {
        "has skip connections": network.skip,
        "is not causal": not network.causal,
        "has neither MLP nor LayerNorm": network.norm == "none" and all(layer.mlp is None for layer in network),
    }
    log_bound = -math.inf
    if eta != 0.0:
        log_eps, log_c = log_epsilon(eta, radius, heads, layers), log_C(eta, radius, heads, layers)
        conditions |= {
            "η ≤ 1": eta <= 1.0,
            "ε_L < 1": log_eps < 0.0,
            "2Hε_L < 1/2": math.log(2.0 * heads) + log_eps < math.log(0.5),
            "C < 1/2": log_c < math.log(0.5),
        }
        log_bound = log_final_bound(eta, radius, heads, layers)
    return PrintedTheorem(
        printed_bound=math.exp(log_bound) if log_bound < 709.0 else None,
        printed_log10=log_bound / math.log(10.0) if math.isfinite(log_bound) else None,
        printed_applies=all(conditions.values()),
        printed_conditions=conditions,
    )


def _log_expm1(log_x: float) -> float:
    """Return log(e^x − 1) given log x, for x of any size."""
    if log_x > 6.5:  # log(e^x − 1) = x in float64
        return math.exp(log_x) if log_x < 709.0 else math.inf
    x = math.exp(log_x)
    return log_x if x == 0.0 else math.log(math.expm1(x))


def _times_power(log_base: float, power: int) -> float:
    """Return power · log_base, or ±∞ if the integer power overflows float64."""
    try:
        return power * log_base
    except OverflowError:
        return math.copysign(math.inf, log_base) if log_base else 0.0
