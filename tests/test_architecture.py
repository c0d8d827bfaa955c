"""Architecture rules: imports point to lower levels, no cycles between files, unique file names."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"

# Packages by level, as CONTRIBUTING.md lists them. A package imports lower levels only.
LEVELS: list[set[str]] = [
    {"base", "_version"},
    {"results", "theory.linalg", "fast_attention"},
    {"theory.network"},
    {"theory.measures", "theory.surrogates"},
    {"theory.certificates"},
    {"theory.suprema"},
    {"theory.depth", "checkpoints"},
    {"recovery"},
    {"surgery", "monitor"},
    {"sweeps"},
    {"papers"},
    {"report"},
    {"workflows"},
    {"cli"},
    {"", "__main__"},  # the package itself: it re-exports names from every level
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
# The modules of the lowest level may import each other.
MAY_IMPORT_ITS_LEVEL = {0}
SLOW = "scipy.stats."
OPTIONAL = {"depthgauge.fast_attention.kernels": "triton"}  # imports the package itself, so it is imported as it is
HEAVY = {
    "transformers",
    "gguf",
    "xllamacpp",
    "accelerate",
    "dask",
    "distributed",
    "plotly",
    "jinja2",
    "markupsafe",
    "triton",
    "pandas",
    "tensorboard",
    "wandb",
    "lm_eval",
    "datasets",
    "torchao",
}


def module_name(path: Path, src: Path) -> str:
    parts = list(path.relative_to(src).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


parsed = cache(ast.parse)


@cache
def imports_of(source: str, module: str, is_package: bool) -> tuple[tuple[str, int, bool], ...]:
    """Return every import in a file: (imported name, line, whether it runs when the file is imported)."""
    return tuple(_imports(parsed(source), module, is_package))


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, int, bool]]:
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


def package_of(module: str) -> str:
    """`depthgauge.results.record` → `results`; `depthgauge.theory.linalg.norms` → `theory.linalg`."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["theory"] else parts[:1])


