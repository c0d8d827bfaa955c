"""The bound on the output of a trained model, attacked on trained networks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from depthgauge.base.errors import VerificationError
from depthgauge.papers.trained_depth.bounded_models import BoundedModel, recall_task
from depthgauge.papers.trained_depth.bounded_training import TrainedModel, TrainingOptions, held_out, train_bounded
from depthgauge.papers.trained_depth.output_bound import (
    OutputBound,
    attack_margin,
    box_output_bound,
    every_sequence_bound,
    examine,
    largest_input,
    margins,
    output_bound,
    per_state_error,
    permitted_change,
    readout_of,
)
from depthgauge.theory.certificates.forward_rounding import ForwardPass
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.surrogates.closed_forms import closed_form

TASK = recall_task(pairs=2, keys=3, values=3)
OPTIONS = TrainingOptions(steps=150, batch=32, test=300, rate=0.02)


@pytest.fixture(scope="module")
def trained() -> list[TrainedModel]:
    return train_bounded(TASK, 3, 1, 4, [0.01, 0.05, 0.2, 1.0], options=OPTIONS)


@pytest.fixture(scope="module")
def bounds(trained: list[TrainedModel]) -> list[OutputBound]:
    found = [output_bound(one.model) for one in trained]
    assert None not in found
    return [bound for bound in found if bound is not None]


@pytest.fixture(scope="module")
def box_bounds(trained: list[TrainedModel]) -> list[OutputBound]:
    found = [box_output_bound(one.model) for one in trained]
    assert None not in found
    return [bound for bound in found if bound is not None]


def test_no_sequence_changes_the_output_by_more_than_the_bound(
    trained: list[TrainedModel], bounds: list[OutputBound], box_bounds: list[OutputBound]
) -> None:
    """Every sequence of 3 + 3 tokens of length 5 is tried."""
    every = torch.cartesian_prod(*(torch.arange(6) for _ in range(5)))
    for one, bound, over_box in zip(trained, bounds, box_bounds, strict=True):
        model = one.model.exact()
        change = model.logits(every) - model.logits(every, closed_form(model.network, bound.method))
        largest = float((change.amax(1) - change.amin(1)).max())
        assert float(change.abs().max()) <= bound.logit
        assert largest <= bound.margin
        found = attack_margin(one.model, bound.method)
        assert 0.9 * largest <= found <= largest * (1 + 1e-12)
        assert bound.margin < over_box.margin or over_box.probability == 1.0
    assert bounds[0].margin < 8 * attack_margin(trained[0].model, bounds[0].method)


def test_the_bound_over_all_sequences_is_their_maximum(trained: list[TrainedModel], bounds: list[OutputBound]) -> None:
    every = torch.cartesian_prod(*(torch.arange(6) for _ in range(5)))
    for one, proved in zip(trained, bounds, strict=True):
        model, bound = one.model.exact(), every_sequence_bound(one.model)
        assert bound is not None
        assert bound.method == "corrected"
        change = model.logits(every) - model.logits(every, closed_form(model.network, "corrected"))
        largest = float((change.amax(1) - change.amin(1)).max())
        # Two evaluations of one output differ by rounding, and the bound has room for more than that.
        assert largest < bound.margin < largest * (1 + 1e-8) + 1e-10
        assert float(change.abs().max()) < bound.logit
        assert proved.method != "corrected" or bound.margin < proved.margin
        assert bound.verify()
        with pytest.raises(VerificationError):
            replace(bound, margin=bound.margin * (1 - 1e-9)).verify()
        assert every_sequence_bound(one.model, most=6**5 - 1) is None
    (causal,) = train_bounded(TASK, 2, 1, 4, 0.1, options=replace(OPTIONS, steps=2, causal=True))
    assert every_sequence_bound(causal.model) is None


def test_rounding_is_part_of_the_bound_over_all_sequences(
    trained: list[TrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room beyond the largest computed change is e|R| for the error e of both outputs, and γ|D||R|."""
    with_rounding = every_sequence_bound(trained[1].model)
    for lost in (1e-3, 0.0):
        monkeypatch.setattr(ForwardPass, "error", lambda _, lost=lost: Outward().zeros(4) + lost)
        changed = every_sequence_bound(trained[1].model)
        assert changed is not None
        assert with_rounding is not None
        if lost:
            columns = per_state_error(trained[1].model.exact().readout)
            assert changed.margin - with_rounding.margin <= 2 * lost * columns * (1 + 1e-9)
            assert changed.margin - with_rounding.margin > lost * columns
        else:
            assert changed.margin < with_rounding.margin


