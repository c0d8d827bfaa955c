"""A5: where attention is fast, and where the network is deep."""

import json
from pathlib import Path

import pytest

from depthgauge.sweeps.engines import Local
from depthgauge.workflows.reproduce.draw import compute, find_study, reproduce
from depthgauge.workflows.reproduce.fast_figure import A5


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(A5, "ETAS", [0.005, 0.3, 3.0])
    monkeypatch.setattr(A5, "SHAPE", {"layers": 3, "heads": 1, "dim": 4, "tokens": 16})
    monkeypatch.setattr(A5, "LENGTH", 8192)


@pytest.mark.usefixtures("small")
def test_it_is_drawn_from_its_rows(tmp_path: Path) -> None:
    done = reproduce("A5", tmp_path, models=2, seed=1, engine=Local(1))
    assert done.points == 2 * 2 * 3
    about = json.loads((tmp_path / "A5.json").read_text(encoding="utf-8"))
    assert [grid["task"] for grid in about["grids"]] == ["fast-attention", "effective-depth"]
    assert "2 repetitions" in (tmp_path / "A5.txt").read_text(encoding="utf-8")


@pytest.mark.usefixtures("small")
def test_speed_goes_where_depth_comes(tmp_path: Path) -> None:
    study = find_study("A5", 2, 1)
    results = compute(study, tmp_path / "figures.db", 2, 1, Local(1), lambda *_: None)
    assert isinstance(study, A5)
    first, last = (study.where(results, eta=eta, tolerance=A5.TOLERANCE) for eta in (0.005, 3.0))
    assert all(row["speedup"] > 10 and row["degree"] <= 1 for row in first)
    assert all(row["speedup"] == 1 for row in last)
    shallow, deep = (study.where(results, eta=eta, tolerance=A5.ERROR) for eta in (0.005, 3.0))
    assert all(row["certified"] == 1 for row in shallow)
    assert all(row["measured"] == 3 for row in deep)
    figure = study.draw(results)
    assert len(figure.axes) == 3
    assert "beyond\nreach" in {text.get_text() for text in figure.axes[0].texts}
