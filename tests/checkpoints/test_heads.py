"""Head statistics against their formulas, evaluated row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.checkpoints.blocks import attention_calls
from depthgauge.checkpoints.blocks.attention_calls import AttentionCall
from depthgauge.checkpoints.blocks.window_observer import STATIC, combine, head_statistics

LEAST = torch.finfo(torch.float64).min


def draw(seed: int, n: int, heads: int, kind: str) -> tuple[AttentionCall, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (2 * torch.randn(2, heads, n, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    i, j = torch.arange(n)[:, None], torch.arange(n)
    visible = {
        "full": torch.ones(n, n, dtype=torch.bool),
        "causal": j <= i,
        "window": (j <= i) & (j > i - 3),
        "padded": (j <= i) & (j >= 2),
    }[kind]
    mask = None if kind == "full" else torch.zeros(2, 1, n, n, dtype=torch.float64).masked_fill(~visible, LEAST)
    return AttentionCall(0, q, k, v, mask, 0.5), visible


def plain(call: AttentionCall, visible: Tensor) -> dict[str, Tensor]:
    """Compute all statistics with a loop over rows."""
    scores = 0.5 * call.query @ call.key.mT
    heads = scores.shape[1]
    rows = [i for i in range(scores.shape[2]) if visible[i].any()]
    found: dict[str, Tensor] = {name: torch.zeros(heads, dtype=torch.float64) for name in ("tv", "first", "entropy")}
    largest = {name: torch.zeros(heads, dtype=torch.float64) for name in ("range", "tv")}
    energy = torch.zeros(heads, dtype=torch.float64)
    static = torch.zeros(4, heads, dtype=torch.float64)
    for h in range(heads):
        attention, on_first, by_distance = {}, [], {}
        for b in range(2):
            for i in rows:
                seen = visible[i].nonzero()[:, 0]
                p = scores[b, h, i, seen].softmax(0)
                attention[b, i] = (seen, p)
                on_first.append(p[0])
                for j, mass in zip(seen.tolist()[1:], p[1:], strict=True):
                    by_distance.setdefault(i - j, []).append(mass)
                tv = (p - 1 / len(seen)).abs().sum() / 2
                found["tv"][h] += tv
                largest["tv"][h] = max(largest["tv"][h], tv)
                largest["range"][h] = max(
                    largest["range"][h], scores[b, h, i, seen].max() - scores[b, h, i, seen].min()
                )
                found["first"][h] += p[0]
                found["entropy"][h] -= (p * p.log()).sum()
        first = torch.stack(on_first).mean()
        profile = {distance: torch.stack(masses).mean() for distance, masses in by_distance.items()}
        for (b, i), (seen, p) in attention.items():
            values = call.value[b, h]
            out = p @ values[seen]
            energy[h] += out.square().sum()
            mean = torch.stack([first, *(profile[i - j] for j in seen.tolist()[1:])])
            before = i - 1 if i > 0 and visible[i, i - 1] else int(seen[0])
            others = [values[seen].mean(0), values[seen[0]], values[before], (mean / mean.sum()) @ values[seen]]
            for row, other in enumerate(others):
                static[row, h] += (other - out).square().sum()
    count = 2 * len(rows)
    return {
        "score_range": largest["range"],
        "tv_mean": found["tv"] / count,
        "tv_max": largest["tv"],
        "first_mass": found["first"] / count,
        "entropy": found["entropy"] / count,
        "energy": energy,
        "static": static,
    }


@pytest.mark.parametrize("kind", ["full", "causal", "window", "padded"])
@given(seed=st.integers(0, 1000), n=st.integers(1, 7), heads=st.integers(1, 2))
def test_statistics_are_their_definitions(kind: str, seed: int, n: int, heads: int) -> None:
    call, visible = draw(seed, n, heads, kind)
    output, found = head_statistics(call)
    seen = visible.any(dim=-1)
    assert torch.allclose(output[:, :, seen], call.output()[:, :, seen], atol=1e-12)
    if not seen.any():
        return
    for name, value in plain(call, visible).items():
        assert torch.allclose(getattr(found, name), value, atol=1e-9, rtol=1e-9), name


def test_statistics_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = draw(3, 9, 2, "causal")
    _, whole = head_statistics(call)
    monkeypatch.setattr(attention_calls, "BLOCK_ENTRIES", 40)
    assert len(list(call.blocks())) > 4
    _, blocked = head_statistics(call)
    for name, value in whole.to_json().items():
        assert torch.allclose(torch.tensor(value), torch.tensor(blocked.to_json()[name]), rtol=1e-12), name


def test_padding_rows_are_not_counted() -> None:
    call, _ = draw(5, 6, 2, "full")
    rows = torch.ones(2, 6, dtype=torch.bool)
    rows[:, 4:] = False
    _, found = head_statistics(call, rows)
    shorter = AttentionCall(0, call.query[:, :, :4], call.key, call.value, None, 0.5)
    p = (0.5 * shorter.query @ shorter.key.mT).softmax(-1)
    assert torch.allclose(found.tv_mean, ((p - 1 / 6).abs().sum(-1) / 2).mean(dim=(0, 2)))
    assert torch.allclose(found.energy, (p @ call.value).square().sum(dim=(0, 2, 3)))


def test_a_static_head_is_recognised() -> None:
    n = 8
    value = torch.randn(1, 4, n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    key = torch.eye(n, dtype=torch.float64).expand(1, 4, n, n)
    j = torch.arange(n)
    wanted = [j * 0, j * 0, (j - 1).clamp(min=0), (j - 2).clamp(min=0)]
    query = torch.stack([torch.nn.functional.one_hot(place, n).double() for place in wanted])[None] * 60
    query[:, 0] = 0  # all scores are equal
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(torch.ones(n, n).triu(1).bool(), LEAST)
    _, found = head_statistics(AttentionCall(0, query, key, value, mask, 1.0))
    errors = found.static_errors()
    fits = [{kind for kind, error in zip(STATIC, errors[:, h], strict=True) if error < errors[:, h].amin() + 1e-9}
            for h in range(4)]  # fmt: skip
    assert fits == [{"uniform"}, {"first", "mean"}, {"previous"}, {"mean"}]  # a fixed row is its own mean
    assert (errors.amin(dim=0) < torch.tensor([1e-9, 1e-9, 1e-9, 0.5])).all()


def test_windows_are_combined() -> None:
    parts = [head_statistics(draw(seed, 6, 2, "causal")[0])[1] for seed in (1, 2, 3)]
    together = combine([part.to_json() for part in parts])
    assert torch.equal(together.score_range, torch.stack([p.score_range for p in parts]).amax(0))
    assert torch.allclose(together.tv_mean, torch.stack([p.tv_mean for p in parts]).mean(0))
    assert torch.allclose(together.static, sum(p.static for p in parts))  # type: ignore[arg-type]
    assert combine([together.to_json()]) == together
