"""The lock of a store: at most one run writes to it, and the system releases it when that process ends."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from depthgauge._io import require_folder
from depthgauge.errors import InputError, OutputError

PATIENCE = 0.5
"""Seconds for which a run retries to lock; `holder_of` holds the lock for much less than that."""


@dataclass(frozen=True)
class Holder:
    """The process that holds the lock of a store: process id, host name, start time (UTC)."""

    pid: int
    host: str
    since: str

    @classmethod
    def me(cls) -> "Holder":
        """Describe this process, starting now."""
        return cls(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def lock_path(store: Path) -> Path:
    """Return the path of the lock file, beside the store."""
    return store.with_name(store.name + ".lock")


@contextmanager
def run_lock(store: Path) -> Iterator[None]:
    """Hold the lock of a store during a run.

    Args:
        store: the file of the store. It may be missing; its folder must exist.

    Raises:
        InputError: there is no such folder, or another process holds the lock; the message names the process.
        OutputError: the lock file cannot be created.
    """
    require_folder(store)
    path = lock_path(store)
    try:
        handle = _acquire(path, store)
    except OSError as error:
        raise OutputError(f"cannot lock {store}: {error.strerror or error}") from error
    try:
        with suppress(OSError):  # if the disk is full, the run itself reports it
            os.truncate(handle, 0)
            os.pwrite(handle, json.dumps(asdict(Holder.me())).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the lock is released, so that the file of another run is never removed
        os.close(handle)


def _acquire(path: Path, store: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if _try_lock(handle) and _is_file(handle, path):
            return handle
        holder = _read(handle)
        os.close(handle)
        if time.monotonic() > deadline:
            who = str(holder) if holder is not None else "another process"
            raise InputError(
                f"{store} is in use by {who}; wait until it ends or stop it "
                f"(`depthgauge sweep --status {store}` works while it runs)"
            )
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


def holder_of(store: Path) -> Holder | None:
    """Return the process that is running on a store now, or None."""
    try:
        handle = os.open(lock_path(store), os.O_RDONLY)
    except OSError:
        return None
    try:
        return None if _try_lock(handle) else _read(handle) or Holder(0, "unknown", "unknown")
    finally:
        os.close(handle)
