"""The documents: their Python runs, their commands exist, their links have targets, their statements are numbered."""

import ast
import importlib.util
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import depthgauge
from depthgauge.base.errors import install_command, missing_extra
from depthgauge.cli.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LANGUAGES = {"python", "sh", "bash", "console", "text", "toml", "json"}
VERBS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- Markdown ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced code block: the document, its line there, its language, its text."""

    document: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def fenced_blocks(text: str, document: str) -> Iterator[Block]:
    """Yield the fenced blocks of a document; a fence in a list item is indented, and so is its content."""
    opening = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[^`\n]*)$")
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start = opening.match(lines[number])
        number += 1
        if start is None:
            continue
        first, body = number, []
        while lines[number].strip() != start["fence"]:
            body.append(lines[number].removeprefix(start["indent"]))
            number += 1
        number += 1
        yield Block(document, first, (start["language"].split() or [""])[0], "\n".join(body) + "\n")


def without_fences(text: str) -> list[str]:
    """Return the lines of a document, those of fenced blocks emptied."""
    return re.sub(
        r"^( *)(`{3,}|~{3,}).*?^\1\2$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
    ).splitlines()


def indented_blocks(text: str) -> list[int]:
    """Return the lines that Markdown would show as code because of their indentation, outside lists and admonitions."""
    found, inside, blank = [], False, True
    for number, line in enumerate(without_fences(text), 1):
        if not line.strip():
            blank = True
            continue
        if re.match(r"(    |\t)", line):
            if blank and not inside:
                found.append(number)
        else:
            inside = bool(re.match(r" *([-*+]|\d+[.)]) |(!!!|\?\?\?\+?|===) ", line)) or (inside and line[0] == " ")
        blank = False
    return found


def prose(text: str) -> str:
    return "\n".join(without_fences(text))


BLOCKS = [block for path in DOCUMENTS for block in fenced_blocks(path.read_text(encoding="utf-8"), relative(path))]


# --- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.docs
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=str)
def test_python_in_the_documents_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, str(block), "exec"), {})


def test_there_are_examples_to_run() -> None:
    pages = {block.document for block in BLOCKS if block.language == "python"}
    tasks = {f"docs/tasks/{name}.md" for name in ("gauge-a-checkpoint", "certify-and-collapse", "fast-attention")}
    assert {"README.md", "docs/index.md", "docs/getting-started.md", "docs/formats.md", *tasks} <= pages


def test_code_is_in_fences_with_a_language() -> None:
    """Code that is only indented, or has no language, would not be tested."""
    assert {relative(path): indented_blocks(path.read_text(encoding="utf-8")) for path in DOCUMENTS} == {
        relative(path): [] for path in DOCUMENTS
    }
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


def test_indented_code_is_found() -> None:
    assert indented_blocks("Text:\n\n    import os\n\nMore.\n") == [3]
    assert indented_blocks("- item\n\n    continued\n\n1. item\n    continued\n") == []
    assert indented_blocks("```python\n\n    x = 1\n```\nText\n    continued\n") == []
    assert indented_blocks("- item\n\nText.\n\n    import os\n") == [5]


# --- commands ---------------------------------------------------------------------------------------------------------


def commands(block: Block) -> list[str]:
    """Return the depthgauge commands of a block; in a session they follow a prompt."""
    lines = re.sub(r"\\\n\s*", " ", block.code).splitlines()
    if block.language not in ("sh", "bash"):
        lines = [line.partition("$")[2] for line in lines if re.match(r"\w*\$ ", line)]
    return [line.strip() for line in lines if line.strip().startswith("depthgauge ")]


def parse(command: str) -> None:
    """Parse a command as the command line does, without running it."""
    words = shlex.split(command, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words
    if words in (["--help"], ["--version"]):
        return
    assert words[0] in VERBS, f"no such verb: {words[0]}"
    VERBS[words[0]].make_context(words[0], words[1:])


SHELL = [(str(block), line) for block in BLOCKS for line in commands(block) if block.language != "python"]


def test_commands_in_the_documents_can_be_parsed() -> None:
    for place, command in SHELL:
        try:
            parse(command)
        except Exception as error:
            error.add_note(f"{place}: {command}")
            raise


def test_a_wrong_command_is_found() -> None:
    assert len(SHELL) >= 10
    for wrong in ("depthgauge gouge x", "depthgauge gauge x --radios 2", "depthgauge gauge x --tokens many"):
        with pytest.raises((AssertionError, typer.BadParameter.__bases__[0])):
            parse(wrong)


def test_verbs_and_flags_in_the_text_exist() -> None:
    text = "\n".join(prose(path.read_text(encoding="utf-8")) for path in DOCUMENTS)
    for span in re.findall(r"`depthgauge ([a-z][^`]*)`", text):
        verb, *rest = span.split()
        assert verb in VERBS, span
        known = {name for option in VERBS[verb].params for name in (*option.opts, *option.secondary_opts)}
        assert {word.split("=")[0] for word in rest if word.startswith("--")} <= known | {"--help"}, span


def documented_flags(verb: str) -> set[str]:
    """Return the flags in the first column of the tables about a verb."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    part = re.split(rf"^## `depthgauge {verb}\b", page, maxsplit=1, flags=re.MULTILINE)[1].split("\n## ")[0]
    return set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"^\| (`--.*?) \|", part, re.MULTILINE))))


