"""The pictures of the concept pages: the statements about them hold, and every picture is in the repository."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

FOLDER = Path(__file__).parents[3] / "docs" / "figures"


@pytest.fixture
def concepts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with smaller settings, to save time."""
    spec = importlib.util.spec_from_file_location("make_concepts", FOLDER / "make_concepts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SANDWICH_ETAS", [0.01, 0.04])
    monkeypatch.setattr(module, "COLLAPSE_ETAS", [0.003, 0.006])
    monkeypatch.setattr(module, "KINDS", dict(list(module.KINDS.items())[:2]))
    return module


def test_tokens_become_equal_without_skip_connections_only(concepts: ModuleType) -> None:
    without, with_skips = ([concepts.log10_residual(s) for s in concepts.states(skip=skip)] for skip in (False, True))
    assert without == sorted(without, reverse=True)
    assert without[-1] < -10
    assert min(with_skips) > -0.5


def test_the_slopes_are_the_orders(concepts: ModuleType) -> None:
    for method, order in concepts.METHODS.items():
        found = concepts.slope(concepts.COLLAPSE_ETAS, concepts.surrogate_errors(method))
        assert found == pytest.approx(order, abs=0.05)


def test_scores_obey_the_bound_and_the_worst_ones_attain_it(concepts: ModuleType) -> None:
    for theta, distance in zip(*concepts.random_scores(), strict=True):
        assert distance <= math.tanh(theta / 4)
    for theta, distance in zip(*concepts.worst_scores(), strict=True):
        assert 0.99 * math.tanh(theta / 4) < distance <= math.tanh(theta / 4) * (1 + 1e-12)


def test_the_sandwich_is_in_order(concepts: ModuleType) -> None:
    found = concepts.sandwich_bounds()
    for seen, lower, upper in zip(found["random"], found["lower"], found["upper"], strict=True):
        assert 0 < seen <= lower <= upper < 2 * lower


def test_every_picture_is_drawn_inside_the_page_and_committed(concepts: ModuleType) -> None:
    for name, draw in concepts.PICTURES.items():
        figure = draw()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for axes in figure.axes:
            for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
                box = text.get_window_extent(canvas.get_renderer())
                assert not text.get_text() or (box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1)
        assert (FOLDER / f"{name}.png").read_bytes().startswith(b"\x89PNG")
