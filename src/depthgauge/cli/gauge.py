"""`depthgauge gauge`: the main job."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthgauge.cli.output import print_json, progress_bar, talk

if TYPE_CHECKING:
    from depthgauge.workflows.gauge_checkpoint import ModelOptions
    from depthgauge.workflows.gauge_network import Gauge

_MODELS = "Checkpoints"
_EXAMPLES = """
**Examples**

`depthgauge gauge` gauges a built-in pair: the same 12-layer network at small and at large weights.

`depthgauge gauge net.safetensors --tokens 256 --radius 0.5` gauges a network file on random inputs.

`depthgauge gauge net.safetensors --input x.safetensors --json` uses your inputs (tensor `x`, [tokens, dim] or
[samples, tokens, dim]) and prints the result document.

`depthgauge gauge net.safetensors --report page.html` also writes a page with charts that opens in any browser.

`depthgauge gauge ./my-model --text corpus.txt --out r.json` gauges a checkpoint: what every head does on the text, and
what the model loses without each layer. `--resume` goes on after an interruption.
"""


def command(
    target: Annotated[
        Path | None,
        typer.Argument(
            help="A network file, a checkpoint directory, a .gguf file; nothing: the built-in pair.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Random inputs to draw  [default: 4].")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each  [default: 128]; of a checkpoint's text in all  [default: 2048].")
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="Their largest |entry| φ; they are uniform in the box  [default: 1].")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed they are drawn from  [default: 0].")] = None,
    input: Annotated[Path | None, typer.Option(help="Read the inputs from this safetensors file instead.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the result document to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write a page with charts to this .html file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result document instead of tables.")] = False,
    text: Annotated[Path | None, typer.Option(help="Text to gauge a checkpoint on.", rich_help_panel=_MODELS)] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window  [default: 512].", rich_help_panel=_MODELS)
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            help="What to leave out of each layer: block,attention,mlp  [default], uniform, parallel, or all.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    no_what_if: Annotated[
        bool, typer.Option("--no-what-if", help="Only observe: a quick look.", rich_help_panel=_MODELS)
    ] = False,
    depth: Annotated[
        float | None,
        typer.Option(help="Remove layers while the loss grows by at most this.", rich_help_panel=_MODELS),
    ] = None,
    max_removed: Annotated[int | None, typer.Option(help="Remove at most so many.", rich_help_panel=_MODELS)] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="No text: what the weights say.", rich_help_panel=_MODELS)
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Number type  [default: float32 on a CPU, the checkpoint's own on a GPU].", rich_help_panel=_MODELS
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device  [default: a GPU if there is one].", rich_help_panel=_MODELS)
    ] = None,
    device_map: Annotated[
        str | None, typer.Option(help="Spread over devices, as transformers does: auto.", rich_help_panel=_MODELS)
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.", rich_help_panel=_MODELS),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the same command was interrupted.", rich_help_panel=_MODELS)
    ] = False,
) -> None:
    """Measure how much of a network's or a checkpoint's depth does work."""
    from depthgauge.workflows.gauge_network import gauge

    with progress_bar("measuring") as progress:
        options = _model_options(
            target,
            {
                "text": text,
                "window": window,
                "what_if": "none" if no_what_if and what_if is None else what_if,
                "depth": depth,
                "max_removed": max_removed,
                "weights_only": weights_only or None,
                "dtype": dtype,
                "device": device,
                "device_map": device_map,
                "trust_remote_code": trust_remote_code or None,
                "resume": resume or None,
            },
            out,
        )
        if no_what_if and what_if is not None:
            raise typer.BadParameter("--what-if and --no-what-if exclude each other")
        result = gauge(
            target,
            samples=samples,
            tokens=tokens,
            radius=radius,
            seed=seed,
            input=input,
            options=options,
            progress=progress,
        )
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
    from depthgauge.report.write import MissingExtraError, write_report

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


def _model_options(target: Path | None, given: dict[str, Any], out: Path | None) -> "ModelOptions | None":
    """The flags for checkpoints, gathered; with any other target the first of them is refused."""
    from depthgauge.checkpoints.load import Placement, is_checkpoint
    from depthgauge.errors import InputError
    from depthgauge.workflows.gauge_checkpoint import ModelOptions

    asked = {name: value for name, value in given.items() if value is not None}
    if target is None or not is_checkpoint(target):
        if asked:
            flag = next(iter(asked)).replace("_", "-")
            what = "the built-in pair" if target is None else str(target)
            raise InputError(f"--{flag} is for checkpoints, which are directories or .gguf files, and not for {what}")
        return None
    placement = {name: asked.pop(name) for name in Placement.__dataclass_fields__ if name in asked}

    def say(sentence: str) -> None:
        talk.print(sentence, markup=False, highlight=False, soft_wrap=True)

    return ModelOptions(placement=Placement(**placement), out=out, say=say, **asked)


def _print_tables(result: "Gauge") -> None:
    from rich.console import Console

    from depthgauge._format import number
    from depthgauge.cli.checkpoint_tables import model_tables
    from depthgauge.cli.network_tables import depth_table, profile_table, sandwich_table

    console = Console()
    for subject in result.to_json()["subjects"]:
        if subject["kind"] == "model":
            for part in model_tables(subject):
                console.print(part, highlight=False)
            console.print(f"→ {subject['verdict']}\n", style="bold", markup=False, highlight=False)
            continue
        console.print(profile_table(subject))
        reach = number(subject["radius"], 6)
        title = f"How far one layer can be from all of them, for every input with |entries| ≤ {reach}"
        rows = [{**row, **subject["printed"]} for row in subject["collapse"]]
        console.print(sandwich_table(rows, title))
        if subject["depth"]:
            console.print(depth_table(subject["depth"], len(subject["layers"])))
        console.print(f"→ {subject['verdict']}\n", style="bold", markup=False, highlight=False)
