"""The attention benchmarks: fresh tensors at every call, checks that can fail, claims, and a small run on the CPU."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_files import benchmark

pytestmark = pytest.mark.soak
fresh, checks = benchmark("fresh_tensors"), benchmark("attention_checks")
dropin = benchmark("attention_dropin", "encoder_pair")
CPU = torch.device("cpu")
PLACE = fresh.Place(CPU, torch.float32, 2, 16)


# --- tensors and times ------------------------------------------------------------------------------------------------


def test_score_sizes_fill_thirty_per_cent() -> None:
    found = fresh.factors(40)
    assert 0.7 <= min(found) < 0.72
    assert 1.28 < max(found) <= 1.3
    assert sum(found) == pytest.approx(40)
    assert len(set(found)) == 40
    assert found != sorted(found)


def test_small_scores_are_inside_the_regime_and_trained_scores_are_outside() -> None:
    torch.manual_seed(0)
    for factor in (0.7, 1.0, 1.3):
        q, k, _, up = fresh.small_scores(PLACE, 300, 0.3, factor)
        bound = (q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1) / 4).flatten()
        torch.testing.assert_close(bound, torch.full((2,), 0.97 * 0.3 * factor / 1.3))
        assert up is None
        q, k, _, up = fresh.trained_scores(PLACE, 300, factor, with_backward=True, batch=3)
        inner = (q @ k.transpose(-1, -2) / 4).detach()[:, :, :63, 1:]
        assert float(inner.std()) == pytest.approx(2 * factor, rel=0.1)
        assert q.shape == up.shape == (3, 2, 300, 16)
        assert q.requires_grad
    assert dropin.path_of(fresh.trained_scores(PLACE, 300, 1.0), False) == ("exact", 0.0)


@pytest.mark.parametrize("size", [1, 4])
def test_every_timed_call_has_its_own_tensors_and_the_order_varies(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "TURN", 4)
    monkeypatch.setattr(fresh, "LONG_MS", 1e9 if size == 1 else 0.0)
    seen: dict[str, list[int]] = {"ours": [], "SDPA": [], "third": []}
    order: list[str] = []

    def contender(name: str) -> Any:
        def run(call: Any) -> None:
            seen[name].append(id(call.q))
            order.append(name)

        return fresh.Contender(name, run)

    kept: list[Any] = []

    def draw(factor: float) -> Any:
        kept.append(fresh.small_scores(PLACE, 4, 0.1, factor))
        return kept[-1]

    effort = fresh.Effort(calls=12, seconds=60.0, repeats=4)
    found = fresh.compare([contender(name) for name in seen], draw, effort, fresh.Stopwatch(CPU))
    before = 1 + fresh.WARM_UP
    for name, ids in seen.items():
        assert found[name].calls == 12
        fresh_ids = ids[: before + 12]
        assert len(set(fresh_ids)) == len(fresh_ids)
        # Only the first contender repeats a call: one that is not counted, and four that are.
        assert len(ids) == before + 12 + (5 if name == "ours" else 0)
        assert len(set(ids)) == len(fresh_ids)
        assert math.isnan(found[name].repeated) == (name != "ours")
    timed = order[3 * before :][: 3 * 12]
    rounds = [timed[start : start + 3 * size] for start in range(0, 3 * 12, 3 * size)]
    for names in rounds:  # each contender has one turn of `size` calls
        turns = names[::size]
        assert set(turns) == set(seen)
        assert names == [name for name in turns for _ in range(size)]
    assert len({tuple(names) for names in rounds}) > 1
    assert len(kept) == 1 + before + 12  # one more tells how large a call is


def test_memory_and_time_limit_the_number_of_calls() -> None:
    effort = fresh.Effort(calls=60, memory=100, seconds=1.0)
    assert effort.affordable(1) == 60
    assert effort.affordable(4) == 21
    assert effort.affordable(50) == fresh.LEAST_CALLS
    call = fresh.small_scores(PLACE, 8, 0.1, 1.0, with_backward=True)
    assert call.size() == 4 * 2 * 8 * 16 * 4
    slow = fresh.compare(
        [fresh.Contender("ours", lambda call: None)],
        lambda f: call,
        fresh.Effort(60, seconds=0.0),
        fresh.Stopwatch(CPU),
    )
    assert slow["ours"].calls == fresh.LEAST_CALLS


def test_peers_that_are_not_available_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    entered: list[str] = []

    @contextmanager
    def watched() -> Iterator[None]:
        entered.append("yes")
        yield

    def fail(call: Any) -> None:
        raise RuntimeError("no kernel\nmore")

    fine = fresh.Contender("ours", lambda call: None, watched)
    effort, watch = fresh.Effort(calls=10, repeats=1), fresh.Stopwatch(CPU)

    def draw(factor: float) -> Any:
        return fresh.small_scores(PLACE, 4, 0.1, factor)

    assert list(fresh.compare([fine, fresh.Contender("flash", fail)], draw, effort, watch)) == ["ours"]
    assert capsys.readouterr().out == "flash is not available: no kernel\n"
    assert len(entered) > 10
    with pytest.raises(RuntimeError, match="no kernel"):
        fresh.compare([fine, fresh.Contender("SDPA", fail)], draw, effort, watch)
    with pytest.raises(RuntimeError, match="no kernel"):
        fresh.compare([fresh.Contender("flash", fail)], draw, effort, watch)


# --- checks -----------------------------------------------------------------------------------------------------------


def test_checks_pass_on_the_cpu() -> None:
    torch.manual_seed(0)
    assert checks.check_small(PLACE, 100, 0.3, True, "polynomial") is None
    assert checks.check_small(PLACE, 100, 0.3, False, None) is None
    assert checks.check_trained(PLACE, 40, True) is None
    assert checks.check_trained(PLACE, 1, False, m=50, batch=2) is None
    assert checks.check_gradients(PLACE, 60, 50, 0.045, True, 2, (16, 8), torch.float32) is None
    assert list(checks.check_kinds(PLACE, True, 60, 70)) == []


def test_checks_find_planted_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    right = checks.attention

    def doubled(*given: Any, **how: Any) -> Any:
        return 2 * right(*given, **how)

    monkeypatch.setattr(checks, "attention", doubled)
    assert "exceeds its guarantee" in checks.check_small(PLACE, 100, 0.3, False, "polynomial")
    assert "exceeds its tolerance" in checks.check_trained(PLACE, 40, False)
    assert "relative error of 100" in checks.check_gradients(PLACE, 60, 60, 0.045, False, dtype=torch.float32)
    assert list(checks.check_kinds(PLACE, True, 60, 70)) != []
    monkeypatch.setattr(checks, "attention_plan", lambda *given, **how: SimpleNamespace(path="mixed"))
    assert "exact attention was not chosen" in checks.check_trained(PLACE, 40, False)


# --- claims -----------------------------------------------------------------------------------------------------------


def test_the_object_and_the_function_have_their_own_limits() -> None:
    share, margin = dropin.SHARE, dropin.MARGINS["object"]
    assert dropin.is_cheap(0.0349, 0.02, share, margin)
    assert not dropin.is_cheap(0.0351, 0.02, share, margin)
    assert dropin.is_cheap(1.0499, 1.0, share, margin)
    assert not dropin.is_cheap(1.0501, 1.0, share, margin)
    assert dropin.is_cheap(0.0399, 0.02, share, dropin.MARGINS["function"])
    assert not dropin.is_cheap(0.0401, 0.02, share, dropin.MARGINS["function"])


def test_claims_of_speed() -> None:
    def met(kind: str, n: int, times: float) -> list[bool]:
        peers = {"SDPA": {"median": times + 1}, "flash": {"median": times}}
        row = dropin.Row("regime", kind, n, "function", "polynomial", 1e-3, {"median": 1.0}, peers, {})
        return [*dropin.with_speed(row).claims.values()]

    assert [met("forward", 8192, 1.6), met("forward", 131072, 44.0), met("causal", 131072, 15.0)] == [[True]] * 3
    assert [met("forward", 8192, 1.59), met("forward and backward", 131072, 44.9)] == [[False]] * 2
    assert met("causal", 8192, 0.1) == met("forward", 4096, 0.1) == []


SIZES = dropin.Sizes(
    exact=(1, 16), decoding=20, batch=2, regime=(64,), gradients=64, checked=(1, 16), model=((1, 8),),
    model_dtypes=("float32",),
)  # fmt: skip


def small_bench(**changed: Any) -> Any:
    return dropin.Bench(PLACE, fresh.Effort(calls=10, seconds=0.05, repeats=2), fresh.Stopwatch(CPU), SIZES, **changed)


def test_all_sections_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = benchmark("encoder_pair")
    monkeypatch.setattr(pair, "MINILM", pair.MINILM | {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 50})
    monkeypatch.setattr(dropin, "is_cheap", lambda *_: True)
    target = tmp_path / "new" / "dropin.json"
    assert dropin.run(small_bench(), list(dropin.SECTIONS), target, False) == 0
    record = json.loads(target.read_text())
    assert {row["section"] for row in record["rows"]} == set(dropin.SECTIONS)
    assert len(record["rows"]) == 2 * (8 + 2 + 4) + 2
    assert all(row["ours"]["median"] > 0 for row in record["rows"])
    assert {row["section"] for row in record["rows"] if fresh.AGAIN in row["peers"]} == {"exact", "decoding"}
    assert {row["who"] for row in record["rows"] if row["section"] != "model"} == {"function", "object"}
    assert capsys.readouterr().out.splitlines()[-1] == "30 of 30 targets met"
    monkeypatch.setattr(dropin, "is_cheap", lambda *_: False)
    assert dropin.run(small_bench(), ["decoding"], target, False) == 1
    assert "NOT MET: decoding, one query, whole keys, n = 20, function" in capsys.readouterr().out
    assert dropin.run(small_bench(), ["decoding"], target, True) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 4 targets met (quick run: not judged)"


def test_nothing_is_measured_after_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dropin, "check_small", lambda *_: "planted")
    target = tmp_path / "dropin.json"
    assert dropin.run(small_bench(), ["exact"], target, True) == 1
    assert "not measured, because a check failed:\nplanted" in capsys.readouterr().out
    assert not target.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert dropin.main([]) == 0
    assert capsys.readouterr().out == "no CUDA GPU is available: nothing was measured\n"


def test_decoding_sees_one_key_more_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[int] = []

    def watched(q: Any, k: Any, v: Any, **how: Any) -> Any:
        keys.append(k.shape[-2])
        assert k.shape[:-1] == v.shape[:-1]
        assert q.shape == (2, 2, 1, 16)
        return v[..., :1, :]

    monkeypatch.setattr(dropin.dg, "attention", watched)
    rows = dropin.decoding_rows(small_bench())
    assert [(row.who, row.path) for row in rows] == [("function", "exact"), ("object", "exact")] * 2
    half = len(keys) // 2
    for part in (keys[:half], keys[half:]):
        distinct = sorted(set(part))
        assert distinct == list(range(distinct[0], distinct[0] + 10 + 1 + fresh.WARM_UP))
