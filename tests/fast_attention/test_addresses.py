"""Launches by addresses must compute what launches on tensors compute.

Compiled kernels are imitated: they get addresses, as on a GPU, and Triton's interpreter runs on the memory there.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_settings import DEVICE
from torch import Tensor

from depthgauge.fast_attention import launches, plan, triton_backend
from depthgauge.fast_attention.attention import attention
from depthgauge.fast_attention.launches import KernelPass, kernels
from depthgauge.fast_attention.triton_backend import TritonBackend

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(DEVICE.type != "cpu", reason="imitates a GPU")]
Launched = Counter[str]


def at_address(address: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of one entry in memory that exists."""
    memory = (ctypes.c_ubyte * dtype.itemsize).from_address(address)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(dtype)


class ByAddress:
    """A kernel that is compiled by its first launch, and gets addresses in later ones."""

    def __init__(self, kernel: Any, launched: Launched) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., SimpleNamespace]:
        def by_triton(*arguments: object, **options: int) -> SimpleNamespace:
            self.launched["tensors"] += 1
            self.kernel[grid](*arguments, **options)
            dtypes = [x.dtype for x in arguments if isinstance(x, Tensor)]

            def run(x: int, y: int, z: int, *rest: Any) -> None:
                self.launched["addresses"] += 1
                _stream, _function, _metadata, *_hooks = rest[:6]
                addresses, others = rest[6 : 6 + len(dtypes)], rest[6 + len(dtypes) :]
                found = [at_address(address, dtype) for address, dtype in zip(addresses, dtypes, strict=True)]
                self.kernel[x, y, z](*found, *others, **options)

            return SimpleNamespace(run=run, function=0, packed_metadata=())

        return by_triton


PREPARED: list[Any] = [
    launches.forward_launches, launches.gradient_launches, launches.survey_launch, launches.glance_launch,
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Counts launches by tensors and by addresses."""
    import triton

    found = Launched()

    compiled = SimpleNamespace(**{name: ByAddress(kernel, found) for name, kernel in vars(kernels()).items()})
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda _: 0))
    monkeypatch.setattr(launches, "kernels", lambda: compiled)
    for prepared in PREPARED:
        prepared.cache_clear()
    yield found
    for prepared in PREPARED:
        prepared.cache_clear()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[KernelPass]:
    """The sizes of all backward passes."""
    found: list[KernelPass] = []
    launches_of = triton_backend.gradient_launches
    monkeypatch.setattr(triton_backend, "gradient_launches", lambda s: found.append(s) or launches_of(s))
    return found


def use(monkeypatch: pytest.MonkeyPatch, highest: int = 2, **settings: Any) -> None:
    """Use a new Triton backend for every problem, with degrees up to `highest`."""
    triton = TritonBackend(causal_block=128, **settings)
    monkeypatch.setattr(plan, "backend_for", lambda call, degree: triton)
    monkeypatch.setattr(plan, "HIGHEST_DEGREE", highest)


def draw(n: int, m: int, groups: int, sizes: tuple[float, float], shift: float = 0.0) -> list[Tensor]:
    """Draw q, k, v of two key heads whose scores have the given sizes, with opposite signs.

    `shift` is added to q and k, which makes their centring necessary.
    """
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, h, t, 16, generator=generator) for h, t in ((groups, n), (1, m), (1, m)))
    one, other = (size**0.5 / 2 for size in sizes)
    return [*(torch.cat([x * one + shift, -x * other - shift], dim=1) for x in (q, k)), torch.cat([v, -v], dim=1) + 3]


AFTER: dict[str, Any] = {"centred_after": (torch.float32,)}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({"n": 70, "m": 200, "groups": 2, "sizes": (0.01, 0.01)}, AFTER, {"is_plain": True}),
    "causal": ({"n": 140, "m": 135, "groups": 1, "sizes": (0.01, 0.01)}, AFTER, {"block": 128}),
    "causal, turned states one at a time": (
        {"n": 140, "m": 140, "groups": 2, "sizes": (0.01, 0.01)}, {"turned_bytes": 1}, {"is_shifted": True},
    ),
    "two polynomials": ({"n": 70, "m": 130, "groups": 1, "sizes": (0.002, 0.03)}, {}, {"is_alike": False}),
    "weights": ({"n": 70, "m": 130, "groups": 2, "sizes": (0.01, 0.02), "shift": 0.5}, {}, {"is_weighted": True}),
    "causal, weights": (
        {"n": 140, "m": 140, "groups": 1, "sizes": (0.01, 0.02), "shift": 0.5}, {}, {"is_weighted": True},
    ),
}  # fmt: skip
"""Arguments of `draw`, settings of the backend, and some fields of the sizes of the backward pass that follow."""


@pytest.mark.parametrize("case", CASES)
def test_later_calls_use_addresses_and_agree(
    case: str, launched: Launched, passes: list[KernelPass], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, settings, expected = CASES[case]
    use(monkeypatch, **settings)
    options: dict[str, Any] = {"scale": 1.0, "tolerance": 0.03, "force": "polynomial", "enable_gqa": True}
    options["is_causal"] = "causal" in case
    leaves = [x.requires_grad_() for x in draw(**drawn)]
    up = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(2):
        launched.clear()
        out = attention(*leaves, **options)
        assert isinstance(out, Tensor)
        found.append((out, *torch.autograd.grad(out, leaves, up)))
    assert all({**expected, "degree": 2}.items() <= sizes._asdict().items() for sizes in passes)
    assert len(passes) == 2
    assert launched["addresses"] >= 12
    assert launched["tensors"] == 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def displaced(x: Tensor) -> Tensor:
    """Return a copy of x whose address is not a multiple of 16."""
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


def spread(x: Tensor) -> Tensor:
    """Return a copy of x that is not contiguous."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., 1:].copy_(x)


@pytest.mark.parametrize("case", ["causal", "weights"])
def test_hooks_of_autograd_may_move_what_is_saved(
    case: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, settings, _ = CASES[case]
    use(monkeypatch, **settings)
    options: dict[str, Any] = {"scale": 1.0, "tolerance": 0.03, "force": "polynomial", "enable_gqa": True}
    options["is_causal"] = "causal" in case
    leaves = [x.requires_grad_() for x in draw(**drawn)]
    wanted = torch.autograd.grad(attention(*leaves, **options).square().sum(), leaves)
    for move in (displaced, spread):
        moved: list[Tensor] = []

        def unpack(x: Tensor, move: Any = move, moved: list[Tensor] = moved) -> Tensor:
            moved.append(move(x))
            return moved[-1]

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = attention(*leaves, **options)
        launched.clear()
        found = torch.autograd.grad(out.square().sum(), leaves)
        assert len(moved) >= 7  # q, k, v, out, Z and the two parts of the states
        assert all(x.data_ptr() % 16 for x in moved)
        assert (launched["tensors"] > 0) == (move is displaced)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_forward_pass_of_degree_1_agrees(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, highest=1, **AFTER)
    tensors = draw(65, 40, 3, (0.004, 0.004))
    options: dict[str, Any] = {"scale": 1.0, "tolerance": 0.01, "force": "polynomial", "enable_gqa": True}
    first = attention(*tensors, **options)
    launched.clear()
    last = attention(*tensors, **options)
    assert launched == {"addresses": 5}  # survey, transpose, sums of degree 1, state, rows
    torch.testing.assert_close(first, last, rtol=1e-6, atol=1e-6)
    moved = attention(*(displaced(x) for x in tensors), **options)
    assert launched["tensors"] > 0
    torch.testing.assert_close(first, moved, rtol=1e-6, atol=1e-6)
