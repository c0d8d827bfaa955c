"""`depthgauge recover`: distil a smaller checkpoint towards the one that it was made from."""

from pathlib import Path
from typing import Annotated, Any

import typer

from depthgauge.cli.options import with_options
from depthgauge.cli.output import Overwrite, note, print_json, progress_bar
from depthgauge.results.recover_record import MODEL, TRAINING, RecoverOptions


@with_options(RecoverOptions, {TRAINING: "Training", MODEL: "Models"}, paths=("text", "tokenizer"))
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="SMALL",
            help="The smaller checkpoint, whoever removed its blocks: a directory, a .gguf file or a name on the hub.",
            show_default=False,
        ),
    ],
    *,
    context: typer.Context,
    options: RecoverOptions,
    out: Annotated[Path | None, typer.Option(help="Directory to create for the recovered checkpoint.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write a page with charts (.html).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of this command.")] = False,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Train a smaller checkpoint to predict what its source predicts, on all of your text.

    **Examples**

    `depthgauge recover ./smaller --teacher ./model --text corpus.txt --tokens 2M --out ./recovered` trains on two
    million tokens: half of them from your text, half written by the teacher, which keeps the model general.

    `depthgauge recover ./smaller --teacher ./model --text corpus.txt --minutes 10 --out ./recovered --report page.html`
    trains for ten minutes, and writes a page with the curve.

    `depthgauge recover ./smaller --teacher ./model --text corpus.txt --general web.txt --out ./recovered` takes the
    second half from a file.

    `accelerate launch --num-processes 4 -m depthgauge recover ./smaller --teacher ./model --text corpus.txt --out
    ./recovered` trains on four GPUs; `torchrun --nproc-per-node 4 -m depthgauge recover …` does the same.

    `depthgauge shrink ./model --text corpus.txt --remove 25% --recover 2M --out ./smaller` removes, recovers and
    certifies in one command. After an interruption, run the same command with `--resume`.
    """
    from depthgauge.base.errors import InputError
    from depthgauge.workflows.recover import recover

    if out is None:
        raise InputError("--out is missing; give the directory to create for the recovered checkpoint")
    context.obj.check_placement(options)
    files: dict[str, Any] = {"out": out, "report": report, "resume": resume, "overwrite": overwrite}
    with progress_bar("recovering") as progress:
        result = recover(model, options, progress=progress, message=note, **files)
    if as_json:
        print_json(result.to_json())
        return
    from depthgauge.cli.print_document import print_section
    from depthgauge.results.recover_document import recover_document

    (section,) = recover_document(result.record).sections
    print_section(section)
