"""`depthgauge reproduce`: the papers' figures by id."""

from pathlib import Path
from typing import Annotated

import typer

from depthgauge.cli.output import print_json, progress_bar, talk

_EXAMPLES = """
**Examples**

`depthgauge reproduce B4a --out figures`

`depthgauge reproduce B4 B5 --models 1000 --out figures`
"""


def command(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIGURE]...",
            help="Panels B3a–b, B4a–f, B5a–f, B7a–e, or sheets B3, B4, B5, B7, B-degree  [default: all sheets].",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The directory for ID.png, ID.svg, ID.csv and ID.json.")] = Path("figures"),
    models: Annotated[int | None, typer.Option(help="Networks drawn for a point  [default: as in the paper].")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same points.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Say what was written as JSON.")] = False,
) -> None:
    """Draw figures of the softmax-against-linear paper, with the exact curve beside the drawn models."""
    from depthgauge.studies.reproduce import reproduce_all

    with progress_bar("computing") as step:
        done = reproduce_all(figures or [], out, models, seed, step)
    if as_json:
        print_json(
            {"figures": [{"figure": d.figure, "points": d.points, "files": list(map(str, d.files))} for d in done]}
        )
        return
    for drawn in done:
        files = ", ".join(map(str, drawn.files))
        talk.print(
            f"{drawn.figure}: {drawn.points} points, wrote {files}", markup=False, highlight=False, soft_wrap=True
        )


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES
