"""The commands on network files, grids and saved results: random, collapse, sweep and report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted
from depthgauge.cli.output import Overwrite, note, print_json, progress_bar

if TYPE_CHECKING:
    from depthgauge.results.gauge_record import CollapseRecord
    from depthgauge.sweeps.store import SweepStatus


def random(
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


def collapse(
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
    effort: Annotated[
        str, typer.Option(help="default; high: sharper bounds, slower; exact: the supremum over prompts of --tokens.")
    ] = "default",
    tolerance: Annotated[
        float, typer.Option(help="With --effort exact: relative width at which the enclosure is narrow enough.")
    ] = 0.02,
    seconds: Annotated[
        float,
        typer.Option(help="With --effort exact: time after which the best enclosure is the result."),
    ] = 60.0,
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

    `depthgauge collapse net.safetensors --tokens two.safetensors --effort exact` encloses the largest difference over
    all prompts of a few tokens within 2 %, for weights of any size. Ctrl-C ends it with the best enclosure so far.

    `depthgauge collapse causal.safetensors --length 64` replaces a causal network by one causal layer whose heads have
    position biases for up to 64 tokens.

    `depthgauge collapse net.safetensors --method parallel --witness x.safetensors` writes the input on which the attack
    found the largest difference; `depthgauge gauge net.safetensors --input x.safetensors` reads it.

    **Methods**, for weights of size η: identity and last-layer (error O(η)), parallel (O(η²)), mean-field (O(η³)),
    corrected (O(η⁴)), fitted (trained against the attack, starting from the best of the others).
    """
    from depthgauge.base.io import check_outputs
    from depthgauge.theory.certificates.token_set import load_tokens
    from depthgauge.theory.suprema.exact_supremum import ExactLimits
    from depthgauge.workflows.collapse import collapse_file

    read = {"NETWORK": network, "--tokens": tokens}
    check_outputs({"--out": out, "--witness": witness}, read, overwrite=overwrite)
    inputs = None if tokens is None else load_tokens(tokens, length)
    with progress_bar("collapsing") as progress:
        collapsed = collapse_file(
            network, method, radius=radius, ball=ball, inputs=inputs, tokens=length if inputs is None else None,
            effort=effort, limits=ExactLimits(tolerance, seconds), seed=seed, progress=progress,
        )  # fmt: skip
    try:
        collapsed.save(out, witness)
    finally:
        _print_collapse(collapsed.record, as_json)  # also if a file cannot be written
    for what, place in (("network", out), ("witness", witness)):
        if place is not None:
            note(f"{what} written to {place}")


def _print_collapse(record: "CollapseRecord", as_json: bool) -> None:
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


def sweep(
    grid: Annotated[Path | None, typer.Argument(metavar="GRID.toml", help="The grid.", show_default=False)] = None,
    store: Annotated[
        Path | None, typer.Option(help="File that keeps the rows; created if it is missing, in a folder that exists.")
    ] = None,
    status: Annotated[Path | None, typer.Option(metavar="STORE", help="Show the status of a store.")] = None,
    export: Annotated[Path | None, typer.Option(metavar="CSV", help="Write the rows to a CSV file.")] = None,
    engine: Annotated[str, typer.Option(help="local: processes on this machine; dask: a running cluster.")] = "local",
    scheduler: Annotated[str | None, typer.Option(help="Address of the Dask scheduler.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes of the local engine  [default: one per core].")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Compute failed cells again.")] = False,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status of the store as JSON.")] = False,
) -> None:
    """Compute every cell of a grid, and store each result as soon as it is done.

    **Examples**

    `depthgauge sweep grid.toml --store results.db` computes the cells that are missing in the store. Sweeps are
    crash-safe: run the same command again to resume.

    `depthgauge sweep --status results.db` shows the progress, also while the sweep runs.

    `depthgauge sweep --store results.db --export rows.csv` writes the rows to a CSV file.

    `depthgauge sweep grid.toml --store results.db --engine dask --scheduler tcp://10.0.0.1:8786` computes on a cluster.
    Start it with `dask scheduler` on one machine and `dask worker tcp://10.0.0.1:8786 --nthreads 1` on the others.

    **Format of a grid**

    `task = "collapse-error"`, `repetitions = 3`, and under `[parameters]` a list for each parameter: `method =
    ["mean-field"]`, `eta = [0.001, 0.01]`, `layers = [4, 12]`, `heads = [2]`, `dim = [16]`, `tokens = [64]`. Tasks:
    collapse-error, certificate, causal-certificate, exact-supremum, effective-depth, rank-collapse, fast-attention,
    separation, trained-depth.
    """
    from depthgauge.base.io import check_outputs
    from depthgauge.sweeps.store import export_rows
    from depthgauge.workflows import sweep as sweeps

    path = _store(grid, store, status, export)
    check_outputs({"--export": export}, {"GRID": grid, "--store": path}, overwrite=overwrite)
    if grid is not None:
        with progress_bar("computing") as step:
            done = sweeps.sweep(
                grid, path, engine=engine, scheduler=scheduler, jobs=jobs, retry_failed=retry_failed, progress=step
            )
        note(str(done.summary))
    if export is not None:
        rows = export_rows(path, export, replace=overwrite)
        note(f"{counted(rows, 'row')} written to {export}")
    if as_json:
        print_json(sweeps.sweep_status(path).to_json())
    elif status is not None or grid is not None:
        _print_status(sweeps.sweep_status(path), asked=status is not None)


