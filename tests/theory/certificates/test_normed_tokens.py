"""Certificates of the wide block over all sequences of tokens: LayerNorm before the sublayers, MLPs, causal or not."""

import json
import math
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from example_counts import few
from gpt_networks import attention_of, difference, drawn, gpt, mlp_of, upper
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import depthgauge as dg
from depthgauge.base.errors import InputError, VerificationError
from depthgauge.cli.main import main
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.parallel_blocks import WideBlock
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.network.network import SelfAttentionNetwork

SLACK = 1 + 1e-9


KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "relu": {"activation": "relu"},
    "bidirectional": {"causal": False, "layers": 3},
    "attention": {"mlp": None, "layers": 3},
    "unbiased": {"biases": False},
    "unnormed": {"norm": "none"},
    "unnormed-relu": {"norm": "none", "activation": "relu", "causal": False},
    "unnormed-attention": {"norm": "none", "mlp": None, "causal": False},
    "deep": {"layers": 4, "heads": 1},
    "rms": {"norm": "pre-rms"},
    "rms-bidirectional": {"norm": "pre-rms", "causal": False, "activation": "relu"},
}


# --- the wide block ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_wide_block_adds_all_sublayers(kind: str) -> None:
    net = gpt(3, 0.3, **KINDS[kind])
    x = drawn(5, 4, seed=9)
    small = dg.collapse(net, method="parallel")
    assert (len(small), small.norm, small.causal, small.activation) == (1, net.norm, net.causal, net.activation)
    with torch.no_grad():
        y = x + sum(attention_of(net, k, x) for k in range(len(net)))
        out = y + sum(mlp_of(net, k, y) for k in range(len(net)))
        assert torch.allclose(small(x), out, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("norm", ["post", "post-rms"])
def test_norms_after_the_sublayers_are_a_chain_without_weights(norm: str) -> None:
    """One layer with the last gains is off by more than 1 % however small the weights are."""
    x = drawn(5, 4, seed=9)
    for eta in (1e-2, 1e-4, 1e-6):
        net = gpt(3, eta, norm=norm, layers=3)
        last = SelfAttentionNetwork([net[-1]], norm=norm, causal=True, mlp_skip=True, activation="gelu")
        assert difference(net, last, x) > 0.01


@pytest.mark.parametrize("kind", ["gpt", "bidirectional", "unnormed"])
def test_the_error_is_of_second_order(kind: str) -> None:
    x, errors = drawn(6, 4, seed=2), []
    for eta in (0.02, 0.01):
        net = gpt(1, eta, **KINDS[kind])
        for layer in net:
            if layer.norm_weight is not None:
                layer.norm_weight.data.fill_(1.0)
        errors.append(difference(net, dg.collapse(net, method="parallel"), x))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2.0, abs=0.2)


# --- soundness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_exceeds_the_bound(kind: str) -> None:
    free, placed = Tokens(drawn(3, 4, seed=1), length=3), Tokens(drawn(3, 4), drawn(3, 4, seed=7, size=0.5))
    drawn_so = list(enumerate(((0.01, placed), (0.1, free), (0.5, free), (0.3, placed))))
    for seed, (eta, tokens) in drawn_so[list(KINDS).index(kind) % 2 :: 2]:
        net = gpt(seed, eta, **KINDS[kind])
        small = dg.collapse(net, method="parallel")
        bound, places = upper(net, small, tokens), tokens.at_positions()
        for n in (1, 2, 3):
            chosen = torch.tensor(list(product(range(3), repeat=n)))
            x = places[0][chosen] if len(places) == 1 else places[torch.arange(n), chosen]
            assert difference(net, small, x) <= bound * SLACK


@pytest.mark.parametrize("kind", KINDS)
def test_no_last_row_exceeds_the_bound_on_a_readout(kind: str) -> None:
    """All sequences that fill the positions, against the bound on |(S − S')R| and against that on the states."""
    net = gpt(2, 0.1, **KINDS[kind])
    tokens, R = Tokens(drawn(3, 4, seed=1), drawn(3, 4, seed=7, size=0.5)), drawn(4, 2, seed=3)
    comparison = Comparison(net, dg.collapse(net, method="parallel"), tokens)
    _hold(comparison, R, SLACK)
    same = WideBlock(comparison, readout=lambda A: A.eye(4)).value
    assert bool((same <= WideBlock(comparison).value * SLACK).all())


def _hold(comparison: Comparison, R: Tensor, slack: float) -> None:
    """Check a bound on (S − S')R on all sequences."""
    tokens = comparison.inputs
    assert isinstance(tokens, Tokens)
    bound = WideBlock(comparison, readout=lambda A: A.exact(R)).value
    places = tokens.at_positions()
    chosen = torch.cartesian_prod(*[torch.arange(places.shape[1])] * len(places))
    x = places[torch.arange(len(places)), chosen]
    with torch.no_grad():
        one, other = comparison.network(x)[:, -1] @ R, comparison.surrogate(x)[:, -1] @ R
    rounding = 256 * torch.finfo(torch.float64).eps * (1.0 + float(one.abs().max()))
    assert bool(((one - other).abs().amax(0) <= bound * slack + rounding).all())


