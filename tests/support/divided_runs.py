"""Commands in several processes: `python divided_runs.py shrink …` in each of them, started as torchrun does.

They have as few training steps, as little time for measuring the speed, and the forked check of what they wrote, as the
tests have.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from forked import check_in_forks
from tiny_shrinks import STEPS, train_for
from torch.distributed import TCPStore

from depthgauge.cli.main import main as command_line
from depthgauge.surgery import speed

PRELOADED = (
    "depthgauge.cli.main", "transformers.trainer", "accelerate", "torch.distributed.fsdp", "torch.distributed.run",
)  # fmt: skip
"""What takes seconds to import. Processes are forked from one that has imported it and done nothing else."""


def forkserver() -> ForkServerContext:
    """Return what starts processes as forks of one that has imported `PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def torchrun(count: int, command: tuple[str, ...], folder: Path) -> None:
    """Run a Python command in several processes, as `torchrun` does; process RANK writes its id to FOLDER/RANK.

    The agent of torchrun forks the processes instead of starting programs. All print to FOLDER/out.
    """
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    _print_to(folder / "out", folder / "out")
    free_port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "test"]
    config, _, _ = config_from_args(parse_args([*free_port, "--nproc-per-node", str(count), *command]))
    elastic_launch(replace(config, start_method="fork"), _of_torchrun)(command, folder)


def _of_torchrun(command: tuple[str, ...], folder: Path) -> None:
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    _execute(command)


def started(count: int, *command: str) -> list[tuple[int, str, str]]:
    """Run a Python command in several processes; return exit code, standard output and standard error of each."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has one, too
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    common |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0"}
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(count)]
        given = [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        processes = [
            context.Process(target=run_command, args=(command, own, *paths))
            for own, paths in zip(given, files, strict=True)
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


def run_command(command: tuple[str, ...], environment: Mapping[str, str], out: Path, err: Path) -> None:
    """Run `python COMMAND` in this process, with this environment and these files for its output."""
    os.environ.clear()
    os.environ.update(environment)
    _print_to(out, err)
    _execute(command)


def _print_to(out: Path, err: Path) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)


def _execute(command: tuple[str, ...]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        train_for(STEPS, patch)
        check_in_forks(patch)
        patch.setattr(speed, "SECONDS", 0.1)
        command_line()
