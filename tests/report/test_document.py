"""What is accepted as a result document, and what is said of the rest."""

import copy
import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

import depthgauge as dg
from depthgauge.errors import InputError
from depthgauge.report.document import SCHEMA, ResultError, check_result, read_result
from depthgauge.report.page import render
from depthgauge.workflows import gauge_network as study

# Keys that may be missing: the page does without them.
OPTIONAL = {
    "settings.target", "settings.samples", "settings.tokens", "settings.radius", "settings.seed", "settings.input",
}  # fmt: skip


def keys(value: Any, place: str = "") -> Iterator[tuple[list[Any], str]]:
    """Every key of a document, the first entry of each list standing for all: the way to it, and its name."""

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


def test_every_key_is_asked_for_by_its_name(document):
    document["subjects"] = document["subjects"][:1]
    asked = 0
    for way, name in list(keys(document)):
        damaged = copy.deepcopy(document)
        del reach(damaged, way[:-1])[way[-1]]
        words = f"{name} must be network or model, got None" if name.endswith(".kind") else f"{name} is missing"
        if name == "schema":
            words = "it has no schema"
        if name in OPTIONAL:
            check_result(damaged)
            continue
        asked += 1
        with pytest.raises(ResultError, match=re.escape(words)):
            check_result(damaged)
    assert asked > 80


def test_a_value_of_the_wrong_kind_is_named(document):
    for way, wrong, words in [
        (["subjects"], {}, "subjects must be a list, got {}"),
        (["subjects", 0, "layers", 1, "heads", 0, "eta"], "x", "subjects[0].layers[1].heads[0].eta must be a finite"),
        (
            ["subjects", 0, "layers", 2, "index"],
            -1,
            "subjects[0].layers[2].index must be a whole number from 0, got -1",
        ),
        (["subjects", 0, "layers", 2, "index"], True, "index must be a whole number from 0, got True"),
        (["subjects", 0, "collapse", 0, "upper"], float("nan"), "upper must be a finite number or null, got nan"),
        (["subjects", 0, "collapse", 0, "upper"], 10**400, "collapse[0].upper must be a finite number or null"),
        (["subjects", 0, "collapse", 0, "share"], [1.0], "share[0] must be a list, got 1.0"),
        (["subjects", 1, "network", "skip"], 1, "subjects[1].network.skip must be true or false, got 1"),
        (["subjects", 1, "name"], ["x" * 99], "subjects[1].name must be a text"),
        (["subjects", 2, "kind"], "cake", "subjects[2].kind must be network or model, got 'cake'"),
        (["subjects"], [], "has no subjects"),
    ]:
        damaged = copy.deepcopy(document)
        reach(damaged, way[:-1])[way[-1]] = wrong
        with pytest.raises(ResultError) as refused:
            check_result(damaged)
        assert words in str(refused.value)
        assert len(str(refused.value)) < 220


def test_later_names_are_left_alone(document):
    document["later"] = document["subjects"][0]["later"] = {"anything": [None]}
    assert check_result(document) is document


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
        ('{"schema": "depthgauge.gauge/2"}', "'depthgauge.gauge/2' of another version of depthgauge; this one reads"),
        ('{"schema": "depthgauge.gauge/1"}', "version is missing"),
    ],
)
def test_a_foreign_file_is_refused_in_a_sentence(tmp_path, text, words):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ResultError) as refused:
        read_result(path)
    assert words in str(refused.value)
    assert isinstance(refused.value, InputError)


def test_unreadable_files_are_refused_too(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, words in (("bytes", "not text"), (".", "Is a directory"), ("none.json", "No such file")):
        with pytest.raises(ResultError, match=words):
            read_result(tmp_path / name)


class Shown(HTMLParser):
    """The data the page carries, and how many tables it has."""

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


def test_whatever_is_accepted_can_be_shown(document):
    """Damage the document at random: it is refused by name, or the page is made of it."""
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
def test_what_gauge_gives_is_accepted(monkeypatch, switches):
    monkeypatch.setattr(study, "ATTACK", {"starts": 1, "steps": 1})
    monkeypatch.setattr(study, "TOLERANCES", (1e-1,))
    network = dg.random_network(layers=2, heads=2, dim=3, eta=0.1, seed=0, **switches)
    document = json.loads(json.dumps(study.gauge(network, samples=1, tokens=3).to_json()))
    page = render(check_result(document), "")
    subject = document["subjects"][0]
    assert subject["verdict"] in page
    refused = [entry["refused"] for entry in subject["collapse"] if "refused" in entry]
    assert bool(refused) == bool(switches)
    assert page.count(">does not apply: ") == len(refused)
