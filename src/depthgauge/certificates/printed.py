"""The bounds as paper A and Dong et al. print them, under the names they give, in logarithms so that none overflows.

They are kept beside our own to be compared with; several are false as printed (the ledger of claims says which).
"""

import math
from dataclasses import dataclass
from typing import Any

from depthgauge.errors import require_count, require_positive
from depthgauge.network.network import SelfAttentionNetwork


def log_epsilon(eta: float, phi: float, heads: int, layer: int) -> float:
    """log ε_ℓ, ε_ℓ = 2ηφ₀(1 + Hη)^ℓ (Definition A.2)."""
    return math.log(2.0) + math.log(eta) + math.log(phi) + layer * math.log1p(heads * eta)


def log_g(log_eps: float) -> float:
    """log g(ε), g(ε) = 2(e^ε − 1) (Definition A.3), from log ε."""
    return math.log(2.0) + _log_expm1(log_eps)


def log_K(theta: float, value_max: float) -> float:
    """log K, K = (e^θ − 1)‖W_v‖max (Lemma 5.1)."""
    return _log_expm1(math.log(theta)) + math.log(value_max)


def log_delta(eta: float, phi: float, heads: int, layers: int) -> float:
    """log δ, δ = max_ℓ 2g(2Hε_ℓ), which the last layer attains (proof of Theorem D.1)."""
    return math.log(2.0) + log_g(math.log(2.0 * heads) + log_epsilon(eta, phi, heads, layers))


def log_C(eta: float, phi: float, heads: int, layers: int) -> float:
    """log C, C = max_ℓ 3η(ε_ℓ² + 1) (proof of Theorem D.1)."""
    return math.log(3.0 * eta) + _log_add(2.0 * log_epsilon(eta, phi, heads, layers), 0.0)


def log_final_bound(eta: float, phi: float, heads: int, layers: int) -> float:
    """log of (C^L + … + C + 1)δ, the explicit bound that the proof of Theorem D.1 ends with."""
    log_c = log_C(eta, phi, heads, layers)
    powers = -math.inf
    for power in range(layers + 1):
        powers = _log_add(powers, power * log_c)
    return powers + log_delta(eta, phi, heads, layers)


def log_dong_rate(beta: float, heads: int, key_dim: int, layers: int, log_residual: float) -> float:
    """log of (4βH/√d_qk)^{(3^L − 1)/2}·‖res X‖^{3^L}: Dong et al.'s rate of rank collapse, in the composite norm.

    `beta` is their ℓ₁ bound β and `log_residual` is log ‖res X‖₁,∞. Paper A's equation (1), O(β)^{(3^L − 1)/2}, hides
    the constant and the residual.
    """
    base = math.log(4.0 * beta * heads) - math.log(key_dim) / 2
    return _times_power(base, (3**layers - 1) // 2) + _times_power(log_residual, 3**layers)


def log_equation_1(beta: float, layers: int) -> float:
    """log of β^{(3^L − 1)/2}: equation (1) with the hidden constant taken as 1."""
    return _times_power(math.log(beta), (3**layers - 1) // 2)


@dataclass(frozen=True)
class PrintedBound:
    """Theorem D.1's explicit bound for a network on ‖X‖max ≤ φ₀, and the conditions its proof uses.

    `A` is the least A with η ≤ A·min(1/(HL), 1/φ₀), the theorem's parameter.
    """

    eta: float
    phi: float
    heads: int
    layers: int
    A: float
    log_bound: float
    conditions: dict[str, bool]

    @property
    def applies(self) -> bool:
        """Whether every condition holds."""
        return all(self.conditions.values())

    @property
    def bound(self) -> float | None:
        """The bound as a number, or None where it is beyond floating point."""
        return math.exp(self.log_bound) if self.log_bound < 709.0 else None

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        return {
            "printed_bound": self.bound,
            "printed_log10": self.log_bound / math.log(10.0) if math.isfinite(self.log_bound) else None,
            "printed_applies": self.applies,
            "printed_conditions": dict(self.conditions),
        }


def printed_bound(network: SelfAttentionNetwork, radius: float) -> PrintedBound:
    """Theorem D.1's explicit bound with the network's own η, H and L; `radius` is φ₀."""
    require_positive("radius", radius, "the largest |entry| an input may have")
    heads, layers = max(layer.heads for layer in network), require_count("layers", len(network), "L")
    shape = {
        "has skip connections": network.skip,
        "is not causal": not network.causal,
        "has neither MLP nor LayerNorm": network.norm == "none" and all(layer.mlp is None for layer in network),
    }
    eta = network.eta
    if eta == 0.0:
        return PrintedBound(0.0, radius, heads, layers, 0.0, -math.inf, shape)
    log_eps, log_c = log_epsilon(eta, radius, heads, layers), log_C(eta, radius, heads, layers)
    conditions = shape | {
        "η ≤ 1": eta <= 1.0,
        "ε_L < 1": log_eps < 0.0,
        "2Hε_L < 1/2": math.log(2.0 * heads) + log_eps < math.log(0.5),
        "C < 1/2": log_c < math.log(0.5),
    }
    bound = log_final_bound(eta, radius, heads, layers)
    return PrintedBound(eta, radius, heads, layers, eta * max(heads * layers, radius), bound, conditions)


def _log_expm1(log_x: float) -> float:
    """log(e^x − 1) from log x, for x of any size."""
    if log_x > 6.5:  # e^x − 1 is e^x to the last bit
        return math.exp(log_x) if log_x < 709.0 else math.inf
    x = math.exp(log_x)
    return log_x if x == 0.0 else math.log(math.expm1(x))


def _log_add(a: float, b: float) -> float:
    """log(e^a + e^b)."""
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf or high == math.inf else high + math.log1p(math.exp(low - high))


def _times_power(log_base: float, power: int) -> float:
    """power · log_base, ±∞ where an integer power is beyond floating point."""
    try:
        return power * log_base
    except OverflowError:
        return math.copysign(math.inf, log_base) if log_base else 0.0