@pytest.mark.parametrize("verb", ["gauge", "collapse", "shrink", "recover", "evaluate", "random", "report"])
def test_the_tables_of_a_verb_have_its_flags_and_no_others(verb: str) -> None:
    flags = {name for option in VERBS[verb].params for name in (*option.opts, *option.secondary_opts)}
    assert documented_flags(verb) == {name for name in flags if name.startswith("--")} - {"--help", "--help-all"}


# --- links and numbers ------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page: its headings, and the names that the API reference documents."""
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def test_links_between_documents_have_targets() -> None:
    for path in DOCUMENTS:
        text = prose(path.read_text(encoding="utf-8"))
        targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
        for target in targets:
            if target.startswith(("https://", "http://")):
                continue
            name, _, anchor = target.partition("#")
            page = (path.parent / name) if name else path
            assert page.exists(), (relative(path), target)
            assert not anchor or anchor in anchors(page), (relative(path), target)


def test_statements_cited_by_number_exist() -> None:
    numbered = set(
        re.findall(r"^\*\*(\d\.\d+) ", (ROOT / "docs" / "math.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {f"2.{i}" for i in range(1, 10)} <= numbered
    cited = {
        number
        for path in DOCUMENTS
        for found in re.findall(r"math\.md\), (\d\.\d+)|\[(\d\.\d+)\]\([./]*math\.md", path.read_text(encoding="utf-8"))
        for number in found
        if number
    }
    assert "2.6" in cited
    assert cited <= numbered


def test_the_api_reference_lists_every_public_name() -> None:
    listed = re.findall(r"^::: depthgauge\.([\w.]+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    inside = {f"{space}.{name}" for space in ("papers", "results") for name in getattr(depthgauge, space).__all__}
    assert set(listed) == {*depthgauge.__all__, *inside} - {"__version__", "papers", "results"}
    spaces = [name.rpartition(".")[0] for name in listed]
    assert spaces == sorted(spaces, key=["", "results", "papers"].index)  # namespace by namespace


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == depthgauge.__version__  # type: ignore[index]
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


# --- CONTRIBUTING and CHANGELOG ---------------------------------------------------------------------------------------


def section(path: Path, heading: str) -> str:
    text = path.read_text(encoding="utf-8")
    return re.split(r"^## ", text.split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


TRAVELS = {
    "depthgauge gauge ./model": "src/depthgauge/cli/model_commands.py",
    "depthgauge shrink ./model": "src/depthgauge/cli/model_commands.py",
    "depthgauge recover ./smaller --teacher ./model": "src/depthgauge/cli/model_commands.py",
    "dg.attention(q, k, v)": "src/depthgauge/fast_attention/attention.py",
}
"""Request → the file where it starts."""


@pytest.mark.parametrize("request_", TRAVELS)
def test_a_request_travels_as_contributing_describes(request_: str) -> None:
    """Each file of the list exists and is imported by a file before it; there are at most eight, for attention six."""
    lists = section(ROOT / "CONTRIBUTING.md", "How a request travels")
    part = lists.split(f"\n### `{request_}`\n", 1)[1].split("\n### ")[0]
    links = re.findall(r"^\d+\. \[([^\]]+)\]\((src/[^)]+\.py)\)", part, re.MULTILINE)
    files = [path for _, path in links]
    assert all(path == f"src/depthgauge/{name}" for name, path in links)
    assert 4 <= len(files) <= (6 if request_.startswith("dg.attention") else 8)
    assert files[0] == TRAVELS[request_]
    for index, name in enumerate(files[1:], 1):
        module = name.removeprefix("src/").removesuffix(".py").replace("/", ".")
        assert any(module in imported(ROOT / before) for before in files[:index]), name


def test_contributing_lists_the_levels_of_the_architecture_test() -> None:
    levels = load(ROOT / "tests" / "test_architecture.py").LEVELS
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", section(ROOT / "CONTRIBUTING.md", "Packages"), re.MULTILINE)
    listed = [set[str]() for _ in levels]
    for level, names in rows:
        listed[int(level)] |= {name.removesuffix("/").replace("/", ".") for name in re.findall(r"`([^`]+)`", names)}
    levels[0].discard("_version")
    assert listed[:-1] == levels[:-1]


# --- the site and the tools -------------------------------------------------------------------------------------------


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_that_loads_from_another_host_is_found(tmp_path: Path) -> None:
    check = load(ROOT / "scripts" / "check_site.py")
    (tmp_path / "index.html").write_text('<a href="https://example.org">a</a><script src="page.js"></script>')
    assert check.remote_loads(tmp_path) == []
    (tmp_path / "bad.html").write_text('<script src="https://unpkg.com/x"></script><link href="//fonts.x/a.css">')
    (tmp_path / "bad.css").write_text("@font-face { src: url('https://fonts.x/a.woff') }")
    assert len(check.remote_loads(tmp_path)) == 3


# --- the README as typed ----------------------------------------------------------------------------------------------


CHECK = load(ROOT / "scripts" / "check_readme.py")


def test_commands_are_typed_in_one_shell_until_one_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here without an installation; `make readme` types the README itself."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    good = "```sh\nexport depth=3  # kept\ntest \\\n  $depth = 3\n```\nText.\n```python\nassert 'it''s'\n```\n"
    assert CHECK.type_commands(tmp_path, good) == 0
    assert capfd.readouterr().out.count("ok, ") == 3
    assert CHECK.type_commands(tmp_path, good + "```sh\nmake test\necho why; false\ntouch after\n```\n") == 1
    out = capfd.readouterr().out
    assert "not typed: make test" in out
    assert "failed: echo why; false\nwhy\n" in out
    assert not (tmp_path / "after").exists()
    assert CHECK.type_commands(tmp_path, "```python\nraise SystemExit(3)\n```\n") == 1


def test_every_command_of_the_readme_is_typed_or_excused() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    typed = CHECK.commands(readme)
    script = CHECK.program(typed)
    excused = [command for command in typed if " ".join(command.split()[:2]) in CHECK.NOT_TYPED]
    assert len(excused) == len(CHECK.NOT_TYPED)
    assert script.count("\ntyped ") == len(typed) - len(excused) + len(CHECK.NEEDED)
    assert not any(shown in script for shown in CHECK.REPLACED)
    assert {language for language, _ in CHECK.blocks(readme)} <= {"sh", "python", "text"}
    assert max(map(len, readme.splitlines())) <= 120


def test_no_advice_needs_a_package_index_that_lacks_depthgauge() -> None:
    """It is not published. Advice in errors names the packages of an extra, see `install_command`."""
    paths = [*(one for one in DOCUMENTS if one.name != "log.md"), *ROOT.glob("src/**/*.py")]
    advice = re.compile(r"pip install [\"']?depthgauge")
    assert advice.search("run `pip install 'depthgauge[models]'`")
    assert len(paths) > 200
    assert [relative(path) for path in paths if advice.search(path.read_text(encoding="utf-8"))] == []


def test_the_command_that_installs_an_extra_names_its_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("models", "report", "cluster", "gpu", "frames", "train", "eval"):
        assert install_command(extra).split() == ["pip", "install", *sorted(f"'{name}'" for name in extras[extra])]
        assert f"the extra `{extra}`; install it with `pip" in str(missing_extra("it", extra))


def test_the_smollm2_figure_can_be_drawn_from_its_numbers() -> None:
    script = load(ROOT / "docs" / "figures" / "make_smollm2.py")
    data = json.loads(script.DATA.read_text(encoding="utf-8"))
    (axes,) = script.draw(data).axes
    assert len(axes.patches) == len(data["block"]) == 30
    assert all(layer["low"] <= layer["loss"] <= layer["high"] for layer in data["block"])


def test_commit_hooks_download_nothing() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    assert {hook["language"] for repo in hooks["repos"] for hook in repo["hooks"]} == {"system"}
    assert {hook["id"] for repo in hooks["repos"] for hook in repo["hooks"]} == {"ruff-check", "ruff-format", "mypy"}


def test_workflows_run_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
    others = jobs["others"]["strategy"]["matrix"]["target"]
    steps = [str(step) for job in jobs.values() for step in job["steps"]] + [f"make {target}" for target in others]
    targets = {word for step in steps for word in re.findall(r"make ([\w-]+)", step)}
    script = re.findall(r"^time make (.*)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    in_script = {word for words in script for word in words.split() if re.match(r"[a-z]", word)}
    assert in_script - {"lint"} == targets - {"demo", "test-core"}  # the tests begin with lint; the others are macOS
    assert {"types", "test-families", "test-annotations", "docs", "wheel"} <= in_script
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"tests/\w+(?=[ \n])", makefile):
        assert (ROOT / path).is_dir(), path
    tested = jobs["linux"]["strategy"]["matrix"]["python"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert tested == [line.rpartition(" ")[2] for line in classifiers if re.search(r":: 3\.\d+$", line)]


def test_the_page_of_versions_agrees_with_the_constraints() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    pinned = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    first = next(line for line in page.splitlines() if line.startswith("| 3.11 |"))
    assert all(pinned[name] in first for name in ("torch", "transformers", "triton"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    needed = " ".join([*project["dependencies"], *(name for extra in extras for name in extra)])
    for names, least in re.findall(r"^\| ([\w, -]+) \| ([\d.]+) \|", page.split("## Least versions")[1], re.MULTILINE):
        for name in names.lower().split(", "):
            assert f"{name}>={least}" in needed, name
