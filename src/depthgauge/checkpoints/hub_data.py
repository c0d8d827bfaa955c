"""Data sets on the Hugging Face hub: what their names look like, and how their documents are read."""

import logging
import os
import re
import socket
import urllib.request
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from depthgauge.base.errors import InputError, missing_extra
from depthgauge.checkpoints.inputs.text_files import MESSAGES, TEXT, TextFile, document_of, find_text, split_field
from depthgauge.checkpoints.library import short

_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>[^:]+))?(?::(?P<field>.+))?", re.ASCII)
_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "httpx", "fsspec", "evaluate")


@dataclass(frozen=True)
class HubData:
    """A data set on the hub, `ORG/NAME@REVISION` or `ORG/NAME@REVISION:FIELD`.

    - `repo`: the repository
    - `revision`: a commit, or a tag
    - `field`: the field that holds the text; by default `text`, or `messages` if there is no `text`
    """

    repo: str
    revision: str
    field: str | None = None

    @property
    def name(self) -> str:
        """The name in results."""
        return f"{self.repo}@{self.revision}" + (f":{self.field}" if self.field else "")


NO_GENERAL = "none"
"""What is given for the general text in order to train on the user's texts alone."""


def find_general(given: str | None) -> TextFile | HubData | None:
    """Return what `--general` names; None for the teacher's own continuations, and for `NO_GENERAL`.

    What exists here is a file.

    Raises:
        InputError: the file cannot be read, or the data set is named without a revision.
    """
    if given is None or given == NO_GENERAL:
        return None
    found = _NAME.fullmatch(given)
    if found is None or os.path.exists(split_field(given)[0]):
        return find_text(given)
    if found["revision"] is None:
        raise InputError(
            f"{given} is no file here, and a data set on the hub needs a revision, because it may change and the "
            f"result must be reproducible: give {found['name']}@COMMIT, with a commit of "
            f"https://huggingface.co/datasets/{found['name']}/commits/main"
        )
    return HubData(found["name"], found["revision"], found["field"])


def hub_documents(data: HubData, render: Callable[[list[Any]], str]) -> Generator[str, None, None]:
    """Yield the documents of the part `train` of a data set, one after the other, without downloading all of it.

    Each is followed by an empty line. `render` converts the messages of a chat to text; see `document_of`.

    Raises:
        InputError: the data set cannot be read, or has no such field.
    """
    for number, record in enumerate(_records(data), start=1):
        field = data.field or (MESSAGES if TEXT not in record and MESSAGES in record else TEXT)
        yield document_of(record, field, f"document {number} of {data.name}", render)


def _records(data: HubData) -> Iterator[dict[str, Any]]:
    try:
        library: Any = import_module("datasets")
    except ImportError as error:
        raise missing_extra("a data set on the hub", "train") from error
    try:
        with quiet_datasets(), offline_if_unreachable():
            yield from library.load_dataset(data.repo, revision=data.revision, split="train", streaming=True)
    except Exception as error:  # datasets, huggingface_hub and their HTTP library raise errors of many kinds
        raise InputError(
            f"cannot read the data set {data.name}: {short(error).rstrip('.')}; check its name and its revision, run "
            "the command again when the hub can be reached, or give a file"
        ) from error


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Suppress the log messages, progress bars and warnings of datasets and lm-eval; errors are still raised."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets: Any = import_module("datasets")
        shown = datasets.are_progress_bars_disabled()
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            if not shown:
                datasets.enable_progress_bars()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Use only data in the cache if the hub has no address here; the libraries would try for half a minute."""
    constants: Any = import_module("huggingface_hub.constants")
    settings: Any = import_module("datasets.config")
    before = constants.HF_HUB_OFFLINE, settings.HF_HUB_OFFLINE
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, settings.HF_HUB_OFFLINE = before
