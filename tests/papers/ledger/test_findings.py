"""The records of the ledger are plain data: they compare, pickle, print in one line, and become tables."""

import importlib
import json
import pickle
import sys
from fractions import Fraction

import numpy as np
import pytest

import depthgauge as dg
from depthgauge.base.errors import MissingPackageError
from depthgauge.papers.ledger.claim import Finding, Findings, Witness
from depthgauge.papers.ledger.registry import MEANING, STUDY_MEANING, page, run, select

COLUMNS = ["id", "paper", "statement", "verdict", "ratio", "witness", "corrected"]


@pytest.fixture(scope="module")
def findings():
    """A failing statement, a misprint, a statement that holds, and one for which no time is left."""
    chosen = [claim for id in ("A.3.3.2", "A.4.2.3", "A.3.2") for claim in select(id=id)]
    return Findings((*run(chosen, processes=1), *run(select(id="ours.corrected"), budget=1e-9)))


def test_findings_survive_pickling_and_compare_equal(findings):
    copy = pickle.loads(pickle.dumps(findings))
    assert type(copy) is Findings
    assert copy == findings
    assert copy[0] == findings[0]
    assert copy[0] != findings[1]
    assert hash(copy[0]) == hash(findings[0])
    assert copy[0].witness == findings[0].witness
    assert copy[0].witness != findings[1].witness


def test_a_finding_of_the_same_statement_is_equal():
    first, second = dg.papers.claims(id="A.3.3.3"), dg.papers.claims(id="A.3.3.3")
    assert first == second
    assert first is not second


def test_reprs_are_one_short_line(findings):
    assert repr(findings) == "Findings(4 statements: 1 holds, 1 fails, 1 misprint, 1 undecided)"
    assert repr(Findings()) == "Findings(0 statements: none)"
    assert repr(findings[0]) == "Finding('A.3.3.2', 'fails', ratio=2, corrected='ours.product-max')"
    assert repr(findings[2]) == "Finding('A.3.2', 'holds', ratio=1)"
    for record in (findings, *findings, findings[0].witness):
        assert "\n" not in repr(record)
        assert len(repr(record)) < 120


def test_html_is_escaped(findings):
    finding = Finding("A.x", "A", "a < b", "fails", story="a < b & c")
    assert "a &lt; b &amp; c" in finding._repr_html_()
    assert "<td>a &lt; b</td>" in Findings([finding])._repr_html_()
    assert "<table>" in findings._repr_html_()
    assert "A = [[1, 1]]" in findings[0].witness._repr_html_()


def test_a_witness_holds_plain_fractions(findings):
    witness = findings[0].witness
    assert witness.instance == {"A": ((Fraction(1), Fraction(1)),), "B": ((Fraction(1),), (Fraction(1),))}
    assert witness.to_json() == {"A": [["1", "1"]], "B": [["1"], ["1"]]}
    assert witness.arrays()["B"].shape == (2, 1)
    assert np.abs(witness.arrays()["A"] @ witness.arrays()["B"]).max() == 2
    assert Witness({"n": 3, "x": Fraction(1, 2)}, "1", "0", None, ()).text() == "n = 3, x = 1/2"


def test_json_and_frame_have_the_same_rows(findings):
    pandas = pytest.importorskip("pandas")
    rows = findings.to_json()
    assert [list(row) for row in rows] == [COLUMNS] * 4
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    frame = findings.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == COLUMNS
    assert list(frame["verdict"]) == ["fails", "misprint", "holds", "undecided"]
    assert frame["ratio"][0] == 2
    assert len(Findings().to_frame()) == 0


def test_to_frame_names_the_missing_package(findings, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match=r"needs the extra `frames`.*pip install"):
        findings.to_frame()


def test_to_json_runs_no_check(findings, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a check was run")

    monkeypatch.setattr(importlib.import_module("depthgauge.papers.ledger.registry"), "judge", fail)
    assert findings.to_json()[0]["verdict"] == "fails"


def test_stories_state_what_was_shown(findings):
    failing, misprint, holding, undecided = (finding.story.splitlines()[0] for finding in findings)
    assert failing.endswith("fails: counterexample, verified exactly")
    assert misprint.endswith("none found to the intended form")
    assert holding.endswith("holds: no counterexample found by this search (not a proof)")
    assert undecided.endswith(f"undecided: {STUDY_MEANING['undecided']}")


def test_the_page_names_both_papers_and_every_verdict(findings):
    text = page(findings)
    assert "Only Large Weights (And Not Skip Connections) Can Prevent the Perils of Rank Collapse" in text
    assert "Superiority of Softmax: Unveiling the Performance Edge Over Linear Attention" in text
    assert all(meaning in text for meaning in MEANING.values())
    assert "### A.3.3.2" in text
    assert "### A.3.2" not in text
