"""`depthgauge --glossary`: one screen, and every term is in the documentation."""

from pathlib import Path

from typer.testing import CliRunner

from depthgauge.cli.main import app
from depthgauge.results.labels import TERMS

PAGE = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")


def test_it_fits_one_screen() -> None:
    done = CliRunner().invoke(app, ["--glossary"], env={"COLUMNS": "120"})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) == len(TERMS) <= 24
    assert max(map(len, lines)) <= 120


def test_the_page_explains_every_term() -> None:
    missing = [term for terms in TERMS for term in terms.split(", ") if term not in PAGE]
    assert missing == []


def test_the_help_and_the_tables_point_to_it() -> None:
    assert "--glossary" in CliRunner().invoke(app, ["--help"]).stdout

    from depthgauge.results import gauge_document

    assert "--glossary" in gauge_document._SANDWICH_CAPTION
