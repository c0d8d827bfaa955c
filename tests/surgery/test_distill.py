"""Distillation trains the kept blocks of a shrunk model towards the dense one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import nn

from depthgauge.checkpoints.load import wrap
from depthgauge.surgery import distill as training
from depthgauge.surgery.distill import distill
from depthgauge.surgery.student import Effort, Student

SMALL = Effort(8, 4, 60, 4, 10**6, 0, 1, 10, 64)


def student_of(model: Any, removed: Sequence[int] = (1,), windows: int = 8, **keywords: Any) -> Student:
    made = Student(wrap(model), tokens(16, windows), tokens(16, 4, seed=1), effort=SMALL, **keywords)
    made.keep_all_but(removed)
    return made


def blocks_of(student: Student) -> list[nn.Parameter]:
    return [p for layer in student.kept for p in student.runner.blocks[layer].parameters()]


def divergence(dense: Any, made: Any, ids: torch.Tensor, loss: bool) -> float:
    with torch.no_grad():
        if loss:
            p, q = (model(input_ids=ids).logits.log_softmax(-1) for model in (dense, made))
            return float((p.exp() * (p - q)).sum(-1).mean())
        a, b = (model(input_ids=ids).last_hidden_state for model in (dense, made))
        return float(((a - b).square().sum(-1) / a.square().sum(-1)).mean())


@pytest.mark.parametrize("name", ["llama", "gemma3", "bert", "gpt2"])
def test_the_student_comes_closer_and_its_other_weights_stay(name: str) -> None:
    dense, model = tiny_model(name), tiny_model(name)
    student, ids, loss = student_of(model), tokens(16, 8), name != "bert"
    far = divergence(dense, student.model(), ids, loss)
    distill(student, 0, blocks_of(student), steps=40, tokens=32, seed=0)
    assert divergence(dense, student.model(), ids, loss) < 0.8 * far
    trained = {*blocks_of(student)}
    for (key, now), (_, before) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        assert now in trained or torch.equal(now, before), key
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_blocks_before_the_gap_need_not_be_computed() -> None:
    """Training from the state before the gap gives the weights that training from the start gives."""
    made = []
    for place in (0, 1):
        model = tiny_model("llama", layers=4).double()
        student = student_of(model, (2,))
        weights = [*student.runner.blocks[1].parameters(), *student.runner.blocks[3].parameters()]
        distill(student, place, weights, steps=4, tokens=32, seed=3)
        made.append([weight.detach().clone() for weight in weights])
    for left, right in zip(*made, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_parts_of_a_batch_have_the_gradient_of_the_batch() -> None:
    made = []
    for batch in (8, 3):
        student = student_of(tiny_model("llama").double(), windows=24 * 4)
        student.runner.batches.size = batch
        distill(student, 0, blocks_of(student), steps=3, tokens=64, seed=0)
        made.append([weight.detach().clone() for weight in blocks_of(student)])
    for left, right in zip(*made, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_the_same_seed_gives_the_same_weights() -> None:
    made = []
    for seed in (4, 4, 5):
        student = student_of(tiny_model("llama"))
        distill(student, 0, blocks_of(student), steps=3, tokens=32, seed=seed)
        made.append([weight.detach().clone() for weight in blocks_of(student)])
    assert all(torch.equal(left, right) for left, right in zip(made[0], made[1], strict=True))
    assert not all(torch.equal(left, right) for left, right in zip(made[0], made[2], strict=True))


@pytest.mark.filterwarnings("ignore:.*bf16.*:UserWarning", "ignore:.*mkldnn.*:UserWarning")
def test_small_steps_do_not_vanish_in_half_precision() -> None:
    dense, model = tiny_model("llama"), tiny_model("llama").bfloat16()
    student, ids = student_of(model), tokens(4, 6)
    far = divergence(dense, student.model().float(), ids, True)
    distill(student, 0, blocks_of(student), steps=30, tokens=16, seed=0)
    assert student.model().dtype == torch.bfloat16
    assert divergence(dense, student.model().float(), ids, True) < 0.9 * far


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 2)
    seen: list[int] = []

    def interrupt(done: int, total: int, label: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    def run(saved: Path | None, progress: Any) -> list[torch.Tensor]:
        student = student_of(tiny_model("llama"))
        student.progress = progress
        distill(student, 0, blocks_of(student), steps=6, tokens=32, seed=1, saved=saved)
        return [weight.detach().clone() for weight in blocks_of(student)]

    direct = run(None, lambda *report: None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "heal.pt", interrupt)
    resumed = run(tmp_path / "heal.pt", lambda done, total, label: seen.append(done))
    assert seen == [4, 5]
    assert all(torch.equal(left, right) for left, right in zip(direct, resumed, strict=True))


@pytest.mark.parametrize(
    ("free", "found"), [({"meta": 336}, (True, False)), ({"meta": 335, "cpu": 336}, (False, True))]
)
def test_the_moments_need_sixteen_bytes_for_each_weight(
    free: dict[str, int], found: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "free_memory", lambda device: free.get(device.type, 0))
    weights = [nn.Parameter(torch.empty(3, 7, device="meta"))]
    assert (training.has_room(weights), training.has_room(weights, torch.device("cpu"))) == found
