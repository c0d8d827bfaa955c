"""A probe that fails, or a log that cannot be written, does not end the training; wrong arguments are refused."""

import errno
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tokens
from tiny_training import batches, probe_ids, tiny_llama
from torch import nn

import depthgauge as dg


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the messages of the logger of the monitor so far."""
    caplog.set_level(logging.WARNING, "depthgauge.monitor")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "depthgauge.monitor"]


class Failing:
    """A hook of the user that raises in probes (the model is in evaluation mode) while `error` is set."""

    def __init__(self, module: nn.Module) -> None:
        self.error: Exception | None = None
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.error is not None and not module.training:
            raise self.error


def run(log: Path | None, errors: dict[int, Exception]) -> tuple[list[float], torch.Tensor, list[Any]]:
    """Train with dropout; a probe at a step of `errors` fails. Return losses, a random number, and the probes."""
    model = tiny_llama(3, layers=2, attention_dropout=0.2)
    failing = Failing(model.model.layers[1].mlp)
    monitor = None if log is None else dg.Monitor(model, probe_ids(), 1, log, action="log")
    optimizer, data, losses, probes = torch.optim.AdamW(model.parameters(), lr=1e-2), batches(1), [], []
    torch.manual_seed(7)
    for step in range(5):
        ids = next(data)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if monitor is not None:
            failing.error = errors.get(step)
            probes.append(monitor.step(step, loss))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, torch.rand(2), probes


def test_a_failing_probe_does_not_affect_the_training(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    errors: dict[int, Exception] = {
        0: RuntimeError("a hook of mine"),
        1: torch.OutOfMemoryError("Tried to allocate 2.50 GiB at 0x7ffe"),
        2: torch.OutOfMemoryError("Tried to allocate 12 GiB at 0xab01"),
        4: RuntimeError("a hook of mine"),
    }
    losses, draw, probes = run(tmp_path, errors)
    plain, same, _ = run(None, {})
    assert losses == plain
    assert torch.equal(draw, same)
    assert [probe is None for probe in probes] == [True, True, True, False, True]
    record = dg.results.read_log(tmp_path)
    assert [probe.step for probe in record.probes] == [3]
    assert record.probes[0].layers[0].heads is not None
    after = "The training goes on, and the next probe tries again. This cause is not reported again."
    assert warned() == [
        f"nothing was measured at step 0: RuntimeError: a hook of mine. {after}",
        f"nothing was measured at step 1: OutOfMemoryError: Tried to allocate 2.50 GiB at 0x7ffe. {after}",
    ]
    assert record.run.notes == (
        "nothing was measured at step 0: RuntimeError: a hook of mine",
        "nothing was measured at step 1: OutOfMemoryError: Tried to allocate 2.50 GiB at 0x7ffe",
    )


def test_a_failing_probe_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny_llama(layers=2)
    before = model.config._attn_implementation, [sorted(vars(module)) for module in model.modules()]
    monitor = dg.Monitor(model, probe_ids(), 1, tmp_path)
    failing = Failing(model.model.layers[0].self_attn)
    failing.error = ValueError("x")
    assert monitor.step(0) is None
    assert model.training
    assert torch.is_grad_enabled()
    assert (model.config._attn_implementation, [sorted(vars(module)) for module in model.modules()]) == before


def test_what_ifs_that_fail_are_not_tried_in_every_probe(tmp_path: Path) -> None:
    options = dg.results.MonitorOptions(what_if_every=3)
    model = tiny_llama(layers=2)
    monitor = dg.Monitor(model, probe_ids(), 1, tmp_path, action="log", options=options)
    calls = []

    def fails_later(module: Any, args: Any, out: Any) -> None:
        calls.append(0)
        if len(calls) == 4:  # two passes check the model, one measures it, and the next one skips block 0
            raise torch.OutOfMemoryError("what-ifs")

    model.model.layers[1].register_forward_hook(fails_later)
    assert monitor.step(0) is None
    probe = monitor.step(1)
    assert probe is not None
    assert probe.layers[0].skip_loss is None


def test_a_probe_that_is_longer_than_the_positions_names_the_embedding(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    model = tiny_model("gpt2")
    assert dg.Monitor(model, tokens(65), 1, tmp_path).step(0) is None
    assert "IndexError: transformer.wpe has 64 rows, and the probe needs row 64." in warned()[0]
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_an_alarm_is_raised_after_a_failure(tmp_path: Path) -> None:
    model = tiny_llama(layers=2)
    thresholds = dg.results.AlarmThresholds(dead_update=100.0, dead_probes=1)
    monitor = dg.Monitor(model, probe_ids(), 1, tmp_path, action="raise", thresholds=thresholds)
    failing = Failing(model.model.layers[0])
    failing.error = ValueError("x")
    assert monitor.step(0) is None
    failing.error = None
    with pytest.raises(dg.results.AlarmError, match="dead-layer at step 1 in layer 0"):
        monitor.step(1)


# --- logs that cannot be written --------------------------------------------------------------------------------------


def test_a_full_disk_does_not_end_the_training_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    thresholds = dg.results.AlarmThresholds(dead_update=100.0, dead_probes=1)
    monitor = dg.Monitor(tiny_llama(layers=2), probe_ids(), 1, tmp_path, action="log", thresholds=thresholds)
    write = os.write

    def full(handle: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data[: len(data) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for step in range(2):
            probe = monitor.step(step)
            assert probe is not None
            assert probe.step == step
    assert [alarm.layer for alarm in monitor.alarms] == [0, 1]  # the alarms of step 0 are known all the same
    assert warned()[0].startswith(
        f"the probe at step 0 was not logged: OutputError: cannot write {tmp_path}/alarms.jsonl: No space left on"
    )
    assert len([text for text in warned() if "not logged" in text]) == 2  # alarms.jsonl, then metrics.jsonl
    monitor.step(2)
    assert [probe.step for probe in dg.results.read_log(tmp_path).probes] == [2]


def test_tensorboard_that_fails_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    class Writer:
        def __init__(self, log_dir: str) -> None: ...

        def __getattr__(self, name: str) -> Any:
            raise OSError(errno.ENOSPC, f"{name} has no space")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with dg.Monitor(tiny_llama(layers=2), probe_ids(), 1, tmp_path) as monitor:
        assert monitor.step(0) is not None
        assert monitor.step(1) is not None
    assert [probe.step for probe in dg.results.read_log(tmp_path).probes] == [0, 1]
    assert [text.split(": ")[0] for text in warned()] == [
        "the probe at step 0 was not logged",
        "a log was not closed",
    ]


# --- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        ("x", r"'x' of type str"),
        ("1.5", r"'1.5' of type str"),
        ([1.0], r"\[1.0\] of type list"),
        ({"loss": 1.0}, r"\{'loss': 1.0\} of type dict"),
        (True, "True of type bool"),
        (1 + 2j, r"\(1\+2j\) of type complex"),
        (np.array([1.0, 2.0]), r"array\(\[1., 2.\]\) of type ndarray"),
        (torch.tensor([]), r"a tensor of torch.float32 with shape \[0\]"),
        (torch.tensor(1j), r"a tensor of torch.complex64 with shape \[\]"),
        (torch.tensor(True), r"a tensor of torch.bool with shape \[\]"),
    ],
)
@pytest.mark.wrong_types
@pytest.mark.parametrize("step", [0, 1])
def test_a_loss_that_is_no_number_is_refused(tmp_path: Path, loss: Any, shown: str, step: int) -> None:
    monitor = dg.Monitor(tiny_llama(layers=1), probe_ids(), 2, tmp_path)
    with pytest.raises(
        dg.InputError, match=f"loss must be a number or a tensor of numbers, got {shown}; give the loss"
    ):
        monitor.step(step, loss)  # in a step that is measured, and in one that is not


@pytest.mark.parametrize(
    ("loss", "logged"),
    [(1, 1.0), (np.float32(2.5), 2.5), (torch.tensor([1, 2]), 1.5), (torch.tensor([2.0]), 2.0), (float("nan"), None)],
)
@pytest.mark.wrong_types
def test_losses_of_other_types_are_logged(tmp_path: Path, loss: Any, logged: float | None) -> None:
    probe = dg.Monitor(tiny_llama(layers=1), probe_ids(), 1, tmp_path).step(np.int64(3), loss)  # type: ignore[arg-type]
    assert probe is not None
    assert (probe.step, probe.loss) == (3, logged)
    assert dg.results.read_log(tmp_path).probes == (probe,)


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, torch.tensor(2)])
@pytest.mark.wrong_types
def test_a_step_that_is_no_number_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(dg.InputError, match="step must be a whole number of at least 0, got"):
        dg.Monitor(tiny_llama(layers=1), probe_ids(), 1, tmp_path).step(step)
