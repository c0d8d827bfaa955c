"""The estimate of `shrink`: every part is counted, and only where it is done; it needs no weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from tiny_shrinks import save

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.load import Placement, wrap
from depthgauge.results.estimate_record import DIRECTORY, GGUF, MEMORY, PLAN, EstimateRecord
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.surgery import part_costs
from depthgauge.surgery.part_costs import PartCosts, few_blocks, measure_costs, update_time
from depthgauge.surgery.student import EFFORT
from depthgauge.workflows.shrink import expect_shrink
from depthgauge.workflows.shrink_estimate import ShrinkJob, needed_bytes, time_left, work_of

JOB = ShrinkJob(EFFORT["quick"], layers=12, counts=(3,), certify=60, window=256, samples=10, sample_tokens=128)
COSTS = PartCosts(
    blocks=1.0, head=0.0, token=0.0, step=0.01, rows=10, load=0.0, hashed=0.0, passed=2.0, moved=0.0, room=10**6,
    files=100, read_speed=50.0, layers=12,
    parameters=1000, block_parameters=900, itemsize=4, tokens=256, width=8, output=64,
)  # fmt: skip
"""A second for all blocks, nothing for the other parts."""


def parts_of(job: ShrinkJob, costs: PartCosts = COSTS) -> dict[str, float]:
    return {name: work.resident(costs) for name, work in work_of(job, costs).items()}


def test_each_kind_of_run_has_its_parts() -> None:
    found = {makes: {*parts_of(replace(JOB, makes=makes))} for makes in (PLAN, MEMORY, DIRECTORY, GGUF)}
    assert found[MEMORY] - found[PLAN] == {"certification", "speed"}
    assert found[DIRECTORY] - found[MEMORY] == {"writing", "check in a new process"}
    assert found[GGUF] - found[MEMORY] == {"reading the file back"}
    assert "search" not in parts_of(replace(JOB, is_given=True))
    assert "calibration windows" not in parts_of(replace(JOB, samples=0), replace(COSTS, step=1.0))


def test_repairs_are_those_of_the_finalists() -> None:
    job, name = replace(JOB, effort=EFFORT["default"], window=512), "repair and comparison"
    bare = parts_of(replace(job, repairs=False))[name]
    one = parts_of(replace(job, effort=replace(job.effort, finalists=1)))[name]
    assert parts_of(job)[name] - bare == pytest.approx(job.effort.finalists * (one - bare))
    assert one - bare > job.effort.steps * job.effort.tokens / 512


def test_every_model_is_measured_and_the_dense_model_once() -> None:
    heads = replace(COSTS, blocks=0.0, head=1.0)
    for counts in ((3,), (1, 2, 3)):
        job = replace(JOB, counts=counts)
        more = sum(parts_of(replace(job, certify=67), heads).values()) - sum(parts_of(job, heads).values())
        assert more == pytest.approx(7 * (len(counts) + 1))
        assert parts_of(replace(job, task_tokens=2560), heads)["tasks"] == pytest.approx(10 * (len(counts) + 1))


def test_samples_are_drawn_together() -> None:
    costs = replace(COSTS, step=0.5)
    assert parts_of(JOB, costs)["calibration windows"] == 128 * 0.5
    assert parts_of(replace(JOB, samples=11), costs)["calibration windows"] == 2 * 128 * 0.5


def test_a_streamed_run_reads_the_weights_in_every_pass_and_trains_nothing() -> None:
    resident, work = (work_of(replace(JOB, streams=streams), COSTS) for streams in (False, True))
    assert {*resident} - {*work} == {"calibration windows", "speed"}
    assert work["repair and comparison"].heads < resident["repair and comparison"].heads
    dense = work["dense model"]
    assert dense.streamed(COSTS) - dense.resident(COSTS) == pytest.approx(2 * 2.0)  # windows to fit, and to select
    in_batches = work_of(replace(JOB, streams=True), replace(COSTS, batch=20))["certification"]
    assert (work["certification"].passes, in_batches.passes) == (60, 3)


def test_training_in_main_memory_takes_time_and_no_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name, trained = "repair and comparison", 0.75 * 0.35 * 900  # weights in output maps of the kept blocks
    slow = replace(JOB, update=0.5)
    assert parts_of(slow)[name] - parts_of(JOB)[name] == pytest.approx(JOB.effort.steps * 0.5 * 0.6 * trained)
    assert work_of(replace(slow, streams=True), COSTS) == work_of(replace(JOB, streams=True), COSTS)
    much = replace(COSTS, room=10**9)
    there, elsewhere = (needed_bytes(job, much, "cuda") for job in (JOB, slow))
    assert elsewhere[1] - there[1] == pytest.approx(16 * trained)
    assert there[0] - elsewhere[0] == pytest.approx(16 * trained - (4000 - 0.25 * 3600))  # the checked model is next
    states = 13 * (JOB.effort.select + JOB.effort.fit) * 256 * 8 * 4
    assert needed_bytes(JOB, replace(much, room=states), "cuda")[1] - there[1] == pytest.approx(states)
    monkeypatch.setattr(part_costs, "_UPDATED", 1000)
    assert update_time(torch.device("cpu")) > 0


def test_the_estimate_knows_that_the_weights_will_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of a run follow the memory that the weights leave."""
    with torch.device("meta"):
        whole = wrap(tiny_model("llama"), "llama")
    parts, window = few_blocks(whole, Placement(device="cpu")), torch.zeros(1, 8, dtype=torch.long)
    later = 4 * sum(weight.numel() for weight in whole.model.parameters())
    later -= 4 * sum(weight.numel() for weight in parts.few.model.parameters())
    one = 16 * 4 * 8 * 8 * whole.config.hidden_size  # a batch of one window takes a sixteenth of the memory
    monkeypatch.setattr(part_costs, "free_memory", lambda device=None: later + 3 * one - 1)
    resident, streamed = (
        measure_costs(parts, window, samples=8, sample_tokens=8, streams=streams) for streams in (False, True)
    )
    assert (resident.batch, streamed.batch) == (2, 3)
    assert streamed.room - resident.room == later
    assert resident.rows == 8
    monkeypatch.setattr(part_costs, "free_memory", lambda device=None: later + 1)
    assert measure_costs(parts, window, samples=8, sample_tokens=8).rows == 1


