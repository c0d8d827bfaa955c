"""A compiled kernel is reused only for arguments that it was compiled for; every other launch goes through Triton."""

import math
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from depthgauge.errors import InputError
from depthgauge.fast_attention.problem import Options, checked
from depthgauge.fast_attention.triton.launch import ALIGNMENT, Launch
from depthgauge.fast_attention.triton.launches import SurveySizes, TransposeSizes
from depthgauge.fast_attention.triton.readback import Readback, Readbacks
from depthgauge.fast_attention.triton.survey import survey
from depthgauge.fast_attention.triton.workspace import Workspace

STREAM = 99
GRID = (2, 3, 1)


class Compiled:
    """A stand-in for a kernel that Triton compiled: it records what it is run with."""

    packed_metadata = (4, 1, 0)

    def __init__(self, number: int) -> None:
        self.function, self.runs = number, list[tuple[object, ...]]()

    def launch_metadata(self, *_: object) -> None:
        """No hook is set, so the launcher gets None."""

    def run(self, *given: object) -> None:
        self.runs.append(given)


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel of Triton, which chooses, binds and launches as on a GPU, without a compiler and a driver."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    class Kernel(triton.runtime.JITFunction):  # type: ignore[misc, name-defined]
        def _do_compile(self, key: object, signature: object, device: int, *_: object) -> Compiled:
            self.compiled.append(Compiled(len(self.compiled)))
            self.device_caches[device][0][key] = self.compiled[-1]
            return self.compiled[-1]

    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: STREAM + device,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns if it is not set
    kernel = Kernel(arguments)
    kernel.compiled = []
    return kernel


def arguments(x, y, n, rows, scale, width: "tl.constexpr", causal: "tl.constexpr"):  # type: ignore[no-untyped-def] # noqa: F821
    """The parameters of a kernel: tensors, integers, floats, constants."""


def runs(kernel: Any) -> list[tuple[int, tuple[object, ...]]]:
    """Return every launch: which compiled kernel ran, and what it was given, tensors as addresses.

    Places 7 and 8 are the hooks of profilers. Only launches through Triton call them.
    """
    return [
        (compiled.function, tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given[:7] + given[9:]))
        for compiled in kernel.compiled
        for given in compiled.runs
    ]


