"""`depthgauge report`: a page from saved results."""

from pathlib import Path
from typing import Annotated

import typer

from depthgauge.cli.output import note, print_json

_EXAMPLES = """
**Examples**

`depthgauge gauge --out result.json`, then `depthgauge report result.json` writes result.html beside it: one page that
opens from disk, in any browser, without a network.

`depthgauge report result.json --out page.html` says where.

The page needs the extra report: `pip install 'depthgauge[report]'`.
"""


def command(
    result: Annotated[
        Path, typer.Argument(metavar="RESULT.json", help="What `gauge --out` wrote.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="The page  [default: RESULT with the ending .html].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where the page is and its size as JSON.")] = False,
) -> None:
    """Make a page of a saved result: charts, tables, and how to reproduce it."""
    from depthgauge.report.write import write_report

    page = write_report(result, result.parent / f"{result.stem}.html" if out is None else out)
    if as_json:
        print_json({"out": str(page), "bytes": page.stat().st_size})
    else:
        note(f"page written to {page}")


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES
