"""From a figure's id to its grid, its rows, its drawing, and the files side by side."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthgauge._version import __version__
from depthgauge.atomic import write_text
from depthgauge.errors import require_count
from depthgauge.progress import Step, silent
from depthgauge.separation.exact import Exact, exact
from depthgauge.separation.montecarlo import Estimate, estimate
from depthgauge.separation.panels import SHEETS, Panel, Sheet, sheet
from depthgauge.separation.settings import Regression, Setting

if TYPE_CHECKING:
    from depthgauge.figures.separation import PanelDrawing

SCHEMA = "depthgauge.figure/1"
CONDITIONS = ("strong_d1_positive", "lin_d1_zero", "strong_d0_zero", "lin_d0_zero")
"""The four conditions of success, in order: F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0."""

_PARAMETERS = ("kind", "x", "attention", "n", "d", "m", "a0", "a1", "b", "c")
_SYMBOLS = {"n": "n", "d": "d", "m": "m", "a0": "$a_0$", "a1": "$a_1$", "b": "b", "c": "c", "g": "g"}
_LABELS = {"n": "tokens n", "d": "embedding size d", "m": "width m", "g": "degree g of the polynomial"}


@dataclass(frozen=True)
class Separation:
    """One setting seen both ways; `exact` is None for regression, which is Monte Carlo only."""

    setting: Setting
    exact: Exact | None
    estimate: Estimate
    seed: int

    def document(self) -> dict[str, Any]:
        """What `depthgauge separate --json` prints."""
        return {
            "exact": None if self.exact is None else self.exact.success,
            "exact_parts": None if self.exact is None else list(self.exact.parts),
            "ratio": self.estimate.ratio,
            "interval": list(self.estimate.interval),
            "parts": list(self.estimate.parts),
            "models": self.estimate.models,
        }

    def summary(self) -> str:
        """The same for a reader: success and its four conditions, exact beside drawn."""
        low, high = self.estimate.interval
        drawn = [self.estimate.ratio, *self.estimate.parts]
        closed = [None] * 5 if self.exact is None else [self.exact.success, *self.exact.parts]
        kind = self.setting.attention
        names = ["success", f"F_{kind}(D₁) > 0", "F_lin(D₁) = 0", f"F_{kind}(D₀) = 0", "F_lin(D₀) = 0"]
        width = max(map(len, names))
        parameters = ", ".join(f"{name} = {value}" for name, value in asdict(self.setting).items())
        lines = [f"{self.setting.kind}: {parameters}", f"{'':{width}}  exact     drawn ({self.estimate.models} models)"]
        for name, p, rate in zip(names, closed, drawn, strict=True):
            lines.append(f"{name:{width}}  {'–'.ljust(8) if p is None else f'{p:.6f}'}  {rate:.6f}")
        lines[2] += f"  95 % interval {low:.6f} … {high:.6f}"
        return "\n".join(lines)


@dataclass(frozen=True)
class Point:
    """A row of a figure: where it stands, and what was found there."""

    panel: Panel
    curve: str
    value: float
    found: Separation

    def row(self) -> dict[str, Any]:
        """The row of the CSV; an empty cell is a parameter that the kind does not have."""
        setting = {"kind": self.found.setting.kind, **asdict(self.found.setting)}
        document = self.found.document()
        exact_parts = document["exact_parts"] or [None] * len(CONDITIONS)
        return {
            "panel": self.panel.id,
            "variable": self.panel.variable,
            "value": self.value,
            **{name: setting.get(name) for name in _PARAMETERS},
            "seed": self.found.seed,
            "models": document["models"],
            "successes": self.found.estimate.successes,
            "ratio": document["ratio"],
            "low": document["interval"][0],
            "high": document["interval"][1],
            "exact": document["exact"],
            **dict(zip(CONDITIONS, document["parts"], strict=True)),
            **{f"exact_{name}": p for name, p in zip(CONDITIONS, exact_parts, strict=True)},
        }


@dataclass(frozen=True)
class Reproduction:
    """A figure that was written: its id, the number of its points, and its files."""

    figure: str
    points: int
    files: tuple[Path, ...]


def separate(setting: Setting, models: int, seed: int = 0, step: Step = silent) -> Separation:
    """The probability of success at one setting: in closed form where there is one, and by Monte Carlo."""
    closed = None if isinstance(setting, Regression) else exact(setting)
    return Separation(setting, closed, estimate(setting, models, seed, step=step), seed)


def compute(wanted: Sheet, models: int | None = None, seed: int = 0, step: Step = silent) -> list[Point]:
    """Every point of every panel of a sheet; `models` replaces the paper's number of repetitions."""
    tasks = [(panel, *place) for panel in wanted.panels for place in panel.settings()]
    points = []
    for done, (panel, curve, value, setting) in enumerate(tasks):
        step(done, len(tasks), panel.id)
        points.append(Point(panel, curve, value, separate(setting, models or panel.models, seed)))
    step(len(tasks), len(tasks), wanted.id)
    return points


