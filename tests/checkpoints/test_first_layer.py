"""Bounds on layer 0 against enumeration by the model's own code, against random texts, and against exact arithmetic."""

import math
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from tiny_models import MODELS, tiny_model, tokens
from torch import Tensor, nn

from depthgauge.checkpoints.averaging import capped_range, first_layer_bound, largest_weight
from depthgauge.checkpoints.families import Separate, family_of
from depthgauge.checkpoints.find_blocks import find_blocks
from depthgauge.checkpoints.first_layer import Projection, Rows, first_call, read_first_layer
from depthgauge.checkpoints.load import context_length, wrap
from depthgauge.results.checkpoint_subject import FirstLayerBound, FirstLayerHead
from depthgauge.results.verdicts import AVERAGES, SELECTS, first_layer_sentences, first_layer_verdict

FACTOR = 4.0
"""The bounds of tiny models are at most this many times the largest range."""
ROTARY = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


def llama(seed: int = 0, **rotary: Any) -> Any:
    """Return a tiny Llama with other rotary positions."""
    model = tiny_model("llama", seed=seed)
    config = type(model.config)(**model.config.to_dict() | {"rope_parameters": {"rope_theta": 100.0, **rotary}})
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def typed_bert() -> Any:
    """Return a tiny BERT with three types of tokens."""
    model = tiny_model("bert")
    model.embeddings.token_type_embeddings = nn.Embedding(3, 16)
    return model.eval()


def largest_ranges(model: Any, both: bool) -> Tensor:
    """Enumerate all queries, keys and positions by the model itself, and return the largest range of a row per head.

    Texts that repeat one token give its queries and keys at all positions. `both` compares queries at all positions,
    otherwise only at the last one, which sees all distances.
    """
    checkpoint, n = wrap(model.double()), context_length(model.config)
    assert n is not None
    call = first_call(checkpoint, torch.arange(1, 40)[:, None].expand(-1, n))
    visible = call.visible(n - 1, n)
    seen = torch.ones(n, dtype=torch.bool) if visible is None else visible[0, 0, 0]
    key = call.key[:, :, seen].transpose(0, 1).flatten(1, 2)
    query = (call.query if both else call.query[:, :, -1:]).transpose(0, 1).flatten(1, 2)
    scores = call.scale * query @ key.mT
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return (scores.amax(-1) - scores.amin(-1)).amax(-1)


@pytest.mark.parametrize("name", MODELS)
def test_bounds_and_texts_against_enumeration(name: str) -> None:
    """All pairs of tokens and positions: no range exceeds the bound, and no text exceeds the largest range."""
    model = tiny_model(name)
    found = first_layer_bound(wrap(model.double()))
    assert found.refused is None
    family = family_of(model.config)
    assert family is not None
    check(found, largest_ranges(model, both=family.embeddings.positions is not None))


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("seed", range(2))
def test_other_rotary_positions_against_enumeration(kind: str, seed: int) -> None:
    model = llama(seed, **ROTARY[kind])
    check(first_layer_bound(wrap(model.double())), largest_ranges(model, both=False))


def check(found: FirstLayerBound, largest: Tensor) -> None:
    for head, true in zip(found.heads, largest.tolist(), strict=True):
        assert head.proved is not None
        assert head.attained <= true * (1 + 1e-5)  # rotary cosines are single precision
        assert true <= head.proved * (1 + 1e-5)
        assert head.proved <= FACTOR * head.attained
        assert len(head.text) == found.tokens


@torch.no_grad()
def attention(model: Any, ids: Tensor, **others: Tensor) -> Tensor:
    """Return the attention of layer 0 from transformers' own eager implementation."""
    model.set_attn_implementation("eager")
    found: Tensor = model(ids, output_attentions=True, **others).attentions[0]
    return found.double()


@pytest.mark.parametrize("name", MODELS)
def test_attention_on_random_texts_stays_within_the_bounds(name: str) -> None:
    model = tiny_model(name, seed=1)
    found = first_layer_bound(wrap(model))
    proved = torch.tensor([head.proved for head in found.heads], dtype=torch.float64)
    p = attention(model, tokens(40, batch=16))
    logs = p.log()
    ranges = logs.amax(-1) - torch.where(p > 0, logs, torch.inf).amin(-1)
    assert bool((ranges.amax((0, 2)) <= proved * (1 + 1e-4)).all())
    text = attention(model, torch.tensor([head.text for head in found.heads]))
    for head, row in zip(found.heads, text[torch.arange(4), torch.arange(4), -1], strict=True):
        assert head.weight == pytest.approx(float(row.max()), abs=1e-4)
        assert int(row.argmax()) == head.selected


