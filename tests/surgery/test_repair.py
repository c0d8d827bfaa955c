"""The refit equals dense ridge regression, and is used where the output is affine in the weights."""

from collections.abc import Sequence

import pytest
import torch
from refit_problems import LAYER, Problem, copies, same_bits
from tiny_models import MODELS
from torch import Tensor, nn

from depthgauge.surgery import repair
from depthgauge.surgery.repair import is_linear, refit, refit_block

NORMED = ("gemma2", "gemma3", "bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
LINEAR = tuple(name for name in MODELS if name not in NORMED)
NEARLY_BFLOAT16 = 2.0**-8


def dense_ridge(problem: Problem, maps: Sequence[nn.Module], targets: Tensor, ridge: float, first: int = 0) -> Tensor:
    """The ridge regression as one least-squares problem of stacked rows, on the tokens from `first` on."""
    shape = targets.shape
    kept = torch.arange(shape[0] * shape[1]) % shape[1] >= first
    features = problem.features(maps)[kept]
    errors = (targets.double() - problem.output().double()).flatten(0, 1)[kept]
    weights = targets.double().flatten(0, 1)[kept].norm(dim=-1, keepdim=True).reciprocal()
    rows = weights * features
    squares = rows.square().sum(0)
    penalty = torch.diag((ridge * (squares + squares.mean())).sqrt())
    left = torch.cat([rows, penalty])
    right = torch.cat([weights * errors, torch.zeros(len(penalty), errors.shape[1], dtype=torch.float64)])
    return torch.linalg.lstsq(left, right).solution.T


def as_update(maps: Sequence[nn.Module], updates: Sequence[tuple[nn.Parameter, Tensor]]) -> Tensor:
    """The change of weights and biases as one matrix [outputs, features]."""
    deltas = dict(updates)
    columns = []
    for module in maps:
        delta = deltas.pop(module.weight)
        columns.append(delta if isinstance(module, nn.Linear) else delta.T)
        if module.bias is not None:
            columns.append(deltas.pop(module.bias)[:, None])
    assert not deltas
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("ridge", [1e-6, 0.03])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_the_refit_equals_dense_ridge_regression(name: str, joint: bool, ridge: float) -> None:
    problem = Problem(name)
    targets = problem.unreachable()
    maps = [problem.attention, problem.mlp] if joint else [problem.mlp]
    expected = dense_ridge(problem, maps, targets, ridge)
    found = as_update(maps, refit(problem.runner, LAYER, maps, problem.states, targets, ridge))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    assert expected.abs().max() > 1e-3


def test_these_families_have_all_kinds_of_maps() -> None:
    problems = [Problem(name) for name in LINEAR]
    maps = [module for problem in problems for module in (problem.attention, problem.mlp)]
    kinds = {(type(module).__name__, module.bias is not None) for module in maps}
    assert kinds == {("Linear", False), ("Linear", True), ("Conv1D", True)}


@pytest.mark.parametrize("name", [*LINEAR, "granite", "phi3", "bloom", "opt"])
def test_weights_that_reach_the_target_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "RIDGE", 1e-8)
    monkeypatch.setattr(repair, "RIDGE_PER_RATIO", 0.0)
    problem = Problem(name)
    targets = problem.targets([problem.mlp])
    before, others = problem.error(targets), copies(problem.model)
    refit_block(problem.runner, LAYER, problem.states, targets)
    assert problem.error(targets) < before / 100
    changed = {*problem.attention.parameters(), *problem.mlp.parameters()}
    kept = [(p, old) for p, old in zip(problem.model.parameters(), others, strict=True) if p not in changed]
    assert same_bits([p.detach() for p, _ in kept], [old for _, old in kept])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox-sequential"])
def test_the_last_map_is_refitted_to_the_inputs_that_the_first_refit_makes(name: str) -> None:
    problem = Problem(name)
    targets = problem.unreachable()
    ridge = max(repair.RIDGE, repair.RIDGE_PER_RATIO * repair.shape_of(problem.mlp)[0] / targets[..., 0].numel())
    twin = Problem(name)
    with torch.no_grad():
        for parameter, delta in refit(twin.runner, LAYER, [twin.attention, twin.mlp], twin.states, targets, ridge):
            parameter += delta
    expected = dense_ridge(twin, [twin.mlp], targets, ridge)
    middle = twin.mlp.weight.detach().clone()
    refit_block(problem.runner, LAYER, problem.states, targets)
    update = problem.mlp.weight.detach() - middle
    update = update if isinstance(problem.mlp, nn.Linear) else update.T
    torch.testing.assert_close(update, expected[:, : update.shape[1]], rtol=1e-6, atol=1e-8)


def first_token_problem(name: str) -> Problem:
    """A block in which one unit of the MLP is large at the first token and 0 elsewhere, as in real models.

    Entry 3 of the residual stream is nonzero at the first token only, and unit 0 of the MLP reads that entry alone.
    """
    problem = Problem(name, windows=20)
    block = problem.runner.blocks[LAYER]
    problem.states[..., 3] = 0.0
    problem.states[:, 0, 3] = 300.0
    with torch.no_grad():
        problem.attention.weight[3] = 0.0
        for module in (block.mlp.gate_proj, block.mlp.up_proj):
            module.weight[0] = 0.0
            module.weight[0, 3] = 10.0
    units = problem.features([problem.mlp]).view(*problem.states.shape[:2], -1)[..., 0].abs()
    assert units[:, 0].min() > 100 * units[:, 1:].max()
    return problem


def test_leaving_out_the_first_token_is_worse() -> None:
    problem = first_token_problem("llama")
    maps = [problem.mlp]
    targets = problem.targets(maps)
    before = problem.error(targets)
    ((weight, delta),) = refit(problem.runner, LAYER, maps, problem.states, targets, 1e-6)
    planted = dense_ridge(problem, maps, targets, 1e-6, first=1)
    start = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(start + delta)
        right = problem.error(targets)
        weight.copy_(start + planted)
    assert right < before / 1000
    assert problem.error(targets) > 100 * right


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_weights_are_refitted_up_to_their_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "RIDGE", 1e-4)
    monkeypatch.setattr(repair, "RIDGE_PER_RATIO", 0.0)
    problem = Problem(name, dtype=torch.bfloat16)
    targets = problem.targets([problem.mlp], size=0.3)
    before = problem.error(targets)
    refit_block(problem.runner, LAYER, problem.states.float(), targets.float())
    tokens = targets.shape[0] * targets.shape[1]
    assert problem.error(targets) < max(before / 10, tokens * (4 * NEARLY_BFLOAT16) ** 2)
    assert all(parameter.dtype == torch.bfloat16 for parameter in problem.model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_norm_follows_where_the_output_is_not_affine_in_the_weights(name: str) -> None:
    problem = Problem(name)
    down: nn.Parameter = problem.mlp.weight
    start = down.detach().clone()
    noise = torch.randn(down.shape, generator=torch.Generator().manual_seed(1)).to(down)
    middle = problem.output()
    ends = torch.zeros_like(middle)
    with torch.no_grad():
        for sign in (1.0, -1.0):
            down.copy_(start + sign * noise)
            ends += problem.output() / 2
        down.copy_(start)
    affine = float((ends - middle).abs().max() / middle.abs().max()) < 1e-6
    assert is_linear(problem.family) is affine
    assert (name in NORMED) is not affine
