"""The panels have the settings of sections 7 and F.6, with the letters of the figure captions."""

import pytest

from depthgauge.base.errors import InputError
from depthgauge.papers.separation.settings import PANELS, SHEETS, CrossAttention, Regression, SelfAttention, grid, sheet

VARIABLES = {
    **dict(zip(("B3a", "B3b"), "nm", strict=True)),
    **{f"B4{letter}": name for letter, name in zip("abcdef", ("n", "d", "m", "c", "a0", "a1"), strict=True)},
    **{f"B5{letter}": name for letter, name in zip("abcdef", ("n", "d", "m", "c", "a0", "a1"), strict=True)},
    **{f"B7{letter}": name for letter, name in zip("abcde", ("n", "d", "m", "a1", "a0"), strict=True)},
}
ENDS = {  # points, first and last value
    "B3a": (191, 100, 2000),
    "B3b": (100, 1, 100),
    "B4a": (81, 200, 1000),
    "B4b": (6, 4, 66),
    "B4c": (80, 1, 80),
    "B4d": (81, 0.5, 0.9),
    "B4e": (80, 0.01, 0.8),
    "B4f": (81, 0.1, 2.98),
    "B7a": (81, 200, 1000),
    "B7b": (10, 2, 51),
    "B7c": (80, 1, 80),
    "B7d": (81, 0.1, 2.98),
    "B7e": (90, 0.01, 0.9),
}


def test_there_are_the_papers_nineteen_panels() -> None:
    found = {name: panel.variable for name, panel in PANELS.items() if not name.startswith("B-degree")}
    assert found == VARIABLES
    assert set(SHEETS) == {"B3", "B4", "B5", "B7", "B-degree"}


@pytest.mark.parametrize("name", ENDS)
def test_the_sweeps_are_the_papers(name: str) -> None:
    for panel in (PANELS[name], PANELS.get(name.replace("B4", "B5"), PANELS[name])):
        assert (len(panel.values), panel.values[0], panel.values[-1]) == ENDS[name]
        assert panel.models == (1000 if name.startswith("B3") else 100)


@pytest.mark.parametrize("name", PANELS)
def test_the_setting_of_every_point_has_the_swept_value(name: str) -> None:
    panel = PANELS[name]
    points = list(panel.settings())
    assert len(points) == len(panel.values) * len(panel.curves)
    for _, value, setting in points:
        if panel.variable == "g":
            assert setting.attention == f"poly:{value}"
        else:
            assert getattr(setting, panel.variable) == value
            assert setting.attention == "exp"


def at(name: str, value: float) -> object:
    return next(setting for _, v, setting in PANELS[name].settings() if v == value)


def test_the_fixed_parameters_are_the_papers() -> None:
    assert at("B3a", 1000) == Regression(1000, 7)
    assert at("B3b", 40) == Regression(1000, 40)
    assert at("B4a", 500) == SelfAttention(500, 12, 15, 0.01, 1.2, 0.2, 0.8, "identity")
    assert at("B4b", 18) == SelfAttention(256, 18, 15, 0.01, 1.2, 0.2, 0.8, "identity")
    assert at("B4c", 33) == SelfAttention(200, 22, 33, 0.01, 1.2, 0.2, 0.8, "identity")
    assert at("B4d", 0.505) == SelfAttention(200, 22, 15, 0.01, 1.2, 0.2, 0.505, "identity")
    assert at("B4e", 0.3) == SelfAttention(200, 22, 15, 0.3, 1.2, 0.2, 0.8, "identity")
    assert at("B5f", 0.136) == SelfAttention(200, 22, 15, 0.01, 0.136, 0.2, 0.8, "ones")
    assert at("B7a", 1000) == CrossAttention(1000, 11, 12, 0.01, 3.0)
    assert at("B7b", 26) == CrossAttention(200, 26, 10, 0.01, 3.0)
    assert at("B7d", 0.1) == CrossAttention(200, 11, 10, 0.01, 0.1)
    assert at("B7e", 0.9) == CrossAttention(200, 11, 10, 0.9, 3.0)


def test_notes_list_what_the_paper_leaves_open() -> None:
    for name, words in (
        ("B3a", "τ = 1/4"),
        ("B4d", "b = 0.2 is kept"),
        ("B5d", "0.01"),
        ("B7d", "d = 11"),
        ("B7e", "d = 11"),
    ):
        assert words in PANELS[name].note


def test_grids_are_computed_in_decimals() -> None:
    assert grid("0.5", "0.9", "0.005")[7] == 0.535  # repeated addition of 0.005 gives 0.5350000000000001
    assert grid("1", "3", "1") == (1, 2, 3)
    assert all(isinstance(value, int) for value in grid("1", "3", "1"))


def test_a_panel_id_gives_a_sheet_with_one_panel_and_a_wrong_id_is_named() -> None:
    assert sheet("B4a").panels == (PANELS["B4a"],)
    assert [panel.id for panel in sheet("B7").panels] == ["B7a", "B7b", "B7c", "B7d", "B7e"]
    with pytest.raises(InputError, match=r"figure must be one of .*, got 'B4g'; did you mean 'B4"):
        sheet("B4g")
