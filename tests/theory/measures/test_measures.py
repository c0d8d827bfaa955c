"""Every measure against a dense computation in plain Python, for all block sizes, with and without causal masks."""

import itertools
import math
import pickle
import sys
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain import plain_forward, plain_head
from torch import Tensor

from depthgauge import SelfAttentionNetwork, measure, random_network
from depthgauge.base.errors import InputError, MissingPackageError
from depthgauge.results.record import finite
from depthgauge.theory.measures.quantities import (
    HeadMeasures,
    WeightSizes,
    balance,
    entropy,
    measure_heads,
    residual_size,
    residual_sizes,
    weight_sizes,
)
from depthgauge.theory.network import network as trace
from depthgauge.theory.network.network import Layer


def names(record: type) -> list[str]:
    return [field.name for field in fields(record)]


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


def centred(z: Tensor, center: str) -> Tensor:
    rows = z.tolist()
    columns = list(zip(*rows, strict=True))
    y = [(max(c) + min(c)) / 2 if center == "midrange" else math.fsum(c) / len(c) for c in columns]
    return torch.tensor([[v - w for v, w in zip(row, y, strict=True)] for row in rows], dtype=torch.float64)


def size(z: Tensor, norm: str) -> float:
    rows = [[abs(v) for v in row] for row in z.tolist()]
    if norm == "max":
        return max(map(max, rows))
    if norm == "frobenius":
        return math.sqrt(math.fsum(v * v for row in rows for v in row))
    return math.sqrt(max(map(math.fsum, rows)) * max(map(math.fsum, zip(*rows, strict=True))))


