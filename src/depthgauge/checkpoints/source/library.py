"""Access to the optional transformers library: a lazy import, an error that names the extra, silenced output."""

import platform
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from logging import getLogger
from typing import Any

from depthgauge._version import __version__
from depthgauge.base.errors import InputError, is_out_of_memory, optional
from depthgauge.base.format import one_line


class CheckpointError(InputError):
    """A checkpoint cannot be loaded, observed or gauged."""


def transformers() -> Any:
    """Import and return transformers; if it is missing, raise an error that names the extra to install."""
    return optional("transformers", "a checkpoint", "models")


def library_versions(**others: str) -> dict[str, str]:
    """Return the versions that a result depends on: of depthgauge, Python, torch and transformers, and `others`."""
    libraries = {"torch": import_module("torch"), "transformers": transformers()}
    versions = {name: str(library.__version__) for name, library in libraries.items()}
    return {"depthgauge": __version__, "python": platform.python_version(), **versions, **others}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the progress bars, log messages and warnings of transformers and accelerate; errors are still raised."""
    logging, other = transformers().utils.logging, getLogger("accelerate")
    verbosity, bars, level = logging.get_verbosity(), logging.is_progress_bar_enabled(), other.level
    logging.set_verbosity(logging.CRITICAL)
    other.setLevel(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), _without_gguf_progress_bar():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        other.setLevel(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _without_gguf_progress_bar() -> Iterator[None]:
    """Disable the progress bar of the GGUF loader, which ignores the library's own setting."""
    loader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    bar = loader.tqdm
    loader.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        loader.tqdm = bar


def attempt(name: str, what: str, load: Callable[[], Any], verb: str = "load") -> Any:
    """Load or compute `what`, such as `weights`, of a model; turn every exception into a `CheckpointError`.

    This is the one place that expects all exceptions, because transformers raises many kinds for a damaged checkpoint.
    `load` should consist of calls of transformers alone, so that mistakes of depthgauge are not taken for damage.
    """
    try:
        with quiet():
            return load()
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and many others
        if is_out_of_memory(error):
            raise CheckpointError(
                f"{name} does not fit into memory; use --device stream, --dtype bfloat16, --device spread or a larger "
                "machine"
            ) from error
        cause = short(error)
        if not isinstance(error, OSError | ValueError | RuntimeError):  # their messages are no sentences
            cause = f"{type(error).__name__}: {cause}"
        advice = "correct its configuration, or download it again"
        raise CheckpointError(f"cannot {verb} the {what} of {name}: {cause.rstrip('.')}; {advice}") from error


def short(error: BaseException) -> str:
    """Return an error message on one line, cut to 200 characters, without references to a log that is not shown."""
    return one_line(re.sub(r"\s*For details look at [^!]*above report!", "", str(error)) or type(error).__name__)
