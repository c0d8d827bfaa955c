"""The journal of a run: its finished steps and the files it wrote, kept next to the output until the run is complete.

An interrupted run is resumed from its journal and ends with the same result. While a run goes on, its journal is
locked, so that no other run writes the same output.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from depthgauge.base.errors import InputError, InterruptedRunError, OutputError, require_path
from depthgauge.base.io import is_special, write_text
from depthgauge.base.lock import file_lock, is_lock
from depthgauge.base.progress import no_message

SCHEMA = "depthgauge.partial/2"
RECORD = "depthgauge.json"
"""The file in the directory of a shrunk model that holds its record; it identifies the directory."""
_ENTRIES, _LOCK = "journal.json", "lock"
_RESULT = "result.gguf"
_OWN_NAMES = re.compile(r"repair-[0-9-]+\.pt|windows-\.pt|result\.gguf|\.[0-9a-f]{16}\.partial")
"""Further files of a journal: the weights of repairs, windows to train on, and writes that were cut short."""
Training = Literal["recovery", "training"]
_OWN_FOLDERS = re.compile(rf"({'|'.join(get_args(Training))})-[0-9-]*")
"""Directories of a journal: the saved states of trainings."""


def journal_folder(out: str | Path) -> Path:
    """Return the folder of the journal of a run that writes `out`; symbolic links are followed."""
    require_path("out", out)
    path, parent = Path(os.path.realpath(out)), Path(out).parent
    if not path.name:
        raise InputError(f"cannot write {out}: give the name of a new file or directory")
    if not path.parent.is_dir():
        raise InputError(f"there is no directory {parent} for {out}; create it: mkdir -p {parent}")
    return path.with_name(path.name + ".partial")


class Journal:
    """Entries by name and the files that were written, saved after every change in the folder `OUT.partial`.

    `with Journal(out) as journal` locks the output. When the block ends, the folder is deleted; if it ends with an
    error, the entries are kept, and the same run continues with them. Without `out`, or if it is a device, everything
    stays in memory.

    `message` is called with a sentence if an interrupted run is continued. With `overwrite`, another run replaces an
    interrupted one. An InputError says that another process writes the same output, that an interrupted run would be
    lost, or that the folder has files of somebody else.
    """

    def __init__(
        self,
        out: str | Path | None = None,
        *,
        overwrite: bool = False,
        message: Callable[[str], None] = no_message,
    ) -> None:
        self.folder = None if out is None or is_special(out) else journal_folder(out)
        self.entries: dict[str, Any] = {}
        self._written: dict[str, str] = {}
        self._about: dict[str, Any] = {}
        self._before: dict[str, Any] | None = None
        self._overwrite, self._message, self._held = overwrite, message, ExitStack()

    def __enter__(self) -> "Journal":
        if self.folder is not None:
            _refuse_other_files(self.folder)
            self._held.enter_context(file_lock(self.folder / _LOCK, str(self.folder).removesuffix(".partial")))
        try:
            if self.folder is not None:
                self._open(self.folder / _ENTRIES)
        except BaseException:
            self._release(keep=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(keep=kind is not None)
        if self.folder is None or not self.folder.is_dir():
            return
        advice = f"the finished steps are kept in {self.folder}: run the same command again to continue"
        if kind is KeyboardInterrupt:
            raise InterruptedRunError(f"interrupted; {advice}") from error
        if isinstance(error, OutputError):  # a full disk, for example
            error.args = (f"{error}; {advice}",)

    def begin(self, about: dict[str, Any]) -> None:
        """Set the description of the run. Only a run with the same description is continued."""
        if self._before is None:
            self._delete()
        for name, value in about.items():
            self.describe(name, value)
        if self._before is not None:
            self._message(f"continuing the interrupted run in {self.folder}")

    def describe(self, name: str, value: Any) -> None:
        """Add to the description of the run. An interrupted run must have had the same, or it is replaced."""
        value = json.loads(json.dumps(value))  # tuples become lists, as in the file
        if self._before is not None and (before := self._before.get(name)) != value:
            if not self._overwrite:
                raise InputError(
                    f"{self.folder} was started with {name} {before!r}, now it is {value!r}; repeat the first command, "
                    "or use --overwrite to start again"
                )
            self._before, self.entries, self._written = None, {}, {}
            self._delete()
        self._about[name] = value

    @property
    def is_continued(self) -> bool:
        """Whether an interrupted run is continued."""
        return self._before is not None

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry."""
        return self.entries.get(name, default)

    def put(self, name: str, value: Any) -> None:
        """Set an entry and save the journal."""
        self.update({name: value})

    def update(self, entries: Mapping[str, Any]) -> None:
        """Set several entries and save the journal."""
        self.entries |= entries
        self._save()

    def file(self, kind: str, numbers: Iterable[int]) -> Path | None:
        """Return the path of a further file, such as `repair-6-7.pt`, which is deleted at the end; None in memory."""
        return None if self.folder is None else self.folder / f"{kind}-{'-'.join(map(str, numbers))}.pt"

    def directory(self, kind: Training, numbers: Iterable[int]) -> Path | None:
        """Return a directory, such as `recovery-6-7`, which is deleted at the end; None in memory."""
        path = self.file(kind, numbers)
        if path is None:
            return None
        path.with_suffix("").mkdir(exist_ok=True)
        return path.with_suffix("")

    def result_file(self) -> Path | None:
        """Return the path at which a GGUF file is written and checked before it gets its name; None in memory."""
        return None if self.folder is None else self.folder / _RESULT

    def write(self, path: str | Path, text: str, overwrite: bool = False) -> None:
        """Write an output of the run. Its digest is saved before, so that a resumed run knows the file as its own.

        The temporary file is in the folder of the journal where possible, so that a killed run leaves it there.
        """
        replace, place = overwrite or self.has_written(path), None
        self.claim(path, text)
        if self.folder is not None and Path(os.path.realpath(path)).parent == self.folder.parent:  # one file system
            place = self.folder / f".{secrets.token_hex(8)}.partial"
        write_text(path, text, replace, place)

    def claim(self, path: str | Path, text: str) -> None:
        """Note that the run is about to write a file with this text, or a directory whose `RECORD` has this text."""
        if not is_special(path):
            self._written[os.path.realpath(path)] = hashlib.sha256(text.encode()).hexdigest()
            self._save()

    def has_written(self, path: str | Path) -> bool:
        """Return whether this run, before it was interrupted, has written the file or directory as it is now."""
        place = Path(os.path.realpath(path))
        digest = self._written.get(str(place))
        if digest is None:
            return False
        try:
            return hashlib.sha256((place / RECORD if place.is_dir() else place).read_bytes()).hexdigest() == digest
        except OSError:
            return False

    def _open(self, path: Path) -> None:
        if path.exists():
            document = _read(path)
            self._before, self.entries, self._written = document["about"], document["entries"], document["written"]
            self._about = {**document["about"]}

    def _save(self) -> None:
        if self.folder is not None:
            document = {"schema": SCHEMA, "about": self._about, "entries": self.entries, "written": self._written}
            write_text(self.folder / _ENTRIES, json.dumps(document))

    def _own_files(self) -> Iterator[Path]:
        if self.folder is not None and self.folder.is_dir():
            yield from (path for path in list(self.folder.iterdir()) if path.name != _LOCK and _is_own(path))

    def _delete(self) -> None:
        for path in self._own_files():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _release(self, keep: bool) -> None:
        """Release the lock; delete the folder unless entries are kept in it."""
        if self.folder is None:
            return
        if not keep:
            self._delete()
        self._held.close()
        with suppress(OSError):  # it has entries that are kept, or somebody has put a file there meanwhile
            self.folder.rmdir()


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a journal."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA or not all(
            isinstance(document[part], dict) for part in ("about", "entries", "written")
        ):
            raise ValueError(f"expected the schema {SCHEMA}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a journal that this version can read: {error}; move {path.parent} and start again"
        ) from error
    return document


def _refuse_other_files(folder: Path) -> None:
    """Raise if a folder is not a journal, or has files that no run of depthgauge has left there."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise InputError(f"{folder} is needed for the journal of the run, and something else is there; move it")
    for path in folder.iterdir():
        if not _is_own(path):
            raise InputError(f"{path} was not left there by an interrupted run; move it, or choose another --out")
        if path.name == _ENTRIES:
            _read(path)


def _is_own(path: Path) -> bool:
    """Return whether a file can be part of a journal."""
    if path.is_symlink() or not path.is_file():
        return not path.is_symlink() and path.is_dir() and bool(_OWN_FOLDERS.fullmatch(path.name))
    return path.name == _ENTRIES or (path.name == _LOCK and is_lock(path)) or bool(_OWN_NAMES.fullmatch(path.name))
