"""Output of a command: results on standard output, messages and progress on standard error."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from depthgauge.progress import Step

stderr = Console(stderr=True)
talk = stderr


def note(sentence: str) -> None:
    """Print a sentence on standard error."""
    stderr.print(sentence, markup=False, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print one JSON document on standard output, in ASCII. NaN and infinities are an error."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


@contextmanager
def progress_bar(what: str) -> Iterator[Step]:
    """Show a progress bar on standard error; yield the function that updates it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def step(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{what} {label}".strip())

        yield step
