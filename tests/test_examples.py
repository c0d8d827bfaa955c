"""The scripts in examples/ run from start to end, without warnings, and print what they found."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "shrink_a_model.ipynb"
TRAINING = "05_finetune_a_shrunk_model.py"  # `make test-models` runs it, see surgery/test_other_tools.py
# What the output of each must contain: a line that only appears when the last cell was reached.
LAST = {
    "01_gauge_a_checkpoint.py": r"mlp_cosine +ranks the layers with correlation",
    "02_certify_and_collapse.py": r"on four random inputs \d of 4 layers are enough",
    "03_fast_attention.py": r"largest proved row bound: \S+; largest error: \S+",
    "04_softmax_vs_linear.py": r"^ +8   0\.\d{3}$",
}


def test_every_example_is_run() -> None:
    assert [path.name for path in EXAMPLES] == sorted([*LAST, TRAINING])


def run(script: Path, folder: Path) -> str:
    """Run a script in a folder, with warnings as errors, and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [sys.executable, "-W", "error", str(script)]
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.docs
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name in LAST], ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    printed = run(path, tmp_path)
    assert re.search(LAST[path.name], printed, re.MULTILINE), printed


@pytest.mark.docs
def test_the_notebook_runs_and_shows_what_it_prints(tmp_path: Path) -> None:
    """Its cells are run as one script. The kept output names the same blocks and the same number of layers."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells), encoding="utf-8")
    printed = run(script, tmp_path)
    shown = "".join("".join(output.get("text", "")) for cell in cells for output in cell["outputs"])
    for line in (r"^removed blocks: [\d ]+$", r"^parameters: .*$", r"^6 layers"):
        now, kept = re.search(line, printed, re.MULTILINE), re.search(line, shown, re.MULTILINE)
        assert now is not None
        assert kept is not None
        assert now[0] == kept[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_opens_as_a_notebook(path: Path) -> None:
    """Editors read `# %%` cells; the first is text with a title, and no code stands before it."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n# # ")
    assert len(re.findall(r"^# %%", text, re.MULTILINE)) >= 5
