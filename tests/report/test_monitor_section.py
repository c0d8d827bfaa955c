"""The page of a monitored run: every quantity has a heat map, alarms are marked, and a browser shows it."""

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from monitor_documents import LAYERS, probes, write_log
from playwright.sync_api import expect
from resized_pages import resize

import depthgauge as dg
from depthgauge.cli.main import main
from depthgauge.report.charts import draw
from depthgauge.results.monitor_document import (
    ALARM_LABELS,
    MOST_STEPS,
    QUANTITIES,
    monitor_document,
    monitor_verdict,
    shown_probes,
    step_maps,
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("logs") / "run-7", notes=("something was not measured",))


@pytest.fixture(scope="module")
def page_file(log: Path) -> Path:
    return dg.results.write_report(log, log.parent / "page.html").resolve()


def test_every_quantity_has_a_map_with_the_loss_and_the_alarms(log: Path) -> None:
    record = dg.results.read_log(log)
    assert {alarm.name for alarm in record.alarms} == set(ALARM_LABELS)
    chart = step_maps(record)
    assert chart is not None
    assert [choice.name for choice in chart.views] == [quantity.label for quantity in QUANTITIES.values()]
    groups = [quantity.group for quantity in QUANTITIES.values()]
    assert groups == sorted(groups, key=list(dict.fromkeys(groups)).index)  # the menu lists each group once
    for choice, quantity in zip(chart.views, QUANTITIES.values(), strict=True):
        figure = draw(choice, chart.height)
        traces = figure["data"]
        heat = traces[0]
        assert heat["x"] == [str(probe.step) for probe in probes()]
        assert len(heat["z"]) == LAYERS
        shown = [re.search("<b>(.*)</b>", text)[1] for text in heat["hovertext"][1]]  # type: ignore[index]
        assert shown[2] == f"{quantity.of(probes()[2].layers[1]):.3g}"
        assert [trace["name"] for trace in traces if trace.get("yaxis") == "y2"] == [
            "training loss",
            "loss on the probe",
        ]
        crosses = [trace for trace in traces if trace.get("name") == "alarm"]
        judged = [a for a in record.alarms if a.name in quantity.alarms or not quantity.alarms]
        assert [(x, y) for t in crosses for x, y in zip(t["x"], t["y"], strict=True)] == [
            (str(a.step), str(a.layer)) for a in judged
        ]
        assert len(figure["layout"]["shapes"]) == len({a.step for a in judged})


def test_the_page_states_the_verdict_the_facts_and_the_alarms(log: Path) -> None:
    page = monitor_document(dg.results.read_log(log))
    (section,) = page.sections
    assert section.name == "run-7"
    assert section.verdict.startswith(
        "11 probes from step 0 to step 100; loss 3 → 1; rank-collapse at layer 2, first at"
    )
    assert dict(section.facts)["probes"] == "11, every 10 steps"
    parts = {part.name: part for part in section.parts}
    assert list(parts) == ["alarms", "steps", "depth", "notes"]
    assert len(parts["alarms"].statements) == len(ALARM_LABELS)
    assert parts["steps"].table is not None
    assert len(parts["steps"].table.rows) == 11 * LAYERS
    assert parts["depth"].table is not None
    assert [row[1] for row in parts["depth"].table.rows] == [3, 3, 3, 2, 2, 1]
    assert page.command == f"depthgauge report {log}"


def test_the_depth_is_within_an_increase_of_the_loss(log: Path, tmp_path: Path) -> None:
    def caption(folder: Path) -> str:
        parts = monitor_document(dg.results.read_log(folder)).sections[0].parts
        return next(part.caption for part in parts if part.name == "depth")

    assert caption(log) == (
        "Layers that are left when blocks are removed greedily while the loss on the probe increases by at most 0.1."
    )
    assert caption(write_log(tmp_path / "encoder", objective="states")).endswith(
        "while the final states change by at most 0.1 of their norm."
    )


def test_a_run_without_probes_and_one_without_alarms(tmp_path: Path) -> None:
    empty = dg.results.read_log(write_log(tmp_path / "a", count=0))
    assert monitor_verdict(empty) == "nothing was measured yet"
    assert [part.name for part in monitor_document(empty).sections[0].parts] == ["alarms"]
    quiet = dg.results.read_log(write_log(tmp_path / "b", count=2))
    assert monitor_verdict(quiet).endswith("; no alarm")
    assert monitor_document(quiet).sections[0].parts[0].caption == "No alarm was raised."


