"""Settings for all tests: reproducible hypothesis examples, one thread, and runtime checks of all annotations.

The checks of annotations double the time of the tests. They run if the variable DEPTHGAUGE_ANNOTATIONS is set, as in
`make test-annotations`.
"""

import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from beartype import BeartypeConf, FrozenDict, beartype
from forked import check_in_forks
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from family_configs import FamilyCase
    from family_rows import FamilyRun

# No test may ask a real hub; those about hubs serve their own.
os.environ["HF_HUB_OFFLINE"] = "1"

# Without a GPU, the Triton kernels run under Triton's interpreter. Triton reads the variable when it is imported.
if not torch.cuda.is_available():
    assert "triton" not in sys.modules
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("DEPTHGAUGE_ANNOTATIONS"):
    # This module is imported before the hook is installed. Triton compiles the source of the kernels, and the
    # wrappers that the hook adds would hide it.
    import depthgauge.fast_attention.kernels  # noqa: F401

    # This must run before the rest of the package is imported. It enforces all annotations of the package, including
    # tensor shapes. As in mypy, an int is accepted where a float is expected; beartype rejects it by default.
    _checker = ModuleType("enforced_annotations")
    # typer passes an object of another class than the one that its users must name.
    _conf = BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({typer.Context: Any}))
    _checker.checked = beartype(conf=_conf)  # type: ignore[attr-defined]
    sys.modules[_checker.__name__] = _checker
    install_import_hook("depthgauge", "enforced_annotations.checked")

_COMMON = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("test", max_examples=60, **_COMMON)
settings.register_profile("soak", max_examples=2000, **_COMMON)
settings.load_profile("soak" if os.environ.get("DEPTHGAUGE_SOAK") else "test")

torch.set_num_threads(1)
# What is imported and collected stays: a million objects. Each training searched them for garbage, in a third of a
# second. Frozen objects are not searched, and pages with them are not copied after a fork.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # modules written in C++ complain about what is not collected at the end


@pytest.fixture(autouse=True)
def _no_line_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no command print progress before its first result, however slow the machine is at this moment."""
    monkeypatch.setattr("depthgauge.cli.output.START_DELAY", 3600.0)


@pytest.fixture(autouse=True, scope="session")
def _short_timing() -> Iterator[None]:
    """Let `shrink` time models for a moment only, also in fixtures of a module; few ratios settle then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthgauge.surgery.speed.SECONDS", 0.1)
        yield


@pytest.fixture(scope="session", autouse=True)
def _short_training() -> Iterator[None]:
    """Let `shrink --effort quick` train for a few steps; training takes much of its time on tiny models."""
    from tiny_shrinks import STEPS, train_for

    with pytest.MonkeyPatch.context() as patch:
        train_for(STEPS, patch)
        yield


@pytest.fixture
def kept_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `shrink --effort quick` train for more steps, in tests that assert that a stage is kept."""
    from tiny_shrinks import KEPT_STEPS, train_for

    train_for(KEPT_STEPS, monkeypatch)


@pytest.fixture
def forked_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `shrink` check what it wrote in a forked process. tests/surgery/test_reload.py starts real ones."""
    check_in_forks(monkeypatch)


@pytest.fixture(scope="session")
def family_run(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[FamilyCase], FamilyRun]":
    """Gauge and shrink a tiny model of a family once for all tests; those of a family are in one `xdist_group`."""
    from family_rows import quick_shrinks, run_family

    @cache
    def run(case: "FamilyCase") -> "FamilyRun":
        with warnings.catch_warnings(), quick_shrinks():
            warnings.simplefilter("ignore")
            return run_family(case, tmp_path_factory.mktemp(case.model_type))

    return run


@pytest.fixture
def data_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lm-eval keep the data of tasks in a temporary folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets  # noqa: F401
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no worker is left with one of them at the end.

    Tests that share a fixture of their module run in one process; another one would make it again. The groups must be
    named before pytest-xdist reads them, in the same hook.
    """
    for item in items:
        made = [one for several in item._fixtureinfo.name2fixturedefs.values() for one in several]  # type: ignore[attr-defined]
        if any(one.scope == "module" for one in made) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest", metavar="FILE", type=Path, help="write the slowest tests to FILE, and print files")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the 200 slowest tests, and print the slowest files. The times are those of the clock, with all fixtures."""
    out = config.getoption("slowest")
    if out is None:
        return
    tests, files = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                tests[report.nodeid.removesuffix(f"@{file}")] += report.duration
                files[file] += report.duration
    out.parent.mkdir(exist_ok=True)
    out.write_text("".join(f"{taken:8.2f} s  {name}\n" for name, taken in tests.most_common(200)), encoding="utf-8")
    terminalreporter.section(f"slowest files of {files.total():.0f} s; the slowest tests are in {out}")
    for name, taken in files.most_common(10):
        terminalreporter.line(f"{taken:8.2f} s  {name}")