def reproduce(
    figure: str, out: str | Path, models: int | None = None, seed: int = 0, step: Step = silent
) -> Reproduction:
    """Compute a figure by its id and write ID.png, ID.svg, ID.csv and ID.json into the directory `out`."""
    from depthgauge.figures.style import save

    if models is not None:
        require_count("models", models, "how many networks are drawn for every point")
    wanted = sheet(figure)
    points = compute(wanted, models, seed, step)
    stem = Path(out) / wanted.id
    table, settings = stem.with_name(f"{wanted.id}.csv"), stem.with_name(f"{wanted.id}.json")
    write_text(table, to_csv(points))
    write_text(settings, json.dumps(describe(wanted, models, seed), indent=2, ensure_ascii=False) + "\n")
    return Reproduction(wanted.id, len(points), (*save(draw(wanted, points), stem), table, settings))


def reproduce_all(
    figures: Sequence[str], out: str | Path, models: int | None = None, seed: int = 0, step: Step = silent
) -> list[Reproduction]:
    """`reproduce` for each id, or for every sheet when none is named; a wrong id stops before any work."""
    wanted = list(dict.fromkeys(figures or SHEETS))
    for figure in wanted:
        sheet(figure)
    return [reproduce(figure, out, models, seed, step) for figure in wanted]


def to_csv(points: Sequence[Point]) -> str:
    """The rows as CSV with a header; numbers are written so that reading them gives the same number."""
    rows = [point.row() for point in points]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def describe(wanted: Sheet, models: int | None, seed: int) -> dict[str, Any]:
    """The settings of a figure: everything needed to compute it again."""
    return {
        "schema": SCHEMA,
        "version": __version__,
        "figure": wanted.id,
        "title": wanted.title,
        "seed": seed,
        "conditions": list(CONDITIONS),
        "panels": [
            {
                "id": panel.id,
                "title": panel.title,
                "variable": panel.variable,
                "values": list(panel.values),
                "curves": list(panel.curves),
                "models": models or panel.models,
                "fixed": _fixed(panel),
                "note": panel.note,
            }
            for panel in wanted.panels
        ],
    }


def _fixed(panel: Panel) -> dict[str, Any]:
    """What the points of a panel have in common; what they do not is a [least, largest] pair, if it was not swept."""
    settings = [{"kind": s.kind, **asdict(s)} for _, _, s in panel.settings()]
    fixed: dict[str, Any] = {}
    for name in settings[0]:
        values = sorted({s[name] for s in settings})
        if len(values) == 1:
            fixed[name] = values[0]
        elif name not in (panel.variable, "attention"):
            fixed[name] = [values[0], values[-1]]
    return fixed


def draw(wanted: Sheet, points: Sequence[Point]) -> Any:
    """The figure of a sheet: one panel at column width, several as a sheet."""
    from depthgauge.figures.separation import draw_panel, draw_sheet

    counts = sorted({point.found.estimate.models for point in points})
    drawings = [_drawing(panel, points, _heading(panel, wanted)) for panel in wanted.panels]
    models = " or ".join(map(str, counts))
    if len(drawings) == 1:
        return draw_panel(drawings[0], models)
    return draw_sheet(f"{wanted.id}   {wanted.title}", drawings, wanted.columns, models)


def _heading(panel: Panel, wanted: Sheet) -> str:
    """The panel's id and what the sheet's own title leaves unsaid."""
    if len(wanted.panels) == 1 or panel.title != wanted.title:
        return f"{panel.id}   {panel.title}"
    return f"{panel.id}   varying {_SYMBOLS[panel.variable]}"


def _drawing(panel: Panel, points: Sequence[Point], title: str) -> "PanelDrawing":
    from depthgauge.figures.separation import Curve, PanelDrawing

    curves = []
    for name in panel.curves:
        found = [point for point in points if point.panel.id == panel.id and point.curve == name]
        closed = [point.found.exact.success for point in found if point.found.exact is not None]
        intervals = [point.found.estimate.interval for point in found]
        curves.append(
            Curve(
                label=name,
                x=[point.value for point in found],
                exact=closed if len(closed) == len(found) else None,
                ratio=[point.found.estimate.ratio for point in found],
                low=[low for low, _ in intervals],
                high=[high for _, high in intervals],
            )
        )
    return PanelDrawing(
        title=title,
        fixed=_caption(panel),
        xlabel=_LABELS.get(panel.variable, _SYMBOLS[panel.variable]),
        whole=panel.variable in ("n", "d", "m", "g"),
        curves=curves,
    )


def _caption(panel: Panel) -> str:
    """The fixed parameters in a line, such as `d=12, m=15`."""
    parts = []
    for name, value in _fixed(panel).items():
        if name in _SYMBOLS and not (name == "n" and len(panel.curves) > 1):
            shown = f"{value[0]:g}…{value[1]:g}" if isinstance(value, list) else f"{value:g}"
            parts.append(f"{_SYMBOLS[name]}={shown}")
    return ", ".join(parts)
