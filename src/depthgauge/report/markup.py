"""Texts, commands and tables as the page shows them; the templates escape them."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge.base.format import DASH, printable


def capital(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def percent(value: float | None) -> str:
    """Return a share of 1 in percent, with one decimal.

    >>> percent(0.0433), percent(1e-9)
    ('4.3 %', '< 0.1 %')
    """
    if value is None:
        return DASH
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def span(values: Sequence[int]) -> str:
    """Return the smallest and the largest of a few counts.

    >>> span([2, 2]), span([2, 4, 3])
    ('2', '2–4')
    """
    return "–".join(str(value) for value in sorted({min(values), max(values)})) if values else DASH


def command_line(verb: str, options: Mapping[str, Any], *targets: str | None) -> str:
    """Return a command, every word quoted for a shell.

    In `options`, True is a flag, and a tuple is an option that is repeated. `targets` are the arguments of the verb.

    >>> command_line("gauge", {"tokens": 8}, "my net.st")
    "depthgauge gauge --tokens 8 'my net.st'"
    >>> command_line("shrink", {"max_increase": 0.1, "text": ("a", "b"), "no_repair": True}, "model")
    'depthgauge shrink --max-increase 0.1 --text a --text b --no-repair model'
    """
    words = ["depthgauge", verb]
    for name, given in options.items():
        flag = f"--{name.replace('_', '-')}"
        for value in given if isinstance(given, tuple) else (given,):
            if value is True:
                words.append(flag)
                continue
            plain = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
            words += [f"{flag}={plain}"] if plain.startswith("-") else [flag, plain]
    given_targets = [target for target in targets if target is not None]
    words += ["--"] if any(target.startswith("-") for target in given_targets) else []
    words += given_targets
    return " ".join(shlex.quote(printable(word)) for word in words)


Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """A table of strings and numbers; the first cell of a row is its heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column has numbers and no strings."""
        columns = [{type(row[k]) for row in self.rows} for k in range(len(self.columns))]
        return [bool(found & {int, float}) and str not in found for found in columns]


def settings_table(settings: Mapping[str, Any]) -> Table:
    """Return the settings of a run as a table."""
    return Table("Settings", ("setting", "value"), tuple((name, _setting(value)) for name, value in settings.items()))


def _setting(value: Any) -> Cell:
    if value is None or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    return json.dumps(value, ensure_ascii=False)
