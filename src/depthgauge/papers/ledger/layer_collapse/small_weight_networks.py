"""Paper A on the layers of a network with small weights: C.2, D.7, D.8.

The networks here have equal layers and equal heads. A counterexample among them is a counterexample to the statement
about all networks.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator as Random

from depthgauge.papers.ledger.arithmetic import FLOATS, Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Evaluate, Evaluation, Instance, Size, Starts
from depthgauge.papers.ledger.formulas import attention, depth, max_norm, residual
from depthgauge.papers.ledger.instances import drawing, searched

_NETWORK = "every weight has absolute value at most η, ‖X₀‖∞ ≤ φ₀, X_ℓ is the output of layer ℓ"
_EQUAL = "The network of the witness has equal layers, equal heads and β = 1."


def largest_weight(ar: Arithmetic, Q: Value, K: Value, V: Value) -> Value:
    """η, the largest absolute value of the weights."""
    return ar.max(np.stack([max_norm(ar, M) for M in (Q, K, V)]))


def epsilon(ar: Arithmetic, eta: Value, phi: Value, heads: int, ell: int) -> Value:
    """ε_ℓ = 2 η φ₀ (1 + Hη)^ℓ (Definition A.2)."""
    return 2 * eta * phi * (1 + heads * eta) ** ell


def _small(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, H: int, ell: int, **_: Value) -> bool:
    """The conditions of Lemma C.2: η ∈ (0, 1], ε_ℓ ∈ (0, 1)."""
    eta, phi = largest_weight(ar, Q, K, V), max_norm(ar, X0)
    if not bool(eta > 0 and eta <= 1 and phi > 0):
        return False
    return bool(epsilon(ar, eta, phi, H, ell) < 1)


def _quantities(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, H: int, ell: int) -> tuple[Value, Value]:
    eta, phi = largest_weight(ar, Q, K, V), max_norm(ar, X0)
    return depth(ar, X0, (Q, K, V), ell, H), epsilon(ar, eta, phi, H, ell)


def _condition(part: int) -> Evaluate:
    def evaluate(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, H: int, ell: int) -> Evaluation:
        X, eps = _quantities(ar, X0, Q, K, V, H, ell)
        steps = {"X_ℓ": X, "ε_ℓ = 2ηφ₀(1 + Hη)^ℓ": eps}
        if part == 1:
            R, k = residual(ar, X), (ar.exp(ar.number(1)) - 1) * max_norm(ar, V)
            steps |= {"Res(X_ℓ)": R, "K = (e^θ − 1)‖W_v‖∞ with θ = 1": k}
            return steps, k * max_norm(ar, R), eps
        if part == 2:
            added = H * attention(ar, X, Q, K, V)
            return steps | {"B − X_ℓ = Σ_i softmv_i(X_ℓ)": added}, max_norm(ar, added @ V), H * eps
        return steps | {"X_ℓ W_v": X @ V}, max_norm(ar, X @ V), ar.number(1)

    return evaluate


def _lipschitz(restored: bool) -> Evaluate:
    def evaluate(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, Y: Value, H: int, ell: int) -> Evaluation:
        X, eps = _quantities(ar, X0, Q, K, V, H, ell)
        eta, gap = largest_weight(ar, Q, K, V), max_norm(ar, X - Y)
        first, second = attention(ar, X, Q, K, V), attention(ar, Y, Q, K, V)
        steps = {"X_ℓ": X, "‖X_ℓ − Y‖∞": gap, "softmv(X_ℓ)": first, "softmv(Y)": second, "η": eta}
        steps |= {"ε_ℓ = 2ηφ₀(1 + Hη)^ℓ": eps}
        bound = 3 * eta * (eps**2 + 1)
        return steps, max_norm(ar, first - second), bound * gap if restored else bound

    return evaluate


def _near(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, Y: Value, H: int, ell: int) -> bool:
    """‖Y − X_ℓ‖∞ < 2‖X_ℓ‖∞, with nonzero weights and input."""
    X, eps = _quantities(ar, X0, Q, K, V, H, ell)
    return bool(max_norm(ar, X - Y) < 2 * max_norm(ar, X) and max_norm(ar, X - Y) > 0 and eps > 0)


def _growing(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, H: int) -> Evaluation:
    after = X + H * attention(ar, X, Q, K, V)
    steps = {"X_{ℓ+1} = X_ℓ + Σ_i softmv_i(X_ℓ)": after, "η = ‖W_v‖∞": max_norm(ar, V)}
    return steps, max_norm(ar, after), max_norm(ar, X) * (1 + H * max_norm(ar, V))


def _grown(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, H: int, ell: int) -> Evaluation:
    after, eta = depth(ar, X0, (Q, K, V), ell, H), max_norm(ar, V)
    return {"X_ℓ": after, "η = ‖W_v‖∞": eta}, max_norm(ar, after), max_norm(ar, X0) * (1 + H * eta) ** ell


def _drawn(names: dict[str, str], **counts: int) -> Callable[[Random, Size], Instance]:
    draw = drawing(names)

    def sample(random: Random, size: Size) -> Instance:
        instance = dict(draw(random, size))
        for name in ("Q", "K", "V"):
            instance[name] = np.clip(instance[name], -1, 1)
        return {**instance, **counts}

    return sample


def _aligned(size: Size, entry: str, inputs: Sequence[float], etas: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Tokens φ·1 (and −φ·1 for n = 2) and every weight η, so that contributions add up instead of cancelling."""
    n, d = size["n"], size["d"]
    signs = np.ones((n, 1)) if n == 1 else np.array([[1.0], [-1.0]])
    for phi, eta in itertools.product(inputs, etas):
        weight = eta * np.ones((d, d))
        yield {entry: phi * signs * np.ones(d), "Q": weight, "K": weight, "V": weight}


