"""The commands on networks and models that several options records describe: gauge, shrink, recover and evaluate."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from depthgauge.base.errors import DepthgaugeError, InputError, OutputError
from depthgauge.cli.options import with_options
from depthgauge.cli.output import AsJson, Overwrite, Page, note, print_json, progress_bar
from depthgauge.results.evaluate_record import TASKS, EvaluateOptions
from depthgauge.results.gauge_record import CHECKPOINTS, NETWORKS, PATHS, GaugeOptions
from depthgauge.results.recover_record import TRAINING, RecoverOptions
from depthgauge.results.shrink_document import limit_failed, limit_sentence
from depthgauge.results.shrink_record import SIZE, TEXT, PlanRecord, ShrinkOptions


def show(result: Any, as_json: bool) -> None:
    """Print a result, or a plan, as tables or as JSON."""
    if as_json:
        print_json(result.to_json())
        return
    from depthgauge.cli.print_document import print_section
    from depthgauge.report.page import document_of
    from depthgauge.results.shrink_document import plan_section

    is_plan = isinstance(result, PlanRecord)
    for section in (plan_section(result),) if is_plan else document_of(result).sections:
        print_section(section)


@contextmanager
def shown_at_failure(as_json: bool) -> Iterator[None]:
    """Print a result that could not be written: the work is done."""
    try:
        yield
    except OutputError as error:
        if error.result is not None:
            show(error.result, as_json)
        raise


@with_options(GaugeOptions, {CHECKPOINTS: "Checkpoints", NETWORKS: "Networks"}, paths=PATHS)
def gauge(
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
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write the result document to this file. The same command continues an interrupted run."
        ),
    ] = None,
    report: Page = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
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

    files: dict[str, Any] = {"out": out, "report": report, "overwrite": overwrite, "message": note}
    with shown_at_failure(as_json), progress_bar("gauging") as progress:
        result = gauge(target, options, progress=progress, **files)
    show(result, as_json)


@with_options(
    ShrinkOptions, {SIZE: "Size and guarantee", TEXT: "Data", CHECKPOINTS: "Model"}, paths=("text", "tokenizer")
)
def shrink(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint directory, a .gguf file, or a model on the Hugging Face hub: ORG/NAME or "
            "ORG/NAME/FILE.gguf, with @REVISION or without.",
            show_default=False,
        ),
    ],
    *,
    context: typer.Context,
    options: ShrinkOptions,
    out: Annotated[
        Path,
        typer.Option(
            help="Directory to create, a .gguf file, or plan.json to search only. The same command continues an "
            "interrupted run."
        ),
    ],
    report: Page = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a smaller checkpoint: remove blocks, repair or train the rest, and bound what it costs.

    **Examples**

    - `depthgauge shrink ./model --data text.txt --remove 25% --recover 2M --out ./smaller`
    - `depthgauge shrink ./model --data text.txt --max-increase 0.1 --out small`
    - `depthgauge shrink ./model --data text.txt --remove 2,4,6 --out ./smaller`
    - `depthgauge shrink ./model --data text.txt --remove 7 --out plan.json`
    - `depthgauge shrink ./model --remove plan.json --out ./smaller`
    - `depthgauge shrink HuggingFaceTB/SmolLM2-135M --remove 7 --out ./smaller`
    - `depthgauge shrink model.gguf --remove 25% --out smaller.gguf`
    - `depthgauge shrink ./vit --data photos --remove 3 --out ./smaller`
    - `torchrun --nproc-per-node 4 -m depthgauge shrink ./model --recover 20M …`
    """
    from depthgauge.workflows.shrink import PLAN_ENDING, plan_shrink, shrink

    context.obj.check_placement(options)
    files: dict[str, Any] = {"out": out, "overwrite": overwrite, "message": note}
    if out.suffix.lower() == PLAN_ENDING:
        if report is not None:
            raise InputError(f"{out} is a plan, of which there is no page; leave --report out")
        with progress_bar("searching") as progress:
            plan = plan_shrink(model, options, progress=progress, **files)
        show(plan, as_json)
        note(f"plan written to {out}; use it with --remove {out}")
        return
    with progress_bar("shrinking") as progress:
        result = shrink(model, options, report=report, progress=progress, **files)
    if len(result.sizes) > 1 and as_json:
        print_json([size.to_json() for size in result.sizes])
    else:
        for size in result.sizes:
            show(size.record, as_json)
    record = result.record
    if record.guarantee is not None and limit_failed(record.guarantee):  # it is printed, but there is no model
        raise DepthgaugeError(limit_sentence(record.guarantee, record.objective))


