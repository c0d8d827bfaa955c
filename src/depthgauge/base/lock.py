"""Locks: at most one process writes an output, and the system releases the lock when that process ends."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from depthgauge.base.errors import InputError, OutputError

PATIENCE = 0.5
"""Seconds for which a process retries to lock; `holder_of` holds the lock for much less than that."""
_BEGINS = b'{"pid": '
"""How the content of every lock file begins; a file with other content is not a lock and is never changed."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock: process id, host name, start time (UTC)."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def file_lock(path: Path, what: str, hint: str = "") -> Iterator[None]:
    """Hold the lock file `path`, which is deleted when the lock is released; create its folder if that is missing.

    An error names `what` the lock protects and the process that holds it, and ends with `hint`.
    """
    try:
        handle = _acquire(path, what, hint)
    except OSError as error:
        raise OutputError(f"cannot lock {what}: {error.strerror or error}") from error
    try:
        with suppress(OSError):  # if the disk is full, the run itself reports it
            os.truncate(handle, 0)
            holder = Holder(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))
            os.pwrite(handle, json.dumps(asdict(holder)).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the lock is released, so that the file of another run is never removed
        os.close(handle)


def is_lock(path: Path) -> bool:
    """Return whether a file is a lock file: it is empty or begins as every lock file does."""
    with open(path, "rb") as handle:
        return _BEGINS.startswith(handle.read(len(_BEGINS)))


def _acquire(path: Path, what: str, hint: str) -> int:
    deadline = time.monotonic() + PATIENCE
    while True:
        path.parent.mkdir(exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # another process has just deleted the folder
            if time.monotonic() > deadline:
                raise
            continue
        if _try_lock(handle) and _is_file(handle, path):
            if not is_lock(path):
                os.close(handle)
                raise InputError(f"{path} is not a lock file of depthgauge; move it, or give another output")
            return handle
        holder = _read(handle)
        os.close(handle)
        if time.monotonic() > deadline:
            who = str(holder) if holder is not None else "another process"
            raise InputError(f"{what} is in use by {who}; wait until it ends or stop it{hint}")
        time.sleep(0.02)


def _try_lock(handle: int) -> bool:
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file(handle: int, path: Path) -> bool:
    """Whether `path` still names the locked file; the previous holder removes its file when it ends."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _read(handle: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(handle, 4096, 0)))
    except (OSError, ValueError, TypeError):  # the holder is writing it at this moment
        return None


def holder_of(path: Path) -> Holder | None:
    """Return the process that holds a lock file now, or None."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return None if _try_lock(handle) else _read(handle) or Holder(0, "unknown", "unknown")
    finally:
        os.close(handle)
