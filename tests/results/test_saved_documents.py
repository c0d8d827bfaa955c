"""Saved documents load, and no value of them is lost or changed."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import depthgauge as dg
from depthgauge.results.gauge_record import CollapseRecord, NetworkSubject, read_result
from depthgauge.results.record import read

DATA = Path(__file__).parents[1] / "data" / "documents"
GAUGES = sorted(DATA.glob("gauge-*.json"))


def lost(old: Any, new: Any, place: str = "") -> list[str]:
    """List the places of an old document that are missing or different in a new one."""
    if isinstance(old, dict) and isinstance(new, dict):
        missing = [f"{place}.{key}" for key in old if key not in new]
        return missing + [bad for key in old if key in new for bad in lost(old[key], new[key], f"{place}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [bad for k, pair in enumerate(zip(old, new, strict=True)) for bad in lost(*pair, f"{place}[{k}]")]
    return [] if old == new else [f"{place}: {old!r} became {new!r}"]


def test_the_comparison_finds_losses() -> None:
    assert lost({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}], "c": 0}) == [".a[1].b: 2 became 3"]
    assert lost({"a": 1}, {}) == [".a"]


@pytest.mark.parametrize("path", GAUGES, ids=lambda path: path.stem)
def test_results_of_gauge_load_and_keep_every_value(path: Path) -> None:
    record = read_result(path)
    assert lost(json.loads(path.read_text(encoding="utf-8")), record.to_json()) == []


def test_one_document_of_each_kind_is_kept() -> None:
    records = [read_result(path) for path in GAUGES]
    kinds = {type(subject).__name__ for record in records for subject in record.subjects}
    assert kinds == {"NetworkSubject", "CheckpointSubject"}
    objectives = {subject.to_json().get("model", {}).get("objective") for r in records for subject in r.subjects}
    assert {"loss", "states"} <= objectives
    networks = [s for record in records for s in record.subjects if isinstance(s, NetworkSubject)]
    assert any(row.refused for subject in networks for row in subject.collapse)


def test_the_result_of_collapse_loads() -> None:
    document = json.loads((DATA / "collapse.json").read_text(encoding="utf-8"))
    record = read(document, CollapseRecord, "collapse.json", "collapse again")
    assert lost(document, record.to_json()) == []
    assert record.sandwich().upper == record.upper
    assert record.printed().printed_conditions == document["printed_conditions"]


def test_the_network_file_loads() -> None:
    network = dg.load_network(DATA / "network.safetensors")
    document = json.loads((DATA / "gauge-network.json").read_text(encoding="utf-8"))
    assert network.describe() == document["subjects"][0]["network"]


@pytest.mark.parametrize("path", GAUGES, ids=lambda path: path.stem)
def test_records_compare_pickle_and_print(path: Path) -> None:
    record = dg.results.load_result(path)
    assert record == dg.results.load_result(path)
    assert pickle.loads(pickle.dumps(record)) == record
    for shown in (record, record.subjects[0], record.settings, record.subjects[0].layers[0]):
        assert len(repr(shown)) < 400
        assert repr(shown).startswith(type(shown).__name__)
        assert shown._repr_html_().startswith("<table>")
    assert record.subjects[0].verdict in repr(record)


def test_tables_of_layers_and_heads() -> None:
    record = dg.results.load_result(DATA / "gauge-decoder.json")
    (subject,) = record.subjects
    layers, heads = record.to_frame("layers"), record.to_frame("heads")
    assert list(layers["layer"]) == [0, 1, 2]
    assert list(layers["block"]) == [layer.what_if["block"].loss for layer in subject.layers]
    assert layers.loc[1, "residual_mean_composite"] == subject.layers[1].residual.mean.composite.ratio
    assert len(heads) == 12
    assert heads.query("layer == 2 and head == 3")["entropy"].item() == subject.layers[2].heads[3].entropy
    network = dg.results.load_result(DATA / "gauge-network.json")
    assert list(network.to_frame("heads")["score_range"])[:2] == [
        head.score_range for head in network.subjects[0].layers[0].heads
    ]
    with pytest.raises(dg.InputError, match="table must be one of layers, heads, got 'rows'"):
        record.to_frame("rows")


def test_hostile_names_are_escaped_in_notebooks() -> None:
    document = json.loads((DATA / "gauge-weights.json").read_text(encoding="utf-8"))
    document["subjects"][0]["name"] = "<script>alert(1)</script>"
    from depthgauge.results.gauge_record import check_result

    assert "<script>" not in check_result(document)._repr_html_()
