"""The style of all figures, and how they are saved."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from depthgauge.base.io import write_atomically

BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
"""Colours of the Okabe–Ito palette, distinguishable with all common kinds of colour vision."""
INK, FAINT = "#262626", "#6B6B6B"
ORDERED = ("#0B2F52", "#2A8FB0", "#E69F00", "#A63A0B")
"""Colours for curves with an order; they also differ in lightness."""
MARKERS = ("o", "s", "^", "D")
FIVE = ("#6B6B6B", "#CC79A7", "#E69F00", "#0072B2", "#009E73")
"""Five colours for categories without an order, from the Okabe–Ito palette."""
DASHED, DOTTED = (0, (4, 1.8)), (0, (1, 1.4))
ETA, LAYER = "largest |weight| $\\eta$", "layer $\\ell$ (0 is the input)"
"""Labels of the horizontal axes."""

_SETTINGS: Any = {  # Any: matplotlib types the keys as a Literal that differs between versions
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "mathtext.fontset": "dejavusans",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "savefig.dpi": 300,
    "svg.fonttype": "path",
    "svg.hashsalt": "depthgauge",
}


class Spread(NamedTuple):
    """A quantity at every point of the horizontal axis: median, minimum and maximum over repetitions."""

    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    @classmethod
    def over(cls, values: Sequence[Sequence[float]]) -> "Spread":
        """Return the spread of the values at every point; NaN where there is none."""
        return cls(*([pick(at) if at else math.nan for at in values] for pick in (median, min, max)))


def draw_spread(axes: Axes, x: Sequence[float], spread: Spread, alpha: float = 0.15, **line: Any) -> None:
    """Draw the median as a line and the minimum to the maximum as a band; `line` are its properties."""
    axes.fill_between(x, spread.low, spread.high, color=line["color"], alpha=alpha, linewidth=0)
    axes.plot(x, spread.middle, zorder=4, **line)


def legend_below(figure: Figure, lines: Sequence[dict[str, Any]], ncols: int, spacing: float, *patches: Patch) -> None:
    """Draw a legend below all panels, with one entry for each dictionary of line properties, and for each patch."""
    handles = [Line2D([], [], **line) for line in lines] + list(patches)
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, handletextpad=0.5, columnspacing=spacing)


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw with the style of this project; matplotlib's own settings are restored afterwards."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg atomically; the same figure gives the same bytes."""
    written = []
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        target = stem.with_name(stem.name + suffix)

        def write(temporary: Path, kind: str = suffix[1:], about: dict[str, Any] = metadata) -> None:
            with figure_style(), open(temporary, "wb") as handle:
                figure.savefig(handle, format=kind, metadata=about, facecolor="white")

        write_atomically(target, write)
        written.append(target)
    return written
