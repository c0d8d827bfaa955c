"""The look all figures share, and how they reach the disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from depthgauge._io import write_atomically

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
"""From the palette of Okabe and Ito, told apart with every common kind of colour vision."""
INK, FAINT = "#262626", "#6B6B6B"
ORDERED = ("#0B2F52", "#2A8FB0", "#E69F00", "#A63A0B")
"""For curves with an order, dark to warm: they differ in lightness too."""
MARKERS = ("o", "s", "^", "D")
FIVE = ("#6B6B6B", "#CC79A7", "#E69F00", "#0072B2", "#009E73")
"""Five kinds without an order, from the same palette."""

_SETTINGS: Any = {  # Any: matplotlib types the keys as a closed list that grows with its versions
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
def house_style() -> Iterator[None]:
    """Draw in the house style; matplotlib's own settings are put back afterwards."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg, each whole or not at all; the same figure gives the same bytes."""
    written = []
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        target = stem.with_name(stem.name + suffix)

        def write(temporary: Path, kind: str = suffix[1:], about: dict[str, Any] = metadata) -> None:
            with house_style(), open(temporary, "wb") as handle:
                figure.savefig(handle, format=kind, metadata=about, facecolor="white")

        write_atomically(target, write)
        written.append(target)
    return written
