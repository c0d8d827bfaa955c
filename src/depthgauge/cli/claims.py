"""`depthgauge claims`: check the statements of the ledger."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.cli.output import Overwrite, note, print_json, printing_even_if_writing_fails, progress_bar

if TYPE_CHECKING:
    from depthgauge.ledger.finding import Findings

_EXAMPLES = """
**Examples**

`depthgauge claims --paper A` lists the statements of paper A with their verdicts.

`depthgauge claims --id A.4.1` prints the story of one statement: witness, intermediate values, corrected statement.

`depthgauge claims --out ledger.md` writes the whole ledger as a Markdown page.
"""


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
    """
    from depthgauge._io import check_outputs, write_text
    from depthgauge.ledger.registry import run, select
    from depthgauge.ledger.story import page

    check_outputs({"--out": out}, {}, overwrite=overwrite)
    chosen = select(paper, id)
    with progress_bar("searching") as progress:
        findings = run(chosen, budget, progress=progress)
    with printing_even_if_writing_fails(lambda: _print(findings, as_json, one=id is not None)):
        if out is not None:
            write_text(out, page(findings))
    if out is not None:
        note(f"ledger written to {out}")


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES


def _print(findings: "Findings", as_json: bool, one: bool) -> None:
    if as_json:
        print_json(findings.to_json())
    elif one:
        typer.echo(findings[0].story)
    else:
        _print_table(findings)


def _print_table(findings: "Findings") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from depthgauge.ledger.finding import ratio_text

    colours = {"holds": "green", "fails": "red", "misprint": "yellow", "undecided": "cyan"}
    table = Table(title="The ledger of claims", title_justify="left", expand=True)
    shares = {"id": 2, "statement": 5, "verdict": None, "ratio": None, "witness, or why undecided": 4}
    for name, share in shares.items():
        table.add_column(name, overflow="fold", no_wrap=share is None, ratio=share)
    for finding in findings:
        verdict = finding.verdict
        cells = [finding.id, finding.statement, verdict, ratio_text(finding.ratio), finding.reason()]
        styled = [Text(cell, style=colours[verdict] if cell == verdict else "") for cell in cells]
        table.add_row(*styled)
    console = Console()
    console.print(table)
    console.print(findings.summary(), highlight=False)
    console.print("`depthgauge claims --id ID` prints the story of one statement.", highlight=False)
