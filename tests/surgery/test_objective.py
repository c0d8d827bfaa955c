"""The objectives equal plain reimplementations."""

import math
from typing import Any

import pytest
import torch
from layered_models import LAYERS, layered_model, output_of, skipping
from tiny_models import tokens

from depthgauge.checkpoints.blocks import model_output
from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.blocks.model_output import token_losses
from depthgauge.checkpoints.blocks.what_if import Objective
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.checkpoints.weights.load import wrap

IDS = tokens(count=9, batch=5)
KEPT = [0, 1, 4, 5]


def shrunk(name: str) -> tuple[Any, BlockRunner, Objective, torch.Tensor]:
    """A model, its runner, the objective, and the states after some of its blocks."""
    model = layered_model(name)
    runner = BlockRunner(wrap(model), IDS[:1])
    runner.batches.size = 2
    embedded = runner.embed(IDS)
    dense = runner.through(range(LAYERS), embedded)
    return model, runner, Objective(runner, IDS, dense), runner.through(KEPT, embedded)


def plain_output(model: Any) -> torch.Tensor:
    return skipping(model, find_blocks(model, LAYERS), [2, 3], IDS)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_the_loss_is_the_mean_of_minus_log_p_of_the_next_token(name: str) -> None:
    model, _, measure, states = shrunk(name)
    found = measure(states)
    logits = plain_output(model).tolist()
    for window, ids in enumerate(IDS.tolist()):
        losses = []
        for place in range(len(ids) - 1):
            row = logits[window][place]
            total = math.fsum(math.exp(value - max(row)) for value in row)
            losses.append(math.log(total) + max(row) - row[ids[place + 1]])
        assert float(found[window]) == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)


def test_the_loss_equals_the_models_own() -> None:
    model, _, measure, _ = shrunk("qwen3")
    with torch.no_grad():
        own = [float(model(input_ids=ids[None], labels=ids[None]).loss) for ids in IDS]
    assert measure(measure.dense).tolist() == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_states_is_the_relative_distance_of_the_final_states(name: str) -> None:
    model, _, measure, states = shrunk(name)
    dense, found = output_of(model, IDS), plain_output(model)
    expected = [float(torch.dist(found[w], dense[w]) / torch.dist(dense[w], 0 * dense[w])) for w in range(len(IDS))]
    assert measure(states).tolist() == pytest.approx(expected, rel=1e-9)
    assert measure(measure.dense).abs().max() == 0.0


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_windows_select_the_ids_and_the_dense_states(name: str) -> None:
    _, _, measure, states = shrunk(name)
    every = measure(states)
    torch.testing.assert_close(measure(states[1:4], slice(1, 4)), every[1:4], rtol=1e-6, atol=1e-9)
    assert not torch.allclose(measure(states[1:4], slice(0, 3)), every[1:4])  # other ids and dense states


def test_splitting_the_logits_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, measure, states = shrunk("llama")
    whole = measure(states)
    for entries in (1, 40 * 3, 40 * 8 + 1):  # 1 row, 3 rows and 8 rows at a time
        monkeypatch.setattr(model_output, "_ENTRIES", {"cpu": entries})
        torch.testing.assert_close(measure(states), whole, rtol=1e-6, atol=1e-9)


def test_token_losses_leave_out_the_first_token() -> None:
    logits = torch.zeros(2, 5, 7)
    logits[0, 1, 3] = 50.0
    ids = torch.full((2, 5), 6)
    ids[0, 2] = 3
    losses = token_losses(logits, ids)
    assert losses.shape == (2, 4)
    assert float(losses[0, 1]) == pytest.approx(0.0, abs=1e-6)
    assert float(losses[1, 1]) == pytest.approx(math.log(7))
