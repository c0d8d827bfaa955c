"""`depthgauge claims`: the ledger."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.cli.output import note, print_json, progress_bar

if TYPE_CHECKING:
    from depthgauge.ledger.claim import Finding

_EXAMPLES = """
**Examples**

`depthgauge claims --paper A` lists the statements of the layer-collapse paper with their verdicts.

`depthgauge claims --id A.4.1` tells the story of one: statement, witness worked through, what holds instead.

`depthgauge claims --out ledger.md` writes the whole ledger as a page.
"""


def command(
    paper: Annotated[str | None, typer.Option(help="Only the statements of A, B or ours.", show_default=False)] = None,
    id: Annotated[str | None, typer.Option("--id", help="Only this one, such as A.4.1.", show_default=False)] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Begin nothing after so many seconds, and stop searching; what is not done is undecided. What is "
            "being computed or proved then is finished first, a few seconds at most.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the ledger as a Markdown page.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of findings instead of a table.")] = False,
) -> None:
    """Which statements of the papers hold? Each is decided by a search for what breaks it."""
    from depthgauge._io import write_text
    from depthgauge.ledger.registry import run, select
    from depthgauge.ledger.story import page, story

    chosen = select(paper, id)
    with progress_bar("searching") as progress:
        findings = run(chosen, budget, progress=progress)
    if out is not None:
        write_text(out, page(findings))
    if as_json:
        print_json([finding.to_json() for finding in findings])
    elif id is not None:
        typer.echo(story(findings[0]))
    else:
        _print_table(findings)
    if out is not None:
        note(f"ledger written to {out}")


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES


def _print_table(findings: "list[Finding]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from depthgauge.ledger.claim import VERDICTS
    from depthgauge.ledger.story import ratio_text, short

    colours = {"holds": "green", "fails": "red", "misprint": "yellow", "undecided": "cyan"}
    table = Table(title="The ledger of claims", title_justify="left", expand=True)
    shares = {"id": 2, "statement": 5, "verdict": None, "ratio": None, "witness, or why undecided": 4}
    for name, share in shares.items():
        table.add_column(name, overflow="fold", no_wrap=share is None, ratio=share)
    for finding in findings:
        verdict = finding.observed.verdict
        cells = [finding.claim.id, finding.claim.statement, verdict, ratio_text(finding.observed.ratio), short(finding)]
        styled = [Text(cell, style=colours[verdict] if cell == verdict else "") for cell in cells]
        table.add_row(*styled)
    console = Console()
    console.print(table)
    counts = {verdict: sum(f.observed.verdict == verdict for f in findings) for verdict in VERDICTS}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count), highlight=False)
    console.print("`depthgauge claims --id ID` tells the story of one of them.", highlight=False)
