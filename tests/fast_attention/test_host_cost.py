"""The work of the host and the memory of a call with gradients: operations, launches and bytes are counted.

Kernels do nothing here, and tensors have no memory (device "meta").
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from depthgauge.fast_attention import launches
from depthgauge.fast_attention.bounds import Survey
from depthgauge.fast_attention.call import Call, Tensors
from depthgauge.fast_attention.polynomial_path import Batch
from depthgauge.fast_attention.triton_backend import TritonBackend

THROUGH_TRITON = "through Triton"
HEADS, WIDTH = 16, 64
META = torch.device("meta")


class Operations(TorchDispatchMode):
    """Counts torch operations by name, and the bytes of the tensors that they made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func):  # all others return views
            size = result.untyped_storage().nbytes()
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            finalize(result.untyped_storage(), self._drop, size)
        return result

    def _drop(self, size: int) -> None:
        self.bytes -= size


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


PREPARED: list[Any] = [launches.forward_launches, launches.gradient_launches]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Kernels that do nothing, in place of all others."""
    triton, found = pytest.importorskip("triton"), Kernels()
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda _: 0))
    monkeypatch.setattr(launches, "kernels", lambda: found)
    for prepared in PREPARED:
        prepared.cache_clear()
    yield found
    for prepared in PREPARED:
        prepared.cache_clear()


def described(n: int, groups: int, degree: int, causal: bool) -> tuple[Batch, list[Tensor]]:
    """Describe one polynomial for bfloat16 heads that are not centred, and return q, k and v."""
    shapes = (HEADS, groups, n, WIDTH), (HEADS, n, WIDTH), (HEADS, n, WIDTH)
    leaves = [torch.empty(shape, dtype=torch.bfloat16, device=META, requires_grad=True) for shape in shapes]
    call = Call(HEADS, groups, n, n, WIDTH, WIDTH, torch.bfloat16, META, 0.125, causal, 1e-3, None)
    coefficients = ((1.0, 1.0, 0.5)[: degree + 1],) * HEADS
    spec = Batch(call, coefficients, (0,) * HEADS, Survey(call), Tensors(*leaves).detach())
    return spec, leaves


def run(spec: Batch, leaves: list[Tensor]) -> Operations:
    """Compute the output and the gradients, and return the operations."""
    up = torch.empty(*leaves[0].shape[:-1], WIDTH, dtype=torch.bfloat16, device=META)
    with Operations() as operations:
        out, _ = TritonBackend().compute(spec, *leaves, needs_z=True)  # type: ignore[call-arg, misc]
        torch.autograd.grad(out, leaves, up)
    return operations


FORWARD = {"transpose": 1, "first_moments": 1, "finish": 1, "evaluate": 1}
BACKWARD = {"prepare": 1, "query_moments": 1, "finish_queries": 1, "query_rows": 1, "key_rows": 1, "value_rows": 1}
SECOND = {"second_moments": 2, "turn": 2}
EXACT = {"exact_queries": 1, "exact_keys": 1}


@pytest.mark.parametrize(("n", "groups"), [(512, 1), (300, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_call_with_gradients_is_allocations_and_launches(
    degree: int, causal: bool, n: int, groups: int, kernels: Kernels
) -> None:
    spec, leaves = described(n, groups, degree, causal)
    for call in range(2):
        kernels.launched.clear()
        operations = run(spec, leaves)
        assert (kernels.launched[THROUGH_TRITON] > 0) == (call == 0)
    parts = [FORWARD, BACKWARD] + [SECOND] * (degree == 2) + [EXACT] * causal
    assert +kernels.launched == {name: count for part in parts for name, count in part.items()}
    names = set(operations.found)
    computing = {name for name in names if not any(word in name for word in ("empty", "view", "slice", "detach"))}
    assert not computing  # everything that reads or writes a tensor is a kernel
    allocations = sum(count for name, count in operations.found.items() if "empty" in name)
    assert allocations <= 15 + 4 * (degree == 2) + 5 * causal, operations.found


def test_a_long_causal_call_needs_little_memory(kernels: Kernels) -> None:
    n = 2**17
    spec, leaves = described(n, 1, 2, True)
    result = HEADS * n * WIDTH * 2  # the bytes of the output or of one gradient
    states = (n // TritonBackend.causal_block + 1) * HEADS * (10 * 256 * WIDTH + 3 * WIDTH**2) * 2
    # When the rows ∂v are computed: states of keys and of queries, turned states, out, ∂q, ∂v, centred values, and the
    # exact blocks of keys and of values in float32. The rest is small.
    wanted = 2 * states + TritonBackend.turned_bytes + 4 * result + 2 * 2 * result
    assert wanted < run(spec, leaves).peak < wanted + result / 4
