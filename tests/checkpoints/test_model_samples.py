"""Sampling from a model: exact distribution, agreement with sampling without a cache, and its limits."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from scipy import stats
from tiny_models import DECODERS, tiny_model

from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.tasks import language
from depthgauge.checkpoints.tasks.language import draw, even_rows, fitting_rows, ordinary_tokens, sample_windows
from depthgauge.checkpoints.weights.load import Checkpoint, wrap


def tiny(name: str, **settings: Any) -> Checkpoint:
    """A tiny model whose distributions are neither flat nor concentrated on one token."""
    model = tiny_model(name, seed=3, spread=settings.pop("spread", 0.4))
    for key, value in settings.items():
        setattr(model.config, key, value)
        setattr(model.generation_config, key, value)
    return wrap(model)


def small_vocabulary() -> Checkpoint:
    """A llama with six tokens: 0 pads, 1 begins, 2 ends, 3 to 5 are words."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, vocab_size=6,
        max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return wrap(model)


def probability(checkpoint: Checkpoint, prefix: list[int], forbidden: set[int]) -> torch.Tensor:
    """The exact next-token distribution after a prefix, by one forward pass without a cache."""
    with torch.no_grad():
        logits = checkpoint.model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1].double()
    weights = [0.0 if v in forbidden else float(x.exp()) for v, x in enumerate(logits)]
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def test_the_distribution_of_whole_windows_is_the_models() -> None:
    checkpoint, count = small_vocabulary(), 4000
    ids = sample_windows(checkpoint, windows=count, window=4, before=[1], seed=5)
    expected = {}
    for first, second, third in product((3, 4, 5), range(1, 6), range(1, 6)):
        one = probability(checkpoint, [1, first], {0})[second]
        two = probability(checkpoint, [1, first, second], {0})[third]
        expected[first, second, third] = float(one * two) / 3
    assert sum(expected.values()) == pytest.approx(1)
    seen = Counter(tuple(row) for row in ids[:, 1:].tolist())
    assert set(seen) <= set(expected)
    assert set(ids[:, 0].tolist()) == {1}
    likely = [key for key in expected if count * expected[key] >= 5]
    rest = [key for key in expected if key not in likely]
    observed = [seen[key] for key in likely] + ([sum(seen[key] for key in rest)] if rest else [])
    predicted = [count * expected[key] for key in likely] + ([count * sum(map(expected.get, rest))] if rest else [])
    assert len(likely) > 30
    assert stats.chisquare(observed, predicted).pvalue > 1e-3
    # The test can fail: windows drawn at another temperature or in which the first token is not uniform.
    other = [count * p**1.3 / sum(q**1.3 for q in expected.values()) for p in expected.values()]
    assert stats.chisquare([seen[key] for key in expected], other).pvalue < 1e-3


def plain_windows(checkpoint: Checkpoint, ids: torch.Tensor, uniform: torch.Tensor, allowed: list[int]) -> torch.Tensor:
    """Continue each window alone, without a cache, by walking through the distribution until its sum exceeds u."""
    rows = []
    for prompt, numbers in zip(ids.tolist(), uniform.tolist(), strict=True):
        for u in numbers:
            p = probability(checkpoint, prompt, set(range(40)) - set(allowed))
            total, token = 0.0, -1
            while total <= u:
                token += 1
                total += float(p[token])
            prompt = [*prompt, token]
        rows.append(prompt)
    return torch.tensor(rows)


