"""`depthgauge shrink`: write a checkpoint with fewer layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from depthgauge.base.errors import DepthgaugeError, InputError
from depthgauge.cli.options import with_options
from depthgauge.cli.output import Overwrite, note, print_json, progress_bar
from depthgauge.results.shrink_options import MODEL, SIZE, TEXT, ShrinkOptions
from depthgauge.results.shrink_record import PlanRecord
from depthgauge.results.shrink_verdicts import limit_failed, limit_sentence

_PANELS = {SIZE: "Size and guarantee", TEXT: "Data", MODEL: "Model"}
_FILES = "Files"


@with_options(ShrinkOptions, _PANELS, paths=("text", "tokenizer"))
def command(
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
        Path | None,
        typer.Option(help="Directory to create for the smaller checkpoint, or a .gguf file.", rich_help_panel=_FILES),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write a page with charts to this .html file.", rich_help_panel=_FILES)
    ] = None,
    plan_only: Annotated[
        Path | None,
        typer.Option(help="Only search, and write the plan to this .json file.", rich_help_panel=_FILES),
    ] = None,
    from_plan: Annotated[
        Path | None,
        typer.Option(
            help="Remove the blocks of this plan: a file of --plan-only, or depthgauge.json of a shrunk model.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the interrupted run of the same command.", rich_help_panel=_FILES),
    ] = False,
    overwrite: Overwrite = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result document instead of tables; with --sizes, a list of them.")
    ] = False,
) -> None:
    """Write a smaller checkpoint: remove blocks, repair and train the rest, and bound what it costs.

    **Examples**

    `depthgauge shrink ./model --text corpus.txt --remove 25% --recover 2M --out ./smaller --report shrink.html` removes
    a quarter of the blocks, repairs the rest, trains it on two million tokens, writes a checkpoint that transformers
    loads, and a page with charts. Use text like the text that the model will read: a few hundred kB, several files if
    it reads several kinds. Without `--recover`, the model is trained on a GPU and not on a CPU.

    `depthgauge shrink ./model --text corpus.txt --max-increase 0.1 --confidence 0.95 --out ./smaller` removes as many
    blocks as the guarantee allows: with confidence 95 %, the loss grows by at most 0.1 nats per token on 95 % of
    windows like those of the text. If not even one block can be removed, nothing is written, and an error says how
    close it came.

    `depthgauge shrink ./model --text corpus.txt --remove 7 --plan-only plan.json` searches for the blocks and stops.
    Read the plan, then run `depthgauge shrink ./model --from-plan plan.json --out ./smaller`.

    `depthgauge shrink ./model --remove 7 --out ./smaller` needs no text: the model is calibrated on text that it writes
    itself, and the guarantee is about such text.

    `depthgauge shrink ./vit --data photos --data labels.csv --remove 3 --out ./smaller` shrinks a model of images, and
    measures the accuracy of its classification head. `--data` and `--text` are the same option.

    `depthgauge shrink ./model --text corpus.txt --sizes 2,4,6,8 --out ./smaller --report sizes.html` searches once and
    writes `./smaller-2`, `./smaller-4` and so on, and one page with the loss, size and speed of each.

    `depthgauge shrink ./model --remove-layers 12-18 --out ./smaller` removes exactly these blocks.

    `depthgauge shrink HuggingFaceTB/SmolLM2-135M --remove 7 --out ./smaller` shrinks a model on the hub, from the cache
    of huggingface_hub; a model that is not there is downloaded first.

    `depthgauge shrink model.gguf --text corpus.txt --remove 25% --out smaller.gguf` writes a GGUF file that llama.cpp
    loads, quantized as the source is, and `smaller.depthgauge.json` with the result next to it.

    `torchrun --nproc-per-node 4 -m depthgauge shrink ./model --text corpus.txt --remove 25% --recover 20M --out
    ./smaller` trains on four GPUs; the rest runs on the first one.

    After an interruption, run the same command with `--resume`.
    """
    outputs = {"--out": out, "--report": report, "--plan-only": plan_only, "--from-plan": from_plan}
    check_request(options, outputs)
    from depthgauge.workflows.shrink import plan_shrink, shrink

    context.obj.check_placement(options)
    files: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "message": note}
    if plan_only is not None:
        with progress_bar("searching") as progress:
            plan = plan_shrink(model, options, out=plan_only, progress=progress, **files)
        _print(plan, as_json)
        note(f"plan written to {plan_only}; use it with --from-plan")
        return
    with progress_bar("shrinking") as progress:
        result = shrink(model, options, plan=from_plan, out=out, report=report, progress=progress, **files)
    made = (result,) if options.sizes is None else result.sizes
    if options.sizes is not None and as_json:
        print_json([one.to_json() for one in made])
    else:
        for one in made:
            _print(one.record, as_json)
    record = result.record
    if record.guarantee is not None and limit_failed(record.guarantee):  # it is printed, but there is no model
        raise DepthgaugeError(limit_sentence(record.guarantee, record.objective))


def check_request(options: ShrinkOptions, files: Mapping[str, Path | None]) -> None:
    """Raise if options, or the flags of `files`, are missing or contradict each other."""
    out, plan_only = files["--out"], files["--plan-only"]
    if plan_only is not None:
        if files["--from-plan"] is not None:
            raise InputError("--plan-only makes a plan and --from-plan uses one; leave one of them out")
        for flag in ("--out", "--report"):
            if files[flag] is not None:
                raise InputError(f"--plan-only stops after the search, so there is nothing for {flag}; leave it out")
    elif out is None:
        raise InputError(
            "--out is missing; give the directory or the .gguf file to create, or --plan-only to search only"
        )


def _print(record: Any, as_json: bool) -> None:
    if as_json:
        print_json(record.to_json())
        return
    from depthgauge.cli.print_document import print_section
    from depthgauge.results.shrink_document import plan_section, shrink_document

    print_section(plan_section(record) if isinstance(record, PlanRecord) else shrink_document(record).sections[0])
