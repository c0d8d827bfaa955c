"""The work of the host in a call with gradients: torch operations and launches are counted, not timed."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from depthgauge.fast_attention.autograd import PolynomialAttention
from depthgauge.fast_attention.decide.bounds import survey
from depthgauge.fast_attention.decide.minimax import SMALLEST_INDEX
from depthgauge.fast_attention.problem import Options, checked
from depthgauge.fast_attention.spec import Repeatable, SharedPolynomial, Spec
from depthgauge.fast_attention.triton import gradient_launches, launch, launches
from depthgauge.fast_attention.triton.backend import TritonBackend
from depthgauge.fast_attention.triton.readback import Readback
from depthgauge.fast_attention.triton.route import Route

THROUGH_TRITON = "through Triton"
HEADS, WIDTH = 16, 64


class Operations(TorchDispatchMode):
    """Counts torch operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Subscript:
    """An object whose items are the values of a function."""

    def __init__(self, function: Callable[[object], Any]) -> None:
        self.function = function

    def __getitem__(self, at: object) -> Any:
        return self.function(at)


class Kernels:
    """Kernels that do nothing. `launched` counts launches by name, and those that Triton had to prepare."""

    def __init__(self) -> None:
        self.launched: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Subscript:
        return Subscript(lambda _: partial(self._through_triton, name))

    def _through_triton(self, name: str, *_: object, **__: object) -> SimpleNamespace:
        self.launched[THROUGH_TRITON] += 1
        return SimpleNamespace(run=partial(self._compiled, name), function=0, packed_metadata=())

    def _compiled(self, name: str, *_: object) -> None:
        self.launched[name] += 1


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Kernels that do nothing, in place of all others."""
    found = Kernels()
    monkeypatch.setattr(launch, "current_streams", lambda: lambda _: 0)
    monkeypatch.setattr(launches, "kernels", lambda: found)
    monkeypatch.setattr(gradient_launches, "gradient_kernels", lambda: found)
    return found


@pytest.mark.parametrize(("causal", "most"), [(False, 14), (True, 16)])
def test_a_repeated_call_with_gradients_is_launches_and_seven_allocations(
    causal: bool, most: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [[0.01] * HEADS for _ in range(6)]
    monkeypatch.setattr(Readback, "read", lambda _: numbers)
    leaves = [torch.zeros(1, HEADS, 512, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    problem = checked(*leaves, Options(is_causal=causal)).flat().detach()
    route = Route(
        TritonBackend().workspace, Repeatable(problem, 2, lambda _: SharedPolynomial((1.0, 1.0, 0.5), SMALLEST_INDEX))
    )
    for call in range(2):
        kernels.launched.clear()
        with Operations() as operations:
            out = route(*leaves)
            assert out is not None
            torch.autograd.grad(out, leaves, torch.zeros_like(leaves[0]))
        assert (kernels.launched[THROUGH_TRITON] > 0) == (call == 0)
    assert kernels.launched.total() <= most, kernels.launched
    allocations = {name: count for name, count in operations.found.items() if "empty" in name}
    assert sum(allocations.values()) <= 7, allocations  # out, kept and own memory; three gradients and own memory
    others = set(operations.found) - set(allocations)
    assert others <= {"aten.zeros_like.default", "aten.detach.default"}, others


@pytest.mark.parametrize(("n", "groups"), [(512, 1), (300, 2)])
@pytest.mark.parametrize(("causal", "most"), [(False, 26), (True, 28)])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_call_with_gradients_needs_few_operations(
    degree: int, causal: bool, most: int, n: int, groups: int, kernels: Kernels
) -> None:
    q = torch.zeros(1, HEADS * groups, n, WIDTH, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 1, HEADS, n, WIDTH, dtype=torch.bfloat16)
    problem = checked(q, k, v, Options(is_causal=causal, enable_gqa=groups > 1)).flat()
    polynomial = (1.0, 1.0, 0.5)[: degree + 1]
    spec = Spec(
        degree=degree, coefficients=(polynomial,) * HEADS, members=tuple(range(HEADS)), centrings=(0,) * HEADS,
        exact_rows=None, survey=survey(problem), problem=problem, keep=None,
    )  # fmt: skip
    backend = TritonBackend()
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    up = torch.zeros(HEADS, groups, n, WIDTH, dtype=torch.bfloat16)
    for call in range(2):
        kernels.launched.clear()
        with Operations() as operations:
            out, _ = PolynomialAttention.apply(*leaves, spec, backend)  # type: ignore[no-untyped-call]
            torch.autograd.grad(out, leaves, up)
        assert (kernels.launched[THROUGH_TRITON] > 0) == (call == 0)
    total = operations.found.total() + kernels.launched.total()
    assert total <= most, (operations.found, kernels.launched)
    names = set(operations.found)
    computing = {name for name in names if not any(word in name for word in ("empty", "view", "slice", "detach"))}
    assert not computing  # everything that reads or writes a tensor is a kernel
