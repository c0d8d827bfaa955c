"""The campaign of `make test-gpu`: it runs on a CPU, it finds planted errors, and its pieces report theirs."""

import importlib.util
import math
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attacked_calls
import pytest
import torch
from attacked_calls import Piece, Tally, ViolationError, cheap_polynomials, check_call, is_clean, reference
from drawn_calls import ATTACKS, LAYOUTS, Drawn, Kind, Limits, arranged, draw_call, draw_kind
from kernel_settings import DEVICE
from torch import Tensor

from depthgauge.fast_attention import plan as plan_module
from depthgauge.fast_attention.attention import attention
from depthgauge.fast_attention.call import Call
from depthgauge.fast_attention.triton_backend import TritonBackend

CPU = torch.device("cpu")
KIND = Kind(
    dtype=torch.float32, batch=2, heads=2, groups=2, n=40, m=40, d=16, e=16, causal=False, padded=False,
    gradients=False, tolerance=1e-2, scale=None,
)  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("options", [["--attacked"], ["--attacked", "--cheap"]])
def test_a_piece_passes_on_the_cpu(options: list[str]) -> None:
    """In a process of its own, where annotations are not enforced: this is ten times as fast."""
    size = ["--calls", "32", "--per-kind", "4", "--largest", "100", "--strict", "--device", "cpu", "--seed", "1"]
    size += ["--widths", "16"]
    done = subprocess.run(
        [sys.executable, attacked_calls.__file__, *size, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"seed 1, 32 calls of 8 kinds, (\d+) polynomial, .* (\d+) exact, ", done.stdout)
    assert found is not None
    assert int(found.group(1)) > 7


def test_unforced_calls_choose_cheap_polynomials() -> None:
    before = plan_module.TORCH_CPU.rates
    drawn = draw_call(KIND, 1, Limits(is_attacked=False), CPU)
    for is_cheap, path in ((True, "polynomial"), (False, "exact")):
        tally = Tally()
        call = Drawn(KIND, drawn.q, drawn.k, drawn.v, None, None, "none", drawn.layouts, False)
        if is_cheap:
            with cheap_polynomials():
                check_call(call, tally, True)
        else:
            check_call(call, tally, True)
        assert tally.counts[path] == 1
    assert plan_module.TORCH_CPU.rates == before


@pytest.mark.soak
@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")  # numpy, at NaN inputs
def test_a_piece_passes_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = TritonBackend(causal_block=256, centred_after=(torch.float32,))

    def choose(call: Call, degree: int) -> Any:
        return triton if triton.supports(call, degree) else plan_module.TORCH_CPU

    for module in [m for name, m in sys.modules.items() if name.startswith("depthgauge.fast_attention.")]:
        if hasattr(module, "backend_for"):
            monkeypatch.setattr(module, "backend_for", choose)
    monkeypatch.setattr(plan_module, "TRITON", triton)
    limits = Limits(largest=70, widths=(16,), odd_widths=(), dtypes=(torch.float32, torch.float16))
    used: list[int] = []
    forward = TritonBackend.forward
    monkeypatch.setattr(TritonBackend, "forward", lambda *given: used.append(1) or forward(*given))
    with cheap_polynomials():
        tally = Piece(0, 12, 6, limits, DEVICE).run()
    assert tally.counts["polynomial"] > 3
    assert len(used) > 3


# --- planted errors ---------------------------------------------------------------------------------------------------


def drawn_plainly(**changed: Any) -> Drawn:
    """A call on the polynomial path without an attack."""
    kind = Kind(**{**vars(KIND), **changed})
    found = draw_call(kind, 3, Limits(is_attacked=False), CPU)
    return Drawn(kind, found.q, found.k, found.v, found.padding, "polynomial", "none", found.layouts, False)


def plant(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        return change(attention(q, k, v, **how))

    monkeypatch.setattr(attacked_calls, "attention", wrong)


def one_entry(out: Tensor) -> Tensor:
    moved = out.clone()
    moved[1, 2, 7, 3] += 0.15  # more than the tolerance times the range of the values
    return moved


@pytest.mark.parametrize(
    "change",
    [
        one_entry, lambda out: out * math.nan, lambda out: out[..., :-1], lambda out: out.double(),
        lambda out: out.roll(1, -1),
    ],
)  # fmt: skip
def test_a_wrong_output_is_found(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_call(drawn_plainly(), Tally(), True)
    plant(monkeypatch, change)
    with pytest.raises(ViolationError):
        check_call(drawn_plainly(), Tally(), False)


class WrongGradient(torch.autograd.Function):
    """The identity with a gradient that is 30 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 1.3 * grads[0]


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check_call(drawn_plainly(gradients=True), Tally(), True)
    plant(monkeypatch, WrongGradient.apply)
    with pytest.raises(ViolationError, match="gradient of"):
        check_call(drawn_plainly(gradients=True), Tally(), False)


def test_a_nan_may_not_reach_another_head_nor_become_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawn_plainly()
    drawn.v[0, 1, 5, 3] = math.nan
    assert is_clean(drawn).flatten(1).tolist() == [[True, True, False, False], [True, True, True, True]]
    check_call(drawn, Tally(), True)
    plant(monkeypatch, lambda out: out.nan_to_num(0.5))
    with pytest.raises(ViolationError):
        check_call(drawn, Tally(), False)
    plant(monkeypatch, lambda out: out + 0 * out.sum())
    with pytest.raises(ViolationError):
        check_call(drawn, Tally(), False)


def test_a_call_that_the_plan_refuses_must_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawn_plainly()
    large = Drawn(drawn.kind, 100 * drawn.q, 100 * drawn.k, drawn.v, None, "polynomial", "none", drawn.layouts, False)
    tally = Tally()
    check_call(large, tally, True)
    assert tally.counts["refused"] == 1
    monkeypatch.setattr(attacked_calls, "attention", lambda q, k, v, **how: attention(q, k, v, **how | {"force": None}))
    with pytest.raises(ViolationError, match="refuses"):
        check_call(large, Tally(), False)


def test_an_error_beyond_the_plan_counts_unless_it_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawn_plainly()
    plant(monkeypatch, lambda out: out + 0.005 * (drawn.v.amax() - drawn.v.amin()) / 2)
    tally = Tally()
    check_call(drawn, tally, False)
    assert tally.counts["beyond plan"] == 1
    with pytest.raises(ViolationError, match="within the tolerance"):
        check_call(drawn, Tally(), True)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_the_reference_is_attention_in_a_plain_loop() -> None:
    drawn = drawn_plainly(causal=True, padded=True, n=5, m=7)
    assert drawn.padding is not None
    found = reference(drawn).out
    q, k, v = (x.double() for x in (drawn.q, drawn.k, drawn.v))
    for b in range(2):
        for h in range(4):
            for i in range(5):
                seen = [j for j in range(i + 1) if not drawn.padding[b, j]]
                weights = [math.exp(float(q[b, h, i] @ k[b, h // 2, j]) / 4) for j in seen]
                row = sum(w * v[b, h // 2, j] for w, j in zip(weights, seen, strict=True)) / sum(weights)
                torch.testing.assert_close(found[b, h, i], row)


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS)))
def test_layouts_keep_the_numbers(layout: str) -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    y = arranged(layout, x)
    torch.testing.assert_close(y, x, rtol=0, atol=0)
    assert y.is_contiguous() == (layout in ("plain", "surrounded", "shifted"))
    if layout in ("surrounded", "shifted", "sliced"):
        whole = torch.empty(0).set_(y.untyped_storage())  # type: ignore[call-overload]
        assert int(whole.isnan().sum()) == whole.numel() - x.numel() > 0
    if layout == "shifted":
        assert y.data_ptr() % 16


def test_draws_are_reproducible_and_cover_everything() -> None:
    kinds = [draw_kind(seed, Limits(long=16000)) for seed in range(400)]
    assert kinds == [draw_kind(seed, Limits(long=16000)) for seed in range(400)]
    assert {(kind.d, kind.e) for kind in kinds} >= {(d, e) for d in (16, 32, 64, 128) for e in (16, 32, 64, 128)}
    assert {kind.dtype for kind in kinds} == {torch.bfloat16, torch.float16, torch.float32, torch.float64}
    assert min(kind.n for kind in kinds) == min(kind.m for kind in kinds) == 1
    assert max(kind.n for kind in kinds) > 8000
    limits = Limits(largest=20)
    calls = [draw_call(draw_kind(seed, limits), seed, limits, CPU) for seed in range(300)]
    assert {call.attack for call in calls} == set(ATTACKS)
    assert {call.force for call in calls} == {None, "exact", "polynomial"}
    again = draw_call(draw_kind(7, limits), 7, limits, CPU)
    torch.testing.assert_close(again.q, calls[7].q, rtol=0, atol=0, equal_nan=True)


def test_short_kinds_do_not_depend_on_the_limits() -> None:
    """Both campaigns meet the same dtypes, widths and options at the same seed, so they share compiled kernels."""
    short = 0
    for seed in range(60):
        one, other = draw_kind(seed, Limits(long=16000)), draw_kind(seed, Limits(largest=1100))
        if one.n < 2200:
            short += 1
            assert (one.dtype, one.d, one.e, one.causal, one.gradients) == (
                other.dtype, other.d, other.e, other.causal, other.gradients,
            )  # fmt: skip
    assert short > 20


# --- the command lines ------------------------------------------------------------------------------------------------


def test_a_violation_names_its_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--calls", "4", "--largest", "30", "--device", "cpu", "--seed", "5", "--widths", "16"]
    assert attacked_calls.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("attention campaign: seed 5, 4 calls of 1 kinds")
    plant(monkeypatch, lambda out: (out[0] + 1, out[1]) if isinstance(out, tuple) else out + 1)
    assert attacked_calls.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "attention campaign: FAILED, seed 5"
    assert lines[-2].endswith("attacked_calls.py " + " ".join(arguments))
    assert any(line.startswith("call 0 of seed 5: Kind(") for line in lines)


def driver() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "attention_campaign.py"
    spec = importlib.util.spec_from_file_location("attention_campaign", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_sanitizer(folder: Path, errors: int) -> Path:
    """A program that runs what follows its options, and reports a number of errors."""
    path = folder / "compute-sanitizer"
    path.write_text(
        '#!/bin/sh\nshift 8\nexport FAKE=1\n"$@" || exit 1\n'
        f'echo "========= ERROR SUMMARY: {errors} errors"\nexit {min(errors, 1)}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.soak
def test_the_driver_runs_pieces_and_reports_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = driver()
    monkeypatch.setattr(campaign, "MEMCHECK", ("--per-kind", "3", "--largest", "40", "--widths", "16"))
    assert len(campaign.OPTIONS) == 8
    good = fake_sanitizer(tmp_path, 0)
    arguments = ["--memcheck", "3", "--device", "cpu", "--workers", "1", "--sanitizer"]
    assert campaign.main(["--attacked", "0", *arguments, str(good)]) == 0
    compared, _, not_compared, last = capsys.readouterr().out.splitlines()
    assert last.startswith("memcheck: 3 calls of 1 kinds in 1 processes")
    assert "no violation" in last
    assert ["not compared" in line for line in (compared, not_compared)] == [False, True]
    # The other processes only print what a piece prints.
    piece = tmp_path / "piece.py"
    piece.write_text(
        "import sys\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "print(f\"attention campaign: seed {given['--seed']}, {given['--calls']} calls of 2 kinds, 1 polynomial,\")\n"
    )
    monkeypatch.setattr(campaign, "PIECE", piece)
    assert campaign.main(["--attacked", "4400", *arguments, str(good)]) == 0
    attacked, checked = capsys.readouterr().out.splitlines()[-2:]
    assert attacked.startswith("attacked calls: 4400 calls of 8 kinds in 4 processes (4 polynomial,")
    assert checked.startswith("memcheck: 3 calls of 2 kinds in 1 processes")
    bad = fake_sanitizer(tmp_path, 2)
    assert campaign.main(["--attacked", "0", *arguments, str(bad)]) == 1
    assert "FAILED, seeds 0" in capsys.readouterr().out.splitlines()[-1]


def test_the_driver_reports_a_crash_and_a_missing_sanitizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = driver()
    crash = tmp_path / "crash.py"
    crash.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[sys.argv.index('--trace') + 1]).write_text('call 4')\n"
        "os.abort()\n"
    )
    monkeypatch.setattr(campaign, "PIECE", crash)
    assert campaign.main(["--attacked", "5", "--memcheck", "0", "--device", "cpu", "--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert "the piece with seed 0 failed with exit status -6; its last call was\ncall 4" in out
    quick = tmp_path / "quick.py"
    quick.write_text("print('attention campaign: seed 0, 3 calls of 1 kinds')\n")
    monkeypatch.setattr(campaign, "PIECE", quick)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(campaign, "find_sanitizer", lambda given: None)
    arguments = ["--attacked", "0", "--memcheck", "3", "--device", "cpu", "--workers", "1"]
    assert campaign.main(arguments) == 1
    assert "memcheck was NOT run" in capsys.readouterr().out
    assert campaign.main([*arguments, "--if-present"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("WITHOUT compute-sanitizer: 3 calls")


def test_the_sanitizer_is_found_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = driver()
    (tmp_path / "home" / "bin").mkdir(parents=True)
    own = fake_sanitizer(tmp_path, 0)
    theirs = fake_sanitizer(tmp_path / "home" / "bin", 0)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert campaign.find_sanitizer() == str(theirs)
    assert campaign.find_sanitizer(str(own)) == str(own)
    assert campaign.find_sanitizer(str(tmp_path / "missing")) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert campaign.find_sanitizer() == str(own)
