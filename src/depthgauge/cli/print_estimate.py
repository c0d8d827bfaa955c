"""Show what a run is expected to take."""

from depthgauge.base.format import counted, duration, size_text
from depthgauge.cli.output import print_json
from depthgauge.results.estimate_record import EstimateRecord


def print_estimate(record: EstimateRecord, as_json: bool) -> None:
    """Print the seconds of every part as a table, and memory and disk space, or the record as JSON."""
    if as_json:
        print_json(record.to_json())
        return
    from rich.console import Console
    from rich.table import Table

    console, streams = Console(), bool(record.streamed)
    where = f"{record.dtype}, {record.device}, windows of {counted(record.window, 'token')}"
    console.print(f"{record.name}: {counted(record.layers, 'layer')}, {where}", markup=False, highlight=False)
    table = Table()
    table.add_column("part")
    for name in ("seconds", "streamed")[: 1 + streams]:
        table.add_column(name, justify="right")
    for name, seconds in record.parts.items():
        table.add_row(name, _tenths(seconds), *([_tenths(record.streamed.get(name))] if streams else []))
    totals = [_tenths(record.seconds), *([_tenths(sum(record.streamed.values()))] if streams else [])]
    table.add_section()
    table.add_row("all", *totals)
    console.print(table, highlight=False)
    sizes = {"GPU memory": record.gpu, "memory": record.ram, "disk": record.disk}
    for name, size in sizes.items():
        if size:
            console.print(f"{name}: {size_text(size)} ({size:,} bytes)", highlight=False)
    if streams:
        speed = "" if record.read_speed is None else f"; the disk gives {size_text(record.read_speed)} per second"
        console.print(f"streamed: the weights are read in every pass over the blocks{speed}", highlight=False)
    if record.processes:
        each = ", ".join(f"{duration(seconds)} with {count}" for count, seconds in record.processes.items())
        console.print(f"several processes, each with a device of its own: {each}", highlight=False)
    console.print(f"→ about {duration(record.seconds)}\n", style="bold", markup=False, highlight=False)


def _tenths(seconds: float | None) -> str:
    """Return seconds in tenths, which is finer than an estimate can be; a dash for a part that is not done."""
    return "–" if seconds is None else f"{seconds:.1f}"
