"""`attention` inside CUDA graphs and torch.compile on a GPU: exact calls, and polynomials by a plan."""

import subprocess
import sys

import graph_calls
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", graph_calls.CHECKS)
def test_inside_graphs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, graph_calls.__file__, name], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    # A refusal is one sentence that says what to do.
    refusals = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert all(";" in line for line in refusals)
    assert bool(refusals) or name != "graph_forced"
