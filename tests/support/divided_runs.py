"""Runs that several processes divide: `python divided_runs.py FOLDER` in each of them, started as torchrun does.

Process RANK writes what it has found to FOLDER/COUNT-RANK.json. `python divided_runs.py shrink …` is the command line,
with as few training steps, and as little time for measuring the speed, as the tests have.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_shrinks import STEPS
from torch.distributed import TCPStore

from depthgauge.base.errors import DepthgaugeError
from depthgauge.base.ranks import ALONE, Ranks
from depthgauge.cli.main import main as command_line
from depthgauge.cli.torchrun import LaunchedCommand
from depthgauge.surgery import speed
from depthgauge.surgery.student import EFFORT
from depthgauge.workflows.gauge import gauge
from depthgauge.workflows.shrink import shrink

SHRINK: dict[str, Any] = {"remove": "2", "window": 16, "effort": "quick"}
RECOVER = "60k"


def started(count: int, *command: str) -> list[tuple[int, str, str]]:
    """Run a Python command in several processes; return exit code, standard output and standard error of each."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has one, too
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    common |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, *command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def found(folder: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Gauge and shrink the model of a folder; three processes leave out what two have shown, which takes long."""
    gauged = gauge(folder / "model", text=str(folder / "text.txt"), window=16, tokens=112, ranks=ranks)
    keywords: dict[str, Any] = {"text": str(folder / "text.txt"), "ranks": ranks} | SHRINK
    shrunk = shrink(folder / "model", **keywords)
    made = {
        "gauged": gauged.to_json()["subjects"],
        "shrunk": shrunk.to_json(),
        "weights": [float(weight.detach().double().abs().sum()) for weight in shrunk.model.parameters()],
    }
    if ranks.count < 3:
        limit = {"no_repair": True, "remove": None, "max_increase": 2.0}
        made["limited"] = shrink(folder / "model", **keywords | limit).to_json()
        made["recovered"] = shrink(folder / "model", recover=RECOVER, **keywords).to_json()
    return made


def refused(**options: Any) -> str:
    """Return the error of a run of `shrink` or `gauge`, given by its options."""
    try:
        (gauge if "tokens" in options else shrink)("model", **options)
    except DepthgaugeError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(folder: Path) -> None:
    """Run everything and write what this process has found."""
    launch = LaunchedCommand()
    launch.join()
    ranks = launch.ranks
    results = found(folder, ranks)
    other: dict[str, Any] = {"window": 16, "ranks": ranks}
    if ranks.count < 3:
        for part in ("text", "config", "weights"):  # process 1 sees other files
            os.chdir(folder / (part if ranks.index == 1 else "."))
            results[f"other {part}"] = refused(text="text.txt", remove="1", effort="quick", **other)
            results[f"other {part}, gauged"] = refused(text="text.txt", tokens=112, **other)
        os.chdir(folder)
        results["placed"] = refused(text="text.txt", remove="1", device_map="auto", **other)
    (folder / f"{ranks.count}-{ranks.index}.json").write_text(json.dumps(results))
    ranks.wait()
    launch.end(0)


if __name__ == "__main__":
    EFFORT["quick"] = replace(EFFORT["quick"], steps=STEPS)  # type: ignore[index]
    speed.SECONDS = 0.1
    if sys.argv[1] == "shrink":
        command_line()
    else:
        main(Path(sys.argv[1]))
