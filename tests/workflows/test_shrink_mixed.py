"""`shrink` on models whose blocks are of different kinds, or have no attention."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import text_of
from tiny_models import some_families
from tiny_shrinks import quick, save

from depthgauge.base.errors import InputError
from depthgauge.cli.main import main

pytestmark = pytest.mark.usefixtures("forked_verification")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(text_of(4000))
    return path


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def generates_alike(model: Any) -> bool:
    """Return whether generation with a cache gives the tokens that it gives without one."""
    ids = torch.tensor([[5, 9, 4, 17]])
    made = [model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=cache) for cache in (True, False)]
    return torch.equal(*made)


MIXED = ["lfm2", "bamba", "qwen3_next", "recurrent_gemma", "nemotron_h"]


@pytest.mark.parametrize("name", some_families(MIXED, ["lfm2", "recurrent_gemma"]))
def test_blocks_of_different_kinds_are_repaired(name: str, tmp_path: Path, text: Path) -> None:
    folder, options = save(tmp_path / "model", name, layers=5), {"remove": 2, "out": tmp_path / "out"}
    if name == "recurrent_gemma":
        with pytest.raises(InputError, match=r"RecurrentGemmaForCausalLM returns no KV cache; .* use --sampled 0"):
            quick(folder, text, **options)
        options["sampled"] = 0.0
    record = quick(folder, text, **options).record
    if name != "qwen3_next":  # all its blocks but the first have experts
        assert record.stages[0].name == "least squares"
    assert record.stages[-1].name == "distillation"
    assert record.reload is not None
    assert not any("without repair" in note for note in record.notes)
    kept = [layer for layer in range(5) if layer not in record.removed]
    dense, made = (find_kinds(loaded(tmp_path / folder)) for folder in ("model", "out"))
    assert made == [dense[layer] for layer in kept]
    assert generates_alike(loaded(tmp_path / "out"))


def find_kinds(model: Any) -> list[list[str]]:
    return [[type(module).__name__ for module in block.modules()] for block in model.base_model.layers]


@pytest.mark.parametrize("name", ["minimax"])
def test_blocks_of_unknown_structure_are_removed_without_repair(name: str, tmp_path: Path, text: Path) -> None:
    said: list[str] = []
    result = quick(save(tmp_path / "model", name), text, remove=1, out=tmp_path / "out", message=said.append)
    (note,) = [note for note in result.record.notes if "without repair" in note]
    assert note in said
    assert result.record.stages == ()
    assert result.record.reload is not None


def test_the_only_attention_is_not_removed(tmp_path: Path, text: Path) -> None:
    """Without attention, LFM2 has no cache that knows the number of tokens."""
    folder = save(tmp_path / "model", "lfm2", layers=3)  # block 1 has attention
    record = quick(folder, text, remove=2, out=tmp_path / "out").record
    assert record.removed == (0, 2)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"] == ["full_attention"]
    (note,) = [note for note in record.notes if note.startswith("the search left out ")]
    assert "cannot be built or run" in note
    with pytest.raises(InputError, match=r"without the blocks \[1\], model cannot be built or run"):
        quick(folder, text, remove_layers="1")
    with pytest.raises(InputError, match=r"no 1 block that can be removed .* the search left out 1 set of blocks"):
        quick(folder, text, remove=1, keep="0,2")


def test_kinds_that_follow_from_the_index_leave_some_sets(tmp_path: Path, text: Path) -> None:
    """Every second block of this Jamba has attention: pairs of neighbours can be removed, and the last block."""
    record = quick(save(tmp_path / "model", "jamba", layers=6), text, remove=2, out=tmp_path / "out").record
    kept = [layer for layer in range(6) if layer not in record.removed]
    assert [layer % 2 for layer in kept] == [0, 1, 0, 1]
    assert any("the configuration gives" in note for note in record.notes)


@pytest.mark.parametrize("name", some_families(["mamba", "mamba2", "falcon_mamba", "rwkv"], ["mamba", "rwkv"]))
def test_state_spaces_are_shrunk(name: str, tmp_path: Path, text: Path) -> None:
    sampled = {"sampled": 0.0} if name == "rwkv" else {}
    record = quick(save(tmp_path / "model", name, layers=4), text, remove=1, out=tmp_path / "out", **sampled).record
    expected = ["distillation"] if name == "rwkv" else ["least squares", "distillation"]
    assert [stage.name for stage in record.stages] == expected
    assert record.reload is not None
    if name != "rwkv":  # its state is not a cache that `generate` can leave out
        assert generates_alike(loaded(tmp_path / "out"))


def test_the_command(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def code(folder: Path, *arguments: str) -> int:
        common = ["--text", str(text), "--window", "16", "--effort", "quick", "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["depthgauge", "shrink", str(folder), *common, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    assert code(save(tmp_path / "lfm2", "lfm2", layers=3), "--remove-layers", "1") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: without the blocks [1], lfm2 cannot be built or run: ")
    assert not (tmp_path / "out").exists()
    assert code(save(tmp_path / "mamba", "mamba"), "--remove", "1") == 0
    assert "least squares" in capsys.readouterr().out
    assert loaded(tmp_path / "out").config.num_hidden_layers == 3
