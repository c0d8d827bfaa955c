"""`depthgauge claims`: check the statements of the ledger."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.cli.output import Overwrite, note, print_json, print_terms, progress_bar

if TYPE_CHECKING:
    from depthgauge.papers.ledger.claim import Findings


def command(
    paper: Annotated[
        str | None, typer.Option(help="Check only the statements of A, B or ours.", show_default=False)
    ] = None,
    id: Annotated[
        str | None,
        typer.Option("--id", help="Check only this statement, such as A.4.1, and print its story.", show_default=False),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Time limit in seconds. After it no check starts and searches stop; the rest is undecided. "
            "A computation that is running is finished first, which takes a few seconds at most.",
            show_default=False,
        ),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the statements without checking them.")] = False,
    verdict: Annotated[
        str | None,
        typer.Option(help="Show only this verdict: holds, fails, misprint or undecided.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the ledger as a Markdown page.", show_default=False)
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of findings instead of a table.")] = False,
) -> None:
    """Check the numbered statements of two papers by searching for counterexamples.

    Paper A is "Only Large Weights (And Not Skip Connections) Can Prevent the Perils of Rank Collapse". Paper B is
    "Superiority of Softmax: Unveiling the Performance Edge Over Linear Attention". The
    verdicts are holds (no counterexample found by this search, which is not a proof), fails (counterexample, verified
    exactly), misprint (counterexample to the printed form, none found to the intended form) and undecided.

    **Examples**

    `depthgauge claims --list` lists all statements at once, without checking them.

    `depthgauge claims --paper A` lists the statements of paper A with their verdicts.

    `depthgauge claims --id A.4.1` prints the story of one statement: witness, intermediate values, corrected statement.

    `depthgauge claims --paper A --verdict fails` shows the statements with a counterexample.

    `depthgauge claims --out ledger.md` writes the whole ledger as a Markdown page.
    """
    from depthgauge.base.errors import unknown_name
    from depthgauge.base.io import check_outputs, write_text
    from depthgauge.papers.ledger.claim import VERDICTS, Findings
    from depthgauge.papers.ledger.registry import page, run, select

    if verdict is not None and verdict not in VERDICTS:
        raise unknown_name("verdict", verdict, VERDICTS)
    check_outputs({"--out": out}, {}, overwrite=overwrite)
    chosen = select(paper, id)
    if only_list and as_json:
        print_json([{"id": claim.id, "paper": claim.paper, "statement": claim.statement} for claim in chosen])
    elif only_list:
        print_terms({claim.id: claim.statement for claim in chosen})
    if only_list:
        return
    with progress_bar("searching") as progress:
        findings = run(chosen, budget, progress=progress)
    shown = Findings(found for found in findings if verdict in (None, found.verdict))
    try:
        if out is not None:
            write_text(out, page(findings), replace=overwrite)
    finally:
        if as_json:  # also if the file cannot be written
            print_json(shown.to_json())
        elif id is not None and shown:
            typer.echo(shown[0].story)
        else:
            _print_table(shown)
    if out is not None:
        note(f"ledger written to {out}")


def _print_table(findings: "Findings") -> None:
    """Print a table of the findings, or a list where a table would leave the statements too little room."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from depthgauge.papers.ledger.claim import ratio_text

    console = Console()
    rows = [(found.id, found.verdict, ratio_text(found.ratio), found.statement, found.reason()) for found in findings]
    room = console.width - sum(max(map(len, cells)) + 3 for cells in list(zip(*rows, strict=True))[:3]) - 4
    if room < _STATEMENT:
        print_terms({id: f"{verdict}, ratio {ratio}: {statement}" for id, verdict, ratio, statement, _ in rows})
    else:
        colours = {"holds": "green", "fails": "red", "misprint": "yellow", "undecided": "cyan"}
        wide = console.width >= _WIDE
        table = Table(title="The ledger of claims", title_justify="left", expand=True)
        for name in ("id", "verdict", "ratio"):
            table.add_column(name, no_wrap=True)
        table.add_column("statement", overflow="fold", ratio=5)
        if wide:
            table.add_column("witness, or why undecided", overflow="fold", ratio=4)
        for row in rows:
            table.add_row(*(Text(cell, style=colours.get(cell, "")) for cell in (row if wide else row[:-1])))
        console.print(table)
    console.print(findings.summary(), highlight=False)
    console.print("`depthgauge claims --id ID` prints the witness and the story of one statement.", highlight=False)


_WIDE = 100
"""The width from which on the table has a column for the witness."""
_STATEMENT = 30
"""The least width of the column of statements."""
