"""Figures T1 to T4 on tiny models: rows, captions, drawings, rows taken from a CSV file, and the batch run."""

import csv
import gzip
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from depthgauge.base.errors import InputError
from depthgauge.papers.reproduce import trained_figures
from depthgauge.papers.reproduce.study import Computing, Reproduction, find_study, reproduce
from depthgauge.papers.reproduce.trained_figures import DepthPays, TrainedStudy
from depthgauge.papers.trained_depth import bounded_training
from depthgauge.papers.trained_depth.bounded_training import FULL, QUICK, member_seeds
from depthgauge.sweeps.run import Local
from depthgauge.sweeps.store import export_rows, read_rows

TINY = replace(
    QUICK,
    problems=("majority", "s3"),
    contrasted=("majority",),
    etas=(0.005, 3.0),
    few=(0.005, 3.0),
    layers=(1, 2),
    shape={"heads": 1, "dim": 3, "steps": 6, "batch": 4, "rate": 0.05, "test": 40},
    seeds=2,
)
SINGLE = replace(TINY, problems=("majority",), contrasted=(), etas=(0.005,), few=(0.005,), seeds=1)
SCRIPT = Path(__file__).parents[3] / "docs" / "figures" / "make_trained_depth.py"


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_figures, "QUICK", TINY)
        patch.setattr(bounded_training, "QUICK", TINY)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained") / "s.db"


@pytest.fixture(scope="module")
def written(tiny: None, store: Path) -> Callable[[str], Reproduction]:
    """Write the files of a figure beside the store, once for all tests."""
    return cache(lambda figure: reproduce(figure, store.parent, seed=1, store=store, engine=Local(1), quick=True))


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


@pytest.mark.parametrize(("figure", "models"), [("T1", 2 * 3 * 3), ("T2", 2 * 2), ("T3", 2 * 2 * 4), ("T4", 2 * 3)])
def test_files(figure: str, models: int, written: Callable[[str], Reproduction], store: Path) -> None:
    done, folder = written(figure), store.parent
    rows = read(folder / f"{figure}.csv")
    assert done.points == len(rows) == models * TINY.seeds
    wanted = {"task", "layers", "eta", "seed", "skip", "accuracy", "chance", "certified"}
    assert wanted <= set(rows[0])
    about = json.loads((folder / f"{figure}.json").read_text(encoding="utf-8"))
    assert about["quick"] is True
    assert {grid["task"] for grid in about["grids"]} == {"trained-depth"}
    caption = (folder / f"{figure}.txt").read_text(encoding="utf-8")
    assert caption.startswith(f"{figure}. ")
    assert f"{TINY.seeds} repetitions" in caption
    assert "seed 1" in caption


def test_rows_have_one_model_each(written: Callable[[str], Reproduction], store: Path) -> None:
    written("T1")
    rows = read(store.with_name("T1.csv"))
    assert {float(row["eta"]) for row in rows} == {0.005, 3.0, math.inf}
    assert {row["seed"] for row in rows} == {"0", "1"}
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    assert {round(float(row["chance"]), 6) for row in rows} == {0.5, round(1 / 6, 6)}
    single = [row for row in rows if row["layers"] == "1"]
    assert {row["certified"] for row in single} == {"0.0"}
    assert {row["heads"] for row in single} == {"1", "2"}  # one layer also has the heads of the deepest network
    small = [row for row in rows if row["layers"] == "2" and row["eta"] == "0.005"]
    assert all(0 < float(row["probability"]) < 0.01 for row in small)


def test_the_shaded_region_is_where_every_deepest_model_is_proved(tmp_path: Path, store: Path) -> None:
    study = find_study("T1", None, 1, quick=True)
    assert isinstance(study, DepthPays)
    results = {key: dict(value) for key, value in study.compute(Computing(store, Local(1))).items()}
    at = {"problem": "majority", "layers": 2}
    assert study.proved(results, study.plan.etas, **at)[0] == 0.005
    for cell in study.cells():
        if cell.parameters["layers"] == 2 and cell.parameters["eta"] == 0.005:
            bounds = results[cell.identity]["probability"]
            results[cell.identity]["probability"] = [bounds[0], None]
    assert study.proved(results, study.plan.etas, **at)[0] is None
    figure = study.draw(results)
    assert len(figure.axes) == 2