def _starts_for_conditions(size: Size) -> Iterator[Instance]:
    return ({**start, "H": 1, "ell": 1} for start in _aligned(size, "X0", (0.125, 0.2, 0.24), (1.0, 0.5)))


def _starts_for_growth(entry: str, **counts: int) -> Starts:
    def starts(size: Size) -> Iterator[Instance]:
        for start in _aligned(size, entry, (1.0,), (1.0, 0.1)):
            yield {**start, "Q": 0 * start["Q"], "K": 0 * start["K"], "H": 1, **counts}

    return starts


def _starts_for_lipschitz(size: Size) -> Iterator[Instance]:
    for start in _aligned(size, "X0", (4.0, 1.5, 1.0), (0.01, 0.1)):
        X = depth(FLOATS, start["X0"], (start["Q"], start["K"], start["V"]), 1, 1)
        yield from ({**start, "Y": factor * X, "H": 1, "ell": 1} for factor in (0, 0.75))


_WEIGHTS = {"Q": "d d", "K": "d d", "V": "d d"}
_ONE = {"X0": "n d", **_WEIGHTS}


def _condition_claim(part: int, sides: tuple[str, str], hypothesis: str, over: tuple[Size, ...], **more: Any) -> Claim:
    return searched(
        f"A.C.2.{part}", f"Lemma C.2 ({part})", sides, _condition(part), _drawn(_ONE, H=1, ell=1), over, hypothesis,
        "ours.layer-growth", allowed=_small, starts=_starts_for_conditions, note=_EQUAL, **more,
    )  # fmt: skip


def _lipschitz_claim(id: str, where: str, right: str, relation: str, over: tuple[Size, ...], note: str) -> Claim:
    """Lemma D.7, as printed or with the factor ‖X_ℓ − Y‖∞ of its proof."""
    return searched(
        id, where, ("‖softmv(X_ℓ) − softmv(Y)‖∞", right), _lipschitz(restored=relation == "<="),
        _drawn({**_ONE, "Y": "n d"}, H=1, ell=1), over, f"{_NETWORK}, ‖Y − X_ℓ‖∞ < 2‖X_ℓ‖∞",
        "ours.attention-lipschitz-values", allowed=_near, starts=_starts_for_lipschitz, relation=relation, note=note,
    )  # fmt: skip


def _shapes(n: int, *dims: int) -> tuple[Size, ...]:
    return tuple({"n": n, "d": d} for d in dims)


CLAIMS: tuple[Claim, ...] = (
    _condition_claim(
        1, ("(e − 1)‖W_v‖∞ ‖Res(X_ℓ)‖∞", "ε_ℓ"),
        f"{_NETWORK}, η ∈ (0, 1], ε_ℓ = 2ηφ₀(1 + Hη)^ℓ ∈ (0, 1); θ = 1 by Lemma B.4", _shapes(2, 1, 2, 3),
        statement="K‖Res(X_ℓ)‖∞ ≤ ε_ℓ, K = (e − 1)‖W_v‖∞",
    ),
    _condition_claim(
        2, ("‖(B − X_ℓ)W_v‖∞", "Hε_ℓ"), "as in part 1; B = X_ℓ + Σ_i softmv_i(X_ℓ)", _shapes(1, 1, 2)
    ),
    _condition_claim(3, ("‖X_ℓ W_v‖∞", "1"), "as in part 1", _shapes(1, 1, 2)),
    _lipschitz_claim(
        "A.D.7", "Lemma D.7", "3η(ε_ℓ² + 1)", "<", _shapes(1, 1, 2),
        "The factor ‖X_ℓ − Y‖∞ of the proof is missing in the statement. A.D.7.restored has it and fails too. "
        + _EQUAL,
    ),
    _lipschitz_claim(
        "A.D.7.restored", "Lemma D.7, with the factor of its proof", "3η(ε_ℓ² + 1) ‖X_ℓ − Y‖∞", "<=",
        _shapes(2, 1, 2, 3), _EQUAL,
    ),
    searched(
        "A.D.8.1", "Lemma D.8 (1)", ("‖X_{ℓ+1}‖∞", "‖X_ℓ‖∞ (1 + Hη)"), _growing,
        _drawn({"X": "n d", **_WEIGHTS}, H=1), _shapes(1, 1, 2), "‖W_v‖∞ ≤ η, H heads", "ours.layer-growth",
        starts=_starts_for_growth("X"), note=_EQUAL,
    ),
    searched(
        "A.D.8.2", "Lemma D.8 (2)", ("‖X_ℓ‖∞", "φ₀ (1 + Hη)^ℓ"), _grown, _drawn(_ONE, H=1, ell=2), _shapes(1, 1, 2),
        "‖X₀‖∞ ≤ φ₀, ‖W_v‖∞ ≤ η, H heads", "ours.layer-growth", starts=_starts_for_growth("X0", ell=2), note=_EQUAL,
    ),
)  # fmt: skip
