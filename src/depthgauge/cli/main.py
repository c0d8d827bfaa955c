"""The entry point: register the commands, and turn every error into one sentence and an exit code."""

import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

from depthgauge._version import __version__
from depthgauge.base.errors import DepthgaugeError, InputError, InterruptedRunError, is_out_of_memory
from depthgauge.base.format import one_line
from depthgauge.cli.model_commands import demo, evaluate, gauge, recover, shrink
from depthgauge.cli.network_commands import collapse, random, report, sweep
from depthgauge.cli.options import Verb
from depthgauge.cli.output import print_terms
from depthgauge.cli.paper_commands import claims, reproduce, separate
from depthgauge.cli.torchrun import LaunchedCommand
from depthgauge.results.labels import TERMS

app = typer.Typer(
    name="depthgauge",
    help="How deep is an attention network, really?\n\n"
    "depthgauge measures how much of a network's depth does useful work, proves it where a proof is possible, and "
    "removes what does nothing. Every command has --json: one document on standard output, messages and progress on "
    "standard error.",
    epilog="Start here: `depthgauge demo` gauges and shrinks a tiny model. `depthgauge gauge` without a target proves "
    "how deep a built-in pair of networks is. `depthgauge --glossary` explains the terms in the tables.",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (demo, gauge, shrink, recover, evaluate, collapse, random, sweep, report):
    app.command(cls=Verb, rich_help_panel="Your network or model")(verb)
for verb in (claims, separate, reproduce):
    app.command(cls=Verb, rich_help_panel="The two papers")(verb)


# Depending on its version, typer depends on click or contains a copy of it; this finds the error class in both.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
TRAINING = ("shrink", "recover")
"""The commands that several processes can run together, because they train."""
GONE = {
    "--heal": "--heal is gone: give --recover 2M, a number of tokens, or --recover 10min, a time",
    "--estimate": "--estimate is gone: a run says at its start whether it fits, and prints the time that is left",
    **{f"--{name}": f"--{name} is gone: --data takes files of every kind" for name in ("images", "pairs", "audio")},
    "--labels": "--labels is gone: give the file to --data, and for images also their folder to --data",
    **{
        f"--{name}": f"--{name} is gone: give --allow {what}"
        for name, what in (
            ("trust-remote-code", "code"),
            ("allow-pickle", "pickle"),
            ("ignore-unused", "unused"),
            ("force", "unread"),
        )
    },
    "--stream": "--stream is gone: give --device stream",
    "--device-map": "--device-map is gone: give --device spread",
    "--gguf-type": "--gguf-type is gone: give the type to --dtype",
    "--no-repair": "--no-repair is gone: give --recover none",
    "--plan-only": "--plan-only is gone: give --out a name that ends with .json",
    "--from-plan": "--from-plan is gone: give the plan to --remove",
    "--resume": "--resume is gone: the same command continues an interrupted run",
    "--weights-only": "--weights-only is gone: give --data none",
    "--no-what-if": "--no-what-if is gone: give --what-if none",
    "--sizes": "--sizes is gone: give --remove several numbers, such as --remove 2,4,6",
    "--as-is": "--as-is is gone: --data reads a file whose name ends with .txt as it is",
}
"""Former options, and what is said instead."""
# What typer returns when a command was interrupted, and what shells report for it.
_INTERRUPTED = InterruptedRunError.exit_code


def _print_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"depthgauge {__version__}")
        raise typer.Exit
    return asked


def _print_glossary(asked: bool) -> bool:
    if asked:
        print_terms(TERMS)
        raise typer.Exit
    return asked


@app.callback()
def _global_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    glossary: Annotated[
        bool,
        typer.Option("--glossary", callback=_print_glossary, is_eager=True, help="Explain the terms in the tables."),
    ] = False,
) -> None:
    if context.obj.count > 1 and context.invoked_subcommand not in TRAINING:
        raise InputError(
            f"depthgauge {context.invoked_subcommand} runs in one process; start it without torchrun, which is for the "
            f"training of {' and '.join(TRAINING)}"
        )


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 bad input, 130 interrupted, 1 any other failure.

    Errors are one sentence. Of the processes that torchrun starts, one prints.
    """
    # Caches of keys and values grow by one token at a time: let the memory that torch takes for them grow too.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does: temporary files are removed
    launch = LaunchedCommand()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print ? for characters that the terminal cannot show
    try:
        launch.join()
        if launch.index:
            from depthgauge.recovery.helpers import help_train

            help_train()
            code = 0
        else:
            code = app(args=sys.argv[1:] or ["--help"], prog_name="depthgauge", standalone_mode=False, obj=launch)
        if code == _INTERRUPTED:
            launch.fail("interrupted")
        sys.stdout.flush()  # notice a closed pipe here instead of at interpreter exit
    except DepthgaugeError as error:
        launch.fail(str(error))
        code = error.exit_code
    except _UsageError as error:
        usage: Any = error
        where = usage.ctx.command_path if usage.ctx is not None else "depthgauge"
        gone = GONE.get(getattr(usage, "option_name", ""))
        launch.fail(gone or f"{usage.format_message().rstrip('.')}; see `{where} --help`")
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        launch.fail("interrupted")
        code = _INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        if os.environ.get("DEPTHGAUGE_DEBUG"):
            raise
        if is_out_of_memory(error):
            sentence = "use fewer or shorter inputs, or --device stream, which keeps one block in memory at a time"
            launch.fail(f"memory ran out: {sentence} ({one_line(error, 100)})")
            code = 2
        else:
            launch.fail(f"unexpected {type(error).__name__}: {error} (set DEPTHGAUGE_DEBUG=1 for the traceback)")
            code = 1
    launch.end(code)
