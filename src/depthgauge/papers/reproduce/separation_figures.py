"""The figures of paper B: cells from the settings of a panel; table, drawing and caption from their rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, MultipleLocator, PercentFormatter

from depthgauge.papers.reproduce.study import Results, Study
from depthgauge.papers.reproduce.style import BLUE, FAINT, INK, MARKERS, ORDERED, VERMILION, figure_style
from depthgauge.papers.separation.probability import Estimate
from depthgauge.papers.separation.settings import Panel, Setting, Sheet, sheet
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import Cell, make_cell

CONDITIONS = ("strong_d1_positive", "lin_d1_zero", "strong_d0_zero", "lin_d0_zero")
"""The four conditions of success, in order: F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0."""

_PARAMETERS = ("kind", "x", "attention", "n", "d", "m", "a0", "a1", "b", "c")
_SYMBOLS = {"n": "n", "d": "d", "m": "m", "a0": "$a_0$", "a1": "$a_1$", "b": "b", "c": "c", "g": "g"}
_LABELS = {"n": "tokens n", "d": "embedding size d", "m": "width m", "g": "degree g of the polynomial"}
_PLAIN_SYMBOLS = {"a0": "a₀", "a1": "a₁", "g": "the degree g"}


_JOINED = (0, (2, 1.5))
_SPARSE = 20
"""Curves with at most this many points get larger markers."""

Row = Mapping[str, Any]
"""A row of the CSV file. The drawing shows `value`, `exact`, `ratio`, `low` and `high`."""
PanelDrawing = tuple[str, str, str, bool, Mapping[str, Sequence[Row]]]
"""A title, the fixed parameters, the swept parameter, whether that takes integer values, and the rows by curve."""


@dataclass(frozen=True)
class SeparationStudy(Study):
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

    def table(self, results: Results) -> list[dict[str, Any]]:
        """Return the rows of the CSV file."""
        return [row for panel in self.sheet.panels for rows in self._curves(panel, results).values() for row in rows]

    def _curves(self, panel: Panel, results: Results) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of a panel by curve; parameters that the kind does not have are None."""
        curves: dict[str, list[dict[str, Any]]] = {name: [] for name in panel.curves}
        for curve, value, setting in panel.settings():
            result = results[self._cell(panel, setting).identity]
            found = Estimate(self.models or panel.models, result["successes"], tuple(result["conditions"]))
            parameters = {"kind": setting.kind, **asdict(setting)}
            exact_parts = result["exact_parts"] or [None] * len(CONDITIONS)
            low, high = found.interval
            curves[curve].append(
                {"panel": panel.id, "variable": panel.variable, "value": value}
                | {name: parameters.get(name) for name in _PARAMETERS}
                | {"seed": self.seed, "models": found.models, "successes": found.successes}
                | {"ratio": found.ratio, "low": low, "high": high, "exact": result["exact"]}
                | dict(zip(CONDITIONS, found.parts, strict=True))
                | {f"exact_{name}": p for name, p in zip(CONDITIONS, exact_parts, strict=True)}
            )
        return curves

    def settings(self) -> dict[str, Any]:
        """Return everything needed to compute the figure again."""
        panels = [
            {"id": panel.id, "title": panel.title, "variable": panel.variable, "values": list(panel.values)}
            | {"curves": list(panel.curves), "models": self.models or panel.models}
            | {"fixed": _fixed(panel), "note": panel.note}
            for panel in self.sheet.panels
        ]
        return {"conditions": list(CONDITIONS), "panels": panels}

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
            fixed = _fixed_line(panel).replace("$a_0$", "a₀").replace("$a_1$", "a₁").replace("=", " = ")
            note = f" {panel.note}" if panel.note else ""
            lines.append(f"{panel.id}: {panel.title}, varying {swept}; {fixed}.{note}")
        return "\n".join(lines)

    def draw(self, results: Results) -> Figure:
        """Return the matplotlib figure: one panel at column width, or several panels on a sheet."""
        drawings = []
        for panel in self.sheet.panels:
            label = _LABELS.get(panel.variable, _SYMBOLS[panel.variable])
            whole, curves = panel.variable in ("n", "d", "m", "g"), self._curves(panel, results)
            drawings.append((self._heading(panel), _fixed_line(panel), label, whole, curves))
        title = f"{self.id}   {self.title}" if len(drawings) > 1 else ""
        return draw_sheet(title, drawings, self.sheet.columns, self._counts())

    def _counts(self) -> str:
        return " or ".join(str(count) for count in sorted({self.models or panel.models for panel in self.sheet.panels}))

    def _heading(self, panel: Panel) -> str:
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


