"""The linear refit equals dense ridge regression, and `refit_block` chooses the right method for every family."""

from collections.abc import Sequence

import pytest
import torch
from refit_problems import LAYER, Problem, copies, same_bits
from tiny_models import MODELS
from torch import Tensor, nn

from depthgauge.surgery.repair import Change, output_maps, refit
from depthgauge.surgery.repair_block import combined, refit_block

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


def as_update(maps: Sequence[nn.Module], change: Change) -> Tensor:
    """The change of weights and biases as one matrix [outputs, features]."""
    deltas = dict(zip(change.parameters, change.deltas, strict=True))
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
    both = output_maps(problem.runner.blocks[LAYER], problem.family)
    maps = both if joint else both[1:]
    expected = dense_ridge(problem, maps, targets, ridge)
    found = as_update(maps, refit(problem.runner, LAYER, maps, problem.states, targets, ridge))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    assert expected.abs().max() > 1e-3


def test_these_families_have_all_kinds_of_maps() -> None:
    problems = [Problem(name) for name in LINEAR]
    maps = [pair.map for problem in problems for pair in (problem.attention, problem.mlp)]
    kinds = {(type(module).__name__, module.bias is not None) for module in maps}
    assert kinds == {("Linear", False), ("Linear", True), ("Conv1D", True)}


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_reach_the_target_are_found(name: str, joint: bool) -> None:
    problem = Problem(name)
    both = joint and (name == "gpt_neox" or name in NORMED)  # elsewhere joint refits neglect an effect
    changed = [problem.mlp.map, problem.mlp.norm, *([problem.attention.map, problem.attention.norm] if both else [])]
    targets = problem.targets(changed)
    before, parameters = problem.error(targets), copies(problem.model)
    changes = refit_block(problem.runner, LAYER, problem.states, targets, 1e-8, joint=joint)
    assert same_bits(copies(problem.model), parameters)  # nothing is applied yet
    for change in changes:
        change.apply(1.0)
    assert problem.error(targets) < before / (10 if both else 100)
    for change in reversed(changes):
        change.apply(0.0)
    assert same_bits(copies(problem.model), parameters)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox-sequential"])
def test_the_second_change_uses_the_inputs_that_the_first_makes(name: str) -> None:
    problem = Problem(name)
    targets = problem.unreachable()
    changes = refit_block(problem.runner, LAYER, problem.states, targets, 1e-4, joint=True)
    assert len(changes) == 2
    changes[0].apply(1.0)
    one = problem.error(targets)
    expected = dense_ridge(problem, [problem.mlp.map], targets, 1e-4)
    torch.testing.assert_close(as_update([problem.mlp.map], changes[1]), expected, rtol=1e-6, atol=1e-8)
    changes[1].apply(1.0)
    assert problem.error(targets) < one


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma3", "bert"])
def test_a_combined_change_ends_where_the_changes_end(name: str) -> None:
    problem = Problem(name)
    parameters = copies(problem.model)
    changes = refit_block(problem.runner, LAYER, problem.states, problem.unreachable(), 1e-4, joint=True)
    for change in changes:
        change.apply(1.0)
    ended = copies(problem.model)
    for change in reversed(changes):
        change.apply(0.0)
    whole = combined(changes)
    whole.apply(1.0)
    for found, expected in zip(copies(problem.model), ended, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    whole.apply(0.5)
    for found, start, end in zip(copies(problem.model), parameters, ended, strict=True):
        torch.testing.assert_close(found, (start + end) / 2, rtol=1e-12, atol=1e-12)
    whole.apply(0.0)
    assert same_bits(copies(problem.model), parameters)


def first_token_problem(name: str) -> Problem:
    """A block in which one unit of the MLP is large at the first token and 0 elsewhere, as in real models.

    Entry 3 of the residual stream is nonzero at the first token only, and unit 0 of the MLP reads that entry alone.
    """
    problem = Problem(name, windows=20)
    block = problem.runner.blocks[LAYER]
    problem.states[..., 3] = 0.0
    problem.states[:, 0, 3] = 300.0
    with torch.no_grad():
        problem.attention.map.weight[3] = 0.0
        for module in (block.mlp.gate_proj, block.mlp.up_proj):
            module.weight[0] = 0.0
            module.weight[0, 3] = 10.0
    units = problem.features([problem.mlp.map]).view(*problem.states.shape[:2], -1)[..., 0].abs()
    assert units[:, 0].min() > 100 * units[:, 1:].max()
    return problem


def test_leaving_out_the_first_token_is_worse() -> None:
    problem = first_token_problem("llama")
    maps = [problem.mlp.map]
    targets = problem.targets(maps)
    before = problem.error(targets)
    found = refit(problem.runner, LAYER, maps, problem.states, targets, 1e-6)
    planted = Change(found.parameters, found.before, (dense_ridge(problem, maps, targets, 1e-6, first=1),))
    found.apply(1.0)
    right = problem.error(targets)
    planted.apply(1.0)
    assert right < before / 1000
    assert problem.error(targets) > 100 * right


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bert"])
def test_bfloat16_weights_are_refitted_up_to_their_precision(name: str) -> None:
    problem = Problem(name, dtype=torch.bfloat16)
    targets = problem.targets([problem.mlp.map], size=0.3)
    before, parameters = problem.error(targets), copies(problem.model)
    changes = refit_block(problem.runner, LAYER, problem.states.float(), targets.float(), 1e-4, joint=False)
    assert all(delta.dtype == torch.float64 for change in changes for delta in change.deltas)
    for change in changes:
        change.apply(1.0)
    tokens = targets.shape[0] * targets.shape[1]
    assert problem.error(targets) < max(before / 10, tokens * (4 * NEARLY_BFLOAT16) ** 2)
    assert all(parameter.dtype == torch.bfloat16 for parameter in problem.model.parameters())
    for change in reversed(changes):
        change.apply(0.0)
    assert same_bits(copies(problem.model), parameters)


@pytest.mark.parametrize("name", MODELS)
def test_only_the_maps_and_their_norms_change(name: str) -> None:
    problem = Problem(name)
    targets = problem.unreachable()
    block = problem.runner.blocks[LAYER]
    for joint in (False, True):
        changes = refit_block(problem.runner, LAYER, problem.states, targets, 1e-3, joint=joint)
        changed = {parameter for change in changes for parameter in change.parameters}
        pairs = [problem.mlp, *([problem.attention] if joint else [])]
        modules = [module for pair in pairs for module in (pair.map, pair.norm) if module is not None]
        assert changed == {parameter for module in modules for parameter in module.parameters()}
        assert changed < set(block.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_norm_follows_where_the_output_is_not_affine_in_the_weights(name: str) -> None:
    problem = Problem(name)
    down: nn.Parameter = problem.mlp.map.weight
    noise = torch.randn(down.shape, generator=torch.Generator().manual_seed(1)).to(down)
    middle = problem.output()
    ends = torch.zeros_like(middle)
    for sign in (1.0, -1.0):
        change = Change((down,), (down.detach().clone(),), (sign * noise,))
        change.apply(1.0)
        ends += problem.output() / 2
        change.apply(0.0)
    affine = float((ends - middle).abs().max() / middle.abs().max()) < 1e-6
    assert (problem.family.mlp_norm is not None) is not affine
    assert (name in NORMED) is not affine
