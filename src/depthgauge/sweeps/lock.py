"""One run at a time on a store: a lock that names its holder and dies with it."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from depthgauge.errors import InputError, OutputError

PATIENCE = 0.5
"""Seconds a run keeps trying: whoever only looks holds the lock for less than that."""


@dataclass(frozen=True)
class Holder:
    """Who runs on a store: process, machine, and when it began (UTC)."""

    pid: int
    host: str
    since: str

    @classmethod
    def me(cls) -> "Holder":
        """This process, from now on."""
        return cls(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def lock_path(store: Path) -> Path:
    """The file beside a store that a run locks."""
    return store.with_name(store.name + ".lock")


@contextmanager
def run_lock(store: Path) -> Iterator[None]:
    """Hold the store for one run; a second run is refused by name. The system lets go when the process dies."""
    path = lock_path(store)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire(path, store)
    except OSError as error:
        raise OutputError(f"cannot lock {store}: {error.strerror or error}") from error
    try:
        with suppress(OSError):  # a full disk must not keep a run from saying so itself
            os.truncate(handle, 0)
            os.pwrite(handle, json.dumps(asdict(Holder.me())).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is still held, so that nobody else's file is removed
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
                f"{store} is in use by {who}; wait for it or stop it (`depthgauge sweep --status {store}` reads on)"
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
    """Whether the locked file is still the one at its path: a holder that ended has removed its own."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _read(handle: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(handle, 4096, 0)))
    except (OSError, ValueError, TypeError):  # being written this very moment
        return None


def holder_of(store: Path) -> Holder | None:
    """Who runs on a store at this moment, if anyone does."""
    try:
        handle = os.open(lock_path(store), os.O_RDONLY)
    except OSError:
        return None
    try:
        return None if _try_lock(handle) else _read(handle) or Holder(0, "unknown", "unknown")
    finally:
        os.close(handle)
