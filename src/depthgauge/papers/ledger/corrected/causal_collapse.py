"""The expansion of a causal network about repeated averages, and its order (docs/math.md §3.12)."""

import math

import numpy as np
import torch

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Computation, Evaluation, Observed
from depthgauge.papers.ledger.corrected.exact_expansion import drawn
from depthgauge.papers.ledger.formulas import scores, softm
from depthgauge.papers.ledger.instances import searched, sizes
from depthgauge.theory.network.random_networks import random_network
from depthgauge.theory.surrogates.closed_forms import closed_form

ORDER = 3
"""The order in η of the error of the mean-field layer."""


def _visible(ar: Arithmetic, X: Value, Q: Value, K: Value) -> list[Value]:
    """Return row i of the attention over the tokens 0 to i, for every i."""
    table = scores(X, Q, K)
    return [softm(ar, table[i, : i + 1]) for i in range(len(X))]


def _averaged(X: Value) -> Value:
    """C X: row i is the mean of the rows 0 to i."""
    return np.stack([X[: i + 1].sum(axis=0) / (i + 1) for i in range(len(X))])


def _carried(X: Value, V: Value, first: int) -> Value:
    """Σ_m C^m X e_m over the layers from `first` on: one averaging layer X ↦ X + C X V_ℓ after the other."""
    for v in V[first:]:
        X = X + _averaged(X) @ v.sum(axis=0)
    return X


def _orders(V: Value, d: int) -> list[Value]:
    """Return e_0, e_1, …, e_L as sums over increasing layers."""
    found = [np.eye(d, dtype=object), *(np.zeros((d, d), dtype=object) for _ in V)]
    for v in V:
        for m in range(len(V), 0, -1):
            found[m] = found[m] + found[m - 1] @ v.sum(axis=0)
    return found


def _expanded(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    state, errors = X, []
    for q, k, v in zip(Q, K, V, strict=True):
        mixed, E = 0, 0
        for head in zip(q, k, v, strict=True):
            rows = _visible(ar, state, *head[:2])
            attended = np.stack([row @ state[: i + 1] for i, row in enumerate(rows)])
            mixed = mixed + attended @ head[2]
            E = E + (attended - _averaged(state)) @ head[2]
        errors.append(E)
        state = state + mixed
    power, right = X, 0
    for e in _orders(V, X.shape[1]):
        right = right + power @ e
        power = _averaged(power)
    for k, E in enumerate(errors):
        right = right + _carried(E, V, k + 1)
    return {"X_L": state}, state, right


def _slopes() -> Observed:
    """Compute how the error of the mean-field layer falls when η is halved, on random networks and inputs."""
    found = []
    for seed in range(6):
        unit = random_network(layers=3, heads=2, dim=4, eta=1.0, seed=seed, causal=True)
        x = 2 * torch.rand(64, 6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
        errors = []
        for eta in (4e-3, 2e-3):
            network = unit.rescale(eta)
            with torch.no_grad():
                errors.append(float((network(x) - closed_form(network, "mean-field", 6)(x)).abs().max()))
        found.append(math.log2(errors[0] / errors[1]))
    is_third = all(abs(slope - ORDER) < 0.1 for slope in found)
    remark = (
        f"log₂ of the error at η = 0.004 over that at 0.002, 6 random networks: {min(found):.3f} to {max(found):.3f}."
    )
    return Observed("holds" if is_third else "fails", None, len(found), (remark,))


_WHERE = "docs/math.md §3.12"

CLAIMS: tuple[Claim, ...] = (
    searched(
        "ours.causal-expansion", _WHERE, ("X_L", "the expansion"), _expanded, drawn,
        sizes(n=(2, 3, 3), d=(1, 2, 2), H=(1, 1, 2), L=(1, 2, 3)),
        "row i sees the tokens 1 to i; C_ij = 1/i for j ≤ i; E_k = Σ_h (P_kh − C) X_k V_kh; with skip connections",
        statement="X_L = Σ_m C^m X e_m(0:L) + Σ_k Σ_m C^m E_k e_m(k+1:L)", relation="=",
    ),
    Claim(
        "ours.causal-mean-field-order", _WHERE,
        "‖S(X) − Σ_m C^m X e_m(0:L)‖max is of order η³, and of no higher order", Computation(_slopes),
        "causal, with skip connections; weights of size η",
    ),
)  # fmt: skip
