"""Paper A's theorem: 1.2, D.1 and the remark D.2.

The proof of Theorem D.1 deletes every layer but the last and bounds the distance by (C^L + … + C + 1)δ with
ε_ℓ = 2ηφ₀(1 + Hη)^ℓ, δ = max_ℓ 2g(2Hε_ℓ), C = max_ℓ 3η(ε_ℓ² + 1). That bound has no hidden constant and can be tested;
the theorem itself says O(A/L).
"""

from collections.abc import Iterator

import numpy as np

from depthgauge._format import number
from depthgauge.ledger.arithmetic import FLOATS, Arithmetic, Value
from depthgauge.ledger.claim import Claim, Inequality, Instance, Observed, Size, Steps, Study, Work
from depthgauge.ledger.formulas import attention, depth, layer, max_norm
from depthgauge.ledger.instances import matrix
from depthgauge.ledger.layer_collapse.attention_layers import growth
from depthgauge.ledger.layer_collapse.small_weight_networks import epsilon, largest_weight


def _proof_bound(ar: Arithmetic, eta: Value, phi: Value, H: int, L: int) -> tuple[Value, Value, Value, Value]:
    """ε_L, δ, C and (C^L + … + 1)δ; the maxima over ℓ are at ℓ = L, since ε_ℓ grows."""
    eps = epsilon(ar, eta, phi, H, L)
    delta, c = 2 * growth(ar, 2 * H * eps), 3 * eta * (eps**2 + 1)
    return eps, delta, c, sum((c**k for k in range(L + 1)), ar.number(0)) * delta


def _collapsed(displayed: bool) -> Work:
    def work(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, H: int, L: int) -> Steps:
        eta, phi, weights = largest_weight(ar, Q, K, V), max_norm(ar, X), (Q, K, V)
        before = depth(ar, X, weights, L - 1, H)
        yield "η, the largest weight", eta
        yield "φ₀ = ‖X‖∞", phi
        yield "X_{L−1}, the input of the last layer of S", before
        if displayed:
            first, second = attention(ar, before, *weights), attention(ar, X, *weights)
            yield "softmv_L behind all layers", first
            yield "softmv_L on the input itself", second
        else:
            first, second = layer(ar, before, *weights, heads=H), layer(ar, X, *weights, heads=H)
            yield "S(X)", first
            yield "S'(X), the last layer alone", second
        eps, delta, c, bound = _proof_bound(ar, eta, phi, H, L)
        yield "ε_L = 2ηφ₀(1 + Hη)^L", eps
        yield "δ = 2g(2Hε_L), g(ε) = 2(e^ε − 1)", delta
        yield "C = 3η(ε_L² + 1)", c
        yield "(C^L + … + C + 1)δ", bound
        return max_norm(ar, first - second), bound

    return work


def _conditions(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, H: int, L: int) -> bool:
    """What the proof uses: η ≤ min{1/(HL), 1/φ₀} (that is A ≤ 1), ε_ℓ < 1, 2Hε_ℓ ≤ ½, C < ½."""
    eta, phi = largest_weight(ar, Q, K, V), max_norm(ar, X)
    if not bool(eta > 0 and phi > 0 and eta * H * L <= 1 and eta * phi <= 1):
        return False
    eps, _, c, _ = _proof_bound(ar, eta, phi, H, L)
    return bool(eps < 1 and 4 * H * eps <= 1 and 2 * c < 1)


def _aligned(size: Size) -> Iterator[Instance]:
    """One token φ₀·1, every value weight η: each layer multiplies the token by 1 + Hηd."""
    d = size["d"]
    for eta, phi in ((0.01, 1.0), (0.1, 0.25)):
        weight = eta * np.ones((d, d))
        yield {"X": phi * np.ones((1, d)), "Q": 0 * weight, "K": 0 * weight, "V": weight, "H": 1, "L": size["L"]}


def _drawn(random: np.random.Generator, size: Size) -> Instance:
    d = size["d"]
    weights = {name: 0.01 * matrix(random, d, d) for name in ("Q", "K", "V")}
    return {"X": matrix(random, 1, d), **weights, "H": 1, "L": size["L"]}


