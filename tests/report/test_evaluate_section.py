"""The page of an evaluation: it shows the record, is escaped, and a browser draws its charts."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from evaluate_documents import HOSTILE, document, evaluation
from resized_pages import resize

from depthgauge.report.charts import draw
from depthgauge.report.page import render, write_report
from depthgauge.results.document import Place
from depthgauge.results.evaluate_document import evaluate_document, evaluate_parts


def traces(record: Any, name: str) -> list[dict[str, Any]]:
    part = next(part for part in evaluate_parts(record) if part.name == name)
    assert part.chart is not None
    (view,) = part.chart.views
    return draw(view, part.chart.height)["data"]


def test_the_bars_are_the_accuracies() -> None:
    record = evaluation()
    for index, bars in enumerate(traces(record, "accuracy")):
        wanted = [task.results[index].accuracy for task in record.tasks] + [record.mean[index].accuracy]
        assert bars["x"] == pytest.approx([100 * one for one in wanted])


def test_more_models_than_colours_are_the_groups_of_the_bars() -> None:
    record = evaluation(*"abcdefg")
    found = traces(record, "accuracy")
    assert len(found) == len(record.tasks) + 1  # the mean
    for bars, results in zip(found, (*(task.results for task in record.tasks), record.mean), strict=True):
        assert bars["x"] == pytest.approx([100 * one.accuracy for one in results])
    assert evaluate_document(record).sections[0].name == "a and 6 other models"


def test_the_differences_have_their_intervals_and_bounds() -> None:
    record = evaluation("a", "b", "c")
    found = traces(record, "difference")
    assert [trace["name"] for trace in found] == ["measured, with 95 % interval", "guaranteed: not below"] * 2
    for index, measured, bound in ((1, *found[:2]), (2, *found[2:])):
        rows = [*(task.results[index] for task in record.tasks), record.mean[index]]
        assert measured["x"] == pytest.approx([100 * (row.difference or 0) for row in rows])
        ends = [x + more for x, more in zip(measured["x"], measured["error_x"]["array"], strict=True)]
        assert ends == pytest.approx([100 * (row.high or 0) for row in rows])
        assert bound["x"] == pytest.approx([-100 * (row.falls_at_most or 0) for row in rows])


def test_one_model_has_no_differences_and_a_text_no_chart() -> None:
    parts = evaluate_parts(evaluation("a"))
    assert [part.name for part in parts if Place.PAGE in part.place] == [
        "accuracy",
        "perplexity",
        "remarks",
    ]


def test_the_command_reproduces_it_and_names_are_escaped() -> None:
    page = evaluate_document(evaluation("./model", "-odd name"))
    words = shlex.split(page.command)
    assert words[:2] == ["depthgauge", "evaluate"]
    assert words[-3:] == ["--", "./model", "-odd name"]
    assert "<script>alert" not in render(evaluation("./model", HOSTILE), "")


def test_a_browser_draws_every_chart(browser: Any, tmp_path: Path) -> None:
    path = write_report(document(), tmp_path / "page.html").resolve()
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 390, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]", timeout=30_000)
    charts = page.eval_on_selector_all("[data-chart]", "all => all.map((one) => one.dataset.chart)")
    assert charts == ["s0-accuracy", "s0-difference"]
    for width in (390, 1280):
        resize(page, width)
        assert page.evaluate("document.documentElement.scrollWidth") == width
    context.close()
    assert complaints == []