def plain_measures(read: Tensor, layer: Layer, h: int, scale: float, causal: bool) -> dict[str, float]:
    """Compute all measures of a head from its dense attention matrix."""
    Q, K, V = layer.query[h], layer.key[h], layer.value[h]
    n = len(read)
    P, out = plain_head(read, Q, K, V, scale, causal)
    scores = (scale * (read @ Q) @ (read @ K).T).tolist()
    middle = centred(read, "midrange")
    E = (scale * middle @ Q @ K.T @ middle.T).tolist()
    tv, entropies = [], []
    for i, row in enumerate(P.tolist()):
        seen = i + 1 if causal else n
        tv.append(math.fsum(abs(p - 1 / seen) for p in row[:seen]) / 2)
        entropies.append(-math.fsum(p * math.log(p) for p in row[:seen] if p > 0))
    ranges, balances = (
        [max(row[: i + 1 if causal else n]) - min(row[: i + 1 if causal else n]) for i, row in enumerate(matrix)]
        for matrix in (scores, E)
    )
    spread = size(middle, "max")
    column = max(math.fsum(abs(v) for v in c) for c in zip(*V.tolist(), strict=True))
    return {
        "score_range": max(ranges),
        "balance": max(balances),
        "tv_mean": math.fsum(tv) / n,
        "tv_max": max(tv),
        "entropy": math.fsum(entropies) / n,
        "contraction": size(centred(out, "midrange"), "max") / spread if spread else math.nan,
        "contraction_bound": math.nan if causal else math.tanh(max(balances) / 2) * column,
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm", ["none", "pre", "post"])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_every_head_measure_is_the_dense_one(tokens: int, norm: str, causal: bool) -> None:
    network = random_network(2, 3, 4, 0.9, key_dim=2, mlp=3, norm=norm, causal=causal, seed=1)
    x = inputs(2, tokens, 4)
    profile = measure(network, x)
    with torch.no_grad():
        for seen, heads in zip(network.trace(x), profile.heads, strict=True):
            for s, h in itertools.product(range(2), range(3)):
                read = seen.attention_input[s]
                expected = plain_measures(read, network[seen.index], h, network.scale, causal)
                assert set(expected) == set(names(HeadMeasures))
                for name, value in expected.items():
                    measured = getattr(heads, name)[s, h].item()
                    assert measured == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entries", [1, 13, 60, 400])
def test_blocks_of_any_size_measure_the_same(entries: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    network = random_network(2, 3, 4, 0.9, causal=causal, seed=2)
    x = inputs(2, 11, 4)
    whole = measure(network, x)
    blocks = 0
    original = trace.LayerTrace.score_blocks

    def counted(self: trace.LayerTrace, query: Tensor | None = None):  # type: ignore[no-untyped-def]
        nonlocal blocks
        for block in original(self, query, entries):
            blocks += 1
            yield block

    monkeypatch.setattr(trace.LayerTrace, "score_blocks", counted)
    blocked = measure(network, x)
    rows = max(1, entries // (2 * 3 * 11))
    assert blocks == 2 * 2 * math.ceil(11 / rows)
    for a, b in zip(whole.heads, blocked.heads, strict=True):
        for name in names(HeadMeasures):
            assert torch.allclose(getattr(a, name), getattr(b, name), rtol=1e-12, atol=1e-14, equal_nan=True), name


@given(
    seed=st.integers(0, 10_000), eta=st.sampled_from([0.01, 0.3, 1.0, 3.0]), n=st.integers(2, 6),
    distribution=st.sampled_from(["uniform", "sign", "aligned"]), radius=st.sampled_from([0.1, 1.0, 5.0]),
    norm=st.sampled_from(["none", "pre"]),
)  # fmt: skip
def test_contraction_never_exceeds_its_bound(
    seed: int, eta: float, n: int, distribution: str, radius: float, norm: str
) -> None:
    network = random_network(3, 2, 3, eta, seed=seed, distribution=distribution, norm=norm)
    for heads in measure(network, radius * inputs(2, n, 3, seed=seed)).heads:
        finite = heads.contraction.isfinite()
        assert bool((heads.contraction <= heads.contraction_bound * (1 + 1e-9) + 1e-9)[finite].all())
        assert bool((heads.tv_max <= torch.tanh(heads.score_range / 4) * (1 + 1e-9) + 1e-14).all())
        assert bool((heads.tv_mean <= heads.tv_max + 1e-15).all())
        assert bool((heads.entropy <= math.log(n) + 1e-12).all())


@pytest.mark.parametrize("d", [1, 3, 16])
def test_the_contraction_bound_is_attained(d: int) -> None:
    network = random_network(1, 1, d, 0.2, distribution="aligned", seed=0)
    x = torch.stack([torch.ones(d, dtype=torch.float64), -torch.ones(d, dtype=torch.float64)])
    heads = measure(network, x).heads[0]
    assert heads.contraction.item() == pytest.approx(heads.contraction_bound.item(), rel=1e-12)


def test_attention_with_zero_scores_is_uniform() -> None:
    zero = torch.zeros(1, 3, 3, dtype=torch.float64)
    value = torch.eye(3, dtype=torch.float64)[None]
    heads = measure(SelfAttentionNetwork([Layer(zero, zero, value)]), inputs(5, 3)).heads[0]
    assert heads.score_range.item() == heads.balance.item() == 0
    assert heads.tv_max.item() < 1e-15
    assert heads.entropy.item() == pytest.approx(math.log(5))
    assert heads.contraction.item() < 1e-15


@pytest.mark.parametrize("causal", [False, True])
def test_residuals_of_every_state(causal: bool) -> None:
    network = random_network(3, 2, 4, 0.5, causal=causal, seed=3)
    x = inputs(2, 6, 4)
    profile = measure(network, x)
    assert len(profile.residuals) == 4
    with torch.no_grad():
        for depth, state in enumerate(profile.residuals):
            shallow = SelfAttentionNetwork([network[i].copy() for i in range(depth)], causal=causal) if depth else None
            for s, center, norm in itertools.product(range(2), ("midrange", "mean"), ("max", "frobenius", "composite")):
                z = x[s] if shallow is None else plain_forward(shallow, x[s])
                expected = size(centred(z, center), norm)
                assert state[center][norm].value[s].item() == pytest.approx(expected, rel=1e-9)
                assert state[center][norm].ratio[s].item() == pytest.approx(expected / size(z, norm), rel=1e-9)
                ratios = profile.residual_ratio(norm, center)
                assert ratios.shape == (2, 4)
                assert ratios[s, depth].item() == state[center][norm].ratio[s].item()


def test_equal_tokens_have_no_residual_and_a_zero_state_no_ratio() -> None:
    sizes = residual_sizes(torch.ones(1, 4, 3, dtype=torch.float64))
    assert all(s.value.item() == 0 and s.ratio.item() == 0 for norms in sizes.values() for s in norms.values())
    zero = residual_size(torch.zeros(1, 4, 3, dtype=torch.float64), "max", "mean")
    assert math.isnan(zero.ratio.item())


def test_weight_sizes_by_loops() -> None:
    layer = random_network(1, 3, 4, 0.7, key_dim=2, seed=4)[0]
    sizes = weight_sizes(layer)
    for h in range(3):
        Q, K, V = ([[abs(v) for v in row] for row in w[h].tolist()] for w in (layer.query, layer.key, layer.value))
        columns = list(zip(*V, strict=True))
        assert sizes.eta[h].item() == max(v for w in (Q, K, V) for row in w for v in row)
        assert sizes.value_col[h].item() == pytest.approx(max(map(math.fsum, columns)))
        assert sizes.l1[h].item() == pytest.approx(max(math.fsum(v for row in w for v in row) for w in (Q, K, V)))
        W = (layer.query[h] @ layer.key[h].T).tolist()
        w_col = max(math.fsum(abs(v) for v in c) for c in zip(*W, strict=True))
        v_composite = math.sqrt(max(map(math.fsum, columns)) * max(map(math.fsum, V)))
        assert sizes.dong_beta[h].item() == pytest.approx(w_col * v_composite)


def test_entropy_of_certain_and_uniform_rows() -> None:
    assert entropy(torch.tensor([1.0, 0.0, 0.0])).item() == 0
    assert entropy(torch.full((4,), 0.25)).item() == pytest.approx(math.log(4))


def test_balance_needs_the_residual_on_one_side_only() -> None:
    network = random_network(1, 2, 3, 1.0, seed=5)
    x = inputs(1, 5, 3) + 10
    seen = next(network.trace(x))
    measured = balance(seen, network[0])
    middle = centred(x[0], "midrange")
    for h in range(2):
        E = network.scale * middle @ network[0].query[h] @ network[0].key[h].T @ middle.T
        assert measured[0, h].item() == pytest.approx((E.amax(1) - E.amin(1)).max().item(), rel=1e-10)
    assert not torch.allclose(measured, measure_heads(seen, network[0]).score_range, rtol=0.1)


# --- the profile -----------------------------------------------------------------------------------------------------

RESIDUAL_KEYS = {"value", "ratio", "ratio_std"}
HEAD_KEYS = {
    "index", "score_range", "balance", "tv_mean", "tv_max", "entropy", "contraction", "contraction_bound", "eta",
    "value_col", "l1", "dong_beta",
}  # fmt: skip


def test_the_json_of_a_profile() -> None:
    network = random_network(2, 3, 4, 0.5, seed=6)
    profile = measure(network, inputs(2, 5, 4))
    layers = [layer.to_json() for layer in profile.layer_records()]
    assert [layer["index"] for layer in layers] == [0, 1]
    for state in [profile.input_record().to_json(), *layers]:
        assert set(state["residual"]) == {"midrange", "mean"}
        for norms in state["residual"].values():
            assert set(norms) == {"max", "frobenius", "composite"}
            assert all(set(entry) == RESIDUAL_KEYS for entry in norms.values())
    for layer in layers:
        assert [head["index"] for head in layer["heads"]] == [0, 1, 2]
        assert all(set(head) == HEAD_KEYS for head in layer["heads"])
    largest = profile.heads[1].score_range[:, 2].max().item()
    mean = profile.heads[1].entropy[:, 2].mean().item()
    assert layers[1]["heads"][2]["score_range"] == largest
    assert layers[1]["heads"][2]["entropy"] == mean
    ratio = profile.residuals[2]["mean"]["frobenius"].ratio
    assert layers[1]["residual"]["mean"]["frobenius"]["ratio"] == pytest.approx(ratio.mean().item())
    assert layers[1]["residual"]["mean"]["frobenius"]["ratio_std"] == pytest.approx(
        (ratio[0] - ratio[1]).abs().item() / 2
    )
    assert names(WeightSizes) == ["eta", "value_col", "l1", "dong_beta"]


def test_values_that_are_not_finite_become_null() -> None:
    network = random_network(1, 1, 3, 0.5, seed=7)
    alone = measure(network, inputs(1, 3)).layer_records()[0].heads[0].to_json()
    assert alone["contraction"] is None
    assert alone["contraction_bound"] == 0
    causal = (
        measure(random_network(1, 1, 3, 0.5, causal=True, seed=7), inputs(4, 3)).layer_records()[0].heads[0].to_json()
    )
    assert causal["contraction_bound"] is None
    assert causal["contraction"] > 0
    zero = measure(network, torch.zeros(2, 3, dtype=torch.float64)).input_record().to_json()
    assert zero["residual"]["midrange"]["max"]["ratio"] is None
    assert finite(float("inf")) is None
    assert finite(float("nan")) is None
    assert finite(torch.tensor(2.5)) == 2.5


def test_profiles_and_their_parts_compare_and_pickle() -> None:
    network = random_network(2, 3, 4, 0.5, causal=True, seed=6)
    profile, again = measure(network, inputs(2, 5, 4)), measure(network, inputs(2, 5, 4))
    other = measure(network, inputs(2, 5, 4, seed=1))
    assert profile == again  # contraction_bound is NaN in a causal network, and NaN equals NaN here
    assert profile != other
    assert profile != "a profile"
    assert pickle.loads(pickle.dumps(profile)) == profile
    for part, same, different in (
        (profile.heads[0], again.heads[0], other.heads[0]),
        (profile.residuals[0]["mean"]["max"], again.residuals[0]["mean"]["max"], other.residuals[0]["mean"]["max"]),
        (profile.weights[0], again.weights[0], profile.weights[1]),
    ):
        assert part == same
        assert part != different
        assert part != profile
        assert pickle.loads(pickle.dumps(part)) == part


def test_the_repr_of_a_profile_is_one_line() -> None:
    network = random_network(2, 3, 4, 0.5, seed=6)
    profile = measure(network, inputs(2, 5, 4))
    ratios = profile.residual_ratio().mean(dim=0)
    assert repr(profile).startswith(f"Profile(2 layers, 2 samples, residual ratio {ratios[0]:.3g} → {ratios[-1]:.3g}, ")
    assert "\n" not in repr(profile)
    assert repr(profile.weights[0]) == (
        "WeightSizes(eta=float64[3], value_col=float64[3], l1=float64[3], dong_beta=float64[3])"
    )
    html = profile._repr_html_()
    assert html.count("<tr>") == 3
    assert f"<td>{ratios[2]:.3g}</td>" in html
    alone = measure(network, inputs(1, 4))
    assert repr(alone).startswith("Profile(2 layers, 1 sample, ")
    assert "<td>–</td>" in alone._repr_html_()  # one token has no residual, so its contraction is NaN


def test_the_data_frame_has_one_row_per_layer_and_head() -> None:
    network = random_network(2, 3, 4, 0.5, causal=True, seed=6)
    profile = measure(network, inputs(2, 5, 4))
    table = profile.to_frame()
    assert list(table.columns) == ["layer", "head", *names(HeadMeasures), *names(WeightSizes)]
    assert table[["layer", "head"]].to_numpy().tolist() == [[layer, head] for layer in range(2) for head in range(3)]
    assert table["contraction_bound"].isna().all()
    for entry, layer, head in zip(table.to_dict("records"), (0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 2), strict=True):
        expected = profile.layer_records()[layer].heads[head].to_json()
        assert all(entry[name] == expected[name] for name in expected if name not in ("index", "contraction_bound"))


def test_a_missing_pandas_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = measure(random_network(1, 1, 3, 0.5), inputs(2, 3))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match="pip install 'pandas"):
        profile.to_frame()


def test_inputs_of_any_batch_are_samples() -> None:
    network = random_network(1, 1, 3, 0.5, seed=8)
    x = inputs(2, 3, 4, 3)
    assert measure(network, x).residual_ratio().shape == (6, 2)
    assert measure(network, x[0, 0]).residual_ratio().shape == (1, 2)
    with pytest.raises(InputError, match="no entries to measure"):
        measure(network, x[:0])
    with pytest.raises(InputError, match="must have shape"):
        measure(network, x[..., :2])


def test_measuring_leaves_no_gradients_and_reports_its_progress() -> None:
    network = random_network(3, 1, 3, 0.5, seed=9)
    steps: list[tuple[int, int, str]] = []
    profile = measure(network, inputs(4, 3), progress=lambda done, total, label: steps.append((done, total, label)))
    assert steps == [(0, 3, "layer 0"), (1, 3, "layer 1"), (2, 3, "layer 2"), (3, 3, "")]
    assert not profile.heads[0].contraction.requires_grad
    assert not profile.weights[0].eta.requires_grad
