"""Damaged checkpoints are refused in one sentence, or measured: no other exception, no NaN, no hang."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from damaged_checkpoints import FAMILIES, DamageWorker, save_originals

import depthgauge as dg
from depthgauge.checkpoints.source.library import CheckpointError, attempt

SECONDS = 90
"""A case that takes longer is taken for one that never ends."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    save_originals(folder)
    return folder


@pytest.fixture
def worker(originals: Path) -> Iterator[DamageWorker]:
    made = DamageWorker(originals, SECONDS)
    yield made
    made.close()


def check(worker: DamageWorker, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        done, found = worker.outcome(seed)
        kind, _, sentence = found.partition(": ")
        assert kind in ("result", "refused"), f"{done}: {found}"
        assert "\n" not in sentence, f"{done}: {found}"
        assert len(sentence) < 800, f"{done}: {found}"
        seen[kind] += 1
    return seen


def test_damaged_checkpoints(worker: DamageWorker) -> None:
    seen = check(worker, range(40))
    assert min(seen["result"], seen["refused"]) > 3


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_soak_damaged_checkpoints(part: int, worker: DamageWorker) -> None:
    check(worker, range(1000 * (part + 1), 1000 * (part + 1) + 250))


@pytest.fixture
def model(originals: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for path in (originals / "llama").iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "model"


def gauge_with(model: Path, originals: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    dg.gauge(model, text=originals / "text.txt", tokens=32, window=16, what_if="none")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "the output of model is NaN"),
        ({"num_hidden_layers": 10**12}, "is 1,000,000,000,000, and no model has more than 10,000"),
        ({"num_hidden_layers": 3000}, "describes 3,000 layers: its files have 30 tensors"),
        ({"vocab_size": 10**12}, r"is too large: [0-9,]+ parameters need"),
        ({"architectures": [1]}, "must be a list with the name of a class, got [1]; correct it"),
        ({"architectures": ["BertModel"]}, "contradicts itself: the model_type is 'llama'"),
        ({"hidden_act": "no such function"}, "of .*: KeyError: .*no such function.*; correct its configuration"),
        ({"head_dim": 3}, "contradicts its config.json|cannot compute the output"),
    ],
)
def test_a_damaged_configuration_is_named(changes: dict[str, Any], sentence: str, model: Path, originals: Path) -> None:
    with pytest.raises(CheckpointError, match=sentence.replace("[1]", r"\[1\]")):
        gauge_with(model, originals, **changes)


def test_intact_checkpoints_are_gauged(originals: Path) -> None:
    for name in FAMILIES:
        dg.gauge(originals / name, text=originals / "text.txt", tokens=32, window=16, what_if="none")


def test_mistakes_of_depthgauge_stay_visible(model: Path, originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthgauge.workflows.gauge_checkpoint.measure_windows", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gauge_with(model, originals)


def test_the_cause_is_a_sentence() -> None:
    with pytest.raises(CheckpointError, match="the weights of it: KeyError: '12'; correct its configuration"):
        attempt("it", "weights", lambda: {}["12"])
