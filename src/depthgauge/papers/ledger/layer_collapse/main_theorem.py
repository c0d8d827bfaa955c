"""The main theorem of paper A: 1.2, D.1 and Remark D.2.

The proof of Theorem D.1 deletes every layer except the last and bounds the distance by (C^L + … + C + 1)δ with
ε_ℓ = 2ηφ₀(1 + Hη)^ℓ, δ = max_ℓ 2g(2Hε_ℓ), C = max_ℓ 3η(ε_ℓ² + 1). This bound has no hidden constant and can be tested.
The theorem itself states O(A/L).
"""

from collections.abc import Iterator

import numpy as np

from depthgauge.base.format import number
from depthgauge.papers.ledger.arithmetic import FLOATS, Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Computation, Evaluate, Evaluation, Instance, Observed, Size
from depthgauge.papers.ledger.formulas import attention, depth, layer, max_norm
from depthgauge.papers.ledger.instances import matrix, searched
from depthgauge.papers.ledger.layer_collapse.attention_layers import growth
from depthgauge.papers.ledger.layer_collapse.small_weight_networks import epsilon, largest_weight


def _proof_bound(ar: Arithmetic, eta: Value, phi: Value, H: int, L: int) -> tuple[Value, Value, Value, Value]:
    """Return ε_L, δ, C and (C^L + … + 1)δ. The maxima over ℓ are attained at ℓ = L, since ε_ℓ ≤ ε_L."""
    eps = epsilon(ar, eta, phi, H, L)
    delta, c = 2 * growth(ar, 2 * H * eps), 3 * eta * (eps**2 + 1)
    return eps, delta, c, sum((c**k for k in range(L + 1)), ar.number(0)) * delta


def _collapsed(displayed: bool) -> Evaluate:
    def evaluate(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, H: int, L: int) -> Evaluation:
        eta, phi, weights = largest_weight(ar, Q, K, V), max_norm(ar, X), (Q, K, V)
        before = depth(ar, X, weights, L - 1, H)
        if displayed:
            first, second = attention(ar, before, *weights), attention(ar, X, *weights)
            outputs = {"softmv_L(X_{L−1}), the last layer's attention in S": first}
            outputs |= {"softmv_L(X), the last layer's attention on the input": second}
        else:
            first, second = layer(ar, before, *weights, heads=H), layer(ar, X, *weights, heads=H)
            outputs = {"S(X)": first, "S'(X), the last layer alone": second}
        eps, delta, c, bound = _proof_bound(ar, eta, phi, H, L)
        steps = {
            "η, the largest weight": eta,
            "φ₀ = ‖X‖∞": phi,
            "X_{L−1}, the input of the last layer of S": before,
            **outputs,
            "ε_L = 2ηφ₀(1 + Hη)^L": eps,
            "δ = 2g(2Hε_L), g(ε) = 2(e^ε − 1)": delta,
            "C = 3η(ε_L² + 1)": c,
            "(C^L + … + C + 1)δ": bound,
        }
        return steps, max_norm(ar, first - second), bound

    return evaluate


def _conditions(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, H: int, L: int) -> bool:
    """The conditions that the proof uses: η ≤ min{1/(HL), 1/φ₀} (that is A ≤ 1), ε_ℓ < 1, 2Hε_ℓ ≤ ½, C < ½."""
    eta, phi = largest_weight(ar, Q, K, V), max_norm(ar, X)
    if not bool(eta > 0 and phi > 0 and eta * H * L <= 1 and eta * phi <= 1):
        return False
    eps, _, c, _ = _proof_bound(ar, eta, phi, H, L)
    return bool(eps < 1 and 4 * H * eps <= 1 and 2 * c < 1)


def _aligned(size: Size) -> Iterator[Instance]:
    """One token φ₀·1 and every value weight η: each layer multiplies the token by 1 + Hηd."""
    d = size["d"]
    for eta, phi in ((0.01, 1.0), (0.1, 0.25)):
        weight = eta * np.ones((d, d))
        yield {"X": phi * np.ones((1, d)), "Q": 0 * weight, "K": 0 * weight, "V": weight, "H": 1, "L": size["L"]}


