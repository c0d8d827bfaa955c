"""Certificates over all sequences of tokens: they hold for every prompt, and each inequality behind them holds."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from example_counts import few
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import InputError, VerificationError
from depthgauge.theory.certificates import every_lead
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.every_lead import EveryLead
from depthgauge.theory.certificates.expansion_layers import ExpansionLayers
from depthgauge.theory.certificates.expansion_proof import layers_of
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.pair_lead import BLOCK, PairLead, centred
from depthgauge.theory.certificates.regions import PointRegion
from depthgauge.theory.certificates.token_attack import count_sequences, every_sequence
from depthgauge.theory.certificates.token_set import Tokens, load_tokens
from depthgauge.theory.depth.certificate import method_of
from depthgauge.theory.depth.effective import effective_depth
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.norms import softm
from depthgauge.theory.linalg.rounding import no_bound
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import fold
from depthgauge.theory.surrogates.expansion import Expansion

METHODS = ("identity", "last-layer", "parallel", "mean-field", "corrected")
SLACK = 1 + 1e-9
A = Outward()


def drawn(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(eta: float = 0.05, seed: int = 0, **sizes: int) -> SelfAttentionNetwork:
    return dg.random_network(**{"layers": 3, "heads": 2, "dim": 4} | sizes, eta=eta, seed=seed)


def largest_difference(one: SelfAttentionNetwork, other: SelfAttentionNetwork, sequences: Tensor) -> float:
    with torch.no_grad():
        return float((one(sequences) - other(sequences)).abs().max())


def token_sets(seed: int) -> list[Tokens]:
    return [
        Tokens(drawn(3, 4, seed=seed), length=3),
        Tokens(drawn(3, 4, seed=seed), drawn(3, 4, seed=seed + 1, size=0.5)),
        Tokens(drawn(6, 4, seed=seed, size=3.0)),
    ]


# --- soundness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_no_sequence_exceeds_the_bound(method: str, seed: int) -> None:
    for k, tokens in enumerate(token_sets(seed)):
        if k == seed:
            continue  # each set has two of three sizes of the weights
        net = network((0.01, 0.1, 0.5)[(k + seed) % 3], seed)
        small = dg.collapse(net, method=method)
        certificate = dg.certify(net, small, inputs=tokens)
        assert certificate.upper is not None
        assert certificate.lower <= certificate.upper
        places, v = tokens.at_positions(), len(tokens.embeddings)
        for n in (1, 2, 3):
            chosen = torch.tensor(list(product(range(v), repeat=n)))
            x = places[0][chosen] if len(places) == 1 else places[torch.arange(n), chosen]
            assert largest_difference(net, small, x) <= certificate.upper * SLACK


@few(20)
@given(st.integers(0, 10**6), st.sampled_from(METHODS), st.floats(0.001, 1.0), st.floats(0.01, 5.0))
def test_no_random_sequence_exceeds_the_bound(seed: int, method: str, eta: float, size: float) -> None:
    _attacked(seed, method, eta, size)


def _attacked(seed: int, method: str, eta: float, size: float) -> None:
    net = network(eta, seed % 1000, layers=1 + seed % 4, heads=1 + seed % 3, dim=2 + seed % 3)
    small = dg.collapse(net, method=method)
    tokens = Tokens(drawn(2 + seed % 6, net.dim, seed=seed, size=size))
    upper = float(method_of(Comparison(net, small, tokens)).value.max())
    rounding = 64 * torch.finfo(torch.float64).eps * tokens.radius  # of the two evaluations
    generator = torch.Generator().manual_seed(seed)
    for n in (2, 5, 40):
        x = tokens.embeddings[torch.randint(0, len(tokens.embeddings), (50, n), generator=generator)]
        assert largest_difference(net, small, x) <= upper * SLACK + rounding
    for others in (1, 3, 9):
        assert largest_difference(net, small, tokens.embeddings[[0] + [1] * others]) <= upper * SLACK + rounding


def test_folded_networks_are_covered() -> None:
    net, tokens = network(0.2, layers=4), Tokens(drawn(4, 4), length=4)
    for kept in ((0,), (1, 3), (0, 1, 2)):
        small = fold(net, kept)
        certificate = dg.certify(net, small, inputs=tokens)
        assert certificate.exhaustive
        assert certificate.lower <= (certificate.upper or 0.0)
        assert certificate.verify()


def test_tokens_are_sharper_than_the_box_that_contains_them() -> None:
    net, tokens = network(0.02, layers=4, dim=6), Tokens(drawn(8, 6))
    for method in METHODS[2:]:
        small = dg.collapse(net, method=method)
        mine, box = dg.certify(net, small, inputs=tokens), dg.certify(net, small, radius=tokens.radius)
        assert mine.upper is not None
        assert box.upper is not None
        assert mine.upper < 0.5 * box.upper
        assert mine.ratio is not None
        assert mine.ratio < 8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_one_token_is_bounded_by_its_linear_map(method: str, causal: bool) -> None:
    """Attention of one token is the identity, so both networks are linear and the bound is attained at a token."""
    net = dg.random_network(layers=3, heads=2, dim=4, eta=0.3, causal=causal)
    small = dg.collapse(net, method=method, length=4)
    for tokens in (Tokens(drawn(5, 4), length=1), Tokens(drawn(5, 4), drawn(2, 4, seed=1), length=1)):
        certificate = dg.certify(net, small, inputs=tokens)
        assert certificate.notes == ("one token: attention is the identity",)
        assert certificate.upper is not None
        assert certificate.lower <= certificate.upper <= certificate.lower * SLACK + 1e-13
        assert largest_difference(net, small, tokens.points()[:, None, :]) <= certificate.upper * SLACK + 1e-13
        assert certificate.verify()
        longer = replace(certificate.comparison, inputs=Tokens(tokens.embeddings, length=2))
        with pytest.raises(VerificationError, match="inputs of one token"):
            replace(certificate, comparison=longer).verify()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS[2:])
def test_short_sequences_have_a_smaller_bound_that_no_sequence_exceeds(method: str, causal: bool) -> None:
    for eta in (0.01, 0.4):
        net = dg.random_network(layers=3, heads=2, dim=4, eta=eta, causal=causal)
        small, uppers = dg.collapse(net, method=method, length=4), []
        for length in (1, 2, 3, 4):
            certificate = dg.certify(net, small, inputs=Tokens(drawn(5, 4), length=length))
            assert certificate.exhaustive
            assert certificate.upper is not None
            assert certificate.lower <= certificate.upper
            uppers.append(certificate.upper)
        assert uppers == sorted(uppers)
        assert uppers[0] < uppers[1] < (0.9 if method == "mean-field" else 1.0) * uppers[3]
        assert certificate.verify()
        with pytest.raises(VerificationError, match="is proved"):
            replace(certificate, upper=certificate.upper * (1 - 1e-6)).verify()


def test_a_covariance_of_few_tokens_is_below_the_share_of_the_bound_over_pairs() -> None:
    points, (terms, W, V) = drawn(5, 3), leading_terms()
    for n in (1, 2, 3):
        lead = PairLead(A, terms, points, share=Tokens(points, length=n).unevenness)
        x = points[torch.tensor(list(product(range(5), repeat=n)))]
        scores, z = torch.einsum("qb,rbc,sjc->qrsj", points, W, x), torch.einsum("sje,rea->rsja", x, V)
        apart = scores - scores.mean(-1, keepdim=True)
        found = torch.einsum("qrsj,rsja->qsa", apart, z).abs().amax((0, 1)) / n
        assert bool((found <= lead.value.floats() * SLACK).all())
        if n == 2:
            assert torch.allclose(found, lead.value.floats(), rtol=1e-9)


# --- the lower bound --------------------------------------------------------------------------------------------------


def test_few_sequences_are_all_tried() -> None:
    net = network(0.3)
    small = dg.collapse(net, method="mean-field")
    tokens = Tokens(drawn(3, 4), drawn(3, 4, seed=9))
    certificate = dg.certify(net, small, inputs=tokens)
    assert certificate.exhaustive
    assert certificate.to_json()["exhaustive"] is True
    batches = [torch.tensor(list(product(range(3), repeat=n))) for n in (1, 2, 3)]
    every = [tokens.at_positions()[torch.arange(chosen.shape[1]), chosen] for chosen in batches]
    assert certificate.lower == pytest.approx(max(largest_difference(net, small, x) for x in every), rel=1e-9)
    free = Tokens(drawn(3, 4), length=3)
    assert count_sequences(free, is_ordered=False) == 3 + 6 + 10
    assert sum(len(x) for x, _ in every_sequence(free, is_ordered=False)) == 19
    assert count_sequences(tokens, is_ordered=True) == 3 + 9 + 27


@pytest.mark.parametrize(
    ("given_", "length"),
    [({}, None), ({"length": 2}, 2), ({"positions": drawn(3, 4)}, 3)],
    ids=["any", "2", "positions"],
)
def test_the_result_has_the_length(given_: dict[str, Any], length: int | None) -> None:
    certificate = dg.certify(network(), dg.collapse(network()), inputs=Tokens(drawn(3, 4), **given_))
    assert certificate.to_json()["tokens"] == certificate.tokens == length


def test_the_result_has_the_length_of_a_position_bias() -> None:
    net = dg.random_network(layers=3, heads=1, dim=4, eta=0.05, causal=True)
    certificate = dg.certify(net, dg.collapse(net, length=4), inputs=Tokens(drawn(3, 4), length=4))
    assert certificate.to_json()["tokens"] == 4
    assert repr(certificate).count("4 tokens") == 1


def test_the_witness_consists_of_tokens() -> None:
    net, tokens = network(0.1), Tokens(drawn(30, 4), drawn(20, 4, seed=1))
    certificate = dg.certify(net, dg.collapse(net), inputs=tokens, seed=3)
    assert not certificate.exhaustive
    places = tokens.at_positions()
    for place, row in zip(places, certificate.witness, strict=False):
        assert bool((place == row).all(dim=1).any())
    again = dg.certify(net, dg.collapse(net), inputs=tokens, seed=3)
    assert again.lower == certificate.lower


# --- the second arithmetic -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_bound_is_proved_again(method: str) -> None:
    net = network(0.05)
    for tokens in token_sets(4):
        certificate = dg.certify(net, dg.collapse(net, method=method), inputs=tokens)
        assert certificate.verify()
        assert certificate.upper is not None
        with pytest.raises(VerificationError, match="is proved"):
            replace(certificate, upper=certificate.upper * (1 - 1e-6)).verify()


def test_a_proof_for_another_set_is_refused() -> None:
    net = network()
    small = dg.collapse(net)
    certificate = dg.certify(net, small, inputs=Tokens(drawn(3, 4)))
    box = dg.certify(net, small, radius=3.0)
    with pytest.raises(VerificationError):
        replace(certificate, comparison=box.comparison).verify()


def around_centre(G: Tensor, points: Tensor) -> Tensor:
    return centred(A, Enclosure.exact(G), Enclosure.exact(points)).floats()


def leading_terms() -> tuple[Rank1Sum, Tensor, Tensor]:
    net = network(0.5, layers=2, dim=3)
    layers = layers_of(Comparison(net, net, Tokens(drawn(5, 3))), A)
    terms = Rank1Sum.join(A, 3, map(layers.terms, range(2)))
    return terms, terms.left.floats(), terms.right.floats()


# --- the inequalities -------------------------------------------------------------------------------------------------


def multisets(points: Tensor, count: int, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return points[torch.randint(0, len(points), (count, n), generator=generator)]


def test_points_on_a_line_attain_the_centred_bound() -> None:
    direction, places = drawn(3, seed=5), torch.tensor([-1.0, 0.2, 0.5, 3.0], dtype=torch.float64)
    points = places[:, None] * direction
    G = torch.stack([matrix + matrix.mT for matrix in drawn(6, 3, 3)])
    bound = around_centre(G, points)
    ends = points[[0, 3]] - points[[0, 3]].mean(0)
    covariance = ends.mT @ ends / 2
    reached = (G * covariance).sum((-2, -1)).abs()
    assert bool((reached <= bound * SLACK).all())
    rank_one = torch.einsum("xb,xc->xbc", drawn(6, 3, seed=8), drawn(6, 3, seed=8))
    reached = (rank_one * covariance).sum((-2, -1)).abs()
    assert torch.allclose(around_centre(rank_one, points), reached, rtol=1e-9)


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_no_covariance_exceeds_the_centred_bound(seed: int) -> None:
    points, G = drawn(2 + seed % 6, 3, seed=seed), drawn(4, 3, 3, seed=seed + 1)
    bound = around_centre(G, points)
    for x in multisets(points, 40, 1 + seed % 9, seed):
        apart = x - x.mean(0)
        assert bool(((G * (apart.mT @ apart / len(x))).sum((-2, -1)).abs() <= bound * SLACK).all())


def test_the_leading_term_bounds_every_covariance_and_two_tokens_reach_half_of_it() -> None:
    points, (terms, W, V) = drawn(5, 3), leading_terms()
    lead = PairLead(A, terms, points)
    bound = torch.stack([lead.sharper(a).floats() for a in range(3)])
    assert bool((bound <= lead.value.floats()).all())

    def covariances(query: Tensor, x: Tensor) -> Tensor:
        scores = torch.einsum("b,rbc,...jc->r...j", query, W, x)
        values = torch.einsum("...je,rea->r...ja", x, V)
        centred = scores - scores.mean(-1, keepdim=True)
        return (centred[..., None] * values).mean(-2).sum(0)

    largest = torch.zeros(3, dtype=torch.float64)
    for query in points:
        for n in (2, 3, 7):
            found = covariances(query, multisets(points, 300, n)).abs()
            assert bool((found <= bound * SLACK).all())
            largest = torch.maximum(largest, found.amax(0))
    assert bool((largest >= 0.5 * bound / SLACK).all())


def lead_of_the_last_row(n: int, *, averaged: bool) -> tuple[EveryLead, Tensor]:
    """Return the bound for n places of three tokens, and the largest leading term of all sequences by its definition.

    With `averaged` there is a term of mean(X) as well, whose matrices W are other ones.
    """
    places, (terms, W, V) = drawn(n, 3, 3, seed=n), leading_terms()
    none, turned = Rank1Sum(A, terms.left[:0], terms.right[:0]), Rank1Sum(A, terms.left.mT, terms.right)
    chosen = torch.tensor(list(product(range(3), repeat=n)))
    x = places[torch.arange(n), chosen]
    apart = x - x.mean(1, keepdim=True)
    C = apart.mT @ apart / n
    exact = torch.einsum("sb,rbc,sce,rea->sa", x[:, -1], W, C, V)
    if averaged:
        exact = exact + torch.einsum("sb,rcb,sce,rea->sa", x.mean(1), W, C, V)
    return EveryLead(A, terms, turned if averaged else none, places), exact.abs().amax(0)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_leading_term_of_the_last_row_is_its_maximum_over_all_sequences(
    n: int, averaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, largest = lead_of_the_last_row(n, averaged=averaged)
    sharper = torch.stack([lead.sharper(a).floats() for a in range(3)])
    assert bool((largest <= sharper * SLACK + 1e-14).all())
    assert bool((sharper <= largest * SLACK + 1e-13).all())
    assert bool((sharper <= lead.value.floats() * SLACK + 1e-13).all())
    for per_term in (0.0, 1e-3):  # the rounding of the sum of N tables is in the bound
        monkeypatch.setattr(every_lead, "gamma", lambda count, per_term=per_term: per_term * count)
        changed = torch.stack([lead.sharper(a).floats() for a in range(3)])
        assert bool(((changed > sharper) if per_term else (changed < sharper)).all()) or n == 1
    monkeypatch.setattr(every_lead, "MOST", 1)  # too many sequences: both bounds of 3.11
    for a in range(3):
        assert largest[a] <= lead.sharper(a).floats() * SLACK + 1e-14
        assert lead.sharper(a).floats() <= lead.value[a].floats() * SLACK + 1e-13


def test_the_rest_bounds_what_is_beyond_the_leading_term() -> None:
    """One layer: no errors before it, so the rest is ρθ² · range."""
    net = network(1.0, layers=1, dim=3)
    points, expansion = drawn(4, 3, size=1.5), Expansion(net, A)
    region = PointRegion(A, Tokens(points))
    bounds = ExpansionLayers(expansion, region, joint=True)
    assert float(bounds.states[0].own.floats().max()) == 0.0
    W, V = expansion.W[0].floats(), expansion.V[0].floats()
    values = expansion.V[0]
    rest, gap = bounds.rest(values).floats(), bounds.gap(values, region.spread_range).floats()
    for x in multisets(points, 200, 6):
        scores = x @ W @ x.mT  # [h, i, j]
        z = x @ V
        exact = (softm(scores) - 1 / 6) @ z
        lead = (scores - scores.mean(-1, keepdim=True)) @ z / 6
        assert bool(((exact - lead).abs().amax(1) <= rest * SLACK).all())
        assert bool((exact.abs().amax(1) <= gap * SLACK).all())
    theta, ranges = region.widest_row(expansion.W[0]).floats(), region.ranges(expansion.V[0]).floats()
    assert torch.allclose(bounds.heads[0].theta.floats(), theta, rtol=1e-12)
    assert torch.allclose(rest, theta[:, None] ** 2 * ranges / (12 * 3**0.5))


def test_ranges_are_those_of_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points, M = drawn(7, 3), drawn(2, 3, 3, seed=1)
    made = points @ M
    expected = made.amax(1) - made.amin(1)
    scores = points @ M @ points.mT
    for block in (BLOCK, 1):
        monkeypatch.setattr("depthgauge.theory.certificates.regions.BLOCK", block)
        region = PointRegion(A, Tokens(points))
        found = region.ranges(Enclosure.exact(M)).floats()
        assert bool((found >= expected).all())
        assert torch.allclose(found, expected, rtol=1e-12)
        rows = region.widest_row(Enclosure.exact(M)).floats()
        assert torch.allclose(rows, (scores.amax(-1) - scores.amin(-1)).amax(-1), rtol=1e-12)


def test_an_overflow_is_no_bound() -> None:
    """`nan_to_num` replaces +∞ by the largest float64, which is a wrong bound."""
    points, huge = drawn(3, 3), torch.full((1, 3, 3), 1e308, dtype=torch.float64)
    region = PointRegion(A, Tokens(1e10 * points))
    assert not bool(region.widest_row(Enclosure.exact(huge)).floats().isfinite().any())
    assert not bool(around_centre(huge, 1e200 * points).isfinite().any())
    assert no_bound(torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])).tolist() == [
        torch.inf, torch.inf, -torch.inf, 1.0,
    ]  # fmt: skip


def test_many_points_are_bounded_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthgauge.theory.certificates.pair_lead.PAIRED", 0.0)
    net, tokens = network(0.1), Tokens(drawn(4, 4), length=3)
    certificate = dg.certify(net, dg.collapse(net), inputs=tokens)
    assert certificate.methods == ("plain",)
    assert "too many for pairs" in certificate.notes[0]
    assert certificate.lower <= (certificate.upper or 0.0)
    assert certificate.verify()


# --- effective depth, files and bad input -----------------------------------------------------------------------------


def test_effective_depth_over_tokens() -> None:
    net, tokens = network(0.02, layers=5, dim=6), Tokens(drawn(6, 6))
    depth = effective_depth(net, tolerance=1e-3, inputs=tokens)
    assert (depth.layers, depth.status) == (1, "proved")
    assert depth.certificate is not None
    assert depth.certificate.inputs is tokens
    tight = effective_depth(net, tolerance=1e-12, inputs=tokens)
    assert tight.layers == 5
    for wrong in ({}, {"radius": 1.0, "inputs": tokens}):
        with pytest.raises(InputError, match="needs a radius"):
            effective_depth(net, tolerance=1e-3, **wrong)


@pytest.mark.wrong_types
def test_a_file_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.safetensors"
    save_file({"embeddings": drawn(3, 4).float(), "positions": drawn(5, 4).float()}, path)
    found = load_tokens(path, 2)
    assert (found.length, found.points().shape) == (2, (6, 4))
    assert str(found) == "3 vectors of width 4, up to 2 tokens"
    for tensors, message in [
        ({"x": drawn(2, 2)}, "holds x, expected a tensor embeddings"),
        ({"embeddings": drawn(2, 2), "positions": drawn(2, 3)}, "positions have width 3"),
    ]:
        save_file(tensors, path)
        with pytest.raises(InputError, match=message):
            load_tokens(path)
    with pytest.raises(InputError, match="cannot read tokens from"):
        load_tokens(tmp_path / "none.safetensors")


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"embeddings": torch.zeros(0, 3)}, "embeddings must have shape"),
        ({"embeddings": torch.zeros(3)}, "embeddings must have shape"),
        ({"embeddings": [[1.0]]}, "embeddings must be"),
        ({"embeddings": torch.zeros(2, 3, dtype=torch.int64)}, "must be float32 or float64"),
        ({"embeddings": torch.full((2, 3), torch.nan)}, "embeddings holds NaN or infinity"),
        ({"embeddings": torch.zeros(2, 3), "positions": torch.full((2, 3), torch.inf)}, "positions holds NaN"),
        ({"embeddings": torch.zeros(2, 3), "positions": torch.zeros(2, 4)}, "positions have width 4"),
        ({"embeddings": torch.zeros(2, 3), "length": 0}, "length must be"),
        ({"embeddings": torch.zeros(2, 3), "positions": torch.zeros(2, 3), "length": 3}, "there are 2 positions"),
    ],
)
def test_bad_tokens_are_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tokens(**given_)


@pytest.mark.wrong_types
def test_requests_that_do_not_fit_are_refused() -> None:
    net, tokens = network(), Tokens(drawn(3, 4))
    small = dg.collapse(net)
    for wrong, message in [
        ({"inputs": tokens, "radius": 1.0}, "exactly one of radius, ball and inputs"),
        ({"inputs": tokens, "tokens": 3}, "give the length there"),
        ({"inputs": Tokens(drawn(3, 5))}, "the tokens have width 5, and the network 4"),
        ({"inputs": drawn(3, 4)}, "inputs must be"),
        ({}, "exactly one of radius, ball and inputs, got none of them"),
    ]:
        with pytest.raises(InputError, match=message):
            dg.certify(net, small, **wrong)
    plain = dg.random_network(layers=2, heads=1, dim=4, eta=0.1, skip=False)
    with pytest.raises(InputError, match="inputs applies to networks with skip connections"):
        dg.certify(plain, dg.collapse(plain, method="last-layer"), inputs=tokens)
