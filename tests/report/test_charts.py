"""The charts show the values of the record, with attributes that plotly accepts."""

import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from depthgauge.base.format import number
from depthgauge.report.charts import draw
from depthgauge.results.document import Chart, Place
from depthgauge.results.gauge_document import (
    depth_chart,
    gauge_section,
    head_map,
    residual_curve,
    sandwich_chart,
    share_measures,
)
from depthgauge.results.gauge_record import check_result, read_result

STYLE = files("depthgauge.report").joinpath("page.css").read_text(encoding="utf-8")


def drawn(chart: Chart, index: int = 0) -> dict[str, Any]:
    return draw(chart.views[index], chart.height)


def roles(value: Any, key: str = "") -> set[str]:
    if isinstance(value, str):
        return {value[1:]} if value.startswith("@") and key.endswith(("color", "colorscale")) else set()
    if isinstance(value, list):
        return set().union(*(roles(inner, key) for inner in value))
    return set().union(*(roles(inner, name) for name, inner in value.items())) if isinstance(value, dict) else set()


def resolved(value: Any, key: str = "") -> Any:
    if isinstance(value, str):
        return "#123456" if value.startswith("@") and key.endswith(("color", "colorscale")) else value
    if isinstance(value, list):
        return [resolved(inner, key) for inner in value]
    return {name: resolved(inner, name) for name, inner in value.items()} if isinstance(value, dict) else value


@pytest.fixture
def figures(record):
    return [
        {key: drawn(part.chart, k)[key] for key in ("data", "layout")}
        for subject in record.subjects
        for part in gauge_section(subject, record.settings).parts_at(Place.PAGE)
        if part.chart is not None
        for k in range(len(part.chart.views))
    ]


def test_plotly_knows_every_attribute(figures):
    import plotly.graph_objects as go

    assert len(figures) == 2 * (13 + 2 + 1 + 1) + 2
    for figure in figures:
        go.Figure(resolved(figure))  # raises on a name or a value that plotly does not know


def test_every_colour_is_one_of_every_theme(figures):
    used = roles(figures)
    assert {"blue", "vermilion", "shade-0", "shade-4", "ink"} <= used
    themes = re.findall(r"color-scheme: (light|dark);(.*?)}", STYLE, re.DOTALL)
    assert [name for name, _ in themes] == ["light", "dark", "dark"]
    given = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", colours)) for _, colours in themes]
    assert all(used <= set(colours) for colours in given)
    assert given[1] == given[2]  # asked for by the system or by the reader, dark is dark


def luminance(colour: str) -> float:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_words_and_marks_stand_out_and_shades_have_an_order():
    for _, colours in re.findall(r"color-scheme: (light|dark);(.*?)}", STYLE, re.DOTALL):
        found = {name: luminance(value) for name, value in re.findall(r"--([\w-]+): (#[0-9a-f]{6});", colours)}

        def contrast(one: str, other: str, found: dict[str, float] = found) -> float:
            high, low = sorted((found[one], found[other]), reverse=True)
            return (high + 0.05) / (low + 0.05)

        for surface in ("paper", "raised"):
            assert all(contrast(words, surface) >= 4.5 for words in ("ink", "faint", "accent"))
            assert all(contrast(mark, surface) >= 3 for mark in ("blue", "vermilion", "green", "purple"))
        shades = [found[f"shade-{k}"] for k in range(5)]
        assert shades in (sorted(shades), sorted(shades, reverse=True))
        assert contrast("shade-0", "shade-4") > 8


def test_the_heat_map_shows_the_measure_with_gaps_where_there_is_no_head(document, record):
    chart = head_map(record.subjects[0].layers, share_measures(record.subjects[0].collapse))
    by_name = {choice.name: draw(choice, chart.height) for choice in chart.views}
    assert [choice.group for choice in chart.views] == ["Measured"] * 11 + ["Proved"] * 2
    trace = by_name["score range θ"]["data"][0]
    layers = document["subjects"][0]["layers"]
    assert trace["z"] == [
        [layer["heads"][0]["score_range"] for layer in layers],
        [layers[0]["heads"][1]["score_range"], None, layers[2]["heads"][1]["score_range"]],
    ]
    assert trace["zmax"] == layers[2]["heads"][1]["score_range"]
    assert trace["hovertext"][1][2] == f"layer 2 · head 1<br>score range θ <b>{number(trace['z'][1][2])}</b>"
    assert by_name["score range θ"]["alt"].endswith("Here from 0.002 (layer 0, head 0) to 0.009 (layer 2, head 1).")
    assert by_name["score range θ"]["data"][0]["zmin"] == 0
    contraction = by_name["contraction"]["data"][0]
    assert contraction["z"][1][0] is None
    share = by_name["share of the bound, identity"]["data"][0]
    assert share["z"] == [[0.2, 0.25, 0.25], [0.3, None, 0.0]]
    assert "<b>30.0 %</b>" in share["hovertext"][1][0]


