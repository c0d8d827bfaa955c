"""DDP and FSDP2 with two processes on gloo: the training is not affected, and all processes see the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_runs import started

import depthgauge as dg
from depthgauge.monitor.measurement import Measurement, combined

pytestmark = pytest.mark.xdist_group("several processes")  # forked from the same one

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("distributed")
    ended = started(2, str(SUPPORT / "distributed_training.py"), str(made))
    assert [code for code, *_ in ended] == [0, 0], ended
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_score_ranges_are_combined_by_their_maximum_and_all_else_by_the_mean() -> None:
    parts = [
        Measurement(
            layers={"update": torch.tensor([value])},
            heads={name: torch.tensor([[value, 4 - value]]) for name in ("score_range", "entropy")},
            counts=(2,),
            loss=torch.tensor(value),
            training_loss=torch.tensor(2 * value),
        )
        for value in (1.0, 3.0, 3.5)
    ]
    assert {name: found.flatten().tolist() for name, found in combined(parts).values().items()} == {
        "update": [2.5], "score_range": [3.5, 3.0], "entropy": [2.5, 1.5], "loss": [2.5], "training_loss": [5.0],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_losses_and_weights_are_bit_identical(found: list[dict[str, Any]], kind: str) -> None:
    for rank in range(2):
        plain, monitored = found[rank][kind]["plain"], found[rank][kind]["monitored"]
        assert monitored["losses"] == plain["losses"]
        assert monitored["weights"] == plain["weights"]
    if kind == "fsdp":  # with the probes between the forward and the backward pass
        assert [found[rank]["early"]["losses"] for rank in range(2)] == [
            found[rank][kind]["plain"]["losses"] for rank in range(2)
        ]
    assert found[0][kind]["plain"]["losses"] != found[1][kind]["plain"]["losses"]  # each has its own data


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_processes_have_the_same_records_and_one_writes(
    found: list[dict[str, Any]], folder: Path, kind: str
) -> None:
    first, second = (found[rank][kind]["monitored"] for rank in range(2))
    assert first["probes"] == second["probes"]
    assert first["alarms"] == second["alarms"]
    assert [(alarm["name"], alarm["layer"]) for alarm in first["alarms"]] == [("dead-layer", 2)]
    record = dg.results.read_log(folder / kind)
    assert [probe.to_json() | {"seconds": 0} for probe in record.probes] == first["probes"]
    assert record.run.model.ranks == 2
    assert record.run.model.architecture == "LlamaForCausalLM"
    for probe, *losses in zip(record.probes, *(found[rank][kind]["plain"]["losses"] for rank in range(2)), strict=True):
        assert probe.loss == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert record.probes[0].depth is not None
    assert record.probes[1].depth is None


def test_sharded_and_replicated_models_measure_the_same(found: list[dict[str, Any]]) -> None:
    """The first probe comes before the first optimizer step; the weights are equal then."""
    ddp, fsdp = (found[0][kind]["monitored"]["probes"][0]["layers"] for kind in ("ddp", "fsdp"))
    for a, b in zip(ddp, fsdp, strict=True):
        assert a.pop("heads") == {name: pytest.approx(values, rel=1e-4) for name, values in b.pop("heads").items()}
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_every_process_raises(found: list[dict[str, Any]]) -> None:
    messages = [found[rank]["raised"] for rank in range(2)]
    assert messages[0] == messages[1]
    assert messages[0].startswith("AlarmError: dead-layer at step 0 in layer 2")


def test_a_package_that_process_0_misses_is_an_error_in_every_process(found: list[dict[str, Any]]) -> None:
    message = "MissingPackageError: tensorboard=True needs the package: pip install tensorboard"
    assert [found[rank]["missing"] for rank in range(2)] == [message] * 2


def test_a_probe_that_fails_in_one_process_fails_in_all_and_the_training_goes_on(found: list[dict[str, Any]]) -> None:
    note = "nothing was measured at step 0: OutOfMemoryError: no memory at step 0 (in process 1)"
    for rank in range(2):
        failed, plain = found[rank]["one fails"], found[rank]["ddp"]["plain"]
        assert [probe["step"] for probe in failed["probes"]] == [1]
        assert failed["notes"] == [note]
        assert failed["losses"] == plain["losses"]
        assert failed["weights"] == plain["weights"]


def test_a_sharded_model_goes_on_after_a_probe_that_fails_in_all_processes(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        failed, plain = found[rank]["all fail"], found[rank]["fsdp"]["plain"]
        assert [probe["step"] for probe in failed["probes"]] == [0, 2]
        assert failed["losses"] == plain["losses"]
        assert failed["weights"] == plain["weights"]
        last = found[rank]["fsdp"]["monitored"]["probes"][-1]
        assert failed["probes"][-1]["probe_loss"] == last["probe_loss"]  # with the weights of this step


def test_no_process_waits_forever_for_a_sharded_pass_that_one_did_not_finish(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert found[rank]["waiting"].startswith(f"ExchangeError: process {rank} could not exchange the measures")
