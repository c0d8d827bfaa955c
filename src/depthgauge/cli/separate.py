"""`depthgauge separate`: compare softmax with linear attention at one setting of paper B."""

from typing import Annotated

import typer

from depthgauge.cli.output import print_json, progress_bar


def command(
    kind: Annotated[str, typer.Option(help="Data sets and network: self, cross or regression.")] = "self",
    x: Annotated[str | None, typer.Option(help="QKᵀ: identity or ones (self, cross)  [default: identity].")] = None,
    n: Annotated[
        int | None, typer.Option(help="Number of tokens n; a multiple of d − 2 (self) or d − 1 (cross).")
    ] = None,
    d: Annotated[int | None, typer.Option(help="Width d of a token (self, cross)  [default: 22; 11].")] = None,
    m: Annotated[int | None, typer.Option(help="Number m of sign vectors  [default: the paper's].")] = None,
    a0: Annotated[
        float | None, typer.Option(help="Size of the special token of D₀ (self, cross)  [default: 0.01].")
    ] = None,
    a1: Annotated[
        float | None, typer.Option(help="Size of the special token of D₁ (self, cross)  [default: 1.2; 3].")
    ] = None,
    b: Annotated[
        str | None, typer.Option(help="Size of the repeated identity (self), or tied for 1 − c  [default: 0.2].")
    ] = None,
    c: Annotated[float | None, typer.Option(help="Size of the constant column (self)  [default: 0.8].")] = None,
    attention: Annotated[str, typer.Option(help="Attention compared with lin: exp, or poly:G of degree G.")] = "exp",
    models: Annotated[int, typer.Option(help="Number of random networks.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers; the same seed gives the same networks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """The probability that softmax attention tells D₁ from D₀ where linear attention does not.

    **Examples**

    `depthgauge separate --kind self --n 200 --d 22 --a1 1.2 --models 1000`

    `depthgauge separate --kind self --c 0.7 --b tied --x ones --json`

    `depthgauge separate --kind cross --attention poly:4 --json`
    """
    from depthgauge.papers.separation.probability import separate_setting
    from depthgauge.papers.separation.settings import build_setting

    with progress_bar("drawing") as step:
        setting = build_setting(kind, attention=attention, x=x, n=n, d=d, m=m, a0=a0, a1=a1, b=b, c=c)
        found = separate_setting(setting, models, seed, step)
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(found.summary())
