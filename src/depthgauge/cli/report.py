"""`depthgauge report`: write the page of a saved result or of the log of a training run."""

from pathlib import Path
from typing import Annotated

import typer

from depthgauge.cli.output import Overwrite, note, print_json


def command(
    result: Annotated[
        Path,
        typer.Argument(
            metavar="RESULT",
            help="The file that `gauge --out` or `evaluate --out` wrote, depthgauge.json of a shrunk model, or the log "
            "of a training run.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The page to write  [default: RESULT.html].")] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the path and size of the page as JSON.")] = False,
) -> None:
    """Write a page of a saved result: charts, tables, and the command that reproduces it.

    **Examples**

    `depthgauge gauge --out result.json`, then `depthgauge report result.json` writes result.html next to it: one page
    that opens from disk in any browser and makes no network requests.

    `depthgauge report result.json --out page.html` writes the page to another file.

    `depthgauge report smaller/depthgauge.json --out page.html` writes the page of a checkpoint that `depthgauge shrink`
    wrote.

    `depthgauge report runs/x` writes runs/x.html: the page of a training run that `depthgauge.Monitor` logs to the
    directory runs/x. The run may still be going on.

    The page needs the extra report: `pip install '.[report]'` in a clone of the project.
    """
    from depthgauge.base.io import check_outputs
    from depthgauge.report.page import write_report

    page = _page_of(result) if out is None else out
    check_outputs({"--out": page}, {"RESULT": result}, overwrite=overwrite)
    write_report(result, page)
    if as_json:
        print_json({"out": str(page), "bytes": page.stat().st_size})
    else:
        note(f"page written to {page}")


def _page_of(result: Path) -> Path:
    """Return the default name of a page: next to the result, with its name."""
    if result.is_dir():
        whole = result.resolve()  # the name of `.` or `..`
        return (result if result.name else whole).parent / f"{whole.name}.html"
    return result.parent / f"{result.stem}.html"