def _store(grid: Path | None, store: Path | None, status: Path | None, export: Path | None) -> Path:
    """Return the store that the options name; raise InputError unless they name exactly one and something to do."""
    if grid is not None and status is not None:
        raise InputError("give either a grid to run or --status to show a store, not both")
    if grid is not None and store is None:
        raise InputError(f"give --store FILE.db, the file that keeps the rows of {grid}")
    if store is not None and status is not None and store != status:
        raise InputError(f"--store {store} and --status {status} name two stores; give one of them")
    path = store if status is None else status
    if path is None:
        raise InputError("give a grid and --store, or --status STORE; see `depthgauge sweep --help`")
    if grid is None and status is None and export is None:
        raise InputError(f"nothing to do with {path}: give a grid to run, --status {path}, or --export FILE.csv")
    return path


def _print_status(status: "SweepStatus", asked: bool) -> None:
    """Print the status: to standard output if it was asked for, to standard error after a run."""
    lines = [f"{status.store}: {status.count}; rows {status.rows_sha256[:16]}…"]
    if asked:
        lines += [f"  {grid.name or 'grid'}: {grid.count}" for grid in status.grids]
        if status.running is not None:
            lines.append(f"  running: {status.running}")
    for failure in status.errors[:3]:
        lines.append(f"  failed: {failure.error} (retry with --retry-failed)")
    for line in lines:
        typer.echo(line, err=not asked)


def report(
    result: Annotated[
        Path,
        typer.Argument(
            metavar="RESULT",
            help="The file that `gauge --out` or `evaluate --out` wrote, depthgauge.json of a shrunk model, or the log "
            "of a training run.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The page to write  [default: RESULT.html].")] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the path and size of the page as JSON.")] = False,
) -> None:
    """Write a page of a saved result: charts, tables, and the command that reproduces it.

    **Examples**

    `depthgauge gauge --out result.json`, then `depthgauge report result.json` writes result.html next to it: one page
    that opens from disk in any browser and makes no network requests.

    `depthgauge report result.json --out page.html` writes the page to another file.

    `depthgauge report smaller/depthgauge.json --out page.html` writes the page of a checkpoint that `depthgauge shrink`
    wrote.

    `depthgauge report runs/x` writes runs/x.html: the page of a training run that `depthgauge.Monitor` logs to the
    directory runs/x. The run may still be going on.

    The page needs the extra report: `pip install '.[report]'` in a clone of the project.
    """
    from depthgauge.base.io import check_outputs
    from depthgauge.report.page import write_report

    page = _page_of(result) if out is None else out
    check_outputs({"--out": page}, {"RESULT": result}, overwrite=overwrite)
    write_report(result, page)
    if as_json:
        print_json({"out": str(page), "bytes": page.stat().st_size})
    else:
        note(f"page written to {page}")


def _page_of(result: Path) -> Path:
    """Return the default name of a page: next to the result, with its name."""
    if result.is_dir():
        whole = result.resolve()  # the name of `.` or `..`
        return (result if result.name else whole).parent / f"{whole.name}.html"
    return result.parent / f"{result.stem}.html"
