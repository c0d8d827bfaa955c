"""What a long gauging has found so far, on disk after every step, so that an interruption costs one step."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthgauge._io import write_text
from depthgauge.errors import InputError

SCHEMA = "depthgauge.partial/1"


def partial_path(out: str | Path) -> Path:
    """Where the partial result of `out` lies."""
    path = Path(out)
    return path.with_name(path.name + ".partial")


@dataclass
class Partial:
    """Findings by window and part, and removals by step, all as JSON; kept at `path`, or nowhere if that is None."""

    about: dict[str, Any]
    path: Path | None = None
    windows: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def has(self, window: int, part: str) -> bool:
        """Whether a part of a window was found before."""
        return part in self.windows.get(str(window), {})

    def put(self, window: int, part: str, found: Any) -> None:
        """Keep a part of a window."""
        self.windows.setdefault(str(window), {})[part] = found
        self.save()

    def get(self, window: int, part: str) -> Any:
        """A part of a window."""
        return self.windows[str(window)][part]

    def save(self) -> None:
        """Write what was found, whole or not at all."""
        if self.path is not None:
            document = {"schema": SCHEMA, "about": self.about, "windows": self.windows, "steps": self.steps}
            write_text(self.path, json.dumps(document))


def forget_partial(out: str | Path) -> None:
    """The result is written: nothing is left to resume."""
    partial_path(out).unlink(missing_ok=True)


def open_partial(out: str | Path | None, resume: bool, about: dict[str, Any]) -> Partial:
    """A fresh partial result beside `out`, or with `resume` the one that lies there.

    `about` is what was asked for: a partial result of something else is refused.
    """
    if out is None:
        if resume:
            raise InputError("resume needs the file of the result that was interrupted; give --out as before")
        return Partial(about)
    path = partial_path(out)
    if not resume or not path.is_file():
        return Partial(about, path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        before, windows, steps = document["about"], document["windows"], document["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no partial result: {error}; remove it and start again without --resume") from error
    # Through JSON, as what was written went.
    for name, value in json.loads(json.dumps(about)).items():
        if before.get(name) != value:
            raise InputError(
                f"{path} was begun with {name} {before.get(name)!r}, now {value!r} is asked for; repeat the first "
                "command, or leave --resume out to start again"
            )
    return Partial(about, path, windows, steps)
