"""`depthgauge claims` as typed."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from depthgauge.cli.main import main
from depthgauge.cli.output import print_terms
from depthgauge.papers.ledger import registry
from depthgauge.papers.ledger.claim import Findings
from depthgauge.papers.ledger.registry import finding, judge, select
from depthgauge.results.labels import TERMS

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"


def settled(text):
    """Return the page without ratios and evaluation counts, whose last digits may differ between processors."""
    text = re.sub(r"^(\| .*? \| (?:holds|undecided)) \| [^|]* \|", r"\1 | |", text, flags=re.MULTILINE)
    text = re.sub(r"^Search  .*$", "Search", text, flags=re.MULTILINE)
    return re.sub(r"\(largest ratio seen [^)]*\)", "", text)


@pytest.fixture
def depthgauge(capsys, monkeypatch):
    """Run `depthgauge claims` with some words, in a terminal of some width."""

    def run(*words, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["depthgauge", "claims", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return SimpleNamespace(returncode=ended.value.code or 0, **capsys.readouterr()._asdict())

    return run


@pytest.mark.docs
@pytest.mark.long
def test_the_page_in_the_docs_is_what_a_run_gives(tmp_path, depthgauge):
    """Compare verdicts, witnesses and stories. `depthgauge claims --out docs/ledger.md` writes the page anew."""
    done = depthgauge("--out", str(tmp_path / "ledger.md"), "--json")
    assert done.returncode == 0, done.err
    fresh, kept = (tmp_path / "ledger.md").read_text(encoding="utf-8"), PAGE.read_text(encoding="utf-8")
    assert settled(fresh) == settled(kept)
    assert settled(kept) != settled(kept.replace("| fails |", "| holds |", 1))
    assert settled(kept) != settled(kept.replace("Q = K = [[1]]", "Q = K = [[2]]"))
    rows = json.loads(done.out)
    assert {row["paper"] for row in rows} == {"A", "B", "ours"}
    assert all(list(row) == ["id", "paper", "statement", "verdict", "ratio", "witness", "corrected"] for row in rows)
    verdicts = {row["id"]: row["verdict"] for row in rows}
    assert all(verdicts[row["corrected"]] == "holds" for row in rows if row["corrected"] is not None)
    assert all(row["witness"] is not None for row in rows if row["verdict"] == "fails" and row["paper"] == "A")


def test_one_story(depthgauge):
    done = depthgauge("--id", "A.3.3.2")
    assert done.returncode == 0
    assert "Step by step" in done.out
    assert "ours.product-max" in done.out


def test_a_table_of_one_paper_and_a_budget(depthgauge):
    done = depthgauge("--paper", "A", "--budget", "0.001")
    assert done.returncode == 0
    assert "undecided" in done.out
    assert "A.D.8.2" in done.out


def test_the_list_computes_nothing(depthgauge):
    rows = json.loads(depthgauge("--list", "--json").out)
    assert len(rows) > 200
    assert all(set(row) == {"id", "paper", "statement"} for row in rows)


def test_ids_ignore_case_and_verdicts_filter(depthgauge):
    done = depthgauge("--id", "a.4.1", "--json")
    assert [row["id"] for row in json.loads(done.out)] == ["A.4.1"]
    assert json.loads(depthgauge("--id", "A.4.1", "--verdict", "holds", "--json").out) == []
    assert depthgauge("--verdict", "true").err.startswith("error: verdict must be one of holds, fails")


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_nothing_is_lost_in_a_narrow_terminal(columns, depthgauge, monkeypatch):
    """Each line fits, and the text is whole once indentation and line ends are taken out."""

    def undecided(chosen, *rest, **options):
        return Findings(finding(claim, judge(claim, deadline=0.0)) for claim in chosen)

    def said(*words):
        lines = depthgauge(*words, columns=columns).out.splitlines()
        assert max(map(cell_len, lines)) <= columns
        return " ".join(" ".join(lines).split())

    statements = {claim.id: claim.statement for claim in select()}
    assert said("--list") == " ".join(" ".join(f"{id} {text}" for id, text in statements.items()).split())
    monkeypatch.setattr(registry, "run", undecided)
    table = said("--paper", "ours")
    for id in filter(lambda id: id.startswith("ours."), statements):
        assert id in table.split()
        assert columns > 80 or f"{id} undecided, ratio –: {statements[id]}" in table


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_glossary_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_terms(TERMS)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert " ".join(lines).split() == " ".join(f"{term} {meaning}" for term, meaning in TERMS.items()).split()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--id", "A.4.9"), "no statement has the id 'A.4.9'"),
        (("--paper", "Z"), "paper must be one of A, B, ours"),
        (("--budget", "-1"), "budget must be a positive number"),
    ],
)
def test_bad_input(words, sentence, depthgauge):
    done = depthgauge(*words)
    assert done.returncode == 2
    assert sentence in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
