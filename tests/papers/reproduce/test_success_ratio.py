"""Drawings of success rates show all given rows, and figures are saved atomically."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from depthgauge.base.errors import OutputError
from depthgauge.papers.reproduce.separation_figures import PanelDrawing, Row, draw_sheet
from depthgauge.papers.reproduce.style import BLUE, ORDERED, VERMILION, save


def curve(*columns: list[float | None]) -> list[Row]:
    names = ("value", "exact", "ratio", "low", "high")
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


COLUMNS = [0.2, 0.4, 0.8], [0.05, 0.3, 0.7], [0.3, 0.6, 0.95]
CURVE = curve([1, 2, 3], [0.1, 0.5, 0.9], *COLUMNS)
DRAWN_ONLY = curve([1, 2, 3], [None] * 3, *COLUMNS)


def panel(*curves: list[Row]) -> PanelDrawing:
    return "B4f   varying $a_1$", "n=200, d=22", "$a_1$", False, {f"n = {i}": rows for i, rows in enumerate(curves)}


def draw_panel(panel: PanelDrawing, models: str) -> Figure:
    return draw_sheet("", [panel], 1, models)


def visible(figure: Figure) -> list[matplotlib.axes.Axes]:
    return [axes for axes in figure.axes if axes.get_visible()]


def words(figure: Figure) -> str:
    found = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    for axes in visible(figure):
        found += [axes.get_title("left"), axes.get_xlabel(), *(text.get_text() for text in axes.texts)]
    return "\n".join(found)


def test_a_panel_shows_the_exact_curve_the_points_and_their_intervals() -> None:
    figure = draw_panel(panel(CURVE), "100")
    (axes,) = visible(figure)
    line, dots = axes.lines
    np.testing.assert_array_equal(line.get_xydata(), [[row["value"], row["exact"]] for row in CURVE])
    np.testing.assert_array_equal(dots.get_xydata(), [[row["value"], row["ratio"]] for row in CURVE])
    (bars,) = (c for c in axes.collections if isinstance(c, LineCollection))
    expected = [[[row["value"], row["low"]], [row["value"], row["high"]]] for row in CURVE]
    np.testing.assert_array_equal(bars.get_segments(), expected)
    for text in ("B4f", "n=200, d=22", "$a_1$", "exact probability", "100 networks, 95 % interval"):
        assert text in words(figure)
    low, high = axes.get_ylim()
    assert low < 0
    assert high > 1


def test_without_a_closed_form_there_is_no_exact_curve() -> None:
    figure = draw_panel(panel(DRAWN_ONLY), "1000")
    (axes,) = visible(figure)
    assert len(axes.lines) == 1
    assert axes.lines[0].get_linestyle() == "None"
    assert "exact" not in words(figure)


def test_a_sheet_hides_unused_axes() -> None:
    figure = draw_sheet("B7", [panel(CURVE)] * 5, 3, "100")
    assert len(figure.axes) == 6
    assert len(visible(figure)) == 5
    assert figure.get_suptitle() == "B7"


def test_several_curves_differ_in_colour_and_marker() -> None:
    one = curve([1, 2], [0, 1], [0, 1], [0, 0.9], [0.1, 1])
    (axes,) = visible(draw_panel(panel(one, one, one, one), "100"))
    styles = {(line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() != "None"}
    assert len(styles) == 4
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["n = 0", "n = 1", "n = 2", "n = 3"]


def luminance(colour: str) -> float:
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(channels, [0.2126, 0.7152, 0.0722]))


def test_colours_differ_in_lightness() -> None:
    shades = sorted(luminance(colour) for colour in ORDERED)
    assert min(np.diff(shades)) > 0.05
    assert abs(luminance(BLUE) - luminance(VERMILION)) > 0.05


def test_text_stays_inside_the_figure() -> None:
    fixed = "d=12, m=15, $a_0$=0.01, $a_1$=1.2, b=0.2, c=0.8"
    long: PanelDrawing = ("B4a   varying n", fixed, "tokens n", True, {"": CURVE})
    figure = draw_sheet("B4   Self-attention, X = I", [long] * 6, 3, "100")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    page = figure.bbox
    axes_boxes = [axes.get_window_extent(renderer) for axes in visible(figure)]
    for axes, box in zip(visible(figure), axes_boxes, strict=True):
        for text in axes.texts:
            extent = text.get_window_extent(renderer)
            assert extent.x1 <= page.x1
            assert not any(extent.overlaps(other) for other in axes_boxes if other is not box)


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        (tmp_path / directory).mkdir()
        written = save(draw_panel(panel(CURVE), "100"), tmp_path / directory / "B4f")
        assert [path.name for path in written] == ["B4f.png", "B4f.svg"]
    for name in ("B4f.png", "B4f.svg"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one" / "B4f.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "one" / "B4f.svg").read_text(encoding="utf-8")


def test_a_figure_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "B4f.svg").mkdir()
    with pytest.raises(OutputError, match="is a directory"):
        save(draw_panel(panel(CURVE), "100"), tmp_path / "B4f")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["B4f.png", "B4f.svg"]


def test_matplotlib_settings_are_restored() -> None:
    before = dict(matplotlib.rcParams)
    draw_panel(panel(CURVE), "100")
    assert dict(matplotlib.rcParams) == before
