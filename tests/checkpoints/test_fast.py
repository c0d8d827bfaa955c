"""Fast attention as an implementation of transformers: within its tolerance, and exact for unsupported masks."""

import gc
import weakref
from typing import Any

import pytest
import torch
from tiny_models import MODELS, tiny_model, tokens
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks import attention_calls
from depthgauge.checkpoints.blocks.attention_calls import (
    FAST_NAME,
    AttentionCall,
    attending,
    layer_plan,
    register_attention,
)
from depthgauge.checkpoints.blocks.block_runner import Stack
from depthgauge.checkpoints.weights.load import Checkpoint, wrap
from depthgauge.fast_attention.attention import Attention
from depthgauge.results.gauge_record import FastPlan


def final(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_implementation_agrees_with_eager_attention(name: str, padded: bool) -> None:
    """At these sizes the exact path is cheapest, so only rounding may differ."""
    model, ids = tiny_model(name), tokens()
    mask = None
    if padded:
        mask = torch.ones(2, 11, dtype=torch.long)
        mask[1, :3] = 0
    model.set_attn_implementation("eager")
    stock = final(model, ids, mask)
    register_attention(1e-6)
    model.set_attn_implementation(FAST_NAME)
    ours = final(model, ids, mask)
    real = slice(None) if mask is None else mask.bool()
    assert (ours - stock)[real].abs().max() < 3e-5 * stock[real].abs().max()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_small_scores_use_a_polynomial_within_the_tolerance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(name, spread=0.08), tokens(32, batch=1)
    outputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    class Forced(Attention):
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **keywords: Any) -> Tensor:
            exact = super().__call__(q, k, v, *rest, **keywords, force="exact")
            rough = super().__call__(q, k, v, *rest, **keywords, force="polynomial")
            outputs.append((exact, rough, v))
            return rough

    monkeypatch.setattr(attention_calls, "Attention", Forced)
    register_attention(1e-2)
    model.set_attn_implementation(FAST_NAME)
    final(model, ids)
    assert len(outputs) == 3
    for exact, rough, v in outputs:
        spread = (v.amax(dim=-2) - v.amin(dim=-2)).repeat_interleave(exact.shape[1] // v.shape[1], dim=1)
        share = ((exact - rough).abs().amax(dim=-2) / spread).max()
        assert 0 < share <= 1e-2 + 1e-5


def test_every_layer_has_an_object_that_ends_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Attention]] = []

    class Watched(Attention):
        def __init__(self, tolerance: float) -> None:
            super().__init__(tolerance)
            made.append(weakref.ref(self))

    monkeypatch.setattr(attention_calls, "Attention", Watched)
    register_attention(1e-2)
    before = len(made)
    models = [tiny_model("llama") for _ in range(2)]
    for model in models:
        model.set_attn_implementation(FAST_NAME)
        for _ in range(2):
            final(model, tokens())
    assert len(made) - before == sum(model.config.num_hidden_layers for model in models)
    del model
    models.clear()
    gc.collect()
    assert [ref() for ref in made[before:]] == [None] * (len(made) - before)


def test_unsupported_arguments_raise_an_error() -> None:
    model = tiny_model("llama")
    register_attention()
    model.set_attn_implementation(FAST_NAME)
    with pytest.raises(InputError, match="'depthgauge' does not support s_aux"):
        model(input_ids=tokens(), s_aux=torch.zeros(4))
    with pytest.raises(InputError, match="tolerance must be a positive number"):
        register_attention(0.0)


def fast_plans(checkpoint: Checkpoint, ids: Tensor) -> list[FastPlan]:
    plans: list[FastPlan] = []

    def watch(call: AttentionCall) -> Tensor:
        plans.append(layer_plan(call))
        return call.output()

    with attending(checkpoint.model) as session:
        Stack(checkpoint, session).run(ids, watch=watch)
    return plans


def test_plans_list_the_polynomial_heads() -> None:
    small, large = wrap(tiny_model("llama", spread=0.05)), wrap(tiny_model("llama", spread=2.0))
    ids = tokens(24, batch=1)
    for index, layer in enumerate(fast_plans(large, ids)):
        assert layer.heads == ()
        assert layer.line.startswith(f"layer {index}: no head of 4 (B from ")
        assert len(layer.bounds) == 4
    assert max(fast_plans(small, ids)[0].bounds) < min(fast_plans(large, ids)[0].bounds)
    (window, *_) = fast_plans(wrap(tiny_model("mistral")), ids)
    assert window.line == "layer 0: no head of 4 (its mask is neither causal nor empty)"
    assert fast_plans(wrap(tiny_model("gemma2")), ids)[1].line == "layer 1: no head of 4 (its scores are capped)"


def test_long_sequences_with_small_scores_use_a_polynomial() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.05 * torch.randn(1, 2, 4096, 8, generator=generator) for _ in range(3))
    q[:, 1] *= 400
    plan = layer_plan(AttentionCall(3, q, k, v, None, 1.0))
    assert plan.heads == (0,)
    assert plan.line.startswith("layer 3: heads 0 of 2 (B from ")
