"""A command that torchrun has started in several processes: process 0 runs it, and the others help it to train.

A thread of each process watches the others. It ends its process if another one has shown no sign of life for a while,
and at a signal, which torchrun sends when a process has died: a process that waits for others in torch does not notice
either.
"""

import os
import select
import signal
import sys
import threading
import time
from datetime import timedelta
from importlib import import_module
from typing import Any, NoReturn

import typer

from depthgauge.base.errors import EndedRunError, InputError
from depthgauge.base.format import counted

PATIENCE = timedelta(days=30)
"""How long processes wait for each other: process 0 may write a large model meanwhile."""
BEAT = 3.0
"""Seconds between two signs of life."""
SILENCE = 40.0
"""Seconds without a sign of life after which a process is taken for dead."""
FIRST = 5.0
"""Seconds that process 0 has to print an error before another process prints its own."""


class LaunchedCommand:
    """The processes of a command: one, or those that torchrun has started. This one is `index` of `count`."""

    def __init__(self) -> None:
        self.index, self.count = 0, 1
        self._stderr, self._lock = sys.stderr, threading.Lock()
        self._store: Any = None
        self._signals, self._finished = -1, False

    def join(self) -> None:
        """Meet the other processes, if torchrun has started this one; each process gets its own GPU.

        Raises:
            InputError: there are more processes than GPUs, or FSDP has another version than 2.
        """
        environment = os.environ
        if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            if environment.get("FSDP_VERSION", "1") != "2":
                raise InputError("only version 2 of FSDP can be used; add --fsdp_version 2 to accelerate launch")
            environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # all processes compute with the models before
        if "TORCHELASTIC_RUN_ID" not in environment or int(environment.get("WORLD_SIZE", "1")) == 1:
            return
        self.index, self.count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if self.index:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the process ends
        import torch

        dist: Any = import_module("torch.distributed")
        store, *_ = next(dist.rendezvous("env://", timeout=PATIENCE))
        own = dist.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), None, False)
        self._store = dist.PrefixStore(f"depthgauge/{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", own)
        self._signals, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written)
        signal.signal(signal.SIGTERM, lambda *_: None)  # `_watch` reads it from the pipe
        threading.Thread(target=self._watch, daemon=True).start()
        local, processes = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
        gpus = torch.cuda.device_count()
        if 0 < gpus < processes:
            raise InputError(
                f"torchrun has started {processes} processes on a machine with {counted(gpus, 'GPU')}; use "
                f"--nproc-per-node {gpus}, or CUDA_VISIBLE_DEVICES= to compute on the CPU"
            )
        if gpus:
            torch.cuda.set_device(local)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=dist.PrefixStore("training", store), rank=self.index, world_size=self.count,
            timeout=PATIENCE,
        )  # fmt: skip

    def check_placement(self, options: Any) -> None:
        """Raise an InputError if options place the models of all processes on the same devices."""
        place = (options.device or "").removeprefix("stream:")
        flag = f"--device {options.device}" if options.is_spread or ":" in place else None
        if flag is not None and self.count > 1:
            raise InputError(
                f"{flag} cannot be combined with several processes, each of which has its own GPU; leave it out, or "
                "start one process without torchrun"
            )

    def fail(self, sentence: str) -> None:
        """Print an error. Of several processes, one prints: process 0 unless it has none."""
        with self._lock:
            if self._is_told():
                return
            where = f" (in process {self.index})" if self.index else ""
            typer.echo(f"error: {' '.join(sentence.split())}{where}", file=self._stderr)

    def _is_told(self) -> bool:
        """Return whether another process has printed an error; otherwise, this one will."""
        store = self._store
        if store is None:
            return False
        try:
            until = time.monotonic() + (FIRST if self.index else 0)
            while time.monotonic() < until and store.add("told", 0) == 0:
                time.sleep(0.1)
            return bool(store.add("told", 1) > 1)
        except RuntimeError:  # torchrun itself has ended
            return self.index > 0

    def end(self, code: int | None) -> NoReturn:
        """Exit with a code."""
        if self.count > 1:
            if code:
                self._finished = True
                sys.stdout.flush()
                os._exit(code)  # an orderly end could wait for the others
            if not self.index:
                import_module("depthgauge.recovery.helpers").dismiss()
            self._finished = True
            import_module("torch.distributed").destroy_process_group()
        sys.exit(code)

    def _watch(self) -> None:
        store = self._store
        heard: dict[str, tuple[bytes, float]] = {}
        names, beats = [f"alive {index}" for index in range(self.count)], 0
        while not select.select([self._signals], [], [], BEAT)[0]:
            beats += 1
            try:
                store.set(names[self.index], str(beats))
                now = {name: store.get(name) for name in names if store.check([name])}
            except RuntimeError:  # torchrun itself has ended
                break
            for name, value in now.items():
                if name not in heard or heard[name][0] != value:
                    heard[name] = value, time.monotonic()
            if any(time.monotonic() - since > SILENCE for _, since in heard.values()):
                break
        if not self._finished:
            self.fail(str(EndedRunError()))
            os._exit(1)
