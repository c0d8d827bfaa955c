"""`gauge` on networks, from the target to the result."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import depthgauge as dg
from depthgauge.base.errors import InputError, InputFileError, NetworkFileError, OutputError
from depthgauge.base.format import number
from depthgauge.results.gauge_record import SCHEMA, GaugeSettings
from depthgauge.theory.network.random_networks import uniform_inputs
from depthgauge.workflows import gauge_network as module
from depthgauge.workflows import target as targets
from depthgauge.workflows.collapse import collapse_file
from depthgauge.workflows.gauge import gauge, load_result
from depthgauge.workflows.target import LARGE_ETA, SMALL_ETA, built_in_pair

SMALL = {"samples": 2, "tokens": 5}


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs and attacks are tested elsewhere; keep them short here."""
    monkeypatch.setattr(module, "ATTACK", {"starts": 1, "steps": 1})
    monkeypatch.setattr(module, "TOLERANCES", (1e-1,))


def untimed(value: Any) -> Any:
    """Return a document without its durations."""
    if isinstance(value, dict):
        return {key: untimed(inner) for key, inner in value.items() if key not in ("seconds", "attack_seconds")}
    return [untimed(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture
def network() -> dg.SelfAttentionNetwork:
    """A network with LayerNorm, for which no certificates are computed."""
    return dg.random_network(layers=2, heads=3, dim=4, eta=0.3, norm="pre", seed=1)


@pytest.fixture
def network_file(tmp_path: Path, network: dg.SelfAttentionNetwork) -> Path:
    dg.save_network(network, tmp_path / "n.safetensors")
    return tmp_path / "n.safetensors"


def test_a_network_and_its_file_give_the_same_result(network: dg.SelfAttentionNetwork, network_file: Path) -> None:
    from_object, from_file = gauge(network, **SMALL).to_json(), gauge(network_file, **SMALL).to_json()
    asked = [(found["settings"]["target"], found["settings"]["in_memory"]) for found in (from_object, from_file)]
    assert asked == [(network.name, True), (str(network_file), False)]
    assert untimed(from_object["subjects"]) == untimed(from_file["subjects"])


def test_the_result_is_the_measure_of_the_inputs_it_says(network: dg.SelfAttentionNetwork) -> None:
    result = gauge(network, samples=3, tokens=6, radius=0.5, seed=7)
    assert result.settings == GaugeSettings(
        target=network.name, samples=3, tokens=6, radius=0.5, seed=7, in_memory=True
    )
    x = uniform_inputs(3, 6, 4, radius=0.5, seed=7)
    expected = dg.measure(network, x)
    assert result.subjects[0].layers == expected.layer_records()
    assert result.subjects[0].input == expected.input_record()


def test_the_settings_reproduce_the_result(network: dg.SelfAttentionNetwork) -> None:
    first = gauge(network, **SMALL, seed=3)
    assert untimed(gauge(network, **first.settings.given()).to_json()) == untimed(first.to_json())
    assert gauge(network, **SMALL, seed=4).subjects[0].layers != first.subjects[0].layers


def test_inputs_from_a_file(network: dg.SelfAttentionNetwork, tmp_path: Path) -> None:
    x = uniform_inputs(2, 5, 4, seed=9)
    save_file({"x": x}, tmp_path / "x.safetensors")
    result = gauge(network, input=tmp_path / "x.safetensors")
    assert result.settings == GaugeSettings(target=network.name, input=str(tmp_path / "x.safetensors"), in_memory=True)
    drawn = gauge(network, samples=2, tokens=5, seed=9)
    assert result.subjects[0].layers == drawn.subjects[0].layers
    assert result.subjects[0].radius == x.abs().max().item()
    with pytest.raises(InputError, match="--seed describes random inputs and --input reads them from a file"):
        gauge(network, input=tmp_path / "x.safetensors", seed=0)
    with pytest.raises(InputFileError, match="cannot read inputs"):
        gauge(network, input=tmp_path / "nothing")


def test_float32_networks_are_gauged_in_float32(network: dg.SelfAttentionNetwork) -> None:
    narrow = gauge(network.copy().to(torch.float32), **SMALL).to_json()["subjects"][0]
    wide = gauge(network, **SMALL).to_json()["subjects"][0]
    assert narrow["network"]["dtype"] == "float32"
    a, b = (s["layers"][1]["heads"][0]["score_range"] for s in (narrow, wide))
    assert a == pytest.approx(b, rel=1e-4)
    assert a != b


@pytest.mark.parametrize(
    "bad", [{"samples": 0}, {"tokens": -1}, {"radius": 0.0}, {"radius": float("inf")}, {"seed": -1}], ids=str
)
def test_bad_settings_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(bad))} must be"):
        gauge(dg.random_network(1, 1, 2, 0.1), **bad)  # type: ignore[arg-type]


