"""`depthgauge claims` as typed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"


def settled(text):
    """Return the page without ratios and evaluation counts, whose last digits may differ between processors."""
    text = re.sub(r"^(\| .*? \| (?:holds|undecided)) \| [^|]* \|", r"\1 | |", text, flags=re.MULTILINE)
    text = re.sub(r"^Search  .*$", "Search", text, flags=re.MULTILINE)
    return re.sub(r"\(largest ratio seen [^)]*\)", "", text)


def depthgauge(*words):
    return subprocess.run(
        [sys.executable, "-m", "depthgauge", "claims", *words], capture_output=True, encoding="utf-8", check=False
    )


@pytest.mark.docs
@pytest.mark.long
def test_the_page_in_the_docs_is_what_a_run_gives(tmp_path):
    """Compare verdicts, witnesses and stories. `depthgauge claims --out docs/ledger.md` writes the page anew."""
    done = depthgauge("--out", str(tmp_path / "ledger.md"), "--json")
    assert done.returncode == 0, done.stderr
    fresh, kept = (tmp_path / "ledger.md").read_text(encoding="utf-8"), PAGE.read_text(encoding="utf-8")
    assert settled(fresh) == settled(kept)
    assert settled(kept) != settled(kept.replace("| fails |", "| holds |", 1))
    assert settled(kept) != settled(kept.replace("Q = K = [[1]]", "Q = K = [[2]]"))
    rows = json.loads(done.stdout)
    assert {row["paper"] for row in rows} == {"A", "B", "ours"}
    assert all(list(row) == ["id", "paper", "statement", "verdict", "ratio", "witness", "corrected"] for row in rows)
    verdicts = {row["id"]: row["verdict"] for row in rows}
    assert all(verdicts[row["corrected"]] == "holds" for row in rows if row["corrected"] is not None)
    assert all(row["witness"] is not None for row in rows if row["verdict"] == "fails" and row["paper"] == "A")


def test_one_story():
    done = depthgauge("--id", "A.3.3.2")
    assert done.returncode == 0
    assert "Step by step" in done.stdout
    assert "ours.product-max" in done.stdout


def test_a_table_of_one_paper_and_a_budget():
    done = depthgauge("--paper", "A", "--budget", "0.001")
    assert done.returncode == 0
    assert "undecided" in done.stdout
    assert "A.D.8.2" in done.stdout


def test_the_list_computes_nothing_and_ids_are_whole():
    done = depthgauge("--list", "--paper", "a")
    assert done.returncode == 0
    ids = [line.split()[0] for line in done.stdout.splitlines()]
    assert "A.4.1" in ids
    assert len(ids) > 30
    rows = json.loads(depthgauge("--list", "--json").stdout)
    assert len(rows) > 200
    assert all(set(row) == {"id", "paper", "statement"} for row in rows)


def test_ids_ignore_case_and_verdicts_filter():
    done = depthgauge("--id", "a.4.1", "--json")
    assert [row["id"] for row in json.loads(done.stdout)] == ["A.4.1"]
    assert json.loads(depthgauge("--id", "A.4.1", "--verdict", "holds", "--json").stdout) == []
    assert depthgauge("--verdict", "true").stderr.startswith("error: verdict must be one of holds, fails")


def test_ids_are_never_broken_in_a_narrow_terminal():
    shown = subprocess.run(
        [sys.executable, "-m", "depthgauge", "claims", "--paper", "ours", "--budget", "0.001"],
        capture_output=True, encoding="utf-8", check=True, env={**os.environ, "COLUMNS": "60"},
    ).stdout  # fmt: skip
    listed = depthgauge("--list", "--paper", "ours").stdout
    assert all(f"│ {line.split()[0]} " in shown for line in listed.splitlines())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--id", "A.4.9"), "no statement has the id 'A.4.9'"),
        (("--paper", "Z"), "paper must be one of A, B, ours"),
        (("--budget", "-1"), "budget must be a positive number"),
    ],
)
def test_bad_input(words, sentence):
    done = depthgauge(*words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
