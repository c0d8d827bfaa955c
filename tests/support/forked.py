"""A function in a forked process, which a test may kill. A new process would first import torch for seconds."""

import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable


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


def run_script(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """Stand for `subprocess.run` of [python, "-I", "-c", script, argument]: run the script in a forked process."""
    *_, script, argument = command
    with tempfile.TemporaryFile("w+") as errors:

        def run() -> None:
            os.dup2(errors.fileno(), 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            sys.argv = ["-c", argument]
            for name in [one for one in sys.modules if one.partition(".")[0] == "depthgauge"]:
                del sys.modules[name]  # the script must work without it
            try:
                exec(compile(script, "script", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)

        code = exit_code(forked(run))
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, "", errors.read())
