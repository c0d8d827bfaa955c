"""The style of all figures, and how they are saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from depthgauge._io import write_atomically

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
"""Colours of the Okabe–Ito palette, distinguishable with all common kinds of colour vision."""
INK, FAINT = "#262626", "#6B6B6B"
ORDERED = ("#0B2F52", "#2A8FB0", "#E69F00", "#A63A0B")
"""Colours for curves with an order; they also differ in lightness."""
MARKERS = ("o", "s", "^", "D")
FIVE = ("#6B6B6B", "#CC79A7", "#E69F00", "#0072B2", "#009E73")
"""Five colours for categories without an order, from the Okabe–Ito palette."""

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
