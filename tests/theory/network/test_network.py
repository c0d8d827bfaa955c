"""The forward pass against plain loops for all settings, gradients, traces, copies, clipping and rescaling."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain import plain_forward, plain_head
from torch import Tensor

from depthgauge import SelfAttentionNetwork, random_network
from depthgauge.base.errors import InputError
from depthgauge.theory.network.network import Layer, Mlp, softmax_attention


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_random_norms(network: SelfAttentionNetwork) -> SelfAttentionNetwork:
    """Perturb the LayerNorm weights, so that swapping them changes the output."""
    with torch.no_grad():
        for index, layer in enumerate(network):
            if layer.norm_weight is not None and layer.norm_bias is not None:
                layer.norm_weight.add_(0.3 * normal(*layer.norm_weight.shape, seed=index))
                layer.norm_bias.add_(0.3 * normal(*layer.norm_bias.shape, seed=index + 100))
    return network


SETTINGS = [
    {"skip": skip, "causal": causal, "norm": norm, "key_dim": key_dim, **mlp}
    for skip, causal, norm, key_dim, mlp in itertools.product(
        (True, False),
        (True, False),
        ("none", "pre", "post", "pre-rms", "post-rms"),
        (2, 5, 9),  # below, at and above the width of a token
        (
            {},
            {"mlp": 7, "activation": "relu"},
            {"mlp": 3, "activation": "gelu"},
            {"mlp": 7, "activation": "gelu", "mlp_skip": True},
        ),
    )
]


def test_forward_is_the_plain_loop_for_all_settings() -> None:
    x = normal(6, 5)
    for switches in SETTINGS:
        network = with_random_norms(random_network(3, 2, 5, 1.0, seed=1, **switches))  # type: ignore[arg-type]
        with torch.no_grad():
            assert torch.allclose(network(x), plain_forward(network, x), rtol=1e-10, atol=1e-12), switches


def test_no_two_settings_compute_the_same() -> None:
    """All settings give different outputs, so the test above would notice if a setting were ignored."""
    x = normal(6, 5)
    outs = [with_random_norms(random_network(3, 2, 5, 1.0, seed=1, **s))(x).detach() for s in SETTINGS]  # type: ignore[arg-type]
    for a, b in itertools.combinations(range(len(outs)), 2):
        assert not torch.allclose(outs[a], outs[b], atol=1e-6), (SETTINGS[a], SETTINGS[b])


@pytest.mark.parametrize("causal", [False, True])
def test_float32_is_float64_to_seven_digits(causal: bool) -> None:
    wide = random_network(4, 3, 8, 0.5, causal=causal, mlp=6, mlp_skip=True, norm="pre", seed=2)
    narrow = wide.copy().to(torch.float32)
    assert narrow.dtype == torch.float32
    x = normal(2, 7, 8)
    out = narrow(x.float())
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), wide(x), atol=2e-5)
    assert not torch.equal(out.double(), wide(x))


@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3), (0,), (2, 1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_batches_are_inputs_side_by_side(batch: tuple[int, ...], causal: bool) -> None:
    network = random_network(2, 3, 4, 0.8, key_dim=2, causal=causal, seed=3)
    x = normal(*batch, 5, 4)
    out = network(x)
    assert out.shape == x.shape
    for index in itertools.product(*map(range, batch)):
        assert torch.allclose(out[index], plain_forward(network, x[index]), atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_one_token_attends_to_itself(causal: bool) -> None:
    network = random_network(2, 2, 3, 0.5, causal=causal, seed=4)
    x = normal(1, 3)
    expected = x
    for layer in network:
        expected = expected + expected @ layer.value.sum(dim=0)
    assert torch.allclose(network(x), expected, atol=1e-14)


def uneven_network(scale: float | None) -> SelfAttentionNetwork:
    """A network whose layers differ in the number of heads and in key width."""
    layers = [
        Layer(normal(h, 4, k, seed=h), normal(h, 4, k, seed=k), normal(h, 4, 4, seed=h + k) / 3)
        for h, k in ((1, 2), (3, 6), (2, 4))
    ]
    return SelfAttentionNetwork(layers, scale=scale)


def test_layers_may_differ_in_heads_and_key_width() -> None:
    network = uneven_network(scale=0.37)
    x = normal(5, 4, seed=9)
    assert torch.allclose(network(x), plain_forward(network, x), atol=1e-12)
    assert [layer.heads for layer in network] == [1, 3, 2]
    with pytest.raises(InputError, match=r"key widths \[2, 4, 6\].*scale"):
        uneven_network(scale=None)


def test_the_default_scale_is_one_over_root_k() -> None:
    assert random_network(1, 1, 8, 0.1, key_dim=4).scale == 0.5
    assert random_network(1, 1, 9, 0.1).scale == 1 / 3


@pytest.mark.parametrize("heads", [1, 2])
def test_tokens_are_rows_and_a_permutation_of_them_permutes_the_output(heads: int) -> None:
    network = random_network(3, heads, 4, 0.7, seed=5)
    x = normal(6, 4)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.allclose(network(x[order]), network(x)[order], atol=1e-12)


def test_causal_tokens_do_not_see_the_future() -> None:
    network = random_network(3, 2, 4, 0.7, causal=True, seed=5)
    x = normal(6, 4)
    changed = x.clone()
    changed[4:] += 1
    assert torch.allclose(network(changed)[:4], network(x)[:4], atol=1e-14)
    assert not torch.allclose(network(changed)[4:], network(x)[4:], atol=1e-2)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"causal": True},
        {"key_dim": 2},
        {"key_dim": 5, "skip": False},
        {"mlp": 4, "activation": "gelu", "norm": "pre"},
    ],
    ids=str,
)
def test_gradients_of_inputs_and_weights(switches: dict[str, object]) -> None:
    network = random_network(2, 2, 3, 0.8, seed=6, **switches)  # type: ignore[arg-type]
    names = [name for name, _ in network.named_parameters()]
    weights = [parameter.detach().requires_grad_() for parameter in network.parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        out = torch.func.functional_call(network, dict(zip(names, values, strict=True)), (x,))
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(run, (normal(4, 3).requires_grad_(), *weights), atol=1e-7)


def test_another_attention_function_is_used_with_the_meaning_of_torchs() -> None:
    network = random_network(2, 3, 4, 0.8, key_dim=2, causal=True, seed=7)
    x = normal(2, 5, 4)
    calls = []

    def by_hand(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        calls.append((query.shape, key.shape, value.shape, is_causal, scale))
        scores = query @ key.mT * scale
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ value

    assert torch.allclose(network(x, attention=by_hand), network(x), atol=1e-13)
    assert calls == [((2, 3, 5, 2), (2, 3, 5, 2), (2, 3, 5, 4), True, network.scale)] * 2
    assert torch.equal(network(x, attention=lambda q, k, v, **_: torch.zeros_like(v)), x)


@given(
    heads=st.integers(1, 3), n=st.integers(1, 5), k=st.integers(1, 5), d=st.integers(1, 5), causal=st.booleans(),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_softmax_attention_for_any_widths(heads: int, n: int, k: int, d: int, causal: bool, seed: int) -> None:
    q, key, v = (normal(heads, n, w, seed=seed + i) for i, w in enumerate((k, k, d)))
    out = softmax_attention(q, key, v, is_causal=causal, scale=0.7)
    scores = 0.7 * q @ key.mT
    if causal:
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    assert torch.allclose(out, torch.softmax(scores, -1) @ v, atol=1e-13)


# --- traces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["none", "pre", "post", "pre-rms", "post-rms"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_trace_passes_the_states_and_ends_at_the_output(norm: str, causal: bool) -> None:
    network = with_random_norms(random_network(3, 2, 4, 0.8, mlp=5, norm=norm, causal=causal, seed=8))
    x = normal(2, 6, 4)
    state = x
    for index, seen in enumerate(network.trace(x)):
        assert seen.index == index
        assert torch.equal(seen.before, state)
        state = network.step(index, state).detach()
        assert torch.equal(seen.after, state)
        assert not seen.after.requires_grad
    assert index == 2
    assert torch.allclose(state, network(x), atol=1e-14)


@pytest.mark.parametrize("entries", [1, 7, 36, 100, 10**6])
@pytest.mark.parametrize("causal", [False, True])
def test_blocked_scores_are_the_dense_ones(entries: int, causal: bool) -> None:
    network = random_network(2, 3, 4, 0.8, key_dim=2, causal=causal, norm="pre", seed=9)
    x = normal(2, 6, 4)
    for seen in network.trace(x):
        layer = network[seen.index]
        blocks = list(seen.score_blocks(entries=entries))
        assert [b.start for b in blocks] == [0, *[b.stop for b in blocks[:-1]]]
        assert blocks[-1].stop == 6
        rows_a_block = max(1, entries // (2 * 3 * 6))
        assert all(b.stop - b.start <= rows_a_block for b in blocks)
        scores = torch.cat([b.scores for b in blocks], dim=-2)
        ranges = torch.cat([b.row_ranges() for b in blocks], dim=-1)
        for s, h in itertools.product(range(2), range(3)):
            read = seen.attention_input[s]
            dense = network.scale * (read @ layer.query[h]) @ (read @ layer.key[h]).T
            for i in range(6):
                visible = i + 1 if causal else 6
                assert torch.allclose(scores[s, h, i, :visible], dense[i, :visible], atol=1e-13)
                assert bool((scores[s, h, i, visible:] == -torch.inf).all())
                expected = dense[i, :visible].max() - dense[i, :visible].min()
                assert ranges[s, h, i].item() == pytest.approx(expected.item(), abs=1e-13)
            P, _ = plain_head(read, layer.query[h], layer.key[h], layer.value[h], network.scale, causal)
            assert torch.allclose(torch.softmax(scores[s, h], -1), P, atol=1e-13)


# --- copies, clipping, rescaling -------------------------------------------------------------------------------------


def test_a_copy_shares_nothing() -> None:
    network = random_network(2, 2, 3, 0.5, mlp=4, norm="pre", mlp_skip=True, activation="gelu", seed=10)
    network.other_metadata = {"colour": "red"}
    twin = network.copy()
    x = normal(4, 3)
    before = network(x).detach()
    assert torch.equal(twin(x), before)
    assert twin.describe() == network.describe()
    assert twin.provenance == network.provenance
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    twin.provenance["made_by"] = "nobody"
    twin.other_metadata["colour"] = "blue"
    assert torch.equal(network(x), before)
    assert network.provenance["made_by"] == "random_network"
    assert network.other_metadata == {"colour": "red"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(eta=st.floats(1e-3, 2))
def test_clip_bounds_every_attention_weight_and_nothing_else(dtype: torch.dtype, eta: float) -> None:
    network = random_network(2, 2, 3, 1.0, mlp=4, dtype=dtype, seed=11)
    clipped = network.clip(eta)
    assert clipped.eta <= eta
    assert clipped.eta >= min(eta, network.eta) * (1 - torch.finfo(dtype).eps)
    for a, b in zip(network, clipped, strict=True):
        inside = a.query.abs() <= clipped.eta
        assert torch.equal(a.query[inside], b.query[inside])
        assert a.mlp is not None
        assert b.mlp is not None
        assert torch.equal(a.mlp.w_in, b.mlp.w_in)
    assert network.eta > 0.9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(eta=st.floats(1e-30, 1e30))
def test_rescale_sets_the_largest_weight(dtype: torch.dtype, eta: float) -> None:
    network = random_network(2, 2, 3, 0.3, dtype=dtype, seed=12)
    scaled = network.rescale(eta)
    assert scaled.eta <= eta
    assert scaled.eta == pytest.approx(eta, rel=1e-6)
    assert torch.allclose(scaled[1].value.double() / eta, network[1].value.double() / network.eta, rtol=1e-5)


def test_rescale_from_the_smallest_weights_to_the_largest() -> None:
    """The factor overflows; the weights must not."""
    tiny = random_network(1, 1, 2, 1e-310, seed=0)
    with torch.no_grad():
        tiny[0].key[0, 0, 0] = 0.0
    scaled = tiny.rescale(1e300)
    assert scaled.eta == pytest.approx(1e300)
    for name in ("query", "key", "value"):
        expected = getattr(tiny[0], name) / tiny.eta
        assert torch.allclose(getattr(scaled[0], name) / 1e300, expected, rtol=1e-9, atol=0)


def test_weights_of_zero_cannot_be_rescaled() -> None:
    zero = torch.zeros(1, 2, 2, dtype=torch.float64)
    with pytest.raises(InputError, match="all zero"):
        SelfAttentionNetwork([Layer(zero, zero, zero)]).rescale(1.0)


@pytest.mark.parametrize("eta", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_must_be_positive(eta: float) -> None:
    network = random_network(1, 1, 2, 0.1)
    for change in (network.clip, network.rescale):
        with pytest.raises(InputError, match="eta must be a positive number"):
            change(eta)


# --- invalid networks and inputs -------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_named() -> None:
    q, v = torch.ones(2, 3, 4), torch.ones(2, 3, 3)
    with pytest.raises(InputError, match=r"layers\.1\.query must have shape \[2, 3, 4\], got \[2, 5, 4\]"):
        SelfAttentionNetwork([Layer(q, q, v), Layer(torch.ones(2, 5, 4), torch.ones(2, 5, 4), torch.ones(2, 5, 5))])
    with pytest.raises(InputError, match=r"layers\.0\.norm\.weight must have shape \[1, 3\], got no tensor"):
        SelfAttentionNetwork([Layer(q, q, v)], norm="pre")
    with pytest.raises(InputError, match="at least one layer"):
        SelfAttentionNetwork([])
    with pytest.raises(InputError, match=r"layers\.1\.query is torch\.float64 in a network of torch\.float32"):
        SelfAttentionNetwork([Layer(q, q, v), Layer(q.double(), q.double(), v.double())])
    with pytest.raises(InputError, match="float64 or float32"):
        SelfAttentionNetwork([Layer(q.half(), q.half(), v.half())])
    mlp = Mlp(torch.ones(3, 0), torch.ones(0), torch.ones(0, 3), torch.ones(3))
    with pytest.raises(InputError, match="no width may be 0"):
        SelfAttentionNetwork([Layer(q, q, v, mlp=mlp)])
    with pytest.raises(InputError, match="did you mean 'relu'"):
        SelfAttentionNetwork([Layer(q, q, v)], activation="rlu")
    with pytest.raises(InputError, match="norm must be one of none, pre, post"):
        SelfAttentionNetwork([Layer(q, q, v)], norm="batch")
    with pytest.raises(InputError, match="scale must be a positive number"):
        SelfAttentionNetwork([Layer(q, q, v)], scale=0.0)


@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (torch.ones(4, 2, dtype=torch.float64), r"shape \[\.\.\., tokens, 3\], got \[4, 2\]"),
        (torch.ones(0, 3, dtype=torch.float64), r"got \[0, 3\]"),
        (torch.ones(4, 3, dtype=torch.float32), "float32 but the network is torch.float64"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x: Tensor, complaint: str) -> None:
    network = random_network(1, 1, 3, 0.1)
    with pytest.raises(InputError, match=complaint):
        network(x)
    with pytest.raises(InputError, match=complaint):
        next(network.trace(x))


def test_describe_and_summary() -> None:
    network = random_network(2, 3, 4, 0.1, key_dim=2, mlp=8, norm="post", causal=True, skip=False, distribution="sign")
    described = network.describe()
    assert described["heads"] == [3, 3]
    assert described["key_dim"] == [2, 2]
    assert described["mlp"] == [8, 8]
    assert described["eta"] == 0.1
    assert described["dtype"] == "float64"
    assert network.summary() == "2 layers × 3 heads, dim 4, largest weight η = 0.1, no skip, causal, MLP, post-norm"
    assert "1–3 heads" in uneven_network(1.0).summary()
    assert repr(network) == f"SelfAttentionNetwork({network.name!r}: {network.summary()})"
