"""Every family that transformers can build is gauged and shrunk, or refused for a known reason.

`docs/families.md` has one row for each. `make test` runs six of different structure, and `make test-families` the
others.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from family_configs import OVERRIDES, FamilyCase, family_cases
from family_rows import NO, FamilyRow, FamilyRun, quick_shrinks, run_family
from write_families import KINDS, PAGE, counts, rows_of

REPRESENTATIVES = ("gemma2", "mixtral", "xlnet", "bert", "t5", "vit")
"""Norms around sublayers and windows; experts; states in another order, refused; an encoder; two stacks; images."""
LEAST = {
    "decoder": (147, 135, 97, 125, 120, 83),
    "encoder": (51, 44, 28, 36, 33, 9),
    "encoder–decoder": (36, 30, 9, 20, 20, 13),
    "vision": (47, 19, 16, 16, 14, 10),
}
"""How many families are at least built, gauged, with observed heads, shrunk, repaired, and by least squares."""
Run = Callable[[FamilyCase], FamilyRun]


def cases(shrunk: bool = False) -> list[object]:
    """Return every family, or those that are shrunk; what is done with one is computed in one process."""
    rows = {row.family: row for row in rows_of(PAGE.read_text("utf-8"))}
    found = [case for case in family_cases() if not shrunk or rows[case.model_type].reload == "equal"]
    marks = {case: [pytest.mark.xdist_group(case.model_type)] for case in found}
    for case in found:
        marks[case] += [] if case.model_type in REPRESENTATIVES else [pytest.mark.families]
    return [pytest.param(case, id=str(case), marks=marks[case]) for case in found]


def unexplained(row: FamilyRow) -> list[str]:
    """Return what was not done with a family although its row gives no reason, and reasons without an effect."""
    reasons = row.reason.split("; ") if row.reason else []
    about_heads = [reason for reason in reasons if reason.startswith("heads: ")]
    others = [reason for reason in reasons if reason not in about_heads]
    left_out = any(reason.startswith("the search left out") for reason in others)
    is_removed = row.removed != NO
    found = {
        "not gauged": row.gauge == "yes" or bool(others),
        "heads": row.gauge != "yes" or (row.heads == "yes") == (not about_heads),
        "not removed": is_removed or bool(others),
        "removed": not is_removed or (row.removed == "some") == left_out,
        "not repaired": not is_removed or row.repair != NO or "repair: its sublayers were not found" in others,
        "cache": (row.cache == "equal") == (is_removed and row.kind in ("decoder", "encoder–decoder")),
        "reload": (row.reload == "equal") == is_removed,
    }
    return [name for name, is_right in found.items() if not is_right]


@pytest.mark.parametrize("case", cases())
def test_a_family_does_what_the_page_says(case: FamilyCase, family_run: Run) -> None:
    (line,) = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {case.model_type} |")]
    assert family_run(case).row.line() == line


@pytest.mark.parametrize("case", cases())
def test_what_is_not_done_has_a_reason(case: FamilyCase, family_run: Run) -> None:
    assert unexplained(family_run(case).row) == []


@pytest.mark.parametrize("case", cases(shrunk=True))
def test_the_smaller_model_is_described(case: FamilyCase, family_run: Run) -> None:
    """It has a layer less, and its repair does not raise the objective on the selection windows."""
    run = family_run(case)
    assert run.record is not None
    assert run.record.layers_after == run.record.layers_before - 1
    assert json.loads((run.smaller / "depthgauge.json").read_text("utf-8")) == run.record.to_json()
    (best,) = [one for one in run.record.plan.candidates if one.chosen]
    assert best.removed == run.record.removed
    if run.row.repair != NO:
        assert best.repaired is not None
        assert best.repaired <= min(one.increase for one in run.record.plan.candidates) + 1e-6
    assert run.record.guarantee is not None
    assert run.record.guarantee.quantile.increase is not None


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_knows_its_language_is_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OVERRIDES, "xmod", {"default_language": "en_XX"})
    (case,) = [case for case in family_cases() if case.model_type == "xmod"]
    with quick_shrinks():
        row = run_family(case, tmp_path).row
    assert (row.gauge, row.heads, row.removed, row.reload) == ("yes", "yes", "any", "equal")


def test_the_page_has_a_row_for_every_family_and_counts_them() -> None:
    text = PAGE.read_text("utf-8")
    rows = rows_of(text)
    assert {row.family for row in rows} == {case.model_type for case in family_cases()}
    assert "\n".join(counts(rows)) in text


def test_no_kind_of_families_lost_one() -> None:
    """The page is written by a program, which would write less without a complaint."""
    lines = [
        line
        for line in counts(rows_of(PAGE.read_text("utf-8")))
        if line.startswith(tuple(f"| {k}" for k in KINDS.values()))
    ]
    for kind, line in zip(KINDS, lines, strict=True):
        _, *numbers = map(int, re.findall(r"\d+", line))
        assert len(numbers) == len(LEAST[kind])
        assert all(number >= least for number, least in zip(numbers, LEAST[kind], strict=True)), line


def test_cells_without_a_reason_are_found() -> None:
    rows = rows_of(PAGE.read_text("utf-8"))
    assert {row.family: found for row in rows if (found := unexplained(row))} == {}
    (good,) = [row for row in rows if row.family == "llama"]
    assert good.reason == ""
    for cells, what in (
        ({"gauge": NO, "heads": NO}, "not gauged"), ({"heads": "no"}, "heads"), ({"removed": "some"}, "removed"),
        ({"removed": NO, "repair": NO, "cache": NO, "reload": NO}, "not removed"), ({"repair": NO}, "not repaired"),
        ({"cache": NO}, "cache"), ({"reload": NO}, "reload"), ({"reason": "heads: it has none"}, "heads"),
    ):  # fmt: skip
        assert unexplained(replace(good, **cells)) == [what]
