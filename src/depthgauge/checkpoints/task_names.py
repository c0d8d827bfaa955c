"""Which tasks there are: those of lm-eval, YAML files, and the shipped one."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, missing_extra, unknown_name
from depthgauge.results.evaluate_options import CLOZE


class TaskError(InputError):
    """A task that is not known, whose data is missing, or that cannot be scored item by item."""


def lm_eval() -> Any:
    """Import and return lm_eval; if it is missing, raise an error that names the extra to install."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module("lm_eval")
    except ImportError as error:
        raise missing_extra("evaluate --tasks", "eval") from error


def task_folders(name: str) -> list[Path]:
    """Return the folders of lm-eval's tasks in which a name occurs; none for the shipped task and for a YAML file.

    Reading all 15,000 tasks would take 15 seconds. Imports neither torch nor transformers.

    Raises:
        TaskError: the name occurs in no folder, or there is no such YAML file.
    """
    root = _root()
    if name == CLOZE:
        return []
    if Path(name).suffix in (".yaml", ".yml"):
        if not Path(name).is_file():
            raise TaskError(f"cannot read the task {name}: no such file")
        return []
    wanted = name.encode()
    found = {path.relative_to(root).parts[0] for path in root.rglob("*.yaml") if wanted in path.read_bytes()}
    if not found:
        raise unknown_task(name)
    return [root / folder for folder in sorted(found)]


def unknown_task(name: str) -> TaskError:
    """Return the error for a name that no task has."""
    folders = [path.name for path in _root().iterdir() if path.is_dir()]
    hint = str(unknown_name("task", name, [CLOZE, *folders])).partition("; did you mean ")[2]
    near = f"did you mean {hint} " if hint else ""
    return TaskError(
        f"there is no task {name!r} in lm-eval {lm_eval().__version__}; {near}`lm_eval ls tasks` lists all of them, "
        "and the YAML file of a task can be given too"
    )


def _root() -> Path:
    return Path(lm_eval().__file__).parent / "tasks"
