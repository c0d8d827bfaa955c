"""Every family that transformers can build is gauged and shrunk, or refused for a known reason.

`docs/families.md` has one row for each. `make test` checks a dozen of them, and `make test-families` all.
"""

from pathlib import Path

import pytest
from family_configs import OVERRIDES, FamilyCase, family_cases
from family_rows import family_row, quick_shrinks
from write_families import PAGE, counts, rows_of

# Each was a defect once, or stands for many.
REPRESENTATIVES = (
    "llama", "mixtral", "openai-gpt", "xlnet", "gemma3", "gemma4_unified_text", "bert", "layoutlm", "ibert", "neomme",
    "clip_text_model", "luke", "git", "squeezebert", "xmod", "t5", "led", "nllb-moe", "vit", "dinov3_vit", "swin",
)  # fmt: skip


def cases() -> list[object]:
    """Return every family; those that are not representatives are left to `make test-families`."""
    return [
        pytest.param(case, id=str(case), marks=[] if case.model_type in REPRESENTATIVES else [pytest.mark.families])
        for case in family_cases()
    ]


@pytest.mark.parametrize("case", cases())
@pytest.mark.filterwarnings("ignore")
def test_a_family_does_what_the_page_says(case: FamilyCase, tmp_path: Path) -> None:
    with quick_shrinks():
        row = family_row(case, tmp_path)
    (line,) = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {case.model_type} |")]
    assert row.line() == line


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_knows_its_language_is_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OVERRIDES, "xmod", {"default_language": "en_XX"})
    (case,) = [case for case in family_cases() if case.model_type == "xmod"]
    with quick_shrinks():
        row = family_row(case, tmp_path)
    assert (row.gauge, row.heads, row.removed, row.reload) == ("yes", "yes", "any", "equal")


def test_the_page_has_a_row_for_every_family_and_counts_them() -> None:
    text = PAGE.read_text("utf-8")
    rows = rows_of(text)
    assert {row.family for row in rows} == {case.model_type for case in family_cases()}
    assert "\n".join(counts(rows)) in text
