"""How much memory is free."""

import os
from pathlib import Path

import torch


def free_memory(device: torch.device | None = None) -> int:
    """Return the free memory of a GPU, or else this process's share of that of the system or its control group."""
    if device is not None and device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        pages = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        limit = used = "max"
    free = pages if limit == "max" else min(pages, max(0, int(limit) - int(used)))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the processes that torchrun has started here
