"""Exact linear algebra with rational numbers, to check verified spectral bounds."""

from fractions import Fraction

from torch import Tensor

Rows = list[list[Fraction]]


def rationals(A: Tensor) -> Rows:
    """Convert a float matrix to rational numbers exactly."""
    return [[Fraction(x) for x in row] for row in A.tolist()]


def gram(M: Rows) -> Rows:
    """Return MᵀM."""
    columns = list(zip(*M, strict=True))
    return [[sum((a * b for a, b in zip(p, q, strict=True)), Fraction(0)) for q in columns] for p in columns]


def is_positive_semidefinite(S: Rows) -> bool:
    """Return whether a symmetric matrix is positive semidefinite, by elimination with the largest diagonal entry."""
    S = [row[:] for row in S]
    while S:
        pivot = max(range(len(S)), key=lambda i: S[i][i])
        d = S[pivot][pivot]
        if d <= 0:
            return d == 0 and all(x == 0 for row in S for x in row)
        rest = [i for i in range(len(S)) if i != pivot]
        S = [[S[i][j] - S[i][pivot] * S[pivot][j] / d for j in rest] for i in rest]
    return True


def bounds_eigenvalues(t: Fraction, S: Rows) -> bool:
    """Return whether t ≥ λ_max(S), that is, whether tI − S is positive semidefinite."""
    return is_positive_semidefinite([[(t if i == j else 0) - x for j, x in enumerate(row)] for i, row in enumerate(S)])


def bounds_spectral_norm(t: Fraction, M: Rows) -> bool:
    """Return whether t ≥ ‖M‖₂."""
    M = M if len(M) >= len(M[0]) else [list(column) for column in zip(*M, strict=True)]
    return t >= 0 and bounds_eigenvalues(t * t, gram(M))