def test_a_long_run_shows_evenly_spaced_probes_and_all_alarms(tmp_path: Path) -> None:
    record = dg.results.read_log(write_log(tmp_path / "a", count=11))
    long = tuple(dg.results.Probe(step=step, layers=record.probes[0].layers) for step in range(1000))
    alarm = dg.results.Alarm(step=501, name="dead-layer", layer=0, message="m")
    many = type(record)(log="x", name="x", run=record.run, probes=long, alarms=(alarm,))
    steps = [probe.step for probe in shown_probes(many)]
    assert MOST_STEPS <= len(steps) <= MOST_STEPS + 1
    assert {0, 501, 999} <= set(steps)
    assert "not on this page" in monitor_document(many).sections[0].parts[1].caption


def test_the_command_makes_the_page(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "runs" / "x.1")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["depthgauge", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    assert run("report", "runs/x.1") == (0, "", "page written to runs/x.1.html\n")
    code, out, _ = run("report", "runs/x.1", "--out", "b.html", "--json")
    assert code == 0
    assert json.loads(out)["out"] == "b.html"
    assert (tmp_path / "b.html").read_bytes() == (tmp_path / "runs" / "x.1.html").read_bytes()
    monkeypatch.chdir(tmp_path / "runs" / "x.1")
    assert run("report", ".", "--overwrite")[2] == f"page written to {tmp_path}/runs/x.1.html\n"


def test_a_browser_shows_the_maps_the_loss_and_the_crosses(browser: Any, page_file: Path) -> None:
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-drawn]", timeout=30_000)
    chart = "#s0-steps-chart"
    assert page.locator(f"{chart} .heatmaplayer image").count() == 1
    assert page.locator(f"{chart} .scatterlayer .trace").count() == 3  # alarms, loss, probe loss
    page.select_option("#s0-steps select", label="update of the block")
    assert "what the layer changes" in page.inner_text("#s0-steps-note")
    page.locator(chart).scroll_into_view_if_needed()
    area = page.locator(f"{chart} .nsewdrag").first.bounding_box()
    page.mouse.move(area["x"] + area["width"] * 0.5 / 11, area["y"] + area["height"] * 0.5 / LAYERS)
    page.locator(f"{chart} .hovertext").wait_for()
    assert page.locator(f"{chart} .hovertext").text_content() == "step 0 · layer 0update of the block 0.3"
    page.focus(chart)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#said")).to_have_text(re.compile("^step 0 · layer 1, update of the block"))
    resize(page, 360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    context.close()
    assert complaints == []


BOXES = """(selector) => [...document.querySelectorAll(selector)].map((one) => one.getBoundingClientRect().toJSON())"""


def overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    """Return whether two boxes have more than a line of pixels in common."""
    return (
        min(a["right"], b["right"]) - max(a["left"], b["left"]) > 1
        and min(a["bottom"], b["bottom"]) - max(a["top"], b["top"]) > 1
    )


def test_nothing_is_cut_and_nothing_overlaps_on_a_phone(browser: Any, tmp_path: Path) -> None:
    log = write_log(tmp_path / "run", count=31, every=2000)  # with steps of five digits
    context = browser.new_context(viewport={"width": 390, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    page.goto(dg.results.write_report(log, tmp_path / "page.html").resolve().as_uri())
    page.wait_for_selector("html[data-drawn]", timeout=30_000)

    def boxes(selector: str) -> list[dict[str, float]]:
        found: list[dict[str, float]] = page.evaluate(BOXES, selector)
        return found

    for width in (390, 1200):
        resize(page, width)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        chart = "#s0-steps-chart"
        for name in ("direction ratio", "score range, largest head"):
            page.select_option("#s0-steps select", label=name)
            (legend,), (heat,) = boxes(f"{chart} .legend"), boxes(f"{chart} .heatmaplayer image")
            drawn = [heat, *boxes(f"{chart} .nsewdrag"), *boxes(f"{chart} .cbfills, {chart} .cbaxis text")]
            assert len(drawn) == 6  # the map, its area, that of the loss, the colours and their two labels
            assert not [box for box in drawn if overlap(legend, box)]
            assert all(box["left"] >= 0 and box["right"] <= width for box in (legend, *drawn))
            assert boxes(f"{chart} .legend text")[-1]["bottom"] < boxes(f"{chart} .nsewdrag")[1]["top"]
        for one in (chart, "#s0-depth-chart"):
            labels = boxes(f"{one} .xtick text")
            assert len(labels) > 2
            assert not [pair for pair in itertools.pairwise(labels) if overlap(*pair)]
        for table in ("#s0-alarms", "#reproduce"):
            scroller, row = boxes(f"{table} .scroll")[0], boxes(f"{table} tbody tr:last-child")[0]
            assert row["bottom"] <= scroller["bottom"] + 1
        assert min(box["width"] for box in boxes("#s0-alarms td:last-child")) > 200
    context.close()
