"""`fitted`: a one-layer network trained against the attack, from the best closed form on."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.collapse.attack import InputSet, difference, multiset_attention, search
from depthgauge.collapse.surrogates import CLOSED_FORMS, closed_form, refusal
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.progress import Step, silent

ROUNDS, STEPS, STARTS, CLIMB = 5, 80, 12, 20
RATE = 2e-3
SHARPNESS = 16.0
"""The exponent of the norm over hard inputs that stands in for their maximum while training."""


@dataclass(frozen=True)
class HardInputs:
    """Inputs on which an attack ended, all with the same counts of distinct tokens."""

    tokens: Float[Tensor, "many r d"]
    counts: Int64[Tensor, " r"]

    def errors(self, network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> Float[Tensor, " many"]:
        """max|S − S'| on each."""
        with torch.no_grad():
            return difference(network, surrogate, self.tokens, self.counts).abs().amax(dim=(-2, -1))


def attacked(
    network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, inputs: InputSet, seed: int
) -> list[HardInputs]:
    """Where a fresh attack on the surrogate ends."""
    paths = search(network, surrogate, inputs, None, STARTS, CLIMB, seed)
    return [HardInputs(points, counts) for points, counts, _ in paths]


def worst_error(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, hard: list[HardInputs]) -> float:
    """The largest difference on the hard inputs."""
    return max(float(group.errors(network, surrogate).amax()) for group in hard)


def fit(
    network: SelfAttentionNetwork,
    inputs: InputSet,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    progress: Step = silent,
) -> SelfAttentionNetwork:
    """Adversarial training: attack the surrogate, train it on the hard inputs found, keep it only where it is better.

    Every round ends with a fresh attack. The network returned is the one with the smallest worst error, the start
    among them, on everything that any attack has found and on one last attack of each.
    """
    names = [name for name in CLOSED_FORMS if refusal(network, name) is None]
    forms = {name: closed_form(network, name) for name in names}
    errors = {name: worst_error(network, forms[name], attacked(network, forms[name], inputs, seed)) for name in names}
    begun_from = min(errors, key=errors.__getitem__)
    candidates = [forms[begun_from]]
    hard = attacked(network, candidates[0], inputs, seed)
    for index in range(rounds):
        progress(index, rounds, "fitting")
        candidates.append(_train(network, candidates[-1], hard))
        hard += attacked(network, candidates[-1], inputs, seed + 1 + index)
    for candidate in candidates:
        hard += attacked(network, candidate, inputs, seed + 1000)
    final = [worst_error(network, candidate, hard) for candidate in candidates]
    winner = min(range(len(final)), key=final.__getitem__)
    progress(rounds, rounds, "")
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
    network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, hard: list[HardInputs]
) -> SelfAttentionNetwork:
    """Minimise a high norm of the difference over the hard inputs by Adam, in units of each weight's own size."""
    trained = surrogate.copy()
    names = ("query", "key", "value")
    begin = {name: getattr(trained[0], name).detach().clone() for name in names}
    sizes = {name: float(weight.abs().amax()) or 1e-3 * network.eta for name, weight in begin.items()}
    offsets = {name: torch.zeros_like(weight, requires_grad=True) for name, weight in begin.items()}
    optimiser = torch.optim.Adam(list(offsets.values()), lr=RATE)
    attentions = [multiset_attention(group.counts.to(network.dtype)) for group in hard]
    with torch.no_grad():
        truths = [network(group.tokens, attend) for group, attend in zip(hard, attentions, strict=True)]
    scale = worst_error(network, surrogate, hard) or 1.0
    best, best_error = begin, float("inf")
    for step in range(STEPS):
        weights = {name: begin[name] + sizes[name] * offset for name, offset in offsets.items()}
        named = {f"layers.0.{name}": weight for name, weight in weights.items()}
        outputs = [
            torch.func.functional_call(trained, named, (group.tokens, attend))
            for group, attend in zip(hard, attentions, strict=True)
        ]
        ratios = torch.cat([((y - truth) / scale).abs().flatten() for y, truth in zip(outputs, truths, strict=True)])
        worst = float(ratios.detach().amax())
        if worst < best_error:
            best, best_error = {name: weight.detach().clone() for name, weight in weights.items()}, worst
        optimiser.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        optimiser.zero_grad()
        ((ratios**SHARPNESS).sum() ** (1 / SHARPNESS)).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    with torch.no_grad():
        for name, weight in best.items():
            getattr(trained[0], name).copy_(weight)
    return trained
