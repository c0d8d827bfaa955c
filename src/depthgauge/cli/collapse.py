"""`depthgauge collapse`: write the shallower network."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.cli.output import print_json, progress_bar, talk

if TYPE_CHECKING:
    from depthgauge.workflows.collapse import CollapseResult

_EXAMPLES = """
**Examples**

`depthgauge collapse net.safetensors --out one.safetensors` replaces the network by its mean field and says how far
the two can be apart on any input with entries up to 1.

`depthgauge collapse net.safetensors --method corrected --radius 0.5 --effort high --json` proves it more sharply.

`depthgauge collapse net.safetensors --method parallel --witness x.safetensors` keeps the input on which the attack saw
the largest difference (`depthgauge gauge net.safetensors --input x.safetensors` reads it).

**Methods**, with weights of size η: identity and last-layer (error O(η)), parallel (O(η²)), mean-field (O(η³)),
corrected (O(η⁴)), fitted (trained against the attack, from the best of the others).
"""


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
    tokens: Annotated[int | None, typer.Option(help="Certify inputs of this many tokens  [default: any].")] = None,
    effort: Annotated[str, typer.Option(help="default, or high: sharper by sums of squares, slower.")] = "default",
    seed: Annotated[int, typer.Option(help="The seed of the attack and of `fitted`.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the shallower network here.")] = None,
    witness: Annotated[Path | None, typer.Option(help="Write the input that attains the lower bound here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Replace a network by a shallower one, with a proof of how far apart they can be."""
    from depthgauge.workflows.collapse import collapse_file

    with progress_bar("collapsing") as progress:
        result = collapse_file(
            network,
            method,
            radius=radius,
            ball=ball,
            tokens=tokens,
            effort=effort,
            seed=seed,
            out=out,
            witness=witness,
            progress=progress,
        )
    if as_json:
        print_json(result.to_json())
    else:
        _print(result)
    for what, place in (("network", out), ("witness", witness)):
        if place is not None:
            talk.print(f"{what} written to {place}", markup=False, highlight=False, soft_wrap=True)


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES


def _print(result: "CollapseResult") -> None:
    from rich.console import Console

    from depthgauge.cli.network_tables import sandwich_table

    console = Console()
    document = result.to_json()
    title = f"{document['layers_before']} layers → {document['layers_after']}"
    console.print(sandwich_table([document], title))
    for note in document["notes"]:
        console.print(f"note: {note}", markup=False, highlight=False)
