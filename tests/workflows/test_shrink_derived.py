"""`shrink` on tiny models of families without an entry in the table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_tokenizer, text_of
from tiny_models import some_families, tiny_model
from tiny_shrinks import LAYERS, quick, save

from depthgauge.base.errors import InputError

pytestmark = pytest.mark.usefixtures("forked_verification")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(text_of(4000))
    return path


def in_memory(name: str, folder: Path, layers: int = LAYERS) -> tuple[Any, Any]:
    from transformers import PreTrainedTokenizerFast

    save_tokenizer(folder, special=name in ("modernbert", "mpnet"))
    return tiny_model(name, layers=layers), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", some_families(["granite", "phi", "opt", "bloom", "mpnet"], ["granite", "mpnet"]))
def test_derived_families_are_repaired(name: str, tmp_path: Path, text: Path) -> None:
    model, tokenizer = in_memory(name, tmp_path)
    record = quick(model, text, remove=1, tokenizer=tokenizer).record
    assert record.layers_after == LAYERS - 1
    expected = ["distillation"] if name == "mpnet" else ["least squares", "distillation"]
    assert [stage.name for stage in record.stages] == expected
    assert not any("repair leaves" in note or "without repair" in note for note in record.notes)


def test_experts_are_not_repaired(tmp_path: Path, text: Path) -> None:
    result = quick(save(tmp_path / "model", "mixtral"), text, remove=1, out=tmp_path / "out")
    assert [stage.name for stage in result.record.stages] == ["distillation"]
    assert any(note.startswith("the repair leaves the matrices of the MLP unchanged") for note in result.record.notes)
    assert result.record.reload is not None
    dense = tiny_model("mixtral", layers=LAYERS).state_dict()
    kept = [layer for layer in range(LAYERS) if layer not in result.record.removed]
    for new, old in enumerate(kept):
        for leaf in ("mlp.experts.down_proj", "mlp.experts.gate_up_proj"):
            made = result.model.state_dict()[f"model.layers.{new}.{leaf}"]
            assert torch.equal(made, dense[f"model.layers.{old}.{leaf}"])


def test_a_block_that_cannot_be_removed_stays(tmp_path: Path, text: Path) -> None:
    model, tokenizer = in_memory("modernbert", tmp_path)
    record = quick(model, text, remove=3, tokenizer=tokenizer).record
    assert record.removed == (1, 2, 3)
    assert any("of blocks, such as [0" in note and "without the removed blocks," in note for note in record.notes)
    with pytest.raises(InputError, match=r"gives layers\.0\.attn_norm other weights than layers\.1\.attn_norm has"):
        quick(model, text, remove_layers="0", tokenizer=tokenizer)
