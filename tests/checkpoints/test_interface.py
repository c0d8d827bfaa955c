"""Observed attention equals stock attention: padded, windowed, capped, grouped, with and without a watch."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import DECODERS, ENCODERS, MODELS, tiny_model, tokens

from depthgauge.checkpoints.blocks import attention_calls
from depthgauge.checkpoints.blocks.attention_calls import AttentionCall, attending, attention_call, register
from depthgauge.checkpoints.blocks.window_observer import head_statistics
from depthgauge.checkpoints.source.library import quiet


def final(model: object, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    with torch.no_grad(), quiet():
        out = model(input_ids=ids, attention_mask=mask)  # type: ignore[operator]
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def padding(side: str) -> torch.Tensor | None:
    if side == "none":
        return None
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    return mask if side == "left" else mask.flip(1)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_equal_stock_eager(name: str, side: str) -> None:
    model, ids, mask = tiny_model(name), tokens(), padding(side)
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    stock = final(model, ids, mask)
    model.set_attn_implementation(own)
    real = slice(None) if mask is None else mask.bool()
    with attending(model) as session:
        session.begin()
        unwatched = final(model, ids, mask)
        assert session.calls == 3
        seen = []

        def watch(call: AttentionCall) -> torch.Tensor:
            output, statistics = head_statistics(call, None if mask is None else mask.bool())
            seen.append(statistics)
            return output

        session.begin(watch=watch)
        watched = final(model, ids, mask)
    assert model.config._attn_implementation == own
    assert len(seen) == 3
    scale = stock[real].abs().max()
    assert scale > 0.1
    assert (unwatched - stock)[real].abs().max() < 2e-5 * scale
    assert (watched - stock)[real].abs().max() < 2e-5 * scale


@pytest.mark.parametrize("name", ["mistral", "llama", "bert"])
def test_without_the_mask_function_outputs_are_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mask function the outputs are wrong by a wide margin, so the test above can fail."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    model, ids, mask = tiny_model(name), tokens(), padding("left")
    model.set_attn_implementation("eager")
    stock = final(model, ids, mask)
    register()
    monkeypatch.setattr(attention_calls, "register", lambda: None)
    monkeypatch.delitem(type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping, attention_calls.NAME)
    with attending(model) as session:
        session.begin()
        maskless = final(model, ids, mask)
    assert (maskless - stock)[mask.bool()].abs().max() > 0.05  # type: ignore[union-attr]


def test_uniform_attention_averages_the_visible_values() -> None:
    model, ids = tiny_model("llama"), tokens(batch=1)
    seen: list[AttentionCall] = []

    def watch(call: AttentionCall) -> torch.Tensor:
        seen.append(call)
        return call.output()

    with attending(model) as session:
        session.begin(watch=watch, uniform=1)
        final(model, ids, None)
    values = seen[1].value
    average = values.cumsum(dim=-2) / torch.arange(1, 12)[:, None]
    assert torch.allclose(seen[1].output(), average, atol=1e-6)
    assert not torch.allclose(seen[0].output(), seen[0].value.cumsum(dim=-2) / torch.arange(1, 12)[:, None], atol=1e-2)


def test_blocks_of_rows_make_up_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 4, generator=generator) for _ in range(3))
    mask = torch.zeros(2, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), torch.finfo(torch.float32).min)
    call = AttentionCall(0, q, k, v, mask, 0.7, softcap=1.5)
    scores = torch.tanh(0.7 * q @ k.mT / 1.5) * 1.5 + mask
    for entries in (1, 100, 10**6):
        monkeypatch.setattr(attention_calls, "BLOCK_ENTRIES", entries)
        blocks = list(call.blocks())
        assert torch.allclose(torch.cat([b.p for b in blocks], dim=-2), scores.softmax(-1), atol=1e-7)
        assert all(b.p.numel() <= max(entries, 42) for b in blocks)
    assert torch.allclose(call.output(), scores.softmax(-1) @ v, atol=1e-6)


def test_a_mask_with_one_row_holds_for_all_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 4, generator=generator) for _ in range(3))
    shown = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    shown[1, ..., 5:] = False
    output, _ = head_statistics(attention_call(q, k, v, shown, None, None))
    assert torch.allclose(output, F.scaled_dot_product_attention(q, k, v, shown), atol=1e-6)


def test_half_precision_is_softmaxed_in_float32() -> None:
    q, k, v = (torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    (block,) = AttentionCall(0, q, k, v, None, 1.0).blocks()
    assert block.p.dtype == torch.bfloat16
    assert torch.equal(block.p, torch.softmax((q @ k.mT).float(), -1).bfloat16())


def test_the_tiny_models_cover_both_kinds() -> None:
    assert len(DECODERS) >= 9
    assert len(ENCODERS) >= 4


def test_each_model_has_its_own_session() -> None:
    """Calls of a model go to its own session, also while another model is observed; nested contexts are restored."""
    first, second, ids = tiny_model("llama"), tiny_model("gpt2"), tokens(batch=1)
    with attending(first) as outer, attending(second) as other:
        final(first, ids, None)
        assert (outer.calls, other.calls) == (3, 0)
        final(second, ids, None)
        assert (outer.calls, other.calls) == (3, 3)
        with attending(first) as inner:
            final(first, ids, None)
            assert (outer.calls, inner.calls) == (3, 3)
        final(first, ids, None)
        assert (outer.calls, inner.calls, other.calls) == (6, 3, 3)
    own = dict(first.named_modules())
    assert not any("session" in name for module in own.values() for name in vars(module))


def test_a_session_ends_with_an_error() -> None:
    model, ids = tiny_model("llama"), tokens(batch=1)
    own = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="stop"), attending(model):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == own
    assert not any("session" in name for module in model.modules() for name in vars(module))
    model.set_attn_implementation("eager")
    stock = final(model, ids, None)
    with attending(model) as session:
        assert torch.allclose(final(model, ids, None), stock, atol=1e-5)
        assert session.calls == 3
