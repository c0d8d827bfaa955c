"""The commands on the two papers: claims, separate and reproduce."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.cli.output import Overwrite, note, print_json, print_terms, progress_bar
from depthgauge.papers.reproduce.catalog import FIGURES, Figure

if TYPE_CHECKING:
    from depthgauge.papers.ledger.claim import Findings

_WIDE = 100
"""The width from which on the table of findings has a column for the witness."""
_STATEMENT = 30
"""The least width of the column of statements."""


def claims(
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
            "A computation that is running is finished first.",
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
    shown = Findings(finding for finding in findings if verdict in (None, finding.verdict))
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
    rows = [
        (finding.id, finding.verdict, ratio_text(finding.ratio), finding.statement, finding.reason())
        for finding in findings
    ]
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


def separate(
    kind: Annotated[str, typer.Option(help="Data sets and network: self, cross or regression.")] = "self",
    x: Annotated[str | None, typer.Option(help="QKᵀ: identity or ones (self, cross)  [default: identity].")] = None,
    n: Annotated[
        int | None, typer.Option(help="Number of tokens n; a multiple of d − 2 (self) or d − 1 (cross).")
    ] = None,
    d: Annotated[int | None, typer.Option(help="Width d of a token (self, cross)  [default: 22; 11].")] = None,
    m: Annotated[int | None, typer.Option(help="Number m of sign vectors  [default: the paper's].")] = None,
    a0: Annotated[
        float | None, typer.Option(help="Size of the special token of D₀ (self, cross)  [default: 0.01].")
    ] = None,
    a1: Annotated[
        float | None, typer.Option(help="Size of the special token of D₁ (self, cross)  [default: 1.2; 3].")
    ] = None,
    b: Annotated[
        str | None, typer.Option(help="Size of the repeated identity (self), or tied for 1 − c  [default: 0.2].")
    ] = None,
    c: Annotated[float | None, typer.Option(help="Size of the constant column (self)  [default: 0.8].")] = None,
    attention: Annotated[str, typer.Option(help="Attention compared with lin: exp, or poly:G of degree G.")] = "exp",
    models: Annotated[int, typer.Option(help="Number of random networks.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers; the same seed gives the same networks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """The probability that softmax attention tells D₁ from D₀ where linear attention does not.

    **Examples**

    `depthgauge separate --kind self --n 200 --d 22 --a1 1.2 --models 1000`

    `depthgauge separate --kind self --c 0.7 --b tied --x ones --json`

    `depthgauge separate --kind cross --attention poly:4 --json`
    """
    from depthgauge.papers.separation.probability import separate_setting
    from depthgauge.papers.separation.settings import build_setting

    with progress_bar("drawing") as step:
        setting = build_setting(kind, attention=attention, x=x, n=n, d=d, m=m, a0=a0, a1=a1, b=b, c=c)
        separation = separate_setting(setting, models, seed, step)
    if as_json:
        print_json(separation.to_json())
    else:
        typer.echo(separation.summary())


_EXAMPLES = """
**Examples**

`depthgauge reproduce A2 --out figures` writes A2.png, A2.svg, the rows (A2.csv), the settings (A2.json) and the caption
(A2.txt). Rows are stored as they are computed: run the same command again to resume.

`depthgauge reproduce B4 B5 --models 1000 --out figures`

`depthgauge reproduce --out figures --engine dask --scheduler tcp://10.0.0.1:8786` computes all figures on a cluster.

`depthgauge reproduce T1 --quick --out figures` trains small models for a few minutes and draws their accuracy.

**Figures**

"""


def _line(figure: Figure) -> str:
    panels = f" Panels: {figure.panels[0]} to {figure.panels[-1]}." if figure.panels else ""
    needs = f" Needs {' and '.join(need.label for need in figure.needs)}." if figure.needs else ""
    return f"- {figure.id}: {figure.shows}{panels}{needs}"


def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIGURE",
            help="Ids of figures or panels, such as A2 or B4a  [default: all figures without extra requirements].",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for ID.png, .svg, .csv, .json and .txt.")] = Path("figures"),
    models: Annotated[
        int | None, typer.Option(help="Repetitions of every point  [default: that of the figure].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers; the same seed gives the same points.")] = 0,
    store: Annotated[Path | None, typer.Option(help="File that keeps the rows  [default: OUT/figures.db].")] = None,
    engine: Annotated[str, typer.Option(help="local: processes on this machine; dask: a running cluster.")] = "local",
    scheduler: Annotated[str | None, typer.Option(help="Address of the Dask scheduler.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes of the local engine  [default: one per core].")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The small version of T1 to T4: minutes on a CPU instead of hours.")
    ] = False,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Rows of an earlier run (sweep --export, may be .gz) to draw from."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list of written files as JSON.")] = False,
) -> None:
    """Compute and draw the figures of this project and of the two papers."""
    from depthgauge.papers.reproduce.study import reproduce_all
    from depthgauge.sweeps.run import choose_engine

    chosen = choose_engine(engine, scheduler, jobs)
    with progress_bar("computing") as step:
        where = {"store": store, "engine": chosen, "rows": rows}
        done = reproduce_all(figures or [], out, models, seed, progress=step, overwrite=overwrite, quick=quick, **where)
    if as_json:
        print_json({"figures": [drawn.to_json() for drawn in done]})
        return
    for drawn in done:
        note(str(drawn))


reproduce.__doc__ = (reproduce.__doc__ or "") + "\n\n" + _EXAMPLES + "\n\n".join(map(_line, FIGURES.values()))
