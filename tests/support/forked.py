"""A function in a forked process, which a test may kill. A new process would first import torch for seconds."""

import io
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import IO, Any


def forked(run: Callable[[], object]) -> int:
    """Start `run` in a forked process, and return the number of the process."""
    with warnings.catch_warnings():
        # Python 3.12 warns because worker processes of pytest-xdist have a second thread. The child does not use it.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    return child


def exit_code(child: int) -> int:
    """Wait for the process, and return its exit code: −9 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class ForkedScript:
    """Stands for `subprocess.Popen` of [python, "-I", "-c", script, …]: runs the script in a forked process.

    It runs when `communicate` is called with its input, and not before.
    """

    def __init__(self, command: list[str], *, stderr: IO[str], **_: object) -> None:
        self.script, self.arguments = command[3], command[4:]
        self.errors, self.returncode = os.dup(stderr.fileno()), 0

    def communicate(self, given: bytes | None = None) -> None:
        if given is None:
            return

        def run() -> None:
            os.dup2(self.errors, 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            sys.stdin, sys.argv = io.StringIO(given.decode()), ["-c", *self.arguments]
            for name in [one for one in sys.modules if one.partition(".")[0] == "depthgauge"]:
                del sys.modules[name]  # the script must work without it
            try:
                exec(compile(self.script, "script", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)

        self.returncode = exit_code(forked(run))

    def kill(self) -> None:
        os.close(self.errors)


def check_in_forks(patch: Any) -> None:
    """Let `shrink` check what it wrote in a forked process."""
    from depthgauge.surgery import verify

    patch.setattr(verify, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedScript}))