def attacked(model: BoundedModel, method: str, radius: float, tokens: int, seed: int) -> tuple[float, float]:
    """Return the largest change of a logit, and of a difference of logits, that gradient ascent finds in the box."""
    S, other = model.network, closed_form(model.network, method)
    generator = torch.Generator().manual_seed(seed)
    x = radius * torch.randn(24, tokens, S.dim, generator=generator, dtype=torch.float64).sign()
    logit = margin = 0.0
    for step in range(20):
        x = x.detach().requires_grad_()
        change = ((S(x) - other(x))[:, -1]) @ model.readout
        spread = change.amax(dim=1) - change.amin(dim=1)
        logit = max(logit, float(change.detach().abs().max()))
        margin = max(margin, float(spread.detach().max()))
        (slope,) = torch.autograd.grad(spread.sum(), x)
        x = (x.detach() + radius * 0.5 * (1 - step / 20) * slope.sign()).clamp(-radius, radius)
    return logit, margin


def test_no_input_changes_the_output_by_more_than_the_bound(
    trained: list[TrainedModel], box_bounds: list[OutputBound]
) -> None:
    closest = 0.0
    for index, (one, bound) in enumerate(zip(trained, box_bounds, strict=True)):
        model, radius = one.model.exact(), largest_input(one.model)
        assert radius <= 1
        for tokens in (2, TASK.length, 20):
            logit, margin = attacked(model, bound.method, radius, tokens, index)
            assert logit <= bound.logit
            assert margin <= bound.margin
            closest = max(closest, margin / bound.margin)
    assert closest > 0.1  # the attack comes close enough to make the test meaningful


def test_sequences_of_the_task_obey_the_bound(trained: list[TrainedModel], bounds: list[OutputBound]) -> None:
    tokens, labels = held_out(TASK, 300)
    for one, bound in zip(trained, bounds, strict=True):
        model = one.model.exact()
        assert float(model.inputs(tokens).abs().max()) <= largest_input(one.model)
        before, after = model.logits(tokens), model.logits(tokens, closed_form(model.network, bound.method))
        assert float((before - after).abs().max()) <= bound.logit
        assert float((before.softmax(1) - after.softmax(1)).abs().max()) <= bound.probability
        likelihood = [z.log_softmax(1).gather(1, labels[:, None]) for z in (before, after)]
        assert float((likelihood[0] - likelihood[1]).abs().max()) <= bound.margin
        changed = (before.argmax(1) == labels) != (after.argmax(1) == labels)
        assert float(changed.double().mean()) <= permitted_change(before, labels, bound)


def test_readout_changes_are_attained() -> None:
    """With u given, the change u·sign(R_c − R_e) attains the bound on the difference of logits c and e."""
    generator = torch.Generator().manual_seed(0)
    R = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    u = torch.rand(5, generator=generator, dtype=torch.float64)
    changes = (u[None] @ readout_of(Outward(), R).size().value)[0]
    logit, margin = float(changes[:4].max()), float(changes[4:].max())
    pairs = [float((u * (R[:, c] - R[:, e]).sign()) @ (R[:, c] - R[:, e])) for c in range(4) for e in range(4)]
    singles = [float((u * R[:, c].sign()) @ R[:, c]) for c in range(4)]
    assert max(pairs) * (1 - 1e-15) <= margin <= max(pairs) * (1 + 1e-12)
    assert max(singles) * (1 - 1e-15) <= logit <= max(singles) * (1 + 1e-12)


