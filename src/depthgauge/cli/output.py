"""Where a verb's words go: results on standard output, talk and progress on standard error."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from depthgauge.progress import Step

talk = Console(stderr=True)


def print_json(document: Any) -> None:
    """Write one JSON document to standard output, in ASCII whatever the terminal speaks; NaN never appears in it."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


@contextmanager
def progress_bar(what: str) -> Iterator[Step]:
    """A progress bar on standard error that vanishes when done; yields the function that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def step(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{what} {label}".strip())

        yield step
