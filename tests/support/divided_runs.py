"""Commands in several processes: `python divided_runs.py shrink …` in each of them, started as torchrun does.

They have as few training steps, and as little time for measuring the speed, as the tests have.
"""

import os
import subprocess
import sys
from dataclasses import replace

from tiny_shrinks import STEPS
from torch.distributed import TCPStore

from depthgauge.cli.main import main as command_line
from depthgauge.surgery import speed
from depthgauge.surgery.student import EFFORT


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
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


if __name__ == "__main__":
    EFFORT["quick"] = replace(EFFORT["quick"], steps=STEPS)  # type: ignore[index]
    speed.SECONDS = 0.1
    command_line()
