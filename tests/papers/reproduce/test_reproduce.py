"""`reproduce`: from the id of a figure to its files; rows can be recomputed alone, settings are complete."""

import csv
import json
from functools import partial
from pathlib import Path

import pytest

from depthgauge.base.errors import DepthgaugeError, InputError, InterruptedRunError, OutputError
from depthgauge.papers.reproduce import study as module
from depthgauge.papers.reproduce.catalog import DEFAULT_FIGURES, FIGURES
from depthgauge.papers.reproduce.separation_figures import CONDITIONS
from depthgauge.papers.reproduce.study import Study, find_study
from depthgauge.papers.separation.probability import estimate, separate_setting
from depthgauge.papers.separation.settings import SHEETS, Regression, build_setting
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import Cell, Task
from depthgauge.sweeps.run import Local
from depthgauge.sweeps.store import read_status

HERE = Local(1)
reproduce = partial(module.reproduce, engine=HERE)
reproduce_all = partial(module.reproduce_all, engine=HERE)


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def test_five_files_beside_the_store(tmp_path: Path) -> None:
    done = reproduce("B7b", tmp_path / "deep" / "er", models=20)
    assert done.figure == "B7b"
    assert done.points == 10
    names = [path.name for path in done.files]
    assert names == ["B7b.png", "B7b.svg", "B7b.csv", "B7b.json", "B7b.txt"]
    assert sorted(path.name for path in (tmp_path / "deep" / "er").iterdir()) == sorted([*names, "figures.db"])


@pytest.mark.parametrize("figure", ["B4", "B7b", "A1", "A2", "A3", "A4"])
def test_captions_state_repetitions_and_seed(figure: str) -> None:
    caption = find_study(figure, 17, 5).caption()
    assert caption.startswith(f"{figure}. ")
    assert "17 repetitions" in caption
    assert "seed 5" in caption
    assert "$" not in caption
    assert str(find_study(figure).caption()) != caption


