"""The house rules: imports go down only, files stay small, heavy extras stay out of module level, no stray words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"

# From the ground up; a room may import what is on a lower step, never its own step or above.
STEPS: list[set[str]] = [
    {"errors", "atomic", "progress", "digits", "_version"},
    {"linalg"},
    {"network"},
    {"measures", "collapse", "separation", "fast_attention"},
    {"claims", "models"},
    {"sweeps"},
    {"figures", "report"},
    {"studies"},
    {"cli"},
    {"", "__main__"},  # the package itself: its public names live in the rooms
]
STEP = {room: step for step, rooms in enumerate(STEPS) for room in rooms}
# On the lowest step the small files may use one another, without a cycle.
MAY_USE_ITS_STEP = {0}
NO_NETWORK = {"separation", "fast_attention"}
HEAVY = {"transformers", "gguf", "accelerate", "dask", "distributed", "plotly", "triton"}
LONGEST = 450


def module_name(path: Path, src: Path) -> str:
    parts = list(path.relative_to(src).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[str, int, bool]]:
    """Every module imported anywhere in a file: (name, line, whether it runs when the file is imported)."""
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        at_import = id(node) not in lazy
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, at_import
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, at_import
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, node.lineno, at_import


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING"


def room_of(module: str) -> str:
    """`depthgauge.linalg.norms` → `linalg`; the package itself is ''."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def edges(src: Path) -> Iterator[tuple[str, str, str]]:
    """(room, imported room, where) for every import of ours, including those inside functions."""
    files = {module_name(p, src): p for p in sorted(src.rglob("*.py"))}
    top_level = {room_of(name) for name in files}
    for module, path in files.items():
        source = path.read_text(encoding="utf-8")
        for name, line, _ in imports_of(source, module, path.name == "__init__.py"):
            if name == "depthgauge" or name.startswith("depthgauge."):
                target = room_of(name)
                # `from depthgauge import measure` names no room, it goes through the package.
                yield room_of(module), target if target in top_level else "", f"{path.relative_to(src)}:{line}"


