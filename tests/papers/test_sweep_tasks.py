"""The results of the tasks are those of the underlying functions, and depend on the cell only."""

import math
from typing import Any

import pytest
import torch

from depthgauge.papers.separation.probability import estimate, exact
from depthgauge.papers.separation.settings import CrossAttention
from depthgauge.papers.sweep_tasks import TASKS, SplitState, log_contraction_bounds, plans_of, split_states, split_step
from depthgauge.sweeps.grid import Cell, Grid
from depthgauge.theory.depth.certificate import certify
from depthgauge.theory.depth.effective import effective_depth
from depthgauge.theory.depth.methods import collapse
from depthgauge.theory.linalg.norms import max_norm, residual
from depthgauge.theory.measures.profile import measure
from depthgauge.theory.network.random_networks import random_network, uniform_inputs

NETWORK = {"eta": 0.05, "layers": 3, "heads": 2, "dim": 4}


def cell_of(task: str, repetition: int = 0, **parameters: Any) -> Cell:
    return Grid(TASKS[task], {name: [value] for name, value in parameters.items()}, repetition + 1).cells()[-1]


def run(cell: Cell) -> dict[str, Any]:
    return TASKS[cell.task].run(cell)


def drawn(cell: Cell, **more: Any) -> Any:
    return random_network(3, 2, 4, 0.05, seed=cell.seed("network"), **more)


TINY = {"eta": 0.05, "layers": 2, "heads": 1, "dim": 2}
EXAMPLES = {
    "collapse-error": {"method": "mean-field", "tokens": 8, **NETWORK},
    "certificate": {"method": "mean-field", **TINY},
    "causal-certificate": {"method": "mean-field", "tokens": 4, **TINY},
    "effective-depth": {"tolerance": 1e-3, "tokens": 8, **TINY},
    "exact-supremum": {"method": "mean-field", "vocabulary": 2, **TINY},
    "fast-attention": {"tolerance": 1e-3, "tokens": 8, "length": 4096, **TINY},
    "rank-collapse": {"tokens": 8, **NETWORK},
    "separation": {"kind": "cross"},
    "trained-depth": {"problem": "parity", "steps": 3, "batch": 4, "test": 30, **TINY, "layers": 1},
}


@pytest.mark.parametrize("task", sorted(TASKS))
def test_results_are_reproducible_and_differ_between_repetitions(task: str) -> None:
    cell = cell_of(task, 4, **EXAMPLES[task])
    result = run(cell)
    assert run(cell) == result
    assert run(cell_of(task, 6, **EXAMPLES[task])) != result
    assert not set(result) & set(TASKS[task].parameters)  # both become columns of one table


def test_collapse_error_is_the_difference_of_the_outputs() -> None:
    cell = cell_of("collapse-error", method="parallel", tokens=8, radius=0.5, **NETWORK)
    network = drawn(cell)
    x = uniform_inputs(1, 8, 4, radius=0.5, seed=cell.seed("inputs"))[0]
    with torch.no_grad():
        expected = float(max_norm(network(x) - collapse(network, "parallel")(x)))
    assert run(cell)["error"] == expected > 0


def test_weights_and_inputs_use_different_random_numbers() -> None:
    cell = cell_of("collapse-error", method="identity", tokens=4, **NETWORK)
    x = uniform_inputs(1, 4, 4, seed=cell.seed("inputs"))[0]
    assert not torch.allclose(drawn(cell)[0].query[0] / 0.05, x)


def test_certificate_is_the_lower_and_upper_bound() -> None:
    cell = cell_of("certificate", method="mean-field", tokens=6, **NETWORK)
    network = drawn(cell)
    found = certify(network, collapse(network, "mean-field"), radius=1.0, tokens=6, seed=cell.seed("attack"))
    result = run(cell)
    assert (result["lower"], result["upper"]) == (found.lower, found.upper)
    assert 0 < result["lower"] <= result["upper"]


def test_effective_depth_is_certified_and_measured() -> None:
    cell = cell_of("effective-depth", tolerance=3e-4, tokens=8, **NETWORK)
    network = drawn(cell)
    x = uniform_inputs(4, 8, 4, seed=cell.seed("inputs"))
    result = run(cell)
    assert result["certified"] == effective_depth(network, tolerance=3e-4, radius=1.0).layers
    assert result["measured"] == effective_depth(network, tolerance=3e-4, certified=False, x=x).layers
    assert result["measured"] <= result["certified"]


def test_fast_attention_summarises_the_plans_of_all_layers() -> None:
    small = run(cell_of("fast-attention", tolerance=1e-3, tokens=16, length=8192, **NETWORK))
    large = run(cell_of("fast-attention", tolerance=1e-3, tokens=16, length=8192, **{**NETWORK, "eta": 2.0}))
    assert small["polynomial"] == 1
    assert small["features"] == math.comb(4 + small["degree"], small["degree"])
    assert small["speedup"] > 10
    assert (large["polynomial"], large["speedup"]) == (0, 1)
    assert large["bound"] > 100 * small["bound"]
    assert large["degree"] is None or large["degree"] > 4


