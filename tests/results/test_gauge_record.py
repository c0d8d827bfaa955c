"""Result documents: which are accepted, which are refused, and what the error names."""

import copy
import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from result_documents import DOCUMENT

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.report.page import render
from depthgauge.results.gauge_record import SCHEMA, check_result, read_result
from depthgauge.results.record import ResultError
from depthgauge.workflows import gauge_network

# Keys that may be missing.
OPTIONAL = {
    f"subjects[0].collapse[0].{key}"
    for key in ("ratio", "notes", "share", "lost_at", "seconds", "attack_seconds", "upper")
}


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(DOCUMENT)


def keys(value: Any, place: str = "") -> Iterator[tuple[list[Any], str]]:
    """Yield every key of a document, with the first entry of each list for all of them: its path, and its name."""

    def walk(inner: Any, way: list[Any], name: str) -> Iterator[tuple[list[Any], str]]:
        if isinstance(inner, dict):
            for key, entry in inner.items():
                there = f"{name}.{key}" if name else key
                yield [*way, key], there
                yield from walk(entry, [*way, key], there)
        elif isinstance(inner, list) and inner:
            yield from walk(inner[0], [*way, 0], f"{name}[0]")

    yield from walk(value, [], place)


def reach(document: Any, way: list[Any]) -> Any:
    for step in way:
        document = document[step]
    return document


def test_a_missing_key_is_named(document):
    document["subjects"] = document["subjects"][:1]
    asked = 0
    for way, name in list(keys(document)):
        damaged = copy.deepcopy(document)
        del reach(damaged, way[:-1])[way[-1]]
        words = "it has no schema" if name == "schema" else f"{name}: is missing"
        if name.startswith("settings.") or name in OPTIONAL:
            assert check_result(damaged).subjects
            continue
        if ".collapse[0]." in name and not name.endswith(".method"):
            words = "collapse[0]: expected either refused, or layers_after, lower and methods"
        asked += 1
        with pytest.raises(ResultError, match=re.escape(words)):
            check_result(damaged)
    assert asked > 60


def test_a_value_of_the_wrong_kind_is_named(document):
    for way, wrong, words in [
        (["subjects"], {}, "subjects: expected a list, got an object"),
        (["subjects", 0, "layers", 2, "heads"], 3, "subjects[0].layers[2].heads: expected a list, got a whole number"),
        (["subjects", 0, "layers", 1, "heads", 0, "eta"], "x", "subjects[0].layers[1].heads[0].eta: expected a number"),
        (["subjects", 0, "layers", 2, "index"], -1, "subjects[0].layers[2].index: expected a whole number >= 0"),
        (["subjects", 0, "layers", 2, "index"], True, "index: expected a whole number, got true or false"),
        (["subjects", 0, "collapse", 0, "upper"], float("nan"), "subjects[0].collapse[0].upper: expected a number"),
        (["subjects", 0, "collapse", 0, "upper"], float("inf"), "collapse[0].upper: expected a number"),
        (["subjects", 0, "collapse", 0, "share"], [1.0], "share[0]: expected a list, got a number"),
        (["subjects", 1, "network", "skip"], 1, "subjects[1].network.skip: expected true or false, got a whole number"),
        (["subjects", 1, "name"], ["x" * 99], "subjects[1].name: expected a string, got a list"),
        (["subjects", 2, "kind"], "cake", "subjects[2].kind: invalid value 'cake'"),
        (["subjects"], [], "has no subjects"),
    ]:
        damaged = copy.deepcopy(document)
        reach(damaged, way[:-1])[way[-1]] = wrong
        with pytest.raises(ResultError) as refused:
            check_result(damaged)
        assert words in str(refused.value)
        assert len(str(refused.value)) < 220


def test_unknown_keys_are_ignored(document):
    known = check_result(document)
    document["later"] = document["subjects"][0]["later"] = {"anything": [None]}
    assert check_result(document) == known


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"schema": NaN}', "NaN is not a JSON number"),
        ("[1]", "expected an object, got [1]"),
        ("{}", f"it has no schema, expected '{SCHEMA}'"),
        ('{"schema": 1}', "it has the schema 1, expected"),
        ('{"schema": "other/1"}', "it has the schema 'other/1', expected"),
        (
            '{"schema": "depthgauge.gauge/2"}',
            "'depthgauge.gauge/2' of another version of depthgauge; this version reads",
        ),
        ('{"schema": "depthgauge.gauge/1"}', "version: is missing"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ResultError) as refused:
        read_result(path)
    assert words in str(refused.value)
    assert isinstance(refused.value, InputError)


def test_unreadable_files_are_refused_too(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, words in (("bytes", "not UTF-8 text"), (".", "Is a directory"), ("none.json", "No such file")):
        with pytest.raises(ResultError, match=words):
            read_result(tmp_path / name)


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


VALUES = [None, True, -1, 0, 0.0, 3, 1e-320, 1e308, -2.5, 10**18, "", "<b>", "é\u202e\n", [], [[]], {}, {"a": 1}]


def test_every_accepted_document_can_be_shown(document):
    """A document damaged at random is either refused or shown."""
    draw, places = random.Random(0), [way for way, _ in keys(document)]
    seen = {"refused": 0, "shown": 0}
    for _ in range(120):
        damaged = copy.deepcopy(document)
        for _ in range(draw.choice((1, 1, 3))):
            way = draw.choice(places)
            try:
                holder = reach(damaged, way[:-1])
                if isinstance(holder, dict):
                    holder[way[-1]] = copy.deepcopy(draw.choice(VALUES))
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change took the place away
        try:
            checked = check_result(damaged)
        except ResultError:
            seen["refused"] += 1
            continue
        shown = Shown()
        shown.feed(render(checked, ""))
        assert json.loads(shown.data) is not None
        assert shown.tables >= 1
        seen["shown"] += 1
    assert min(seen.values()) > 20


@pytest.mark.parametrize(
    "switches",
    [{}, {"causal": True}, {"norm": "pre"}, {"norm": "post", "mlp": 3}, {"skip": False}, {"mlp": 5}],
    ids=str,
)
def test_results_of_gauge_are_accepted(monkeypatch, switches):
    monkeypatch.setattr(gauge_network, "ATTACK", {"starts": 1, "steps": 1})
    monkeypatch.setattr(gauge_network, "TOLERANCES", (1e-1,))
    network = dg.random_network(layers=2, heads=2, dim=3, eta=0.1, seed=0, **switches)
    document = json.loads(json.dumps(dg.gauge(network, samples=1, tokens=3).to_json()))
    page = render(check_result(document), "")
    subject = document["subjects"][0]
    assert subject["verdict"] in page
    refused = [entry["refused"] for entry in subject["collapse"] if "refused" in entry]
    assert bool(refused) == bool(switches)
    assert page.count(">does not apply<") == len(refused)
