"""Output of a command: results on standard output, messages and progress on standard error."""

import json
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from depthgauge.base.format import duration
from depthgauge.base.progress import Pace, Step

stderr = Console(stderr=True)
START_DELAY = 1.0
"""Seconds after which the first line of progress is printed; errors in the input come sooner."""
HEARTBEAT = 30.0
"""Seconds between two lines of progress where standard error is not a terminal."""
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace output files that exist.")]
Page = Annotated[Path | None, typer.Option("--report", help="Also write a page with charts (.html).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def note(sentence: str) -> None:
    """Print a sentence on standard error."""
    stderr.print(sentence, markup=False, highlight=False, soft_wrap=True)


def print_terms(terms: Mapping[str, str]) -> None:
    """Print terms and their meanings in two columns that fit the terminal; a long term gets a line of its own."""
    width = Console().width
    column = min(max(map(len, terms)), width // 3)
    for term, meaning in terms.items():
        first = f"{term:{column}}  " if len(term) <= column else f"{term}\n{'':{column}}  "
        rest = f"\n{'':{column}}  "
        typer.echo(first + rest.join(textwrap.wrap(meaning, width - column - 2, break_on_hyphens=False)))


def print_json(document: Any) -> None:
    """Print one JSON document on standard output, in ASCII. NaN and infinities are an error."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


@contextmanager
def progress_bar(what: str) -> Iterator[Step]:
    """Report the progress of `what` on standard error; yield the function that updates it.

    On a terminal this is a progress bar, which appears with the first update, so that a download before it can show its
    own. Elsewhere a plain line is printed at the start and every 30 seconds. Both have the time that the current loop
    still takes at its own pace.
    """
    if not stderr.is_terminal:
        with _plain_progress(what) as step:
            yield step
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    bar, pace = Progress(*columns, console=stderr, transient=True), Pace()
    task = bar.add_task(what, total=None, left="")

    def update(done: int, total: int, label: str) -> None:
        bar.start()
        left = _left(pace, done, total)
        bar.update(task, completed=done, total=total, description=f"{what} {label}".strip(), left=left)

    try:
        yield update
    finally:
        bar.stop()


def _left(pace: Pace, done: int, total: int) -> str:
    seconds = pace.left(done, total)
    return "" if seconds is None else f"{duration(seconds)} left"


@contextmanager
def _plain_progress(what: str) -> Iterator[Step]:
    """Print a line after `START_DELAY` seconds and another one every `HEARTBEAT` seconds, from a thread."""
    started, finished, state, pace = time.monotonic(), threading.Event(), [what, ""], Pace()

    def step(done: int, total: int, label: str) -> None:
        left = _left(pace, done, total)
        state[:] = f"{what}: {label}, {done} of {total}" if label else what, f", {left}" if left else ""

    def beat() -> None:
        if finished.wait(START_DELAY):
            return
        note(f"{what} …")
        while not finished.wait(HEARTBEAT):
            note(f"{state[0]} ({time.monotonic() - started:.0f} s{state[1]})")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield step
    finally:
        finished.set()
        thread.join()
