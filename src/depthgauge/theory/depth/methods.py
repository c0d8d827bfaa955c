"""`collapse`: replace a deep network by a shallow one, in closed form or trained against the attack."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError, require_count, require_radius, require_seed, unknown_name
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.attack import AttackOptions, difference, multiset_attention, search
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.linalg.small_matrices import Adam, threads_for
from depthgauge.theory.network.network import AttentionFunction, SelfAttentionNetwork, require_network
from depthgauge.theory.surrogates.closed_forms import CLOSED_FORMS, METHODS, closed_form, refusal

ROUNDS, STEPS = 3, 50
"""Rounds of training, each followed by a new attack, and training steps in each round."""
STARTS, CLIMB = 16, 20
"""Starting points and gradient steps of an attack."""
SHARPNESS = 12.0
"""The exponent p of the p-norm over hard inputs that approximates their maximum in training."""


def collapse(
    network: SelfAttentionNetwork,
    method: str = "mean-field",
    *,
    length: int | None = None,
    radius: float = 1.0,
    seed: int = 0,
    progress: Step = silent,
) -> SelfAttentionNetwork:
    """Return the one-layer network that a method makes from a deep one (docs/math.md §3.7; causal: §3.12).

    For weights of size η the errors are O(η) for `identity` and `last-layer`, O(η²) for `parallel`, O(η³) for
    `mean-field` and O(η⁴) for `corrected`. `fitted` starts from the best of these and trains it against the attack. A
    network with MLPs keeps them and its number of layers: `identity` and `last-layer` delete attention there.

    Args:
        network: S.
        method: "identity", "last-layer", "parallel", "mean-field", "corrected" or "fitted".
        length: the largest number of tokens; `mean-field` and `corrected` need it for causal networks, where their
            heads have position biases. The other methods and networks do not use it.
        radius: φ; `fitted` is trained on the box |X_ic| ≤ φ. The other methods do not use it.
        seed: seed of the training of `fitted`.
        progress: called as `progress(done, total, label)` during the training of `fitted`.

    Returns:
        The surrogate S'. Its `provenance` records the method and the original network.

    Raises:
        InputError: the method is unknown or does not apply to this kind of network.

    Example:
        >>> from depthgauge import random_network
        >>> len(collapse(random_network(layers=5, heads=2, dim=4, eta=0.01), "mean-field"))
        1
    """
    require_network(network)
    require_seed(seed)
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    require_radius(radius)
    if length is not None:
        require_count("length", length, "the largest number of tokens")
    if method != "fitted":
        return closed_form(network, method, length)
    reason = refusal(network, method)
    if reason is not None:
        raise InputError(reason)
    with threads_for(network.dim):
        return fit(network, InputSet("box", radius), seed=seed, progress=progress)


@dataclass(frozen=True, eq=False, repr=False)
class HardInputs(ArrayRecord):
    """End points of an attack: `many` inputs of r distinct tokens each, with common multiplicities `counts`."""

    tokens: Float[Tensor, "many r d"]
    counts: Int64[Tensor, " r"]

    def errors(self, network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> Float[Tensor, " many"]:
        """Return max|S − S'| on each input."""
        with torch.no_grad():
            return difference(network, surrogate, self.tokens, self.counts).abs().amax(dim=(-2, -1))


def attacked(
    network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, inputs: InputSet, seed: int
) -> list[HardInputs]:
    """Return the end points of a new attack on the surrogate."""
    paths = search(Comparison(network, surrogate, inputs), AttackOptions(STARTS, CLIMB, seed))
    return [HardInputs(points, counts) for points, counts, _ in paths]


def worst_error(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, hard: list[HardInputs]) -> float:
    """Return the largest difference on the hard inputs."""
    return max(float(group.errors(network, surrogate).amax()) for group in hard)