def test_many_layers_are_labelled_in_steps(document):
    subject = document["subjects"][0]
    subject["layers"] = [{**subject["layers"][0], "index": k} for k in range(40)]
    axis = drawn(head_map(check_result(document).subjects[0].layers))["layout"]["xaxis"]
    assert axis["tickvals"] == [str(k) for k in range(0, 40, 3)]


def test_colours_show_differences_at_every_size(document):
    heads = [head for layer in document["subjects"][0]["layers"] for head in layer["heads"]]
    for k, head in enumerate(heads):
        head["tv_mean"] = (k + 1) * 1e-5  # far below the natural maximum 1
        head["entropy"] = 4.0 + 0.01 * k  # nearly constant
        head["score_range"] = 10.0 ** (-k)  # several decades
        head["tv_max"] = 0.2 * (k + 1)
    chart = head_map(check_result(document).subjects[0].layers)
    choices = {choice.name: draw(choice, chart.height) for choice in chart.views}

    def scale(name):
        trace = choices[name]["data"][0]
        return trace["zmin"], trace["zmax"], trace["colorbar"]["ticktext"]

    assert scale("distance from averaging") == (0.0, pytest.approx(5e-5), ["0", "5e-5"])
    assert scale("entropy") == (4.0, pytest.approx(4.04), ["4", "4.04"])
    assert scale("score range θ") == (pytest.approx(-4), pytest.approx(0), ["0.0001", "1"])
    assert "The colours are logarithmic." in choices["score range θ"]["note"]
    assert scale("distance from averaging, worst row")[:2] == (0.0, 1.0)
    z = choices["score range θ"]["data"][0]["z"]
    assert sorted(value for row in z for value in row if value is not None) == pytest.approx([-4, -3, -2, -1, 0])


def test_the_residual_of_a_checkpoint_is_shown_about_the_mean_first():
    record = read_result(Path(__file__).parents[1] / "data" / "documents" / "gauge-decoder.json")
    names = [choice.name for choice in residual_curve(record.subjects[0]).views]
    assert names == ["differences from the mean token", "differences from the mid-range"]


def test_a_checkpoint_shows_the_measures_it_has(record):
    chart = head_map(record.subjects[2].layers)
    assert [choice.name for choice in chart.views] == ["attention on the first token", "largest weight η"]
    assert drawn(chart)["data"][0]["z"] == [[0.0, 0.0], [0.25, 0.25], [0.5, 0.5]]
    assert residual_curve(record.subjects[2]) is None


def test_the_residual_curve_runs_from_the_input_and_takes_a_log_axis_when_it_falls(document):
    subject = document["subjects"][0]
    chart = residual_curve(check_result(document).subjects[0])
    figure = drawn(chart, 1)
    assert figure["data"][1]["x"] == ["in", "0", "1", "2"]
    states = [subject["input"], *subject["layers"]]
    assert figure["data"][1]["y"] == [state["residual"]["mean"]["frobenius"]["ratio"] for state in states]
    assert figure["layout"]["yaxis"]["type"] == "log"
    for layer in subject["layers"]:
        layer["residual"] = subject["input"]["residual"]
    assert "type" not in drawn(residual_curve(check_result(document).subjects[0]))["layout"]["yaxis"]


def test_the_sandwich_marks_what_is_refused_and_what_is_infinite(record):
    subject = record.subjects[0]
    figure = drawn(sandwich_chart(subject.collapse, subject.printed))
    link, lower, upper = figure["data"]
    assert lower["x"] == [0.01, 0.3, 0.001]
    assert upper["x"] == [0.02, 0.5]
    assert link["x"] == [0.01, 0.02, None, 0.3, 0.5, None]
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["does not apply", "no finite bound"]
    assert figure["layout"]["shapes"][0]["x0"] == 0.25
    assert figure["layout"]["shapes"][0]["name"] == "Theorem D.1, as printed"
    assert sandwich_chart(subject.collapse[3:], subject.printed) is None


@pytest.mark.parametrize("values", [(1e308, 1.7e308), (5e-324, 1e-300), (1e-300, 1e300), (0.07, 1.0002), (2.0, 2.0)])
def test_log_axes_have_a_few_finite_ticks(record, values):
    subject = record.subjects[0]
    row = msgspec.structs.replace(subject.collapse[0], lower=values[0], upper=values[1])
    axis = drawn(sandwich_chart([row], subject.printed))["layout"]["xaxis"]
    assert 1 <= len(axis["tickvals"]) <= 8
    assert all(0 < tick < math.inf for tick in axis["tickvals"])
    assert len(axis["ticktext"]) == len(axis["tickvals"])


def test_depth_shows_certified_next_to_measured(record):
    proved, measured = drawn(depth_chart(record.subjects[0].depth, 3))["data"]
    assert (proved["name"], measured["name"]) == ("proved for every input", "measured on the inputs")
    assert measured["y"] == [1, 2]
    assert proved["x"] == ["0.1", "1e-6"]
    assert proved["y"] == [1, 2]
