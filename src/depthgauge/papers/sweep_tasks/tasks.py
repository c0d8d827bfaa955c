"""The tasks of `depthgauge sweep`. To add a task, write its function and add it to `TASKS`."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from depthgauge.certificates.certificate import EFFORTS, certify
from depthgauge.certificates.printed import log_dong_rate, printed_bound
from depthgauge.depth.effective import effective_depth
from depthgauge.depth.methods import collapse
from depthgauge.errors import InputError
from depthgauge.linalg.norms import composite_norm, max_norm
from depthgauge.measures.heads import weight_sizes
from depthgauge.network.inputs import uniform_inputs
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.network.random_networks import DISTRIBUTIONS, random_network
from depthgauge.papers.separation.exact import exact
from depthgauge.papers.separation.montecarlo import estimate
from depthgauge.papers.separation.settings import Regression, Setting, build_setting
from depthgauge.papers.sweep_tasks.fast_attention_task import plans_of, summary
from depthgauge.papers.sweep_tasks.rank_collapse import log_contraction_bounds, split_states
from depthgauge.papers.sweep_tasks.training_task import PARAMETERS as TRAINED
from depthgauge.papers.sweep_tasks.training_task import complete as complete_training
from depthgauge.papers.sweep_tasks.training_task import trained_depth
from depthgauge.surrogates.closed_forms import METHODS, drift_matrix, refusal
from depthgauge.sweeps.cells import Cell
from depthgauge.sweeps.parameters import (
    SEED,
    Parameter,
    Task,
    Values,
    choice,
    count,
    flag,
    number,
    or_word,
    positive,
    text,
)

_NETWORK = {
    "eta": Parameter(positive("η, the largest |weight|")),
    "layers": Parameter(count("the number of layers L")),
    "heads": Parameter(count("the number of heads H per layer")),
    "dim": Parameter(count("the width d of a token")),
}
_OPTIONS = {
    "distribution": Parameter(choice(*DISTRIBUTIONS), "uniform"),
    "skip": Parameter(flag("whether layers have skip connections"), True),
    "radius": Parameter(positive("the largest |entry| an input may have"), 1.0),
}
_TOKENS = {"tokens": Parameter(count("the number of tokens n of an input"))}
_METHOD = {"method": Parameter(choice(*METHODS))}


def _network(cell: Cell) -> SelfAttentionNetwork:
    p = cell.parameters
    shape = (p["layers"], p["heads"], p["dim"], p["eta"])
    return random_network(*shape, distribution=p["distribution"], skip=p["skip"], seed=cell.seed("network"))


def _applicable(parameters: Values) -> Values:
    """Reject a method that does not apply to networks of this kind."""
    reason = _refusal(parameters["method"], parameters["skip"])
    if reason is not None:
        raise InputError(reason)
    return parameters


@cache
def _refusal(method: str, skip: bool) -> str | None:
    return refusal(random_network(1, 1, 1, 1.0, skip=skip), method)


def _inputs(cell: Cell, samples: int = 1) -> torch.Tensor:
    """Return inputs [samples, n, d] uniform in the box."""
    p = cell.parameters
    return uniform_inputs(samples, p["tokens"], p["dim"], radius=p["radius"], seed=cell.seed("inputs"))


def collapse_error(cell: Cell) -> Values:
    """Compute ‖S(X) − S'(X)‖max for a random network S, its surrogate S' and one input X uniform in the box."""
    p, network, x = cell.parameters, _network(cell), _inputs(cell)[0]
    surrogate = collapse(network, p["method"], radius=p["radius"], seed=cell.seed("fit"))
    with torch.no_grad():
        truth, guess = network(x), surrogate(x)
    return {"error": _finite(max_norm(truth - guess)), "output": _finite(max_norm(truth))}


def certificate(cell: Cell) -> Values:
    """Compute the lower and the certified upper bound on sup ‖S(X) − S'(X)‖max, and paper A's printed bound."""
    p, network = cell.parameters, _network(cell)
    surrogate = collapse(network, p["method"], radius=p["radius"], seed=cell.seed("fit"))
    tokens = None if p["tokens"] == "any" else p["tokens"]
    found = certify(network, surrogate, radius=p["radius"], tokens=tokens, effort=p["effort"], seed=cell.seed("attack"))
    printed = printed_bound(network, p["radius"])
    return {
        "lower": found.lower,
        "upper": found.upper,
        "ratio": found.ratio,
        "printed": printed.printed_bound,
        "printed_applies": printed.printed_applies,
    }


def depth(cell: Cell) -> Values:
    """Compute the effective depth of a random network: certified for all inputs, and measured on random inputs."""
    p, network = cell.parameters, _network(cell)
    proved = effective_depth(network, tolerance=p["tolerance"], radius=p["radius"])
    seen = effective_depth(network, tolerance=p["tolerance"], certified=False, x=_inputs(cell, p["samples"]))
    return {
        "certified": proved.layers,
        "certified_error": _finite(proved.error),
        "measured": seen.layers,
        "measured_error": _finite(seen.error),
    }


def rank_collapse(cell: Cell) -> Values:
    """Compute, for ℓ = 0 … L, the residual ratio of the state X_ℓ and the error of a one-layer surrogate.

    - `log10_ratio`: log₁₀ ‖Res(X_ℓ)‖max/‖X_ℓ‖max; `log10_bound`: the contraction bound on it
    - `log10_ratio_dong`, `log10_dong`: the same with the norm, the centre and the rate of Dong et al.
    - `one_layer`: ‖X_ℓ − S'(X)‖max/‖X_ℓ‖max for the mean-field surrogate S' of the first ℓ layers
    """
    p, network, x = cell.parameters, _network(cell), _inputs(cell)[0]
    states = split_states(network, x)
    joined = [state.joined() for state in states]
    largest = [math.log(float(max_norm(X))) for X in joined]
    composite = [math.log(float(composite_norm(X))) for X in joined]
    beta = max(float(weight_sizes(layer).dong_beta.amax()) for layer in network)
    start = states[0].log_residual("composite", "mean")
    dong = [log_dong_rate(beta, p["heads"], network[0].key_dim, ell, start) for ell in range(len(states))]
    bounds = log_contraction_bounds(network, states[0].log_residual("max", "midrange"))
    return {
        "log10_ratio": _log10([state.log_residual("max", "midrange") for state in states], largest),
        "log10_bound": _log10(bounds, largest),
        "log10_ratio_dong": _log10([state.log_residual("composite", "mean") for state in states], composite),
        "log10_dong": _log10(dong, composite),
        "one_layer": [_finite(_one_layer_error(network, x, X, ell)) for ell, X in enumerate(joined)],
    }


def _log10(logs: list[float], scales: list[float]) -> list[float | None]:
    return [_finite((log - scale) / math.log(10)) for log, scale in zip(logs, scales, strict=True)]


def _one_layer_error(network: SelfAttentionNetwork, x: torch.Tensor, X: torch.Tensor, ell: int) -> torch.Tensor:
    """Return ‖X_ℓ − S'(X)‖max/‖X_ℓ‖max for the mean-field surrogate S' of the first ℓ layers; S' = I for ℓ = 0."""
    if ell == 0:
        return max_norm(X - x) / max_norm(X)
    mean = x.mean(dim=0, keepdim=True) @ drift_matrix(network, range(ell))
    guess = x + mean if network.skip else mean
    return max_norm(X - guess) / max_norm(X)


