"""Fixtures of the page tests: a result document, its record, its page, and a browser."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from result_documents import DOCUMENT

from depthgauge.report.page import write_report
from depthgauge.results.gauge_record import GaugeRecord, check_result

CHROMIUM = shutil.which("chromium")


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(DOCUMENT)


@pytest.fixture
def record(document: dict[str, Any]) -> GaugeRecord:
    return check_result(document)


@pytest.fixture(scope="session")
def page_file(tmp_path_factory) -> Path:
    return write_report(copy.deepcopy(DOCUMENT), tmp_path_factory.mktemp("report") / "page.html").resolve()


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium is not installed: apt-get install chromium")
        pytest.skip("chromium is not installed, so the page cannot be opened")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