def _explicit(displayed: bool, shapes: tuple[Size, ...]) -> Inequality:
    left = "‖softmv_L(X_{L−1}) − softmv_L(X)‖∞" if displayed else "‖S(X) − S'(X)‖∞"
    return Inequality(left, "(C^L + … + C + 1)δ", _collapsed(displayed), _drawn, shapes, _conditions, _aligned)


def _order_of_the_best(dims: tuple[int, ...] = (2, 8, 32)) -> list[tuple[int, float]]:
    """‖S(X) − X‖∞/η at aligned weights for growing d: what O(η) hides when S' is the identity."""
    eta, found = 1e-3, []
    for d in dims:
        weight = eta * np.ones((d, d))
        X = np.ones((1, d))
        end = depth(FLOATS, X, (weight, weight, weight), 4, 1)
        found.append((d, float(np.abs(end - X).max() / eta)))
    return found


def _informal() -> Observed:
    seen = _order_of_the_best()
    table = ", ".join(f"{number(value)} at d = {d}" for d, value in seen)
    return Observed(
        "undecided",
        None,
        len(seen),
        (
            "The O(·) hides a constant, and the statement does not say what it may depend on.",
            f"With S' = identity, L = 4 and aligned weights of 10⁻³ the distance over η is {table}: for this S' the "
            "constant grows with d. Whether another S' avoids that is not decided here.",
            "For every fixed width, depth and number of heads a one-layer S' exists with an error of order η³, which "
            "ours.mean-field-certificate bounds.",
        ),
    )


def _remark() -> Observed:
    return Observed(
        "undecided",
        None,
        0,
        (
            "The remark gives no inequality: it says that the Lipschitz constant of f will appear in the bound.",
            "ours.mlp-deletion is such a bound.",
        ),
    )


_SETTING = "all weights at most η in size, H heads, L layers, η ≤ A·min{1/(HL), 1/φ₀} ≤ 1, ‖X‖∞ ≤ φ₀"
_SAME = "Every layer and head of the witness has the same Q, K, V; the conditions hold with A = 1."

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "A.1.2",
        "Theorem 1.2 (informal)",
        "there is a one-layer S' with ‖S(X) − S'(X)‖∞ ≤ O(η) for every ‖X‖∞ ≤ O(1)",
        Study(_informal),
        "weights at most η in size",
        "ours.mean-field-certificate",
    ),
    Claim(
        "A.D.1",
        "Theorem D.1, the bound of its proof",
        "‖S(X) − S'(X)‖∞ ≤ (C^L + … + C + 1)δ, S' the last layer alone",
        _explicit(False, tuple({"d": 1, "L": L} for L in (4, 8, 16, 24))),
        _SETTING,
        "ours.mean-field-certificate",
        note="The witness is one token of one coordinate; its attention is the token itself, so that each layer "
        "multiplies it by 1 + η and the check needs no softmax. With wider tokens fewer layers do. " + _SAME,
    ),
    Claim(
        "A.D.1.displayed",
        "Theorem D.1, the displayed inequality of its proof",
        "‖softmv_L(B_L⁰) − softmv_L(B_L^L)‖∞ ≤ (C^L + … + C + 1)δ",
        _explicit(True, tuple({"d": d, "L": 4} for d in (2, 4, 8))),
        _SETTING,
        "ours.mean-field-certificate",
        note="The attention outputs of the last layer alone, without the skip connection. " + _SAME,
    ),
    Claim(
        "A.D.1.exists",
        "Theorem D.1, as an existence statement",
        "there is a one-layer S' with ‖S(X) − S'(X)‖∞ ≤ O(A/L)",
        Study(_informal),
        _SETTING,
        "ours.mean-field-certificate",
    ),
    Claim(
        "A.D.2",
        "Remark D.2",
        "the proof generalises to layers with an MLP f, with the Lipschitz constant of f in the bound",
        Study(_remark),
        "X_ℓ = f(B_ℓ)",
        "ours.mlp-deletion",
    ),
)