def test_processes_divide_the_windows_and_not_the_rest() -> None:
    work = work_of(JOB, replace(COSTS, load=5.0))
    assert work["search"].divided(COSTS, 4) == pytest.approx(work["search"].resident(COSTS) / 4)
    assert work["loading"].divided(COSTS, 4) >= 5.0


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_every_run_has_an_estimate_for_several_processes(name: str, tmp_path: Path) -> None:
    found = expect_shrink(save(tmp_path / "model", name), ShrinkOptions(remove="1", effort="quick"))
    assert found.seconds > found.processes["2"] > found.processes["4"] > found.processes["8"] > found.parts["loading"]


def test_the_time_left_follows_what_the_first_parts_took() -> None:
    sizes = {"gpu": 0, "ram": 1, "disk": 1, "parameters": 1, "layers": 1, "window": 1}
    parts = {"loading": 10.0, "dense model": 20.0, "search": 30.0, "speed": 10.0}
    expected = EstimateRecord(name="m", parts=parts, device="cpu", dtype="float32", **sizes)
    assert time_left(expected, {"loading": 20.0, "dense model": 40.0, "estimate": 5.0}) == "about 80 seconds left"


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "bert", "mixtral"])
def test_a_few_blocks_stand_for_all(name: str) -> None:
    """One block of each kind is built; the random numbers of the user stay as they are."""
    with torch.device("meta"):
        whole = wrap(tiny_model(name), name)
    before = torch.get_rng_state()
    parts = few_blocks(whole, Placement(device="cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    kinds = len({*(getattr(whole.config, "layer_types", None) or [0])})
    assert len(parts.counts) == kinds < whole.layers == sum(parts.counts.values())
    costs = measure_costs(parts, torch.zeros(1, 8, dtype=torch.long))
    assert (costs.layers, costs.tokens) == (whole.layers, 8)
    assert costs.blocks > 0
    assert costs.head > 0


def test_a_configuration_without_weights_is_enough(tmp_path: Path) -> None:
    folder, bare = save(tmp_path / "model", "llama"), tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    options = ShrinkOptions(remove="2", effort="quick")
    found, known = (expect_shrink(str(path), options) for path in (bare, folder))
    assert found.parameters == known.parameters
    assert {*found.parts} == {*known.parts}
    assert found.read_speed is None
    assert {*found.streamed} == {*known.streamed}
    assert known.streamed["search"] > known.parts["search"]
    assert not {"calibration windows", "speed"} & {*known.streamed}
    assert found.ram > 0
    assert found.disk > 0
    assert found.gpu == 0


def test_structures_that_cannot_be_built_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 3}))
    with pytest.raises(InputError, match=r"^cannot load the configuration of .*; correct its configuration"):
        expect_shrink(folder, ShrinkOptions(remove="2"))
