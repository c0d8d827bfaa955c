"""Grids are checked as a whole before anything runs, and cells are identified by their definition."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthgauge.base.errors import InputError
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import MOST_CELLS, Cell, Grid, canonical_json, parse_grid, read_grid

PLAIN: dict[str, Any] = {
    "method": ["mean-field", "parallel"],
    "eta": [0.01],
    "layers": [2],
    "heads": [1],
    "dim": [4],
    "tokens": [8, 16],
}


def only(task: str, **parameters: Any) -> Cell:
    (cell,) = Grid(TASKS[task], {name: [value] for name, value in parameters.items()}).cells()
    return cell


def test_each_combination_and_repetition_is_a_cell() -> None:
    cells = Grid(TASKS["collapse-error"], PLAIN, 3).cells()
    assert len(cells) == 12
    assert len({cell.identity for cell in cells}) == 12
    assert [cell.repetition for cell in cells[:4]] == [0, 1, 2, 0]
    assert {(cell.parameters["method"], cell.parameters["tokens"]) for cell in cells} == {
        (method, tokens) for method in PLAIN["method"] for tokens in PLAIN["tokens"]
    }


def test_reading_a_grid_file(tmp_path: Path) -> None:
    (tmp_path / "g.toml").write_text(
        'task = "collapse-error"\nrepetitions = 2\n[parameters]\nmethod = ["mean-field"]\neta = [0.01, 1]\n'
        "layers = [2]\nheads = [1]\ndim = [4]\ntokens = [8]\nskip = [true]\n",
        encoding="utf-8",
    )
    grid = read_grid(tmp_path / "g.toml", TASKS)
    assert grid.name == "g.toml"
    assert parse_grid(grid.document(), TASKS) == grid
    assert [cell.parameters["eta"] for cell in grid.cells()] == [0.01, 0.01, 1.0, 1.0]


def test_explicit_defaults_give_the_same_cell() -> None:
    short = {name: values[0] for name, values in PLAIN.items()}
    written = {"distribution": "uniform", "radius": 1, "skip": True, "seed": 0}
    assert only("collapse-error", **short) == only("collapse-error", **written, **short)
    assert only("collapse-error", **short).identity == only("collapse-error", **dict(reversed(short.items()))).identity
    for name, other in {"distribution": "sign", "radius": 2.0, "seed": 1, "eta": 0.02}.items():
        assert only("collapse-error", **short | {name: other}).identity != only("collapse-error", **short).identity


def test_separation_cells_contain_the_defaults_of_the_paper() -> None:
    cell = only("separation", kind="self")
    assert cell.parameters["m"] == 15
    assert cell.identity == only("separation", kind="self", n=200, d=22, m=15, b=0.2, c=0.8, a1=1.2).identity
    assert only("separation", kind="self", c=0.7, b="tied").parameters["b"] == 0.3


def test_a_separation_cell_computes_all_its_repetitions() -> None:
    (cell,) = Grid(TASKS["separation"], {"kind": ["cross"]}, 500).cells()
    assert cell.repetition == 500


@given(
    eta=st.floats(1e-6, 10),
    layers=st.integers(1, 99),
    repetition=st.integers(0, 9),
    version=st.integers(1, 9),
    skip=st.booleans(),
)
def test_identity_and_seed_depend_on_the_whole_definition(
    eta: float, layers: int, repetition: int, version: int, skip: bool
) -> None:
    given_parameters = {"eta": eta, "layers": layers, "skip": skip}
    cell = Cell("t", version, given_parameters, repetition)
    again = Cell("t", version, dict(reversed(given_parameters.items())), repetition)
    assert cell.identity == again.identity
    assert cell.seed("network") == again.seed("network") != cell.seed("inputs")
    assert 0 <= cell.seed("network") < 2**63
    others = [
        Cell("u", version, given_parameters, repetition),
        Cell("t", version + 1, given_parameters, repetition),
        Cell("t", version, given_parameters, repetition + 1),
        Cell("t", version, given_parameters | {"skip": not skip}, repetition),
    ]
    assert len({cell.identity, *(other.identity for other in others)}) == 5


def test_canonical_json_rejects_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": float("nan")})


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"task": "collapse-eror"}, "the key 'parameters' is missing"),
        ({"parameters": {}}, "the key 'task' is missing"),
        ({"task": "collapse-eror", "parameters": {}}, "did you mean 'collapse-error'"),
        ({"task": ["collapse-error"], "parameters": {}}, "task must be one of collapse-error, certificate"),
        ({"task": "collapse-error", "parameters": {}, "repetition": 3}, "must be one of task, repetitions, parameters"),
        ({"task": "collapse-error", "parameters": [1]}, "parameters must be a table of lists"),
        ({"task": "collapse-error", "parameters": PLAIN | {"etas": [1]}}, "unknown parameter 'etas'; collapse-error"),
        ({"task": "collapse-error", "parameters": {"eta": [0.1]}}, "the parameter 'method' is missing"),
        ({"task": "collapse-error", "parameters": PLAIN | {"eta": 0.1}}, "write eta = [0.1]"),
        ({"task": "collapse-error", "parameters": PLAIN | {"eta": []}}, "parameters.eta is an empty list"),
        ({"task": "collapse-error", "parameters": PLAIN | {"eta": [-1.0]}}, "eta must be a positive number, got -1.0"),
        ({"task": "collapse-error", "parameters": PLAIN | {"eta": [True]}}, "eta must be a finite number, got True"),
        ({"task": "collapse-error", "parameters": PLAIN | {"eta": [0.1, "x"]}}, "eta must be a finite number, got 'x'"),
        ({"task": "collapse-error", "parameters": PLAIN | {"layers": [2.5]}}, "layers must be a whole number"),
        ({"task": "collapse-error", "parameters": PLAIN | {"skip": [0]}}, "skip must be true or false, got 0"),
        ({"task": "collapse-error", "parameters": PLAIN | {"method": ["meanfield"]}}, "did you mean 'mean-field'"),
        ({"task": "collapse-error", "parameters": PLAIN | {"distribution": [1]}}, "distribution must be one of"),
        ({"task": "collapse-error", "parameters": PLAIN | {"skip": [False]}}, "parallel does not apply"),
        ({"task": "collapse-error", "parameters": PLAIN | {"seed": [-1]}}, "seed must be a whole number"),
        ({"task": "collapse-error", "parameters": PLAIN | {"seed": [2**63]}}, "seed must be a whole number"),
        ({"task": "collapse-error", "parameters": PLAIN | {"eta": [1, 1.0]}}, "contains the same cell twice"),
        ({"task": "collapse-error", "parameters": PLAIN, "repetitions": 0}, "repetitions must be a whole number"),
        ({"task": "separation", "parameters": {"kind": ["self"], "d": [9]}}, "n must be a multiple of d − 2"),
        ({"task": "separation", "parameters": {"kind": ["cross"], "b": [0.2]}}, "b is not used by kind cross"),
        ({"task": "separation", "parameters": {"kind": ["self"], "attention": ["cos"]}}, "attention must be one of"),
        ({"task": "separation", "parameters": {"kind": ["self"], "seed": range(MOST_CELLS + 1)}}, "split it"),
    ],
)  # fmt: skip
def test_invalid_grids_are_rejected(document: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        parse_grid(document, TASKS)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"task = ", "is not a TOML file"), (b"task = '\xff'", "is not a TOML file"), (None, "No such file")],
)
def test_files_that_are_not_grids_are_rejected(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "g.toml").write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        read_grid(tmp_path / "g.toml", TASKS)


def test_errors_list_the_parameters_of_the_task() -> None:
    assert set(TASKS) >= {"collapse-error", "certificate", "effective-depth", "rank-collapse", "separation"}
    for task in TASKS.values():
        with pytest.raises(InputError, match="unknown parameter 'nonsense'") as raised:
            Grid(task, {"nonsense": [1]})
        assert all(name in str(raised.value) for name in task.parameters)
