"""Type the commands of README.md in a copy of the project, in the environment that they create themselves.

    python scripts/check_readme.py

The `sh` and `python` blocks run in order, in one shell, in a folder with the files of the project that git does not
ignore. The first commands make a virtual environment and install the project into it. What the README says that its
reader has is there before the command that needs it: the checkpoint and the text of `depthgauge demo`, as `./my-model`
and `corpus.txt`. Every other file is made by a command of the README. The first command that fails ends the check with
exit code 1. Packages come from pip's package index, in the versions of constraints.txt.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_TYPED = {
    "make test": "takes many minutes; a clean clone must pass it anyway",
    "make docs": "takes many minutes; a clean clone must pass it anyway",
}
"""Command → why it is not typed."""
REPLACED = {
    "HuggingFaceTB/SmolLM2-135M": "./my-model",
    "--recover 2M": "--recover 20k",
    "--minutes 10": "--minutes 0.1",
}
"""What is typed instead: a tiny model, and amounts of training for a CPU."""
NEEDED = {"my-model": "cp -r depthgauge-demo/model my-model", "corpus.txt": "cp depthgauge-demo/text.txt corpus.txt"}
"""A file that the reader has → the command that makes it."""
TYPED = """
typed() {
  local begun=$SECONDS
  if ! eval "$1" >.typed.log 2>&1 </dev/null; then
    echo "failed: $1"
    tail -n 40 .typed.log
    exit 1
  fi
  echo "ok, $((SECONDS - begun)) s: ${1%%$'\\n'*}"
}
"""
"""A shell function that runs one command in the shell itself, and ends the shell if the command fails."""


def blocks(document: str) -> list[tuple[str, str]]:
    """Return language and text of the fenced blocks of a document."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)


def commands(document: str) -> list[str]:
    """Return what a reader types, in order: each line of a `sh` block, and each `python` block as one command."""
    found = []
    for language, text in blocks(document):
        if language == "sh":
            lines = re.sub(r"\\\n\s*", " ", text).splitlines()
            found += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        elif language == "python":
            found.append(f"python - <<'PY'\n{text}PY")
    return found


def program(typed: list[str]) -> str:
    """Return a shell script that types the commands, and prepares what the reader has before it is needed."""
    lines, needs = [TYPED], dict(NEEDED)
    for command in typed:
        name = " ".join(command.split()[:2])
        if name in NOT_TYPED:
            lines.append(f"echo {shlex.quote(f'not typed: {name}, {NOT_TYPED[name]}')}")
            continue
        for shown, used in REPLACED.items():
            command = command.replace(shown, used)
        for file in [file for file in needs if file in command]:
            lines.append(f"typed {shlex.quote(needs.pop(file))}")
        lines.append(f"typed {shlex.quote(command)}")
    return "\n".join(lines) + "\n"


def copy_project(folder: Path) -> None:
    """Copy the files that git tracks or does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def type_commands(folder: Path, document: str) -> int:
    """Type the commands of a document in a folder, and return the exit code of the shell."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment |= {"PIP_NO_COMPILE": "0", "PYTHONDONTWRITEBYTECODE": ""}  # what is imported is compiled then, once
    return subprocess.run(
        ["bash", "-c", program(commands(document))], cwd=folder, env=environment, check=False
    ).returncode


def main() -> int:
    """Type the README in a temporary copy of the project."""
    begun, document = time.monotonic(), (ROOT / "README.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="depthgauge-readme-") as folder:
        copy_project(Path(folder))
        code = type_commands(Path(folder), document)
    sys.stdout.write(f"the README {'works as typed' if code == 0 else 'fails'} ({time.monotonic() - begun:.0f} s)\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
