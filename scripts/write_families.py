"""Write docs/families.md: what `gauge` and `shrink` do with a tiny model of every family of transformers.

`python scripts/write_families.py` takes about ten minutes on two cores. With names of families, only their rows change.
"""

import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from family_configs import FamilyCase, family_cases  # noqa: E402
from family_rows import NO, FamilyRow, quick_shrinks, run_family  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
KINDS = {
    "decoder": "decoders",
    "encoder": "encoders",
    "encoder–decoder": "encoder–decoder models",
    "vision": "vision models",
}
_INTRODUCTION = """\
# Families

What `gauge` and `shrink` do with each family of text and image models of transformers {version}.

For each family, a tiny model with random weights (four layers, width 32, 40 tokens) was made from the defaults of its
configuration and saved. It was gauged, one of its blocks was removed, and what was written was loaded again in another
process. Models of images read random images of their size, and encoder–decoder models read pairs of texts; the block
that was removed is one of the decoder. A family counts as shrunk if the written model has the same weights and outputs
as the one in memory and, if it generates text, generates the same with and without its key–value cache.
"""
_COLUMNS = """\
- **heads**: whether the attention weights were observed
- **removed**: which blocks can be removed; `from 1 on` means all but block 0, `some` that the search left out sets of
  blocks without which the model cannot be built or run
- **repair**: `least squares` means that the maps into the residual stream were fitted and then trained, `training` that
  they, norms and biases were trained alone. It is counted if it ran; on random weights it is often undone, because it
  does not help
- **cache**, **reload**: generation with and without cache, and the outputs of the reloaded model
- **reason**: why something was not done

Tiny models show what the code does, not how good a shrunk model is. `make test-families` checks every row, and `make
test` some of them. `python scripts/write_families.py` writes this page.
"""
_HEADER = "| family | kind | gauge | heads | removed | repair | cache | reload | reason |"


def rows_of(text: str) -> list[FamilyRow]:
    """Return the rows of the table in a page."""
    lines = [line for line in text.partition(_HEADER)[2].splitlines() if line.startswith("| ") and "---" not in line]
    return [FamilyRow(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def counts(rows: Sequence[FamilyRow]) -> Iterator[str]:
    """Yield the lines of the table of counts."""
    yield "| kind | families | built | gauged | heads observed | shrunk | repaired | by least squares |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for kind, plural in KINDS.items():
        these = [row for row in rows if row.kind == kind]
        cells = (
            len(these),
            sum(not row.reason.startswith("not built") for row in these),
            sum(row.gauge == "yes" for row in these),
            sum(row.heads == "yes" for row in these),
            sum(row.reload == "equal" for row in these),
            sum(row.repair != NO for row in these),
            sum(row.repair == "least squares" for row in these),
        )
        yield f"| {plural} | {' | '.join(map(str, cells))} |"


def page(rows: Sequence[FamilyRow]) -> str:
    """Return the page with these rows."""
    import transformers

    ordered = sorted(rows, key=lambda row: ([*KINDS].index(row.kind), row.family))
    table = [_HEADER, re.sub(r"[^|]+", " --- ", _HEADER), *(row.line() for row in ordered)]
    introduction = _INTRODUCTION.format(version=transformers.__version__)
    return "\n".join([introduction, *counts(rows), "", _COLUMNS, *table]) + "\n"


def measured(case: FamilyCase) -> FamilyRow | str:
    """Return the row of a family, or an error that is not one of ours."""
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, quick_shrinks():
        warnings.simplefilter("ignore")
        try:
            return run_family(case, Path(folder)).row
        except Exception as error:
            return f"{case}: {type(error).__name__}: {error}"


def main(names: Iterable[str]) -> None:
    """Measure the named families, or all, and write the page; a family that fails keeps its row, and is named."""
    chosen = set(names)
    cases = [case for case in family_cases() if not chosen or case.model_type in chosen]
    known, failed = {case.model_type for case in family_cases()}, []
    with get_context("spawn").Pool(2, maxtasksperchild=40) as pool:
        for one in pool.imap_unordered(measured, cases):
            if isinstance(one, str):
                failed.append(one)
                continue
            kept = [row for row in rows_of(PAGE.read_text("utf-8")) if row.family in known - {one.family}]
            PAGE.write_text(page([*kept, one]), "utf-8")
    sys.exit("\n".join(failed) or None)


if __name__ == "__main__":
    main(sys.argv[1:])
