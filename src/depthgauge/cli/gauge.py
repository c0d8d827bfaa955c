"""`depthgauge gauge`: the main job."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.cli.output import print_json, progress_bar, talk

if TYPE_CHECKING:
    from depthgauge.studies.gauge import Gauge

_EXAMPLES = """
**Examples**

`depthgauge gauge` gauges a built-in pair: the same 12-layer network at small and at large weights.

`depthgauge gauge net.safetensors --tokens 256 --radius 0.5` gauges a network file on random inputs.

`depthgauge gauge net.safetensors --input x.safetensors --json` uses your inputs (tensor `x`, [tokens, dim] or
[samples, tokens, dim]) and prints the result document.

`depthgauge gauge net.safetensors --report page.html` also writes a page with charts that opens in any browser.
"""


def command(
    target: Annotated[
        Path | None, typer.Argument(help="A network file; nothing: the built-in pair.", show_default=False)
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Random inputs to draw  [default: 4].")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of each  [default: 128].")] = None,
    radius: Annotated[
        float | None, typer.Option(help="Their largest |entry| φ; they are uniform in the box  [default: 1].")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed they are drawn from  [default: 0].")] = None,
    input: Annotated[Path | None, typer.Option(help="Read the inputs from this safetensors file instead.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the result document to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write a page with charts to this .html file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result document instead of tables.")] = False,
) -> None:
    """Measure how much of a network's depth does work."""
    from depthgauge.studies.gauge import gauge

    with progress_bar("measuring") as progress:
        result = gauge(target, samples=samples, tokens=tokens, radius=radius, seed=seed, input=input, progress=progress)
    if out is not None:
        result.save(out)
    if as_json:
        print_json(result.to_json())
    else:
        _print_tables(result)
    if out is not None:
        talk.print(f"result written to {out}", markup=False, highlight=False, soft_wrap=True)
    if report is not None:
        _write_page(result, report, out)


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES


def _write_page(result: "Gauge", page: Path, saved: Path | None) -> None:
    """Write the page; without its extra, keep the result and say how to get the page from it."""
    from depthgauge.report.report import MissingExtraError, write_report

    try:
        write_report(result, page)
        words = f"page written to {page}"
    except MissingExtraError as error:
        if saved is None:
            saved = Path(f"{page}.json")
            result.save(saved)
        then = f"then `depthgauge report {saved} --out {page}`"
        words = f"no page was written, the result is kept in {saved}; {error}, {then}"
    talk.print(words, markup=False, highlight=False, soft_wrap=True)


def _print_tables(result: "Gauge") -> None:
    from rich.console import Console

    from depthgauge.cli.tables import depth_table, profile_table, sandwich_table

    console = Console()
    for subject in result.to_json()["subjects"]:
        console.print(profile_table(subject))
        title = f"How far one layer can be from all of them, for every input with |entries| ≤ {subject['radius']:g}"
        rows = [{**row, **subject["printed"]} for row in subject["collapse"]]
        console.print(sandwich_table(rows, title))
        if subject["depth"]:
            console.print(depth_table(subject["depth"], len(subject["layers"])))
        console.print(f"→ {subject['verdict']}\n", style="bold", markup=False, highlight=False)
