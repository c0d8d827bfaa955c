"""`depthgauge evaluate`: run tasks and measure perplexities on one or several checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from depthgauge.base.errors import OutputError
from depthgauge.cli.options import with_options
from depthgauge.cli.output import Overwrite, note, print_json, progress_bar
from depthgauge.results.evaluate_record import MODEL, TASKS, EvaluateOptions, EvaluateRecord


@with_options(EvaluateOptions, {TASKS: "Tasks and texts", MODEL: "Models"}, paths=("text", "tokenizer"))
def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Checkpoint directories, .gguf files or names on the hub. The others are compared with the first.",
            show_default=False,
        ),
    ],
    *,
    options: EvaluateOptions,
    out: Annotated[Path | None, typer.Option(help="Also write the result document to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write a page with charts (.html).")] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run standard tasks, and measure perplexities, on one or several checkpoints, item by item on the same items.

    **Examples**

    `depthgauge evaluate ./model ./smaller` lets both models answer 440 items of a built-in text (choose the true
    continuation among four) and compares them. It needs no download.

    `depthgauge evaluate ./model ./smaller --tasks hellaswag,arc_easy,piqa,winogrande --limit 500 --report tasks.html`
    runs tasks of lm-eval, which downloads their data, and writes a page with charts.

    `depthgauge evaluate ./model --tasks mine.yaml` runs a task of your own, in the format of lm-eval.

    `depthgauge evaluate ./model --tasks depthgauge_cloze --text corpus.txt` builds the items from your text.

    `depthgauge evaluate ./model ./smaller --perplexity wikitext2:wiki.test.raw` measures perplexity and bits per byte
    in windows of 2048 tokens.

    Tasks need the extra eval: `pip install '.[eval]'` in a clone of the project. Perplexity does not.
    """
    from depthgauge.workflows.evaluate import evaluate

    try:
        with progress_bar("evaluating") as progress:
            record = evaluate(
                models, options, out=out, report=report, overwrite=overwrite, progress=progress, message=note
            )
    except OutputError as error:
        if error.result is not None:  # the work is done: show what could not be written
            _print(error.result, as_json)
        raise
    _print(record, as_json)


def _print(record: EvaluateRecord, as_json: bool) -> None:
    if as_json:
        print_json(record.to_json())
        return
    from depthgauge.cli.print_document import print_section
    from depthgauge.results.evaluate_document import evaluate_document

    (section,) = evaluate_document(record).sections
    print_section(section)
