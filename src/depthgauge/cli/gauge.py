"""`depthgauge gauge`: measure a network or a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthgauge.base.errors import OutputError
from depthgauge.cli.options import with_options
from depthgauge.cli.output import Overwrite, note, print_json, progress_bar
from depthgauge.results.gauge_record import PATHS, GaugeOptions

if TYPE_CHECKING:
    from depthgauge.workflows.gauge import GaugeResult


@with_options(GaugeOptions, {"checkpoints": "Checkpoints", "networks": "Networks"}, paths=PATHS)
def command(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A network file, a checkpoint directory, a .gguf file, or a model on the Hugging Face hub: "
            "ORG/NAME or ORG/NAME/FILE.gguf, with @REVISION or without. Default: a built-in pair of networks.",
            show_default=False,
        ),
    ] = None,
    *,
    options: GaugeOptions,
    out: Annotated[Path | None, typer.Option(help="Also write the result document to this file.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted run with this --out.", rich_help_panel="Checkpoints"),
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Also write a page with charts (.html).")] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure how much of a network's or a checkpoint's depth does useful work.

    **Examples**

    - `depthgauge gauge`: a built-in pair of networks
    - `depthgauge gauge net.safetensors --tokens 256 --radius 0.5`: random inputs
    - `depthgauge gauge net.safetensors --input x.safetensors --json`: your inputs
    - `depthgauge gauge ./model --data text.txt --report page.html`: a checkpoint
    - `depthgauge gauge HuggingFaceTB/SmolLM2-135M`: a model on the hub
    - `depthgauge gauge ./vit --data photos`: a model of images
    """
    from depthgauge.workflows.gauge import gauge

    files: dict[str, Any] = {"out": out, "report": report, "resume": resume, "overwrite": overwrite}
    try:
        with progress_bar("gauging") as progress:
            result = gauge(target, options, progress=progress, message=note, **files)
    except OutputError as error:
        if error.result is not None:  # the work is done: show what could not be written
            _print(error.result, as_json)
        raise
    _print(result, as_json)


def _print(result: "GaugeResult", as_json: bool) -> None:
    if as_json:
        print_json(result.to_json())
        return
    from depthgauge.cli.print_document import print_section
    from depthgauge.results.gauge_document import gauge_document

    for section in gauge_document(result).sections:
        print_section(section)
