"""Output of a command: results on standard output, messages and progress on standard error."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from depthgauge.errors import OutputError
from depthgauge.progress import Step

stderr = Console(stderr=True)
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace output files that exist.")]
"""The type of every command's `overwrite` argument."""


def note(sentence: str) -> None:
    """Print a sentence on standard error."""
    stderr.print(sentence, markup=False, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print one JSON document on standard output, in ASCII. NaN and infinities are an error."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


@contextmanager
def printing_even_if_writing_fails(show: Callable[[], None]) -> Iterator[None]:
    """Run the block, which writes files, then print the result. A failed write is raised after that."""
    failure = None
    try:
        yield
    except OutputError as error:
        failure = error
    show()
    if failure is not None:
        raise failure


@contextmanager
def progress_bar(what: str) -> Iterator[Step]:
    """Show a progress bar on standard error; yield the function that updates it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def step(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{what} {label}".strip())

        yield step
