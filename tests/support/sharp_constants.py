"""Sharp perturbation bounds of softmax and of the residual; certificates use outward-rounded versions of them."""

import math

from jaxtyping import Bool, Float
from torch import Tensor

from depthgauge.theory.linalg.norms import LINEAR_REMAINDER


def alpha(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Return α(x) = ⟨exp(x), 1⟩, the normaliser of softm (Definition 3.1)."""
    return x.exp().sum(dim=-1)


def row_ranges(E: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n"]:
    """Return D_ii(E) = max_{j,l} |E_ij − E_il|, the range of each row (Definition 3.5)."""
    return E.amax(dim=-1) - E.amin(dim=-1)


def is_balanced(E: Float[Tensor, "*batch n m"], theta: float) -> Bool[Tensor, "*batch"]:
    """Return whether every row range of E is at most θ (Definition 3.5)."""
    return row_ranges(E).amax(dim=-1) <= theta


def shift_tv_bound(range_b: float) -> float:
    """Return tanh(range(b)/4), the bound on TV(softm(a + b), softm(a)) for every a.

    Equality holds if b takes only its largest and its smallest value, and softm(a) puts the mass 1/(1 + e^{range/2})
    on the entries where b is largest.
    """
    return math.tanh(range_b / 4)


def shift_max_bound(epsilon: float) -> float:
    """Return tanh(ε/2): if |b| ≤ ε entrywise, then ‖softm(a + b) − softm(a)‖max ≤ tanh(ε/2). The bound is attained.

    The constant printed in paper A, 2(e^ε − 1), is four times larger for small ε.
    """
    return math.tanh(epsilon / 2)


def uniform_tv_bound(range_a: float) -> float:
    """Return tanh(range(a)/4), the bound on TV(softm(a), uniform).

    Equality holds if k of the n scores are at the maximum, the others are at the minimum, and e^{range/2} = (n − k)/k.
    For other ranges the bound is attained in the limit n → ∞.
    """
    return math.tanh(range_a / 4)


def average_gap_bound(tv: float, range_z: float) -> float:
    """Return TV(p, q) · range(z), the bound on |Σ_j (p_j − q_j) z_j|; `tv` is TV(p, q)."""
    return tv * range_z


def linearization_bound(theta: float) -> float:
    """Return ρθ², the sharp bound on TV(softm(s), (1 + s − s̄)/n).

    Here θ = range(s), s̄ is the mean of s, and ρ = 1/(12√3).
    """
    return LINEAR_REMAINDER * theta * theta


def residual_shift_bound(epsilon: float) -> float:
    """Return 2ε: if ‖A − B‖max ≤ ε, then ‖Res(A) − Res(B)‖max ≤ 2ε, with Res about the mid-range.

    A = (2, 0, −2)ᵀ and B = (1, 1, −3)ᵀ attain the bound.
    """
    return 2.0 * epsilon


def residual_norm_shift_bound(epsilon: float) -> float:
    """Return ε: if ‖A − B‖max ≤ ε, then | ‖Res A‖max − ‖Res B‖max | ≤ ε, with Res about the mid-range.

    ‖Res A‖max is half the largest column range, and a column range changes by at most 2ε.
    """
    return epsilon


def projected_max_bound(y_max: float, v_col: float) -> float:
    """Return the bound ‖P Y V‖max ≤ ‖Y‖max · ‖V‖col for row-stochastic P; `y_max` is ‖Y‖max and `v_col` is ‖V‖col.

    The inequality ‖AB‖max ≤ ‖A‖max ‖B‖max is false: a factor for the inner dimension is missing.
    """
    return y_max * v_col
