"""`depthgauge shrink`: write a checkpoint with fewer layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from depthgauge.base.errors import DepthgaugeError, InputError
from depthgauge.cli.options import with_options
from depthgauge.cli.output import Overwrite, note, print_json, progress_bar
from depthgauge.results.shrink_document import limit_failed, limit_sentence
from depthgauge.results.shrink_record import MODEL, SIZE, TEXT, PlanRecord, ShrinkOptions

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
        typer.Option(help="Directory to create, or a .gguf file.", rich_help_panel=_FILES),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write a page with charts (.html).", rich_help_panel=_FILES)
    ] = None,
    plan_only: Annotated[
        Path | None,
        typer.Option(help="Only search, and write the plan (.json).", rich_help_panel=_FILES),
    ] = None,
    from_plan: Annotated[
        Path | None,
        typer.Option(
            help="Remove the blocks of a plan of --plan-only. It may also be depthgauge.json of a shrunk model.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted run of this command.", rich_help_panel=_FILES),
    ] = False,
    overwrite: Overwrite = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables. Of several sizes, it is a list.")
    ] = False,
) -> None:
    """Write a smaller checkpoint: remove blocks, repair or train the rest, and bound what it costs.

    **Examples**

    - `depthgauge shrink ./model --data text.txt --remove 25% --recover 2M --out ./smaller`
    - `depthgauge shrink ./model --data text.txt --max-increase 0.1 --out ./smaller`
    - `depthgauge shrink ./model --data text.txt --remove 2,4,6 --out ./smaller`
    - `depthgauge shrink ./model --data text.txt --remove 7 --plan-only plan.json`
    - `depthgauge shrink ./model --from-plan plan.json --out ./smaller`
    - `depthgauge shrink HuggingFaceTB/SmolLM2-135M --remove 7 --out ./smaller`
    - `depthgauge shrink model.gguf --remove 25% --out smaller.gguf`
    - `depthgauge shrink ./vit --data photos --remove 3 --out ./smaller`
    - `torchrun --nproc-per-node 4 -m depthgauge shrink ./model --recover 20M …`
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
    if len(result.sizes) > 1 and as_json:
        print_json([one.to_json() for one in result.sizes])
    else:
        for one in result.sizes:
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
