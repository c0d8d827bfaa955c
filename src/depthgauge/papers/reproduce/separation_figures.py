"""The figures of paper B: cells from the settings of a panel; table, drawing and caption from their rows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from depthgauge.papers.reproduce.study import CellStudy, Results
from depthgauge.papers.separation.exact import ExactProbabilities
from depthgauge.papers.separation.montecarlo import Estimate
from depthgauge.papers.separation.panels import Panel, Sheet, sheet
from depthgauge.papers.separation.probability import Separation
from depthgauge.papers.separation.settings import Setting
from depthgauge.papers.sweep_tasks.tasks import TASKS
from depthgauge.sweeps.cells import Cell
from depthgauge.sweeps.grid import make_cell

if TYPE_CHECKING:
    from depthgauge.papers.figures.success_ratio import PanelDrawing

CONDITIONS = ("strong_d1_positive", "lin_d1_zero", "strong_d0_zero", "lin_d0_zero")
"""The four conditions of success, in order: F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0."""

_PARAMETERS = ("kind", "x", "attention", "n", "d", "m", "a0", "a1", "b", "c")
_SYMBOLS = {"n": "n", "d": "d", "m": "m", "a0": "$a_0$", "a1": "$a_1$", "b": "b", "c": "c", "g": "g"}
_LABELS = {"n": "tokens n", "d": "embedding size d", "m": "width m", "g": "degree g of the polynomial"}
_PLAIN_SYMBOLS = {"a0": "a₀", "a1": "a₁", "g": "the degree g"}


def _from_result(setting: Setting, models: int, seed: int, result: Mapping[str, Any]) -> Separation:
    """Return the record for the result of a sweep cell."""
    closed = None
    if result["exact"] is not None:
        closed = ExactProbabilities(result["exact"], tuple(result["exact_parts"]))
    return Separation(setting, closed, Estimate(models, result["successes"], tuple(result["conditions"])), seed)


@dataclass(frozen=True)
class Point:
    """A point of a figure: its panel, curve and swept value, and the probability of success there."""

    panel: Panel
    curve: str
    value: float
    found: Separation

    def row(self) -> dict[str, Any]:
        """Return the row of the CSV file; parameters that the kind does not have are None."""
        setting = {"kind": self.found.setting.kind, **asdict(self.found.setting)}
        document = self.found.to_json()
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
class SeparationStudy(CellStudy):
    """A figure or panel of paper B; `models` replaces the paper's number of repetitions."""

    @property
    def sheet(self) -> Sheet:
        """The panels of the figure; a single panel is a sheet of its own."""
        return sheet(self.id)

    @property
    def title(self) -> str:
        """The title of the sheet."""
        return self.sheet.title

    def cells(self) -> list[Cell]:
        """Return one cell for every point; panels that share a point share its cell."""
        return [self._cell(panel, setting) for panel in self.sheet.panels for _, _, setting in panel.settings()]

    def _cell(self, panel: Panel, setting: Setting) -> Cell:
        given = {"kind": setting.kind, **asdict(setting), "seed": self.seed}
        return make_cell(TASKS["separation"], given, self.models or panel.models)

    def points(self, results: Results) -> list[Point]:
        """Return every point of every panel."""
        found = []
        for panel in self.sheet.panels:
            for curve, value, setting in panel.settings():
                result = results[self._cell(panel, setting).identity]
                seen = _from_result(setting, self.models or panel.models, self.seed, result)
                found.append(Point(panel, curve, value, seen))
        return found

    def table(self, results: Results) -> list[dict[str, Any]]:
        """Return the rows of the CSV file."""
        return [point.row() for point in self.points(results)]

    def settings(self) -> dict[str, Any]:
        """Return everything needed to compute the figure again."""
        return {
            "conditions": list(CONDITIONS),
            "panels": [
                {
                    "id": panel.id,
                    "title": panel.title,
                    "variable": panel.variable,
                    "values": list(panel.values),
                    "curves": list(panel.curves),
                    "models": self.models or panel.models,
                    "fixed": _fixed(panel),
                    "note": panel.note,
                }
                for panel in self.sheet.panels
            ],
        }

    def caption(self) -> str:
        """Return the caption: what the figure shows, the number of repetitions, and choices the paper leaves open."""
        lines = [
            f"{self.id}. {self.title}: success rate as one parameter varies. Success means F(D₁) > 0 with softmax (or "
            "a polynomial) and F = 0 in the three other cases. Dots: rate over random networks "
            f"({self._counts()} repetitions per point, seed {self.seed}), with 95 % Wilson intervals. "
            "Lines: the exact probability, where there is a closed form."
        ]
        for panel in self.sheet.panels:
            swept = _PLAIN_SYMBOLS.get(panel.variable, panel.variable)
            fixed = _plain_text(_fixed_line(panel))
            note = f" {panel.note}" if panel.note else ""
            lines.append(f"{panel.id}: {panel.title}, varying {swept}; {fixed}.{note}")
        return "\n".join(lines)

    def draw(self, results: Results) -> Any:
        """Return the matplotlib figure: one panel at column width, or several panels on a sheet."""
        from depthgauge.papers.figures.success_ratio import draw_panel, draw_sheet

        points, models = self.points(results), self._counts()
        drawings = [_drawing(panel, points, self._heading(panel)) for panel in self.sheet.panels]
        if len(drawings) == 1:
            return draw_panel(drawings[0], models)
        return draw_sheet(f"{self.id}   {self.title}", drawings, self.sheet.columns, models)

    def _counts(self) -> str:
        return " or ".join(str(count) for count in sorted({self.models or panel.models for panel in self.sheet.panels}))

    def _heading(self, panel: Panel) -> str:
        """Return the heading of a panel: its id, and its title or swept parameter."""
        if len(self.sheet.panels) == 1 or panel.title != self.title:
            return f"{panel.id}   {panel.title}"
        return f"{panel.id}   varying {_SYMBOLS[panel.variable]}"


def _fixed(panel: Panel) -> dict[str, Any]:
    """Return the parameters that are not swept; one that depends on the swept parameter is a [least, largest] pair."""
    settings = [{"kind": s.kind, **asdict(s)} for _, _, s in panel.settings()]
    fixed: dict[str, Any] = {}
    for name in settings[0]:
        values = sorted({s[name] for s in settings})
        if len(values) == 1:
            fixed[name] = values[0]
        elif name not in (panel.variable, "attention"):
            fixed[name] = [values[0], values[-1]]
    return fixed


def _drawing(panel: Panel, points: Sequence[Point], title: str) -> "PanelDrawing":
    from depthgauge.papers.figures.success_ratio import Curve, PanelDrawing

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
        fixed=_fixed_line(panel),
        xlabel=_LABELS.get(panel.variable, _SYMBOLS[panel.variable]),
        whole=panel.variable in ("n", "d", "m", "g"),
        curves=curves,
    )


def _fixed_line(panel: Panel) -> str:
    """Return the fixed parameters on one line, for example `d=12, m=15`."""
    parts = []
    for name, value in _fixed(panel).items():
        if name in _SYMBOLS and not (name == "n" and len(panel.curves) > 1):
            shown = f"{value[0]:g}…{value[1]:g}" if isinstance(value, list) else f"{value:g}"
            parts.append(f"{_SYMBOLS[name]}={shown}")
    return ", ".join(parts)


def _plain_text(line: str) -> str:
    """Replace mathematics markup by plain text."""
    return line.replace("$a_0$", "a₀").replace("$a_1$", "a₁").replace("=", " = ")
