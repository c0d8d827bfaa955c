"""Arguments of a wrong type: every public function raises an error of depthgauge that names the argument."""

import inspect
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import depthgauge as dg
from depthgauge.base.errors import InputError, require_path, require_type
from depthgauge.base.journal import journal_folder
from depthgauge.surgery.write_model import check_output_directory

pytestmark = pytest.mark.wrong_types
NETWORK = dg.random_network(layers=2, heads=1, dim=4, eta=0.01)
TENSOR = torch.zeros(1, 1, 4, 4)
REST: dict[str, dict[str, Any]] = {
    "attention": {"k": TENSOR, "v": TENSOR},
    "attention_plan": {"k": TENSOR, "v": TENSOR},
    "certify": {"surrogate": NETWORK, "radius": 1.0},
    "papers.claims": {},
    "collapse": {},
    "effective_depth": {"tolerance": 0.1, "radius": 1.0},
    "evaluate": {},
    "gauge": {},
    "load_network": {},
    "results.load_result": {},
    "measure": {"x": torch.zeros(3, 4, dtype=torch.float64)},
    "papers.output_bound": {},
    "plan_shrink": {"remove": 1},
    "random_network": {"heads": 1, "dim": 4, "eta": 0.1},
    "results.read_log": {},
    "register_attention": {},
    "save_network": {"path": "network.safetensors"},
    "papers.separate": {},
    "recover": {"teacher": "model"},
    "shrink": {"remove": 1},
    "sweep": {},
    "results.sweep_status": {},
    "papers.train_bounded": {"layers": 1, "heads": 1, "dim": 4, "eta": 0.1},
    "results.write_report": {"out": "page.html"},
}
"""Public function → arguments after the first one."""
SPACES = ("papers", "results")
WRONG = (None, object(), b"bytes", [3], (), {"key": 1}, 2.5, int, torch.zeros(2))
ACCEPTED = {("gauge", "None"), ("papers.claims", "None"), ("register_attention", "2.5")}
"""Values of `WRONG` that are right."""


def functions() -> set[str]:
    dotted = [*dg.__all__, *(f"{space}.{name}" for space in SPACES for name in getattr(dg, space).__all__)]
    return {name for name in dotted if inspect.isfunction(attrgetter(name)(dg))}


def test_every_public_function_is_listed() -> None:
    assert set(REST) == functions()


@pytest.mark.parametrize("name", sorted(REST))
def test_a_first_argument_of_a_wrong_type_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function = attrgetter(name)(dg)
    first = next(iter(inspect.signature(function).parameters))
    for value in WRONG:
        if (name, str(value)) in ACCEPTED:
            continue
        with pytest.raises(InputError) as caught:
            function(value, **REST[name])
        assert first in str(caught.value) or "grid" in str(caught.value), caught.value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "record"),
    [
        (lambda options: dg.gauge(NETWORK, options), "GaugeOptions"),
        (lambda options: dg.shrink("model", options), "ShrinkOptions"),
        (lambda options: dg.plan_shrink("model", options), "ShrinkOptions"),
        (lambda options: dg.papers.train_bounded("majority", 1, 1, 4, 0.1, options=options), "TrainingOptions"),
    ],
    ids=["gauge", "shrink", "plan_shrink", "train_bounded"],
)
def test_options_are_records(call: Callable[[Any], Any], record: str) -> None:
    for wrong in ({}, {"tokens": 4}, "tokens", [], 3, dg.results.MonitorOptions()):
        with pytest.raises(InputError, match=rf"options must be {record} or None, got {type(wrong).__name__}.*by name"):
            call(wrong)


@pytest.mark.parametrize(
    ("keyword", "value"), [("attn_mask", [1.0]), ("key_padding", "yes"), ("plan", {"path": "exact"})]
)
def test_other_arguments_of_attention_are_named(keyword: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{keyword} must be .*, got {type(value).__name__}"):
        dg.attention(TENSOR, TENSOR, TENSOR, **{keyword: value})


def test_outputs_must_be_paths(tmp_path: Path) -> None:
    result = dg.gauge(NETWORK, samples=1, tokens=4)
    calls: list[Callable[[Any], Any]] = [
        result.save,
        lambda out: dg.results.write_report(result, out),
        lambda out: dg.save_network(NETWORK, out),
        lambda out: dg.sweep({"task": "separation", "parameters": {"kind": ["self"]}, "repetitions": 1}, out),
        journal_folder,
        lambda out: check_output_directory(out, None, overwrite=False),
    ]
    for call in calls:
        for wrong in (3, b"out", [tmp_path]):
            with pytest.raises(InputError, match="must be the path of a file or directory, as a string or a Path, got"):
                call(wrong)


def test_an_error_shows_the_type_and_a_short_value() -> None:
    with pytest.raises(InputError, match=r"^x must be a list, got None$"):
        require_type("x", None, list, "a list")
    with pytest.raises(InputError, match=r"^x must be a string, got list \[0, 1, 2, 3, 4, 5, \.\.\.\]; give one$"):
        require_type("x", list(range(1000)), str, "a string", "give one")
    assert require_path("x", "a/b") == Path("a/b")
