"""The tasks of `depthgauge sweep`. To add a task, write its function and add it to `TASKS`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.fast_attention.attention import attention_plan
from depthgauge.fast_attention.bounds import HIGHEST_DEGREE, degree_it_would_take, grid_bound, limit_index
from depthgauge.fast_attention.call import feature_count
from depthgauge.fast_attention.plan import HeadPlan
from depthgauge.papers.separation.probability import estimate, exact
from depthgauge.papers.separation.settings import Regression, Setting, build_setting
from depthgauge.papers.trained_depth.bounded_models import GENERATED, find_task
from depthgauge.papers.trained_depth.bounded_training import (
    DEFAULTS,
    UNBOUNDED,
    BatchTrainer,
    TrainedModel,
    member_seeds,
    options_of,
    shape_of,
)
from depthgauge.papers.trained_depth.output_bound import examine
from depthgauge.results.record import finite
from depthgauge.sweeps.grid import (
    SEED,
    Cell,
    Check,
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
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.depth.certificate import EFFORTS, certify
from depthgauge.theory.depth.effective import effective_depth
from depthgauge.theory.depth.methods import collapse
from depthgauge.theory.linalg.enclosures import sign_norm_up
from depthgauge.theory.linalg.norms import Center, center_row, composite_norm, max_norm
from depthgauge.theory.measures.printed import log_dong_rate, printed_bound
from depthgauge.theory.measures.quantities import weight_sizes
from depthgauge.theory.network.network import NORMS, Layer, SelfAttentionNetwork, softmax_attention
from depthgauge.theory.network.random_networks import DISTRIBUTIONS, random_network, uniform_inputs
from depthgauge.theory.suprema.exact_supremum import ExactLimits, Shares
from depthgauge.theory.surrogates.closed_forms import CLOSED_FORMS, METHODS, drift_matrix, refusal

# --- Rank collapse below the floating-point floor ---------------------------------------------------------------------
# Rank collapse below the floating-point floor: states split into a common row and a residual with its own scale.
# With X = 1yᵀ + R, the scores of row i are β(yᵀ + R_i)W R_jᵀ up to a constant in each row, so
#
#     attention(X) = 1·p(yᵀ + R)V + (P − 1p)RV,   p = softm(β yᵀ W Rᵀ),   P_ij ∝ p_j exp(β R_i W R_jᵀ).
#
# P − 1p is computed without subtracting nearly equal numbers, and R = e^s·R̂ with ‖R̂‖max = 1. A residual of 1e-300 000
# therefore keeps its relative accuracy, although the rows of X itself agree to the last bit from 1e-16 on.
# See docs/math.md, section 5.


@dataclass(frozen=True)
class SplitState:
    """A state X = 1·common + e^log_size · shape with ‖shape‖max = 1; if log_size is −∞, all tokens are equal."""

    common: Float[Tensor, " d"]
    shape: Float[Tensor, "n d"]
    log_size: float

    @classmethod
    def of(cls, X: Float[Tensor, "n d"]) -> "SplitState":
        """Split a state X [n, d] about its mid-range."""
        return _split(torch.zeros_like(X[0]), X, 0.0)

    def joined(self) -> Float[Tensor, "n d"]:
        """Return X [n, d], rounded to floating point."""
        return self.common + math.exp(self.log_size) * self.shape

    def log_residual(self, norm: str, center: Center) -> float:
        """Return log ‖Res(X)‖ in the `max` or `composite` norm."""
        measure = {"max": max_norm, "composite": composite_norm}[norm]
        return self.log_size + _log(float(measure(self.shape - center_row(self.shape, center))))


def _split(common: Tensor, R: Tensor, log_size: float) -> SplitState:
    """Return the state 1·common + e^log_size·R, with the mid-range of R moved into the common row."""
    row = center_row(R)
    size = float(max_norm(R - row))
    common = common + math.exp(log_size) * row[0]
    if size == 0.0 or log_size == -math.inf:
        return SplitState(common, torch.zeros_like(R), -math.inf)
    return SplitState(common, (R - row) / size, log_size + math.log(size))


@torch.no_grad()
def split_step(network: SelfAttentionNetwork, layer: Layer, state: SplitState) -> SplitState:
    """Return layer(X) as a split state."""
    size = math.exp(state.log_size)
    query, key = state.shape @ layer.query, state.shape @ layer.key
    pull = network.scale * size * (state.common[None] @ layer.query) @ key.mT  # β yᵀ W Rᵀ, [h, 1, n]
    gap = _gap(pull, network.scale * query @ key.mT, size * size)
    values = state.shape @ layer.value  # R̂ V, [h, n, d]
    averaged = size * torch.softmax(pull, dim=-1) @ values
    common = (state.common[None] @ layer.value + averaged).sum(0)[0]
    moved = (gap @ values).sum(0)  # (P − 1p)RV = e^{3 log_size}·moved
    if network.skip:
        return _split(state.common + common, state.shape + size * size * moved, state.log_size)
    return _split(common, moved, 3 * state.log_size)


def _gap(pull: Float[Tensor, "h 1 n"], E: Float[Tensor, "h n n"], square: float) -> Float[Tensor, "h n n"]:
    """Return (P − 1p)/square for P_ij ∝ p_j exp(square·E_ij) and p = softm(pull).

    The entries are p_j (e_ij − ē_i)/(1 + square·ē_i) with e = (exp(square·E) − 1)/square and ē = Σ_j p_j e_j. As
    square·E → 0, e → E.
    """
    p, scaled = torch.softmax(pull, dim=-1), square * E
    if float(scaled.abs().amax()) > 1.0:  # no cancellation here, and expm1 might overflow
        return (torch.softmax(pull + scaled, dim=-1) - p) / square
    e = torch.where(scaled.abs() < 1e-8, E * (1 + scaled / 2), torch.expm1(scaled) / max(square, 1e-300))
    mean = (p * e).sum(dim=-1, keepdim=True)
    return p * (e - mean) / (1 + square * mean)


def split_states(network: SelfAttentionNetwork, X: Float[Tensor, "n d"]) -> list[SplitState]:
    """Return the split states X_0, …, X_L of a network without MLPs and LayerNorm, for an input X [n, d]."""
    states = [SplitState.of(X)]
    for layer in network:
        states.append(split_step(network, layer, states[-1]))
    return states


def log_contraction_bounds(network: SelfAttentionNetwork, log_residual: float) -> list[float]:
    """Return log r_ℓ for ℓ = 0 … L, where ‖Res(X_ℓ)‖max ≤ r_ℓ and r_0 = ‖Res(X_0)‖max.

    r_{ℓ+1} = r_ℓ (s + Σ_h tanh(θ_ℓh/2)‖V_ℓh‖col) with s = 1 if the network has skips and 0 otherwise. Every row of
    β Res(X_ℓ) W Res(X_ℓ)ᵀ has range at most θ_ℓh = 2β‖W_ℓh‖_{∞→1} r_ℓ², because |Res(X_ℓ)| ≤ r_ℓ. This iterates the
    corrected Lemma 5.1 (docs/math.md, 2.6 and 5.2).
    """
    bounds = [log_residual]
    for layer in network:
        query, key, value = (w.detach() for w in (layer.query, layer.key, layer.value))
        log_sizes = [_log(float(v)) for v in network.scale * sign_norm_up(query @ key.mT).value]
        columns = [_log(float(v)) for v in value.abs().sum(dim=-2).amax(dim=-1)]
        log_r = bounds[-1]
        parts = [_log_tanh(log_w + 2 * log_r) + log_v for log_w, log_v in zip(log_sizes, columns, strict=True)]
        bounds.append(log_r + _log_sum([0.0, *parts] if network.skip else parts))
    return bounds


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _log_tanh(log_x: float) -> float:
    """Return log tanh(x) from log x. For x < e^−18 it returns log x, and tanh(x) ≤ x keeps the bound valid."""
    return log_x if log_x < -18 else _log(math.tanh(math.exp(min(log_x, 700.0))))


def _log_sum(logs: list[float]) -> float:
    top = max(logs)
    return top if math.isinf(top) else top + math.log(sum(math.exp(x - top) for x in logs))


# --- The tasks of `depthgauge sweep`. To add a task, write its function and add it to `TASKS` ------------------------

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
_OPTIONAL: Mapping[str, Check] = {
    "key_dim": count("the width k of queries and keys"),
    "skip": flag("whether layers have skip connections"),
    "norm": choice(*NORMS),
    "mlp": count("the hidden width of the MLPs"),
    "causal": flag("whether a token sees only itself and earlier tokens"),
    "steps": count("the number of training steps"),
    "batch": count("the number of sequences per step"),
    "rate": positive("the largest learning rate"),
    "test": count("the number of test sequences"),
    "depths": flag("whether the certified and the measured depth are computed"),
}
_TRAINED = {
    "problem": Parameter(choice(*GENERATED)),
    "layers": Parameter(count("the number of layers L")),
    "heads": Parameter(count("the number of heads H per layer")),
    "dim": Parameter(count("the width d of a token")),
    "eta": Parameter(or_word(UNBOUNDED, positive("η, the largest |weight|, or the word none"))),
    **{name: Parameter(check, DEFAULTS[name]) for name, check in _OPTIONAL.items()},
    "seed": SEED,
}
LARGEST_BOUND = 200.0
"""No degree is reported for score bounds above this."""
_TOKENS = {"tokens": Parameter(count("the number of tokens n of an input"))}
_CAUSAL = "causal-certificate"
"""The task that certifies surrogates of causal networks."""
_METHOD = {"method": Parameter(choice(*METHODS))}


def _network(cell: Cell) -> SelfAttentionNetwork:
    p = cell.parameters
    shape = (p["layers"], p["heads"], p["dim"], p["eta"])
    kind = {"distribution": p["distribution"], "skip": p["skip"], "causal": cell.task == _CAUSAL}
    return random_network(*shape, **kind, seed=cell.seed("network"))


def _applicable(parameters: Values, causal: bool = False) -> Values:
    """Return the parameters; raise if the method does not apply to a network of this kind."""
    reason = _refusal(parameters["method"], parameters["skip"], parameters["tokens"] if causal else None)
    if reason is not None:
        raise InputError(reason)
    return parameters


@cache
def _refusal(method: str, skip: bool, length: int | None, blocks: bool = False) -> str | None:
    kind: dict[str, Any] = _blocks(1) if blocks else {}
    return refusal(random_network(1, 1, 1, 1.0, skip=skip, causal=length is not None, **kind), method, length)


def _blocks(dim: int) -> dict[str, Any]:
    """Return the settings of a random network that has LayerNorm before its sublayers, and MLPs as wide as a token."""
    return {"norm": "pre", "mlp": dim, "mlp_skip": True}


def _inputs(cell: Cell, samples: int = 1) -> torch.Tensor:
    p = cell.parameters
    return uniform_inputs(samples, p["tokens"], p["dim"], radius=p["radius"], seed=cell.seed("inputs"))


def collapse_error(cell: Cell) -> Values:
    """Compute ‖S(X) − S'(X)‖max for a random network S, its surrogate S' and one input X uniform in the box."""
    p, network, x = cell.parameters, _network(cell), _inputs(cell)[0]
    surrogate = collapse(network, p["method"], radius=p["radius"], seed=cell.seed("fit"))
    with torch.no_grad():
        truth, guess = network(x), surrogate(x)
    return {"error": finite(max_norm(truth - guess)), "output": finite(max_norm(truth))}


def certificate(cell: Cell) -> Values:
    """Compute the lower and the certified upper bound on sup ‖S(X) − S'(X)‖max, and paper A's printed bound."""
    p, network = cell.parameters, _network(cell)
    tokens = None if p["tokens"] == "any" else p["tokens"]
    surrogate = collapse(network, p["method"], length=tokens, radius=p["radius"], seed=cell.seed("fit"))
    effort = p.get("effort", "default")
    found = certify(network, surrogate, radius=p["radius"], tokens=tokens, effort=effort, seed=cell.seed("attack"))
    printed = printed_bound(network, p["radius"])
    return {
        "lower": found.lower,
        "upper": found.upper,
        "ratio": found.ratio,
        "printed": printed.printed_bound,
        "printed_applies": printed.printed_applies,
    }


def _applicable_exactly(parameters: Values) -> Values:
    """Return the parameters; raise if the method does not apply to a network of this kind."""
    reason = _refusal(parameters["method"], True, None, parameters["blocks"])
    if reason is not None:
        raise InputError(reason)
    return parameters


def exact_supremum(cell: Cell) -> Values:
    """Compute the default certificate over all prompts of some tokens, and an enclosure of the supremum itself.

    - `lower`, `upper`: the attacked lower bound and the default upper bound on sup ‖S(X) − S'(X)‖max
    - `exact_lower`, `exact_upper`: the enclosure; it is wider than the tolerance if the time was not enough

    A repetition has the same tokens, and the same weights up to the factor η, for every method and η.
    """
    p, common = cell.parameters, replace(cell, parameters={"seed": cell.parameters["seed"]})
    shape, kind = (p["layers"], p["heads"], p["dim"], p["eta"]), _blocks(p["dim"]) if p["blocks"] else {}
    network = random_network(*shape, **kind, seed=common.seed("network"))
    tokens = Tokens(uniform_inputs(1, p["vocabulary"], p["dim"], seed=common.seed("tokens"))[0])
    surrogate = collapse(network, p["method"])
    usual = certify(network, surrogate, inputs=tokens, seed=common.seed("attack"))
    limits = {"tolerance": p["tolerance"], "seconds": p["seconds"]}
    exact = certify(network, surrogate, inputs=tokens, effort="exact", **limits)
    assert isinstance(exact.method, Shares)
    if exact.method.is_interrupted:  # the sweep stops, and computes the cell when it is continued
        raise KeyboardInterrupt
    bounds = {"lower": usual.lower, "upper": usual.upper}
    return {**bounds, "exact_lower": exact.method.attained, "exact_upper": exact.upper}


def depth(cell: Cell) -> Values:
    """Compute the effective depth of a random network: certified for all inputs, and measured on random inputs."""
    p, network = cell.parameters, _network(cell)
    proved = effective_depth(network, tolerance=p["tolerance"], radius=p["radius"])
    seen = effective_depth(network, tolerance=p["tolerance"], certified=False, x=_inputs(cell, p["samples"]))
    return {
        "certified": proved.layers,
        "certified_error": finite(proved.error),
        "measured": seen.layers,
        "measured_error": finite(seen.error),
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
        "one_layer": [finite(_one_layer_error(network, x, X, ell)) for ell, X in enumerate(joined)],
    }


def _log10(logs: list[float], scales: list[float]) -> list[float | None]:
    return [finite((log - scale) / math.log(10)) for log, scale in zip(logs, scales, strict=True)]


def _one_layer_error(network: SelfAttentionNetwork, x: torch.Tensor, X: torch.Tensor, ell: int) -> torch.Tensor:
    """Return ‖X_ℓ − S'(X)‖max/‖X_ℓ‖max for the mean-field surrogate S' of the first ℓ layers; S' = I for ℓ = 0."""
    if ell == 0:
        return max_norm(X - x) / max_norm(X)
    mean = x.mean(dim=0, keepdim=True) @ drift_matrix(network, range(ell))
    guess = x + mean if network.skip else mean
    return max_norm(X - guess) / max_norm(X)