MEMORY = torch.zeros(64)
HALVES = torch.zeros(64, dtype=torch.float16)
ALIGNED, SHIFTED = MEMORY[ALIGNMENT:], MEMORY[1:]
CALLS: list[tuple[torch.Tensor, torch.Tensor, float]] = [
    (ALIGNED, ALIGNED, 0.5), (MEMORY, ALIGNED, 1.0), (SHIFTED, ALIGNED, 0.25), (ALIGNED, SHIFTED, 0.0),
    (HALVES, ALIGNED, 0.5), (ALIGNED, HALVES, 0.5), (HALVES, HALVES, 16.0), (HALVES[1:], HALVES, 0.5),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_every_launch_runs_what_triton_runs(jit: Any, seed: int) -> None:
    """The compiled kernel, the stream, the grid and every argument are those that Triton chooses for the same call."""
    launch = Launch(jit, GRID, (7, 16), (64, True), num_warps=4)
    calls = random.Random(seed).choices(CALLS, k=24)
    for x, y, scale in calls:
        launch((x, y), (scale,))
    ours = runs(jit)
    for compiled in jit.compiled:
        compiled.runs.clear()
    for x, y, scale in calls:
        jit[GRID](x, y, 7, 16, scale, 64, True, num_warps=4)
    assert len(ours) == len(calls)
    assert len(jit.compiled) > 3
    assert runs(jit) == ours


def test_a_compiled_kernel_is_reused_without_triton(jit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(jit, GRID, (7, 16), (64, True))
    assert MEMORY.data_ptr() % ALIGNMENT == 0
    assert SHIFTED.data_ptr() % ALIGNMENT
    launch((MEMORY, ALIGNED), (0.5,))
    launch((SHIFTED, ALIGNED), (0.5,))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked Triton")

    monkeypatch.setattr(jit, "run", refuse)
    launch((ALIGNED, MEMORY), (0.25,))
    assert len(jit.compiled[0].runs) == 2
    for x in (SHIFTED, HALVES):  # an address and a dtype that the kernel was not compiled for
        with pytest.raises(AssertionError, match="asked Triton"):
            launch((x, ALIGNED), (0.5,))


def test_capturing_a_cuda_graph_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match=r"cannot be captured in a CUDA graph.* pass a plan"):
        Readbacks().get(2, torch.device("cuda"))
    assert Readbacks().get(2, torch.device("cpu")).numbers.shape == (6, 2)


@pytest.mark.kernels
def test_a_workspace_keeps_its_own_launches_and_tables() -> None:
    one, other, cpu = Workspace(), Workspace(), torch.device("cpu")
    sizes = SurveySizes(2, 70, 70, 16, 16, cpu)
    assert one.launch(sizes) is one.launch(SurveySizes(2, 70, 70, 16, 16, cpu))
    assert one.launch(sizes) is not other.launch(sizes)
    assert one.launch(sizes) is not one.launch(sizes._replace(heads=3))
    assert one.table(range, cpu, 3) is one.table(range, cpu, 3)
    assert one.table(range, cpu, 3) is not other.table(range, cpu, 3)
    assert one.table(range, cpu, 3).tolist() == [0, 1, 2]
    assert one.readbacks.get(2, cpu) is not other.readbacks.get(2, cpu)


@pytest.mark.kernels
def test_records_of_different_kernels_do_not_share_a_launch() -> None:
    workspace, cpu = Workspace(), torch.device("cpu")
    transpose = TransposeSizes(1, 1, 16, 128, 0, True, cpu)
    survey = SurveySizes(*transpose[:5], cpu)
    assert workspace.launch(transpose).kernel is not workspace.launch(survey).kernel


def test_numbers_are_read_when_all_have_arrived() -> None:
    readback = Readback(2, torch.device("cpu"))
    readback.expect()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    values = [0.0, math.nan, math.inf, *range(1, 10)]

    def write() -> None:
        for at in order:
            time.sleep(0.001)
            readback.numbers.view(-1)[at] = values[at]

    writer = threading.Thread(target=write)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readback, "_check", lambda: None)
        writer.start()
        rows = readback.read()
    writer.join()
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(values).view(6, 2), equal_nan=True)


def test_numbers_that_never_arrive_are_an_error() -> None:
    readback = Readback(2, torch.device("cpu"))
    readback.expect()
    readback.numbers[:5] = 1.0
    with pytest.raises(RuntimeError, match="finished without writing its numbers"):
        readback.read()


def test_an_abandoned_buffer_is_never_used_again() -> None:
    readbacks, cpu = Readbacks(), torch.device("cpu")
    buffer = readbacks.get(2, cpu)
    assert readbacks.get(2, cpu) is buffer
    readbacks.abandon(buffer)
    other = readbacks.get(2, cpu)
    assert other is not buffer
    assert other.numbers.data_ptr() != buffer.numbers.data_ptr()
    assert buffer in readbacks._abandoned


@pytest.mark.kernels
def test_an_interrupted_survey_abandons_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel may still write: the next survey of this thread must not take these numbers for its own."""
    workspace, late = Workspace(), list[torch.Tensor]()
    tensors = [torch.full((1, 2, 5, 16), size) for size in (0.01, 0.01, 1.0)]
    small = checked(*tensors, Options()).flat()
    large = checked(100 * tensors[0], *tensors[1:], Options()).flat()

    def interrupt(self: Readback) -> None:
        late.append(self.numbers)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Readback, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            survey(workspace, small)
    true = Readback.read

    def delayed(self: Readback) -> list[list[float]]:
        late[0].fill_(0.01)  # the interrupted kernel writes now
        return true(self)

    monkeypatch.setattr(Readback, "read", delayed)
    assert min(survey(workspace, large).query) >= 4.0