@pytest.mark.parametrize("name", [*DECODERS, "mamba", "mamba2", "lfm2", "nemotron_h"])
def test_the_cache_changes_no_token(name: str) -> None:
    """With its cache, NemotronH of transformers has probabilities that are off by up to 0.005: few draws notice it."""
    checkpoint = tiny(name)
    ids = sample_windows(checkpoint, windows=3, window=16, before=[1], seed=11, batch=2)
    uniform = torch.rand(3, 15, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    allowed = list(range(40)) if checkpoint.config.pad_token_id is None else list(range(1, 40))
    assert torch.equal(ids, plain_windows(checkpoint, ids[:, :2], uniform[:, 1:], allowed))
    starts = [v for v in range(40) if v not in {1, 2, checkpoint.config.pad_token_id}]
    assert ids[:, 1].tolist() == [starts[int(u * len(starts))] for u in uniform[:, 0].tolist()]
    assert len({tuple(row) for row in ids.tolist()}) == 3


def test_the_first_token_is_uniform() -> None:
    ids = sample_windows(tiny("llama"), windows=3700, window=3, before=[1], seed=0)
    seen = Counter(ids[:, 1].tolist())
    assert set(seen) == set(range(3, 40))  # no special token
    assert stats.chisquare([seen[v] for v in range(3, 40)]).pvalue > 1e-3
    alone = sample_windows(tiny("llama"), windows=400, window=2, before=[], seed=0, starts=[7, 9])
    assert set(alone[:, 0].tolist()) == {7, 9}
    two = sample_windows(tiny("llama"), windows=5, window=6, before=[1, 8], seed=0)
    assert (two[:, :2] == torch.tensor([1, 8])).all()
    assert two.shape == (5, 6)


def test_prompts_are_continued() -> None:
    checkpoint = tiny("llama")
    prompts = torch.randint(3, 40, (5, 6), generator=torch.Generator().manual_seed(0))
    ids = sample_windows(checkpoint, windows=5, window=16, before=[1], prompts=prompts, seed=11, batch=2)
    uniform = torch.rand(5, 15, generator=torch.Generator().manual_seed(11), dtype=torch.float64)[:, 6:]
    started = torch.cat([torch.ones(5, 1, dtype=torch.int64), prompts], dim=1)
    assert torch.equal(ids, plain_windows(checkpoint, started, uniform, list(range(1, 40))))


def test_batches_change_no_token_and_seeds_do() -> None:
    checkpoint = tiny("gemma2")

    def sampled(**settings: Any) -> torch.Tensor:
        return sample_windows(checkpoint, **({"windows": 7, "window": 20, "before": [1], "seed": 2} | settings))

    alone = sampled()
    assert all(torch.equal(alone, sampled(batch=rows)) for rows in (1, 3, 7, 50))
    assert torch.equal(alone[:4], sampled(windows=4))
    assert not torch.equal(alone, sampled(seed=3))


def test_an_offloaded_model_gives_the_same_windows() -> None:
    """Accelerate keeps the weights elsewhere, as with a device map, and moves them in for every forward pass."""
    from accelerate import cpu_offload

    made = []
    for offloaded in (False, True):
        checkpoint = tiny("qwen3")
        if offloaded:
            cpu_offload(checkpoint.model, execution_device=torch.device("cpu"))
        made.append(sample_windows(checkpoint, windows=4, window=12, before=[1], seed=0))
    assert torch.equal(*made)


def test_half_precision_logits_are_converted() -> None:
    checkpoint = tiny("llama")
    checkpoint.model.bfloat16()
    ids = sample_windows(checkpoint, windows=50, window=12, before=[1], seed=0)
    assert ids.dtype == torch.int64
    assert len({tuple(row) for row in ids.tolist()}) == 50


def test_windows_continue_after_eos_and_never_pad() -> None:
    checkpoint = tiny("llama", spread=0.2)
    ids = sample_windows(checkpoint, windows=60, window=32, before=[1], seed=0)
    ends = [(row, place) for row, place in (ids == 2).nonzero().tolist() if place < 31]
    assert ends
    assert len({int(ids[row, place + 1]) for row, place in ends}) > 5
    assert not (ids == 0).any()
    for other in ({"pad_token_id": 0, "eos_token_id": [2, 0]}, {"pad_token_id": 0, "bos_token_id": 0}):
        same = tiny("llama", spread=0.2, **other)
        assert (sample_windows(same, windows=60, window=32, before=[1], seed=0) == 0).any()


def test_inversion_draws_no_token_of_probability_zero() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(4, 1)
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniform)[0].tolist() == [1, 1, 3, 3]
    allowed = torch.tensor([1, 2, 4])
    assert draw(torch.zeros(4, 5), torch.tensor([0.0, 0.3, 0.5, 0.9]), allowed)[0].tolist() == [1, 1, 2, 4]
    half = draw(logits.half(), uniform)[0]
    assert half.tolist() == [1, 1, 3, 3]
    broken = draw(torch.tensor([[0.0, torch.nan], [0.0, 1.0]]), torch.tensor([0.5, 0.5]))
    assert broken[1].tolist() == [False, True]


def test_progress_and_the_number_of_rows() -> None:
    seen: list[tuple[int, int, str]] = []
    checkpoint = tiny("llama")

    def step(done: int, total: int, label: str) -> None:
        seen.append((done, total, label))

    sample_windows(checkpoint, windows=5, window=6, before=[1], seed=0, batch=2, progress=step)
    assert [done for done, _, _ in seen] == list(range(1, 13))
    assert {total for _, total, _ in seen} == {12}
    assert seen[0][2] == "sample windows 1–2 of 5"
    assert seen[-1][2] == "sample windows 5–5 of 5"
    assert fitting_rows(checkpoint, 64, 2**40) == language.MOST_ROWS >= 32
    per_row = 2 * 3 * 2 * 4 * 64 * 4 + 40 * 32  # keys and values of 3 layers with 2 heads of 4, and the logits
    for holds, expected in ((128, 128), (127, 64), (33, 32), (1.5, 1), (0.1, 1)):
        assert fitting_rows(checkpoint, 64, int(holds * per_row / language.MEMORY_SHARE)) == expected
    assert [even_rows(n, 32) for n in (1, 32, 33, 96, 100)] == [1, 32, 17, 32, 25]


class Token:
    def __init__(self, special: bool) -> None:
        self.special = special


class Tokenizer:
    """As many tokens as `size`; some added ones, one of them special but not in `all_special_ids`."""

    all_special_ids = (1, 4)
    added_tokens_decoder = {5: Token(True), 6: Token(False)}  # noqa: RUF012

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def test_ordinary_tokens_are_neither_special_nor_unknown_to_the_tokenizer() -> None:
    assert ordinary_tokens(tiny("llama"), Tokenizer(9)) == [3, 6, 7, 8]
    assert ordinary_tokens(tiny("llama"), Tokenizer(50))[-1] == 39


def test_a_model_without_a_cache_is_refused() -> None:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()
    with pytest.raises(
        CheckpointError, match="cannot be sampled: OpenAIGPTLMHeadModel returns no KV cache; give a text"
    ):
        sample_windows(wrap(model, "tiny"), windows=2, window=8, before=[1], seed=0)


def test_a_cache_that_mixes_windows_is_refused() -> None:
    checkpoint = wrap(tiny_model("rwkv"), "tiny")
    with pytest.raises(
        CheckpointError, match=r"RwkvForCausalLM returns logits for \[2, 2\] instead of \[2, 1\] windows"
    ):
        sample_windows(checkpoint, windows=2, window=8, before=[1], seed=0)
    assert sample_windows(checkpoint, windows=2, window=8, before=[1], seed=0, batch=1).shape == (2, 8)


def test_logits_that_are_not_finite_are_refused() -> None:
    checkpoint = tiny("llama")
    with torch.no_grad():
        checkpoint.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="cannot be sampled in float32: its logits are not finite; use another"):
        sample_windows(checkpoint, windows=1, window=8, before=[1], seed=0)
