"""Passes by addresses, in one piece of memory, must compute what they compute on tensors of their own.

Compiled kernels are imitated: they get addresses, as on a GPU, and Triton's interpreter runs on the memory there.
"""

import ctypes
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_settings import DEVICE
from torch import Tensor

from depthgauge.fast_attention import backends
from depthgauge.fast_attention.attention import attention
from depthgauge.fast_attention.decide import chooser
from depthgauge.fast_attention.triton import gradient_launches, launch, launches
from depthgauge.fast_attention.triton.backend import TritonBackend
from depthgauge.fast_attention.triton.gradient_kernels import gradient_kernels
from depthgauge.fast_attention.triton.kernels import kernels
from depthgauge.fast_attention.triton.launch import Launch
from depthgauge.fast_attention.triton.passes import LaunchPass, LaunchStep, Layout, Room
from depthgauge.fast_attention.triton.workspace import Workspace

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


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Counts launches by tensors and by addresses."""
    found = Launched()

    def compiled(of: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(**{name: ByAddress(kernel, found) for name, kernel in vars(of).items()})

    forward, backward = compiled(kernels()), compiled(gradient_kernels())
    monkeypatch.setattr(launch, "current_streams", lambda: lambda _: 0)
    monkeypatch.setattr(launches, "kernels", lambda: forward)
    monkeypatch.setattr(gradient_launches, "gradient_kernels", lambda: backward)
    return found


def use(monkeypatch: pytest.MonkeyPatch, highest: int = 2, **settings: Any) -> TritonBackend:
    """Use a new Triton backend for every problem, with degrees up to `highest`."""
    triton = TritonBackend(Workspace(causal_block=128, **settings))
    for module in (backends, chooser):
        monkeypatch.setattr(module, "backend_for", lambda problem, degree: triton)
    monkeypatch.setattr(backends, "TRITON", triton)
    monkeypatch.setattr(chooser, "HIGHEST_DEGREE", highest)
    return triton


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
    "route": ({"n": 70, "m": 200, "groups": 2, "sizes": (0.01, 0.01)}, AFTER, {"is_plain": True}),
    "causal route": ({"n": 140, "m": 135, "groups": 1, "sizes": (0.01, 0.01)}, AFTER, {"block": 128}),
    "causal, turned states one at a time": (
        {"n": 140, "m": 140, "groups": 2, "sizes": (0.01, 0.01)}, {"turned_bytes": 1}, {"is_shifted": True},
    ),
    "two polynomials": ({"n": 70, "m": 130, "groups": 1, "sizes": (0.002, 0.03)}, {}, {"is_alike": False}),
    "weights": ({"n": 70, "m": 130, "groups": 2, "sizes": (0.01, 0.02), "shift": 0.5}, {}, {"is_weighted": True}),
    "causal, weights": (
        {"n": 140, "m": 140, "groups": 1, "sizes": (0.01, 0.02), "shift": 0.5}, {}, {"is_weighted": True},
    ),
}  # fmt: skip
"""Arguments of `draw`, settings of the workspace, and some fields of the sizes of the backward pass that follow."""


@pytest.mark.parametrize(("case", "is_pooled"), [*((case, True) for case in CASES), ("route", False)])
def test_later_calls_use_addresses_and_agree(
    case: str, is_pooled: bool, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_pooled:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    drawn, settings, expected = CASES[case]
    backend = use(monkeypatch, **settings)
    options: dict[str, Any] = {"scale": 1.0, "tolerance": 0.03, "force": "polynomial", "enable_gqa": True}
    options["is_causal"] = "causal" in case
    leaves = [x.requires_grad_() for x in draw(**drawn)]
    up = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(3 if "route" in case else 2):  # a route is made by the first call and prepared by the second
        launched.clear()
        out = attention(*leaves, **options)
        assert isinstance(out, Tensor)
        found.append((out, *torch.autograd.grad(out, leaves, up)))
    (sizes,) = backend.workspace._gradients
    assert {**expected, "degree": 2}.items() <= sizes._asdict().items()
    assert bool(backend.routes) == ("route" in case)
    assert launched["addresses"] >= 12
    assert launched["tensors"] == 0
    for later in found[1:]:
        for one, other in zip(later, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def displaced(x: Tensor) -> Tensor:
    """Return a copy of x whose address is not a multiple of 16."""
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("case", ["causal route", "weights"])
def test_hooks_of_autograd_may_move_what_is_saved(
    case: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, settings, _ = CASES[case]
    backend = use(monkeypatch, **settings)
    options: dict[str, Any] = {"scale": 1.0, "tolerance": 0.03, "force": "polynomial", "enable_gqa": True}
    options["is_causal"] = "causal" in case
    leaves = [x.requires_grad_() for x in draw(**drawn)]
    moved: list[torch.dtype] = []

    def unpack(x: Tensor) -> Tensor:
        moved.append(x.dtype)
        return displaced(x)

    found = []
    for way_back in (lambda x: x, unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, way_back):
            out = attention(*leaves, **options)
        assert isinstance(out, Tensor)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    assert torch.uint8 in moved
    assert not backend.routes  # a recomputation under hooks would save other shapes
    for later in found[1:]:
        for one, other in zip(later, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_forward_pass_of_degree_1_agrees(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = use(monkeypatch, highest=1, **AFTER)
    tensors = draw(65, 40, 3, (0.004, 0.004))
    options: dict[str, Any] = {"scale": 1.0, "tolerance": 0.01, "force": "polynomial", "enable_gqa": True}
    first, _, last = (attention(*tensors, **options) for _ in range(3))
    assert {sizes.degree for sizes in backend.workspace._forward} == {1}
    assert launched["addresses"] > 0
    torch.testing.assert_close(first, last, rtol=1e-6, atol=1e-6)


class Recorder:
    """A kernel that records the addresses of its launches, by tensors or directly."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def __getitem__(self, grid: object) -> Callable[..., SimpleNamespace]:
        def by_triton(*arguments: object) -> SimpleNamespace:
            self.seen.append(("tensors", *(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)))
            run = lambda *given: self.seen.append(("addresses", *given[9:]))  # noqa: E731
            return SimpleNamespace(run=run, function=0, packed_metadata=())

        return by_triton


