"""Our own figures: what they show is what the rows say, and what the captions claim is there to be seen."""

import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from depthgauge.sweeps.engines import Local
from depthgauge.workflows.reproduce import draw as study
from depthgauge.workflows.reproduce.collapse_figures import (
    A1,
    A2,
    A3,
    A4,
    COLLAPSE_FIGURES,
    fitted_slope,
    geometric_mean,
    per_layer,
)

reproduce = partial(study.reproduce, engine=Local(1))


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all, so that what one test computed another need not."""
    return tmp_path_factory.mktemp("figures") / "s.db"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures at a size for tests: the same claims, fewer and smaller networks."""
    monkeypatch.setattr(A1, "SHAPE", {"layers": 3, "heads": 1, "dim": 4, "tokens": 8})
    monkeypatch.setattr(A2, "SHAPE", {"layers": 2, "heads": 1, "dim": 2})
    monkeypatch.setattr(A2, "ETAS", [0.0001, 0.01])
    monkeypatch.setattr(A3, "ETAS", [0.01, 1.0])
    monkeypatch.setattr(A3, "DIMS", [2, 3])
    monkeypatch.setattr(A3, "LAYERS", [2, 3])
    monkeypatch.setattr(A3, "DIM", 2)
    monkeypatch.setattr(A3, "DEPTH", 3)
    monkeypatch.setattr(A4, "SHAPE", {"layers": 4, "heads": 4, "dim": 8, "tokens": 16})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("figure", sorted(COLLAPSE_FIGURES))
def test_a_figure_writes_rows_settings_and_caption(figure: str, tmp_path: Path, store: Path) -> None:
    done = reproduce(figure, tmp_path, models=2, seed=3, store=store)
    rows = read(tmp_path / f"{figure}.csv")
    assert done.points == len(rows) > 3
    assert {row["seed"] for row in rows} == {"3"}
    assert {row["repetition"] for row in rows} == {"0", "1"}
    about = json.loads((tmp_path / f"{figure}.json").read_text(encoding="utf-8"))
    assert about["schema"] == "depthgauge.figure/1"
    assert (about["figure"], about["seed"], about["repetitions"]) == (figure, 3, 2)
    assert {row["task"] for row in rows} == {grid["task"] for grid in about["grids"]}
    assert "2 repetitions" in (tmp_path / f"{figure}.txt").read_text(encoding="utf-8")
    assert (tmp_path / f"{figure}.png").stat().st_size > 10_000


def results_of(found: study.Study, store: Path) -> dict[str, dict[str, Any]]:
    return study.compute(found, store, 2, 3, Local(1), lambda *_: None)


@pytest.mark.usefixtures("small")
def test_the_orders_are_those_of_the_table(store: Path) -> None:
    figure = A2(2, 3)
    results = results_of(figure, store)
    for method, order in A2.ORDER.items():
        lower = [
            geometric_mean([row["lower"] for row in figure.where(results, method=method, eta=eta)]) for eta in A2.ETAS
        ]
        assert fitted_slope(A2.ETAS, lower, A2.FIT) == pytest.approx(order, abs=0.25)
    for _, row in figure.found(results):
        assert row["lower"] <= row["upper"]


@pytest.mark.usefixtures("small")
def test_the_verdicts_of_the_two_by_two_are_in_the_rows(store: Path) -> None:
    figure = A4(2, 3)
    drawn = figure.draw(results_of(figure, store))
    verdicts = [axes.get_title("left") for axes in drawn.axes]
    assert verdicts == ["rank collapses", "nothing collapses", "layers collapse", "nothing collapses"]
    places = [text.get_text() for axes in drawn.axes for text in axes.texts if "skips" in text.get_text()]
    assert places == [
        "without skips, η = 0.01",
        "without skips, η = 3",
        "with skips, η = 0.01",
        "with skips, η = 3",
    ]


def test_every_setting_of_the_figures_is_one_that_can_run() -> None:
    """The real grids are checked by being made; shared cells are computed once."""
    for make in COLLAPSE_FIGURES.values():
        cells = make(None, 0).cells()
        assert len({cell.identity for cell in cells}) > 50
    planes = A3(None, 0).cells()
    shared = len(A3.ETAS) * A3.repetitions
    assert len(planes) - len({cell.identity for cell in planes}) == shared


def test_a_slope_and_a_mean_of_logarithms() -> None:
    assert fitted_slope([1, 10, 100], [3, 3000, 5], upto=10) == pytest.approx(3)
    assert geometric_mean([1.0, 100.0]) == pytest.approx(10)
    assert math.isnan(geometric_mean([1.0, None]))
    assert math.isnan(geometric_mean([]))
    assert per_layer([{"x": [1, None]}, {"x": [3, 4]}], "x") == [[1, 3], [-math.inf, 4]]