@with_options(RecoverOptions, {TRAINING: "Training", CHECKPOINTS: "Models"}, paths=("text", "tokenizer"))
def recover(
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
    out: Annotated[
        Path,
        typer.Option(
            help="Directory to create for the recovered checkpoint. The same command continues an interrupted run."
        ),
    ],
    report: Page = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train a smaller checkpoint to predict what its source predicts, on all of your text.

    **Examples**

    - `depthgauge recover ./smaller --teacher ./model --data text.txt --tokens 2M --out ./recovered`
    - `depthgauge recover ./smaller --teacher ./model --data text.txt --minutes 10 --out ./recovered --report page.html`
    - `depthgauge recover ./smaller --teacher ./model --data text.txt --general web.txt --out ./recovered`
    - `torchrun --nproc-per-node 4 -m depthgauge recover …`, or `accelerate launch`: on four GPUs

    Half of the training windows are from your text. The others keep the model general: the teacher writes them.
    """
    from depthgauge.workflows.recover import recover

    context.obj.check_placement(options)
    files: dict[str, Any] = {"out": out, "report": report, "overwrite": overwrite, "message": note}
    with progress_bar("recovering") as progress:
        result = recover(model, options, progress=progress, **files)
    show(result.record, as_json)


@with_options(EvaluateOptions, {TASKS: "Tasks and texts", CHECKPOINTS: "Models"}, paths=("text", "tokenizer"))
def evaluate(
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
    report: Page = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Run standard tasks, and measure perplexities, on one or several checkpoints, item by item on the same items.

    **Examples**

    - `depthgauge evaluate ./model ./smaller`: 440 items of a built-in text, without a download
    - `depthgauge evaluate ./model ./smaller --tasks hellaswag,piqa --limit 500 --report tasks.html`: tasks of lm-eval
    - `depthgauge evaluate ./model --tasks mine.yaml`: a task of your own, in the format of lm-eval
    - `depthgauge evaluate ./model --tasks depthgauge_cloze --data corpus.txt`: items from your text
    - `depthgauge evaluate ./model ./smaller --perplexity wikitext2:wiki.test.raw`: perplexity and bits per byte

    Tasks need the extra eval: `pip install '.[eval]'` in a clone of the project. Perplexity does not.
    """
    from depthgauge.workflows.evaluate import evaluate

    files: dict[str, Any] = {"out": out, "report": report, "overwrite": overwrite, "message": note}
    with shown_at_failure(as_json), progress_bar("evaluating") as progress:
        record = evaluate(models, options, progress=progress, **files)
    show(record, as_json)


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Directory to create.")] = Path("depthgauge-demo"),
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Write the model and its text, and run nothing.")
    ] = False,
) -> None:
    """Gauge a tiny trained decoder that depthgauge brings along, then remove blocks and train the others.

    It downloads nothing, and prints each command before it is run. It needs the extras models and report. On a terminal
    the pages are opened in the browser.
    """
    from depthgauge.workflows.demo import write_demo

    commands, verbs = write_demo(out), context.find_root().command
    for arguments in () if files_only else commands:
        note(f"\n$ {shlex.join(['depthgauge', *arguments])}")
        verbs.main(args=list(arguments), prog_name="depthgauge", standalone_mode=False, obj=context.obj)
        if sys.stdout.isatty():
            typer.launch(arguments[-1])
