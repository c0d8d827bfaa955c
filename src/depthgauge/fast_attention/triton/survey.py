"""The survey on the GPU: one kernel, and six numbers a head that travel to the host."""

import math
import threading
from functools import lru_cache

import torch
from torch import Tensor

from depthgauge.errors import InputError
from depthgauge.fast_attention.decide.bounds import Survey, summed_up
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.triton import launches


def outward(d: int) -> tuple[float, float]:
    """(up, lost) with ‖x − c‖ ≤ up·√S + lost, S the float32 sum of squares that the kernel found, as in `norm_up`."""
    return 1 + 2 * (d + 8) * 2.0**-24, 2 * math.sqrt(d * torch.finfo(torch.float32).tiny)


class Report:
    """The host's memory for a survey's numbers, which the device can write to, and the event of their arrival."""

    def __init__(self, heads: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"  # the interpreter, on the CPU, has nothing to wait for
        self.numbers = torch.empty(heads, 6, dtype=torch.float32, pin_memory=is_gpu)
        self._event = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    def sent(self) -> None:
        """The launch that writes the numbers has been made."""
        if self._event is not None:
            self._event.record()

    def read(self) -> list[list[float]]:
        """Wait for the numbers: ‖q‖², ‖k‖², ‖q−μ‖², ‖k−c‖², Σ|v|, ‖μ‖², the largest of each, for every head."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[float]] = self.numbers.tolist()
        return rows


@lru_cache(maxsize=256)
def _report(heads: int, device: torch.device, thread: int) -> Report:
    return Report(heads, device)


def report_place(heads: int, device: torch.device) -> Report:
    """The Report of this thread: it waits for one before it asks for another."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "attention decides by numbers that are not known while a CUDA graph is captured; "
            'use force="exact" inside graphs, or capture what is around it'
        )
    return _report(heads, device, threading.get_ident())


def forget_reports() -> None:
    """Let no later call use the Reports of now."""
    _report.cache_clear()


def survey_places(heads: int, rows: int, m: int, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the centres [2, N, d] and for what every block of tokens finds [N, blocks, 6]."""
    centres = torch.empty(2, heads, d, dtype=torch.float32, device=device)
    return centres, torch.empty(heads, launches.survey_blocks(rows, m), 6, dtype=torch.float32, device=device)


def survey(problem: Problem) -> Survey:
    """What `bounds.survey` proves, in one kernel; centres are the means of a sample of tokens, as any would do."""
    q, k, v = problem.q.flatten(1, 2).contiguous(), problem.k.contiguous(), problem.v.contiguous()
    (heads, rows, d), (m, e), device = q.shape, v.shape[1:], q.device
    centres, found = survey_places(heads, rows, m, d, device)
    report = report_place(heads, device)
    launches.survey(heads, rows, m, d, e, device)((q, k, v, centres, found))
    launches.transpose(heads, m, d, 0, found.shape[1], False, device)((k, found, k, report.numbers))
    report.sent()
    up, lost = outward(d)
    q0, k0, q1, k1, values, mean = (list(column) for column in zip(*report.read(), strict=True))
    norms = [[math.sqrt(x) * up + lost for x in column] for column in (q0, k0, q1, k1, mean)]
    return summed_up(problem, [*norms, values, [1.0] * heads, values], centres[0], centres[1], None)