def test_the_bounds_on_the_output_are_proved_again(bounds: list[OutputBound], box_bounds: list[OutputBound]) -> None:
    for bound in (bounds[0], bounds[2], box_bounds[1]):
        assert bound.verify()
        for name in ("logit", "margin"):
            with pytest.raises(VerificationError):
                replace(bound, **{name: getattr(bound, name) * (1 - 1e-6)}).verify()


def test_margins_decide_the_prediction() -> None:
    z = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 2.5]], dtype=torch.float64)
    assert margins(z, torch.tensor([0, 2])).tolist() == [1.0, -0.5]
    assert permitted_change(z, torch.tensor([0, 2]), None) == 1.0


def test_models_without_a_one_layer_form_have_no_bound() -> None:
    options = TrainingOptions(steps=2, batch=4, test=20, norm="post")
    (normed,) = train_bounded(TASK, 2, 1, 4, 0.1, options=options)
    assert output_bound(normed.model) is None
    record = examine(normed, 20)
    assert (record.certified, record.one_layer, record.measured_depth) == (None, None, None)
    assert record.permitted == 1


@pytest.mark.parametrize("variant", [{}, {"mlp": 5, "causal": True}], ids=str)
def test_models_with_layernorm_are_bounded_over_sequences(variant: dict[str, Any]) -> None:
    """Every sequence is tried on a model with LayerNorm before its sublayers."""
    options = TrainingOptions(steps=5, batch=4, test=20, norm="pre", **variant)
    (normed,) = train_bounded(TASK, 2, 1, 4, 0.002, options=options)
    bound, model = output_bound(normed.model), normed.model.exact()
    assert bound is not None
    assert bound.method == "parallel"
    assert box_output_bound(normed.model) is None
    every = torch.cartesian_prod(*(torch.arange(6) for _ in range(5)))
    change = model.logits(every) - model.logits(every, closed_form(model.network, "parallel"))
    assert 0 < float((change.amax(1) - change.amin(1)).max()) <= bound.margin
    assert bound.verify()
    with pytest.raises(VerificationError):
        replace(bound, margin=bound.margin * (1 - 1e-5)).verify()
    record = examine(normed, 20)
    assert record.box is None
    assert record.attacked is not None
    assert record.attacked <= (record.margin or 0.0)


def test_one_layer_replaces_itself() -> None:
    (single,) = train_bounded(TASK, 1, 1, 4, 0.1, options=TrainingOptions(steps=2, batch=4, test=20))
    record = examine(single, 20)
    assert (record.certified, record.certified_depth, record.measured_depth) == (0.0, 1, 1)
    assert record.one_layer is not None


def test_records_of_small_and_large_weights(trained: list[TrainedModel]) -> None:
    small, large = examine(trained[0], 300), examine(trained[-1], 300)
    assert small.probability is not None
    assert small.probability < 0.01
    assert (small.certified_depth, small.measured_depth) == (1, 1)
    assert small.one_layer == pytest.approx(small.accuracy, abs=small.permitted)
    assert small.largest <= 0.01
    assert small.at_bound is not None
    assert 0 < small.at_bound <= 1
    assert large.certified_depth == 3
    assert small.accuracy == pytest.approx(trained[0].accuracy, abs=0.01)
    assert math.isfinite(large.loss)


def test_the_radius_is_that_of_the_embeddings(trained: list[TrainedModel]) -> None:
    model = trained[0].model
    brute = max(
        float((token.double() + place.double()).abs().max()) for token in model.token for place in model.position
    )
    assert brute <= largest_input(model) <= brute * (1 + 1e-15)