def small_pass(kernel: Recorder) -> LaunchPass:
    """Return a pass on a given tensor, a table, two kept tensors and three of its own; two of these share memory."""
    step = Launch(kernel, (1, 1, 1), (5,), (True,))
    parts = [
        [LaunchStep(step, ("x", "always", "early", "table"), (0.5,))],
        [LaunchStep(step, ("x", ("x", 4), "late", ("always", 8)), "numbers")],
        [LaunchStep(step, ("first", "second", "second", "always"), (0.0,))],
    ]
    rooms = {name: Room((64,), torch.float32) for name in ("always", "early", "late")}
    kept = {"first": Room((10,), torch.float32), "second": Room((70,), torch.float32)}
    return LaunchPass(parts, ["x"], {"table": torch.zeros(4, dtype=torch.float32)}, rooms, torch.device("cpu"), kept)


def test_addresses_are_those_of_the_named_tensors(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Recorder()
    prepared, x = small_pass(kernel), torch.zeros(64)
    memory, kept = torch.zeros(4096, dtype=torch.uint8), prepared.keep()
    for _ in range(2):
        prepared((x,), kept, {"numbers": (0.25,)})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: memory)
        prepared((x,), kept, {"numbers": (0.25,)})
    base, table, held = memory.data_ptr(), prepared.tables["table"].data_ptr(), kept[0].data_ptr()
    assert kernel.seen[-3:] == [
        ("addresses", x.data_ptr(), base, base + 256, table, 5, 0.5, True),
        ("addresses", x.data_ptr(), x.data_ptr() + 16, base + 256, base + 32, 5, 0.25, True),
        ("addresses", held + 512, held, held, base, 5, 0.0, True),
    ]
    assert prepared.own.size == 2 * 256
    assert [name for name, *_ in kernel.seen] == ["tensors"] + ["addresses"] * 8
    views = prepared.kept.views(kept)
    assert [(name, view.data_ptr() - held, view.numel()) for name, view in views.items()] == [
        ("first", 512, 10), ("second", 0, 70),
    ]  # fmt: skip


def test_tensors_of_other_dtypes_and_addresses_are_not_taken_by_their_address(launched: Launched) -> None:
    kernel = Recorder()
    prepared, memory = small_pass(kernel), torch.zeros(128)
    shifted, half = memory[1:65], torch.zeros(64, dtype=torch.float16)
    for x in (memory[:64], memory[:64], shifted, half, memory[:64]):
        prepared((x,), prepared.keep(), {"numbers": (0.25,)})
    kinds = [name for name, *_ in kernel.seen]
    assert kinds[:6] == ["tensors", *["addresses"] * 5]
    assert kinds[6:9] == ["tensors", "tensors", "addresses"]  # not aligned; the last step has no given tensor
    assert kinds[9] == "tensors"
    assert kinds[12:] == ["addresses"] * 3


def test_tensors_share_memory_only_if_no_step_lies_between_their_uses() -> None:
    generator = random.Random(0)
    for _ in range(300):
        names = [f"x{i}" for i in range(generator.randint(1, 12))]
        rooms = {name: Room((generator.randint(1, 2000),), torch.float32) for name in names}
        used: list[set[str]] = [set() for _ in range(generator.randint(1, 9))]
        for name in names:
            for _ in range(generator.randint(1, 3)):
                generator.choice(used).add(name)
        layout = Layout(rooms, used)
        whole = torch.zeros(layout.size, dtype=torch.uint8)
        for name, view in layout.views((whole,)).items():
            assert view.data_ptr() - whole.data_ptr() == layout.places[name]
        # Every tensor is filled at its first step and must be unchanged at its last one.
        views, seen = layout.views((whole,)), set[str]()
        for at, here in enumerate(used):
            for name in sorted(here):
                if name not in seen:
                    views[name].fill_(names.index(name) + 1)
                    seen.add(name)
            for name in seen:
                if any(name in later for later in used[at:]):
                    assert bool((views[name] == names.index(name) + 1).all())
        assert layout.size <= sum(room.size for room in rooms.values())
