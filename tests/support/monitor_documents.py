"""A log of a monitor with made-up numbers, in which every kind of alarm occurs."""

import json
from pathlib import Path
from typing import Any

import depthgauge as dg
from depthgauge.monitor.log_and_alarms import Detector
from depthgauge.results.monitor_record import (
    MonitoredModel,
    MonitorRun,
    MonitorSettings,
    Probe,
    ProbedHeads,
    ProbedLayer,
)

LAYERS, HEADS = 3, 2


def layer(index: int, step: int) -> ProbedLayer:
    """Layer 0 gets sharp with growing scores, layer 1 dies, and the states after layer 2 collapse."""
    time = step / 100
    return ProbedLayer(
        index=index,
        residual_ratio=0.9 - 0.1 * index,
        direction_ratio=0.8 if index < 2 else 0.8 * 10 ** (-2 * time),
        update=0.3 if index != 1 else 0.3 * 10 ** (-4 * time),
        attention_update=0.2,
        mlp_update=0.1 + 0.01 * step,
        block_influence=0.05 * (index + 1),
        eta=0.5 + time,
        qk_norm=2.0 + time,
        ov_norm=1.0 + time,
        uniform_entropy=3.0,
        skip_loss=0.1 * (index + 1) if step % 20 == 0 else None,
        heads=ProbedHeads(
            score_range=tuple((1.0 if index else 10 ** (3 * time)) + h for h in range(HEADS)),
            entropy=((2.5 if index else max(0.01, 2.5 - 3 * time)),) * HEADS,
            tv_mean=(0.2, 0.4),
            first_mass=(0.1, 0.9),
        ),
    )


def probes(count: int = 11, every: int = 10) -> list[Probe]:
    """Return one probe every few steps."""
    return [
        Probe(
            step=every * k,
            loss=3.0 - 0.2 * k,
            probe_loss=3.1 - 0.2 * k,
            depth=max(1, 3 - k // 5) if k % 2 == 0 else None,
            seconds=0.01,
            layers=tuple(layer(index, 10 * k) for index in range(LAYERS)),
        )
        for k in range(count)
    ]


def write_log(
    folder: Path, name: str = "llama", count: int = 11, every: int = 10, objective: str = "loss", **run: Any
) -> Path:
    """Write a log directory and return it."""
    folder.mkdir(parents=True)
    model = MonitoredModel(
        name=name, architecture="LlamaForCausalLM", objective=objective, layers=LAYERS, heads=(HEADS,) * LAYERS,
        parameters=12345, dtype="float32", device="cpu", sequences=2, tokens=32,
    )  # fmt: skip
    options = dg.results.MonitorOptions(what_if_every=2, depth=0.1)
    settings = MonitorSettings(every=every, options=options, thresholds=dg.results.AlarmThresholds())
    head = MonitorRun(version="0", model=model, settings=settings, **run)
    (folder / "run.json").write_text(head.dump(), encoding="utf-8")
    detector, lines, raised = Detector(dg.results.AlarmThresholds()), [], []
    for probe in probes(count, every):
        lines.append(json.dumps(probe.to_json()) + "\n")
        raised += [json.dumps(alarm.to_json()) + "\n" for alarm in detector.feed(probe)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "alarms.jsonl").write_text("".join(raised), encoding="utf-8")
    return folder
