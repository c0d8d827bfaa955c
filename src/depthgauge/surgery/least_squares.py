"""Weighted ridge regression from streamed Gram matrices; memory does not grow with the number of tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class NormalEquations:
    """The normal equations of min_Δ Σ_t w_t ‖e_t − Δ u_t‖² + λ ‖Δ‖², accumulated in float64.

    - `gram`: G = Σ_t w_t u_t u_tᵀ
    - `cross`: C = Σ_t w_t e_t u_tᵀ
    """

    gram: Float[Tensor, "p p"]
    cross: Float[Tensor, "d p"]

    @staticmethod
    def empty(features: int, outputs: int, device: torch.device) -> "NormalEquations":
        """Return normal equations without observations."""
        return NormalEquations(
            torch.zeros(features, features, dtype=torch.float64, device=device),
            torch.zeros(outputs, features, dtype=torch.float64, device=device),
        )

    def add(
        self,
        features: Float[Tensor, "tokens p"],
        errors: Float[Tensor, "tokens d"],
        weights: Float[Tensor, " tokens"],
    ) -> None:
        """Add observations.

        Args:
            features: u_t.
            errors: e_t, what the present weights leave to explain.
            weights: w_t ≥ 0.
        """
        weighted = features.double() * weights.double()[:, None]
        self.gram += weighted.T @ features.double()
        self.cross += errors.double().T @ weighted

    def solve(self, ridge: float) -> Float[Tensor, "d p"]:
        """Return Δ = C (G + λ D)⁻¹, with D = diag(G) + mean(diag(G)) and λ = `ridge`.

        The penalty is relative to the size of each feature, so that it does not depend on their units; the mean keeps
        features that never occur from being divided by 0.
        """
        diagonal = self.gram.diagonal()
        mean = float(diagonal.mean())
        if mean == 0.0:
            return torch.zeros_like(self.cross)
        penalized = self.gram + torch.diag(ridge * (diagonal + mean))
        factor = torch.linalg.cholesky(penalized)
        return torch.cholesky_solve(self.cross.T, factor).T
