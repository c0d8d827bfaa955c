"""Run the `depthgauge` commands of the README as typed: `python scripts/readme_commands.py README.md DEPTHGAUGE`.

Run it in an empty folder. The files that the commands name are created first: a tiny checkpoint, a text, a network and
a grid. Commands that need a cluster are skipped, by name.
"""

import random
import re
import subprocess
import sys
from pathlib import Path

GRID = """task = "collapse-error"
repetitions = 1
[parameters]
method = ["mean-field"]
eta = [0.01]
layers = [2]
heads = [1]
dim = [4]
tokens = [4]
"""


def commands(readme: str) -> list[str]:
    """Return the commands in the `sh` blocks of a document, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("depthgauge ")]


def main() -> int:
    """Run every command; return 1 at the first that fails."""
    readme, depthgauge = Path(sys.argv[1]), sys.argv[2]
    here = Path(__file__).parent
    subprocess.run(
        [str(Path(depthgauge).with_name("python")), str(here / "tiny_checkpoint.py"), "my-model"], check=True
    )
    drawn = random.Random(0)
    words = ["the", "a", "of", "and", "in", "harbour", "depth", "water", "stick", "captain", "number"]
    Path("corpus.txt").write_text(" ".join(drawn.choices(words, k=30_000)), encoding="utf-8")
    Path("grid.toml").write_text(GRID, encoding="utf-8")
    make = [depthgauge, "random", "--layers", "3", "--heads", "1", "--dim", "4", "--out", "net.safetensors"]
    subprocess.run(make, check=True)
    typed = commands(readme.read_text(encoding="utf-8"))
    ran = 0
    for command in typed:
        if "--engine dask" in command:
            sys.stdout.write(f"skipped, needs a cluster: {command}\n")
            continue
        words = command.split()
        done = subprocess.run([depthgauge, *words[1:]], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.stderr.write(f"{command}\nexit code {done.returncode}: {done.stderr}\n")
            return 1
        ran += 1
        sys.stdout.write(f"ok: {command}\n")
    return 0 if ran >= 4 else 1


if __name__ == "__main__":
    sys.exit(main())