def test_the_plans_bound_the_measured_scores() -> None:
    network = random_network(3, 2, 4, 0.3, seed=1)
    x = uniform_inputs(1, 16, 4, seed=2)[0]
    seen = measure(network, x)
    heads = plans_of(network, x, 1e-3, 64)
    assert len(heads) == 6
    ranges = [float(head) for layer in seen.heads for head in layer.score_range.reshape(-1, 2).amax(0)]
    assert all(plan.bound_after >= score / 2 for plan, score in zip(heads, ranges, strict=True))


def test_separation_is_the_estimate_and_the_exact_value() -> None:
    result = run(cell_of("separation", 99, kind="cross", d=5, seed=3))
    setting = CrossAttention(200, 5, 10, 0.01, 3.0)
    found = estimate(setting, 100, 3)
    assert result["successes"] == found.successes
    assert result["conditions"] == list(found.conditions)
    assert result["exact"] == exact(setting).success
    assert run(cell_of("separation", 9, kind="regression", n=20))["exact"] is None


# --- rank collapse ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [0.003, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("skip", [True, False])
def test_split_states_equal_the_states(eta: float, skip: bool) -> None:
    network = random_network(4, 2, 6, eta, skip=skip, seed=5)
    x = uniform_inputs(1, 9, 6, seed=6)[0]
    profile = measure(network, x)
    for ell, (split, state) in enumerate(zip(split_states(network, x), [x, *_after(network, x)], strict=True)):
        torch.testing.assert_close(split.joined(), state, rtol=1e-11, atol=1e-13 * float(max_norm(state)))
        seen = float(profile.residuals[ell]["midrange"]["max"].value[0])
        if seen > 1e-8 * float(max_norm(state)):  # below this the states have too few digits for a comparison
            assert math.exp(split.log_residual("max", "midrange")) == pytest.approx(seen, rel=1e-6)
            seen = float(profile.residuals[ell]["mean"]["composite"].value[0])
            assert math.exp(split.log_residual("composite", "mean")) == pytest.approx(seen, rel=1e-6)


def _after(network: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [trace.after[0].detach() for trace in network.trace(x[None])]


def test_residuals_below_rounding_keep_their_accuracy() -> None:
    """For tiny residuals the step is linear in the scores: R' = U(βRWRᵀ − row means)RV, which is cubic in R."""
    network = random_network(1, 2, 5, 0.3, skip=False, seed=1)
    shape = residual(uniform_inputs(1, 7, 5, seed=2)[0])
    common = torch.zeros(5, dtype=torch.float64)
    sizes = []
    for log_size in (-20.0, -40.0, -400.0, -100_000.0):
        after = split_step(network, network[0], SplitState(common, shape / max_norm(shape), log_size))
        sizes.append(after.log_size - 3 * log_size)
    assert sizes == pytest.approx([sizes[0]] * 4, abs=1e-9)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("eta", [0.001, 0.03, 0.2, 1.0])
def test_the_iterated_contraction_bound_is_never_exceeded(eta: float, skip: bool) -> None:
    for seed in range(6):
        network = random_network(
            5, 2, 5, eta, skip=skip, seed=seed, distribution=("uniform", "sign", "aligned")[seed % 3]
        )
        x = uniform_inputs(1, (2, 3, 12)[seed % 3], 5, seed=seed + 50)[0]
        seen = [state.log_residual("max", "midrange") for state in split_states(network, x)]
        bounds = log_contraction_bounds(network, seen[0])
        assert all(a <= b + 1e-9 * abs(b) + 1e-12 for a, b in zip(seen, bounds, strict=True))


def test_the_contraction_bound_is_attained_by_two_opposite_tokens() -> None:
    """n = 2, X = ±1ᵀ and constant weights attain one step of the bound, for every width."""
    for d in (1, 3, 8):
        network = random_network(1, 1, d, 0.3, skip=False, distribution="aligned")
        x = torch.ones(2, d, dtype=torch.float64) * torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
        seen = split_states(network, x)[1].log_residual("max", "midrange")
        assert seen == pytest.approx(log_contraction_bounds(network, 0.0)[1], abs=1e-9)


def test_equal_tokens_have_residual_zero() -> None:
    state = SplitState.of(torch.ones(3, 2, dtype=torch.float64))
    assert state.log_size == -math.inf
    assert torch.equal(state.joined(), torch.ones(3, 2, dtype=torch.float64))
    result = run(cell_of("rank-collapse", tokens=1, **NETWORK))
    assert result["log10_ratio"] == [None] * 4
    assert result["one_layer"][1] < 1e-12  # with one token, attention is the identity on values


def test_rank_falls_doubly_exponentially_without_skips_and_not_with_them() -> None:
    alone = run(cell_of("rank-collapse", tokens=16, skip=False, eta=0.01, layers=7, heads=1, dim=8))
    *_, before, last = alone["log10_ratio"]
    assert last / before == pytest.approx(3, abs=0.05)  # every layer triples the number of digits that agree
    assert last < -1000
    with_skips = run(cell_of("rank-collapse", tokens=16, eta=0.01, layers=5, heads=1, dim=8))
    assert min(with_skips["log10_ratio"]) > -0.1
    assert with_skips["one_layer"][-1] < 1e-4
