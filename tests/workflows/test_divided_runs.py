"""`shrink` and `recover` in several processes: they train together, and process 0 does everything else."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from divided_runs import forkserver, started, torchrun
from forked import check_in_forks
from tiny_checkpoints import text_of
from tiny_shrinks import save

import depthgauge as dg
from depthgauge.base.errors import EndedRunError
from depthgauge.cli.main import main

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("several processes")]  # forked from the same one
SCRIPT = Path(__file__).parents[1] / "support" / "divided_runs.py"
SHRINK: dict[str, Any] = {"remove": "2", "window": 16, "effort": "quick", "recover": "10k"}
AGAIN: dict[str, Any] = {"window": 16, "tokens": "8k", "general": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("divided")
    save(made / "model", "llama", layers=5)
    (made / "text.txt").write_text(text_of(6000))
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """The record of one process."""
    with pytest.MonkeyPatch.context() as patch:
        check_in_forks(patch)
        made = dg.shrink(folder / "model", text=str(folder / "text.txt"), out=folder / "alone", **SHRINK)
    return json.loads(json.dumps(made.to_json()))


def words(command: str, folder: Path, out: Path, options: dict[str, Any], *more: str) -> list[str]:
    """Return the words of a command about the text of a folder."""
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*command.split(), "--text", str(folder / "text.txt"), *given, "--out", str(out), *more]


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


def training(record: dict[str, Any]) -> dict[str, Any]:
    """Return what the training of a run did, without the time and the memory that it took."""
    return {name: value for name, value in record["recovery"].items() if name not in ("seconds", "memory")}


def compare(record: dict[str, Any], alone: dict[str, Any]) -> None:
    """Training amplifies the rounding of the sums, so that the curves are not equal to the last digit."""
    for key in ("removed", "stages", "curve"):
        assert_close(record[key], alone[key], key)
    for key in ("loss", "texts"):
        assert_close(record[key], alone[key], key, by=1e-4)
    assert_close(training(record), training(alone), by=1e-4)


def test_three_processes_that_train_together_have_the_curve_of_one(
    folder: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    command = words(f"shrink {folder / 'model'}", folder, tmp_path / "out", SHRINK, "--json")
    (code, printed, said), *others = started(3, str(SCRIPT), *command)
    assert code == 0, said
    assert [other[:2] for other in others] == [(0, "")] * 2
    record = json.loads(printed)
    assert record == json.loads((tmp_path / "out" / "depthgauge.json").read_text())
    compare(record, alone)
    found = record["recovery"]
    assert found["kept"]
    assert len(found["curve"]) > 5
    assert found["before"] - found["after"] > 100 * 1e-4  # far more than the two may differ


@pytest.mark.usefixtures("forked_verification")
def test_two_processes_recover_as_one(folder: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    assert alone["out"] == str(folder / "alone")
    one = dg.recover(folder / "alone", teacher=folder / "model", text=str(folder / "text.txt"), **AGAIN).record
    command = words(f"recover {folder / 'alone'}", folder, tmp_path / "out", AGAIN, "--teacher", str(folder / "model"))
    ended = started(2, str(SCRIPT), *command, "--json")
    assert [code for code, *_ in ended] == [0, 0], ended
    assert_close(training(json.loads(ended[0][1])), training(json.loads(json.dumps(one.to_json()))), by=1e-4)


@pytest.mark.parametrize("verb", ["gauge", "evaluate"])
def test_commands_that_do_not_train_are_refused(verb: str, folder: Path) -> None:
    """Process 0 prints, and the one that waits ends with it."""
    ended = started(2, "-m", "depthgauge", verb, str(folder / "model"))
    sentence = (
        f"error: depthgauge {verb} runs in one process; start it without torchrun, which is for the training of shrink "
        "and recover\n"
    )
    assert ended == [(2, "", sentence), (1, "", "")]


@pytest.mark.parametrize("words", ["--device spread", "--device cuda:1"])
def test_a_device_of_all_processes_is_refused(words: str, folder: Path, tmp_path: Path) -> None:
    command = ["shrink", str(folder / "model"), "--remove", "1", "--out", str(tmp_path / "out"), *words.split()]
    (code, _, said), other = started(2, "-m", "depthgauge", *command)
    assert code == 2
    assert said.startswith(f"error: {words} cannot be combined with several processes")
    assert other == (1, "", "")


@pytest.mark.usefixtures("forked_verification")
def test_a_killed_process_ends_the_others_and_the_run_is_resumed(
    folder: Path, tmp_path: Path, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, printed = tmp_path / "smaller", tmp_path / "printed"
    printed.mkdir()
    command = words(f"shrink {folder / 'model'}", folder, out, SHRINK)
    run = forkserver().Process(target=torchrun, args=(2, (str(SCRIPT), *command), printed))
    run.start()
    try:
        while not any((tmp_path / "smaller.partial").glob("recovery-*")):
            assert run.is_alive(), (printed / "out").read_text()
            time.sleep(0.05)
        os.kill(int((printed / "1").read_text()), signal.SIGKILL)
        run.join(60)
    finally:
        run.kill()
    said = (printed / "out").read_text()
    assert run.exitcode == 1, said
    assert said.count(f"error: {EndedRunError()}") == said.count("error: ") == 1
    assert not out.exists()
    assert (tmp_path / "smaller.partial" / "journal.json").is_file()
    monkeypatch.setattr(sys, "argv", ["depthgauge", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert not (tmp_path / "smaller.partial").exists()
    compare(json.loads((out / "depthgauge.json").read_text()), alone)
