"""`depthgauge random`: write a network file."""

from pathlib import Path
from typing import Annotated

import typer

from depthgauge.cli.output import print_json, talk

_EXAMPLES = """
**Examples**

`depthgauge random --layers 6 --heads 2 --dim 16 --eta 0.05 --seed 1 --out n.safetensors`

`depthgauge random --eta 0.5 --distribution aligned --causal --out adversarial.safetensors`
"""


def command(
    out: Annotated[Path, typer.Option(help="The file to write (safetensors).")],
    layers: Annotated[int, typer.Option(help="Number of layers L.")] = 12,
    heads: Annotated[int, typer.Option(help="Heads per layer H.")] = 4,
    dim: Annotated[int, typer.Option(help="Width d of a token.")] = 64,
    eta: Annotated[float, typer.Option(help="Bound on every |weight|: small η collapses, large η does not.")] = 0.01,
    key_dim: Annotated[int | None, typer.Option(help="Width k of queries and keys  [default: dim].")] = None,
    distribution: Annotated[
        str, typer.Option(help="uniform, sign (±η), normal (clipped at η) or aligned (every entry +η).")
    ] = "uniform",
    skip: Annotated[bool, typer.Option("--skip/--no-skip", help="Skip connections.")] = True,
    causal: Annotated[
        bool, typer.Option("--causal/--no-causal", help="Tokens see only themselves and earlier ones.")
    ] = False,
    mlp: Annotated[int | None, typer.Option(help="Hidden width of an MLP per layer  [default: no MLP].")] = None,
    activation: Annotated[str, typer.Option(help="The MLP's activation: relu or gelu.")] = "relu",
    norm: Annotated[str, typer.Option(help="LayerNorm: none, pre or post.")] = "none",
    seed: Annotated[int, typer.Option(help="The same seed gives the same file.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Describe what was written as JSON.")] = False,
) -> None:
    """Write a network with random weights, every one of them at most η in size."""
    from depthgauge.network.files import save_network
    from depthgauge.network.random_networks import random_network

    network = random_network(
        layers,
        heads,
        dim,
        eta,
        key_dim=key_dim,
        distribution=distribution,
        skip=skip,
        causal=causal,
        mlp=mlp,
        activation=activation,
        norm=norm,
        seed=seed,
    )
    save_network(network, out)
    if as_json:
        print_json({"out": str(out), "network": network.describe()})
    else:
        talk.print(f"wrote {out}: {network.summary()}", markup=False, highlight=False, soft_wrap=True)


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES
