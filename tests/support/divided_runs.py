"""Commands in several processes: `python divided_runs.py shrink …` in each of them, started as torchrun does.

They have as few training steps, and as little time for measuring the speed, as the tests have.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tiny_shrinks import STEPS
from torch.distributed import TCPStore

from depthgauge.cli.main import main as command_line
from depthgauge.surgery import speed
from depthgauge.surgery.student import EFFORT

PRELOADED = ("depthgauge.cli.main", "transformers.trainer", "accelerate", "torch.distributed.fsdp")
"""What takes seconds to import. Processes are forked from one that has imported it and done nothing else."""


def started(count: int, *command: str) -> list[tuple[int, str, str]]:
    """Run a Python command in several processes; return exit code, standard output and standard error of each."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has one, too
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    common |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(count)]
        given = [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        processes = [
            context.Process(target=_run, args=(command, own, *paths)) for own, paths in zip(given, files, strict=True)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(600)
        finally:
            for process in processes:
                process.kill()
        codes = [process.exitcode for process in processes]
        assert None not in codes, codes
        return [(code or 0, *(path.read_text() for path in paths)) for code, paths in zip(codes, files, strict=True)]


def _run(command: tuple[str, ...], environment: Mapping[str, str], out: Path, err: Path) -> None:
    """Run `python COMMAND` in this process, with this environment and these files for its output."""
    os.environ.clear()
    os.environ.update(environment)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    EFFORT["quick"] = replace(EFFORT["quick"], steps=STEPS)  # type: ignore[index]
    speed.SECONDS = 0.1
    command_line()
