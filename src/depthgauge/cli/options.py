"""Build a command's options from an options record, so that each option is declared in one place.

`--help` shows the options that a new user needs, and `--help-all` shows all of them.
"""

import copy
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand

from depthgauge.results.record import RARE, Record, annotation_of


class Verb(TyperCommand):
    """A command. If it has hidden options, `--help` shows the others with one sentence each, and `--help-all` all."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; typer calls this for `--help`."""
        hidden = any(getattr(parameter, "hidden", False) for parameter in self.params)
        self._print_help(ctx, formatter, is_all=not hidden)

    def _print_help(self, ctx: Any, formatter: Any, is_all: bool) -> None:
        shown: Any = copy.copy(self)
        shown.params = [copy.copy(parameter) for parameter in self.params]
        for parameter in shown.params:
            if is_all:
                parameter.hidden = False
            else:
                parameter.rich_help_panel = None
                parameter.help = re.sub(r"\. .*", ".", parameter.help)
        if not is_all:
            shown.add_help_option = False
            shown.epilog = f"`{ctx.command_path} --help-all` shows all options."
        TyperCommand.format_help(shown, ctx, formatter)

    @staticmethod
    def print_all(context: typer.Context, asked: bool) -> None:
        """Print all options and exit, if this is asked."""
        if asked:
            verb: Any = context.command
            verb._print_help(context, context.make_formatter(), is_all=True)
            raise typer.Exit


_HelpAll = Annotated[
    bool,
    typer.Option("--help-all", help="Show all options.", is_eager=True, hidden=True, callback=Verb.print_all),
]


def with_options(record: type[Record], panels: Mapping[str, str], paths: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Decorate a command whose argument `options` is a record: each field becomes an option of the command line.

    Args:
        record: the record; its docstring has the help text of every field, and every field is `Annotated` with the
            kind of target it applies to.
        panels: kind of target → heading under which `--help` lists its options.
        paths: names of the options that are file paths.

    A field that is a tuple becomes an option that may be repeated.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = [field for field in record.__struct_fields__ if field not in record.__annotations__]
        fields = [*record.__annotations__, *shared]

        @functools.wraps(command)
        def run(*args: Any, **arguments: Any) -> None:
            del arguments["help_all"]
            chosen = {name: arguments.pop(name) for name in fields}
            plain = {name: _plain(value) for name, value in chosen.items()}
            options = record(**{name: value for name, value in plain.items() if value is not None})
            command(*args, options=options, **arguments)

        parameters = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name == "options":
                parameters += [_parameter(record, field, panels, field in paths) for field in fields]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters.append(
            inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_HelpAll)
        )
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _plain(value: Any) -> Any:
    """Return a value of the command line as a record holds it: paths as strings, lists as tuples.

    A flag that is not given arrives as False, and an option that may be repeated as an empty list; both mean None.
    """
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value)) or None
    return None if value is False else str(value) if isinstance(value, Path) else value


def _parameter(record: type[Record], name: str, panels: Mapping[str, str], is_path: bool) -> inspect.Parameter:
    kind: Any
    annotation = annotation_of(record, name)
    meta, plain = annotation.__metadata__[0], annotation.__origin__
    if isinstance(plain, types.UnionType):  # one path or several may be given by keyword
        *_, plain = (kind for kind in get_args(plain) if kind is not types.NoneType)
    flag, panel = f"--{name.replace('_', '-')}", panels.get(meta.extra["only"] or "")
    metavar, default = None, False if plain is bool else None
    if get_origin(plain) is tuple:  # the option may be repeated
        entry: Any = Path if is_path else get_args(plain)[0]
        kind, metavar = list[entry] | None, f"<{entry.__name__.lower()}>"
    else:
        kind = bool if plain is bool else (Path if is_path else plain) | None
    flags = ("--data", flag) if name == "text" else (flag,)
    hidden = RARE in annotation.__metadata__
    option = typer.Option(*flags, help=_documented(record)[name], rich_help_panel=panel, metavar=metavar, hidden=hidden)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _documented(record: type[Record]) -> dict[str, str]:
    """Return the text of each attribute in the docstrings of a record and its base classes, on one line."""
    parts = [(inspect.getdoc(base) or "").partition("Attributes:\n")[2] for base in record.__mro__]
    texts = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", "\n".join(parts), re.MULTILINE)
    return {name: " ".join(text.split()).replace(" [default", "  [default") for name, text in texts}
