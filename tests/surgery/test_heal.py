"""Healing trains a shrunk model towards the dense one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens

from depthgauge.checkpoints.load import wrap
from depthgauge.surgery import shrunk_model as healing
from depthgauge.surgery.extract import extract
from depthgauge.surgery.shrunk_model import heal


def divergence(dense: Any, student: Any, ids: torch.Tensor, loss: bool) -> float:
    with torch.no_grad():
        if loss:
            p, q = (model(input_ids=ids).logits.log_softmax(-1) for model in (dense, student))
            return float((p.exp() * (p - q)).sum(-1).mean())
        a, b = (model(input_ids=ids).last_hidden_state for model in (dense, student))
        return float(((a - b).square().sum(-1) / a.square().sum(-1)).mean())


@pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
def test_the_student_comes_closer_and_the_dense_model_stays(name: str) -> None:
    dense = tiny_model(name)
    before = {key: value.clone() for key, value in dense.state_dict().items()}
    student, ids, loss = extract(wrap(dense), (0, 2)), tokens(16, 8), name != "bert"
    far = divergence(dense, student, ids, loss)
    heal(student, dense, ids, steps=20, loss=loss, seed=0)
    assert divergence(dense, student, ids, loss) < 0.8 * far
    assert all(torch.equal(value, before[key]) for key, value in dense.state_dict().items())
    assert all(parameter.grad is None for parameter in student.parameters())


def test_the_same_seed_gives_the_same_weights() -> None:
    dense, ids = tiny_model("llama"), tokens(16, 8)
    made = []
    for _ in range(2):
        student = extract(wrap(dense), (0, 1))
        heal(student, dense, ids, steps=3, loss=True, seed=4)
        made.append(student.state_dict())
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])


@pytest.mark.filterwarnings("ignore:.*bf16.*:UserWarning", "ignore:.*mkldnn.*:UserWarning")
def test_small_steps_do_not_vanish_in_half_precision() -> None:
    dense = tiny_model("llama").bfloat16()
    student, ids = extract(wrap(dense), (0, 2)), tokens(4, 6)
    far = divergence(dense.float(), student.float(), ids, True)
    dense.bfloat16(), student.bfloat16()
    heal(student, dense, ids, steps=4, loss=True, seed=0)  # a step takes seconds on a processor without bfloat16
    assert student.dtype == torch.bfloat16
    assert divergence(dense.float(), student.float(), ids, True) < 0.8 * far


def test_an_interrupted_healing_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "SAVE_EVERY", 2)
    dense, ids = tiny_model("llama"), tokens(16, 8)
    direct, stopped, resumed = (extract(wrap(dense), (0, 1)) for _ in range(3))
    heal(direct, dense, ids, steps=6, loss=True, seed=1)

    def interrupt(done: int, total: int, label: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heal(stopped, dense, ids, steps=6, loss=True, seed=1, saved=tmp_path / "heal.pt", progress=interrupt)
    seen: list[int] = []
    heal(
        resumed, dense, ids, steps=6, loss=True, seed=1, saved=tmp_path / "heal.pt",
        progress=lambda done, total, label: seen.append(done),
    )  # fmt: skip
    assert seen == [4, 5]
    assert all(torch.equal(direct.state_dict()[key], value) for key, value in resumed.state_dict().items())
