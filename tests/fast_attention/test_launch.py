"""A compiled kernel is reused only for arguments that it was compiled for; every other launch goes through Triton."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_settings import DEVICE, checked

from depthgauge.base.errors import InputError
from depthgauge.fast_attention.bounds import survey
from depthgauge.fast_attention.launches import ALIGNMENT, Config, Launch, forward_launches, gradient_launches, table
from depthgauge.fast_attention.polynomial_path import Batch
from depthgauge.fast_attention.triton_backend import TritonBackend, kernel_survey

CONFIG = Config(64, 64, CAUSAL=True)
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


def arguments(x, y, sizes, scale, config: "tl.constexpr"):  # type: ignore[no-untyped-def] # noqa: F821
    """The parameters of a kernel: tensors, integers, floats, and what it is compiled for."""


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
    launch = Launch(jit, GRID, (7, 16), CONFIG, num_warps=4)
    calls = random.Random(seed).choices(CALLS, k=24)
    for x, y, scale in calls:
        launch((x, y), (scale,))
    ours = runs(jit)
    for compiled in jit.compiled:
        compiled.runs.clear()
    for x, y, scale in calls:
        jit[GRID](x, y, (7, 16), scale, CONFIG, num_warps=4)
    assert len(ours) == len(calls)
    assert len(jit.compiled) > 3
    assert runs(jit) == ours


def test_a_compiled_kernel_is_reused_without_triton(jit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(jit, GRID, (7, 16), CONFIG)
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


@pytest.mark.kernels
def test_a_survey_during_the_capture_of_a_cuda_graph_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    call, flat = checked(*torch.ones(3, 1, 2, 5, 16, device=DEVICE))
    assert kernel_survey(call, flat).is_usable == [True, True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(InputError, match=r"cannot be captured in a CUDA graph.* pass a plan"):
        kernel_survey(call, flat)


def test_tables_and_launches_are_prepared_once() -> None:
    cpu = torch.device("cpu")
    assert table(range, cpu, 3) is table(range, cpu, 3)
    assert table(range, cpu, 3).tolist() == [0, 1, 2]
    assert table(range, cpu, 4).tolist() == [0, 1, 2, 3]
    triton, tensor = TritonBackend(), torch.zeros(1, 2, 70, 16)
    call, flat = checked(tensor, tensor, tensor)
    spec = Batch(call, ((1.0, 1.0),) * 2, (0, 0), survey(call, flat), flat)
    sizes = triton.sizes(spec, True)
    assert forward_launches(sizes) is forward_launches(triton.sizes(spec, True))
    assert forward_launches(sizes) is not forward_launches(sizes._replace(call=call._replace(n=71)))
    assert gradient_launches(sizes) is gradient_launches(sizes._replace())
    assert gradient_launches(sizes) is not gradient_launches(sizes._replace(degree=2))
