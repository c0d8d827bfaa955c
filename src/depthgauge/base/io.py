"""Safe output files: checked before the work starts, written atomically, never replaced unless asked.

- A regular file appears completely or not at all.
- A symbolic link is followed: the file it points to is replaced, the link stays.
- Devices and named pipes are written to; they are never replaced by a regular file.
"""

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from depthgauge.base.errors import InputError, OutputError, require_path


def write_atomically(
    path: str | Path, write: Callable[[Path], None], replace: bool = True, place: Path | None = None
) -> None:
    """Call `write` on a temporary file in the folder of `path`, then rename that file to `path`; see `atomic_file`."""
    with atomic_file(path, replace, place) as temporary:
        write(temporary)


@contextmanager
def atomic_file(path: str | Path, replace: bool = True, place: Path | None = None) -> Iterator[Path]:
    """Yield a temporary file to write to, and rename it to `path` at the end of the context.

    If anything fails, the temporary file is deleted and `path` is left as it was. With `replace=False`, a file that
    exists is an error; another process may have created it during the work. The temporary file is `place`, or a new one
    in the folder of `path`; both must be on one file system.
    """
    target = _target(path)
    special = is_special(target)
    folder = Path(tempfile.gettempdir()) if special else target.parent
    temporary = place or folder / f".{secrets.token_hex(8)}.partial"
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        if special:
            with open(temporary, "rb") as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink)
            return
        os.chmod(temporary, mode)  # some writers restrict the permissions; restore the default
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        if replace:
            os.replace(temporary, target)
        else:
            _rename_new(temporary, target)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _rename_new(temporary: Path, target: Path) -> None:
    """Rename a file to a name that must not exist yet."""
    exists = FileExistsError(errno.EEXIST, "another process has created it meanwhile; give another name")
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise exists from None
    except OSError:  # this file system has no hard links
        if target.exists():
            raise exists from None
        os.replace(temporary, target)


def write_text(path: str | Path, text: str, replace: bool = True, place: Path | None = None) -> None:
    """Write `text` to `path` as UTF-8, atomically; with `replace=False`, a file that exists is an error.

    The temporary file is `place`, if it is given; see `atomic_file`.
    """

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write, replace, place)


def write_tensors(path: str | Path, state: object) -> None:
    """Write a collection of tensors with `torch.save`, atomically."""
    import torch

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as handle:
            try:
                torch.save(state, handle)
            except RuntimeError as error:  # torch raises its own error in place of that of a full disk
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    write_atomically(path, write)


def check_outputs(
    outputs: Mapping[str, str | Path | None],
    inputs: Mapping[str, str | Path | None],
    *,
    overwrite: bool = False,
    is_own: Callable[[str | Path], bool] = lambda path: False,
) -> None:
    """Check that all outputs of a command can be written, before any long work.

    `outputs` and `inputs` map each option to its path, or to None if it was not given. No output may replace an input
    or a file in a directory of inputs. An output that exists is an error unless `overwrite` is set or the run that is
    resumed has written it (`is_own`).
    """
    seen = {os.path.realpath(path): option for option, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        require_folder(path)
        target = _target(path)
        if is_special(target):
            continue
        place = Path(os.path.realpath(path))
        other = seen.setdefault(str(place), option)
        if other != option:
            raise InputError(f"{option} and {other} are the same file, {path}; give another {option}")
        for name, given in inputs.items():
            if given is not None and target.exists() and Path(os.path.realpath(given)) in place.parents:
                raise InputError(f"{path} is a file of {name} {given}, which is only read; give another {option}")
        if target.exists() and not overwrite and not is_own(path):
            raise InputError(f"{path} exists; use --overwrite to replace it, or give another {option}")
        _check_writable(path, target)


def require_folder(path: str | Path) -> None:
    """Raise InputError unless `path` can name a file and its folder exists; create nothing."""
    try:
        _target(path)
    except OutputError as error:
        raise InputError(str(error)) from error


def make_folder(path: Path, option: str) -> None:
    """Create a folder and those above it, unless they exist; `option` is what names the folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        files = (f"{file} is a file" for file in (path, *path.parents) if file.is_file())
        why = next(files, error.strerror or str(error))
        raise OutputError(f"cannot create the folder {path}: {why}; give another {option}") from error


def _target(path: str | Path) -> Path:
    """Return the file that a write to `path` changes, with symbolic links followed; raise if there can be none."""
    given = require_path("path", path)
    try:
        given.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a name that is too long, a file where a folder should be
        raise OutputError(f"cannot write {given}: {error.strerror or error}") from error
    if not given.name or given.is_dir():
        raise OutputError(f"cannot write {given}: it is a directory; give the name of a file")
    target = Path(os.path.realpath(given)) if given.is_symlink() else given
    if not target.parent.is_dir():
        raise OutputError(
            f"cannot write {given}: there is no folder {target.parent}; create it: mkdir -p {target.parent}"
        )
    return target


def is_special(path: str | Path) -> bool:
    """Return whether a path is a device or a named pipe."""
    path = Path(path)
    return path.exists() and not path.is_file() and not path.is_dir()


def _check_writable(path: str | Path, target: Path) -> None:
    """Create and delete a file next to the output; permissions, full disks and read-only file systems show here."""
    trial = target.parent / f".{secrets.token_hex(8)}.partial"
    try:
        trial.touch()
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            trial.unlink(missing_ok=True)
