"""Two networks and the set of inputs on which they are compared."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.format import number
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import needs_tokens


@dataclass(frozen=True)
class InputSet:
    """A set of inputs X, of kind "box", |X_ic| ≤ φ, or "ball", ‖x_i‖₂ ≤ r for every token x_i; φ or r is `radius`."""

    kind: str
    radius: float

    def __str__(self) -> str:
        return f"{self.kind} of radius {number(self.radius)}"

    def project(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """Return the nearest input of the set; the result is inside the set in exact arithmetic.

        Ball: let e be the machine epsilon and m = (d + 8)e. The computed length differs from ‖x_i‖₂ by a relative
        error of at most m/2, and so does the rescaled token from its exact value. A token is kept when its computed
        length is at most r(1 − m), so ‖x_i‖₂ ≤ r(1 − m)(1 + m) < r. Any other is rescaled to length r(1 − 2m) up to
        these errors, hence to at most r(1 − 2m)(1 + m)² < r.
        """
        if self.kind == "box":
            return x.clamp(-self.radius, self.radius)
        # Dividing by the largest |entry| first keeps the squares from underflowing.
        largest = x.abs().amax(dim=-1, keepdim=True)
        unit = x / torch.where(largest > 0, largest, 1.0)
        length = unit.square().sum(dim=-1, keepdim=True).sqrt()
        margin = (x.shape[-1] + 8) * torch.finfo(x.dtype).eps
        inside = length * largest <= self.radius * (1 - margin)
        return torch.where(inside, x, unit * (self.radius * (1 - 2 * margin) / length))

    def steepest(self, gradient: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the direction of steepest ascent: sign vectors for a box, unit vectors for a ball."""
        return gradient.sign() if self.kind == "box" else F.normalize(gradient, dim=-1, eps=1e-300)

    def extreme(self, direction: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the token t of the set that maximises ⟨t, direction⟩: a corner of the box or a point of the sphere."""
        if self.kind == "box":
            # float64 directions give corners with entries exactly ±φ; rounding φ to float32 could leave the box.
            corner = torch.full_like(direction, self.radius)
            return torch.where(direction >= 0, corner, -corner)
        return self.project(2 * self.radius * F.normalize(direction, dim=-1, eps=1e-300))


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The quantity sup ‖S(X) − S'(X)‖max over the inputs X of a set.

    Inputs of a box or a ball have `rows` rows, or any number for None; token sequences have at most `inputs.length`.
    Outputs are exact, or computed in floating point of type `evaluated_in`.
    """

    network: SelfAttentionNetwork
    surrogate: SelfAttentionNetwork
    inputs: InputSet | Tokens
    rows: int | None = None
    evaluated_in: torch.dtype | None = None

    def __repr__(self) -> str:
        return f"Comparison({self.network.name!r}, {self.surrogate.name!r}, {self.inputs})"

    @property
    def region(self) -> InputSet:
        """The set of inputs, which must be a box or a ball."""
        assert isinstance(self.inputs, InputSet)
        return self.inputs

    @property
    def vocabulary(self) -> Tokens:
        """The set of inputs, which must be one of tokens."""
        assert isinstance(self.inputs, Tokens)
        return self.inputs

    @property
    def radius(self) -> float:
        """φ or r, or the largest |entry| of the tokens."""
        return self.inputs.radius

    @property
    def tokens(self) -> int | None:
        """The number of tokens of an input, for sequences of tokens the largest, or None for any number."""
        return self.inputs.length if isinstance(self.inputs, Tokens) else self.rows

    @property
    def has_mlp(self) -> bool:
        """Whether one of the networks has an MLP."""
        return self.network.has_mlp or self.surrogate.has_mlp

    @property
    def is_ordered(self) -> bool:
        """Whether the order of tokens matters: causal masks, positions or position biases."""
        is_placed = isinstance(self.inputs, Tokens) and self.inputs.positions is not None
        return is_placed or any(net.causal or net.length is not None for net in (self.network, self.surrogate))

    @property
    def is_wide_block(self) -> bool:
        """Whether the certificate is that of docs/math.md §3.13: tokens, and LayerNorm, MLPs or biases in S."""
        return isinstance(self.inputs, Tokens) and (needs_tokens(self.network) or needs_tokens(self.surrogate))

    @property
    def is_one_token(self) -> bool:
        """Whether inputs have one token, and the networks neither norms, MLPs nor biases: attention is the identity."""
        return self.tokens == 1 and not (needs_tokens(self.network) or needs_tokens(self.surrogate))

    @property
    def expands(self) -> bool:
        """Whether both networks have the exact expansion of docs/math.md §3.1: not causal and no MLP."""
        return not self.network.causal and not self.has_mlp