@few(12)
@given(st.integers(0, 10**6), st.sampled_from(list(KINDS)), st.floats(0.001, 1.0), st.floats(0.01, 5.0))
def test_no_random_sequence_exceeds_the_bound(seed: int, kind: str, eta: float, size: float) -> None:
    _attacked(seed, kind, eta, size)


def _attacked(seed: int, kind: str, eta: float, size: float) -> None:
    """Random sequences of any length, and all sequences that fill two to four positions, read out as a model is."""
    drawn_as = ("uniform", "sign")[seed % 2]  # training moves weights to ±η
    shape = {"layers": 2 + (seed % 10 == 0), "dim": 2 + seed % 3, "distribution": drawn_as}
    net = gpt(seed, eta, **{**KINDS[kind], **shape})
    small = dg.collapse(net, method="parallel")
    placed = Tokens(drawn(2, net.dim, seed=seed + 1, size=size), drawn(2 + seed % 3, net.dim, seed=seed + 2, size=size))
    _hold(Comparison(net, small, placed), drawn(net.dim, 2, seed=seed + 3), SLACK)
    tokens = Tokens(drawn(2 + seed % 4, net.dim, seed=seed, size=size))
    bound = upper(net, small, tokens)
    generator = torch.Generator().manual_seed(seed)
    for n in (2, 9):
        x = tokens.embeddings[torch.randint(0, len(tokens.embeddings), (40, n), generator=generator)]
        with torch.no_grad():
            one, other = net(x), small(x)
        rounding = 256 * torch.finfo(torch.float64).eps * (1.0 + float(one.abs().max()))  # of the two evaluations
        assert float((one - other).abs().max()) <= bound * SLACK + rounding


def test_a_surrogate_with_other_weights_is_covered() -> None:
    """The proof allows for any difference of the weights, not for rounding alone."""
    net, tokens = gpt(0, 0.05), Tokens(drawn(3, 4), length=3)
    small = dg.collapse(net, method="parallel")
    before = upper(net, small, tokens)
    for name, weight in small.named_parameters():
        other = small.copy()
        dict(other.named_parameters())[name].data += drawn(*weight.shape, seed=3, size=0.02)
        certificate = dg.certify(net, other, inputs=tokens)
        assert certificate.lower <= (certificate.upper or 0.0)
        assert (certificate.upper or 0.0) > before
        assert certificate.verify()


def test_ratios_of_small_weights() -> None:
    """Proved over attained, GPT-2-style networks with η = 0.01: the median is at most 6."""
    shapes = [(2, 8, "gelu"), (3, 16, "gelu"), (4, 16, "gelu"), (4, 16, "relu"), (2, 32, "gelu"), (3, 32, "relu")]
    ratios = []
    for seed, (layers, dim, activation) in enumerate(shapes):
        net = gpt(seed, 0.01, layers=layers, dim=dim, mlp=4 * dim, activation=activation)
        tokens = Tokens(drawn(5, dim, seed=seed), drawn(3, dim, seed=seed + 1, size=0.5))
        certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=tokens)
        assert certificate.methods == ("parallel",)
        assert sum(sum(heads) for heads in certificate.share) == pytest.approx(1.0)
        ratios.append(certificate.ratio or math.inf)
    assert median(ratios) <= 6
    assert max(ratios) <= 10


# --- the second arithmetic -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_proved_again(kind: str) -> None:
    net = gpt(5, 0.4 if KINDS[kind].get("causal", True) else 0.02, **KINDS[kind])
    certificate = dg.certify(
        net, dg.collapse(net, method="parallel"), inputs=Tokens(drawn(3, 4), drawn(2, 4, seed=8, size=0.5))
    )
    assert certificate.exhaustive
    assert certificate.upper is not None
    assert certificate.lower <= certificate.upper
    assert certificate.verify()
    with pytest.raises(VerificationError, match="is proved"):
        replace(certificate, upper=certificate.upper * (1 - 2e-3)).verify()


DEGENERATE: dict[str, Tensor] = {
    "one token": drawn(1, 4),
    "equal tokens": drawn(1, 4).repeat(3, 1),
    "equal entries": torch.full((2, 4), 1.7, dtype=torch.float64),
    "a basis": torch.eye(4, dtype=torch.float64),
}


@pytest.mark.parametrize("norm", ["none", "pre", "pre-rms"])
@pytest.mark.parametrize("distribution", ["sign", "normal", "aligned"])
@pytest.mark.parametrize("tokens", DEGENERATE)
def test_lengths_of_zero_are_proved_again(norm: str, distribution: str, tokens: str) -> None:
    """Tokens that are equal, or equal after the norm or in the heads, give enclosures that contain 0."""
    net = gpt(2, norm=norm, distribution=distribution, biases=distribution == "normal")
    certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=Tokens(DEGENERATE[tokens]), starts=1)
    assert certificate.lower <= (certificate.upper or 0.0)
    assert certificate.verify()


