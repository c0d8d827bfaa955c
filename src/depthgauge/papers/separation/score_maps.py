"""The entrywise map k from scores to weights: exp (softmax), lin (linear attention), poly:g (Taylor polynomial)."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from flint import arb, fmpq

from depthgauge.base.errors import InputError, unknown_name


@dataclass(frozen=True)
class ScoreMap:
    """A kind of attention f = k(u) / Σ k(u), with k(u) = eᵘ (exp), k(u) = u (lin) or k(u) = Σ_{i≤g} uⁱ/i! (poly:g).

    As in the paper, lin is k(u) = u. It differs from poly:1, which is 1 + u.
    """

    family: Literal["exp", "lin", "poly"]
    degree: int = 0

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"poly:{self.degree}" if self.family == "poly" else self.family


EXP = ScoreMap("exp")
LIN = ScoreMap("lin")


def parse_attention(name: str) -> ScoreMap:
    """Return the attention kind with the given name.

    >>> parse_attention("poly:3")
    ScoreMap(family='poly', degree=3)
    """
    if name in ("exp", "lin"):
        return EXP if name == "exp" else LIN
    match = re.fullmatch(r"poly:(\d{1,4})", name)
    if match is None:
        raise unknown_name("attention", name, ["exp", "lin", "poly:G"])
    degree = int(match[1])
    if degree < 1:
        raise InputError(f"the degree of {name} must be at least 1; poly:0 gives all tokens the same weight")
    return ScoreMap("poly", degree)


def to_arb(number: Fraction | int) -> Any:
    """Convert a rational number to arb at the working precision."""
    return arb(fmpq(number.numerator, number.denominator))


def weights(kind: ScoreMap, n: int, scores: list[Fraction]) -> list[Any]:
    """Return k(q·log n) for each q in `scores` as arb, up to a common positive factor.

    For exp the factor is n^(−max q), which avoids overflow for large scores.
    """
    log_n = arb(n).log()
    if kind.family == "lin":
        return [to_arb(q) for q in scores]
    if kind.family == "exp":
        top = max(scores)
        return [(to_arb(q - top) * log_n).exp() for q in scores]
    return [_truncated_exp(to_arb(q) * log_n, kind.degree) for q in scores]


def _truncated_exp(u: Any, degree: int) -> Any:
    """Return Σ_{i≤g} uⁱ/i! by Horner's rule: 1 + u/1·(1 + u/2·(1 + …))."""
    total = arb(1)
    for i in range(degree, 0, -1):
        total = 1 + total * u / i
    return total
