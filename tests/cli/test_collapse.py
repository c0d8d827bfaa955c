"""`depthgauge collapse` as a user meets it."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthgauge.cli.main import main
from depthgauge.theory.network.files import load_network, save_network
from depthgauge.theory.network.random_networks import random_network
from depthgauge.theory.suprema.network_on_shares import difference_below

KEYS = {
    "method",
    "layers_before",
    "layers_after",
    "radius",
    "upper",
    "lower",
    "printed_bound",
    "printed_applies",
    "seconds",
}


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["depthgauge", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return command


@pytest.fixture
def network(tmp_path):
    network = random_network(layers=3, heads=1, dim=3, eta=0.05, seed=1)
    save_network(network, tmp_path / "net.safetensors")
    return network


@pytest.mark.parametrize("method", ["identity", "last-layer", "parallel", "mean-field", "corrected"])
def test_every_method_writes_its_network_witness_and_document(run, network, method):
    files = ["--out", "s.safetensors", "--witness", "x.safetensors"]
    code, out, err = run("collapse", "net.safetensors", "--method", method, "--radius", "0.5", *files, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert set(document) >= KEYS
    assert document["method"] == method
    assert (document["layers_before"], document["layers_after"]) == (3, 1)
    assert 0 < document["lower"] <= document["upper"]
    surrogate, x = load_network("s.safetensors"), load_file("x.safetensors")["x"]
    assert float(x.abs().max()) <= 0.5
    assert difference_below(network, surrogate, x) == pytest.approx(document["lower"], rel=1e-9)


def test_the_table_is_for_people_and_the_ball_is_a_set_too(run, network):
    code, out, _ = run("collapse", "net.safetensors", "--ball", "1.0", "--effort", "high")
    assert code == 0
    assert "mean-field" in out
    assert "3 layers → 1" in out


def test_every_sequence_of_a_file_of_tokens(run, network, tmp_path):
    embeddings = torch.randn(3, network.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    save_file({"embeddings": embeddings}, tmp_path / "tokens.safetensors")
    code, out, _ = run("collapse", "net.safetensors", "--tokens", "tokens.safetensors", "--length", "4", "--json")
    assert code == 0
    document = json.loads(out)
    assert (document["set"], document["exhaustive"]) == ("tokens", True)
    assert document["about"] == f"3 vectors of width {network.dim}, up to 4 tokens"
    assert 0 < document["lower"] <= document["upper"]
    code, out, _ = run("collapse", "net.safetensors", "--tokens", "tokens.safetensors")
    assert code == 0
    assert "of these tokens" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--radius", "-1"], "radius must be a positive number, got -1.0"),
        (["--radius", "nan"], "radius must be a positive number"),
        (["--radius", "1", "--ball", "1"], "exactly one of radius, ball and inputs, got radius and ball"),
        (["--method", "meanfield"], "did you mean 'mean-field'"),
        (["--effort", "highest"], "effort must be one of"),
        (["--length", "0"], "tokens must be a whole number"),
        (["--tokens", "none.safetensors"], "cannot read tokens from none.safetensors"),
        (["--out", "."], "is a directory"),
    ],
)
def test_bad_requests_end_at_once_with_one_sentence(run, network, arguments, words):
    code, out, err = run("collapse", "net.safetensors", *arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_what_does_not_apply_is_refused_by_name(run, tmp_path):
    causal = random_network(layers=2, heads=1, dim=2, eta=0.1, causal=True)
    save_network(causal, tmp_path / "net.safetensors")
    code, _, err = run("collapse", "net.safetensors", "--method", "mean-field")
    assert code == 2
    assert "causal" in err
    assert "methods that work on it: identity, last-layer, parallel" in err


def test_a_certificate_that_overflows_says_where(run, tmp_path):
    wild = random_network(layers=14, heads=1, dim=2, eta=1.0, distribution="aligned")
    with torch.no_grad():
        for layer in wild:
            layer.value.mul_(1e25)
    save_network(wild, tmp_path / "net.safetensors")
    code, out, err = run("collapse", "net.safetensors", "--method", "identity", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["upper"] is None
    assert 0 < document["lost_at"] < 14
    assert run("collapse", "net.safetensors", "--method", "identity")[1].count("no finite")
