"""Refit maps whose outputs pass through a norm, where the refit is not a linear problem.

A block of Gemma 2 or 3 ends with y = x + γ ⊙ rms_norm(W u), a block of a BERT model with
y = γ ⊙ layer_norm(x + W u + b) + β. The update of θ = (W, b, γ, β) minimizes

    F(θ) = Σ_t w_t ‖T_t − y_t(θ)‖² + λ ‖θ − θ₀‖²_D,        w_t = 1/‖T_t‖²,

over all tokens t, where T is the dense model's state at the matching depth. It is found by L-BFGS, with the inverse of
an approximate Gauss–Newton matrix as preconditioner: with v_t = W u_t + b and J_t = ∂y_t/∂v_t, each J_tᵀ J_t is
replaced by a_t diag(c), where a_t is the mean of its diagonal, and c is its diagonal averaged over the tokens. The
matrix of W is then diag(c) ⊗ Σ_t w_t a_t u_t u_tᵀ, and one Cholesky factor inverts it. If y is linear in W, the first
step is the ridge regression of `repair.refit`.

With several maps, the matrix has one such block for each of them. It ignores that they can correct the same error, so
the first steps together would be too long. The first quarter of the steps therefore changes the last map alone.

All sums run over batches, so memory does not grow with the number of tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.surgery.lbfgs import minimize
from depthgauge.surgery.repair import Change, shape_of, updates_of, with_bias

_SMALLEST = 1e-2
"""Smallest entry of c, whose mean is 1; outputs with a gain near 0 would otherwise get very large steps."""
_TINY = 1e-300
"""Replaces 0 in denominators."""


@dataclass(frozen=True, eq=False)
class NormedMap:
    """A linear map v = W u + b, and the norm that follows it, with output (γ ⊙ n) + β for the normalized input n.

    `norm` is None if no norm follows.
    """

    map: nn.Module
    norm: nn.Module | None


def normed_maps(block: nn.Module, family: Family) -> tuple[NormedMap, NormedMap]:
    """Return the output projection of attention and the last map of the MLP, each with the norm that follows it."""

    def norm(path: str | None) -> nn.Module | None:
        return None if path is None else block.get_submodule(path)

    return (
        NormedMap(block.get_submodule(family.projections.output), norm(family.attention_norm)),
        NormedMap(block.get_submodule(family.down), norm(family.mlp_norm)),
    )


def refit_normed(
    runner: BlockRunner,
    layer: int,
    states: Float[Tensor, "windows n d"],
    targets: Float[Tensor, "windows n d"],
    ridge: float,
    iterations: int = 12,
    *,
    maps: Sequence[NormedMap],
) -> Change:
    """Return the update of the weights and biases of maps, and of the gains and shifts of the norms that follow them.

    The fit F of the update is never larger than that of the present parameters, which are not changed. The arguments
    are those of `repair.refit`; `maps` are in the order in which the block computes them. At most `iterations` steps
    are made. The iteration stops when a step decreases F by less than 0.1 %.
    """
    fit = _Fit(runner, layer, [_Part(one) for one in maps], states, targets)
    with _frozen(runner.blocks[layer]):
        fit.measure(ridge)
        try:
            alone = iterations // 4 if len(maps) > 1 else 0
            found, _ = minimize(fit.evaluate, fit.precondition_last, fit.zero, alone)
            found, _ = minimize(fit.evaluate, fit.precondition, found, iterations - alone)
        finally:
            fit.before.apply(0.0)
    return fit.change(found)


class _Part:
    """One map and its norm, as a share of the vector δ = θ − θ₀.

    The share is the update of W [d, p], with the bias as last column, followed by those of γ and β [k, d].

    - `gram`: Σ_t w_t a_t u_t u_tᵀ
    - `scales`: Σ_t w_t diag(J_tᵀ J_t), which `finish` turns into c
    - `gain_gram`: for every output, the Gram matrix of the features n and 1 of γ and β
    - `gains`: γ and β, as the norm stores them
    - `seen`: the tensors u, v, the norm's input and the norm's output of the last batch
    """

    def __init__(self, pair: NormedMap) -> None:
        self.map: Any = pair.map
        self.norm: Any = pair.norm
        self.features, self.outputs = shape_of(self.map)
        self.gains: list[nn.Parameter] = [] if pair.norm is None else list(pair.norm.parameters())
        like: Any = {"dtype": torch.float64, "device": self.map.weight.device}
        self.gram = torch.zeros(self.features, self.features, **like)
        self.scales = torch.zeros(self.outputs, **like)
        self.gain_gram = torch.zeros(self.outputs, len(self.gains), len(self.gains), **like)
        self.seen: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        """The number of entries of the share of δ."""
        return self.outputs * (self.features + len(self.gains))

    def split(self, share: Float[Tensor, " size"]) -> tuple[Float[Tensor, "d p"], Float[Tensor, "k d"]]:
        """Return the update of the map and that of the norm."""
        start = self.outputs * self.features
        return share[:start].view(self.outputs, self.features), share[start:].view(len(self.gains), self.outputs)

    def updates(self, share: Float[Tensor, " size"]) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters, each with its change."""
        update, gains = self.split(share)
        return [*updates_of(self.map, update), *zip(self.gains, gains, strict=True)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the tensors of one batch in `seen`, and let gradients reach v."""

        def after_map(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            v = out if out.requires_grad else out.detach().requires_grad_()
            self.seen |= {"u": args[0], "v": v}
            return v

        def after_norm(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            self.seen |= {"h": args[0].detach(), "z": out}

        self.seen = {}
        with ExitStack() as hooks:
            hooks.enter_context(self.map.register_forward_hook(after_map))
            if self.norm is not None:
                hooks.enter_context(self.norm.register_forward_hook(after_norm))
            yield

    def watched_outputs(self) -> list[Tensor]:
        """Return v and, if there is a norm, its output."""
        return [self.seen[name] for name in ("v", "z") if name in self.seen]

    def map_features(self) -> Float[Tensor, "tokens p"]:
        """Return u, with the constant 1 if the map has a bias."""
        return with_bias(self.map, self.seen["u"].detach()).flatten(0, -2).double()

    def gain_features(self) -> Float[Tensor, "k tokens d"]:
        """Return n and 1, the derivatives of the norm's output in γ and β.

        The norm is affine in its weight, whatever constant it adds to it, so n is its output for the weight 1 minus
        that for the weight 0.
        """
        like = self.seen["h"].flatten(0, -2)
        zeros = {name: torch.zeros_like(value) for name, value in self.norm.named_parameters()}
        ones = zeros | {"weight": torch.ones_like(self.norm.weight)}
        with torch.no_grad():
            n = functional_call(self.norm, ones, (like,)).double() - functional_call(self.norm, zeros, (like,)).double()
        return torch.stack([n, torch.ones_like(n)][: len(self.gains)])

    def add_curvature(self, weights: Float[Tensor, " tokens"], probes: Sequence[Tensor]) -> None:
        """Add one batch with the weights w_t to the Gram matrices.

        `probes` are Jᵀ ξ for random signs ξ and the derivative J in each of the watched outputs. The expectation of
        their squares is the diagonal of JᵀJ.
        """
        squares = probes[0].flatten(0, -2).double().square()
        u = self.map_features()
        self.gram += (u * (weights * squares.mean(-1))[:, None]).T @ u
        self.scales += weights @ squares
        if self.gains:
            shares = weights[:, None] * probes[1].flatten(0, -2).double().square()
            n = self.gain_features()
            self.gain_gram += torch.einsum("ti,ati,bti->iab", shares, n, n)

    def finish(self, ridge: float) -> None:
        """Add the penalty, which is relative to the size of each feature as in `repair.refit`."""
        self.scales = (self.scales / self.scales.mean().clamp_min(_TINY)).clamp_min(_SMALLEST)
        diagonal = self.gram.diagonal()
        self.penalty = (ridge * (diagonal + diagonal.mean())).clamp_min(_TINY)
        self.factor = torch.linalg.cholesky(self.gram + torch.diag(self.penalty))
        diagonals = self.gain_gram.diagonal(dim1=1, dim2=2)
        self.gain_penalty = (ridge * (diagonals + diagonals.mean(0))).clamp_min(_TINY)
        self.gain_gram = self.gain_gram + torch.diag_embed(self.gain_penalty)

    def gradient(self, gradients: Sequence[Tensor]) -> Float[Tensor, " size"]:
        """Return the gradient in δ from those in the watched outputs."""
        found = gradients[0].flatten(0, -2).double().T @ self.map_features()
        if not self.gains:
            return found.flatten()
        gains = (self.gain_features() * gradients[1].flatten(0, -2).double()).sum(1)
        return torch.cat([found.flatten(), gains.flatten()])

    def penalize(self, share: Float[Tensor, " size"]) -> tuple[Float[Tensor, ""], Float[Tensor, " size"]]:
        """Return λ ‖δ‖²_D and its gradient."""
        update, gains = self.split(share)
        pull = torch.cat(
            [(update * self.penalty * self.scales[:, None]).flatten(), (gains * self.gain_penalty.T).flatten()]
        )
        return share @ pull, 2 * pull

    def precondition(self, share: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        """Multiply by the inverse of twice the Gauss–Newton matrix."""
        update, gains = self.split(share)
        solved = torch.cholesky_solve(update.T, self.factor).T / self.scales[:, None]
        made = torch.linalg.solve(self.gain_gram, gains.T[:, :, None])[:, :, 0].T
        return torch.cat([solved.flatten(), made.flatten()]) / 2


class _Fit:
    """F and its gradient as functions of δ = θ − θ₀, one vector in float64."""

    def __init__(
        self,
        runner: BlockRunner,
        layer: int,
        parts: Sequence[_Part],
        states: Float[Tensor, "windows n d"],
        targets: Float[Tensor, "windows n d"],
    ) -> None:
        self.runner, self.layer, self.parts, self.states, self.targets = runner, layer, parts, states, targets
        size, device = sum(part.size for part in parts), parts[0].map.weight.device
        self.zero = torch.zeros(size, dtype=torch.float64, device=device)
        self.before = Change.of(self._updates(self.zero))

    def _updates(self, delta: Float[Tensor, " size"]) -> list[tuple[nn.Parameter, Tensor]]:
        shares = zip(self.parts, self._shares(delta), strict=True)
        return [one for part, share in shares for one in part.updates(share)]

    def change(self, delta: Float[Tensor, " size"]) -> Change:
        """Return the change of the parameters from θ₀ to θ₀ + δ."""
        return replace(self.before, deltas=tuple(one for _, one in self._updates(delta)))

    def measure(self, ridge: float) -> None:
        """Compute the approximate Gauss–Newton matrix at δ = 0, with the same random signs in every run."""
        generator = torch.Generator().manual_seed(0)
        for output, _, weights in self._batches():
            signs = torch.randint(0, 2, output.shape, generator=generator).to(output) * 2 - 1
            probes = iter(torch.autograd.grad(output, self._watched(), signs))
            for part in self.parts:
                part.add_curvature(weights, [next(probes) for _ in part.watched_outputs()])
        for part in self.parts:
            part.finish(ridge)

    def evaluate(self, delta: Float[Tensor, " size"]) -> tuple[float, Float[Tensor, " size"]]:
        """Return F and its gradient."""
        self.change(delta).apply(1.0)
        value, gradients = 0.0, [torch.zeros_like(share) for share in self._shares(delta)]
        for output, errors, weights in self._batches():
            value += float(weights @ errors.square().sum(-1))
            slope = (-2 * weights[:, None] * errors).view(output.shape).to(output)
            found = iter(torch.autograd.grad(output, self._watched(), slope))
            for part, gradient in zip(self.parts, gradients, strict=True):
                gradient += part.gradient([next(found) for _ in part.watched_outputs()])
        for part, share, gradient in zip(self.parts, self._shares(delta), gradients, strict=True):
            penalty, pull = part.penalize(share)
            value += float(penalty)
            gradient += pull
        return value, torch.cat(gradients)

    def precondition(self, vector: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        """Multiply by the inverse of the approximate Hessian."""
        shares = zip(self.parts, self._shares(vector), strict=True)
        return torch.cat([part.precondition(share) for part, share in shares])

    def precondition_last(self, vector: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        """Multiply by the inverse of the last map's block, and by 0 for all others."""
        *_, last = self._shares(vector)
        return torch.cat([torch.zeros_like(vector[: -len(last)]), self.parts[-1].precondition(last)])

    def _shares(self, vector: Float[Tensor, " size"]) -> tuple[Tensor, ...]:
        return torch.split(vector, [part.size for part in self.parts])

    def _watched(self) -> list[Tensor]:
        return [one for part in self.parts for one in part.watched_outputs()]

    def _batches(
        self,
    ) -> Iterator[tuple[Float[Tensor, "batch n d"], Float[Tensor, "tokens d"], Float[Tensor, " tokens"]]]:
        """Yield y, T − y and w for every batch."""
        for start, states in self.runner.batches(self.states):
            with torch.enable_grad(), ExitStack() as hooks:
                for part in self.parts:
                    hooks.enter_context(part.watched())
                output = self.runner.block(self.layer, states)
            target = self.targets[start : start + len(states)].to(output.device).double().flatten(0, 1)
            errors = target - output.detach().double().flatten(0, 1)
            yield output, errors, target.square().sum(-1).clamp_min(1e-30).reciprocal()


@contextmanager
def _frozen(block: nn.Module) -> Iterator[None]:
    """Compute no gradients in the parameters of a block."""
    required = [parameter for parameter in block.parameters() if parameter.requires_grad]
    for parameter in required:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in required:
            parameter.requires_grad_()
