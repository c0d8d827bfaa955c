"""The page of a shrunk checkpoint: it shows the record, is escaped, and works where parts are missing."""

import copy
import json
import random
import re
import shlex
from collections.abc import Callable, Iterator
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from resized_pages import resize
from shrink_documents import (
    ASSUMPTION,
    DOCUMENT,
    HOSTILE,
    PLAN,
    encoder,
    limit_not_reached,
    not_certified,
    too_few_windows,
    with_limit,
)

from depthgauge.base.errors import InputError
from depthgauge.report.charts import draw
from depthgauge.report.page import render, write_report
from depthgauge.results.document import Part
from depthgauge.results.record import ResultError
from depthgauge.results.shrink_document import (
    shrink_command,
    shrink_document,
    shrink_facts,
    shrink_parts,
    shrink_verdict,
    sizes_part,
    times_sentence,
)
from depthgauge.results.shrink_record import ShrinkRecord, check_shrink

STYLE = files("depthgauge.report").joinpath("page.css").read_text(encoding="utf-8")
MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "decoder": lambda: copy.deepcopy(DOCUMENT),
    "limit": with_limit,
    "limit not reached": limit_not_reached,
    "encoder": encoder,
    "too few windows": too_few_windows,
    "not certified": not_certified,
}


def parts_of(document: dict[str, Any]) -> dict[str, Part]:
    return {part.name: part for part in shrink_parts(check_shrink(document))}


def traces(part: Part) -> list[dict[str, Any]]:
    assert part.chart is not None
    (choice,) = part.chart.views
    return draw(choice, part.chart.height)["data"]


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_stack_shows_every_block_before_and_after() -> None:
    part = parts_of(DOCUMENT)["stack"]
    strip, *legend = traces(part)
    before, after = strip["z"]
    assert [layer for layer, state in enumerate(before) if state == 2] == DOCUMENT["removed"]
    kept = [layer for layer in range(30) if layer not in DOCUMENT["removed"]]
    assert [before[layer] for layer in kept] == [1] * 23 == after[:23]  # the recovery changes all of them
    assert after[23:] == [None] * 7
    # The eleventh block of the smaller model is block 11 of the source, because block 10 was removed.
    assert strip["hovertext"][1][10].startswith("layer 10 of the smaller model<br>layer 11 of the source")
    assert [entry["name"] for entry in legend] == ["kept, changed", "removed"]
    assert part.table.rows[11] == (11, "kept, changed", 10)
    assert part.table.rows[12] == (12, "removed", None)
    (strip, *_) = traces(parts_of(copy.deepcopy(DOCUMENT) | {"recovery": None})["stack"])
    assert [layer for layer, state in enumerate(strip["z"][0]) if state == 0] == list(range(9))


def test_the_increases_by_text_have_error_bars() -> None:
    (bars,) = traces(parts_of(DOCUMENT)["texts"])
    assert bars["x"] == [text["increase"] for text in DOCUMENT["texts"]]
    assert bars["error_x"]["array"] == pytest.approx([0.0437] * 4)
    assert bars["error_x"]["arrayminus"] == pytest.approx([0.041] * 4)
    table = parts_of(DOCUMENT)["texts"].table
    assert tuple(table.values[2]) == ("sampled from the model", 24, *(DOCUMENT["texts"][2][k] for k in table_keys))
    (bars,) = traces(parts_of(encoder())["texts"])
    assert bars["error_x"]["array"][1] == bars["error_x"]["arrayminus"][1] == 0.0  # no interval is known


table_keys = ("dense", "shrunk", "increase", "low", "high")


