"""The bounds of the library, tested on random networks: certified upper bound against attack (docs/math.md §3)."""

from collections.abc import Callable

import torch

from depthgauge.papers.ledger.claim import Claim, Computation, Observed
from depthgauge.papers.ledger.finding import Verdict
from depthgauge.theory.certificates.certificate import certify
from depthgauge.theory.linalg.enclosures import scaled_spectral, sign_norm_up, sign_vectors
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.network.random_networks import random_network
from depthgauge.theory.surrogates.closed_forms import closed_form, fold

_SHAPES = ((2, 1, 4, 0.01), (2, 1, 4, 0.2), (3, 2, 4, 0.05), (4, 2, 8, 0.01))
"""(layers, heads, dim, η) of the random networks."""


def _sandwiched(
    surrogate: Callable[[SelfAttentionNetwork], SelfAttentionNetwork],
    ball: bool = False,
    mlp: int | None = None,
    tokens: int | None = None,
) -> Callable[[], Observed]:
    """Return a check that holds if no attack exceeds its certificate; its ratio is the largest attack/certificate.

    With a number of tokens the networks are causal.
    """

    def run() -> Observed:
        found = []
        for seed, (layers, heads, dim, eta) in enumerate(_SHAPES):
            shape = {"layers": layers, "heads": heads, "dim": dim, "eta": eta}
            network = random_network(**shape, seed=seed, mlp=mlp, causal=tokens is not None)  # type: ignore[arg-type]
            inputs = {"ball": 1.0} if ball else {"radius": 1.0}
            bounds = certify(network, surrogate(network), **inputs, tokens=tokens, starts=4, steps=10)  # type: ignore[arg-type]
            found.append(bounds)
        ratios = [c.lower / c.upper for c in found if c.upper is not None]
        broken = sum(ratio > 1 for ratio in ratios)
        remark = f"{len(ratios)} random networks with a finite certificate; an attack exceeded it for {broken} of them."
        verdict: Verdict = "fails" if broken else "holds" if ratios else "undecided"
        return Observed(verdict, max(ratios, default=None), len(found), (remark,))

    return run


def _by_method(method: str, ball: bool = False, mlp: int | None = None) -> Callable[[], Observed]:
    return _sandwiched(lambda network: closed_form(network, method), ball, mlp)


def _sign_norms() -> Observed:
    """Compare with the norm itself, found by enumerating all sign vectors; integer entries make that exact."""
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for m, n in ((1, 1), (2, 2), (3, 5), (8, 8), (12, 4)) * 4:
        M = torch.randint(-9, 10, (m, n), generator=generator, dtype=torch.float64)
        norm = (sign_vectors(m) @ M).abs().sum(dim=1).max()
        upper = min(float(scaled_spectral(M, torch.ones(m), torch.ones(n))), float(sign_norm_up(M).value))
        ratios.append(float(norm) / upper)
    remarks = ("The norm of random integer matrices was computed by enumerating all sign vectors.",)
    return Observed("fails" if max(ratios) > 1 else "holds", max(ratios), len(ratios), remarks)


_SET = "‖X‖max ≤ φ, any number of tokens"


def _claim(id: str, statement: str, run: Callable[[], Observed], hypothesis: str = _SET) -> Claim:
    return Claim(f"ours.{id}", "docs/math.md §3", statement, Computation(run), hypothesis)


CLAIMS: tuple[Claim, ...] = (
    _claim(
        "sign-norm", "max over sign vectors x, y of xᵀMy ≤ σ_max(diag(u)^-½ M diag(v)^-½) √(Σu Σv)", _sign_norms,
        "any u, v > 0; tested with the smallest bound over several u, v",
    ),
    _claim(
        "joint-certificate",
        "‖S(X) − S'(X)‖max ≤ lead + remainder, where S' is the mean-field layer and all heads are bounded jointly",
        _by_method("mean-field"),
    ),
    _claim("identity", "‖S(X) − X‖max ≤ max φ1|N_{0:L} − I| + err_L", _by_method("identity")),
    _claim("last-layer", "‖S(X) − layer_L(X)‖max ≤ its certificate", _by_method("last-layer")),
    _claim(
        "parallel", "‖S(X) − S'(X)‖max ≤ its certificate, where S' has all heads in one layer", _by_method("parallel")
    ),
    _claim(
        "corrected",
        "‖S(X) − S'(X)‖max ≤ its certificate, where S' has all heads and the mean-field correction in one layer",
        _by_method("corrected"),
    ),
    _claim(
        "effective-depth", "‖S(X) − S_K(X)‖max ≤ its certificate, where S_K keeps only the layers in K",
        _sandwiched(lambda network: fold(network, [len(network.layers) - 1])),
    ),
    _claim(
        "row-ball", "‖S(X) − S'(X)‖max ≤ its certificate, where S' is the mean-field layer",
        _by_method("mean-field", ball=True), "every token has Euclidean norm at most r; any number of tokens",
    ),
    _claim(
        "causal-mean-field",
        "‖S(X) − S'(X)‖max ≤ its certificate, where S' is the causal layer with the patterns C^m and the values e_m",
        _sandwiched(lambda network: closed_form(network, "mean-field", 6), tokens=6),
        "‖X‖max ≤ φ, 6 tokens, row i sees the tokens 1 to i",
    ),
    _claim(
        "mlp-deletion",
        "deleting the attention of layer ℓ changes the output by at most λ_ℓ out_ℓ Π_{k>ℓ} λ_k (1 + Lip_k)",
        _by_method("identity", mlp=8),
        "X_{ℓ+1} = f_ℓ(X_ℓ + Σ_h attention_h(X_ℓ)), f_ℓ with Lipschitz constant λ_ℓ in the max norm",
    ),
)  # fmt: skip
