"""The last word on a decision at the threshold: the sign of Σ r·k(q·log n) for rational r and q, without rounding.

⟨c_{j₀}, y⟩ − τ has, up to a positive factor, this form: r is what a key adds beyond τ, q its score over log n.
The sign is found with balls of growing precision.  That ends unless the sum is zero, and zero can be recognised:

- lin: the sum is log n · Σ r·q, a rational number times log n;
- poly:g: it is a polynomial in log n with rational coefficients; log n is transcendental for n ≥ 2
  (Lindemann), so the sum is zero only if every coefficient is;
- exp: it is Σ r·n^q.  Let n = v^k with v not a perfect power.  For every N the numbers v^{i/N}, 0 ≤ i < N, are
  linearly independent over the rationals (x^N − v is irreducible), so the sum is zero only if the terms whose
  exponents kq differ by whole numbers cancel among themselves.
"""

from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from math import floor, lcm
from typing import Any

from flint import arb, ctx, fmpz

from depthgauge.separation.score_maps import Attention, ball, weights

_FIRST_PRECISION = 128
_MODERATE_BITS = 10_000


def sign_of_sum(kind: Attention, n: int, terms: Iterable[tuple[Fraction, Fraction]]) -> int:
    """The sign (−1, 0 or 1) of Σ r·k(q·log n) over the (r, q) of `terms`, with all q ≥ 0 and n ≥ 2.

    >>> from depthgauge.separation.score_maps import EXP
    >>> sign_of_sum(EXP, 4, [(Fraction(2), Fraction(0)), (Fraction(-1), Fraction(1, 2))])  # 2·4⁰ − 4^½
    0
    """
    merged: defaultdict[Fraction, Fraction] = defaultdict(Fraction)
    for coefficient, score in terms:
        merged[score] += coefficient
    live = {score: coefficient for score, coefficient in merged.items() if coefficient}
    if not live:
        return 0
    if kind.family == "lin":
        return _sign(sum((r * q for q, r in live.items()), Fraction(0)))
    precision = _FIRST_PRECISION
    while True:
        with ctx.workprec(precision):
            total = _sum_of_balls(kind, n, live)
        if total > 0:
            return 1
        if total < 0:
            return -1
        if precision == _FIRST_PRECISION:  # too close to call: is it zero?
            if kind.family == "exp":
                n, live = _combined(n, live)
            if not live or _is_zero(kind, n, live):
                return 0
        precision *= 2


def _sign(number: Fraction) -> int:
    return (number > 0) - (number < 0)


def _sum_of_balls(kind: Attention, n: int, live: dict[Fraction, Fraction]) -> Any:
    """A ball around Σ r·k(q·log n), up to a positive factor."""
    return sum(
        (ball(r) * w for r, w in zip(live.values(), weights(kind, n, list(live)), strict=True)),
        arb(0),
    )


def _is_zero(kind: Attention, n: int, live: dict[Fraction, Fraction]) -> bool:
    """Whether the sum is exactly zero; for exp, n must not be a perfect power."""
    return _zero_polynomial(kind.degree, live) if kind.family == "poly" else _zero_powers(n, live)


def _zero_polynomial(degree: int, live: dict[Fraction, Fraction]) -> bool:
    """Whether Σ r·qⁱ = 0 for every i ≤ g: these are, over i!, the coefficients of the polynomial in log n."""
    powers = dict.fromkeys(live, Fraction(1))
    for _ in range(degree + 1):
        if sum((r * powers[q] for q, r in live.items()), Fraction(0)):
            return False
        powers = {q: power * q for q, power in powers.items()}
    return True


def _by_fraction(live: dict[Fraction, Fraction]) -> dict[Fraction, dict[int, Fraction]]:
    """The terms by the fractional part of their exponent, and then by its whole part."""
    found: defaultdict[Fraction, dict[int, Fraction]] = defaultdict(dict)
    for exponent, r in live.items():
        whole = floor(exponent)
        found[exponent - whole][whole] = r
    return found


def _combined(n: int, live: dict[Fraction, Fraction]) -> tuple[int, dict[Fraction, Fraction]]:
    """The same sum Σ r·n^q as Σ r'·v^e, n = v^k: terms whose exponents differ by a moderate whole number made one.

    So what cancels exactly is gone, however large the exponents are, and balls can see the rest.
    """
    v, k = _primitive_root(n)
    combined: dict[Fraction, Fraction] = {}
    for fraction, coefficients in _by_fraction({k * q: r for q, r in live.items()}).items():
        base = min(coefficients)
        for whole in sorted(coefficients):
            if (whole - base) * v.bit_length() > _MODERATE_BITS:
                base = whole
            at = base + fraction
            combined[at] = combined.get(at, Fraction(0)) + coefficients[whole] * v ** (whole - base)
    return v, {exponent: r for exponent, r in combined.items() if r}


def _zero_powers(v: int, live: dict[Fraction, Fraction]) -> bool:
    """Whether Σ r·v^e = 0, class by class of exponents that differ by whole numbers; v is no perfect power."""
    return all(_zero_at_integer(v, coefficients) for coefficients in _by_fraction(live).values())


def _zero_at_integer(v: int, coefficients: dict[int, Fraction]) -> bool:
    """Whether Σ r·vᵉ = 0 for whole e: from the lowest power up, what is carried must stay divisible by v."""
    common = lcm(*(r.denominator for r in coefficients.values()))
    carried, at = 0, min(coefficients)
    for exponent in sorted(coefficients):
        for _ in range(exponent - at):
            if carried == 0:
                break
            carried, rest = divmod(carried, v)
            if rest:
                return False
        at = exponent
        carried += int(coefficients[exponent] * common)
    return carried == 0


@lru_cache(maxsize=1024)
def _primitive_root(n: int) -> tuple[int, int]:
    """(v, k) with n = v^k and k as large as can be.

    >>> _primitive_root(64), _primitive_root(200)
    ((2, 6), (200, 1))
    """
    for power in range(n.bit_length(), 1, -1):
        root = int(fmpz(n).root(power))
        if root >= 2 and root**power == n:
            return root, power
    return n, 1