def test_recordings_are_not_called_texts_or_windows() -> None:
    document = copy.deepcopy(DOCUMENT) | {"repaired": False, "recovery": None}
    document["texts"] = [document["texts"][0] | {"kind": "recordings", "name": "spoken"}]
    document["plan"]["calibration"]["sources"] = [
        document["plan"]["calibration"]["sources"][0] | {"kind": "recordings", "name": "spoken"}
    ]
    document["plan"]["settings"] |= {"text": ["spoken"]}
    parts, record = parts_of(document), check_shrink(document)
    assert parts["texts"].title == "What it costs on your recordings"
    assert "by kind" not in parts["texts"].table.title
    assert parts["curve"].caption.startswith("Measured on the selection recordings; nothing was repaired. ")
    assert "only the result was trained. " in parts_of(copy.deepcopy(DOCUMENT))["curve"].caption
    assert f"{record.layers_before} layers of the decoder before" in parts["stack"].caption
    assert dict(shrink_facts(record))["layers"].endswith(" of the decoder")
    assert f"of {record.layers_before} layers of the decoder are kept" in shrink_verdict(record)


def test_the_curve_compares_ours_with_the_others() -> None:
    lines = {line["name"]: line for line in traces(parts_of(DOCUMENT)["curve"])}
    size = lines.pop("parameters")
    parameters = DOCUMENT["parameters"]
    assert size["x"] == [0, len(DOCUMENT["removed"])]
    assert size["y"] == [100, pytest.approx(100 * parameters["after"] / parameters["before"])]
    assert size["yaxis"] == "y2"
    assert list(lines) == ["depthgauge", "greedy search", "block influence (ShortGPT)", "angular distance (UIDL)"]
    for name, line in lines.items():
        points = [point for point in DOCUMENT["curve"] if point["method"] == name]
        assert line["x"] == [point["removed"] for point in points]
        assert line["y"] == [point["increase"] for point in points]
        assert (line["line"]["width"] == 3) == (name == "depthgauge")
    document = copy.deepcopy(DOCUMENT)
    document["curve"] = [{"method": "mine <b>", "removed": 3, "increase": 1.5}]
    assert traces(parts_of(document)["curve"])[0]["name"] == "mine &lt;b&gt;"


def test_the_guarantee_is_stated_with_its_assumption() -> None:
    part = parts_of(DOCUMENT)["guarantee"]
    (quantile,) = part.statements
    assert "on at least 95 % of windows" in quantile
    assert "at most 0.613 nats per token" in quantile
    assert part.caption == ASSUMPTION
    assert part.chart is None
    part = parts_of(with_limit())["guarantee"]
    bars = traces(part)[0]
    assert bars["y"] == [0.1431, 0.1823, 0.2377, 0.3519]
    assert len(set(bars["marker"]["color"][:3])) == 1
    assert bars["marker"]["color"][3] != bars["marker"]["color"][2]
    (line,) = draw(part.chart.views[0], part.chart.height)["layout"]["shapes"]
    assert line["y0"] == line["y1"] == 0.25
    assert part.table.rows == ((1, 0.1431, "yes"), (2, 0.1823, "yes"), (3, 0.2377, "yes"), (4, 0.3519, "no"))
    assert part.table.is_open
    assert part.caption == ASSUMPTION


def test_without_a_guarantee_the_page_says_so() -> None:
    for make in (not_certified, too_few_windows):
        part = parts_of(make())["guarantee"]
        assert part.statements[0].startswith("nothing is guaranteed, because")
        assert ASSUMPTION not in part.caption
    part = parts_of(limit_not_reached())["guarantee"]
    assert part.statements[0].startswith("no model was written: for no tested size is it guaranteed")
    assert "stack" not in parts_of(limit_not_reached())


def test_costs_repair_and_search_are_those_of_the_record() -> None:
    parts = parts_of(DOCUMENT)
    assert parts["costs"].table.values[3] == ["prefill", "812 ms", "634 ms", "0.781 [0.763, 0.8]"]
    assert parts["costs"].table.is_open
    assert parts["costs"].caption.endswith(f" {times_sentence(check_shrink(DOCUMENT))}")
    document = copy.deepcopy(DOCUMENT)
    document["speed"] |= {"prefill": None, "what": "prefill: no number"}
    costs = parts_of(document)["costs"]
    assert [row[0] for row in costs.table.rows] == ["parameters", "size on disk", "memory", "decode, per token"]
    assert costs.caption.endswith(": prefill: no number.")
    bare, repaired = traces(parts["candidates"])
    assert bare["x"] == [one["increase"] for one in PLAN["candidates"]]
    assert repaired["x"] == [one["repaired"] for one in PLAN["candidates"]]
    assert (
        parts["candidates"]
        .statements[1]
        .startswith("repair by distillation: the objective on the selection windows went from 3.95")
    )
    assert [row[0] for row in parts["search"].table.rows] == [step["layer"] for step in PLAN["search"]]
    assert "recovery: 2,000,000 tokens in 2 minutes" in parts["recovery"].statements[0]
    assert [row[0] for row in parts["recovery"].table.rows] == [0, 1_000_000, 2_000_000]
    assert ("torch", "2.8.0") in parts["notes"].table.rows


