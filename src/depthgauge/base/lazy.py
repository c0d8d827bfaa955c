"""Import public names on first use, so that `import depthgauge` and `depthgauge --help` stay fast.

The names of a package are listed once, in its stub `__init__.pyi`, which type checkers read too.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def names_of(stub: Path) -> dict[str, str]:
    """Return the names that a stub imports, each with its module."""
    imports = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of a package with a stub; `file` is the path of its `__init__.py`."""
    modules = names_of(Path(file).with_suffix(".pyi"))

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:
            found: Any = import_module(f"{package}.{name}")
        else:
            found = getattr(import_module(modules[name]), name)
        vars(import_module(package))[name] = found  # the next access does not come here
        return found

    return find, sorted(modules)
