"""Partial results of a long run, saved after every step so that an interrupted run can be resumed."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthgauge._io import write_text
from depthgauge.errors import InputError, require_path

SCHEMA = "depthgauge.partial/1"


def partial_path(out: str | Path) -> Path:
    """Return the path of the partial result that belongs to `out`."""
    path = require_path("out", out)
    return path.with_name(path.name + ".partial")


@dataclass
class Partial:
    """Findings by window and part, and removals by step, as JSON; saved at `path` unless that is None.

    `about` describes the run; only a run with the same description resumes from it.
    """

    about: dict[str, Any]
    path: Path | None = None
    windows: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def has(self, window: int, part: str) -> bool:
        """Return whether a part of a window is known."""
        return part in self.windows.get(str(window), {})

    def put(self, window: int, part: str, found: Any) -> None:
        """Add a part of a window and save."""
        self.windows.setdefault(str(window), {})[part] = found
        self.save()

    def get(self, window: int, part: str) -> Any:
        """Return a part of a window."""
        return self.windows[str(window)][part]

    def save(self) -> None:
        """Write the partial result atomically."""
        if self.path is not None:
            document = {"schema": SCHEMA, "about": self.about, "windows": self.windows, "steps": self.steps}
            write_text(self.path, json.dumps(document))


def no_message(sentence: str) -> None:
    """Ignore a message."""


def check_partial(out: str | Path | None, *, resume: bool, overwrite: bool) -> None:
    """Raise if the partial result of an interrupted run would be replaced without being asked."""
    if out is not None and not resume and not overwrite and partial_path(out).exists():
        raise InputError(
            f"{partial_path(out)} is the partial result of an interrupted run; continue it with --resume, or use "
            "--overwrite to start again"
        )


def delete_partial(out: str | Path) -> None:
    """Delete the partial result of a result that has been written."""
    partial_path(out).unlink(missing_ok=True)


def open_partial(out: str | Path | None, resume: bool, about: dict[str, Any]) -> Partial:
    """Return a new partial result next to `out`, or with `resume` the existing one.

    Args:
        out: where the result will be written; None keeps the partial result in memory.
        resume: continue from the existing partial result.
        about: a description of the run; a partial result with another description is refused.
    """
    if out is None:
        if resume:
            raise InputError("--resume needs the file of the interrupted result; give the same --out as before")
        return Partial(about)
    path = partial_path(out)
    if not resume or not path.is_file():
        return Partial(about, path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        before, windows, steps = document["about"], document["windows"], document["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a partial result: {error}; delete it and start again without --resume"
        ) from error
    # Convert to JSON and back, so that tuples and lists compare equal.
    for name, value in json.loads(json.dumps(about)).items():
        if before.get(name) != value:
            raise InputError(
                f"{path} was started with {name} {before.get(name)!r}, now it is {value!r}; repeat the first "
                "command, or leave --resume out to start again"
            )
    return Partial(about, path, windows, steps)