def test_every_size_has_the_interval_of_its_speed() -> None:
    part = sizes_part([check_shrink(DOCUMENT), check_shrink(with_limit() | {"speed": None})])
    assert part.table.columns[5:7] == ("prefill time", "decode time")
    assert [row[5:7] for row in part.table.rows] == [("0.781 [0.763, 0.8]", "0.773 [0.75, 0.797]"), (None, None)]


def test_facts_say_what_it_is_and_on_what() -> None:
    facts = dict(shrink_facts(check_shrink(DOCUMENT)))
    assert facts["layers"] == "30 → 23"
    assert facts["removed layers"] == "10, 12–14, 16, 21, 25"
    assert facts["parameters"] == "134,515,008 → 109,741,248"
    assert facts["to certify"] == "149 windows of 512 tokens"
    assert facts["written to"] == "smaller"
    assert dict(shrink_facts(check_shrink(limit_not_reached())))["written to"] == "nothing was written"


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_can_be_typed() -> None:
    words = shlex.split(shrink_command(check_shrink(DOCUMENT)))
    assert words[:2] == ["depthgauge", "shrink"]
    assert words[-3:] == ["--out", "smaller", "models/SmolLM2-135M"]
    assert [words[k + 1] for k, word in enumerate(words) if word == "--text"] == ["corpus.txt", "more text.txt"]
    from typer.main import get_command

    from depthgauge.cli.main import app

    shrink = get_command(app).commands["shrink"]
    for make in MAKERS.values():
        context = shrink.make_context("shrink", shlex.split(shrink_command(check_shrink(make())))[2:])
        record = check_shrink(make())
        assert context.params["remove"] == record.plan.settings.remove
        assert tuple(map(str, context.params["text"])) == record.plan.settings.text


def test_a_model_from_memory_is_saved_first() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["plan"]["files"] = {}
    page = unescape(render(check_shrink(document), ""))
    assert 'Save it and its tokenizer first with <code>model.save_pretrained("model")</code>' in page
    assert shlex.split(shrink_command(check_shrink(document)))[-1] == "model"
    assert "has no file" not in render(check_shrink(DOCUMENT), "")


# --- the page as a whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_the_page_has_the_verdict_and_figures_that_plotly_knows(name: str) -> None:
    import plotly.graph_objects as go

    record = check_shrink(MAKERS[name]())
    page = shrink_document(record)
    verdict = shrink_verdict(record)
    assert page.sections[0].verdict == verdict[:1].upper() + verdict[1:]
    assert "How small can it be?" in render(record, "")
    for part in page.sections[0].parts:
        if part.chart is not None:
            for choice in part.chart.views:
                figure = draw(choice, part.chart.height)
                drawn = json.dumps({key: figure[key] for key in ("data", "layout")})
                go.Figure(json.loads(re.sub(r'"@[\w-]+"', '"#123456"', drawn)))
                assert all(STYLE.count(f"--{role}: #") == 3 for role in re.findall(r'"@([\w-]+)"', drawn))
                assert choice.alt


