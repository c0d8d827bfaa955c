"""`gauge` and `shrink` in several processes: the same result as in one, and one of them writes and speaks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_runs import RECOVER, SHRINK, found, started
from safetensors.torch import load_file, save_file
from tiny_checkpoints import text_of
from tiny_shrinks import save

from depthgauge.base.errors import InputError
from depthgauge.base.ranks import ENDED, Ranks
from depthgauge.cli.main import main

SCRIPT = Path(__file__).parents[1] / "support" / "divided_runs.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("divided")
    save(made / "model", "llama", layers=5)
    (made / "text.txt").write_text(text_of(6000))
    for part in ("text", "config", "weights"):
        shutil.copytree(made / "model", made / part / "model")
        shutil.copy(made / "text.txt", made / part)
    (made / "text" / "text.txt").write_text(text_of(6000, seed=1))
    config = made / "config" / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    weights = load_file(path := made / "weights" / "model" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, path, {"format": "pt"})
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return json.loads(json.dumps(found(folder)))


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """What two processes have found, process 0 first."""
    return divided(folder, 2)


def divided(folder: Path, count: int) -> list[dict[str, Any]]:
    ended = started(count, str(SCRIPT), str(folder))
    assert [code for code, *_ in ended] == [0] * count, ended
    return [json.loads((folder / f"{count}-{rank}.json").read_text()) for rank in range(count)]


def assert_close(one: Any, two: Any, where: str = "", by: float = 1e-6) -> None:
    """Compare documents, whose numbers may differ a little."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for name in one:
            assert_close(one[name], two[name], f"{where}/{name}", by)
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for place, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_close(a, b, f"{where}/{place}", by)
    elif isinstance(one, float) and isinstance(two, float):
        assert one == pytest.approx(two, rel=by, abs=by), where
    else:
        assert one == two, where


def without_notes(subjects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in subject.items() if name != "notes"} for subject in subjects]


def compare(processes: list[dict[str, Any]], alone: Any) -> None:
    """Compare process 0 with a run in one process, and the others with process 0, exactly."""
    first, *others = processes
    for name in ("shrunk", "limited"):
        for key in ("plan", "removed", "loss", "texts", "guarantee", "stages", "curve") if name in first else ():
            assert_close(first[name][key], alone[name][key], f"{name}/{key}")
    assert_close(first["weights"], alone["weights"])
    assert_close(without_notes(first["gauged"]), without_notes(alone["gauged"]))
    note = f"{len(processes)} processes divided the windows"
    assert note in first["shrunk"]["notes"]
    assert f"in one of {len(processes)} processes of the run" in first["shrunk"]["speed"]["what"]
    assert note in first["gauged"][0]["notes"]
    for other in others:
        assert other["gauged"] == first["gauged"]
        assert other["weights"] == first["weights"]
        for name in {"shrunk", "recovered", "limited"} & first.keys():
            for key in ("plan", "removed", "stages", "curve"):
                assert other[name][key] == first[name][key]
        for one, two in zip(trainings(other), trainings(first), strict=True):
            assert one == two


def test_two_processes_find_what_one_finds(alone: Any, two: list[dict[str, Any]]) -> None:
    compare(two, alone)
    assert [stage["name"] for stage in alone["shrunk"]["stages"]] == ["least squares", "distillation"]
    assert len(alone["limited"]["guarantee"]["tested"]) > 1
    for key in ("removed", "stages"):
        assert_close(two[0]["recovered"][key], alone["recovered"][key], f"recovered/{key}")
    for key in ("loss", "texts"):
        assert_close(two[0]["recovered"][key], alone["recovered"][key], f"recovered/{key}", by=1e-4)


def test_two_processes_train_with_the_curve_of_one(alone: Any, two: list[dict[str, Any]]) -> None:
    """Training amplifies the rounding of the sums, so that the curves are not equal to the last digit."""
    (one,), (divided,) = trainings(alone), trainings(two[0])
    assert_close(divided, one, by=1e-4)
    assert one["kept"]
    assert len(one["curve"]) > 5
    assert one["before"] - one["after"] > 100 * 1e-4  # far more than the two may differ


def trainings(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the trainings of a run did, without the time that they took."""
    made = [found["recovered"]["recovery"]] if "recovered" in found else []
    return [{name: value for name, value in one.items() if name != "seconds"} for one in made]


def test_three_processes_find_what_one_finds(folder: Path, alone: Any) -> None:
    compare(divided(folder, 3), alone)


def test_processes_that_read_different_files_refuse(two: list[dict[str, Any]]) -> None:
    for name, what in {"text": "text", "config": "configuration", "weights": "set of weights"}.items():
        sentence = (
            f"InputError: process 1 has read another {what} than process 0; give all of them the same files and the "
            "same command"
        )
        for run in (f"other {name}", f"other {name}, gauged"):
            assert [one[run] for one in two] == [sentence] * 2


def test_a_device_map_is_for_one_process(two: list[dict[str, Any]]) -> None:
    for one in two:
        assert one["placed"].startswith("InputError: --device-map cannot be combined with several processes")


def test_fewer_windows_than_processes_are_refused() -> None:
    with pytest.raises(InputError, match="99 processes cannot divide 24 windows; start fewer, with --nproc-per-node"):
        Ranks(3, 99).part(torch.zeros(24, 2))


def test_the_first_windows_of_all_are_the_first_of_each() -> None:
    windows = torch.arange(11)
    for first in range(1, 12):
        parts = [Ranks(index, 3) for index in range(3)]
        chosen = torch.cat([ranks.part(windows)[ranks.among(slice(0, first))] for ranks in parts])
        assert chosen.sort().values.tolist() == list(range(first))


def test_one_process_prints_what_all_refuse(folder: Path) -> None:
    ended = started(2, "-m", "depthgauge", "evaluate", str(folder / "model"))
    sentence = (
        "error: depthgauge evaluate runs in one process; start it without torchrun, which is for gauge, shrink and "
        "recover\n"
    )
    assert ended == [(2, "", sentence), (2, "", "")]


def test_a_killed_process_ends_the_others_and_the_run_is_resumed(
    folder: Path, tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "smaller"
    options = [word for name, value in SHRINK.items() for word in (f"--{name}", str(value))]
    command = [
        "shrink",
        str(folder / "model"),
        "--text",
        str(folder / "text.txt"),
        *options,
        "--recover",
        RECOVER,
        "--out",
        str(out),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT)]
    run = subprocess.Popen(
        [*torchrun, *command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        while not any((tmp_path / "smaller.partial").glob("recovery-*")):
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        os.kill(process_of(run.pid, rank=1), signal.SIGKILL)
        said, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 1
    assert said.count(f"error: {ENDED}") == said.count("error: ") == 1
    assert not out.exists()
    assert (tmp_path / "smaller.partial" / "journal.json").is_file()
    monkeypatch.setattr(sys, "argv", ["depthgauge", *command, "--resume"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert not (tmp_path / "smaller.partial").exists()
    record = json.loads((out / "depthgauge.json").read_text())
    for key in ("removed", "loss", "texts", "stages"):
        assert_close(record[key], alone["recovered"][key], key, by=1e-4)
    (resumed,), (whole,) = trainings({"recovered": record}), trainings(alone)
    assert_close(resumed, whole, by=1e-4)


def process_of(parent: int, rank: int) -> int:
    """Return the id of the process that torchrun has started as this rank."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and f"RANK={rank}".encode() in (place / "environ").read_bytes().split(b"\0"):
                return int(place.name)
        except OSError:  # it has ended meanwhile
            continue
    raise AssertionError(f"no process of {parent} has rank {rank}")