def fit(
    network: SelfAttentionNetwork, inputs: InputSet, *, seed: int = 0, progress: Step = silent
) -> SelfAttentionNetwork:
    """Train a one-layer surrogate adversarially: inputs ascend on max|S − S'| while the weights descend.

    Training starts from the best closed form, and every round ends with a new attack. The result is the candidate,
    the start included, with the smallest largest error on all inputs that any attack has found.
    """
    names = [name for name in CLOSED_FORMS if refusal(network, name) is None]
    forms = {name: closed_form(network, name) for name in names}
    errors = {name: worst_error(network, forms[name], attacked(network, forms[name], inputs, seed)) for name in names}
    begun_from = min(errors, key=errors.__getitem__)
    candidates, hard = [forms[begun_from]], attacked(network, forms[begun_from], inputs, seed)
    # The step size is proportional to the error of the start relative to the worst closed form.
    rate = 0.2 * min(1.0, errors[begun_from] / max(max(errors.values()), 1e-300)) * 1e-2
    for index in range(ROUNDS):
        progress(index, ROUNDS, "fitting")
        candidates.append(_train(network, candidates[-1], inputs, hard, rate, seed + index))
        hard = hard + attacked(network, candidates[-1], inputs, seed + 1 + index)
    for candidate in candidates:
        hard = hard + attacked(network, candidate, inputs, seed + 1000)
    final = [worst_error(network, candidate, hard) for candidate in candidates]
    winner = min(range(len(final)), key=final.__getitem__)
    progress(ROUNDS, ROUNDS, "")
    best = candidates[winner].copy()
    best.name = f"{network.name} (fitted)"
    best.provenance = {
        "made_by": "collapse",
        "method": "fitted",
        "of": {"name": network.name, "layers": len(network), "eta": network.eta},
        "from": begun_from,
        "error_of_start": final[0],
        "error": final[winner],
        "radius": inputs.radius,
        "seed": seed,
    }
    return best


def _train(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    inputs: InputSet,
    hard: list[HardInputs],
    rate: float,
    seed: int,
) -> SelfAttentionNetwork:
    """Alternate one ascent step of the hard inputs and one Adam step of the weights.

    The weights are begin + size · offset with the largest |entry| of each matrix as its size; Adam acts on the offsets.
    """
    generator = torch.Generator().manual_seed(seed)
    trained = surrogate.copy()
    begin = {name: getattr(trained[0], name).detach().clone() for name in ("query", "key", "value")}
    sizes = {name: float(weight.abs().amax()) or 1e-3 * network.eta for name, weight in begin.items()}
    offsets = {name: torch.zeros_like(weight) for name, weight in begin.items()}
    adam = Adam()
    pool = [group.tokens for group in hard]
    attentions = [multiset_attention(group.counts.to(network.dtype)) for group in hard]
    scale = worst_error(network, surrogate, hard) or 1.0

    def output(weights: dict[str, Tensor], x: Tensor, attend: AttentionFunction) -> Tensor:
        named = {f"layers.0.{name}": weight for name, weight in weights.items()}
        result: Tensor = torch.func.functional_call(trained, named, (x, attend))
        return result

    for step in range(STEPS):
        moved = [offset.detach().requires_grad_(True) for offset in offsets.values()]
        weights = {name: begin[name] + sizes[name] * offset for name, offset in zip(begin, moved, strict=True)}
        fixed = {name: weight.detach() for name, weight in weights.items()}
        errors = []
        for index, attend in enumerate(attentions):
            x = pool[index].detach().requires_grad_(True)
            size = (output(fixed, x, attend) - network(x, attend)).abs().flatten(1).amax(1)
            (gradient,) = torch.autograd.grad(size.sum(), x)
            x = inputs.project(x.detach() + 0.1 * inputs.radius * inputs.steepest(gradient))
            fresh = torch.rand(len(x), generator=generator) < 0.03
            corner = inputs.extreme(torch.randn(x.shape, generator=generator, dtype=x.dtype))
            pool[index] = torch.where(fresh[:, None, None], corner, x)
            with torch.no_grad():
                truth = network(pool[index], attend)
            errors.append(((output(weights, pool[index], attend) - truth) / scale).abs().flatten())
        gradients = torch.autograd.grad((torch.cat(errors) ** SHARPNESS).mean() ** (1 / SHARPNESS), moved)
        stepped = adam.step([offset.detach() for offset in moved], gradients, rate * (1 - step / STEPS))
        offsets = dict(zip(begin, stepped, strict=True))
    with torch.no_grad():
        for name, offset in offsets.items():
            getattr(trained[0], name).copy_(begin[name] + sizes[name] * offset)
    return trained
