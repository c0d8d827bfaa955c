"""The public names are ordinary functions and classes on every access."""

import importlib
import inspect
import pickle
import pkgutil
import pydoc
import subprocess
import sys
from types import FunctionType

import pytest

import depthgauge

FUNCTIONS = [name for name in depthgauge.__all__ if name[0].islower()]


def test_there_is_something_to_test() -> None:
    assert {"collapse", "claims", "gauge", "attention", "certify"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_is_a_function_on_every_access(name: str) -> None:
    first = getattr(depthgauge, name)
    for module in pkgutil.walk_packages(depthgauge.__path__, "depthgauge."):
        # Importing a module sets an attribute on its package; it must not replace a public function.
        if not module.name.startswith("depthgauge.fast_attention.triton") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    second = getattr(depthgauge, name)
    namespace: dict[str, object] = {}
    exec(f"from depthgauge import {name}", namespace)
    assert first is second is namespace[name]
    assert isinstance(inspect.unwrap(first), FunctionType)
    assert pickle.loads(pickle.dumps(first)) is first
    assert first.__doc__
    assert f"{name}(" in pydoc.plain(pydoc.render_doc(first))
    assert name in dir(depthgauge)


def test_the_first_access_in_a_new_process_is_a_function() -> None:
    code = (
        "import depthgauge as dg; a = dg.collapse; from depthgauge.depth import methods; b = dg.collapse; "
        "from depthgauge import collapse as c; print(type(a).__name__, a is b is c)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["function", "True"]


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        depthgauge.nothing  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_of_a_public_function_has_its_own_line(name: str) -> None:
    function = inspect.unwrap(getattr(depthgauge, name))
    lines = [line.strip() for line in (inspect.getdoc(function) or "").splitlines()]
    missing = [
        argument
        for argument in inspect.signature(function).parameters
        if not any(line.lstrip("*").startswith(f"{argument}:") for line in lines)
    ]
    assert missing == []
