"""Figure D2: variants switched as Dong et al. switched them, and the files of the figure."""

import csv
import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import save_checkpoint
from tiny_models import tiny_model, tokens
from torch import nn

from depthgauge.checkpoints.interface import attending
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.load import Checkpoint, Placement, find, load_tokenizer, wrap
from depthgauge.checkpoints.switched_off import VARIANTS, Variant, residual_by_depth, switched
from depthgauge.checkpoints.windows import drawn_windows
from depthgauge.errors import InputError
from depthgauge.workflows.reproduce import rank_figure as dong
from depthgauge.workflows.reproduce.draw import reproduce_all
from depthgauge.workflows.reproduce.rank_figure import depth_curves, reproduce_dong


def wide(name: str) -> Checkpoint:
    return wrap(tiny_model(name).double())


def bert_by_hand(block: nn.Module, x: torch.Tensor, skip: bool, mlp: bool) -> torch.Tensor:
    """A BERT block in plain words."""
    attended = block.attention.self(x)[0]
    out = block.attention.output
    between = out.LayerNorm(out.dense(attended) + (x if skip else 0))
    added = block.output.dense(block.intermediate(between)) if mlp else 0
    return block.output.LayerNorm(added + between)


def gpt2_by_hand(block: nn.Module, x: torch.Tensor, skip: bool, mlp: bool) -> torch.Tensor:
    """A GPT-2 block in plain words: norms before the sublayers."""
    mask = torch.zeros(1, 1, 11, 11, dtype=torch.float64)
    mask = mask.masked_fill(torch.ones(11, 11).triu(1).bool(), torch.finfo(torch.float64).min)
    y = block.attn(block.ln_1(x), attention_mask=mask)[0] + (x if skip else 0)
    return y + (block.mlp(block.ln_2(y)) if mlp else 0)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("name", "by_hand"), [("bert", bert_by_hand), ("gpt2", gpt2_by_hand)])
def test_variants_are_what_they_say(name: str, by_hand, variant: Variant) -> None:  # type: ignore[no-untyped-def]
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


def test_without_a_table_entry_it_is_refused() -> None:
    with pytest.raises(InputError, match="'olmo' is not in the table of sublayers"):
        residual_by_depth(wide("olmo"), tokens(), VARIANTS["full"])


def test_samples_are_drawn_from_anywhere_in_the_text(tmp_path: Path) -> None:
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
    monkeypatch.setattr(dong, "TOKENS", 12)
    return tmp_path / "bert"


def test_a_fresh_and_a_trained_model(small: Path) -> None:
    fresh, trained = depth_curves(small, 3, seed=0)
    assert (fresh.model, trained.model) == ("initialised", "trained")
    assert set(fresh.ratios) == set(VARIANTS)
    assert all(ratios.shape == (3, 4) for ratios in trained.ratios.values())
    # Fresh weights are small: without skips nothing is left of the differences, with them nearly everything is.
    assert fresh.ratios["attention only"][:, -1].max() < 1e-9
    assert fresh.ratios["full"][:, -1].min() > 0.1
    again = depth_curves(small, 3, seed=0)
    assert torch.equal(again[0].ratios["full"], fresh.ratios["full"])
    assert not torch.equal(depth_curves(small, 3, seed=1)[0].ratios["full"], fresh.ratios["full"])


def test_the_files(small: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    rows, files = reproduce_dong(
        tmp_path / "out", 2, 0, checkpoint=small, step=lambda done, total, label: steps.append((done, total))
    )
    assert rows == 2 * 4 * 4
    assert [path.name for path in files] == ["D2.png", "D2.svg", "D2.csv", "D2.json", "D2.txt"]
    assert all(path.stat().st_size > 0 for path in files)
    with open(tmp_path / "out" / "D2.csv", encoding="utf-8") as handle:
        found = list(csv.DictReader(handle))
    assert len(found) == rows
    assert {row["variant"] for row in found} == set(VARIANTS)
    settings = json.loads((tmp_path / "out" / "D2.json").read_text())
    assert settings["samples"] == 2
    assert "over 2 samples of 12 tokens" in (tmp_path / "out" / "D2.txt").read_text(encoding="utf-8")
    assert steps[-1] == (8, 8)


def test_reproduce_draws_it_by_name(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dong, "installed_checkpoint", lambda: small)
    (done,) = reproduce_all(["D2"], tmp_path / "out", 2)
    assert (done.figure, done.points, len(done.files)) == ("D2", 32, 5)
    with pytest.raises(InputError, match=r"figure must be one of .* D2, "):
        reproduce_all(["D3"], tmp_path)


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dong, "PACKAGE", "no_such_package_anywhere")
    with pytest.raises(InputError, match="pip install --no-deps no-such-package-anywhere"):
        reproduce_dong(tmp_path)
    with pytest.raises(InputError, match="pip install --no-deps"):
        reproduce_all(["A1", "D2"], tmp_path)  # before anything is computed
    with pytest.raises(InputError, match="models must be a whole number"):
        reproduce_dong(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