def test_all_types_of_tokens_are_covered() -> None:
    model, ids = typed_bert(), tokens(30, batch=16)
    with torch.no_grad():  # tokens and positions hardly differ, types do
        model.embeddings.word_embeddings.weight.mul_(0.01)
        model.embeddings.position_embeddings.weight.mul_(0.01)
    found = first_layer_bound(wrap(model))
    p = attention(model, ids, token_type_ids=torch.randint(0, 3, ids.shape))
    ranges = (p.log().amax(-1) - p.log().amin(-1)).amax((0, 2))
    assert all(float(r) <= head.proved * (1 + 1e-4) for r, head in zip(ranges, found.heads, strict=True))
    one = attention(model, ids)
    assert bool((ranges > 10 * (one.log().amax(-1) - one.log().amin(-1)).amax((0, 2))).all())


def shrink_scores(model: Any, factor: float) -> None:
    """Multiply the queries of layer 0 by a factor, or queries and keys if one map computes both."""
    family = family_of(model.config)
    assert family is not None
    block = find_blocks(model, 3)[0]
    paths = family.projections
    with torch.no_grad():
        if family.head_norms is not None:
            gain = block.get_submodule(family.head_norms[0]).weight
            gain.copy_(factor * (gain + family.gain_offset) - family.gain_offset)
            return
        for parameter in block.get_submodule(paths.query if isinstance(paths, Separate) else paths.all).parameters():
            parameter.mul_(factor)


@pytest.mark.parametrize("name", MODELS)
def test_heads_that_are_proved_to_average_do(name: str) -> None:
    model = tiny_model(name)
    shrink_scores(model, 0.005)
    found = first_layer_bound(wrap(model))
    assert {first_layer_verdict(head) for head in found.heads} == {"averages"}
    p = attention(model, tokens(found.tokens, batch=32))[:, :, -1]  # [batch, heads, keys]
    shown = p[:, :, -found.tokens :]
    tv = (shown - 1.0 / found.tokens).abs().sum(-1) / 2
    for h, head in enumerate(found.heads):
        assert float(tv[:, h].max()) <= head.tv + 1e-6
        assert float(shown[:, h].max()) <= head.largest + 1e-6 <= 2.0 / found.tokens
        assert head.weight <= head.largest + 1e-6


@pytest.mark.parametrize("base", [2.0, 1e3, 1e9])
def test_a_part_that_all_keys_share_counts_as_far_as_it_turns(base: float) -> None:
    """A large bias of the keys, in planes that turn fast or slowly within the window."""
    model = tiny_model("qwen2")
    config = type(model.config)(
        **model.config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
    )
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.bias.add_(40.0)
    check(first_layer_bound(wrap(other.double())), largest_ranges(other, both=False))


def test_a_bias_that_all_keys_share_does_not_count_without_rotation() -> None:
    model = tiny_model("bert")
    before = first_layer_bound(wrap(model))
    with torch.no_grad():
        find_blocks(model, 3)[0].attention.self.key.bias.add_(50.0)
    after = first_layer_bound(wrap(model))
    for one, other in zip(before.heads, after.heads, strict=True):
        assert other.proved == pytest.approx(one.proved, rel=0.3)
        assert other.attained <= other.proved


