"""`depthgauge shrink`: write a checkpoint with fewer layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.cli.options import with_options
from depthgauge.cli.output import Overwrite, note, print_json, progress_bar, resumable
from depthgauge.errors import DepthgaugeError, InputError
from depthgauge.results.shrink_options import MODEL, SIZE, TEXT, ShrinkOptions

if TYPE_CHECKING:
    from depthgauge.results.shrink_record import PlanRecord, ShrinkRecord
    from depthgauge.workflows.shrink import ShrinkResult

_PANELS = {SIZE: "Size and guarantee", TEXT: "Text", MODEL: "Model"}
_FILES = "Files"
_EXAMPLES = """
**Examples**

`depthgauge shrink ./model --text corpus.txt --remove 25% --out ./smaller --report shrink.html` removes a quarter of the
blocks, repairs the rest, writes a checkpoint that transformers loads, and a page with charts. Use text like the text
that the model will read: a few hundred kB, several files if it reads several kinds.

`depthgauge shrink ./model --text corpus.txt --max-increase 0.1 --confidence 0.95 --out ./smaller` removes as many
blocks as the guarantee allows: with confidence 95 %, the loss grows by at most 0.1 nats per token on 95 % of windows
like those of the text. If not even one block can be removed, nothing is written, and an error says how close it came.

`depthgauge shrink ./model --text corpus.txt --remove 7 --plan-only plan.json` searches for the blocks and stops. Read
the plan, then run `depthgauge shrink ./model --from-plan plan.json --out ./smaller`.

`depthgauge shrink ./model --remove 7 --out ./smaller` needs no text: the model is calibrated on text that it writes
itself, and the guarantee is about such text.

After an interruption, run the same command with `--resume`.
"""


@with_options(ShrinkOptions, _PANELS, paths=("text",))
def command(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A checkpoint directory or a .gguf file.", show_default=False),
    ],
    *,
    options: ShrinkOptions,
    out: Annotated[
        Path | None, typer.Option(help="Directory to create for the smaller checkpoint.", rich_help_panel=_FILES)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write a page with charts to this .html file.", rich_help_panel=_FILES)
    ] = None,
    plan_only: Annotated[
        Path | None,
        typer.Option(help="Only search, and write the plan to this .json file.", rich_help_panel=_FILES),
    ] = None,
    from_plan: Annotated[
        Path | None,
        typer.Option(
            help="Remove the blocks of this plan: a file of --plan-only, or depthgauge.json of a shrunk model.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the interrupted run of the same command.", rich_help_panel=_FILES),
    ] = False,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result document instead of tables.")] = False,
) -> None:
    """Write a smaller checkpoint: remove blocks, repair the rest, and bound what it costs."""
    from depthgauge._io import check_outputs
    from depthgauge.results.shrink_record import read_plan

    check_request(options, {"--out": out, "--report": report, "--plan-only": plan_only, "--from-plan": from_plan})
    inputs = {"MODEL": model, "--from-plan": from_plan, **{f"--text {path}": path for path in options.text or ()}}
    check_outputs({"--report": report, "--plan-only": plan_only}, inputs, overwrite=overwrite or resume)
    plan = None if from_plan is None else read_plan(from_plan)
    if plan_only is not None:
        _print_plan(_search(model, options, plan_only, resume, overwrite), as_json)
        note(f"plan written to {plan_only}; use it with --from-plan")
        return
    from depthgauge.surgery.journal import journal_folder
    from depthgauge.workflows.shrink import shrink

    with resumable(None if out is None else journal_folder(out)), progress_bar("shrinking") as progress:
        result = shrink(
            model, options, plan=plan, out=out, resume=resume, overwrite=overwrite, progress=progress, message=note
        )
    _print(result.record, as_json)
    if result.record.out is not None:
        note(f"model written to {result.record.out}")
    if report is not None:
        _write_page(result, report)
    _fail_without_model(result.record)


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES


def check_request(options: ShrinkOptions, files: Mapping[str, Path | None]) -> None:
    """Raise if options are missing or contradict each other.

    Args:
        options: the options.
        files: flag → path of `--out`, `--report`, `--plan-only` and `--from-plan`.
    """
    out, report, plan_only = files["--out"], files["--report"], files["--plan-only"]
    sizes = {
        "--remove": options.remove,
        "--max-increase": options.max_increase,
        "--from-plan": files["--from-plan"],
    }
    given = [flag for flag, value in sizes.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise InputError(f"give exactly one of --remove, --max-increase and --from-plan, got {found}")
    if plan_only is not None:
        if given == ["--from-plan"]:
            raise InputError("--plan-only makes a plan and --from-plan uses one; leave one of them out")
        for flag in ("--out", "--report"):
            if files[flag] is not None:
                raise InputError(f"--plan-only stops after the search, so there is nothing for {flag}; leave it out")
    elif out is None:
        raise InputError("--out is missing; give the directory to create, or --plan-only to search only")
    if out is not None and report is not None and out.resolve() in report.resolve().parents:
        raise InputError(f"--report {report} is inside --out, which is written as a whole; give a file next to it")


def _search(model: Path, options: ShrinkOptions, out: Path, resume: bool, overwrite: bool) -> "PlanRecord":
    from depthgauge.surgery.journal import journal_folder
    from depthgauge.workflows.shrink import plan_shrink

    with resumable(journal_folder(out)), progress_bar("searching") as progress:
        return plan_shrink(model, options, out=out, resume=resume, overwrite=overwrite, progress=progress, message=note)


def _fail_without_model(record: "ShrinkRecord") -> None:
    """Raise if no size stays within the limit: the result is printed, but there is no model."""
    from depthgauge.results.shrink_verdicts import limit_failed, limit_sentence

    if record.guarantee is not None and limit_failed(record.guarantee):
        raise DepthgaugeError(limit_sentence(record.guarantee, record.objective))


def _write_page(result: "ShrinkResult", page: Path) -> None:
    """Write the page. If its extra is missing, keep the result and print how to make the page from it."""
    from depthgauge._io import write_text
    from depthgauge.errors import MissingPackageError

    try:
        result.report(page)
        note(f"page written to {page}")
    except MissingPackageError as error:
        saved = Path(f"{page}.json")
        if result.record.out is not None:
            saved = Path(result.record.out) / "depthgauge.json"
        else:
            write_text(saved, result.record.dump())
        note(f"no page was written: {error}, then `depthgauge report {saved} --out {page}`. The result is in {saved}")


def _print(record: "ShrinkRecord", as_json: bool) -> None:
    if as_json:
        print_json(record.to_json())
        return
    from rich.console import Console

    from depthgauge.cli.network_tables import printable
    from depthgauge.cli.shrink_tables import shrink_tables
    from depthgauge.results.shrink_verdicts import shrink_verdict

    console = Console()
    for part in shrink_tables(record, console.width):
        console.print(part, highlight=False)
    console.print(f"→ {printable(shrink_verdict(record))}\n", style="bold", markup=False, highlight=False)


def _print_plan(plan: "PlanRecord", as_json: bool) -> None:
    if as_json:
        print_json(plan.to_json())
        return
    from rich.console import Console

    from depthgauge.cli.shrink_tables import plan_tables

    console = Console()
    for part in plan_tables(plan, console.width):
        console.print(part, highlight=False)
