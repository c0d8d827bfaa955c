"""Host memory that receives the numbers of the survey kernel."""

import threading

import torch

from depthgauge.errors import InputError


class Readback:
    """Pinned host memory for six numbers per head, and the event that signals their arrival."""

    def __init__(self, heads: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"  # with the interpreter on the CPU there is nothing to wait for
        self.numbers = torch.empty(heads, 6, dtype=torch.float32, pin_memory=is_gpu)
        self._event = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Record the event. Call this after the launch that writes the numbers."""
        if self._event is not None:
            self._event.record()

    def read(self) -> list[list[float]]:
        """Wait for the numbers and return them, one row per head.

        A row holds the largest ‖q‖², ‖k‖², ‖q−μ‖², ‖k−c‖² and Σ|v| of the head, and ‖μ‖².
        """
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[float]] = self.numbers.tolist()
        return rows


class Readbacks:
    """The readback buffers of a backend: one per thread, number of heads and device.

    A thread reads its buffer before it requests it again, so a buffer never holds the numbers of two calls.
    """

    _MOST = 256

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device, int], Readback] = {}

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

    def forget(self) -> None:
        """Drop all buffers, so that no later call reads numbers that are still on their way."""
        self._kept.clear()
