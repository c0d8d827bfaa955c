"""A compiled kernel is used again only for arguments it was compiled for; every other launch is Triton's."""

from collections.abc import Callable

import pytest
import torch

from depthgauge.errors import InputError
from depthgauge.fast_attention.triton.launch import ALIGNMENT, Launch
from depthgauge.fast_attention.triton.survey import report_place


class Kernel:
    """Stands for a Triton kernel: it writes down who launched it, and with what."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[int, int, int], tuple[object, ...], dict[str, int]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
        def by_triton(*arguments: object, **options: int) -> "Compiled":
            self.launched.append(("triton", grid, arguments, options))
            return Compiled(self)

        return by_triton


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.kernel.launched.append(("compiled", grid, arguments, {}))


def who(kernel: Kernel) -> list[str]:
    return [name for name, *_ in kernel.launched]


def test_the_same_kind_of_launch_uses_what_was_compiled() -> None:
    kernel = Kernel()
    launch = Launch(kernel, (2, 3, 1), (7, 16), (64, True), num_warps=4)
    x, y = torch.zeros(8), torch.zeros(8)
    launch((x, y), (0.5,))
    launch((y, x), (0.25,))
    assert who(kernel) == ["triton", "compiled"]
    assert kernel.launched[0] == ("triton", (2, 3, 1), (x, y, 7, 16, 0.5, 64, True), {"num_warps": 4})
    assert kernel.launched[1] == ("compiled", (2, 3, 1), (y, x, 7, 16, 0.25, 64, True), {})


def test_other_dtypes_and_addresses_are_left_to_triton() -> None:
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
    assert who(kernel) == ["triton", "triton", "triton", "compiled", "triton", "triton", "compiled", "triton"]


def test_a_graph_that_is_being_captured_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match='force="exact" inside graphs'):
        report_place(2, torch.device("cuda"))
    assert report_place(2, torch.device("cpu")).numbers.shape == (2, 6)