def _fixed_line(panel: Panel) -> str:
    """Return the fixed parameters on one line, for example `d=12, m=15`."""
    parts = []
    for name, value in _fixed(panel).items():
        if name in _SYMBOLS and not (name == "n" and len(panel.curves) > 1):
            shown = f"{value[0]:g}…{value[1]:g}" if isinstance(value, list) else f"{value:g}"
            parts.append(f"{_SYMBOLS[name]}={shown}")
    return ", ".join(parts)


def draw_sheet(title: str, panels: Sequence[PanelDrawing], columns: int, models: str) -> Figure:
    """Draw the panels in the layout of the paper, or one panel at the width of a column."""
    rows = -(-len(panels) // columns)
    size = (7.3, (2.15 if columns > 2 else 2.6) * rows + 0.5) if len(panels) > 1 else (3.6, 2.9)
    with figure_style():
        layout = ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05, wspace=0.03, hspace=0.05)
        figure = Figure(figsize=size, layout=layout)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for index, axes in enumerate(grid.flat):
            if index < len(panels):
                _draw_axes(axes, panels[index], left=index % columns == 0)
            else:
                axes.set_visible(False)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
        _legend(figure, panels, models)
    return figure


def _draw_axes(axes: Axes, panel: PanelDrawing, left: bool) -> None:
    title, parameters, xlabel, whole, curves = panel
    several = len(curves) > 1
    for index, rows in enumerate(curves.values()):
        line, dots = (ORDERED[index], ORDERED[index]) if several else (BLUE, VERMILION)
        marker = MARKERS[index] if several else "o"
        x, exact, ratio, low, high = (
            [row[name] for row in rows] for name in ("value", "exact", "ratio", "low", "high")
        )
        if _closed(rows):
            axes.plot(x, exact, color=line, linewidth=1.5, zorder=3, solid_capstyle="round")
        elif several:
            axes.plot(x, ratio, color=line, linewidth=0.8, linestyle=_JOINED, zorder=2)
        sparse = len(x) <= _SPARSE
        width, alpha, order, size = (1.1, 0.8, 4, 3.4) if sparse else (0.7, 0.45, 2, 2)
        axes.vlines(x, low, high, color=dots, linewidth=width, alpha=alpha, zorder=order)
        axes.plot(x, ratio, marker, color=dots, markersize=size, markeredgewidth=0, zorder=5)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_locator(MultipleLocator(0.25))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=" %", decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=whole))
    axes.margins(x=0.03)
    axes.set_xlabel(xlabel)
    if left:
        axes.set_ylabel("success rate")
    axes.set_title(title, pad=15, color=INK)
    fixed = axes.text(0, 1.035, parameters, transform=axes.transAxes, fontsize=5.8, color=FAINT, va="bottom")
    fixed.set_in_layout(False)
    if several:
        _label_curves(axes, curves)


def _closed(rows: Sequence[Row]) -> bool:
    """Return whether the probabilities of a curve have a closed form."""
    return all(row["exact"] is not None for row in rows)


def _label_curves(axes: Axes, names: Iterable[str]) -> None:
    handles = [
        Line2D([], [], color=ORDERED[i], marker=MARKERS[i], markersize=3.6, linewidth=1.3, label=name)
        for i, name in enumerate(names)
    ]
    legend = axes.legend(handles=handles, loc="lower right", fontsize=6.5, handlelength=1.6, labelspacing=0.25)
    legend.set_zorder(6)
    legend.get_frame().set(facecolor="white", edgecolor="none", alpha=0.85)
    legend.set_frame_on(True)


def _legend(figure: Figure, panels: Sequence[PanelDrawing], models: str) -> None:
    closed = [[_closed(rows) for rows in curves.values()] for *_, curves in panels]
    several = any(len(curves) > 1 for curves in closed)
    line, dots = (INK, INK) if several else (BLUE, VERMILION)
    handles = []
    if any(any(curves) for curves in closed):
        handles.append(Line2D([], [], color=line, linewidth=1.5, label="exact probability"))
    label = f"{models} networks, 95 % interval"
    handles.append(Line2D([], [], color=dots, marker="o", linestyle="none", markersize=3.2, label=label))
    if several and not all(all(curves) for curves in closed):
        joined = "joins sampled rates (no closed form)"
        handles.append(Line2D([], [], color=INK, linewidth=0.8, linestyle=_JOINED, label=joined))
    figure.legend(handles=handles, loc="outside lower left", ncols=3, handletextpad=0.6, columnspacing=1.6)