def edges(src: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (importing module, imported module, place) for every import of ours, lazy and type-only ones included."""
    files = {module_name(p, src): p for p in sorted(src.rglob("*.py"))}
    known = {".".join(name.split(".")[:k]) for name in files for k in range(1, name.count(".") + 2)}
    for module, path in files.items():
        for name, line, _ in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
            if name == "depthgauge" or name.startswith("depthgauge."):
                while name not in known:  # drop the names of functions and classes
                    name = name.rpartition(".")[0]
                yield module, name, f"{path.relative_to(src)}:{line}"


def violations(src: Path) -> list[str]:
    """List every import that does not point to a lower level, and the first cycle between files."""
    found, graph = [], defaultdict(set)
    for module, imported, where in edges(src):
        package, target = package_of(module), package_of(imported)
        if module != imported:
            graph[module].add(imported)
        if package == target and package:
            continue
        for name in (package, target):
            if name not in LEVEL:
                found.append(f"{where}: the package {name!r} has no level; add it to LEVELS")
                break
        else:
            same = LEVEL[package] == LEVEL[target]
            if LEVEL[target] > LEVEL[package] or (same and LEVEL[package] not in MAY_IMPORT_ITS_LEVEL):
                found.append(f"{where}: {package or 'depthgauge'} imports {target or 'depthgauge'}, not a lower level")
    cycle = find_cycle(graph)
    return found + ([f"a cycle: {' → '.join(cycle)}"] if cycle else [])


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return one cycle of a directed graph, or an empty list."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            if cycle := walk(target, [*path, node]):
                return cycle
        done.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := walk(node, []))), [])


def repeated_names(src: Path) -> list[str]:
    """List file names that occur more than once."""
    folders = defaultdict(set)
    for path in src.rglob("*.py"):
        if path.name != "__init__.py":
            folders[path.name].add(path.parent.relative_to(src / "depthgauge").as_posix())
    return [f"{name}: {sorted(places)}" for name, places in sorted(folders.items()) if len(places) > 1]


def repeated_classes(src: Path) -> list[str]:
    """List class names that are defined more than once."""
    places = defaultdict(list)
    for path in sorted(src.rglob("*.py")):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(src / "depthgauge").as_posix())
    return [f"{name}: {found}" for name, found in sorted(places.items()) if len(found) > 1]


def heavy_imports(src: Path) -> list[str]:
    """List packages, optional or slow to import, that are imported at module level instead of where they are needed."""
    return [
        f"{path.relative_to(src)}:{line}: {name}"
        for path in sorted(src.rglob("*.py"))
        for name, line, at_import in imports_of(
            path.read_text(encoding="utf-8"), module_name(path, src), path.name == "__init__.py"
        )
        if at_import
        and (name.split(".")[0] in HEAVY or f"{name}.".startswith((SLOW, *(f"{module}." for module in OPTIONAL))))
        and OPTIONAL.get(module_name(path, src)) != name.split(".")[0]
    ]


def test_imports_point_to_lower_levels_without_cycles() -> None:
    assert violations(SRC) == []
    assert len(list(islice(edges(SRC), 51))) > 50  # the imports were found at all


def test_folders_of_checkpoints_import_in_one_direction() -> None:
    order = ("source", "inputs", "weights", "blocks", "tasks")
    inside = [
        (order.index(one.split(".")[2]), order.index(other.split(".")[2]), place)
        for one, other, place in edges(SRC)
        if one.startswith("depthgauge.checkpoints.") and other.startswith("depthgauge.checkpoints.")
    ]
    assert [place for one, other, place in inside if other > one] == []
    assert len(inside) > 50


def test_file_names_are_unique() -> None:
    assert repeated_names(SRC) == []


def test_class_names_are_unique() -> None:
    assert repeated_classes(SRC) == []


def test_no_package_shares_its_name_with_a_public_function() -> None:
    import depthgauge

    packages = {path.stem for path in (SRC / "depthgauge").iterdir()}
    assert packages & set(depthgauge.__all__) == {"papers", "results"}  # namespaces, not functions
    assert {"theory", "base"} <= packages


def test_optional_packages_are_imported_where_they_are_needed() -> None:
    assert heavy_imports(SRC) == []


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
        ".github/**/*.yml",
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


# --- the checks find planted violations -------------------------------------------------------------------------------


def planted(tmp_path: Path, **files: str) -> Path:
    """A small package with the given files, `results__record` for results/record.py."""
    for name, source in {"__init__": "", **files}.items():
        path = tmp_path / "depthgauge" / (name.replace("__", "/") if not name.startswith("__") else name)
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"results__a": "from depthgauge.recovery.b import c", "recovery__b": ""}, "results imports recovery"),
        ({"results__a": "import depthgauge.cli.main", "cli__main": ""}, "results imports cli"),
        (
            {"results__a": "def f():\n    from depthgauge.recovery.b import c", "recovery__b": ""},
            "results imports recovery",
        ),
        ({"results__a": "if TYPE_CHECKING:\n    import depthgauge.cli.main", "cli__main": ""}, "results imports cli"),
        ({"results__a": "class C:\n  def f(self):\n    import depthgauge.cli.x", "cli__x": ""}, "results imports cli"),
        ({"results__a": "from ..recovery import b", "recovery__b": ""}, "results imports recovery"),
        ({"results__a": "from .. import recovery", "recovery__b": ""}, "results imports recovery"),
        ({"results__a": "from depthgauge import recovery", "recovery__b": ""}, "results imports recovery"),
        ({"results__a": "from depthgauge import measure"}, "results imports depthgauge"),
        ({"results__a": "import depthgauge"}, "results imports depthgauge"),
        ({"surgery__a": "import depthgauge.monitor.b", "monitor__b": ""}, "surgery imports monitor"),
        ({"papers__a": "import depthgauge.report.b", "report__b": ""}, "papers imports report"),
        ({"workflows__a": "import depthgauge.cli.b", "cli__b": ""}, "workflows imports cli"),
        ({"results__a": "import_module('depthgauge.cli.b')", "cli__b": ""}, "results imports cli"),
        ({"results__a": "importlib.import_module('depthgauge.cli.b')", "cli__b": ""}, "results imports cli"),
        ({"sweeps__a": "import depthgauge.papers.b", "papers__b": ""}, "sweeps imports papers"),
        ({"cellar__a": "import depthgauge.base.errors", "base__errors": ""}, "the package 'cellar' has no level"),
        (
            {"results__a": "import depthgauge.recovery.b", "recovery__b": "import depthgauge.results.a"},
            "a cycle: depthgauge.recovery.b → depthgauge.results.a → depthgauge.recovery.b",
        ),
        (
            {"base__errors": "import depthgauge.base.io", "base__io": "import depthgauge.base.errors"},
            "a cycle: depthgauge.base.errors → depthgauge.base.io",
        ),
        (
            {"results__a": "from .b import x", "results__b": "def f():\n    from .a import y"},
            "a cycle: depthgauge.results.a → depthgauge.results.b",
        ),
    ],
)
def test_planted_violations_are_found(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    assert any(complaint in line for line in violations(planted(tmp_path, **files)))


def test_planted_innocence_is_left_alone(tmp_path: Path) -> None:
    src = planted(
        tmp_path,
        base__errors="import torch",
        base__io="from depthgauge.base.errors import E",
        results__a="from depthgauge.results import b\nfrom . import b\nfrom .b import x\nfrom ..base.errors import E",
        results__b="",
        cli__c="import depthgauge.results.a\nfrom depthgauge.base import io",
    )
    (src / "depthgauge" / "__init__.py").write_text("from depthgauge.cli.c import x")
    assert violations(src) == []


def test_planted_repeated_names_are_found(tmp_path: Path) -> None:
    assert repeated_names(planted(tmp_path / "a", results__x="", recovery__x="")) == ["x.py: ['recovery', 'results']"]
    assert repeated_names(planted(tmp_path / "b", cli__x="", workflows__y="", results__z="")) == []


def test_planted_repeated_classes_are_found(tmp_path: Path) -> None:
    two = planted(tmp_path / "a", results__x="class A: ...", recovery__y="def f():\n    class A: ...")
    assert repeated_classes(two) == ["A: ['recovery/y.py', 'results/x.py']"]
    same = planted(tmp_path / "b", results__x="class A: ...\nclass A: ...\nclass B: ...")
    assert repeated_classes(same) == ["A: ['results/x.py', 'results/x.py']"]


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
        ("from scipy import special, stats", True),
        ("from scipy.stats import norm", True),
        ("from depthgauge.fast_attention import kernels", True),
        ("from depthgauge.fast_attention.kernels import survey", True),
        ("def f():\n    from depthgauge.fast_attention import kernels", False),
        ("from scipy import special", False),
    ],
)
def test_planted_heavy_imports_are_found(tmp_path: Path, source: str, is_found: bool) -> None:
    assert bool(heavy_imports(planted(tmp_path, results__a=source))) == is_found


def test_planted_stray_words_are_found() -> None:
    assert stray_words("see .." + "/shared/x") != []
    assert stray_words("cd /work" + "/main") != []
    assert stray_words("as " + "Issue" + " 12 says") != []
    assert stray_words("issues with NaN are refused") == []
