"""Two processes train a tiny Llama together with DDP, then with FSDP2, with and without a monitor.

    python distributed_training.py FOLDER RANK

Writes the losses, and what the monitor of this process saw, to FOLDER/RANK.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_training import batches, tiny_llama, with_scaled_residuals
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import depthgauge as dg

STEPS = 3


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(kind: str, rank: int, log: Path | None, action: Any = "log", early: bool = False) -> dict[str, Any]:
    """Train, and return the losses, the weights and the records; an `early` probe comes before the backward pass."""
    model = with_scaled_residuals(tiny_llama(0, layers=3, attention_dropout=0.1), 0.02)
    trained = DistributedDataParallel(model) if kind == "ddp" else sharded(model)
    monitor = None
    if log is not None:
        probe = next(batches(50 + rank, batch=1))  # a different one in each process
        options = dg.MonitorOptions(what_if_every=2, depth=0.1, tensorboard=False)
        thresholds = dg.AlarmThresholds(dead_probes=1)
        monitor = dg.Monitor(trained, probe, 1, log, action=action, options=options, thresholds=thresholds)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    data, losses, probes = batches(rank), [], []
    torch.manual_seed(rank)
    for step in range(STEPS):
        ids = next(data)
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
        "alarms": [] if monitor is None else [alarm.to_json() for alarm in monitor.alarms],
    }


def main(folder: Path, rank: int) -> None:
    """Run everything and write the result of this process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found = {}
    for kind in ("ddp", "fsdp"):
        found[kind] = {"plain": run(kind, rank, None), "monitored": run(kind, rank, folder / kind)}
    found["early"] = run("fsdp", rank, folder / "early", early=True)
    try:
        run("ddp", rank, folder / "raised", "raise")
    except dg.AlarmError as error:
        found["raised"] = {"message": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
