"""`depthgauge reproduce`: compute and draw figures by id."""

from pathlib import Path
from typing import Annotated

import typer

from depthgauge.cli.output import Overwrite, note, print_json, progress_bar
from depthgauge.papers.reproduce.catalog import FIGURES, Figure

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


def command(
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


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES + "\n\n".join(map(_line, FIGURES.values()))