@pytest.mark.parametrize("seed", range(20))
def test_rows_contain_the_exact_vectors(seed: int) -> None:
    """LayerNorm with a huge mean, then a product, then a norm inside the head, in 60 digits."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    d, k, eps = 7, 3, 10.0 ** -(seed % 13)
    x = draw(d) + 10.0 ** (seed % 9)
    W, bias, gain = draw(d, 1, k), draw(1, k), draw(k)
    layer: Any = read_first_layer(wrap(tiny_model("gpt2")), 64)
    centred = layer.centre(x[None])
    state = centred.normalized(eps)
    flat = Projection(W, bias, torch.zeros(1, dtype=torch.float64))(state)
    made = Projection(W, bias, torch.zeros(1, dtype=torch.float64), gain, eps)(state)
    with localcontext() as context:
        context.prec = 60
        number = [Decimal(value) for value in x.tolist()]
        mean = sum(number) / d
        exact = [value - mean for value in number]
        root = (sum(value * value for value in exact) / d + Decimal(eps)).sqrt()
        exact = [value / root for value in exact]
        assert inside(state, exact)
        columns = [[Decimal(value) for value in column] for column in W[:, 0].mT.tolist()]
        exact = [
            sum(a * b for a, b in zip(exact, column, strict=True)) + Decimal(c)
            for column, c in zip(columns, bias[0].tolist(), strict=True)
        ]
        assert inside(Rows(flat.mid[:, 0], flat.off[:, 0]), exact)
        root = (sum(value * value for value in exact) / k + Decimal(eps)).sqrt()
        exact = [value / root * Decimal(g) for value, g in zip(exact, gain.tolist(), strict=True)]
        assert inside(Rows(made.mid[:, 0], made.off[:, 0]), exact)


def inside(rows: Rows, exact: list[Decimal]) -> bool:
    apart = sum((Decimal(a) - b) ** 2 for a, b in zip(rows.mid[0].tolist(), exact, strict=True)).sqrt()
    return apart <= Decimal(float(rows.off[0])) < Decimal("1e-3")


def test_capped_range_and_largest_weight() -> None:
    theta = torch.tensor([0.1, 3.0, 800.0], dtype=torch.float64)
    for cap in (0.5, 30.0):
        middle = torch.linspace(-2, 2, 41, dtype=torch.float64)[:, None] * cap
        ends = cap * torch.tanh((middle + theta / 2) / cap) - cap * torch.tanh((middle - theta / 2) / cap)
        found = capped_range(theta, cap)
        assert bool((ends.amax(0) <= found).all())
        assert torch.allclose(ends.amax(0), found, rtol=1e-9)
    assert torch.equal(capped_range(theta, None), theta)
    exact = [1 / (1 + 9 * math.exp(-value)) for value in theta.tolist()]
    found = largest_weight(theta, 10)
    assert bool((found >= torch.tensor(exact, dtype=torch.float64)).all())
    assert found.tolist() == pytest.approx(exact)


def electra_with_narrow_embeddings() -> Any:
    import transformers

    settings = {"vocab_size": 40, "embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": 64}
    return transformers.ElectraModel(transformers.ElectraConfig(**settings | heads))


def llama_with_a_hook() -> Any:
    model = tiny_model("llama")
    find_blocks(model, 3)[0].self_attn.q_proj.register_forward_hook(lambda module, args, out: 1.1 * out)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: llama(rope_type="dynamic", factor=2.0), "'dynamic' depend on the length"),
        (electra_with_narrow_embeddings, "projected to the width"),
        (llama_with_a_hook, "own scores differ"),
        (lambda: tiny_model("olmo"), "'olmo' is not known"),
        (lambda: tiny_model("mpnet"), "'mpnet' is not known"),
    ],
)
def test_what_is_not_covered_is_not_bounded(make: Any, reason: str) -> None:
    found = first_layer_bound(wrap(make()))
    assert reason in str(found.refused)
    assert found.heads == ()
    (sentence,) = first_layer_sentences(found)
    assert sentence.startswith("Layer 0 is not bounded: ")


def head(index: int, proved: float | None, weight: float) -> FirstLayerHead:
    return FirstLayerHead(
        index=index, proved=proved, tv=1.0, largest=1.0, attained=0.0, weight=weight, selected=0, text=(1,)
    )


def test_proved_refuted_and_undecided_are_three_sentences() -> None:
    heads = (head(0, AVERAGES, 0.01), head(1, None, SELECTS), head(2, 5.0, 0.89), head(3, 9.0, 0.99999))
    assert math.exp(AVERAGES) < 2.0
    averages, selects, undecided = first_layer_sentences(FirstLayerBound(vocabulary=40, tokens=64, heads=heads))
    assert averages.startswith("Layer 0, 1 of 4 heads (0): proved to average")
    assert selects.startswith("Layer 0, 2 of 4 heads (1, 3): can select one token")
    assert "at least 90.0 % of the attention" in selects
    assert undecided.startswith("Layer 0, 1 of 4 heads (2): undecided")
    (alone,) = first_layer_sentences(FirstLayerBound(vocabulary=40, tokens=64, heads=heads[:1]))
    assert alone.startswith("Layer 0, all 1 head: proved")
