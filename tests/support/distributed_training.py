"""Two processes train a tiny Llama together with DDP, then with FSDP2, with and without a monitor.

    python distributed_training.py FOLDER

in each of them, as torchrun would start it. Writes the losses, and what the monitor of this process saw, to
FOLDER/RANK.json.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_training import batches, tiny_llama, with_scaled_residuals
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import depthgauge as dg
from depthgauge.monitor import undisturbed

STEPS = 3
Fails = Callable[[int, int], bool]
"""Whether a probe fails in this process, by the step and the number of the forward pass in the probe, from 0."""


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Failing:
    """A hook that fails in the probes that `fails` selects."""

    def __init__(self, module: Any, fails: Fails) -> None:
        self.fails, self.step, self.passes = fails, 0, 0
        module.register_forward_hook(self)

    def __call__(self, module: Any, args: Any, out: Any) -> None:
        if not module.training:
            self.passes += 1
            if self.fails(self.step, self.passes - 1):
                raise torch.OutOfMemoryError(f"no memory at step {self.step}")


def never(step: int, passes: int) -> bool:
    return False


def run(
    kind: str, rank: int, log: Path | None, action: Any = "log", early: bool = False, fails: Fails = never,
    tensorboard: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train, and return the losses, the weights and the records; an `early` probe comes before the backward pass."""
    model = with_scaled_residuals(tiny_llama(0, layers=3, attention_dropout=0.1), 0.02)
    failing = Failing(model.model.layers[1].mlp, fails)
    trained = DistributedDataParallel(model) if kind == "ddp" else sharded(model)
    monitor = None
    if log is not None:
        probe = next(batches(50 + rank, batch=1))  # a different one in each process
        options = dg.results.MonitorOptions(what_if_every=2, depth=0.1, tensorboard=tensorboard)
        thresholds = dg.results.AlarmThresholds(dead_probes=1)
        monitor = dg.Monitor(trained, probe, 1, log, action=action, options=options, thresholds=thresholds)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    data, losses, probes = batches(rank), [], []
    torch.manual_seed(rank)
    for step in range(STEPS):
        ids = next(data)
        failing.step, failing.passes = step, 0
        loss = trained(input_ids=ids, labels=ids).loss
        if monitor is not None and early:
            probes.append(monitor.step(step, loss))
        loss.backward()
        if monitor is not None and not early:
            probes.append(monitor.step(step, loss))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained.parameters()]
    return {
        "losses": losses,
        "weights": [float(weight.detach().double().sum()) for weight in weights],
        "probes": [probe.to_json() | {"seconds": 0} for probe in probes if probe is not None],
        "notes": [] if monitor is None else list(monitor.notes),
        "alarms": [] if monitor is None else [alarm.to_json() for alarm in monitor.alarms],
    }


def raised(kind: str, rank: int, log: Path, **settings: Any) -> str:
    """Train until an error of depthgauge is raised, and return it."""
    try:
        run(kind, rank, log, **settings)
    except dg.DepthgaugeError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(folder: Path, rank: int) -> None:
    """Run everything and write the result of this process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found = {}
    for kind in ("ddp", "fsdp"):
        found[kind] = {"plain": run(kind, rank, None), "monitored": run(kind, rank, folder / kind)}
    found["early"] = run("fsdp", rank, folder / "early", early=True)
    found["raised"] = raised("ddp", rank, folder / "raised", action="raise")
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]  # as if it were not installed
    found["missing"] = raised("ddp", rank, folder / "missing", tensorboard=True)
    # In process 1 alone, step 0 fails in the first pass, and step 2 while blocks are skipped.
    fails: Fails = lambda step, passes: rank == 1 and (step, passes) in ((0, 0), (2, 1))  # noqa: E731
    found["one fails"] = run("ddp", rank, folder / "one", fails=fails)
    found["all fail"] = run("fsdp", rank, folder / "all", fails=lambda step, passes: step == 1)
    undisturbed.PATIENCE = timedelta(seconds=2)
    found["waiting"] = raised("fsdp", rank, folder / "waiting", fails=lambda step, passes: rank == 1)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