@pytest.mark.parametrize("figure", ["B4b", "B5d", "B7b"])
def test_a_point_computed_alone_equals_its_row(figure: str, tmp_path: Path) -> None:
    reproduce(figure, tmp_path, models=30, seed=11)
    rows = read(tmp_path / f"{figure}.csv")
    for row in rows[:: max(1, len(rows) // 6)]:
        given = {name: float(row[name]) for name in ("a0", "a1", "b", "c") if row[name]}
        sizes = {name: int(row[name]) for name in ("n", "d", "m")}
        setting = build_setting(row["kind"], x=row["x"], attention=row["attention"], **given, **sizes)
        alone = separate_setting(setting, int(row["models"]), int(row["seed"])).to_json()
        assert float(row["exact"]) == alone["exact"]
        assert float(row["ratio"]) == alone["ratio"] == int(row["successes"]) / 30
        assert [float(row["low"]), float(row["high"])] == alone["interval"]
        assert [float(row[name]) for name in CONDITIONS] == alone["parts"]
        assert [float(row[f"exact_{name}"]) for name in CONDITIONS] == alone["exact_parts"]
        assert row["value"] == row[row["variable"]]


def test_regression_rows_have_no_exact_value(tmp_path: Path) -> None:
    reproduce("B3b", tmp_path, models=5)
    rows = read(tmp_path / "B3b.csv")
    assert len(rows) == 100
    assert {row["exact"] for row in rows} == {""}
    assert {row["d"] for row in rows} == {""}
    fourth = estimate(Regression(1000, 4), 5)
    assert float(rows[3]["ratio"]) == fourth.ratio
    assert separate_setting(Regression(50, 4), 5).to_json()["exact"] is None


@pytest.fixture(scope="module")
def sheet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of B7, with its own store."""
    folder = tmp_path_factory.mktemp("sheet")
    reproduce("B7", folder / "B7", models=3, seed=4, store=folder / "mine.db")
    return folder / "B7"


def test_the_settings_are_complete(sheet: Path) -> None:
    about = json.loads((sheet / "B7.json").read_text(encoding="utf-8"))
    assert about["schema"] == "depthgauge.figure/1"
    assert about["seed"] == 4
    assert [panel["id"] for panel in about["panels"]] == ["B7a", "B7b", "B7c", "B7d", "B7e"]
    first, *_, last = about["panels"]
    assert first["models"] == 3
    assert first["fixed"] == {
        "kind": "cross",
        "d": 11,
        "m": [10, 12],
        "a0": 0.01,
        "a1": 3.0,
        "x": "identity",
        "attention": "exp",
    }
    assert "d = 11" in last["note"]
    rows = read(sheet / "B7.csv")
    assert [row["panel"] for row in rows] == [p["id"] for p in about["panels"] for _ in p["values"]]


def test_the_default_number_of_models_is_that_of_the_paper(tmp_path: Path) -> None:
    reproduce("B4b", tmp_path)
    assert {row["models"] for row in read(tmp_path / "B4b.csv")} == {"100"}


def test_the_degree_sheet_has_a_curve_for_every_n(tmp_path: Path) -> None:
    reproduce("B-degree-c", tmp_path, models=3)
    rows = read(tmp_path / "B-degree-c.csv")
    assert {int(row["n"]) for row in rows} == {200, 2_000, 20_000, 200_000}
    needed = {}  # the least degree with probability above one half grows with n
    for row in rows:
        if float(row["exact"]) > 0.5:
            needed.setdefault(int(row["n"]), int(row["value"]))
    assert list(needed.values()) == sorted(set(needed.values()))
    assert len(needed) == 4


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        reproduce("B7b", tmp_path / directory, models=4)
    for path in (tmp_path / "one").glob("B7b.*"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_wrong_id_stops_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="got 'B9'"):
        reproduce_all(["B7b", "B9"], tmp_path / "out", models=2)
    assert not (tmp_path / "out").exists()


def test_no_id_means_all_default_figures_and_duplicates_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(figure: str, *_: object, **__: object) -> module.Reproduction:
        asked.append(figure)
        return module.Reproduction(figure, 0, ())

    monkeypatch.setattr(module, "reproduce", note)
    reproduce_all([], tmp_path)
    assert asked == ["A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "B3", "B4", "B5", "B7", "B-degree"]
    asked.clear()
    reproduce_all(["B4a", "B4a"], tmp_path)
    assert asked == ["B4a"]


def test_models_must_be_a_count(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="models must be a whole number of at least 1, got 0"):
        reproduce("B7b", tmp_path, models=0)


def test_a_directory_that_cannot_be_created_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(OutputError, match=r"cannot create the folder .*out: .*file is a file; give another --out"):
        reproduce("B7b", tmp_path / "file" / "out", models=2)
    with pytest.raises(OutputError, match="cannot create the folder"):
        reproduce("B7b", tmp_path / "file" / "out", models=2, store=tmp_path / "s.db")


def test_progress_counts_every_point(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    reproduce("B7b", tmp_path, models=2, progress=lambda done, total, label: seen.append((done, total, label)))
    assert [done for done, _, _ in seen] == list(range(11))
    assert all(total == 10 and label.startswith("B7b") for _, total, label in seen)


def test_the_summary_shows_exact_beside_drawn() -> None:
    found = separate_setting(build_setting("cross"), 50)
    text = found.summary()
    assert found.exact is not None
    assert f"{found.exact.success:.6f}" in text
    assert f"{found.estimate.ratio:.6f}" in text
    assert "F_lin(D₀) = 0" in text
    assert "–" in separate_setting(Regression(50, 4), 5).summary()


def test_the_catalog_lists_the_sheets_and_panels_of_paper_b() -> None:
    sheets = {name: figure for name, figure in FIGURES.items() if name.startswith("B")}
    assert list(sheets) == list(SHEETS)
    for name, figure in sheets.items():
        assert figure.panels == tuple(panel.id for panel in SHEETS[name].panels)


@pytest.mark.parametrize("figure", DEFAULT_FIGURES)
def test_every_figure_of_the_catalog_has_a_study(figure: str) -> None:
    assert isinstance(find_study(figure), Study)
    assert FIGURES[figure].shows.endswith(".")


# --- the store --------------------------------------------------------------------------------------------


def test_an_interrupted_figure_is_resumed(tmp_path: Path) -> None:
    def stop(done: int, total: int, label: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="4 of 10 cells done and kept"):
        reproduce("B7b", tmp_path / "a", models=7, progress=stop)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["figures.db"]
    totals: list[int] = []
    reproduce("B7b", tmp_path / "a", models=7, progress=lambda done, total, label: totals.append(total))
    assert totals[0] == 6
    totals.clear()
    reproduce("B7b", tmp_path / "a", models=7, progress=lambda done, total, label: totals.append(total))
    assert totals == [0]
    reproduce("B7b", tmp_path / "b", models=7)
    for path in (tmp_path / "b").glob("B7b.*"):
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_a_sheet_and_its_panels_share_cells(sheet: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mkdir -p"):
        reproduce("B7", tmp_path / "sheet", models=3, store=tmp_path / "missing" / "mine.db")
    assert list(tmp_path.iterdir()) == []
    store = sheet.with_name("mine.db")
    done = read_status(store).count.done
    totals: list[int] = []
    reproduce("B7d", tmp_path / "panel", models=3, seed=4, store=store, progress=lambda *step: totals.append(step[1]))
    assert totals == [0]
    assert read_status(store).count.done == done
    assert not (sheet / "figures.db").exists()


def test_a_failed_point_raises_and_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = TASKS["separation"]

    def fails(cell: Cell) -> dict[str, object]:
        raise ValueError("no luck") if cell.parameters["d"] == 5 else ZeroDivisionError

    monkeypatch.setitem(TASKS, "separation", Task(**{**vars(broken), "run": fails}))
    with pytest.raises(DepthgaugeError, match="B7b could not be computed: ZeroDivisionError"):
        reproduce("B7b", tmp_path, models=3)
    assert not (tmp_path / "B7b.png").exists()
    monkeypatch.setitem(TASKS, "separation", broken)
    assert reproduce("B7b", tmp_path, models=3).points == 10
