"""No kernel reads or writes outside of its tensors, at sizes around those of the tiles. Every address is checked."""

import pytest
import torch
from kernel_memory import OutOfBoundsError, checked_memory
from kernel_settings import DEVICE

from depthgauge.fast_attention.bounds import survey
from depthgauge.fast_attention.call import Call, Tensors
from depthgauge.fast_attention.launches import Config, Launch, kernels, survey_launch
from depthgauge.fast_attention.polynomial_path import Batch
from depthgauge.fast_attention.triton_backend import TritonBackend

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter checks addresses; use compute-sanitizer on a GPU"),
]
SINGLE, HALF = torch.float32, torch.float16
# n, m, d, e, query heads per key head, degree, causal, centring, dtype
CASES = [
    (1, 1, 16, 16, 1, 2, False, 0, SINGLE),
    (1, 1, 16, 16, 3, 2, True, 0, SINGLE),
    (1, 1, 128, 16, 2, 1, False, 0, SINGLE),
    (1, 1, 128, 16, 1, 2, True, 0, HALF),
    (2, 300, 16, 32, 1, 2, False, 2, SINGLE),
    (300, 1, 16, 16, 2, 2, True, 2, SINGLE),
    (17, 17, 16, 128, 1, 1, True, 0, HALF),
    (64, 33, 32, 16, 1, 2, False, 1, HALF),
    (127, 129, 16, 16, 2, 2, False, 0, HALF),
    (129, 128, 16, 32, 1, 2, True, 0, SINGLE),
    (128, 128, 16, 16, 1, 2, True, 0, SINGLE),
    (257, 130, 16, 16, 2, 1, True, 2, SINGLE),
]


def description(call: Call, tensors: Tensors, degree: int, centring: int) -> Batch:
    """Describe a polynomial path for one head. Its error does not matter here."""
    return Batch(call, ((1.0, 1.0, 0.5)[: degree + 1],), (centring,), survey(call, tensors), tensors)


@pytest.mark.parametrize(("n", "m", "d", "e", "groups", "degree", "causal", "centring", "dtype"), CASES)
def test_kernels_stay_inside_their_tensors(
    n: int, m: int, d: int, e: int, groups: int, degree: int, causal: bool, centring: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(n)
    shapes = (1, groups, n, d), (1, m, d), (1, m, e)
    q, k, v = (0.1 * torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    call = Call(1, groups, n, m, d, e, dtype, DEVICE, 1.0, causal, 1e-3, None)
    tensors = Tensors(q, k, v)
    spec = description(call, tensors, degree, centring)
    # Half of the cases centre values after the sums and turn one state at a time.
    is_other = (n + m) % 2 == 0
    backend = TritonBackend(128, (dtype,) if is_other else (), 1 if is_other else 2**28)
    memory = checked_memory(monkeypatch)
    assert backend.survey(call, tensors).is_usable == [True]
    assert 0 <= backend.look(call, tensors, 1e-3)() <= 1
    out, _, saved = backend.forward(spec, q, k, v)
    found = backend.backward(spec, q, k, v, saved, torch.ones_like(out))
    assert all(bool(x.isfinite().all()) for x in (out, *found))
    assert memory.checked > 1000


def test_an_address_outside_of_a_tensor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    checked_memory(monkeypatch)
    x, out = torch.zeros(1, 5, 16), torch.zeros(1, 16, 128)
    launch = Launch(kernels().transpose, (1, 1, 1), (5, 128), Config(16, 16))
    launch((x, out))
    with pytest.raises(Exception, match="a read of 16 addresses outside") as error:
        launch((x[:, 1:], out))
    assert isinstance(error.value.__cause__, OutOfBoundsError)
    with pytest.raises(Exception, match="a write of 1 addresses outside"):
        launch((x, out[..., :127]))
    launched, numbers = survey_launch(1, 5, 5, 16, 16, DEVICE), torch.zeros(6 + 2 * 16)
    launched((x, x, x, numbers))
    with pytest.raises(Exception, match="addresses outside"):
        launched((x, x, x, numbers[:-1]))
