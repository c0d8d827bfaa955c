"""Vectors of upper bounds and verified norms, in arb interval arithmetic (python-flint).

A `Vector` bounds |·| per coordinate. Its entries are exact arb numbers, upper ends of intervals, so any two can be
compared. Every comparison with NaN is false, so NaN never proves a bound.
"""

from collections.abc import Sequence

import numpy as np
from flint import arb, arb_mat

from depthgauge.base.errors import VerificationError
from depthgauge.theory.linalg.enclosures import SignBound

Vector = list[arb]
ENUMERATED = 10
"""The largest number of rows or columns for which all sign vectors are enumerated."""


def add(*vectors: Vector) -> Vector:
    """Bound the sum of vectors."""
    return [sum(entries[1:], entries[0]).upper() for entries in zip(*vectors, strict=True)]


def times(factor: arb, vector: Vector) -> Vector:
    """Bound factor · vector."""
    return [(factor * entry).upper() for entry in vector]


def smaller(x: arb, y: arb) -> arb:
    """Return the smaller of two upper ends, or the other one if one is NaN."""
    return y if y < x or x.is_nan() else x


def smaller_of(x: Vector, y: Vector) -> Vector:
    """Return the smaller entry per coordinate."""
    return [smaller(a, b) for a, b in zip(x, y, strict=True)]


def largest(values: Sequence[arb]) -> arb:
    """Return the largest upper end, or NaN if any is NaN."""
    found = values[0].upper()
    for value in values:
        end = value.upper()
        if end.is_nan():
            return end
        if end > found:
            found = end
    return found


def absolute(M: arb_mat) -> arb_mat:
    """Return the upper ends of |M|, entrywise."""
    return arb_mat(M.nrows(), M.ncols(), [entry.abs_upper() for entry in M.entries()])


def through(g: Vector, size: arb_mat) -> Vector:
    """Bound g|M|, where `size` is |M|."""
    return [entry.upper() for entry in (arb_mat([g]) * size).entries()]


def column_sums(M: arb_mat) -> Vector:
    """Bound 1|M|, the column sums of |M|."""
    return through([arb(1)] * M.nrows(), absolute(M))


def length(entries: Sequence[arb]) -> arb:
    """Bound the Euclidean length; an interval around 0 has no root, but its upper end has."""
    return sum((entry * entry for entry in entries), arb(0)).upper().sqrt().upper()


def column_lengths(M: arb_mat) -> Vector:
    """Bound ‖M e_a‖₂ for every column a."""
    return [length(column) for column in M.transpose().tolist()]


def identity(n: int) -> arb_mat:
    """Return the n × n identity matrix."""
    return arb_mat([[int(i == j) for j in range(n)] for i in range(n)])


def largest_eigenvalue(S: arb_mat) -> arb:
    """Bound max(λ_max(S), 0) for every symmetric matrix in the interval matrix S (docs/math.md §2.9).

    Let V be any square matrix, here approximate eigenvectors, B = VᵀSV and δ ≥ ‖VᵀV − I‖₂, the largest row sum. If
    δ < 1, then V is invertible, and x = Vy gives xᵀSx = yᵀBy ≤ g|y|² with g = max_i (B_ii + Σ_{j≠i} |B_ij|) and
    |x|² ≥ (1 − δ)|y|², hence λ_max(S) ≤ max(g, 0)/(1 − δ). Otherwise the largest row sum of |S| is returned.
    """
    n = S.nrows()
    size = largest([entry.abs_upper() for entry in S.entries()])
    if size == 0 or not size.is_finite():
        return size
    middle = np.array([float((entry / size).mid()) for entry in S.entries()]).reshape(n, n)
    V = arb_mat(n, n, [arb(entry) for entry in np.linalg.eigh((middle + middle.T) / 2)[1].flatten().tolist()])
    delta = largest(_row_sums(V.transpose() * V - identity(n)))
    B = (V.transpose() * S * V).tolist()
    discs = [B[i][i] + sum((abs(B[i][j]) for j in range(n) if j != i), arb(0)) for i in range(n)]
    if not delta < 1:
        return largest(_row_sums(S))
    return (largest([arb(0), *discs]) / (1 - delta)).upper()


def _row_sums(M: arb_mat) -> list[arb]:
    return [sum((abs(entry) for entry in row), arb(0)) for row in M.tolist()]


def spectral_norm(M: arb_mat) -> arb:
    """Bound ‖M‖₂ = √λ_max of the Gram matrix of the shorter side."""
    gram = M * M.transpose() if M.nrows() <= M.ncols() else M.transpose() * M
    return largest_eigenvalue(gram).sqrt().upper()


def scalings(name: str, values: Sequence[float], length: int) -> list[arb]:
    """Convert recorded scalings to arb; raise unless they are `length` positive finite numbers."""
    numbers = [arb(value) for value in values]
    if len(numbers) != length or not all(number > 0 and number.is_finite() for number in numbers):
        raise VerificationError(f"{name}: the recorded scalings are not {length} positive numbers")
    return numbers


def mass(scale: list[arb]) -> arb:
    """Bound Σu for scale = D_u^{-½}, u = 1/scale²."""
    return sum((1 / (s * s) for s in scale), arb(0)).upper()


def weighted(left: Sequence[arb], M: arb_mat, right: Sequence[arb]) -> arb_mat:
    """Return diag(left) M diag(right)."""
    rows = M.tolist()
    return arb_mat(
        [[a * entry * b for entry, b in zip(row, right, strict=True)] for a, row in zip(left, rows, strict=True)]
    )


def sign_norms(
    record: dict[str, SignBound], name: str, left: Vector, matrices: Sequence[arb_mat], right: Vector, first: int = 0
) -> list[arb]:
    """Bound ‖diag(left) M_h diag(right)‖_{∞→1} for every head h, with the scalings recorded under `name` (§3.4)."""
    found = []
    for h, matrix in enumerate(matrices, first):
        M = weighted(left, matrix, right)
        total = sum((abs(entry) for entry in M.entries()), arb(0)).upper()
        if min(M.nrows(), M.ncols()) <= ENUMERATED:
            found.append(smaller(total, _enumerated(M)))
            continue
        bound = record.get(name)
        if bound is None or bound.row_scale is None or bound.column_scale is None or h >= len(bound.row_scale):
            raise VerificationError(f"{name}: no scalings were recorded for head {h}")
        row_scale = scalings(name, bound.row_scale[h].tolist(), M.nrows())
        column_scale = scalings(name, bound.column_scale[h].tolist(), M.ncols())
        plain = (spectral_norm(M) * arb(M.nrows() * M.ncols()).sqrt()).upper()
        masses = (mass(row_scale) * mass(column_scale)).sqrt()
        scaled = (spectral_norm(weighted(row_scale, M, column_scale)) * masses).upper()
        found.append(smaller(total, smaller(plain, scaled)))
    return found


def _enumerated(M: arb_mat) -> arb:
    """Bound max_x Σ_j |Σ_i x_i M_ij| over the sign vectors x of the shorter side."""
    M = M if M.nrows() <= M.ncols() else M.transpose()
    m = M.nrows()  # all sign vectors of length m with first entry +1, as rows
    signs = [[1 if i == 0 or not code >> (i - 1) & 1 else -1 for i in range(m)] for code in range(2 ** (m - 1))]
    return largest(_row_sums(arb_mat(signs) * M))


def exact(values: Sequence[float]) -> Vector:
    """Convert floating-point numbers to arb without rounding."""
    return [arb(value) for value in values]