def plans_of(network: SelfAttentionNetwork, x: Tensor, tolerance: float, length: int) -> list[HeadPlan]:
    """Return the plan of every head of every layer for an input x [n, d] whose tokens are repeated up to `length`.

    Repeating tokens changes neither the set of scores nor the bounds on them, only the number of tokens for which the
    cost is predicted.
    """
    heads: list[HeadPlan] = []

    def observe(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        q, k, v = (_repeated(t, length) for t in (query, key, value))
        heads.extend(attention_plan(q, k, v, is_causal=is_causal, tolerance=tolerance, scale=scale).heads)
        return softmax_attention(query, key, value, is_causal=is_causal, scale=scale)

    with torch.no_grad():
        network(x, attention=observe)
    return heads


def _repeated(t: Tensor, length: int) -> Tensor:
    times = math.ceil(length / t.shape[-2])
    return t.repeat(*(1 for _ in t.shape[:-2]), times, 1)[..., :length, :]


def degree_needed(bound: float, tolerance: float) -> int | None:
    """Return the least degree that meets the tolerance for scores up to `bound`.

    Above `HIGHEST_DEGREE` the degree is an estimate; above `LARGEST_BOUND` the result is None.
    """
    for degree in range(HIGHEST_DEGREE + 1):
        index = limit_index(degree, tolerance)
        if index is not None and bound <= grid_bound(index):
            return degree
    return degree_it_would_take(bound, tolerance) if bound <= LARGEST_BOUND else None


def fast_attention(cell: Cell) -> Values:
    """Compute the plan of fast attention in a random network: score bound, degree, number of features, speed-up.

    `bound` is the largest proved score bound B, `degree` and `features` are what it requires (None if B is too large
    for any degree), `polynomial` is the share of heads on the polynomial path, and `speedup` is the predicted cost of
    exact attention over the cost of the chosen paths.
    """
    p = cell.parameters
    heads = plans_of(_network(cell), _inputs(cell)[0], p["tolerance"], p["length"])
    bound = max(min(head.bound_before, head.bound_after) for head in heads)
    degree = degree_needed(bound, p["tolerance"])
    chosen = sum(head.cost_polynomial if head.path == "polynomial" else head.cost_exact for head in heads)
    return {
        "bound": bound,
        "degree": degree,
        "features": None if degree is None else feature_count(p["dim"], degree),
        "polynomial": sum(head.path == "polynomial" for head in heads) / len(heads),
        "speedup": sum(head.cost_exact for head in heads) / chosen,
    }


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


def _complete_training(parameters: dict[str, Any]) -> dict[str, Any]:
    """Fill in the key width, and check the shape and the options of the models."""
    return {**parameters, "key_dim": shape_of(parameters).key_dim}


def trained_depth(cell: Cell) -> dict[str, Any]:
    """Train the models of a cell, and return their records; every value but `chance` is a list over repetitions."""
    p = cell.parameters
    eta, seeds = None if p["eta"] == UNBOUNDED else p["eta"], member_seeds(p["seed"], cell.repetition)
    trainer = BatchTrainer(find_task(p["problem"]), shape_of(p), [eta] * len(seeds), seeds, options_of(p))
    return records_of(trainer.run(), p)


def records_of(models: Sequence[TrainedModel], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a cell from its trained models."""
    found = [asdict(examine(model, parameters["test"], depths=parameters["depths"])) for model in models]
    return {"chance": models[0].task.chance, **{name: [record[name] for record in found] for name in found[0]}}


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
            _CAUSAL, 1, {**_METHOD, **_NETWORK, **_OPTIONS, **_TOKENS, "seed": SEED}, certificate,
            partial(_applicable, causal=True),
        ),
        Task(
            "exact-supremum", 1,
            {
                "method": Parameter(choice(*CLOSED_FORMS)), **_NETWORK,
                "vocabulary": Parameter(count("the number of different tokens")),
                "blocks": Parameter(flag("whether layers have LayerNorm, and MLPs as wide as a token"), False),
                "tolerance": Parameter(positive("the relative width of the enclosure"), ExactLimits.tolerance),
                "seconds": Parameter(positive("the time after which the search ends"), ExactLimits.seconds),
                "seed": SEED,
            },
            exact_supremum, _applicable_exactly,
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
        Task("trained-depth", 2, _TRAINED, trained_depth, _complete_training, repeats_inside=True),
    )
}  # fmt: skip