def violations(src: Path) -> list[str]:
    """Every import that is not allowed, and every cycle between rooms."""
    found, graph = [], {}
    for room, target, where in edges(src):
        if room == target and room:
            continue
        graph.setdefault(room, set()).add(target)
        for name in (room, target):
            if name not in STEP:
                found.append(f"{where}: the room {name!r} has no step; add it to STEPS")
                break
        else:
            same = STEP[room] == STEP[target]
            if STEP[target] > STEP[room] or (same and STEP[room] not in MAY_USE_ITS_STEP):
                found.append(f"{where}: {room or 'depthgauge'} imports {target or 'depthgauge'}, which is not below it")
            if room in NO_NETWORK and target == "network":
                found.append(f"{where}: {room} needs no network")
    cycle = find_cycle(graph)
    return found + ([f"a cycle: {' → '.join(cycle)}"] if cycle else [])


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle between rooms, or nothing."""
    done: set[str] = set()

    def walk(room: str, path: list[str]) -> list[str]:
        if room in path:
            return [*path[path.index(room) :], room]
        if room in done:
            return []
        for target in sorted(graph.get(room, ())):
            if cycle := walk(target, [*path, room]):
                return cycle
        done.add(room)
        return []

    return next((cycle for room in sorted(graph) if (cycle := walk(room, []))), [])


def heavy_imports(src: Path) -> list[str]:
    """Extras imported when a module of ours is, instead of when they are needed."""
    return [
        f"{path.relative_to(src)}:{line}: {name}"
        for path in sorted(src.rglob("*.py"))
        for name, line, at_import in imports_of(
            path.read_text(encoding="utf-8"), module_name(path, src), path.name == "__init__.py"
        )
        if at_import and name.split(".")[0] in HEAVY
    ]


def test_imports_go_down_only() -> None:
    assert violations(SRC) == []
    assert len(list(edges(SRC))) > 50  # and they were found


def test_heavy_extras_are_imported_where_they_are_needed() -> None:
    assert heavy_imports(SRC) == []


def test_files_stay_small_enough_to_read() -> None:
    places = [SRC, ROOT / "tests", ROOT / "benchmarks"]
    long = {
        str(path.relative_to(ROOT)): lines
        for place in places
        for path in place.rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST
    }
    assert long == {}


# Spelled in pieces, so that this file passes its own test.
FORBIDDEN = [
    r"\.\./" + "shared", "/work" + "/", "/ro" + "ot/", "/ho" + "me/", "MATH" + r"\.md", "DESIGN" + r"\.md",
    "work" + "place", r"\b[Ii]ssue" + r"s? #?\d", "this " + "session", "pip" + r"\.conf", "index" + "-url",
    "art" + "ifactory",
]  # fmt: skip


def stray_words(text: str) -> list[str]:
    return [found.group() for pattern in FORBIDDEN if (found := re.search(pattern, text))]


def our_text() -> Iterator[Path]:
    for pattern in (
        "src/**/*.py",
        "tests/**/*.py",
        "benchmarks/**/*.py",
        "docs/**/*.md",
        "*.md",
        "*.toml",
        "*.txt",
        "*.cff",
    ):
        yield from ROOT.glob(pattern)
    yield from (ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / ".gitignore")


def test_nothing_speaks_of_where_it_was_made() -> None:
    files = list(our_text())
    assert len(files) > 40
    found = {str(path.relative_to(ROOT)): words for path in files if (words := stray_words(path.read_text("utf-8")))}
    assert found == {}


# --- the checker itself is shown to fail ------------------------------------------------------------------------------


def planted(tmp_path: Path, **files: str) -> Path:
    """A small package with the given files, `linalg__norms` for linalg/norms.py."""
    for name, source in {"__init__": "", **files}.items():
        path = tmp_path / "depthgauge" / (name.replace("__", "/") if not name.startswith("__") else name)
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"linalg__a": "from depthgauge.network.b import c", "network__b": ""}, "linalg imports network"),
        ({"linalg__a": "import depthgauge.cli.main", "cli__main": ""}, "linalg imports cli"),
        ({"linalg__a": "def f():\n    from depthgauge.network.b import c", "network__b": ""}, "linalg imports network"),
        ({"linalg__a": "if TYPE_CHECKING:\n    import depthgauge.cli.main", "cli__main": ""}, "linalg imports cli"),
        ({"linalg__a": "class C:\n  def f(self):\n    import depthgauge.cli.x", "cli__x": ""}, "linalg imports cli"),
        ({"linalg__a": "from ..network import b", "network__b": ""}, "linalg imports network"),
        ({"linalg__a": "from .. import network", "network__b": ""}, "linalg imports network"),
        ({"linalg__a": "from depthgauge import network", "network__b": ""}, "linalg imports network"),
        ({"linalg__a": "from depthgauge import measure"}, "linalg imports depthgauge"),
        ({"linalg__a": "import depthgauge"}, "linalg imports depthgauge"),
        ({"measures__a": "import depthgauge.collapse.b", "collapse__b": ""}, "measures imports collapse"),
        ({"figures__a": "import depthgauge.report.b", "report__b": ""}, "figures imports report"),
        ({"studies__a": "import depthgauge.cli.b", "cli__b": ""}, "studies imports cli"),
        ({"linalg__a": "import_module('depthgauge.cli.b')", "cli__b": ""}, "linalg imports cli"),
        ({"linalg__a": "importlib.import_module('depthgauge.cli.b')", "cli__b": ""}, "linalg imports cli"),
        ({"separation__a": "import depthgauge.network.b", "network__b": ""}, "separation needs no network"),
        ({"cellar__a": "import depthgauge.errors", "errors": ""}, "the room 'cellar' has no step"),
        (
            {"linalg__a": "import depthgauge.network.b", "network__b": "import depthgauge.linalg.a"},
            "a cycle: linalg → network → linalg",
        ),
        ({"errors": "import depthgauge.atomic", "atomic": "import depthgauge.errors"}, "a cycle: atomic → errors"),
    ],
)
def test_planted_violations_are_found(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    assert any(complaint in line for line in violations(planted(tmp_path, **files)))


def test_planted_innocence_is_left_alone(tmp_path: Path) -> None:
    src = planted(
        tmp_path,
        errors="import torch",
        atomic="from depthgauge.errors import E",
        linalg__a="from depthgauge.linalg import b\nfrom . import b\nfrom .b import x\nfrom ..errors import E",
        linalg__b="",
        cli__c="import depthgauge.linalg.a\nfrom depthgauge import atomic",
    )
    (src / "depthgauge" / "__init__.py").write_text("from depthgauge.cli.c import x")
    assert violations(src) == []


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("import triton", True),
        ("from transformers import AutoModel", True),
        ("try:\n    import dask.distributed\nexcept ImportError: pass", True),
        ("class A:\n    import plotly", True),
        ("if True:\n    import plotly.graph_objects as go", True),
        ("def f():\n    import triton", False),
        ("if TYPE_CHECKING:\n    import transformers", False),
        ("import tritonless", False),
    ],
)
def test_planted_heavy_imports_are_found(tmp_path: Path, source: str, is_found: bool) -> None:
    assert bool(heavy_imports(planted(tmp_path, linalg__a=source))) == is_found


def test_planted_stray_words_are_found() -> None:
    assert stray_words("see .." + "/shared/x") != []
    assert stray_words("cd /work" + "/main") != []
    assert stray_words("as " + "Issue" + " 12 says") != []
    assert stray_words("issues with NaN are refused") == []
