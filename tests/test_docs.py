"""The documents do what they say: their Python runs, their links lead somewhere, their statements have functions."""

import re
import tomllib
from pathlib import Path

import pytest

import depthgauge

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def python_blocks() -> list[tuple[str, int, str]]:
    blocks = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            blocks.append((path.name, text[: match.start()].count("\n") + 1, match[1]))
    return blocks


@pytest.mark.parametrize(("name", "line", "code"), python_blocks(), ids=lambda v: str(v) if len(str(v)) < 20 else "")
def test_python_in_the_documents_runs(
    name: str, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{name}:{line}", "exec"), {})


def test_there_are_examples_to_run() -> None:
    assert {"README.md", "guide.md"} <= {name for name, _, _ in python_blocks()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("https://"):
            assert (path.parent / target.split("#")[0]).exists(), target


def test_statements_cited_by_number_exist() -> None:
    numbered = set(
        re.findall(r"^\*\*(\d\.\d+) ", (ROOT / "docs" / "math.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {f"2.{i}" for i in range(1, 10)} <= numbered
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert set(re.findall(r"math\.md\), (\d\.\d+)", guide)) <= numbered


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == depthgauge.__version__  # type: ignore[index]
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]
