"""The entry-wise map k from a score to a weight: exp (softmax), lin (linear attention), poly:g (between the two)."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from flint import arb, fmpq

from depthgauge.errors import InputError, unknown_name


@dataclass(frozen=True)
class Attention:
    """A kind of attention, f = k(u) / Σ k(u): exp is k(u) = eᵘ, lin is k(u) = u, poly:g is k(u) = Σ_{i≤g} uⁱ/i!.

    Note that lin is u itself, as in the paper, and not the truncation poly:1, which is 1 + u.
    """

    family: Literal["exp", "lin", "poly"]
    degree: int = 0

    @property
    def name(self) -> str:
        """The name a user types."""
        return f"poly:{self.degree}" if self.family == "poly" else self.family


EXP = Attention("exp")
LIN = Attention("lin")


def parse_attention(name: str) -> Attention:
    """The attention kind that `name` stands for.

    >>> parse_attention("poly:3")
    Attention(family='poly', degree=3)
    """
    if name == "exp":
        return EXP
    if name == "lin":
        return LIN
    match = re.fullmatch(r"poly:(\d{1,4})", name)
    if match is None:
        raise unknown_name("attention", name, ["exp", "lin", "poly:G"])
    degree = int(match[1])
    if degree < 1:
        raise InputError(f"the degree of {name} must be at least 1; poly:0 weighs every token alike")
    return Attention("poly", degree)


def ball(number: Fraction | int) -> Any:
    """`number` as an arb ball at the working precision."""
    return arb(fmpq(number.numerator, number.denominator))


def weights(kind: Attention, n: int, scores: list[Fraction]) -> list[Any]:
    """Balls around k(q·log n) for each q in `scores`, up to one positive factor common to all of them.

    For exp the factor is n^(−max q), so that huge scores do no harm.
    """
    log_n = arb(n).log()
    if kind.family == "lin":
        return [ball(q) for q in scores]
    if kind.family == "exp":
        top = max(scores)
        return [(ball(q - top) * log_n).exp() for q in scores]
    return [_truncated_exp(ball(q) * log_n, kind.degree) for q in scores]


def _truncated_exp(u: Any, degree: int) -> Any:
    """Σ_{i≤g} uⁱ/i! by Horner's rule: 1 + u/1·(1 + u/2·(1 + …))."""
    total = arb(1)
    for i in range(degree, 0, -1):
        total = 1 + total * u / i
    return total
