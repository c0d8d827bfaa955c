"""Drawings of A1 to A4: they show the given numbers, label their axes, and text stays inside the figure."""

import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from depthgauge.papers.reproduce.network_figures import (
    CollapsePanel,
    RankCurve,
    draw_collapse,
    draw_orders,
    draw_phases,
    draw_rank,
)
from depthgauge.papers.reproduce.style import FIVE, Spread

SPREAD, BOUND = Spread([0.0, -3.0, -20.0], [0.0, -4.0, -22.0], [0.0, -2.0, -18.0]), [0.0, -1.0, -9.0]
FALLING: RankCurve = ("η = 0.01", SPREAD, BOUND, [0, 2, 5])
FLAT: RankCurve = ("η = 1", Spread([0.0, -0.1, -0.1], [0.0, -0.2, -0.2], [0.0, 0.0, 0.0]), None, None)


def rank() -> Figure:
    return draw_rank([("without skips", [FALLING, FLAT]), ("with skips", [FLAT, FLAT])])


def two_by_two() -> Figure:
    fell, stayed = (
        Spread([1, 1e-3, 1e-30], [1, 1e-4, 0], [1, 1e-2, 1e-29]),
        Spread([0, 0.9, 1], [0, 0.8, 1], [0, 1, 1.1]),
    )
    up: CollapsePanel = ("without skips, η = 0.01", "rank collapse", fell, stayed, -1234.0)
    down: CollapsePanel = ("with skips, η = 3", "no collapse", stayed, stayed, 0.0)
    return draw_collapse([[up, down], [down, down]])


ETAS = [1e-4, 1e-3, 1e-2, 1e-1]
NAMES = ["identity", "last-layer", "parallel", "mean-field", "corrected"]


def orders() -> Figure:
    bands = {
        name: ([3 * eta**k for eta in ETAS], [4 * eta**k for eta in ETAS], float(k))
        for name, k in zip(NAMES, (1, 1, 2, 3, 4), strict=True)
    }
    return draw_orders(ETAS, bands, "last-layer", [2 * eta for eta in ETAS], [True, True, True, False])


def phases() -> Figure:
    small, tall = [[1, 1, 3.5, 6], [1, 2, 6, 6]], [[1, 1, 1, 2], [1, 1, 2, 3], [1, 1, 4, 4]]
    upper = ("width d", "L = 6", [2, 4], [6, 6], [small, small])
    lower = ("layers L", "d = 8", [2, 3, 4], [2, 3, 4], [tall, tall])
    return draw_phases(ETAS, ["certified", "measured"], [upper, lower])


ALL = {"A1": rank, "A2": orders, "A3": phases, "A4": two_by_two}


@pytest.mark.parametrize("name", sorted(ALL))
def test_axes_have_labels_and_text_stays_inside_the_figure(name: str) -> None:
    figure = ALL[name]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    page = figure.bbox
    labels = {axes.get_xlabel() for axes in figure.axes} | {axes.get_ylabel() for axes in figure.axes}
    assert len(labels - {""}) >= 2
    texts = [text for axes in figure.axes for text in (*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label)]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    for text in texts:
        if text.get_text():
            box = text.get_window_extent(renderer)
            assert page.x0 <= box.x0
            assert box.x1 <= page.x1, text.get_text()
            assert page.y0 <= box.y0
            assert box.y1 <= page.y1, text.get_text()
            assert text.get_fontsize() >= 6


def lines(axes: object) -> list[np.ndarray]:
    return [line.get_ydata() for line in axes.lines]  # type: ignore[attr-defined]


def test_rank_shows_every_curve_and_hides_bounds_above_one() -> None:
    left, right = rank().axes
    shown = lines(left)
    np.testing.assert_array_equal(shown[0], SPREAD.middle)
    np.testing.assert_array_equal(shown[1], BOUND)
    np.testing.assert_array_equal(
        shown[2], [0, math.nan, math.nan]
    )  # the rate of Dong et al. is above 1 from the first layer on
    assert len(lines(right)) == 2
    assert left.get_ylim() == right.get_ylim()
    assert [tick.get_text() for tick in left.get_yticklabels()][-2:] == ["$10^{-1}$", "1"]


def test_a_curve_below_the_axis_is_annotated() -> None:
    first, *_ = two_by_two().axes
    assert any("10^{-1\u2009000}" in text.get_text() for text in first.texts)
    assert len(lines(first)[0]) == 3
    assert len(lines(first)[1]) == 2  # depth begins with the first layer


def test_orders_show_bands_slopes_and_the_printed_bound() -> None:
    main, strip = orders().axes
    words = [text.get_text() for text in main.texts]
    assert words == [f"{name}, slope {k}.00" for name, k in zip(NAMES, (1, 1, 2, 3, 4), strict=True)]
    assert len(main.lines) == 12
    np.testing.assert_allclose(lines(main)[-2], [2e-4, 2e-3, 2e-2, math.nan])
    np.testing.assert_allclose(lines(main)[-1], [2e-2, 2e-1])
    np.testing.assert_allclose(lines(strip)[0], [1.5, 1.5, 1.5])
    heights = [text.xy[1] for text in main.texts]  # type: ignore[attr-defined]
    assert min(abs(math.log10(a / b)) for i, a in enumerate(heights) for b in heights[:i]) > 0.7


def test_phase_diagrams_show_every_number() -> None:
    figure = phases()
    first = figure.axes[0]
    assert [text.get_text() for text in first.texts] == ["1", "1", "3.5", "6", "1", "2", "6", "6"]
    (image,) = first.images
    np.testing.assert_allclose(image.get_array(), [[0, 0, 0.5, 1], [0, 0.2, 1, 1]])
    assert [axes.get_title("left") for axes in figure.axes[:4]] == [
        "certified, L = 6",
        "measured, L = 6",
        "certified, d = 8",
        "measured, d = 8",
    ]


# Simulation of colour blindness on linear RGB (Viénot, Brettel and Mollon 1999).
DEFICIENT = {
    "protanopia": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deuteranopia": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
}


@pytest.mark.parametrize("kind", sorted(DEFICIENT))
def test_the_five_colours_differ_with_colour_blindness(kind: str) -> None:
    linear = np.array([[c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(x)] for x in FIVE])
    seen = linear @ np.array(DEFICIENT[kind]).T
    gaps = [float(np.linalg.norm(a - b)) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 0.08
