"""Result documents as tables for a person."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from depthgauge._format import number


def profile_table(subject: dict[str, Any]) -> Table:
    """Layer by layer: what is left of the differences between tokens, and how far attention is from averaging."""
    network = subject["network"]
    heads = sorted(set(network["heads"]))
    title = (
        f"{escape(printable(subject['name']))}: {network['layers']} layers × {'–'.join(map(str, heads))} heads, "
        f"dim {network['dim']}, η = {number(network['eta'], 4)}, {'skip' if network['skip'] else 'no skip'}"
        f"{', causal' if network['causal'] else ''}"
    )
    table = Table(title=title, title_justify="left", caption_justify="left", caption=_CAPTION)
    table.add_column("layer", justify="right")
    table.add_column("residual", justify="right")
    table.add_column("score range θ", justify="right")
    table.add_column("TV to uniform", justify="right")
    table.add_column("contraction", justify="right")
    table.add_column("bound", justify="right")
    table.add_row("input", _ratio(subject["input"]["residual"]), "", "", "", "", style="dim")
    for layer in subject["layers"]:
        table.add_row(
            str(layer["index"]),
            _ratio(layer["residual"]),
            spread(layer["heads"], "score_range"),
            spread(layer["heads"], "tv_mean"),
            _largest(layer["heads"], "contraction"),
            _largest(layer["heads"], "contraction_bound"),
        )
    return table


_CAPTION = (
    "residual: ‖Res X‖/‖X‖ after the layer (1: tokens differ fully, 0: all equal). Per head, least – largest: range "
    "of the scores; distance of attention from plain averaging (0: averages, 1: picks one token). contraction: the "
    "worst head's ‖Res(attention)‖/‖Res‖, and the bound it obeys."
)


def printable(name: str) -> str:
    """A name out of a file, without the characters that steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def sandwich_table(rows: list[dict[str, Any]], title: str) -> Table:
    """One row a method: what was proved, what was attained, and what Theorem D.1 prints."""
    table = Table(title=title, title_justify="left", caption_justify="left", caption=_SANDWICH_CAPTION)
    table.add_column("method")
    table.add_column("attained", justify="right")
    table.add_column("proved", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("Theorem D.1", justify="right")
    table.add_column("how")
    for row in rows:
        if row.get("refused"):
            table.add_row(row["method"], "–", "–", "–", "–", "does not apply", style="dim")
            continue
        proved = number(row["upper"]) if row["upper"] is not None else "no finite certificate"
        lost = "" if row["lost_at"] is None else f" (lost at layer {row['lost_at']})"
        printed = number(row["printed_bound"])
        if row["printed_bound"] is None:
            printed = "overflows" if row["printed_log10"] is None else f"1e{row['printed_log10']:.0f}"
        if not row["printed_applies"]:
            printed = f"({printed})"
        elif row["method"] == "last-layer" and row["lower"] > (row["printed_bound"] or float("inf")):
            printed = f"{printed}: false"
        how = ", ".join(row["methods"]) + lost
        table.add_row(row["method"], number(row["lower"]), proved, number(row["ratio"]), printed, how)
    return table


_SANDWICH_CAPTION = (
    "attained: an input was found that is this far off. proved: no input is further off, however many tokens. "
    "Theorem D.1: its bound as printed, in brackets where its conditions fail; false where the network it constructs, "
    "last-layer, exceeds it."
)


def depth_table(depths: list[dict[str, Any]], layers: int) -> Table:
    """One row a tolerance: how many layers are enough, proved for every input and seen on the inputs measured."""
    table = Table(title="Effective depth", title_justify="left")
    table.add_column("within", justify="right")
    table.add_column("proved for every input", justify="right")
    table.add_column("seen on the inputs", justify="right")
    rows: dict[float, dict[bool, str]] = {}
    for depth in depths:
        rows.setdefault(depth["tolerance"], {})[depth["certified"]] = f"{depth['layers']} of {layers}"
    for tolerance, found in rows.items():
        table.add_row(number(tolerance, 6), found.get(True, "–"), found.get(False, "–"))
    return table


def _ratio(residual: dict[str, Any]) -> str:
    return number(residual["midrange"]["max"]["ratio"])


def spread(heads: list[dict[str, Any]], name: str) -> str:
    """The least and the largest value of a measure over heads."""
    values = [head[name] for head in heads if head[name] is not None]
    if not values:
        return "–"
    least, largest = number(min(values), 2), number(max(values), 2)
    return least if least == largest else f"{least}–{largest}"


def _largest(heads: list[dict[str, Any]], name: str) -> str:
    values = [head[name] for head in heads if head[name] is not None]
    return number(max(values)) if values else "–"
