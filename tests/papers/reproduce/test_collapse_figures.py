"""Figures A1 to A4: the drawings agree with the rows, and the statements of the captions hold."""

import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from depthgauge.papers.reproduce import study as module
from depthgauge.papers.reproduce.network_figures import (
    CausalErrors,
    DepthMap,
    RankByLayer,
    SurrogateErrors,
    WhatCollapses,
    fitted_slope,
    geometric_mean,
)
from depthgauge.papers.reproduce.study import Computing, GridStudy, per_layer
from depthgauge.sweeps.run import Local

reproduce = partial(module.reproduce, engine=Local(1))
STUDIES = {"A1": RankByLayer, "A2": SurrogateErrors, "A3": DepthMap, "A4": WhatCollapses, "A6": CausalErrors}


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all tests, so that rows are computed once."""
    return tmp_path_factory.mktemp("figures") / "s.db"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the figures small: the same statements, with fewer and smaller networks."""
    monkeypatch.setattr(RankByLayer, "SHAPE", {"layers": 3, "heads": 1, "dim": 4, "tokens": 8})
    monkeypatch.setattr(SurrogateErrors, "SHAPE", {"layers": 2, "heads": 1, "dim": 2})
    monkeypatch.setattr(SurrogateErrors, "ETAS", [0.0001, 0.01])
    monkeypatch.setattr(CausalErrors, "SHAPE", {"layers": 2, "heads": 1, "dim": 2, "tokens": 2})
    monkeypatch.setattr(CausalErrors, "ETAS", [0.001, 0.01])
    monkeypatch.setattr(DepthMap, "ETAS", [0.01, 1.0])
    monkeypatch.setattr(DepthMap, "DIMS", [1, 2])
    monkeypatch.setattr(DepthMap, "LAYERS", [2, 3])
    monkeypatch.setattr(DepthMap, "DIM", 2)
    monkeypatch.setattr(DepthMap, "DEPTH", 2)
    monkeypatch.setattr(WhatCollapses, "SHAPE", {"layers": 4, "heads": 4, "dim": 8, "tokens": 16})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("figure", "models"), [("A1", 2), ("A2", 1), ("A3", 1), ("A4", 2), ("A6", 1)])
def test_a_figure_writes_rows_settings_and_caption(figure: str, models: int, tmp_path: Path, store: Path) -> None:
    done = reproduce(figure, tmp_path, models=models, seed=3, store=store)
    rows = read(tmp_path / f"{figure}.csv")
    assert done.points == len(rows) > 3
    assert {row["seed"] for row in rows} == {"3"}
    assert {row["repetition"] for row in rows} == set("01"[:models])
    about = json.loads((tmp_path / f"{figure}.json").read_text(encoding="utf-8"))
    assert about["schema"] == "depthgauge.figure/1"
    assert (about["figure"], about["seed"], about["repetitions"]) == (figure, 3, models)
    assert {row["task"] for row in rows} == {grid["task"] for grid in about["grids"]}
    assert f"{models} repetitions" in (tmp_path / f"{figure}.txt").read_text(encoding="utf-8")
    assert (tmp_path / f"{figure}.png").stat().st_size > 10_000


def results_of(study: GridStudy, store: Path) -> dict[str, dict[str, Any]]:
    return study.compute(Computing(store, Local(1)))


@pytest.mark.usefixtures("small")
def test_the_slopes_are_the_proved_orders(store: Path) -> None:
    figure = SurrogateErrors("A2", 1, 3)
    results = results_of(figure, store)
    for method, order in SurrogateErrors.ORDER.items():
        lower = [
            geometric_mean([row["lower"] for row in figure.where(results, method=method, eta=eta)])
            for eta in SurrogateErrors.ETAS
        ]
        assert fitted_slope(SurrogateErrors.ETAS, lower, SurrogateErrors.FIT) == pytest.approx(order, abs=0.25)
    for _, row in figure.found(results):
        assert row["lower"] <= row["upper"]


@pytest.mark.usefixtures("small")
def test_the_verdicts_agree_with_the_rows(store: Path) -> None:
    figure = WhatCollapses("A4", 2, 3)
    drawn = figure.draw(results_of(figure, store))
    verdicts = [axes.get_title("left") for axes in drawn.axes]
    assert verdicts == ["rank collapse", "no collapse", "layer collapse", "no collapse"]
    places = [text.get_text() for axes in drawn.axes for text in axes.texts if "skip connections" in text.get_text()]
    assert places == [
        "without skip connections, η = 0.01",
        "without skip connections, η = 3",
        "with skip connections, η = 0.01",
        "with skip connections, η = 3",
    ]


def test_the_full_grids_are_valid() -> None:
    """Creating a grid checks it; cells that two grids share are computed once."""
    for name, study in STUDIES.items():
        cells = study(name, None, 0).cells()
        assert len({cell.identity for cell in cells}) > 50
    planes = DepthMap("A3", None, 0).cells()
    shared = len(DepthMap.ETAS) * DepthMap.repetitions
    assert len(planes) - len({cell.identity for cell in planes}) == shared


def test_fitted_slope_and_geometric_mean() -> None:
    assert fitted_slope([1, 10, 100], [3, 3000, 5], upto=10) == pytest.approx(3)
    assert geometric_mean([1.0, 100.0]) == pytest.approx(10)
    assert math.isnan(geometric_mean([1.0, None]))
    assert math.isnan(geometric_mean([]))
    assert per_layer([{"x": [1, None]}, {"x": [3, 4]}], "x") == [[1, 3], [-math.inf, 4]]
