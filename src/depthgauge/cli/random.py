"""`depthgauge random`: write a network file with random weights."""

from pathlib import Path
from typing import Annotated

import typer

from depthgauge.cli.output import Overwrite, note, print_json


def command(
    out: Annotated[Path, typer.Option(help="File to write (safetensors).")],
    layers: Annotated[int, typer.Option(help="Number of layers L.")] = 12,
    heads: Annotated[int, typer.Option(help="Number of heads H per layer.")] = 4,
    dim: Annotated[int, typer.Option(help="Width d of a token.")] = 64,
    eta: Annotated[float, typer.Option(help="Bound η on every |weight|; networks with small η collapse.")] = 0.01,
    key_dim: Annotated[int | None, typer.Option(help="Width k of queries and keys  [default: dim].")] = None,
    distribution: Annotated[
        str, typer.Option(help="uniform, sign (±η), normal (clipped at η), or aligned (every entry +η).")
    ] = "uniform",
    skip: Annotated[bool, typer.Option("--skip/--no-skip", help="Add skip connections around attention.")] = True,
    causal: Annotated[
        bool, typer.Option("--causal/--no-causal", help="Let each token attend only to itself and to earlier tokens.")
    ] = False,
    mlp: Annotated[int | None, typer.Option(help="Hidden width of the MLP in each layer  [default: no MLP].")] = None,
    mlp_skip: Annotated[
        bool, typer.Option("--mlp-skip/--no-mlp-skip", help="Add skip connections around the MLPs.")
    ] = False,
    activation: Annotated[str, typer.Option(help="Activation of the MLP: relu or gelu.")] = "relu",
    norm: Annotated[str, typer.Option(help="LayerNorm (pre, post), RMSNorm (pre-rms, post-rms), or none.")] = "none",
    seed: Annotated[int, typer.Option(help="Seed of the random numbers; the same seed gives the same file.")] = 0,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a description of the network as JSON.")] = False,
) -> None:
    """Write a network file with random weights of size at most η.

    **Examples**

    `depthgauge random --layers 6 --heads 2 --dim 16 --eta 0.05 --seed 1 --out n.safetensors`

    `depthgauge random --eta 0.5 --distribution aligned --causal --out adversarial.safetensors`

    `depthgauge random --layers 4 --heads 2 --dim 16 --norm pre --mlp 64 --mlp-skip --activation gelu --causal --out
    gpt.safetensors` draws a network that is built like GPT-2.
    """
    from depthgauge.base.io import check_outputs
    from depthgauge.theory.network.files import save_network
    from depthgauge.theory.network.random_networks import random_network

    check_outputs({"--out": out}, {}, overwrite=overwrite)
    network = random_network(
        layers, heads, dim, eta, key_dim=key_dim, distribution=distribution, skip=skip, causal=causal,
        mlp=mlp, activation=activation, norm=norm, mlp_skip=mlp_skip, seed=seed,
    )  # fmt: skip
    save_network(network, out)
    if as_json:
        print_json({"out": str(out), "network": network.describe()})
    else:
        note(f"wrote {out}: {network.summary()}")
