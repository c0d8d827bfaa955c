"""A record of finished steps, so that an interrupted run can be resumed with the same result."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from depthgauge._io import write_text
from depthgauge.errors import InputError, OutputError, require_path

SCHEMA = "depthgauge.shrink-partial/1"


def journal_folder(out: str | Path) -> Path:
    """Return the folder that keeps the steps of an interrupted run that writes `out`."""
    path = require_path("out", out)
    if path.name in ("", ".."):
        path = Path(os.path.abspath(path))
    if not path.name:
        raise InputError(f"cannot write {out}: give the name of a new directory")
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
        self._before: dict[str, Any] = {}
        if folder is None:
            return
        if folder.is_dir() and any(not _is_own(path) for path in folder.iterdir()):
            raise InputError(
                f"{folder} has files that no interrupted run left there; move them, or choose another --out"
            )
        if not resume:
            self.delete()
        elif (folder / "journal.json").is_file():
            self.entries = self._read(folder / "journal.json")

    def describe(self, name: str, value: Any) -> None:
        """Add to the description of the run. An interrupted run must have had the same."""
        if self.entries:
            self._require(name, value)
        self.about[name] = json.loads(json.dumps(value))

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
        if self.folder is None or not self.folder.is_dir():
            return
        for path in list(self.folder.iterdir()):
            if _is_own(path):
                path.unlink()
        with suppress(OSError):  # somebody else has put a file there meanwhile
            self.folder.rmdir()

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            self._before, entries = dict(document["about"]), dict(document["entries"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: {error}; delete {path.parent} and start again") from error
        for name, value in self.about.items():
            self._require(name, value)
        return entries

    def _require(self, name: str, value: Any) -> None:
        """Raise if the interrupted run had another description."""
        before = self._before.get(name)
        if before != value:
            raise InputError(
                f"{self.folder} was started with {name} {before!r}, now it is {value!r}; repeat the first command, or "
                "delete that folder to start again"
            )


def _is_own(path: Path) -> bool:
    """Return whether a file is part of a journal: its entries, the states of healing, or a write that was cut short."""
    is_cut_short = path.name.startswith(".") and path.name.endswith(".partial")
    return path.is_file() and (path.name == "journal.json" or path.name.startswith("heal-") or is_cut_short)
