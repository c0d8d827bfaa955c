"""Figure A8: how far proved and attacked bounds are from the exact supremum over prompts (docs/math.md §3.15)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from depthgauge.papers.reproduce.study import GridStudy, Results
from depthgauge.papers.reproduce.style import (
    DASHED,
    ETA,
    FIVE,
    INK,
    MARKERS,
    Spread,
    draw_spread,
    figure_style,
    legend_below,
)
from depthgauge.sweeps.grid import Grid
from depthgauge.theory.surrogates.closed_forms import CLOSED_FORMS

_LINES: tuple[dict[str, Any], ...] = (
    *({"method": method, "blocks": False} for method in CLOSED_FORMS),
    {"method": "parallel", "blocks": True},
)
"""The methods for networks of attention alone, and the wide block for networks with LayerNorm and MLPs."""


class ExactSuprema(GridStudy):
    """A8: proved ÷ exact and attacked ÷ exact against the size of the weights."""

    title = "How close proved and attacked bounds come to the exact supremum over prompts"
    repetitions = 3
    ETAS: ClassVar = [0.01, 0.03, 0.1, 0.3, 1.0]
    SHAPES: ClassVar = [{"vocabulary": 2, "layers": 3, "heads": 2}, {"vocabulary": 3, "layers": 2, "heads": 1}]
    """The number of tokens and the networks of the panels."""
    TOLERANCE: ClassVar = 0.05
    SECONDS: ClassVar = 300.0

    about = (
        "Bounds on sup‖S(X) − S'(X)‖max over all prompts of 2 or of 3 different tokens, of any length, for random "
        "networks S (weights uniform in [−η, η], tokens uniform in [−1, 1], d = 4) and their one-layer surrogates S', "
        "divided by the supremum itself, which branch and bound over the shares of the tokens encloses within "
        "{self.TOLERANCE:.0%}. Top: the default certificate over the lower end of the enclosure, so the true ratio is "
        "at most as large. Bottom: the error that the attack of the default certificate found over the upper end, so "
        "the true ratio is at least as large. Black: the wide block of networks with LayerNorm before the sublayers "
        "and MLPs of width 4. Lines are medians over {self.repeats} repetitions (one network each, the same for all "
        "η up to that factor, seed {self.seed}), bands the minimum to the maximum. A point is left out if the "
        "enclosure of a repetition is wider after {self.SECONDS:g} seconds, at the top also without a finite proof."
    )

    def grids(self) -> list[Grid]:
        """Return a grid for each panel and kind of network."""
        limits = {"eta": self.ETAS, "dim": 4, "tolerance": self.TOLERANCE, "seconds": self.SECONDS}
        kinds = {"method": list(CLOSED_FORMS), "blocks": False}, {"method": "parallel", "blocks": True}
        return [self._grid("exact-supremum", **kind, **shape, **limits) for shape in self.SHAPES for kind in kinds]

    def draw(self, results: Results) -> Figure:
        """Draw the proved bound over the supremum, and below it the attacked one."""
        with figure_style():
            figure = Figure(figsize=(7.3, 4.4), layout="constrained")
            grid = figure.subplots(
                2, len(self.SHAPES), sharex=True, sharey="row", squeeze=False, height_ratios=(2.6, 1)
            )
            lines = [_line(k) for k in range(len(_LINES))]
            for (proved, attacked), shape in zip(grid.T, self.SHAPES, strict=True):
                for k, (line, kind) in enumerate(zip(lines, _LINES, strict=True)):
                    at = [self.where(results, eta=eta, **shape, **kind) for eta in self.ETAS]
                    apart = [eta * 1.07 ** (k - 2.5) for eta in self.ETAS]
                    draw_spread(proved, apart, Spread.over([self.ratios(rows)[0] for rows in at]), **line)
                    quiet = {**line, "linewidth": 0.9, "markersize": 3.0}
                    draw_spread(attacked, apart, Spread.over([self.ratios(rows)[1] for rows in at]), **quiet)
                proved.set(xscale="log", yscale="log")
                proved.set_title("{vocabulary} tokens, L = {layers}, H = {heads}".format(**shape), color=INK)
                proved.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
                attacked.set(xlabel=ETA, ylim=(None, 1.01))
                attacked.set_xticks(self.ETAS, [f"{eta:g}" for eta in self.ETAS])
                attacked.xaxis.set_minor_locator(NullLocator())
                for axes in (proved, attacked):
                    axes.axhline(1, color=INK, linewidth=0.9, linestyle=DASHED)
            grid[0][0].set_ylabel("proved / exact")
            grid[1][0].set_ylabel("attacked / exact")
            legend_below(figure, lines, len(lines), 1.2)
        return figure

    def ratios(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
        """Return proved ÷ exact and attacked ÷ exact of all repetitions; none where one of them is not known."""
        lows = [max(row["exact_lower"], row["lower"]) for row in rows]
        highs = [row["exact_upper"] for row in rows]
        if any(high is None or high > (1 + self.TOLERANCE) * low for low, high in zip(lows, highs, strict=True)):
            return [], []
        attacked = [row["lower"] / high for row, high in zip(rows, highs, strict=True)]
        if any(row["upper"] is None for row in rows):
            return [], attacked
        return [row["upper"] / low for row, low in zip(rows, lows, strict=True)], attacked


def _line(k: int) -> dict[str, Any]:
    """Return the properties of a line of `_LINES`."""
    is_block = bool(_LINES[k]["blocks"])
    label = f"{_LINES[k]['method']}, LayerNorm + MLP" if is_block else _LINES[k]["method"]
    color, marker = (INK, "X") if is_block else (FIVE[k], (*MARKERS, "v")[k])
    return {"color": color, "marker": marker, "markersize": 3.8, "linewidth": 1.4, "label": label}
