"""The training against forty lines of plain torch: the same data, the same order, the same curve."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_distillation import BATCH, ORDER, PLAIN, RATE, STEPS, WINDOW, pair_of, train
from torch.nn import functional

from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.recovery import distillation, divergence
from depthgauge.recovery.distillation import MEASURED, Trained, Training, step_windows
from depthgauge.recovery.divergence import SELECT, TRAIN, Pair
from depthgauge.recovery.recover_model import trained_weights
from depthgauge.results.recover_record import SHORT_TOKENS, TIME_OVER, Amount


def plain_distillation(pair: Pair) -> list[float]:
    """The oracle: plain torch, whole batches, whole vocabularies. Return the loss of every step."""
    student, teacher, data = pair.student, pair.teacher, pair.windows[TRAIN]
    weights, losses = trained_weights(pair.checkpoints[0]), []
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, min(20, STEPS // 10))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / warm) * (1 - step / STEPS)
        batch = data[ORDER[step * BATCH : (step + 1) * BATCH]]
        with torch.no_grad():
            target = teacher(batch, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
        made = student(batch, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
        loss = functional.kl_div(made, target, log_target=True, reduction="sum") / len(made)
        student.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "granite"])
def test_the_curve_is_that_of_plain_distillation(name: str) -> None:
    ours, plain = pair_of(name), pair_of(name)
    losses = plain_distillation(plain)
    made = train(ours)
    assert made.steps == STEPS
    assert [point.train for point in made.curve[1:]] == pytest.approx(_between(losses, made), rel=1e-4)
    torch.testing.assert_close(ours.losses(SELECT), plain.losses(SELECT), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(made.after, plain.losses(SELECT), atol=1e-4, rtol=1e-4)


def _between(losses: list[float], made: Trained) -> list[float]:
    """Return the means of the losses between the measurements of a training."""
    ends = [point.tokens // (BATCH * WINDOW) for point in made.curve]
    return [sum(losses[one:other]) / (other - one) for one, other in itertools.pairwise(ends)]


def test_embeddings_and_the_teacher_keep_their_weights() -> None:
    pair = pair_of("llama")
    before = [value.clone() for value in (*pair.teacher.parameters(), pair.student.get_input_embeddings().weight)]
    train(pair)
    after = [*pair.teacher.parameters(), pair.student.get_input_embeddings().weight]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_student_that_shares_tensors_with_its_teacher_leaves_them_alone() -> None:
    pair = pair_of("llama")
    for mine, other in zip(pair.student.parameters(), pair.teacher.parameters(), strict=True):
        mine.data = other.data
    before = [value.clone() for value in pair.teacher.parameters()]
    train(pair)
    assert all(torch.equal(one, other) for one, other in zip(before, pair.teacher.parameters(), strict=True))


@pytest.mark.parametrize("entries", [40, 40 * 7, 2**22])
def test_the_loss_does_not_depend_on_the_parts_of_the_logits(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, index = pair_of("gemma2"), torch.arange(3)
    weights = trained_weights(pair.checkpoints[0])
    monkeypatch.setattr(divergence, "ENTRIES", {"cpu": 2**30})
    whole = torch.autograd.grad(pair(index), weights)
    monkeypatch.setattr(divergence, "ENTRIES", {"cpu": entries})
    parts = torch.autograd.grad(pair(index), weights)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_an_interrupted_training_continues_with_the_same_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(pair_of("llama"))
    training, calls = Training(STEPS, BATCH, WINDOW, RATE, save_every=0.0), 0
    forward = Pair.forward

    def interrupted(self: Pair, index: Any, part: str = TRAIN) -> torch.Tensor:
        nonlocal calls
        calls += part == TRAIN
        if calls == 8:
            raise KeyboardInterrupt
        return forward(self, index, part)

    monkeypatch.setattr(Pair, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(pair_of("llama"), training, tmp_path)
    assert calls == 8
    made = train(pair_of("llama"), training, tmp_path)
    assert calls < 8 + STEPS  # it did not start again
    assert [point.select for point in made.curve] == pytest.approx([point.select for point in whole.curve], abs=1e-3)
    torch.testing.assert_close(made.after, whole.after, atol=1e-3, rtol=0)


def test_after_a_loss_that_is_not_finite_it_continues_once_at_half_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls, broken = Pair.forward, 0, {5}

    def sometimes_nan(self: Pair, index: Any, part: str = TRAIN) -> torch.Tensor:
        nonlocal calls
        calls += part == TRAIN
        loss = forward(self, index, part)
        return loss * float("nan") if part == TRAIN and calls in broken else loss

    monkeypatch.setattr(Pair, "forward", sometimes_nan)
    made = train(pair_of("llama"))
    assert made.how == ("half the learning rate, after a loss that was not finite",)
    assert bool(made.after.isfinite().all())
    calls, broken = 0, set(range(5, 100))
    with pytest.raises(CheckpointError, match="not finite, also at half the learning rate"):
        train(pair_of("llama"))


def test_less_memory_is_used_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, refused = Pair.forward, 0

    def out_of_memory(self: Pair, index: Any, part: str = TRAIN) -> torch.Tensor:
        nonlocal refused
        if part == TRAIN and not self.student.is_gradient_checkpointing:
            refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, index, part)

    monkeypatch.setattr(Pair, "forward", out_of_memory)
    made, whole = train(pair_of("llama")), None
    monkeypatch.undo()
    whole = train(pair_of("llama"))
    assert refused == 3  # 4, 2 and 1 windows at a time
    assert made.how == (
        "1 window at a time, gradients of 4 added", "activations computed again in the backward pass",
    )  # fmt: skip
    torch.testing.assert_close(made.after, whole.after, atol=1e-4, rtol=1e-4)


def test_all_windows_of_a_step_count_if_they_cannot_be_divided(tmp_path: Path) -> None:
    (tmp_path / "fit.json").write_text('{"rows": 3}')  # of 4
    made, whole = train(pair_of("llama"), folder=tmp_path), train(pair_of("llama"))
    assert made.steps == whole.steps
    assert [point.train for point in made.curve[1:]] == pytest.approx([point.train for point in whole.curve[1:]])
    torch.testing.assert_close(made.after, whole.after, atol=1e-5, rtol=0)


def test_moments_in_8_bits_train_too(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs the extra train")
    pair = pair_of("llama")
    fit = distillation.Fit(rows=4, in_bytes=True)
    assert fit.smaller() is not None
    weights = trained_weights(pair.checkpoints[0])
    initial = [weight.detach().clone() for weight in weights]
    made = distillation._train(pair, weights, initial, ORDER, PLAIN, fit, 1.0, tmp_path, lambda *_: None)
    assert float(made.after.mean()) < float(made.before.mean())


def test_a_limit_in_time_ends_the_training_with_a_rate_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(second) for second in range(10**6))
    monkeypatch.setattr(distillation.time, "perf_counter", lambda: next(clock))
    training = Training.of(Amount(seconds=40.0), 400, WINDOW, RATE, 8)
    assert training.steps > 9000
    made = train(pair_of("llama"), Training(10**4, BATCH, WINDOW, RATE, seconds=40.0))
    assert made.ended == TIME_OVER
    assert 3 < made.steps <= 40
    assert len(made.curve) > 3


def test_auto_ends_when_nothing_is_gained() -> None:
    pair = pair_of("llama")
    made = train(pair, Training(STEPS, BATCH, WINDOW, 1e-9, stops=True))
    assert made.steps < STEPS
    assert made.ended == "no further gain"


def test_a_short_training_is_a_tenth_of_the_whole() -> None:
    assert Amount(tokens=1_000_000, stops=True).short == Amount(tokens=100_000)
    assert Amount(tokens=50_000_000).short == Amount(tokens=SHORT_TOKENS)
    assert Amount(seconds=600.0).short == Amount(tokens=SHORT_TOKENS, seconds=60.0)


@pytest.mark.parametrize(("steps", "measured", "points"), [(1000, 10, 10), (40, 32, 2), (3, 100, 1)])
def test_less_is_measured_than_trained(steps: int, measured: int, points: int) -> None:
    """A short training has few measurements."""
    batch = step_windows(400, 512)
    training = Training.of(Amount(tokens=steps * batch * 512), 400, 512, RATE, measured)
    assert (training.steps, training.points) == (steps, points)
    assert training.points == 1 or training.points * measured * MEASURED <= steps * batch
