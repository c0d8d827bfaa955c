"""Figure A5: the cost of attention and the effective depth."""

import json
from pathlib import Path

import pytest

from depthgauge.papers.reproduce.network_figures import FastOrDeepStudy
from depthgauge.papers.reproduce.study import Computing, find_study, reproduce
from depthgauge.sweeps.run import Local


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastOrDeepStudy, "ETAS", [0.005, 3.0])
    monkeypatch.setattr(FastOrDeepStudy, "SHAPE", {"layers": 2, "heads": 1, "dim": 4, "tokens": 16})
    monkeypatch.setattr(FastOrDeepStudy, "LENGTH", 8192)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for both tests, so that rows are computed once."""
    return tmp_path_factory.mktemp("fast") / "s.db"


@pytest.mark.usefixtures("small")
def test_files(tmp_path: Path, store: Path) -> None:
    done = reproduce("A5", tmp_path, models=2, seed=1, store=store, engine=Local(1))
    assert done.points == 2 * 2 * 2
    about = json.loads((tmp_path / "A5.json").read_text(encoding="utf-8"))
    assert [grid["task"] for grid in about["grids"]] == ["fast-attention", "effective-depth"]
    assert "2 repetitions" in (tmp_path / "A5.txt").read_text(encoding="utf-8")


@pytest.mark.usefixtures("small")
def test_fast_at_small_weights_and_deep_at_large_weights(store: Path) -> None:
    study = find_study("A5", 2, 1)
    results = study.compute(Computing(store, Local(1)))
    assert isinstance(study, FastOrDeepStudy)
    first, last = (study.where(results, eta=eta, tolerance=FastOrDeepStudy.TOLERANCE) for eta in (0.005, 3.0))
    assert all(row["speedup"] > 10 and row["degree"] <= 1 for row in first)
    assert all(row["speedup"] == 1 for row in last)
    shallow, deep = (study.where(results, eta=eta, tolerance=FastOrDeepStudy.ERROR) for eta in (0.005, 3.0))
    assert all(row["certified"] == 1 for row in shallow)
    assert all(row["measured"] == 2 for row in deep)
    figure = study.draw(results)
    assert len(figure.axes) == 3
    assert "too\nlarge" in {text.get_text() for text in figure.axes[0].texts}
