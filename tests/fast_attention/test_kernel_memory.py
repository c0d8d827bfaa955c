"""No kernel reads or writes outside of its tensors, for sizes around the tiles. Every address is checked."""

from dataclasses import replace

import pytest
import torch
from kernel_memory import OutOfBoundsError, checked_memory
from kernel_settings import DEVICE, Setting

from depthgauge.fast_attention.decide import decision as decisions
from depthgauge.fast_attention.triton.backend import TritonBackend
from depthgauge.fast_attention.triton.launches import FinishSizes, SurveySizes, TransposeSizes
from depthgauge.fast_attention.triton.survey import survey_buffers
from depthgauge.fast_attention.triton.workspace import Workspace

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter checks addresses; use compute-sanitizer on a GPU"),
]
BLOCK = 128
CASES = [
    # n, m, d, e, groups, dtype: sizes of one token, around the blocks, and unequal widths
    (1, 1, 16, 16, 1, torch.float32),
    (1, 1, 128, 16, 4, torch.float16),
    (2, 1, 16, 128, 1, torch.float16),
    (64, 33, 128, 16, 1, torch.float32),
    (17, 17, 16, 128, 1, torch.float32),
    (127, 129, 32, 16, 1, torch.float32),
    (129, 128, 16, 64, 2, torch.float16),
    (257, 130, 32, 32, 3, torch.float32),
    (130, 257, 64, 16, 1, torch.float16),
    (300, 1, 16, 16, 1, torch.float32),
]


@pytest.fixture(autouse=True)
def _least_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "NEARLY", 1.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("n", "m", "d", "e", "groups", "dtype"), CASES)
def test_forward_and_backward_stay_inside_their_tensors(
    n: int, m: int, d: int, e: int, groups: int, dtype: torch.dtype, shifted: bool, causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    m = min(n, m) if causal else m
    degree = 1 if (n + shifted) % 2 else 2
    # Centring removes the scores of few tokens, so the description is that of a longer problem.
    shift = 0.5 if shifted else 0.0
    drawn = Setting(n=max(n, 150), m=max(m, 150), d=d, e=e, degree=degree, groups=groups, causal=causal, shift=shift, size=0.4)
    spec, problem = drawn.draw(dtype)
    few = replace(problem, q=problem.q[:, :, :n], k=problem.k[:, :m], v=problem.v[:, :m])
    given = few.q, few.k, few.v
    memory = checked_memory(monkeypatch)
    for after in ((), (dtype,)):
        backend = TritonBackend(Workspace(causal_block=BLOCK, centred_after=after, turned_bytes=1 if after else 2**20))
        out, _, saved = backend.forward(spec, *given)
        found = backend.backward(spec, *given, saved, torch.ones_like(out))
        assert all(bool(x.isfinite().all()) for x in (out, *found))
    assert memory.checked > 1000
