"""A record of finished steps, so that an interrupted run can be resumed with the same result."""

import json
import shutil
from pathlib import Path
from typing import Any

from depthgauge._io import write_text
from depthgauge.errors import InputError, OutputError

SCHEMA = "depthgauge.shrink-partial/1"


def journal_folder(out: str | Path) -> Path:
    """Return the folder that keeps the steps of an interrupted run that writes `out`."""
    path = Path(out)
    return path.with_name(path.name + ".partial")


class Journal:
    """Entries by name, saved after every change; only in memory if there is no folder.

    `about` describes the run. A run resumes only from a journal with the same description.
    """

    def __init__(self, folder: Path | None, about: dict[str, Any], resume: bool = False) -> None:
        """Open a journal.

        Args:
            folder: where it is saved; None keeps it in memory.
            about: a description of the run.
            resume: read the existing entries; otherwise start with none.
        """
        self.folder, self.about = folder, json.loads(json.dumps(about))
        self.entries: dict[str, Any] = {}
        if folder is not None and resume and (folder / "journal.json").is_file():
            self.entries = self._read(folder / "journal.json")

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry."""
        return self.entries.get(name, default)

    def put(self, name: str, value: Any) -> None:
        """Set an entry and save the journal."""
        self.entries[name] = value
        if self.folder is None:
            return
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write {self.folder}: {error.strerror or error}") from error
        document = {"schema": SCHEMA, "about": self.about, "entries": self.entries}
        write_text(self.folder / "journal.json", json.dumps(document))

    def delete(self) -> None:
        """Delete the journal of a run that has finished."""
        if self.folder is not None and self.folder.is_dir():
            shutil.rmtree(self.folder)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            before, entries = document["about"], dict(document["entries"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: {error}; delete {path.parent} and start again") from error
        for name, value in self.about.items():
            if before.get(name) != value:
                raise InputError(
                    f"{path.parent} was started with {name} {before.get(name)!r}, now it is {value!r}; repeat the "
                    "first command, or delete that folder to start again"
                )
        return entries
