"""Host memory that receives the numbers of the survey kernel."""

import threading
import time

import torch

from depthgauge.errors import InputError

NOT_YET = -1.0
"""Marks numbers that have not arrived. All numbers of the survey are at least 0, infinite or NaN."""
READS = 100
"""The number of reads after which the device is asked whether it failed."""


class Readback:
    """Host memory that the device writes six numbers per head to: `numbers` [6, N], pinned.

    The host reads it until all numbers have arrived. Recording an event after the kernel that writes them and waiting
    for it would take 30 microseconds more.
    """

    def __init__(self, heads: int, device: torch.device) -> None:
        self.device = device
        self.numbers = torch.empty(6, heads, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
        self._array = self.numbers.numpy()

    def expect(self) -> None:
        """Mark all numbers as not arrived. Call this before the launch that writes them."""
        self._array.fill(NOT_YET)

    def read(self) -> list[list[float]]:
        """Wait for the numbers and return them by kind, each for all heads.

        They are the largest ‖q‖², ‖k‖², ‖q−μ‖², ‖k−c‖² and Σ|v| of the head, and ‖μ‖².
        """
        while True:
            for _ in range(READS):
                rows: list[list[float]] = self._array.tolist()
                if not any(NOT_YET in row for row in rows):
                    return rows
                time.sleep(0)  # other threads may run
            self._check()

    def _check(self) -> None:
        """Raise an error if the numbers will never arrive: if the device failed, or has finished its work."""
        is_idle = self.device.type != "cuda" or torch.cuda.current_stream(self.device).query()
        if is_idle and bool((self._array == NOT_YET).any()):
            raise RuntimeError("the survey of attention finished without writing its numbers")


class Readbacks:
    """The readback buffers of a backend: one per thread, number of heads and device.

    A thread reads its buffer before it requests it again, so a buffer never holds the numbers of two calls.
    """

    _MOST = 256

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device, int], Readback] = {}
        self._abandoned: list[Readback] = []

    def get(self, heads: int, device: torch.device) -> Readback:
        """Return the buffer of this thread."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "attention cannot be captured in a CUDA graph: it chooses a path by numbers that are not known during "
                "the capture; pass a plan that attention_plan made of similar tensors before, or leave force unset: "
                "the call is then exact"
            )
        key = heads, device, threading.get_ident()
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= self._MOST:
                self._kept.clear()
            found = self._kept[key] = Readback(heads, device)
        return found

    def abandon(self, readback: Readback) -> None:
        """Never use a buffer again: a call ended before it had read the buffer, so a kernel may still write to it.

        The buffer is never freed. Torch does not track the writes of these kernels, so it would reuse the freed memory
        for another tensor while a kernel still writes to it.
        """
        self._abandoned.append(readback)
        self._kept = {key: kept for key, kept in self._kept.items() if kept is not readback}