def test_nothing_from_the_document_is_markup() -> None:
    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hostile(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [hostile(inner) for inner in value]
        return HOSTILE if isinstance(value, str) and not value.startswith("depthgauge.") else value

    page = render(check_shrink(hostile(DOCUMENT)), "")
    assert page.count("<script") == page.count("</script") == 3
    assert "<script>alert" not in page


class Shown(HTMLParser):
    """Collects the data of a page and counts its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.data, self.tables = False, "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag == "script" and ("id", "data") in attrs
        self.tables += tag == "table"

    def handle_data(self, data: str) -> None:
        self.data += data if self.inside else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = False


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:2]):
            yield (*way, key)
            yield from places(inner, (*way, key))


VALUES = [
    None,
    True,
    -1,
    0,
    0.0,
    3,
    1e-320,
    1.7e308,
    -1.7e308,
    -2.5,
    10**18,
    "",
    "<b>",
    "é\u202e\n",
    "{0}",
    "#",
    [],
    [[]],
    {},
]


def test_every_accepted_document_can_be_shown() -> None:
    """A document damaged at random is either refused or shown."""
    draw, seen = random.Random(0), {"refused": 0, "shown": 0}
    documents = [make() for make in MAKERS.values()]
    for _ in range(200):
        damaged = copy.deepcopy(draw.choice(documents))
        for _ in range(draw.choice((1, 1, 3))):
            holder, way = damaged, draw.choice(list(places(damaged)))
            for step in way[:-1]:
                holder = holder[step]
            holder[way[-1]] = copy.deepcopy(draw.choice(VALUES))
        try:
            checked = check_shrink(damaged)
        except ResultError:
            seen["refused"] += 1
            continue
        shown = Shown()
        shown.feed(render(checked, ""))
        assert json.loads(shown.data) is not None
        assert shown.tables >= 1
        seen["shown"] += 1
    assert min(seen.values()) > 20


def test_the_largest_numbers_can_be_shown() -> None:
    document = with_limit()
    document["texts"][0] |= {"increase": -1.7e308, "low": -1.7e308, "high": 1.7e308}
    document["guarantee"]["tested"][3]["bound"] = 1.7e308
    shown = Shown()
    shown.feed(render(check_shrink(document), ""))
    assert json.loads(shown.data) is not None


def test_write_report_takes_a_record_a_document_or_a_file(tmp_path: Path) -> None:
    record = check_shrink(DOCUMENT)
    (tmp_path / "depthgauge.json").write_text(record.dump(), encoding="utf-8")
    given: list[ShrinkRecord | dict[str, Any] | Path] = [record, DOCUMENT, tmp_path / "depthgauge.json"]
    pages = [write_report(one, tmp_path / f"{k}.html").read_bytes() for k, one in enumerate(given)]
    assert len(set(pages)) == 1
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    with pytest.raises(ResultError, match=r"plan.json is a plan, which has nothing to show yet; give the"):
        write_report(tmp_path / "plan.json", tmp_path / "x.html")
    with pytest.raises(ResultError, match=r"'depthgauge.shrink/9' of another version of depthgauge"):
        write_report({"schema": "depthgauge.shrink/9"}, tmp_path / "x.html")
    with pytest.raises(InputError, match="would replace its own result"):
        write_report(tmp_path / "depthgauge.json", tmp_path / "depthgauge.json")
    assert not (tmp_path / "x.html").exists()


# --- in a browser -----------------------------------------------------------------------------------------------------


def test_a_browser_draws_every_chart(browser: Any, tmp_path: Path) -> None:
    path = write_report(with_limit(), tmp_path / "page.html").resolve()
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 390, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]", timeout=30_000)
    page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
    charts = page.eval_on_selector_all("[data-chart]", "all => all.map((one) => one.dataset.chart)")
    assert charts == ["s0-curve", "s0-stack", "s0-candidates", "s0-recovery", "s0-guarantee", "s0-texts"]
    for width in (390, 1280):
        resize(page, width)
        boxes = page.eval_on_selector_all(
            "[data-chart] svg.main-svg", "all => all.map((one) => one.getBoundingClientRect().toJSON())"
        )
        assert all(box["left"] >= 0 and box["right"] <= width and box["height"] > 80 for box in boxes)
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("#s0-stack-chart .heatmaplayer image").count() == 1
    assert page.locator("#s0-stack-chart .legendtext").all_text_contents() == ["kept, changed", "removed"]
    assert page.locator("#s0-guarantee-chart .shapelayer path").count() == 1
    page.focus("#s0-stack-chart")
    for _ in range(13):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#said")).to_have_text("layer 12, removed")
    context.close()
    assert complaints == []