def _drawn(random: np.random.Generator, size: Size) -> Instance:
    d = size["d"]
    weights = {name: 0.01 * matrix(random, d, d) for name in ("Q", "K", "V")}
    return {"X": matrix(random, 1, d), **weights, "H": 1, "L": size["L"]}


def _explicit(displayed: bool, over: tuple[Size, ...], where: str, statement: str, note: str) -> Claim:
    left = "‖softmv_L(X_{L−1}) − softmv_L(X)‖∞" if displayed else "‖S(X) − S'(X)‖∞"
    return searched(
        "A.D.1.displayed" if displayed else "A.D.1", f"Theorem D.1, {where} of its proof",
        (left, "(C^L + … + C + 1)δ"), _collapsed(displayed), _drawn, over, _SETTING, "ours.mean-field-certificate",
        statement=statement, allowed=_conditions, starts=_aligned, note=f"{note} {_SAME}",
    )  # fmt: skip


def _informal() -> Observed:
    """Compute ‖S(X) − X‖∞/η for constant weights and growing d: the constant hidden in O(η) when S' = identity."""
    eta, found = 1e-3, []
    for d in (2, 8, 32):
        weight, X = eta * np.ones((d, d)), np.ones((1, d))
        end = depth(FLOATS, X, (weight, weight, weight), 4, 1)
        found.append(f"{number(float(np.abs(end - X).max() / eta))} at d = {d}")
    remarks = (
        "The O(·) hides a constant, and the statement does not say what the constant may depend on.",
        f"For S' = identity, L = 4 and all weights equal to η = 10⁻³, ‖S(X) − S'(X)‖∞/η is {', '.join(found)}. For "
        "this S' the constant grows with d. Whether another S' avoids this is not decided here.",
        "For fixed width, depth and number of heads the mean-field layer has an error of order η³ "
        "(docs/math.md §3), which ours.mean-field-certificate bounds.",
    )
    return Observed("undecided", None, len(found), remarks)


_SETTING = "every weight has absolute value at most η, H heads, L layers, η ≤ A·min{1/(HL), 1/φ₀} ≤ 1, ‖X‖∞ ≤ φ₀"
_SAME = "All layers and heads of the witness have the same Q, K, V; the conditions hold with A = 1."
_REMARKS = (
    "The remark states no inequality, only that the Lipschitz constant of f will appear in the bound.",
    "ours.mlp-deletion is a bound of this kind.",
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "A.1.2", "Theorem 1.2 (informal)",
        "there is a one-layer S' with ‖S(X) − S'(X)‖∞ ≤ O(η) for every ‖X‖∞ ≤ O(1)",
        Computation(_informal), "every weight has absolute value at most η", "ours.mean-field-certificate",
    ),
    _explicit(
        False, tuple({"d": 1, "L": L} for L in (4, 8, 16, 24)), "the bound",
        "‖S(X) − S'(X)‖∞ ≤ (C^L + … + C + 1)δ, where S' is the last layer alone",
        "The witness is one token with one coordinate. Its attention output is η times the token, so each layer "
        "multiplies it by 1 + η and no softmax is needed to check it. Wider tokens need fewer layers.",
    ),
    _explicit(
        True, tuple({"d": d, "L": 4} for d in (2, 4, 8)), "the displayed inequality",
        "‖softmv_L(B_L⁰) − softmv_L(B_L^L)‖∞ ≤ (C^L + … + C + 1)δ",
        "These are the attention outputs of the last layer, without the skip connection.",
    ),
    Claim(
        "A.D.1.exists", "Theorem D.1, as an existence statement",
        "there is a one-layer S' with ‖S(X) − S'(X)‖∞ ≤ O(A/L)",
        Computation(_informal), _SETTING, "ours.mean-field-certificate",
    ),
    Claim(
        "A.D.2", "Remark D.2",
        "the proof generalises to layers with an MLP f, with the Lipschitz constant of f in the bound",
        Computation(lambda: Observed("undecided", None, 0, _REMARKS)), "X_ℓ = f(B_ℓ)", "ours.mlp-deletion",
    ),
)  # fmt: skip
