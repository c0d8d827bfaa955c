"""A compiled kernel is reused only for arguments that it was compiled for; every other launch goes through Triton."""

import math
import threading
import time
from collections.abc import Callable

import pytest
import torch

from depthgauge.errors import InputError
from depthgauge.fast_attention.problem import Options, checked
from depthgauge.fast_attention.triton import launch as launch_module
from depthgauge.fast_attention.triton.launch import ALIGNMENT, Launch
from depthgauge.fast_attention.triton.launches import SurveySizes, TransposeSizes
from depthgauge.fast_attention.triton.readback import Readback, Readbacks
from depthgauge.fast_attention.triton.survey import survey
from depthgauge.fast_attention.triton.workspace import Workspace

STREAM = 99


class Kernel:
    """A stand-in for a Triton kernel that records its launches."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[int, int, int], tuple[object, ...], dict[str, int]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
        def by_triton(*arguments: object, **options: int) -> "Compiled":
            self.launched.append(("triton", grid, arguments, options))
            return Compiled(self)

        return by_triton


class Compiled:
    """A stand-in for a compiled kernel; `run` has the parameters of Triton's launcher."""

    function, packed_metadata = 4711, (4, 1, 0)

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def run(
        self, x: int, y: int, z: int, stream: int, function: int, metadata: object, about: None, before: None,
        after: None, *arguments: object,
    ) -> None:  # fmt: skip
        assert (stream, function, metadata, about, before, after) == (STREAM, 4711, (4, 1, 0), None, None, None)
        self.kernel.launched.append(("compiled", (x, y, z), arguments, {}))


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "current_streams", lambda: lambda device: STREAM + device)


def launchers(kernel: Kernel) -> list[str]:
    return [name for name, *_ in kernel.launched]


def test_a_launch_with_the_same_dtypes_reuses_the_compiled_kernel() -> None:
    kernel = Kernel()
    launch = Launch(kernel, (2, 3, 1), (7, 16), (64, True), num_warps=4)
    x, y = torch.zeros(8), torch.zeros(8)
    launch((x, y), (0.5,))
    launch((y, x), (0.25,))
    assert launchers(kernel) == ["triton", "compiled"]
    assert kernel.launched[0] == ("triton", (2, 3, 1), (x, y, 7, 16, 0.5, 64, True), {"num_warps": 4})
    addresses = y.data_ptr(), x.data_ptr()
    assert kernel.launched[1] == ("compiled", (2, 3, 1), (*addresses, 7, 16, 0.25, 64, True), {})


def test_other_dtypes_and_addresses_go_through_triton() -> None:
    kernel = Kernel()
    launch = Launch(kernel, (1, 1, 1), (), ())
    memory = torch.zeros(64)
    aligned, shifted = memory[ALIGNMENT:], memory[1:]
    assert aligned.data_ptr() % ALIGNMENT == 0
    assert shifted.data_ptr() % ALIGNMENT
    launch((shifted,))
    launch((shifted,))
    launch((aligned,))
    launch((aligned,))
    launch((shifted,))
    launch((aligned.half(),))
    launch((aligned.half(),))
    launch((aligned,))
    assert launchers(kernel) == ["triton", "triton", "triton", "compiled", "triton", "triton", "compiled", "compiled"]


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
