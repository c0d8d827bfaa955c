"""The speed and the memory of two models: what is timed, what is said about it, and nothing where it did not settle."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layered_models import layered_model
from tiny_gguf import write_gguf
from tiny_models import tokens
from tiny_speech import speech_model

from depthgauge.checkpoints.inputs.windows import Samples
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.results.shrink_record import SpeedRecord
from depthgauge.surgery import fresh_process
from depthgauge.surgery import speed as module
from depthgauge.surgery.extract import extract
from depthgauge.surgery.fresh_process import PairedTimes
from depthgauge.surgery.speed import compare_speed, speed_record
from depthgauge.surgery.verify import llama_speed

SETTLED = PairedTimes(8, 1.1, 1.08, 1.12, 0.022, 0.02)


class Clock:
    """A clock by which every model takes a millisecond per layer and token; it notes what is read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.read: list[tuple[int, int]] = []

    def on(self, model: Any, layers: int) -> Any:
        def started(_: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            shape = next(iter(keywords.values())).shape
            self.now += 0.001 * layers * shape.numel()
            self.read.append((layers, shape.numel()))

        model.register_forward_pre_hook(started, with_kwargs=True)
        return model

    def timed(self, device: torch.device, work: Any) -> float:
        before = self.now
        work()
        return self.now - before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "timed", made.timed)
    monkeypatch.setattr(module, "SECONDS", 100.0)
    return made


def pair(name: str, clock: Clock | None = None) -> tuple[Any, Any]:
    """Return a model of six layers, and the same without three of them."""
    before = layered_model(name, dtype=torch.float32)
    after = extract(wrap(before), [0, 3, 5])
    return (before, after) if clock is None else (clock.on(before, 6), clock.on(after, 3))


def test_prefill_and_decode_are_timed_in_pairs(clock: Clock) -> None:
    before, after = pair("llama", clock)
    speed, memory, kind = compare_speed(before, after, tokens(10, batch=1))
    assert (speed.prefill, speed.prefill_low, speed.prefill_high) == pytest.approx((2, 2, 2))
    assert (speed.prefill_before, speed.prefill_after) == pytest.approx((0.006 * 16, 0.003 * 16))
    assert (speed.decode, speed.decode_low, speed.decode_high) == pytest.approx((2, 2, 2))
    assert (speed.decode_before, speed.decode_after) == pytest.approx((0.006, 0.003))
    assert speed.what.startswith(
        "prefill of 2 × 8 tokens in 8 pairs of runs, decode of one token at a time in 8 pairs of runs, on cpu"
    )
    # Both prompts, the search for enough tokens, and then turns.
    assert clock.read[:2] == [(6, 10), (3, 10)]
    decoded = [layers for layers, count in clock.read if count == 1]
    assert len(decoded) == 2 * 9  # one warm-up each
    assert {tuple(sorted(decoded[k : k + 2])) for k in range(0, 18, 2)} == {(3, 6)}
    # Weights and buffers in float32; a cache of 10 tokens with 2 heads of width 4 for keys and values in 3 layers.
    held = sum(t.numel() for t in (*after.parameters(), *after.buffers())) * 4
    assert memory.after == held + 3 * 2 * 10 * 2 * 4 * 4
    assert kind == "weights and key–value cache; activations are not included"


def test_times_that_do_not_settle_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "paired_times", lambda run, until: PairedTimes(17))
    speed, _, _ = compare_speed(*pair("llama"), tokens(10, batch=1))
    assert speed == SpeedRecord(prefill=None, decode=None, what=speed.what)
    said = "in 17 pairs of runs (no number: its 95 % interval did not come within ± 5 %)"
    assert speed.what.count(said) == 2


def test_the_prompt_leaves_room_for_new_tokens(clock: Clock) -> None:
    before, after = pair("gpt2", clock)
    for model in (before, after):
        model.config.n_positions = 12
    compare_speed(before, after, tokens(64, batch=1))
    assert clock.read[:2] == [(6, 6), (3, 6)]
    assert (6, 6) in clock.read[20:]  # read again after six new tokens


