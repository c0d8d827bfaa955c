"""The one door to transformers: imported when needed, kept quiet, and named when missing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from depthgauge.errors import InputError


class CheckpointError(InputError):
    """A checkpoint that cannot be loaded, observed or gauged."""


def transformers() -> Any:
    """The transformers library, or the error that names the extra it comes with."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers as library
    except ImportError as error:
        raise InputError(
            'gauging a checkpoint needs the extra `models`; install it with `pip install "depthgauge[models]"`'
        ) from error
    return library


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers without its progress bars and remarks; what matters comes as an error."""
    logging = transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), _unpacking_in_silence():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _unpacking_in_silence() -> Iterator[None]:
    """GGUF files are unpacked under a progress bar that heeds no setting."""
    unpacking: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    bar = unpacking.tqdm
    unpacking.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        unpacking.tqdm = bar
