"""Batched training under a weight bound: gradients, projection, equality with single models, resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import plain_forward

from depthgauge.base.errors import InputError
from depthgauge.papers.trained_depth.bounded_models import (
    ModelShape,
    bounds_of,
    find_task,
    initial_weights,
    logits,
    project,
    recall_task,
    take_model,
)
from depthgauge.papers.trained_depth.bounded_training import (
    BatchedAdamW,
    BatchTrainer,
    TrainingOptions,
    gradients_of,
    held_out,
    rate_at,
    train_bounded,
)

TASK = recall_task(pairs=2, keys=3, values=3)
QUICK = TrainingOptions(steps=12, batch=8, test=40, dtype="float64", rate=0.05)
VARIANTS = [
    {},
    {"skip": False},
    {"norm": "pre"},
    {"norm": "post", "mlp": 5},
    {"mlp": 5, "skip": False},
    {"norm": "pre", "mlp": 5},
    {"norm": "pre", "mlp": 5, "causal": True},
]


def shape_of(**variant: Any) -> ModelShape:
    return ModelShape(layers=2, heads=2, dim=4, key_dim=3, **variant)


def drawn(shape: ModelShape, etas: list[float | None]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    bounds = bounds_of(shape, TASK, etas, torch.float64)
    weights = initial_weights(shape, TASK, bounds, range(len(etas)), torch.float64)
    for name, weight in weights.items():  # LayerNorm starts at 1 and 0, biases must not be trivial
        if name.startswith("norm"):
            weight.add_(0.1 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype))
    return weights, bounds


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_batch_computes_what_the_plain_network_computes(variant: dict[str, Any]) -> None:
    shape = shape_of(**variant)
    weights, _ = drawn(shape, [0.3, None, 2.0])
    tokens = torch.stack([TASK.draw(5, seed)[0] for seed in range(3)])
    together = logits(shape, weights, tokens)
    for index in range(3):
        model = take_model(shape, weights, index)
        torch.testing.assert_close(model.logits(tokens[index]), together[index])
        for row, expected in zip(tokens[index], together[index], strict=True):
            x = model.token[row] + model.position
            torch.testing.assert_close(plain_forward(model.network, x)[-1] @ model.readout, expected)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients_are_those_of_single_models_and_of_differences(variant: dict[str, Any]) -> None:
    shape = shape_of(**variant)
    weights, _ = drawn(shape, [0.3, 1.0])
    tokens, labels = (torch.stack(part) for part in zip(*(TASK.draw(6, seed) for seed in range(2)), strict=True))
    gradients, losses = gradients_of(shape, weights, tokens, labels, clip=1e9)
    for index in range(2):
        model = take_model(shape, weights, index)
        own = F.cross_entropy(model.logits(tokens[index]), labels[index])
        assert float(losses[index]) == pytest.approx(float(own))
    generator = torch.Generator().manual_seed(0)
    for name, gradient in gradients.items():
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        h = 1e-6
        ends = [logits(shape, {**weights, name: weights[name] + s * h * direction}, tokens) for s in (1, -1)]
        up, down = (torch.stack([F.cross_entropy(z[b], labels[b]) for b in range(2)]) for z in ends)
        slope = (gradient * direction).flatten(1).sum(1)
        torch.testing.assert_close(slope, (up - down) / (2 * h), rtol=1e-5, atol=1e-8)


def test_gradients_are_clipped_model_by_model() -> None:
    shape = shape_of()
    weights, _ = drawn(shape, [1.0, 1.0])
    tokens, labels = (torch.stack(part) for part in zip(*(TASK.draw(6, seed) for seed in range(2)), strict=True))
    free, _ = gradients_of(shape, weights, tokens, labels, clip=1e9)
    norms = sum(g.flatten(1).square().sum(1) for g in free.values()).sqrt()  # type: ignore[union-attr]
    between = float(norms.mean())
    clipped, _ = gradients_of(shape, weights, tokens, labels, clip=between)
    after = sum(g.flatten(1).square().sum(1) for g in clipped.values()).sqrt()  # type: ignore[union-attr]
    torch.testing.assert_close(after, norms.clamp(max=between))
    assert float(norms.min()) < between < float(norms.max())


def test_projection_is_the_nearest_point_of_the_box() -> None:
    shape = shape_of(mlp=3, norm="pre")
    weights, bounds = drawn(shape, [0.1, None])
    moved = {name: 5 * torch.randn(w.shape, generator=torch.Generator().manual_seed(7)).double() for name, w in
             weights.items()}  # fmt: skip
    projected = {name: weight.clone() for name, weight in moved.items()}
    project(projected, bounds)
    own = {"token": 0.5, "position": 0.5, "readout": 1.0, "norm_weight": 1.0, "norm_bias": 1.0}
    for name, weight in projected.items():
        for index, eta in enumerate((0.1, float("inf"))):
            bound = own.get(name, eta)
            assert torch.equal(weight[index], moved[name][index].clamp(-bound, bound))


def test_weights_stay_in_their_box_during_training_and_reach_it() -> None:
    shape = shape_of()
    trainer = BatchTrainer(TASK, shape, [0.05, 0.7], [0, 0], replace(QUICK, rate=0.3))
    for _ in range(6):
        trainer.advance()
        for name in ("query", "key", "value"):
            assert float(trainer.weights[name][0].abs().max()) <= 0.05
            assert float(trainer.weights[name][1].abs().max()) <= 0.7
        for name, bound in (("token", 0.5), ("position", 0.5), ("readout", 1.0)):
            assert float(trainer.weights[name].abs().max()) <= bound
    assert float(trainer.weights["value"][0].abs().max()) == 0.05


def test_float32_bounds_are_rounded_down() -> None:
    shape = shape_of()
    trainer = BatchTrainer(TASK, shape, [0.1], [0], replace(QUICK, rate=0.5, dtype="float32"))
    for _ in range(4):
        trainer.advance()
    largest = trainer.weights["value"].abs().max()
    assert largest.dtype == torch.float32
    assert float(largest) <= 0.1  # float32(0.1) is above 0.1
    assert float(largest) == pytest.approx(0.1)


def test_adamw_against_torch() -> None:
    weights = {"a": torch.tensor([[3.0, -1.0], [0.5, 2.0]], dtype=torch.float64)}
    theirs = [row.clone().requires_grad_() for row in weights["a"]]
    rates = {"a": torch.tensor([[0.1], [0.01]], dtype=torch.float64)}
    optimisers = [
        torch.optim.AdamW([row], lr=rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
        for row, rate in zip(theirs, (0.1, 0.01), strict=True)
    ]
    ours = BatchedAdamW(weights)
    for step in range(7):
        gradient = torch.sin(weights["a"] * (step + 1))
        for row, optimiser, part in zip(theirs, optimisers, gradient, strict=True):
            row.grad = part.clone()
            optimiser.step()
        ours.step(weights, {"a": gradient}, rates, decay=0.1)
        torch.testing.assert_close(weights["a"], torch.stack(list(theirs)).detach())


def test_the_rate_rises_and_falls() -> None:
    options = TrainingOptions(steps=100, warmup=0.1, rate=2.0)
    rates = [rate_at(step, options) for step in range(101)]
    assert rates[9] == pytest.approx(2.0)
    assert rates[0] == pytest.approx(0.2)
    assert rates[55] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("variant", [{}, {"skip": False}, {"norm": "pre", "mlp": 5}], ids=str)
def test_a_batch_trains_every_model_as_if_it_were_alone(variant: dict[str, Any]) -> None:
    options = replace(QUICK, **variant)
    together = train_bounded(TASK, 2, 2, 4, [0.1, 0.8, None], seeds=[0, 1], options=options)
    assert [(model.eta, model.seed) for model in together] == [
        (eta, seed) for eta in (0.1, 0.8, None) for seed in (0, 1)
    ]
    for model in (together[1], together[4]):
        (alone,) = train_bounded(TASK, 2, 2, 4, model.eta, seeds=[model.seed], options=options)
        for mine, own in zip(model.model.network.parameters(), alone.model.network.parameters(), strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(model.model.readout, alone.model.readout, rtol=1e-8, atol=1e-10)
        assert model.accuracy == alone.accuracy
        assert model.loss == pytest.approx(alone.loss, rel=1e-7)
    weights = [model.model.network[0].query for model in together]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_accuracy_is_that_of_the_returned_network() -> None:
    (model,) = train_bounded("majority", 1, 1, 4, 0.5, options=replace(QUICK, steps=40))
    tokens, labels = held_out(find_task("majority"), QUICK.test)
    outputs = model.model.logits(tokens)
    assert model.accuracy == pytest.approx(int((outputs.argmax(1) == labels).sum()) / len(labels))
    assert model.loss == pytest.approx(float(F.cross_entropy(outputs, labels)))
    assert "majority, 1 layer, η = 0.5" in repr(model)


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    shape = shape_of()
    options = replace(QUICK, save_every=5, dtype="float32")
    whole = BatchTrainer(TASK, shape, [0.2, None], [0, 1], options).run()
    path = tmp_path / "run.pt"
    first = BatchTrainer(TASK, shape, [0.2, None], [0, 1], options)
    for _ in range(5):
        first.advance()
    first.save(path)
    resumed = BatchTrainer(TASK, shape, [0.2, None], [0, 1], options).run(path)
    for a, b in zip(whole, resumed, strict=True):
        for mine, theirs in zip(a.model.network.parameters(), b.model.network.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert (a.accuracy, a.loss) == (b.accuracy, b.loss)
    done = BatchTrainer(TASK, shape, [0.2, None], [0, 1], options).run(path)  # nothing is left to do
    assert [model.loss for model in done] == [model.loss for model in whole]


def test_a_checkpoint_of_another_run_is_rejected(tmp_path: Path) -> None:
    shape, path = shape_of(), tmp_path / "run.pt"
    BatchTrainer(TASK, shape, [0.2], [0], QUICK).save(path)
    for etas, seeds, options in (
        ([0.3], [0], QUICK),
        ([0.2], [1], QUICK),
        ([0.2], [0], replace(QUICK, rate=0.01)),
    ):
        with pytest.raises(InputError, match="other settings"):
            BatchTrainer(TASK, shape, etas, seeds, options).resume(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match="cannot read the checkpoint"):
        BatchTrainer(TASK, shape, [0.2], [0], QUICK).resume(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eta": -1.0}, "eta must be a positive number"),
        ({"eta": float("nan")}, "eta must be a positive number"),
        ({"eta": []}, "at least one eta"),
        ({"seeds": []}, "at least one eta and one seed"),
        ({"seeds": [-1]}, "seed must be"),
        ({"layers": 0}, "layers must be"),
        ({"task": "majorty"}, "did you mean 'majority'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    given = {"task": "majority", "layers": 1, "heads": 1, "dim": 4, "eta": 0.5, "options": QUICK, **arguments}
    with pytest.raises(InputError, match=message):
        train_bounded(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps"), ({"rate": 0.0}, "rate"), ({"warmup": 1.0}, "warmup"), ({"dtype": "float16"}, "dtype")],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingOptions(**options)


def test_wrong_shapes() -> None:
    with pytest.raises(InputError, match="norm must be one of"):
        shape_of(norm="before")
    with pytest.raises(InputError, match="mlp must be"):
        shape_of(mlp=0)