def test_models_without_a_cache_are_not_timed_token_by_token(clock: Clock) -> None:
    speed, _, kind = compare_speed(*pair("distilbert", clock), tokens(10, batch=1))
    assert speed.prefill == pytest.approx(2)
    assert (speed.decode, speed.decode_after) == (None, None)
    assert "decode" not in speed.what
    assert kind == "weights; activations are not included"


def test_recordings_are_repeated_as_a_whole(clock: Clock) -> None:
    model = clock.on(speech_model(), 2)
    inputs = Samples({"input_features": torch.zeros(1, 8, 10), "decoder_input_ids": torch.ones(1, 3, dtype=torch.long)})
    speed, _, _ = compare_speed(model, model, inputs)
    assert (speed.prefill, speed.decode) == (pytest.approx(1), None)
    assert speed.what.startswith("prefill of 2 inputs in 8 pairs of runs, on cpu")


def test_what_disturbs_the_times_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module.os, "getloadavg", lambda: (2.0, 9.0, 9.0))
    quiet = speed_record("3 tokens", SETTLED, None, "on cpu")
    assert quiet.what == "prefill of 3 tokens in 8 pairs of runs, on cpu"
    assert (quiet.prefill, quiet.prefill_low, quiet.prefill_after, quiet.decode) == (1.1, 1.08, 0.02, None)
    monkeypatch.setattr(module.os, "getloadavg", lambda: (4.25, 0.0, 0.0))
    assert speed_record("3 tokens", SETTLED, None, "on cpu").what == (
        f"{quiet.what}, with a load average of 4.25 on 2 cores"
    )


# --- GGUF files in llama.cpp ------------------------------------------------------------------------------------------


def test_files_are_timed_by_the_clock_of_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a llama.cpp that takes 1 ms per token for a file, 2 ms for the other, and 10 times that for new tokens."""

    class Server:
        def __init__(self, params: Any) -> None:
            self.slow = {"a": 2.0, "b": 1.0}[params.model.path]

        def handle_completions(self, asked: dict[str, Any]) -> dict[str, Any]:
            assert not asked["cache_prompt"]
            times = {"prompt_ms": self.slow * len(asked["prompt"]), "predicted_per_token_ms": 10 * self.slow}
            return {"timings": times}

    params = SimpleNamespace(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())
    llama = SimpleNamespace(
        CommonParams=lambda: params, Server=Server, ggml_type=SimpleNamespace(GGML_TYPE_F16=1)
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "xllamacpp", llama)
    asked = {"files": ["a", "b"], "prompt": list(range(40)), "seconds": 100.0, "context": 64, "threads": 1}
    found = fresh_process.times(asked)
    assert found["tokens"] == 16
    assert found["prefill"] == pytest.approx((8, 2.0, 2.0, 2.0, 0.032, 0.016))
    assert found["decode"] == pytest.approx((8, 2.0, 2.0, 2.0, 0.02, 0.01))


def test_two_files_in_a_new_process(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    for name, layers in (("a.gguf", 3), ("b.gguf", 2)):
        write_gguf(tmp_path / name, add_bos=True, layers=layers)
    speed = llama_speed(tmp_path / "a.gguf", tmp_path / "b.gguf", tokens(24, batch=1)[0])
    assert speed.what.startswith("prefill of ")
    assert "decode of one token at a time in " in speed.what
    assert "in llama.cpp with 1 thread" in speed.what
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    broken = llama_speed(tmp_path / "a.gguf", tmp_path / "b.gguf", tokens(24, batch=1)[0])
    assert (broken.prefill, broken.decode) == (None, None)
    assert broken.what.startswith("not measured: llama.cpp cannot run both files at once: ")
