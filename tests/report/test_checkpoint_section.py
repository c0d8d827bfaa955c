"""The page section of a checkpoint: it shows every number of the record, and works where parts are missing."""

from pathlib import Path
from typing import Any

import pytest

from depthgauge.base.errors import InputError
from depthgauge.report.charts import draw
from depthgauge.report.page import render, write_report
from depthgauge.results.document import Place
from depthgauge.results.gauge_document import checkpoint_facts, checkpoint_parts
from depthgauge.results.gauge_record import check_result
from depthgauge.results.labels import SCORES, WHAT_IFS

HOSTILE = "<script>alert(1)</script>"


def interval(loss: float, alone: bool = False) -> dict[str, Any]:
    return {"loss": loss, "low": None if alone else loss - 0.1, "high": None if alone else loss + 0.2}


def layer(index: int) -> dict[str, Any]:
    kinds = [kind for kind in WHAT_IFS if kind != "parallel" or index < 3]
    residual = {
        center: {norm: {"value": 1.0, "ratio": 0.9, "ratio_std": 0.0} for norm in ("max", "frobenius", "composite")}
        for center in ("midrange", "mean")
    }
    head = {
        "tv_mean": 0.5, "first_mass": 0.25, "entropy": None, "eta": 0.1, "static_best": "first",
        "static": {"uniform": 0.9, "first": 0.125, "previous": 1.2, "mean": 0.4},
    }  # fmt: skip
    return {
        "index": index,
        "residual": residual,
        "heads": [{"index": h, **head} for h in range(2)],
        "scores": dict.fromkeys(SCORES, 0.1 * index + 0.01),
        "what_if": {kind: interval(0.5 + index + k) for k, kind in enumerate(kinds)},
        "fast": {"heads": [], "bounds": [3.0, 4.0], "line": f"layer {index}: no head of 2 {HOSTILE}"},
    }


@pytest.fixture
def document() -> dict[str, Any]:
    subject = {
        "kind": "model", "name": HOSTILE, "verdict": "4 layers; layer 1 is missed least",
        "model": {
            "family": "llama", "architecture": "LlamaForCausalLM", "objective": "loss", "layers": 4, "heads": 2,
            "kv_heads": 1, "dim": 8, "parameters": 3_000_000, "dtype": "float32", "device": "cpu", "context": 64,
        },
        "text": {"source": f"{HOSTILE}.txt", "sha256": "0", "windows": 3, "window": 16, "tokens": 48},
        "regime": {"tolerance": 0.1, "eta": 0.75, "printed_orders": 3.2, "corrected_orders": 2.4},
        "baseline": interval(3.5), "input": {"residual": layer(0)["residual"]},
        "layers": [layer(index) for index in range(4)],
        "scores": [{"score": score, "what_if": kind, "spearman": 0.8, "layers": 4}
                   for score, kind in zip(SCORES, ("block", "block", "attention", "mlp"), strict=True)],
        "collapse": [], "notes": ["something is missing"],
        "depth": [],
    }  # fmt: skip
    settings = {"target": "dir", "tokens": 48, "window": 16, "seed": 0, "what_if": "block"}
    return {"schema": "depthgauge.gauge/1", "version": "0", "settings": settings, "subjects": [subject]}


def test_what_is_shown_is_what_was_measured(document: dict[str, Any]) -> None:
    (subject,) = check_result(document).subjects
    parts = {part.name: part for part in checkpoint_parts(subject) if Place.PAGE in part.place}
    assert list(parts) == ["what-if", "trust", "residual", "heads", "notes"]
    bars = parts["what-if"].chart.views
    assert [choice.name for choice in bars] == [what_if.label for what_if in WHAT_IFS.values()]
    (trace,) = draw(bars[0], 340)["data"]
    assert trace["y"] == [0.5, 1.5, 2.5, 3.5]
    assert trace["error_y"]["array"] == pytest.approx([0.2] * 4)
    assert trace["error_y"]["arrayminus"] == pytest.approx([0.1] * 4)
    assert "Smallest at layer 0 (0.5), largest at layer 3 (3.5)." in bars[0].note
    assert draw(bars[-1], 340)["data"][0]["y"][-1] is None  # the last layer has no neighbour
    assert parts["what-if"].table.values[1][:4] == [1, 1.5, 1.4, 1.7]
    (points,) = draw(parts["trust"].chart.views[3], 340)["data"]
    assert points["y"] == [layer.what_if["mlp"].loss for layer in subject.layers]
    assert points["x"] == pytest.approx([0.01, 0.11, 0.21, 0.31])
    assert parts["trust"].table.values[0] == ["block influence (ShortGPT)", "skip block", 0.8]
    maps = {choice.name: draw(choice, 300)["data"][0]["z"] for choice in parts["heads"].chart.views}
    assert maps["error of the best static pattern"] == [[0.125] * 4] * 2
    assert maps["attention on the first token"] == [[0.25] * 4] * 2
    assert parts["notes"].statements[-1] == "note: something is missing"
    facts = dict(checkpoint_facts(subject))
    assert facts["loss, intact"] == "3.5 nats per token"
    assert facts["heads per layer"] == "2, 1 for keys and values"
    assert facts["weights"] == "η = 0.75, about 2.4 orders of magnitude from the small-weight regime (estimate)"


