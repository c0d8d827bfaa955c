"""Other tools on shrunk models: mergekit makes the same model from its plan, and peft trains it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from real_models import smollm2
from tiny_checkpoints import save_checkpoint
from tiny_models import tiny_model
from torch import nn

from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Placement, load_config, load_model, load_tokenizer
from depthgauge.surgery.extract import has_layer_lists
from depthgauge.surgery.write_shrunk import mergekit_plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_finetune_a_shrunk_model.py"


@pytest.fixture(scope="module")
def smollm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a directory of float32 weights."""
    folder, placement = tmp_path_factory.mktemp("models") / "SmolLM2", Placement(dtype="float32", device="cpu")
    source = find(smollm2())
    model = load_model(source, load_config(source, placement), placement).model
    del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    load_tokenizer(source, placement).save_pretrained(folder)
    return folder


def merged(source: Path, kept: list[int], out: Path) -> subprocess.CompletedProcess[str]:
    """Run mergekit on the plan for some layers."""
    plan = out.with_suffix(".yaml")
    plan.write_text(mergekit_plan(str(source), "float32", kept), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("mergekit-yaml")), str(plan), str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def read(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.models
def test_mergekit_makes_the_same_model(smollm_folder: Path, tmp_path: Path) -> None:
    kept = [layer for layer in range(30) if layer not in (10, 11, 20)]
    assert merged(smollm_folder, kept, tmp_path / "merged").returncode == 0
    model, made = read(smollm_folder), read(tmp_path / "merged")
    model.model.layers = nn.ModuleList(model.model.layers[layer] for layer in kept)
    model.config.num_hidden_layers = len(kept)
    for index, block in enumerate(model.model.layers):
        block.self_attn.layer_idx = index
    ids = torch.randint(100, 40_000, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(made(ids).logits, model(ids).logits)


def test_models_with_lists_get_no_plan() -> None:
    assert has_layer_lists(tiny_model("gemma3").config)
    assert not has_layer_lists(tiny_model("llama").config)


@pytest.mark.models
def test_mergekit_does_not_shorten_lists_with_an_entry_per_layer(tmp_path: Path) -> None:
    """This is why no plan is written for such models."""
    source = tmp_path / "gemma"
    model = save_checkpoint(source, "gemma3")
    layers = model.config.num_hidden_layers
    assert len(model.config.layer_types) == layers
    merged(source, list(range(layers - 1)), tmp_path / "merged")
    with pytest.raises(ValueError, match=r"layer_types|Unrecognized model"):
        read(tmp_path / "merged")


@pytest.mark.models
def test_a_model_is_fine_tuned(smollm_folder: Path, tmp_path: Path) -> None:
    """The example trains adapters for 20 steps, and the merged model loads with a lower loss."""
    out, text = tmp_path / "tuned", Path(EXAMPLE).parents[1] / "src" / "depthgauge" / "checkpoints" / "text.txt"
    command = [sys.executable, str(EXAMPLE), str(smollm_folder), str(text), "--out", str(out), "--steps", "20"]
    finished = subprocess.run([*command, "--window", "64", "--batch", "2"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("held-out loss"))
    before, after = float(line.split()[2]), float(line.split()[4])
    assert after < before
    assert read(out).config.num_hidden_layers == 30
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "exists; choose another name" in again.stderr
