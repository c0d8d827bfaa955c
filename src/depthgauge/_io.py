"""Atomic writes: a file appears completely or not at all."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from depthgauge.errors import OutputError


def write_atomically(path: str | Path, write: Callable[[Path], None]) -> None:
    """Call `write` on a temporary file in the folder of `path`, then rename that file to `path`.

    If anything fails, the temporary file is deleted and `path` is left as it was.
    """
    target = Path(path)
    if os.path.isdir(target) or not target.name:
        raise OutputError(f"cannot write {target}: it is a directory; name a file")
    temporary = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        os.chmod(temporary, mode)  # some writers restrict the permissions; restore the default
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)