def test_the_page_is_whole_and_tame(document: dict[str, Any], tmp_path: Path) -> None:
    page = render(check_result(document), "")
    assert HOSTILE not in page
    assert "depthgauge gauge --tokens 48 --seed 0 --window 16 --what-if block dir" in page
    assert "proved for every input" not in page
    assert write_report(document, tmp_path / "p.html").stat().st_size > 1_000_000


def parts_of(document: dict[str, Any]) -> dict[str, Any]:
    return {part.name: part for part in checkpoint_parts(check_result(document).subjects[0])}


@pytest.mark.parametrize(
    ("key", "empty", "fact", "part"),
    [
        ("text", None, "text", None),
        ("regime", None, "weights", None),
        ("baseline", None, "loss, intact", None),
        ("scores", [], None, "trust"),
    ],
)
def test_a_missing_part_is_left_out(
    document: dict[str, Any], key: str, empty: Any, fact: str | None, part: str | None
) -> None:
    before = check_result(document).subjects[0]
    assert fact is None or fact in dict(checkpoint_facts(before))
    assert part is None or part in parts_of(document)
    document["subjects"][0][key] = empty
    record = check_result(document)
    assert fact not in dict(checkpoint_facts(record.subjects[0]))
    assert part not in parts_of(document)
    assert record.subjects[0].verdict in render(record, "")


@pytest.mark.parametrize(
    ("key", "empty", "part"),
    [("residual", None, "residual"), ("heads", [], "heads"), ("what_if", {}, "what-if"), ("scores", {}, None)],
)
def test_layers_may_lack_a_measurement(document: dict[str, Any], key: str, empty: Any, part: str | None) -> None:
    assert part is None or part in parts_of(document)
    for layer in document["subjects"][0]["layers"]:
        layer[key] = empty
    if key == "residual":
        document["subjects"][0]["input"] = {}
    assert part not in parts_of(document)
    points = [trace["x"] for choice in parts_of(document)["trust"].chart.views for trace in draw(choice, 340)["data"]]
    assert all(x == [] for x in points) == (key in ("what_if", "scores"))


def test_plans_are_listed_with_the_notes(document: dict[str, Any]) -> None:
    assert len(parts_of(document)["notes"].table.rows) == 4
    for layer in document["subjects"][0]["layers"]:
        layer["fast"] = None
    assert parts_of(document)["notes"].table is None
    document["subjects"][0]["notes"] = []
    assert "notes" not in parts_of(document)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (
            ("layers", 1, "what_if", "block", "loss"),
            None,
            r"layers\[1\]\.what_if.*\.loss: expected a number, got null",
        ),
        (
            ("layers", 0, "scores", "mlp_cosine"),
            "x",
            r"layers\[0\]\.scores.*: expected a number or null",
        ),
        (("baseline", "loss"), None, r"baseline\.loss: expected a number, got null"),
        (("layers", 0, "index"), -1, r"layers\[0\]\.index: expected a whole number >= 0"),
        (("model", "heads"), "2", r"model\.heads: expected a whole number, got a string"),
    ],
)
def test_damage_is_named(document: dict[str, Any], path: tuple[Any, ...], value: Any, words: str) -> None:
    at = document["subjects"][0]
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(InputError, match=words):
        check_result(document)
