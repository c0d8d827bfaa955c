"""One section of the page per subject: which charts and tables it has, and what is said beside them.

A kind of subject has one function that lists its parts; a new kind is another function in `PARTS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge._format import DASH, number
from depthgauge.report import charts
from depthgauge.report.charts import Chart
from depthgauge.report.document import CENTERS, NORMS
from depthgauge.report.markup import Cell, Table, counted, runs, span

Subject = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A titled part of a section: a chart, the numbers behind it, and what to know when reading them."""

    name: str
    title: str
    caption: str
    chart: Chart | None = None
    table: Table | None = None
    table_open: bool = False
    half: bool = False


@dataclass(frozen=True)
class Section:
    """A subject as the page shows it."""

    name: str
    verdict: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]


def section(subject: Subject, settings: Mapping[str, Any]) -> Section:
    """The section of one subject, by its kind."""
    verdict = subject.get("verdict", counted(len(subject["layers"]), "layer"))
    return Section(subject["name"], verdict, _facts(subject, settings), PARTS[subject["kind"]](subject))


def _facts(subject: Subject, settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if "model" in subject:
        from depthgauge.report.checkpoint_section import model_facts

        return model_facts(subject)
    facts = _network_facts(subject) if "network" in subject else (("layers", str(len(subject["layers"]))),)
    return (*facts, ("inputs", _inputs(settings)))


def _network_facts(subject: Subject) -> tuple[tuple[str, str], ...]:
    network = subject["network"]
    widths = [width for width in network["mlp"] if width is not None]
    norm = {"none": "none", "pre": "before each sublayer", "post": "after each sublayer"}.get(network["norm"])
    mlp = f"width {span(widths)}, {network['activation']}" + (", with its own skip" if network["mlp_skip"] else "")
    return (
        ("layers", str(network["layers"])),
        ("heads per layer", span(network["heads"])),
        ("token width", str(network["dim"])),
        ("key width", span(network["key_dim"])),
        ("largest weight η", number(network["eta"])),
        ("score factor β", number(network["scale"])),
        ("skip connections", "yes" if network["skip"] else "no"),
        ("attention", "causal" if network["causal"] else "to every token"),
        ("MLP", mlp if widths else "none"),
        ("LayerNorm", norm or network["norm"]),
        ("precision", network["dtype"]),
    )


def _inputs(settings: Mapping[str, Any]) -> str:
    if settings.get("input") is not None:
        return f"from {settings['input']}"
    if settings.get("samples") is None or settings.get("tokens") is None:
        return "as the settings below say"
    size = f"{settings['samples']} × {settings['tokens']} tokens"
    radius, seed = settings.get("radius"), settings.get("seed")
    return f"{size}, uniform up to {number(radius)}, seed {seed}" if radius is not None else size


def head_part(subject: Subject) -> Part | None:
    """Layer × head, with a choice of the measure."""
    layers, keys = subject["layers"], charts.head_measures(subject["layers"])
    chart = charts.head_map(subject)
    if chart is None:
        return None
    rows = tuple(
        (layer["index"], head["index"], *(_cell(head.get(key)) for key in keys))
        for layer in layers
        for head in layer.get("heads", [])
    )
    columns = ("layer", "head", *(charts.measure_name(key) for key in keys))
    caption = "Point at a cell, or walk through the cells with the arrow keys, for its value."
    return Part("heads", "Layer by head", caption, chart, Table("Every measure of every head", columns, rows))


def _cell(value: Any) -> Cell:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def residual_part(subject: Subject) -> Part | None:
    """What differs between tokens, layer by layer."""
    chart = charts.residual_curve(subject)
    if chart is None:
        return None
    pairs = [(center, norm) for center in CENTERS for norm in NORMS]
    columns = ("after layer", *(f"{center}, {charts.NORM_NAMES[norm]}" for center, norm in pairs))
    rows = tuple(
        (name, *(residual[center][norm]["ratio"] for center, norm in pairs))
        for name, residual in charts.residual_states(subject)
    )
    caption = "Mean over the inputs, with one standard deviation; in: the input itself."
    table = Table("‖Res X‖ / ‖X‖ by layer, centre and norm", columns, rows)
    return Part("residual", "What still differs between tokens", caption, chart, table, half=True)


def sandwich_part(subject: Subject) -> Part | None:
    """One layer instead of all: attained and proved, method by method."""
    collapse = subject.get("collapse")
    if not collapse:
        return None
    printed = subject["printed"]
    columns = ("method", "attained", "proved", "ratio", "how it was proved", "seconds")
    table = Table("One layer instead of all: the error, attained and proved", columns, tuple(map(_bound_row, collapse)))
    caption = (
        f"For every input with entries up to {number(subject['radius'])}, however many tokens. Attained: an input was "
        f"found that is at least this far off. Proved: no input is further off. {_printed_words(collapse, printed)}"
    )
    title = "One layer instead of all"
    return Part("sandwich", title, caption, charts.sandwich(collapse, printed), table, table_open=True)


def _bound_row(entry: Mapping[str, Any]) -> tuple[Cell, ...]:
    if "refused" in entry:
        return (entry["method"], None, None, None, f"does not apply: {entry['refused']}", None)
    lost = [] if entry["lost_at"] is None else [f"no finite bound, lost at layer {number(entry['lost_at'])}"]
    how = "; ".join([", ".join(entry["methods"]), *lost, *entry["notes"]])
    spent = (entry["seconds"] or 0.0) + (entry["attack_seconds"] or 0.0)
    return (entry["method"], entry["lower"], entry["upper"], entry["ratio"], how or DASH, spent)


def _printed_words(collapse: Sequence[Mapping[str, Any]], printed: Mapping[str, Any]) -> str:
    """What Theorem D.1 prints, whether it may, and whether it is true of the network that it constructs."""
    bound, log10 = printed["printed_bound"], printed["printed_log10"]
    words = f"is {number(bound)}"
    if bound is None:
        words = "overflows" if log10 is None else f"is 1e{log10:.0f}"
    if not printed["printed_applies"]:
        return f"The bound that Theorem D.1 prints {words}; its conditions do not hold here."
    attained = next((entry.get("lower") for entry in collapse if entry["method"] == "last-layer"), None)
    if bound is not None and attained is not None and attained > bound:
        return f"The bound that Theorem D.1 prints {words}, which last-layer, the network it constructs, exceeds."
    return f"The bound that Theorem D.1 prints {words}."


def depth_part(subject: Subject) -> Part | None:
    """Effective depth, certified beside measured."""
    if "depth" not in subject:
        return None
    if not subject["depth"]:
        return Part("depth", "Effective depth", "Effective depth is not defined for this kind of network.", half=True)
    layers = len(subject["layers"])
    columns = ("error allowed", "", "layers", "error", "kept", "folded into one each")
    rows = tuple(
        (
            entry["tolerance"],
            "proved" if entry["certified"] else "seen",
            entry["layers"],
            entry["error"],
            runs(entry["kept"]),
            "; ".join(runs(run) for run in entry["folded"]) or "none",
        )
        for entry in subject["depth"]
    )
    caption = (
        f"The fewest of {counted(layers, 'layer')} found to do the work of all: for every input with entries up to "
        f"{number(subject['radius'])}, and on the inputs measured."
    )
    table = Table("Layers that are enough, by the error allowed", columns, rows)
    return Part("depth", "Effective depth", caption, charts.depth_bars(subject["depth"], layers), table, half=True)


def network_parts(subject: Subject) -> tuple[Part, ...]:
    """A network of our own: everything."""
    found = (depth_part(subject), residual_part(subject), sandwich_part(subject), head_part(subject))
    return tuple(part for part in found if part is not None)


def model_parts(subject: Subject) -> tuple[Part, ...]:
    """A checkpoint: everything, in a file of its own."""
    from depthgauge.report import checkpoint_section as model

    return model.model_parts(subject)


PARTS: dict[str, Callable[[Subject], tuple[Part, ...]]] = {"network": network_parts, "model": model_parts}
