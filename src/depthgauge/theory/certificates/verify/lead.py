"""The leading term in arb interval arithmetic (docs/math.md §3.3 and §3.5).

B_a is computed from the factors of the tensors T and Tᵐ and from recorded scalings.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

from flint import arb, arb_mat

from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates.lead import LeadBound
from depthgauge.theory.certificates.squares import Multipliers
from depthgauge.theory.certificates.verify.arb_vectors import largest_eigenvalue, mass, scalings, spectral_norm

Terms = list[tuple[arb_mat, arb_mat]]


class Factored:
    """The tensor T_a[b; c, e] = Σ_r left_r[b, c] · right_r[e, a], symmetrised in (c, e) and stored as its factors."""

    def __init__(self, terms: Terms, d: int) -> None:
        self.terms, self.d = terms, d

    @cached_property
    def _left(self) -> arb_mat:
        """The matrix left_r[b, c] with rows (b, c) and columns r."""
        return arb_mat([list(row) for row in zip(*(left.entries() for left, _ in self.terms), strict=True)])

    @cached_property
    def _right(self) -> list[list[list[arb]]]:
        return [right.tolist() for _, right in self.terms]

    def at(self, a: int) -> list[list[arb]]:
        """Return T_a before symmetrisation, one row per (b, c) and one column per e; no rows if there are no terms."""
        if not self.terms:
            return []
        product = self._left * arb_mat([[row[a] for row in right] for right in self._right])
        table: list[list[arb]] = product.tolist()
        return table

    def scaled(self, a: int, left: Sequence[arb], right: Sequence[arb]) -> arb_mat:
        """Return D_left T_a (D_right ⊗ D_right) as a d × d(d+1)/2 matrix in an orthonormal basis of symmetric matrices.

        The basis is E_cc and (E_ce + E_ec)/√2 for c < e; Euclidean norms are then Frobenius norms.
        """
        table, d = self.at(a), self.d
        root = arb(2).sqrt()
        pairs = [(c, e, right[c] * right[e] / (2 if c == e else root)) for c in range(d) for e in range(c, d)]
        if not table:
            return arb_mat(d, len(pairs))
        rows = []
        for b in range(d):
            block, weight = table[b * d : (b + 1) * d], left[b]
            rows.append([(block[c][e] + block[e][c]) * (w * weight) for c, e, w in pairs])
        return arb_mat(rows)

    def entry_sum(self, a: int) -> arb:
        """Bound Σ_bce |T_a[b; c, e]|."""
        table, d = self.at(a), self.d
        total = arb(0)
        for start in range(0, len(table), d):
            block = table[start : start + d]
            total += sum((abs(block[c][e] + block[e][c]) for c in range(d) for e in range(d)), arb(0)) / 2
        return total.upper()


class Lead:
    """Upper bounds on Σ_b x_b⟨T_a[b], C⟩ + Σ_b m_b⟨Tᵐ_a[b], C⟩, on the box of radius φ or the ball of radius r."""

    def __init__(self, T: Terms, Tm: Terms, d: int, radius: arb, kind: str) -> None:
        self.T, self.Tm = Factored(T, d), Factored(Tm, d)
        self.d, self.radius, self.kind = d, radius, kind

    def bounds(self, step: str, a: int, kept: LeadBound | None, sharper: Multipliers | None = None) -> Iterator[arb]:
        """Yield bounds B_a: with the recorded scalings, by sums of squares if multipliers are given, and on the box by
        φ³(Σ|T_a| + Σ|Tᵐ_a|)."""
        if not self.T.terms and not self.Tm.terms:
            yield arb(0)
            return
        row_scale, column_scale = self._scales(step, a, kept)
        sigma = spectral_norm(self.T.scaled(a, row_scale, column_scale))
        yield self._assemble(a, sigma, row_scale, column_scale)
        if sharper is not None:
            yield self._by_squares(f"{step}, squares", a, sharper)
        if self.kind == "box":
            yield ((self.T.entry_sum(a) + self.Tm.entry_sum(a)) * self.radius**3).upper()

    def _by_squares(self, step: str, a: int, kept: Multipliers) -> arb:
        """Compute B_a with √λ in place of σ, where λ is the largest eigenvalue of the quadratic form of §3.5."""
        row_scale = self._sized(step, kept.row_scale.tolist())
        column_scale = self._sized(step, kept.column_scale.tolist())
        form = quadratic_form(self.T.scaled(a, row_scale, column_scale), self.d, arb(kept.alpha), arb(kept.nu))
        return self._assemble(a, largest_eigenvalue(form).sqrt().upper(), row_scale, column_scale)

    def _assemble(self, a: int, sigma: arb, row_scale: list[arb], column_scale: list[arb]) -> arb:
        """Bound max_μ (p + qμ)(φ² − μ²)·Σw with p = σφ√Σu, q = σ_m√Σw; on the ball max_μ (σr + σ_mμ)(r² − μ²)."""
        sigma_m = spectral_norm(self.Tm.scaled(a, column_scale, column_scale))
        if self.kind == "ball":
            return cubic_maximum((sigma * self.radius).upper(), sigma_m, self.radius)
        u, w = mass(row_scale), mass(column_scale)
        p, q = (sigma * self.radius * u.sqrt()).upper(), (sigma_m * w.sqrt()).upper()
        return (cubic_maximum(p, q, self.radius) * w).upper()

    def _scales(self, step: str, a: int, kept: LeadBound | None) -> tuple[list[arb], list[arb]]:
        if self.kind == "ball":
            return [arb(1)] * self.d, [arb(1)] * self.d
        if kept is None or a >= len(kept.row_scale) or a >= len(kept.column_scale):
            raise VerificationError(f"{step}: no scalings were recorded for coordinate {a}")
        return self._sized(step, kept.row_scale[a].tolist()), self._sized(step, kept.column_scale[a].tolist())

    def _sized(self, step: str, values: list[float]) -> list[arb]:
        numbers = scalings(step, values, self.d)
        # On the ball ‖x‖₂ ≤ r holds without scalings; with others the inequality of §3.8 would not follow.
        return [arb(1)] * self.d if self.kind == "ball" else numbers


def cubic_maximum(p: arb, q: arb, radius: arb) -> arb:
    """Bound max f(μ) = (p + qμ)(φ² − μ²) over [0, φ], by evaluating f on an interval that contains the maximiser.

    The maximiser is μ = φ²q/(p + √(p² + 3q²φ²)); arb evaluates it as an interval.
    """
    bottom = p + (p * p + 3 * q * q * radius * radius).sqrt()
    if not bottom > 0:  # p = q = 0, or NaN
        return ((p + q * radius) * radius * radius).upper()
    mu = radius * radius * q / bottom
    return ((p + q * mu) * (radius * radius - mu * mu)).upper()


def quadratic_form(S: arb_mat, d: int, alpha: arb, nu: arb) -> arb_mat:
    """Return the form Y ↦ α Σ_b ⟨T_b, Y⟩² + (1 − α) Σ_b tr(T_b Y T_b Y) − ν((tr Y)² − ‖Y‖²) in the basis of S.

    Row b of S contains T_b. With K[(j,i), (k,m)] = Σ_b T_b[j,i] T_b[k,m], tr(T Y T Y) = Σ Y_jk Y_im K[(j,i), (k,m)].
    """
    pairs = [(c, e) for c in range(d) for e in range(c, d)]
    root = arb(2).sqrt()
    place = {pair: index for index, pair in enumerate(pairs)}
    spots = [(place[min(j, i), max(j, i)], arb(1) if i == j else 1 / root) for j in range(d) for i in range(d)]
    flat = arb_mat([[row[spot] * share for spot, share in spots] for row in S.tolist()])
    K = (flat.transpose() * flat).tolist()
    squares = (S.transpose() * S).tolist()
    p = len(pairs)
    entries = [[arb(0)] * p for _ in range(p)]
    for row, (j, k) in enumerate(pairs):
        for column in range(row, p):
            i, m = pairs[column]
            weight = arb(2) if j != k and i != m else arb(1) if j == k and i == m else root
            crossed = (K[j * d + i][k * d + m] + K[k * d + i][j * d + m]) / 2 * weight
            trace = int(j == k and i == m) - int(row == column)
            entry = alpha * squares[row][column] + (1 - alpha) * crossed - nu * trace
            entries[row][column] = entries[column][row] = entry
    return arb_mat(entries)
