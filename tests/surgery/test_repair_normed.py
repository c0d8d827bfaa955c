"""Refits through a norm: as good as an independent minimizer, never worse than before, equal to ridge if linear."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from layered_models import LAYERS, layered_model
from refit_problems import LAYER, Problem, copies, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.checkpoints.load import wrap
from depthgauge.surgery import repair_normed
from depthgauge.surgery.repair import refit
from depthgauge.surgery.repair_block import refit_block
from depthgauge.surgery.repair_normed import NormedMap, refit_normed
from depthgauge.surgery.student import Objective

KINDS = ("gemma2", "gemma3", "bert", "distilbert")


def error_after(problem: Problem, change: Any, targets: Tensor) -> float:
    change.apply(1.0)
    found = problem.error(targets)
    change.apply(0.0)
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "qwen2"])
def test_without_a_norm_the_first_step_is_the_ridge_regression(name: str) -> None:
    problem = Problem(name)
    targets = problem.unreachable()
    maps = [NormedMap(problem.mlp.map, None)]
    found = refit_normed(problem.runner, LAYER, problem.states, targets, 0.03, 1, maps=maps)
    expected = refit(problem.runner, LAYER, [problem.mlp.map], problem.states, targets, 0.03)
    assert found.parameters == expected.parameters
    for one, other in zip(found.deltas, expected.deltas, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def plain_minimum(problem: Problem, maps: Sequence[NormedMap], targets: Tensor) -> float:
    """The least error found by torch's own L-BFGS, with gradients of the parameters through the whole block."""
    modules = [module for pair in maps for module in (pair.map, pair.norm) if module is not None]
    parameters = [p for module in modules for p in module.parameters()]
    kept = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.LBFGS(parameters, max_iter=150, history_size=30, line_search_fn="strong_wolfe")
    weights = targets.double().square().sum(-1).reciprocal()

    def closure() -> Tensor:
        optimizer.zero_grad()
        output = problem.runner.block(LAYER, problem.states).double()
        loss = (weights * (targets.double() - output).square().sum(-1)).sum()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    found = problem.error(targets)
    optimizer.zero_grad()
    with torch.no_grad():
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)
    return found


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", ["gemma3", "bert", "distilbert"])
def test_the_error_is_close_to_the_minimum(name: str, both: bool) -> None:
    problem = Problem(name, windows=12)
    targets = problem.unreachable()
    maps = (problem.attention, problem.mlp) if both else (problem.mlp,)
    before, least = problem.error(targets), plain_minimum(problem, maps, targets)
    one, found = (
        error_after(
            problem, refit_normed(problem.runner, LAYER, problem.states, targets, 1e-9, steps, maps=maps), targets
        )
        for steps in (1, 12)
    )
    assert least < 0.9 * before
    assert found - least < 0.1 * (before - least)
    assert found < one < before  # further steps help


@pytest.mark.parametrize("name", ["bert", "distilbert", "gemma3"])
def test_the_gradient_equals_finite_differences(name: str) -> None:
    problem = Problem(name, windows=3, length=7)
    targets = problem.unreachable()
    parts = [repair_normed._Part(pair) for pair in (problem.attention, problem.mlp)]
    fit = repair_normed._Fit(problem.runner, LAYER, parts, problem.states, targets)
    fit.measure(0.5)
    generator = torch.Generator().manual_seed(0)
    point = 0.05 * torch.randn(fit.zero.shape, generator=generator, dtype=torch.float64)
    _, gradient = fit.evaluate(point)
    width = 1e-2 if name == "gemma3" else 1e-4  # Gemma computes its norms in float32
    start = 0
    for part in parts:
        for direction_size in (part.outputs * part.features, part.outputs * len(part.gains)):
            direction = torch.zeros_like(point)
            stop = start + direction_size
            direction[start:stop] = torch.randn(stop - start, generator=generator, dtype=torch.float64)
            direction /= direction.norm()
            ahead, behind = (fit.evaluate(point + sign * width * direction)[0] for sign in (1, -1))
            assert float(gradient @ direction) == pytest.approx((ahead - behind) / (2 * width), rel=2e-3, abs=1e-3)
            start = stop
    assert start == len(point)


@pytest.mark.parametrize("name", KINDS)
def test_the_fit_never_gets_worse(name: str) -> None:
    problem = Problem(name, windows=4)
    generator = torch.Generator().manual_seed(3)
    for ridge in (1e-6, 0.05, 10.0):
        targets = torch.randn(problem.states.shape, generator=generator, dtype=torch.float64) * 3
        change = refit_normed(problem.runner, LAYER, problem.states, targets, ridge, maps=[problem.mlp])
        assert error_after(problem, change, targets) < problem.error(targets)
    targets = problem.output()
    change = refit_normed(problem.runner, LAYER, problem.states, targets, 1e-3, maps=[problem.mlp])
    assert all(delta.abs().max() < 1e-6 for delta in change.deltas)  # there is nothing to repair