def test_the_curves_of_t3_are_those_of_the_rows(store: Path) -> None:
    study = find_study("T3", None, 1, quick=True)
    assert isinstance(study, TrainedStudy)
    results = study.compute(Computing(store, Local(1)))
    figure = study.draw(results)
    assert len(figure.axes) == 4
    rows = study.table(results)
    (axes,) = [axes for axes in figure.axes if "no skip, LayerNorm" in axes.get_title(loc="left")]
    lines = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() != "None"]
    drawn = sorted(float(y) for line in lines for y in line.get_ydata())
    expected = []
    for layers in (1, 4):
        for eta in TINY.few:
            seen = [row["accuracy"] for row in rows if (row["layers"], row["eta"], row["skip"], row["norm"]) ==
                    (layers, eta, False, "pre")]  # fmt: skip
            expected.append(sum(seen) / len(seen))  # two models: the median is the mean
    assert drawn == pytest.approx(sorted(expected))


def test_rows_of_an_earlier_run_are_not_computed_again(
    tmp_path: Path, written: Callable[[str], Reproduction], store: Path
) -> None:
    written("T1")
    export_rows(store, tmp_path / "rows.csv")
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "rows.csv").read_bytes()))

    class Idle(Local):
        def outcomes(self, cells: object) -> object:  # type: ignore[override]
            raise AssertionError("a cell was computed")

    for source in (tmp_path / "rows.csv", packed):
        out = tmp_path / source.suffix
        reproduce("T1", out, seed=1, engine=Idle(1), quick=True, rows=source)
        for name in ("T1.csv", "T1.png", "T1.json"):
            assert (out / name).read_bytes() == store.with_name(name).read_bytes()
    with pytest.raises(InputError, match="has no row for these cells"):
        reproduce("T1", tmp_path / "other", seed=2, engine=Idle(1), quick=True, rows=packed)
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no column named identity"):
        reproduce("T1", tmp_path / "bad", seed=1, engine=Idle(1), quick=True, rows=tmp_path / "bad.csv")
    with pytest.raises(InputError, match=r"cannot read rows from .*none\.csv: No such file or directory; give a"):
        reproduce("T1", tmp_path / "none", seed=1, engine=Idle(1), quick=True, rows=tmp_path / "none.csv")


def test_quick_applies_to_trained_figures_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--quick applies to the figures that train models"):
        reproduce("A1", tmp_path, quick=True)


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_trained_depth", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_batch_run_gives_the_rows_of_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_training, "QUICK", SINGLE)
    monkeypatch.setattr(trained_figures, "QUICK", SINGLE)
    made = script()
    made.train(SINGLE, tmp_path / "runs", "cpu", 0.0)
    assert "run the same command again" in capsys.readouterr().out
    made.train(SINGLE, tmp_path / "runs", "cpu", 1e9)
    assert "10 models in" in capsys.readouterr().out
    made.certify(SINGLE, tmp_path / "runs", tmp_path / "t.db", 1)
    batch = {row["identity"]: row for row in read_rows(tmp_path / "t.db")}
    study = find_study("T1", None, 0, quick=True)
    alone = study.compute(Computing(tmp_path / "alone.db", Local(1)))
    assert set(alone) <= set(batch)
    for identity, result in alone.items():
        # Rounding differs with the size of the batch, so an input may fall on the other side of a decision.
        assert batch[identity]["accuracy"] == pytest.approx(result["accuracy"], abs=0.051)
        assert batch[identity]["loss"] == pytest.approx(result["loss"], rel=1e-3)


def test_families_share_everything_but_eta() -> None:
    made = script()
    cells = list(made.parameters_of(FULL))
    found = made.families(cells, member_seeds(0, FULL.seeds))
    assert len({family.name for family in found}) == len(found)
    models = sum(len(family.etas) * len(family.seeds) for family in found)
    assert models >= 200
    names = {(f.parameters["problem"], f.parameters["layers"], f.parameters["heads"]) for f in found}
    assert {(problem, layers, FULL.shape["heads"]) for problem in FULL.problems for layers in FULL.layers} <= names
    assert all(len(set(family.etas)) == len(family.etas) for family in found)


def test_the_batch_run_trains_without_packages_that_prove_or_draw(tmp_path: Path) -> None:
    """A machine with a GPU may have torch, numpy and jaxtyping only."""
    code = f"""
import sys
for name in ("flint", "matplotlib", "typer", "rich", "joblib", "safetensors", "transformers", "scipy"):
    sys.modules[name] = None
sys.argv = ["make", "train", {str(tmp_path / "runs")!r}, "--quick"]
import depthgauge.papers.trained_depth.bounded_training as experiment
from dataclasses import replace
shape = {{"heads": 1, "dim": 3, "steps": 2, "batch": 4, "rate": 0.05, "test": 20}}
experiment.QUICK = replace(
    experiment.QUICK, problems=("majority",), contrasted=(), etas=(0.1,), layers=(1, 2), shape=shape, seeds=1
)
import runpy
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "10 models in" in done.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 5
