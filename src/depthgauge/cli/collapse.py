"""`depthgauge collapse`: write the shallower network."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.base.format import counted
from depthgauge.cli.output import Overwrite, note, print_json, progress_bar

if TYPE_CHECKING:
    from depthgauge.results.gauge_record import CollapseRecord


def command(
    network: Annotated[Path, typer.Argument(help="The network file.", show_default=False)],
    method: Annotated[
        str, typer.Option(help="identity, last-layer, parallel, mean-field, corrected or fitted.")
    ] = "mean-field",
    radius: Annotated[
        float | None, typer.Option(help="Certify every input with |entries| up to this  [default: 1].")
    ] = None,
    ball: Annotated[
        float | None, typer.Option(help="Certify every input whose tokens have at most this length instead.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Certify every sequence of the vectors in this file instead: tensors embeddings, and positions if any."
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Certify inputs of this many tokens; with --tokens, of at most this many  [default: any]."),
    ] = None,
    effort: Annotated[str, typer.Option(help="default, or high: sharper bounds, slower.")] = "default",
    seed: Annotated[int, typer.Option(help="Seed of the attack and of `fitted`.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the shallower network to this file.")] = None,
    witness: Annotated[
        Path | None, typer.Option(help="Write the input that attains the lower bound to this file.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Replace a network by a shallower one, and prove how far apart the two can be.

    **Examples**

    `depthgauge collapse net.safetensors --out one.safetensors` replaces the network by one mean-field layer and bounds
    the difference between the two on every input with entries up to 1.

    `depthgauge collapse net.safetensors --method corrected --radius 0.5 --effort high --json` proves a sharper bound.

    `depthgauge collapse net.safetensors --tokens tokens.safetensors --length 64` bounds the difference for every
    prompt: every sequence of up to 64 of these tokens.

    `depthgauge collapse causal.safetensors --length 64` replaces a causal network by one causal layer whose heads have
    position biases for up to 64 tokens.

    `depthgauge collapse net.safetensors --method parallel --witness x.safetensors` writes the input on which the attack
    found the largest difference; `depthgauge gauge net.safetensors --input x.safetensors` reads it.

    **Methods**, for weights of size η: identity and last-layer (error O(η)), parallel (O(η²)), mean-field (O(η³)),
    corrected (O(η⁴)), fitted (trained against the attack, starting from the best of the others).
    """
    from depthgauge.base.io import check_outputs
    from depthgauge.theory.certificates.token_set import load_tokens
    from depthgauge.workflows.collapse import collapse_file

    read = {"NETWORK": network, "--tokens": tokens}
    check_outputs({"--out": out, "--witness": witness}, read, overwrite=overwrite)
    inputs = None if tokens is None else load_tokens(tokens, length)
    with progress_bar("collapsing") as progress:
        found = collapse_file(
            network, method, radius=radius, ball=ball, inputs=inputs, tokens=length if inputs is None else None,
            effort=effort, seed=seed, progress=progress,
        )  # fmt: skip
    try:
        found.save(out, witness)
    finally:
        _print(found.record, as_json)  # also if a file cannot be written
    for what, place in (("network", out), ("witness", witness)):
        if place is not None:
            note(f"{what} written to {place}")


def _print(record: "CollapseRecord", as_json: bool) -> None:
    if as_json:
        print_json(record.to_json())
        return
    from rich.console import Console

    from depthgauge.cli.print_document import part_lines
    from depthgauge.results.gauge_document import sandwich_part

    console = Console()
    title = f"{counted(record.layers_before, 'layer')} → {record.layers_after}"
    inputs = (
        "input, of any number of tokens," if record.tokens is None else f"input of {counted(record.tokens, 'token')}"
    )
    inputs = f"sequence of these tokens ({record.about})" if record.about else inputs
    for line in part_lines(sandwich_part([record.sandwich()], record.printed(), title, inputs), console.width):
        console.print(line, highlight=False)
    remarks = ["all sequences were tried, so attained is the largest difference"] if record.exhaustive else []
    for remark in (*remarks, *record.notes):
        console.print(f"note: {remark}", markup=False, highlight=False)
