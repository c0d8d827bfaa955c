"""FSDP2 with two processes on gloo: the curve and the weights of one process, while each has half of both models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from divided_runs import started
from tiny_distillation import STEPS, pair_of, train

from depthgauge.base.errors import InputError
from depthgauge.cli.torchrun import LaunchedCommand

pytestmark = pytest.mark.xdist_group("several processes")  # forked from the same one
SCRIPT = Path(__file__).parents[1] / "support" / "sharded_training.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    ended = started(2, str(SCRIPT), str(folder))
    assert [code for code, *_ in ended] == [0, 0], ended
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_sharded_models_train_with_the_curve_and_the_weights_of_one_process(found: list[dict[str, Any]]) -> None:
    """Also if the training was interrupted."""
    pair = pair_of("llama")
    curve = train(pair).curve
    for process in found:
        assert process["train"] == pytest.approx(curve[-1].train, abs=1e-4)
        for mine, other in zip(curve, process["curve"], strict=True):
            assert (mine.tokens, mine.select, mine.apart) == pytest.approx(other, abs=1e-4)
        for name in ("student", "teacher"):
            for mine, other in zip(getattr(pair, name).parameters(), process[name], strict=True):
                assert type(other) is torch.nn.Parameter
                torch.testing.assert_close(other, mine, atol=1e-4, rtol=0)
        assert len(process["shares"]) == STEPS + 1
    for shares in zip(*(process["shares"] for process in found), strict=True):
        assert np.sum(shares, axis=0) == pytest.approx(np.ones(2), abs=0.3)  # embeddings, norm and head are whole


def test_another_version_of_fsdp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match="add --fsdp_version 2 to accelerate launch"):
        LaunchedCommand().join()
