"""Exact decisions at the threshold: the sign of Σ r·k(q·log n) for rational r and q.

Up to a positive factor, ⟨c_{j₀}, y⟩ − τ has this form: r is the contribution of a key minus τ, and q is its score
divided by log n. The sign is computed with interval arithmetic (arb) of increasing precision. This terminates unless
the sum is zero, and a zero sum is recognised algebraically:

- lin: The sum is log n · Σ r·q, a rational number times log n.
- poly:g: The sum is a polynomial in log n with rational coefficients. log n is transcendental for n ≥ 2
  (Lindemann), so the sum is zero only if all coefficients are zero.
- exp: The sum is Σ r·n^q. Let n = v^k where v is not a perfect power. For every N the numbers v^{i/N}, 0 ≤ i < N, are
  linearly independent over the rationals (x^N − v is irreducible). So the sum is zero only if, for each class of
  exponents kq that differ by integers, the terms of the class sum to zero.
"""

from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from math import floor, lcm

from flint import arb, ctx, fmpz

from depthgauge.papers.separation.score_maps import ScoreMap, to_arb, weights

_FIRST_PRECISION = 128
_MODERATE_BITS = 10_000


def sign_of_sum(kind: ScoreMap, n: int, terms: Iterable[tuple[Fraction, Fraction]]) -> int:
    """Return the sign (−1, 0 or 1) of Σ r·k(q·log n) over the (r, q) of `terms`, with all q ≥ 0 and n ≥ 2.

    >>> from depthgauge.papers.separation.score_maps import EXP
    >>> sign_of_sum(EXP, 4, [(Fraction(2), Fraction(0)), (Fraction(-1), Fraction(1, 2))])  # 2·4⁰ − 4^½
    0
    """
    merged: defaultdict[Fraction, Fraction] = defaultdict(Fraction)
    for coefficient, score in terms:
        merged[score] += coefficient
    nonzero = {score: coefficient for score, coefficient in merged.items() if coefficient}
    if not nonzero:
        return 0
    if kind.family == "lin":
        rational = sum((r * q for q, r in nonzero.items()), Fraction(0))
        return (rational > 0) - (rational < 0)
    precision = _FIRST_PRECISION
    while True:
        with ctx.workprec(precision):
            pairs = zip(nonzero.values(), weights(kind, n, list(nonzero)), strict=True)
            total = sum((to_arb(r) * w for r, w in pairs), arb(0))  # up to a positive factor
        if total > 0:
            return 1
        if total < 0:
            return -1
        if precision == _FIRST_PRECISION:  # the sign is undecided: test for zero
            if kind.family == "exp":
                n, nonzero = _combined(n, nonzero)
            if _zero_polynomial(kind.degree, nonzero) if kind.family == "poly" else _zero_powers(n, nonzero):
                return 0
        precision *= 2


def _zero_polynomial(degree: int, nonzero: dict[Fraction, Fraction]) -> bool:
    """Return whether Σ r·qⁱ = 0 for all i ≤ g. Divided by i!, these are the coefficients of the polynomial in log n."""
    powers = dict.fromkeys(nonzero, Fraction(1))
    for _ in range(degree + 1):
        if sum((r * powers[q] for q, r in nonzero.items()), Fraction(0)):
            return False
        powers = {q: power * q for q, power in powers.items()}
    return True


def _by_fraction(nonzero: dict[Fraction, Fraction]) -> dict[Fraction, dict[int, Fraction]]:
    """Group the terms by the fractional part of the exponent, then by its integer part."""
    found: defaultdict[Fraction, dict[int, Fraction]] = defaultdict(dict)
    for exponent, r in nonzero.items():
        whole = floor(exponent)
        found[exponent - whole][whole] = r
    return found


def _combined(n: int, nonzero: dict[Fraction, Fraction]) -> tuple[int, dict[Fraction, Fraction]]:
    """Rewrite Σ r·n^q as Σ r'·v^e with n = v^k, and merge terms whose exponents differ by a moderate integer.

    Terms that cancel exactly disappear for exponents of any size. Interval arithmetic can then decide the rest.
    """
    v, k = _primitive_root(n)
    combined: dict[Fraction, Fraction] = {}
    for fraction, coefficients in _by_fraction({k * q: r for q, r in nonzero.items()}).items():
        base = min(coefficients)
        for whole in sorted(coefficients):
            if (whole - base) * v.bit_length() > _MODERATE_BITS:
                base = whole
            at = base + fraction
            combined[at] = combined.get(at, Fraction(0)) + coefficients[whole] * v ** (whole - base)
    return v, {exponent: r for exponent, r in combined.items() if r}


def _zero_powers(v: int, nonzero: dict[Fraction, Fraction]) -> bool:
    """Return whether Σ r·v^e = 0, where v is not a perfect power. Each class of exponents must sum to zero."""
    return all(_zero_at_integer(v, coefficients) for coefficients in _by_fraction(nonzero).values())


def _zero_at_integer(v: int, coefficients: dict[int, Fraction]) -> bool:
    """Return whether Σ r·vᵉ = 0 for integer e. From the lowest power up, the partial sum must be divisible by v."""
    common = lcm(*(r.denominator for r in coefficients.values()))
    carry, at = 0, min(coefficients)
    for exponent in sorted(coefficients):
        for _ in range(exponent - at):
            if carry == 0:
                break
            carry, rest = divmod(carry, v)
            if rest:
                return False
        at = exponent
        carry += int(coefficients[exponent] * common)
    return carry == 0


@lru_cache(maxsize=1024)
def _primitive_root(n: int) -> tuple[int, int]:
    """Return (v, k) with n = v^k and k as large as possible.

    >>> _primitive_root(64), _primitive_root(200)
    ((2, 6), (200, 1))
    """
    for power in range(n.bit_length(), 1, -1):
        root = int(fmpz(n).root(power))
        if root >= 2 and root**power == n:
            return root, power
    return n, 1