@pytest.mark.parametrize(("seed", "norm"), [(7, "pre"), (10, "none"), (10, "pre-rms"), (33, "none")])
def test_hidden_units_at_the_kink_of_relu_are_proved_again(seed: int, norm: str) -> None:
    """Weights ±η and equal halves of a token make hidden units 0, which rounding moves to either side."""
    kind: dict[str, Any] = {"distribution": "sign", "causal": False, "activation": "relu", "biases": False}
    net, half = gpt(seed, 0.1, norm=norm, **kind), drawn(2, 2, seed=seed)
    for layer in net:
        assert layer.mlp is not None
        layer.mlp.b_in.data.zero_()
    tokens = Tokens(torch.cat([half, half], 1))
    certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=tokens, starts=1)
    assert certificate.lower <= (certificate.upper or 0.0)
    assert certificate.verify()


def test_another_network_is_not_proved() -> None:
    net, tokens = gpt(), Tokens(drawn(3, 4), length=2)
    certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=tokens)
    for other in (gpt(layers=3), gpt(causal=False), gpt(activation="relu")):
        wrong = replace(certificate, comparison=replace(certificate.comparison, surrogate=other))
        with pytest.raises(VerificationError, match="wide block"):
            wrong.verify()


# --- bad input and the command line -----------------------------------------------------------------------------------


def test_tokens_with_equal_entries_are_covered_and_named() -> None:
    """LayerNorm maps them to 0 and is 316 times as steep there, but never reads more than √d."""
    net = gpt(1, 0.05)
    embeddings = torch.cat([drawn(2, 4), torch.zeros(1, 4, dtype=torch.float64)])
    certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=Tokens(embeddings, length=3))
    assert "may move further than the entries" in certificate.notes[0]
    assert certificate.lower <= (certificate.upper or 0.0) < 100.0
    assert certificate.verify()


def test_huge_weights_give_no_number_that_is_no_bound() -> None:
    net = gpt(0, 1e200)
    certificate = dg.certify(net, dg.collapse(net, method="parallel"), inputs=Tokens(drawn(2, 4), length=2))
    assert certificate.upper is None
    with pytest.raises(VerificationError, match="no finite upper bound"):
        certificate.verify()


def test_requests_that_are_not_covered_are_refused() -> None:
    net, tokens = gpt(), Tokens(drawn(3, 4), length=3)
    small = dg.collapse(net, method="parallel")
    given_: dict[str, dict[str, Any]] = {"a box": {"radius": 1.0}, "a ball": {"ball": 1.0}}
    for word, inputs in given_.items():
        with pytest.raises(InputError, match=f"{word} contains the token 0.*slope of a norm is 1/√ε = 316"):
            dg.certify(net, small, **inputs)
    for norm in ("post", "post-rms"):
        post = gpt(norm=norm)
        with pytest.raises(InputError, match=r"after the sublayers \(post\).*a chain of norms"):
            dg.collapse(post, method="parallel")
        with pytest.raises(InputError, match="a chain of norms"):
            dg.certify(post, post, inputs=tokens)
    with pytest.raises(InputError, match="only parallel covers"):
        dg.collapse(net, method="mean-field")
    plain = dg.random_network(2, 1, 4, 0.1, mlp=3, norm="pre")  # no skip around the MLP
    with pytest.raises(InputError, match="no skip connections around each sublayer"):
        dg.collapse(plain, method="parallel")
    for wrong in (net, dg.collapse(gpt(heads=1), method="parallel"), dg.collapse(gpt(mlp=5), method="parallel")):
        with pytest.raises(InputError, match="only against its wide block"):
            dg.certify(net, wrong, inputs=tokens)
    with pytest.raises(InputError, match="norm=pre, the surrogate norm=none"):
        dg.certify(net, dg.collapse(gpt(norm="none"), method="parallel"), inputs=tokens)
    biased = gpt()
    biased[0].position_bias = nn.Parameter(torch.zeros(2, 3, 3, dtype=torch.float64))
    with pytest.raises(InputError, match="position biases"):
        dg.collapse(biased, method="parallel")


def test_the_command_collapses_such_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["depthgauge", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    net, tokens, out = (str(tmp_path / name) for name in ("net.safetensors", "tokens.safetensors", "one.safetensors"))
    kind = ("--layers", "2", "--heads", "2", "--dim", "4", "--norm", "pre", "--mlp", "6", "--mlp-skip", "--causal")
    assert run("random", *kind, "--activation", "gelu", "--out", net) == 0
    save_file({"embeddings": drawn(3, 4), "positions": drawn(3, 4, seed=1)}, tokens)
    command = ("collapse", net, "--method", "parallel")
    assert run(*command, "--tokens", tokens, "--length", "2", "--json", "--out", out) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["methods"] == ["parallel"]
    assert 0 < found["lower"] <= found["upper"] < 6 * found["lower"]
    assert len(dg.load_network(out)) == 1
    assert run(*command) == 2
    assert "contains the token 0" in capsys.readouterr().err