def test_a_larger_ridge_changes_less() -> None:
    problem = Problem("bert")
    targets = problem.unreachable()
    changes = [
        refit_normed(problem.runner, LAYER, problem.states, targets, ridge, maps=[problem.mlp])
        for ridge in (1e-3, 0.1, 10.0)
    ]
    sizes = [sum(float(delta.square().sum()) for delta in change.deltas) for change in changes]
    errors = [error_after(problem, change, targets) for change in changes]
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)


@pytest.mark.parametrize("name", ["gemma3", "bert"])
def test_the_batch_size_does_not_matter(name: str) -> None:
    problem = Problem(name)
    targets = problem.targets([problem.mlp.map, problem.mlp.norm])
    errors = []
    for batch in (1, 5, 100):
        problem.runner.batch = batch
        change = refit_normed(problem.runner, LAYER, problem.states, targets, 1e-3, maps=[problem.mlp])
        errors.append(error_after(problem, change, targets))
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-3)


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.size = max(self.size, out.numel())
        return out


def test_no_tensor_grows_with_the_number_of_windows() -> None:
    sizes = []
    for windows in (4, 16):
        problem = Problem("bert", windows=windows)
        problem.runner.batch = 2
        targets = problem.unreachable()
        with Largest() as inside:
            refit_normed(problem.runner, LAYER, problem.states, targets, 1e-2, maps=[problem.mlp])
        sizes.append(inside.size)
    assert sizes[0] == sizes[1]


def test_a_failure_restores_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("bert")
    targets, before = problem.unreachable(), copies(problem.model)
    calls = 0
    run = problem.runner.block

    def failing(layer: int, states: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:  # in the pass after the first step: 3 batches each
            assert not same_bits(copies(problem.model), before)
            raise RuntimeError("out of memory")
        return run(layer, states)

    monkeypatch.setattr(problem.runner, "block", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        refit_normed(problem.runner, LAYER, problem.states, targets, 1e-2, maps=[problem.mlp])
    assert same_bits(copies(problem.model), before)
    assert all(parameter.requires_grad for parameter in problem.model.parameters())
    assert not any(module._forward_hooks for module in problem.model.modules())


def test_it_works_without_gradients_around_it_and_leaves_none() -> None:
    problem = Problem("gemma2")
    targets = problem.targets([problem.mlp.map])
    problem.model.requires_grad_(False)
    with torch.no_grad():
        change = refit_normed(problem.runner, LAYER, problem.states, targets, 1e-6, maps=[problem.mlp])
    assert error_after(problem, change, targets) < problem.error(targets) / 100
    assert not any(parameter.requires_grad for parameter in problem.model.parameters())
    assert all(parameter.grad is None for parameter in problem.model.parameters())
    assert not any(delta.requires_grad for delta in change.deltas)


@pytest.mark.parametrize("name", ["gemma3", "bert"])
def test_the_first_token_is_part_of_the_fit(name: str) -> None:
    problem = Problem(name, windows=30, length=4)
    targets = problem.output()
    noise = torch.randn(16, generator=torch.Generator().manual_seed(2)).to(targets)
    targets[:, 0] += targets[:, 0].norm(dim=-1, keepdim=True) * noise  # without this token nothing would change
    before = (targets - problem.output())[:, 0].norm()
    refit_normed(problem.runner, LAYER, problem.states, targets, 1e-4, maps=[problem.mlp]).apply(1.0)
    assert (targets - problem.output())[:, 0].norm() < 0.97 * before


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "bert"])
def test_repair_after_a_removed_block_helps_on_windows_that_were_not_fitted(name: str) -> None:
    gains = []
    for seed in range(3):
        model = layered_model(name, seed)
        ids = torch.randint(3, 40, (60, 16), generator=torch.Generator().manual_seed(seed))
        runner = BlockRunner(wrap(model, objective="states"), ids[:1])
        dense = [runner.embed(ids)]
        for layer in range(LAYERS):
            dense.append(runner.through([layer], dense[-1]))
        measure = Objective(runner, ids[40:], dense[-1][40:])
        kept = [0, 1, 3, 4, 5]  # block 1 must now reach the state after block 2
        without = measure(runner.through(kept, dense[0][40:])).mean()
        fit = dense[0][:40]
        for layer in kept:
            target = dense[3 if layer == 1 else layer + 1][:40]
            for change in refit_block(runner, layer, fit, target, 0.05, joint=True):
                change.apply(1.0)
            fit = runner.through([layer], fit)
        gains.append(float(measure(runner.through(kept, dense[0][40:])).mean() / without))
    assert sum(gains) / len(gains) < 0.9, gains
