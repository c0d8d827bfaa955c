"""The callback in transformers' Trainer: same losses, a log, resumed with the trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import batches, probe_ids, tiny_llama

import depthgauge as dg


def train(folder: Path, callback: Any = None, steps: int = 6, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, logging_steps=1, save_steps=3,
        report_to=[], use_cpu=True, disable_tqdm=True, seed=5, learning_rate=1e-3, **settings,
    )  # fmt: skip
    ids = next(batches(0, batch=24))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(
        model=tiny_llama(1, layers=2, attention_dropout=0.1), args=arguments, train_dataset=data,
        callbacks=[callback] if callback else [],
    )  # fmt: skip
    resume = any(folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resume or None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}])
def test_the_trainer_gives_the_same_losses(tmp_path: Path, settings: dict[str, Any], capsys: Any) -> None:
    plain = train(tmp_path / "a", **settings)
    callback = dg.MonitorCallback(probe_ids(), every=2, action="log")
    assert callback.alarms == []
    assert train(tmp_path / "b", callback, **settings) == plain
    record = dg.results.read_log(tmp_path / "b" / "monitor")
    assert [probe.step for probe in record.probes] == [0, 2, 4, 6]
    assert [probe.loss for probe in record.probes] == [None, *(pytest.approx(plain[k]) for k in (0, 2, 4))]
    assert callback.alarms == []
    assert callback.monitor is not None


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_trainer_continues_the_log(tmp_path: Path, capsys: Any) -> None:
    train(tmp_path, dg.MonitorCallback(probe_ids(), every=3, log=tmp_path / "log", action="log"), steps=3)
    train(tmp_path, dg.MonitorCallback(probe_ids(), every=3, log=tmp_path / "log", action="log"), steps=6)
    record = dg.results.read_log(tmp_path / "log")
    assert [(probe.step, probe.segment) for probe in record.probes] == [(0, 0), (3, 1), (6, 1)]


def test_a_callback_ignores_other_events_and_refuses_wrong_settings() -> None:
    callback = dg.MonitorCallback(torch.zeros(1, 4, dtype=torch.long))
    assert callback.on_epoch_begin(None, None, None) is None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        callback.nothing  # noqa: B018
    with pytest.raises(dg.InputError, match="action must be one of log, warn, raise"):
        dg.MonitorCallback(None, action="stop")
