"""Alarms fire where their conditions hold, once, with the evidence, and not elsewhere."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import probe_ids, tiny_llama

import depthgauge as dg
from depthgauge.monitor.log_and_alarms import AlarmWarning, Detector
from depthgauge.results.monitor_record import ProbedHeads, ProbedLayer

NAMES = ["rank-collapse", "entropy-collapse", "dead-layer", "score-explosion"]


def layer(
    index: int = 0, *, direction: float | None = 0.8, update: float = 0.3, entropy: float = 1.0, score: Any = (2.0, 3.0)
) -> ProbedLayer:
    heads = ProbedHeads(score_range=score, entropy=(entropy,) * 2, tv_mean=(0.5,) * 2, first_mass=(0.1,) * 2)
    return ProbedLayer(index=index, direction_ratio=direction, update=update, uniform_entropy=2.0, heads=heads)


def alarms(*probes: list[ProbedLayer], **thresholds: Any) -> list[tuple[int, str, int]]:
    detector = Detector(dg.results.AlarmThresholds(**thresholds))
    found = [
        alarm
        for step, layers in enumerate(probes)
        for alarm in detector.feed(dg.results.Probe(step=step, layers=tuple(layers)))
    ]
    assert all(f"at step {alarm.step} in layer {alarm.layer}" in alarm.message for alarm in found)
    return [(alarm.step, alarm.name, alarm.layer) for alarm in found]


def test_healthy_layers_raise_nothing() -> None:
    assert alarms(*[[layer(0), layer(1)] for _ in range(9)]) == []


def test_rank_collapse_is_raised_once_for_the_first_layer_until_it_recovers() -> None:
    fine, low = layer(0), [layer(1, direction=0.01), layer(2, direction=0.001)]
    assert alarms([fine, *low], [fine, *low]) == [(0, "rank-collapse", 1)]
    assert alarms([fine, *low], [fine], [fine, *low]) == [(0, "rank-collapse", 1), (2, "rank-collapse", 1)]
    assert alarms([layer(0, direction=0.06)]) == []
    assert alarms([layer(0, direction=0.06)], rank_ratio=0.1) == [(0, "rank-collapse", 0)]
    assert alarms([layer(0, direction=None)]) == []


def test_a_dead_layer_is_dead_several_times_in_a_row() -> None:
    dead, alive = [layer(0), layer(1, update=1e-4)], [layer(0), layer(1, update=0.1)]
    assert alarms(dead, dead, dead, dead) == [(2, "dead-layer", 1)]
    assert alarms(dead, dead, alive, dead, dead) == []
    assert alarms(dead, dead, dead, alive, dead, dead, dead) == [(2, "dead-layer", 1), (6, "dead-layer", 1)]
    assert alarms(dead, dead_probes=1) == [(0, "dead-layer", 1)]


def test_entropy_collapse_needs_low_entropy_and_grown_scores() -> None:
    start = [layer(score=(2.0, 3.0))]
    assert alarms(start, [layer(entropy=0.1, score=(5.0, 6.5))]) == [(1, "entropy-collapse", 0)]
    assert alarms(start, [layer(entropy=0.1, score=(5.0, 5.5))]) == []  # the scores have grown less than twofold
    assert alarms(start, [layer(entropy=0.3, score=(50.0, 65.0))]) == []  # the entropy is 15 % of uniform
    assert alarms([layer(entropy=0.1)], [layer(entropy=0.1)]) == []  # as it was at the start, as in a trained model


def test_a_score_explosion_is_large_and_has_grown() -> None:
    start = [layer(score=(2.0, 3.0))]
    assert alarms(start, [layer(score=(20.0, 101.0))]) == [(1, "score-explosion", 0)]
    assert alarms(start, [layer(score=(20.0, 99.0))]) == []
    large = [layer(score=(90.0, 99.0))]
    assert alarms(large, [layer(score=(90.0, 200.0))]) == []  # a trained model that had large scores from the start
    assert alarms(start, [layer(score=(None, 3.0))]) == [(1, "score-explosion", 0)]  # not finite
    assert alarms([layer(score=(None, None))], start) == [(0, "score-explosion", 0)]


def test_every_alarm_can_be_switched_off() -> None:
    sick = [layer(direction=0.0, update=0.0, entropy=0.0, score=(500.0, 900.0))]
    probes = [[layer()], sick, sick, sick]
    assert sorted(name for _, name, _ in alarms(*probes)) == sorted(NAMES)
    for name, off in zip(NAMES, ["rank_ratio", "entropy_share", "dead_update", "score_limit"], strict=True):
        assert {found for _, found, _ in alarms(*probes, **{off: None})} == set(NAMES) - {name}


def test_the_message_has_the_evidence_and_the_advice() -> None:
    detector = Detector(dg.results.AlarmThresholds())
    (alarm,) = detector.feed(dg.results.Probe(step=40, layers=(layer(), layer(1, direction=0.012))))
    assert alarm.message == (
        "rank-collapse at step 40 in layer 1: the direction ratio after layer 1 is down to 0.012, below 0.05, so the "
        "tokens are almost equal. Check that the skip connections are in place, and that their branches do not shrink "
        "the stream."
    )
    assert (alarm.value, alarm.threshold) == (0.012, 0.05)


# --- actions ----------------------------------------------------------------------------------------------------------


def dying(log: Path, action: Any) -> dg.Monitor:
    model = tiny_llama(layers=2)
    with torch.no_grad():
        for module in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            module.weight.zero_()
    thresholds = dg.results.AlarmThresholds(dead_probes=1)
    return dg.Monitor(model, probe_ids(), 1, log, action=action, thresholds=thresholds)


def test_a_warning(tmp_path: Path) -> None:
    monitor = dying(tmp_path, "warn")
    with pytest.warns(AlarmWarning, match="dead-layer at step 0 in layer 1"):
        monitor.step(0)
    assert [(alarm.step, alarm.name, alarm.layer) for alarm in monitor.alarms] == [(0, "dead-layer", 1)]
    assert repr(monitor).endswith("2 layers, every 1 step, log='" + str(tmp_path) + "', 1 alarm)")


def test_an_error_after_the_log_is_written(tmp_path: Path) -> None:
    with pytest.raises(dg.results.AlarmError, match="dead-layer at step 0 in layer 1") as caught:
        dying(tmp_path, "raise").step(0)
    assert isinstance(caught.value, dg.DepthgaugeError)
    assert [alarm.name for alarm in caught.value.alarms] == ["dead-layer"]
    assert dg.results.read_log(tmp_path).alarms == caught.value.alarms


def test_a_log_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "depthgauge.monitor"):
        dying(tmp_path, "log").step(0)
    assert [record.getMessage()[:10] for record in caplog.records] == ["dead-layer"]


def test_a_function(tmp_path: Path) -> None:
    seen: list[dg.results.Alarm] = []
    monitor = dying(tmp_path, seen.append)
    monitor.step(0)
    assert seen == monitor.alarms
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"action": "rise"}, "action must be one of log, warn, raise, got 'rise'; did you mean 'raise'"),
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"thresholds": dg.results.AlarmThresholds(rank_ratio=-1.0)}, "rank_ratio must be a positive number, got -1.0"),
        ({"thresholds": dg.results.AlarmThresholds(dead_probes=0)}, "dead_probes must be a whole number of at least 1"),
        ({"options": dg.results.MonitorOptions(tokens=1)}, "tokens must be a whole number of at least 2, got 1"),
        ({"options": dg.results.MonitorOptions(depth=0.1)}, "depth is measured together with the what-ifs"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(dg.InputError, match=words):
        dg.Monitor(tiny_llama(layers=1), probe_ids(), **({"log": tmp_path} | settings))
    assert list(tmp_path.iterdir()) == []
