"""Figure A3: effective depth as a phase diagram, certified and measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine

from depthgauge.papers.figures.style import ETA, INK, figure_style

_MAP = "cividis"


@dataclass(frozen=True)
class PhaseDiagram:
    """Mean effective depth `depths[r][k]` at `rows[r]` (a width or a number of layers) and `etas[k]`."""

    etas: Sequence[float]
    rows: Sequence[int]
    layers: Sequence[int]
    depths: Sequence[Sequence[float]]


def draw_phases(columns: Sequence[str], planes: Sequence[tuple[str, str, Sequence[PhaseDiagram]]]) -> Figure:
    """Draw one row of diagrams for each plane (axis, fixed parameter) and one column for each kind of depth."""
    with figure_style():
        layout = ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.04, wspace=0.03, hspace=0.06)
        figure = Figure(figsize=(7.3, 4.3), layout=layout)
        heights = [len(diagrams[0].rows) for _, _, diagrams in planes]
        grid = figure.subplots(len(planes), len(columns), squeeze=False, height_ratios=heights)
        for r, (axis, fixed, diagrams) in enumerate(planes):
            for c, diagram in enumerate(diagrams):
                image = _draw_phase(grid[r][c], diagram)
                grid[r][c].set_title(f"{columns[c]}, {fixed}", color=INK)
                if c == 0:
                    grid[r][c].set_ylabel(axis)
                if r == len(planes) - 1:
                    grid[r][c].set_xlabel(ETA)
        bar = figure.colorbar(image, ax=grid, fraction=0.035, pad=0.02, ticks=[0, 0.5, 1])
        bar.ax.set_yticklabels(["one layer\nis enough", "half of the\nlayers", "all layers\nneeded"], fontsize=7)
        bar.outline.set_visible(False)
    return figure


def _draw_phase(axes: Axes, diagram: PhaseDiagram) -> AxesImage:
    depths = np.asarray(diagram.depths)
    layers = np.asarray(diagram.layers)[:, None]
    share = (depths - 1) / (layers - 1)
    image = axes.imshow(share, aspect="auto", origin="lower", cmap=_MAP, norm=Normalize(0, 1))
    shades = matplotlib.colormaps[_MAP](share)[..., :3] @ np.array([0.299, 0.587, 0.114])
    for r, row in enumerate(depths):
        for k, depth in enumerate(row):
            axes.text(
                k, r, f"{depth:.2g}", ha="center", va="center", fontsize=6.5, color="w" if shades[r, k] < 0.5 else INK
            )
    axes.set_xticks(range(len(diagram.etas)), [f"{eta:g}".removeprefix("0") for eta in diagram.etas], fontsize=6.5)
    axes.set_yticks(range(len(diagram.rows)), [str(value) for value in diagram.rows])
    axes.grid(False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return image