def fast_attention(cell: Cell) -> Values:
    """Compute the plan of fast attention in a random network: score bound B, degree, features, predicted speed-up."""
    p = cell.parameters
    plans = plans_of(_network(cell), _inputs(cell)[0], p["tolerance"], p["length"])
    return summary(plans, p["dim"], p["tolerance"])


def _setting(parameters: Mapping[str, Any]) -> Setting:
    return build_setting(**{name: value for name, value in parameters.items() if name != "seed"})


def _complete_setting(parameters: Values) -> Values:
    """Return all parameters of the setting with paper B's defaults filled in; sizes are floats."""
    setting = _setting(parameters)
    full: Values = {"kind": setting.kind, **asdict(setting)}
    sizes: Values = {name: float(full[name]) for name in ("a0", "a1", "b", "c") if name in full}
    return {**full, **sizes, "seed": parameters["seed"]}


def separation(cell: Cell) -> Values:
    """Compute one setting of paper B: the exact probability of success, and the counts over all repetitions."""
    setting = _setting(cell.parameters)
    closed = None if isinstance(setting, Regression) else exact(setting)
    found = estimate(setting, cell.repetition, cell.parameters["seed"])
    return {
        "exact": None if closed is None else closed.success,
        "exact_parts": None if closed is None else list(closed.parts),
        "successes": found.successes,
        "conditions": list(found.conditions),
    }


def _finite(value: torch.Tensor | float) -> float | None:
    plain = float(value)
    return plain if math.isfinite(plain) else None


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "collapse-error", 1, {**_METHOD, **_NETWORK, **_TOKENS, **_OPTIONS, "seed": SEED}, collapse_error,
            _applicable,
        ),
        Task(
            "certificate", 1,
            {
                **_METHOD, **_NETWORK, **_OPTIONS,
                "tokens": Parameter(or_word("any", count("the number of tokens of an input, or the word any")), "any"),
                "effort": Parameter(choice(*EFFORTS), "default"), "seed": SEED,
            },
            certificate, _applicable,
        ),
        Task(
            "effective-depth", 1,
            {
                "tolerance": Parameter(positive("the largest accepted error in an output entry")),
                **_NETWORK, **_TOKENS, **_OPTIONS,
                "samples": Parameter(count("the number of inputs on which the depth is measured"), 4), "seed": SEED,
            },
            depth,
        ),
        Task(
            "fast-attention", 1,
            {
                "tolerance": Parameter(positive("the largest accepted error, relative to the range of the values")),
                **_NETWORK, **_TOKENS, **_OPTIONS,
                "length": Parameter(count("the number of tokens for which the cost is predicted"), 65536), "seed": SEED,
            },
            fast_attention,
        ),
        Task("rank-collapse", 1, {**_NETWORK, **_TOKENS, **_OPTIONS, "seed": SEED}, rank_collapse),
        Task(
            "separation", 1,
            {
                "kind": Parameter(choice("self", "cross", "regression")),
                "attention": Parameter(text("exp, lin or poly:G"), "exp"),
                "x": Parameter(choice("identity", "ones"), None),
                "n": Parameter(count("the number of tokens", 2), None),
                "d": Parameter(count("the width of a token", 2), None),
                "m": Parameter(count("the number of sign vectors"), None),
                "a0": Parameter(number("the size of the special token in D₀"), None),
                "a1": Parameter(number("the size of the special token in D₁"), None),
                "b": Parameter(or_word("tied", number("the size of the repeated identity block, or tied")), None),
                "c": Parameter(number("the size of the last, constant column"), None),
                "seed": SEED,
            },
            separation, _complete_setting, repeats_inside=True,
        ),
        Task("trained-depth", 1, TRAINED, trained_depth, complete_training, repeats_inside=True),
    )
}  # fmt: skip