def test_a_target_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError, match="No such file"):
        gauge(tmp_path / "missing.safetensors")
    for options in ({}, {"text": "corpus.txt"}, {"radius": 1.0}):  # it may be meant as a file or as a directory
        with pytest.raises(InputError, match=r"cannot read .*/missing: no such file or directory"):
            gauge(tmp_path / "missing", **options)


def test_the_built_in_pair_is_one_network_at_two_sizes() -> None:
    small, large = built_in_pair()
    assert len(small) == len(large) == 12
    assert SMALL_ETA * 0.999 < small.eta <= SMALL_ETA
    assert LARGE_ETA * 0.999 < large.eta <= LARGE_ETA
    for a, b in zip(small, large, strict=True):
        assert torch.allclose(a.query / small.eta, b.query / large.eta, rtol=1e-12)
        assert torch.allclose(a.value / small.eta, b.value / large.eta, rtol=1e-12)

    x = uniform_inputs(1, 16, small.dim)
    tv = [torch.stack([layer.tv_mean for layer in dg.measure(net, x).heads]) for net in (small, large)]
    assert tv[0].max() < 1e-4  # one averages,
    assert tv[1].min() > 1e-2  # the other picks


def test_with_no_target_the_pair_is_gauged(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tuple(dg.random_network(2, 1, 3, eta, norm="pre", seed=0) for eta in (0.002, 0.2))
    monkeypatch.setattr(targets, "built_in_pair", lambda: pair)
    result = gauge(**SMALL)
    assert result.settings.target is None
    assert not result.settings.in_memory
    assert [subject.network.to_json() for subject in result.subjects] == [network.describe() for network in pair]


def test_the_document_is_json_and_complete(network: dg.SelfAttentionNetwork, tmp_path: Path) -> None:
    result = gauge(network, **SMALL)
    document = result.to_json()
    assert {"schema", "version", "settings", "subjects"} <= set(document)
    assert document["schema"] == SCHEMA == "depthgauge.gauge/1"
    assert document["version"] == dg.__version__
    (subject,) = document["subjects"]
    assert {"kind", "name", "network", "input", "layers"} <= set(subject)
    assert subject["kind"] == "network"
    assert subject["network"] == network.describe()
    result.save(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8")) == document
    assert load_result(tmp_path / "result.json") == result
    with pytest.raises(OutputError, match="is a directory"):
        result.save(tmp_path)


def test_one_token_gives_nulls_and_still_a_document(network: dg.SelfAttentionNetwork, tmp_path: Path) -> None:
    result = gauge(network, tokens=1, samples=1)
    assert result.to_json()["subjects"][0]["layers"][0]["heads"][0]["contraction"] is None
    result.save(tmp_path / "r.json")
    assert "NaN" not in (tmp_path / "r.json").read_text()


def test_progress_is_reported_per_layer(network: dg.SelfAttentionNetwork) -> None:
    steps: list[tuple[int, int]] = []
    gauge(network, **SMALL, progress=lambda done, total, label: steps.append((done, total)))
    assert steps[:3] == [(0, 2), (1, 2), (2, 2)]
    assert all(0 <= done <= total for done, total in steps)


def test_gauge_and_collapse_report_the_same_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTACK", {})
    monkeypatch.setattr(module, "TOLERANCES", (0.1,))
    network = dg.random_network(layers=2, heads=1, dim=2, eta=0.2, seed=2)
    dg.save_network(network, tmp_path / "n.safetensors")
    (subject,) = gauge(network, **SMALL).to_json()["subjects"]
    for row in subject["collapse"]:
        record = collapse_file(tmp_path / "n.safetensors", row["method"], radius=subject["radius"]).record
        assert (record.lower, record.upper) == (row["lower"], row["upper"])


def test_the_sandwich_is_one() -> None:
    """Whatever else the document says, what was attained is never above what was proved."""
    network = dg.random_network(layers=2, heads=1, dim=2, eta=0.03, seed=1)
    (subject,) = gauge(network, **SMALL).to_json()["subjects"]
    proved = [row for row in subject["collapse"] if row.get("upper") is not None]
    assert len(proved) >= 4
    assert all(0 <= row["lower"] <= row["upper"] for row in proved)
    assert [row["tolerance"] for row in subject["depth"]] == [0.1, 0.1]
    assert "1 is enough" in subject["verdict"]


def test_the_verdict_says_its_numbers_as_the_tables_do() -> None:
    network = dg.random_network(layers=2, heads=1, dim=2, eta=0.001, seed=1)
    (subject,) = gauge(network, **SMALL, radius=1e-5).to_json()["subjects"]
    error = min(depth["error"] for depth in subject["depth"] if depth["certified"])
    assert error < 1e-4  # so that it needs an exponent
    assert (
        subject["verdict"]
        == f"2 layers; 1 is enough within {number(error)} for every input up to 1e-5 (proved, corrected)"
    )
    assert not re.search(r"e[+-]?0", subject["verdict"])
