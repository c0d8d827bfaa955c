"""The public names are ordinary functions and classes on every access."""

import importlib
import inspect
import operator
import pickle
import pkgutil
import pydoc
import subprocess
import sys
from types import FunctionType
from typing import Any

import pytest

import depthgauge

NAMESPACES = {"": depthgauge, "papers": depthgauge.papers, "results": depthgauge.results}
FUNCTIONS = [
    f"{prefix}.{name}".lstrip(".")
    for prefix, namespace in NAMESPACES.items()
    for name in namespace.__all__
    if name[0].islower() and name not in NAMESPACES
]


def found(dotted: str) -> Any:
    return operator.attrgetter(dotted)(depthgauge)


def test_there_is_something_to_test() -> None:
    assert {"collapse", "papers.claims", "gauge", "attention", "certify", "results.read_log"} <= set(FUNCTIONS)


def test_the_top_level_is_a_table_of_contents() -> None:
    names = set(dir(depthgauge)) - {"__version__", *NAMESPACES}
    assert len(names) <= 25
    assert all(getattr(depthgauge, name) is not None for name in names)


def test_a_name_in_a_namespace_is_not_at_the_top_level() -> None:
    for name in (*depthgauge.papers.__all__, *depthgauge.results.__all__):
        with pytest.raises(AttributeError, match=rf"depthgauge.{name} is now depthgauge.(papers|results).{name}"):
            getattr(depthgauge, name)


@pytest.fixture(scope="module")
def first_found() -> dict[str, Any]:
    """The public functions before every module of the package is imported."""
    functions = {dotted: found(dotted) for dotted in FUNCTIONS}
    for module in pkgutil.walk_packages(depthgauge.__path__, "depthgauge."):
        # Importing a module sets an attribute on its package; it must not replace a public function.
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return functions


@pytest.mark.parametrize("dotted", FUNCTIONS)
def test_a_public_function_is_a_function_on_every_access(dotted: str, first_found: dict[str, Any]) -> None:
    first = first_found[dotted]
    prefix, _, name = dotted.rpartition(".")
    package = f"depthgauge.{prefix}".rstrip(".")
    second = found(dotted)
    namespace: dict[str, object] = {}
    exec(f"from {package} import {name}", namespace)
    assert first is second is namespace[name]
    assert isinstance(inspect.unwrap(first), FunctionType)
    assert pickle.loads(pickle.dumps(first)) is first
    assert first.__doc__
    assert f"{name}(" in pydoc.plain(pydoc.render_doc(first))
    assert name in dir(NAMESPACES[prefix])


def test_the_first_access_in_a_new_process_is_a_function() -> None:
    code = (
        "import depthgauge as dg; a = dg.collapse; from depthgauge.theory.depth import methods; b = dg.collapse; "
        "from depthgauge import collapse as c; print(type(a).__name__, a is b is c)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["function", "True"]


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        depthgauge.nothing  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_of_a_public_function_has_its_own_line(name: str) -> None:
    function = inspect.unwrap(found(name))
    lines = [line.strip() for line in (inspect.getdoc(function) or "").splitlines()]
    missing = [
        argument
        for argument in inspect.signature(function).parameters
        if not any(line.lstrip("*").startswith(f"{argument}:") for line in lines)
    ]
    assert missing == []
